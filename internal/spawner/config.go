package spawner

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// SocketFD is the descriptor of the socket to the executor.
const SocketFD = 3

// Config says how a spawner starts workers. The executor passes it as arguments, which hold no secret.
type Config struct {
	Worker    string // path of rfaas-worker
	Version   string // required version of the worker program; "": any
	Mode      sandbox.Mode
	Paths     []string // what workers see read-only besides the system's directories
	Bundles   string   // directory with the bundles of leases, of which each worker sees its own; "": none
	UIDs      sandbox.Range
	UIDFile   string   // lock file shared by the executors of a node, so that no user id is used twice; "": not shared
	Processes uint32   // most processes and threads of a worker, 0: no limit
	Idle      bool     // workers have idle priority
	OpenFiles uint32   // most open files of each process of a worker, 0: as many as the spawner
	Files     []string // files that the executor may ask to read, directories of such files, sockets that it may connect to
	Append    []string // files that the executor may ask to append to
	UID, GID  uint32   // user that the executor becomes; 0: it keeps the spawner's user
	Renew     string   // program that renews the node's certificate, with the argument RenewArgument and the directory Identity; "": none
	Identity  string   // the node's identity directory
	Remove    []string // files to remove when the executor asks for it at its end: sockets, the address file
	Without   uint32   // parts of the sandbox that tests leave out
	OwnGroups string   // file that names the executor's control groups; "": /proc/self/cgroup. For tests
	Runtimes  []Runtime
}

// Runtime is an interpreter that a zygote of its own starts before it clones workers. It has the position of its zygote, from 1.
type Runtime struct {
	Name    string
	Python  string   // absolute path of the interpreter
	Preload []string // names of modules that it imports
	Paths   []string // directories in which it finds modules
}

// Arguments returns the program's arguments for this configuration. Parse is the inverse.
func (c *Config) Arguments() []string {
	args := []string{"--worker=" + c.Worker, "--expect=" + c.Version, "--sandbox=" + c.Mode.String(), "--uids=" + c.UIDs.String(), "--uid-file=" + c.UIDFile,
		fmt.Sprintf("--processes=%d", c.Processes), fmt.Sprintf("--open-files=%d", c.OpenFiles), fmt.Sprintf("--without=%d", c.Without), "--own-groups=" + c.OwnGroups,
		fmt.Sprintf("--executor-uid=%d", c.UID), fmt.Sprintf("--executor-gid=%d", c.GID)}
	if c.Bundles != "" {
		args = append(args, "--bundles="+c.Bundles)
	}
	if c.Renew != "" {
		args = append(args, "--renew="+c.Renew, "--identity="+c.Identity)
	}
	if c.Idle {
		args = append(args, "--idle")
	}
	for _, p := range c.Paths {
		args = append(args, "--path="+p)
	}
	for _, f := range c.Files {
		args = append(args, "--file="+f)
	}
	for _, f := range c.Append {
		args = append(args, "--append="+f)
	}
	for _, f := range c.Remove {
		args = append(args, "--remove="+f)
	}
	for i := range c.Runtimes {
		args = append(args, c.Runtimes[i].arguments()...)
	}
	return args
}

// list is a flag that may be repeated.
type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(v string) error { *l = append(*l, v); return nil }

// errUsage ends the program with status 2. Parse has already printed the reason.
var errUsage = errors.New("wrong usage")

// Parse reads the program's arguments. It prints errors, and the usage on request, to out. The error is errUsage, or
// flag.ErrHelp if help was asked for.
func Parse(args []string, out io.Writer) (c Config, err error) {
	f := flag.NewFlagSet("rfaas-spawner", flag.ContinueOnError)
	f.SetOutput(out)
	f.Usage = func() {
		fmt.Fprintln(out, "rfaas-spawner starts workers for an executor. The executor starts it; do not start it by hand.")
		f.PrintDefaults()
	}
	f.StringVar(&c.Worker, "worker", "", "`path` of rfaas-worker")
	f.StringVar(&c.Version, "expect", "", "`version` that rfaas-worker must have, empty for any")
	c.Mode = sandbox.Require
	f.Func("sandbox", "off, on or require (default)", func(v string) error { return c.Mode.UnmarshalText([]byte(v)) })
	f.Func("uids", "user ids for workers: `FIRST-LAST`", func(v string) error { return c.UIDs.UnmarshalText([]byte(v)) })
	f.StringVar(&c.UIDFile, "uid-file", "", "`path` of the file in which the node's executors lock their user ids")
	processes := f.Uint("processes", 0, "processes and threads of one worker, 0 for no limit")
	openFiles := f.Uint("open-files", 0, "open files of each process of a worker, 0 for as many as the spawner")
	without := f.Uint("without", 0, "sandbox parts to leave out, for tests")
	f.StringVar(&c.OwnGroups, "own-groups", "", "`path` of a file to read instead of /proc/self/cgroup, for tests")
	f.StringVar(&c.Bundles, "bundles", "", "`directory` of the bundles of leases, of which each worker sees its own")
	f.StringVar(&c.Renew, "renew", "", "`path` of the program that renews the node's certificate, empty for none")
	f.StringVar(&c.Identity, "identity", "", "`directory` of the node's identity, for --renew")
	f.BoolVar(&c.Idle, "idle", false, "give workers idle priority, so that they never delay other programs")
	f.Var((*list)(&c.Paths), "path", "`path` that workers see read-only (repeatable)")
	f.Var((*list)(&c.Files), "file", "`path` of a file, a directory of files, or a socket, that the executor may ask to read or to connect to (repeatable)")
	f.Var((*list)(&c.Append), "append", "`path` of a file that the executor may ask to append to (repeatable)")
	uid := f.Uint("executor-uid", 0, "user that the executor becomes, 0 for the spawner's own")
	gid := f.Uint("executor-gid", 0, "group that the executor becomes")
	f.Var((*list)(&c.Remove), "remove", "`path` of a file to remove at the end (repeatable)")
	last := &Runtime{} // the flags that follow --runtime describe it
	f.Func("runtime", "`name` of a runtime (repeatable)", func(v string) error {
		c.Runtimes = append(c.Runtimes, Runtime{Name: v})
		last = &c.Runtimes[len(c.Runtimes)-1]
		return nil
	})
	f.Func("python", "`path` of the interpreter of the last runtime", func(v string) error { last.Python = v; return nil })
	f.Func("preload", "`module` that the last runtime imports (repeatable)", func(v string) error { last.Preload = append(last.Preload, v); return nil })
	f.Func("module-path", "`directory` in which the last runtime finds modules (repeatable)", func(v string) error { last.Paths = append(last.Paths, v); return nil })
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return c, err
		}
		return c, errUsage
	}
	c.Processes, c.OpenFiles, c.Without = uint32(*processes), uint32(*openFiles), uint32(*without)
	c.UID, c.GID = uint32(*uid), uint32(*gid)
	switch {
	case f.NArg() > 0:
		fmt.Fprintf(out, "rfaas-spawner: unknown argument %q\n", f.Arg(0))
	case c.Worker == "":
		fmt.Fprintln(out, "rfaas-spawner: --worker is missing")
	case *uid >= 1<<32-1 || *gid >= 1<<32-1:
		fmt.Fprintln(out, "rfaas-spawner: --executor-uid or --executor-gid is not a user or group")
	case *processes > 1<<31-1 || *openFiles > 1<<31-1 || *without > wire.PartAll|wire.WithoutReturn:
		fmt.Fprintln(out, "rfaas-spawner: --processes --open-files or --without is too large")
	default:
		return c, nil
	}
	return c, errUsage
}

// zygoteArguments returns the arguments of rfaas-worker for the zygote at a position.
func (s *Spawner) zygoteArguments(at int) []string {
	c := &s.cfg
	args := []string{"zygote"}
	if c.Bundles != "" {
		args = append(args, "--bundles="+c.Bundles)
	}
	if at > 0 {
		args = append(args, c.Runtimes[at-1].arguments()...)
	}
	if c.Idle {
		args = append(args, "--idle")
	}
	if c.Mode == sandbox.Off {
		return args
	}
	args = append(args, "--sandbox")
	if s.fixedCPUs {
		args = append(args, "--fixed-cpus")
	}
	if c.Without != 0 {
		args = append(args, fmt.Sprintf("--without=%d", c.Without))
	}
	if c.OpenFiles != 0 {
		args = append(args, fmt.Sprintf("--files=%d", c.OpenFiles))
	}
	paths := c.Paths
	if at > 0 {
		paths = append(slices.Clip(paths), c.Runtimes[at-1].visible()...)
	}
	for _, p := range paths {
		args = append(args, "--path="+p)
	}
	return args
}

// arguments returns those of the spawner and of the zygote, without what its workers see.
func (r *Runtime) arguments() []string {
	args := []string{"--runtime=" + r.Name, "--python=" + r.Python}
	for _, m := range r.Preload {
		args = append(args, "--preload="+m)
	}
	for _, p := range r.Paths {
		args = append(args, "--module-path="+p)
	}
	return args
}

// visible returns the paths that workers must see besides the system's: those of modules, and the installation of an interpreter that is not
// the system's. The worker program refuses an interpreter that is not in DIRECTORY/bin, so this adds nothing for one.
func (r *Runtime) visible() []string {
	real, err := filepath.EvalSymlinks(r.Python)
	if err != nil || strings.HasPrefix(real, "/usr/") {
		return r.Paths
	}
	bin := filepath.Dir(real)
	if prefix := filepath.Dir(bin); filepath.Base(bin) == "bin" && prefix != "/" {
		return append(slices.Clip(r.Paths), prefix)
	}
	return r.Paths
}

// lacks names the missing parts of a complete sandbox, given those that the zygote supports and its text about the
// others. It returns "" if the sandbox is complete.
func (c *Config) lacks(parts uint32, missing string) string {
	if c.Mode == sandbox.Off {
		return ""
	}
	if parts&wire.PartUID != 0 && c.UIDs.N == 0 {
		parts &^= wire.PartUID
		missing = strings.TrimPrefix(missing+"; user ids: no range is set", "; ")
	}
	if parts&wire.PartAll == wire.PartAll {
		return ""
	}
	if missing == "" {
		missing = fmt.Sprintf("parts %#x of %#x", parts, wire.PartAll)
	}
	return missing
}

// checkSandbox refuses a zygote whose workers would not have the required sandbox, or would run as root. It sets
// z.missing.
func (c *Config) checkSandbox(z *zygote) error {
	z.missing = c.lacks(z.parts, z.missing)
	switch {
	case z.missing == "":
		return nil
	case c.Mode == sandbox.Require:
		return fmt.Errorf("a complete sandbox is required, and this node cannot give it: %s (docs/operations.md says how to fix each part; "+
			"--sandbox=on starts with the parts that work)", z.missing)
	case z.parts&wire.PartUID == 0 && os.Geteuid() == 0:
		return fmt.Errorf("%w: %s (start the executor as another user, or with CAP_SYS_ADMIN, CAP_SETUID and CAP_SETGID)", errRootWorker, z.missing)
	}
	return nil
}

// errRootWorker means that a worker would run as root, which a sandbox does not allow: Landlock and a system call
// filter alone would hardly confine root.
var errRootWorker = errors.New("workers would run as root")

// SameVersion returns an error if a program has another version than the executor, since the messages between the two
// change with the version. A program that was built without a version matches all.
func SameVersion(ours, theirs string) error {
	const edited = "-dirty" // git's suffix of a modified clone, in which the programs may be built at different times
	if ours == "" || strings.TrimSuffix(ours, edited) == strings.TrimSuffix(theirs, edited) || unversioned(ours) || unversioned(theirs) {
		return nil
	}
	if theirs == "" {
		theirs = "older than 0.1"
	}
	return otherVersion("it is version %s, this executor %s", theirs, ours)
}

func unversioned(version string) bool { return version == "unknown" || version == "devel" }

// otherVersion returns an error of class connection, so that clients try another executor.
func otherVersion(format string, args ...any) error {
	return &wire.Error{Status: wire.StatusProtocol, Text: fmt.Sprintf(format, args...) + ": install both of one version, then restart the executor"}
}
