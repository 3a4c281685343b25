package config

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/go-multierror"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/privilege"
	"github.com/rfaas-go/rfaas/internal/quota"
	"github.com/rfaas-go/rfaas/internal/sandbox"
)

// Executor is what cmd/executor can be told. Sizes are in bytes.
type Executor struct {
	Listen         string `mapstructure:"listen"`
	Advertise      string `mapstructure:"advertise"` // empty: the bound address
	AllowPlaintext bool   `mapstructure:"allow-plaintext"`
	AddressFile    string `mapstructure:"address-file"`
	SecretFile     string `mapstructure:"secret-file"`
	IdentityDir    string `mapstructure:"identity-dir"` // empty: no TLS and no tokens
	AuditFile      string `mapstructure:"audit-file"`   // empty: the log
	HTTPListen     string `mapstructure:"http-listen"`  // of health and metrics; empty: none
	Manager        string `mapstructure:"manager"`      // empty: none

	Port           `mapstructure:",squash"`
	TenantLeases   int   `mapstructure:"tenant-leases"`    // a second; 0: no limit
	TenantReplaces int   `mapstructure:"tenant-replaces"`  // a second; 0: no limit
	TenantUpload   Bytes `mapstructure:"tenant-upload"`    // a second; 0: no limit
	TenantLogLines int   `mapstructure:"tenant-log-lines"` // a second; 0: no limit

	StateDir       string        `mapstructure:"state-dir"` // of the journal; empty: none
	ChargeInterval time.Duration `mapstructure:"charge-interval"`
	LimitUnknown   string        `mapstructure:"limit-unknown"` // admit or refuse

	Cores      Cores  `mapstructure:"cores"`
	ShareCores int    `mapstructure:"share-cores"` // leases that may have the same core
	Memory     Bytes  `mapstructure:"memory"`      // 0: what is available at start
	Providers  string `mapstructure:"providers"`

	VerbsDevice       string `mapstructure:"verbs-device"` // empty: the first usable one
	VerbsPort         int    `mapstructure:"verbs-port"`
	VerbsGIDIndex     int    `mapstructure:"verbs-gid-index"` // -1: choose
	VerbsPKeyIndex    int    `mapstructure:"verbs-pkey-index"`
	VerbsTrafficClass int    `mapstructure:"verbs-traffic-class"`
	VerbsServiceLevel int    `mapstructure:"verbs-service-level"`
	VerbsMTU          int    `mapstructure:"verbs-mtu"` // 0: the port's

	Worker    string `mapstructure:"worker"` // empty: ../libexec/rfaas-worker from the executable
	CodeLimit Bytes  `mapstructure:"code-limit"`
	CodeCache Bytes  `mapstructure:"code-cache"`
	MaxBulk   Bytes  `mapstructure:"max-bulk"`

	WarmPool       int           `mapstructure:"warm-pool"`   // workers in advance, for each provider
	KeepTime       time.Duration `mapstructure:"keep-time"`   // of released leases' workers; 0: they are not kept
	KeepMost       int           `mapstructure:"keep-most"`   // leases whose workers are kept
	MaxWorkers     int           `mapstructure:"max-workers"` // per lease; 0: as many as cores
	LeaseDefault   time.Duration `mapstructure:"lease-default"`
	LeaseMax       time.Duration `mapstructure:"lease-max"`
	LeaseMargin    time.Duration `mapstructure:"lease-margin"`
	LeaseNotice    time.Duration `mapstructure:"lease-notice"`
	HolderFirstUse time.Duration `mapstructure:"holder-first-use"`
	HolderReturn   time.Duration `mapstructure:"holder-return"`
	SpawnTimeout   time.Duration `mapstructure:"spawn-timeout"`
	CallLimit      time.Duration `mapstructure:"call-limit"` // 0: none

	Sandbox          sandbox.Mode  `mapstructure:"sandbox"`
	SandboxPaths     string        `mapstructure:"sandbox-paths"`       // separated by colons
	SandboxEnv       string        `mapstructure:"sandbox-environment"` // separated by commas
	SandboxUIDs      sandbox.Range `mapstructure:"sandbox-uids"`
	SandboxProcesses int           `mapstructure:"sandbox-processes"` // 0: no limit
	SandboxFiles     int           `mapstructure:"sandbox-files"`     // 0: no limit

	User            string        `mapstructure:"user"` // whom an executor of root's becomes; empty: privilege.Find's default
	Separate        bool          `mapstructure:"-"`    // give up all rights once started; programs do, tests of one process do not
	Grace           time.Duration `mapstructure:"grace"`
	Until           Instant       `mapstructure:"until"` // zero: not known
	LogLevel        slog.Level    `mapstructure:"log-level"`
	LogFormat       string        `mapstructure:"log-format"`
	Version         string        `mapstructure:"-"` // of this program
	providersParsed []string
}

// maxWarm bounds the workers that are started in advance: each is a process.
const maxWarm = 1024

// maxKeep bounds how long workers are kept.
const maxKeep = 24 * time.Hour

var executorOptions = slices.Concat([]option{
	{"listen", control.DefaultExecutorAddress, "control address: host:port or unix:PATH"},
	{"advertise", "", "address that clients shall use (default: the bound one)"},
	{"allow-plaintext", "false", "permit control addresses that are not loopback without TLS"},
	{"address-file", "", "write the bound address into this file once ready"},
	{"secret-file", "", "shared secret (default: $RFAAS_SECRET_FILE, $XDG_RUNTIME_DIR/rfaas/secret or ~/.rfaas/secret)"},
	{"identity-dir", "", "directory of rfaas cluster node: this node's certificate, and whose tokens are taken (default: no TLS, no tokens)"},
	{"audit-file", "", "file of JSON lines about grants, releases, kills, drains, refusals and what operators did (default: the log alone)"},
	{"http-listen", "", "address of /healthz, /readyz and /metrics: host:port or unix:PATH (default: none)"},
	{"manager", "", "resource manager to register with: host:port or unix:PATH (default: none)"},
	{"state-dir", "", "directory of the journal, which keeps accounts while the resource manager is away (default: in memory)"},
	{"charge-interval", "1s", "how often leases are charged"},
	{"limit-unknown", "admit", "what to do with a lease when its tenant's limit cannot be looked at: admit (and flag it) or refuse"},
	{"cores", "auto", "what to lend: a count of cores, a list of logical CPUs like 2-5,8-9, or auto for all that this process may use"},
	{"share-cores", "1", "leases that may have the same core; above 1 the node is oversubscribed and calls take turns"},
	{"memory", "auto", "memory to lend, like 16GiB, or auto for what is available at start"},
	{"providers", "auto", "fabrics to offer: auto, shm, verbs or shm,verbs"},
	{"verbs-device", "", "verbs device (default: the first with an active port)"},
	{"verbs-port", "0", "port of the verbs device, 0 for the first active one"},
	{"verbs-gid-index", "-1", "GID index, -1 chooses (RoCE v2 preferred)"},
	{"verbs-pkey-index", "0", "P_Key index"},
	{"verbs-traffic-class", "0", "traffic class, 0 to 255"},
	{"verbs-service-level", "0", "service level, 0 to 15"},
	{"verbs-mtu", "0", "path MTU in bytes, 0 for the port's"},
	{"worker", "", "path of rfaas-worker (default: ../libexec/rfaas-worker beside this program)"},
	{"code-limit", "256MiB", "largest library that may be uploaded"},
	{"code-cache", "1GiB", "memory for uploaded libraries"},
	{"max-bulk", "1GiB", "largest bulk area of one worker"},
	{"warm-pool", "2", "worker processes that wait for a lease, for each fabric, so that it starts faster; they hold no core; 0 for none"},
	{"keep-time", "1m", "how long a released lease's workers are kept, stopped, for its process's next one; they give way to others; 0s for not"},
	{"keep-most", "64", "leases whose workers are kept, the latest ones"},
	{"max-workers", "0", "most workers of one lease, 0 for as many as cores"},
	{"lease-default", "1h", "duration of a lease that names none"},
	{"lease-max", "24h", "longest lease, and longest renewal"},
	{"lease-margin", "500ms", "how long before a lease's end its holder stops using it (at most a tenth of the lease)"},
	{"lease-notice", "30s", "how long before a lease's end its holder is told (at most a third of the lease)"},
	{"holder-first-use", "10s", "how long a granted lease waits for its holder"},
	{"holder-return", "2s", "how long a lease survives a holder that went away"},
	{"spawn-timeout", "10s", "how long starting a lease's workers may take"},
	{"call-limit", "0s", "longest that one call may run before its worker is killed, 0s for no limit; leases may ask for less"},
	{"sandbox", "auto", "confine workers: require (a complete sandbox, or the executor does not start), on (what the node allows; the log names the rest), " +
		"off, or auto (require with identity-dir or as root, else on)"},
	{"sandbox-paths", "", "what workers see read-only besides the system's libraries and programs: absolute paths, separated by colons"},
	{"sandbox-environment", "", "variables of this program that workers keep besides those for computing: names, separated by commas, * at the end for any end"},
	{"sandbox-uids", "1900000000-1900001023", "user and group ids that workers run as, each its own, where the executor is root: FIRST-LAST"},
	{"sandbox-processes", "512", "processes and threads that one worker may have, 0 for no limit"},
	{"user", "", "user, by name or number, that an executor becomes which was started as root (default: rfaas if the node has that user, else 1899999999)"},
	{"sandbox-files", "1024", "open files that each process of a worker may have, 0 for as many as the executor"},
	{"grace", "10s", "how long SIGTERM lets running calls finish"},
	{"until", "", "when this node is wanted back, RFC 3339 or Unix seconds: no lease is longer, and it drains itself a grace before (default: not known)"},
	{"log-level", "info", "debug, info, warn or error"},
	{"log-format", "text", "text or json"},
}, portOptions, []option{
	{"tenant-leases", "2000", "lease requests of one tenant a second, 0 for no limit; after a pause ten seconds' worth at once, as for all rates"},
	{"tenant-replaces", "100", "workers that one tenant may have replaced a second, 0 for no limit"},
	{"tenant-upload", "128MiB", "bytes of libraries that one tenant may upload a second, 0 for no limit"},
	{"tenant-log-lines", "20", "log lines a second about workers of one tenant, 0 for no limit; what exceeds it is counted and dropped"},
})

func executorProgram(version string) program {
	return program{name: "executor", about: "lends this node's cores to functions that are called by remote memory write",
		prefix: "RFAAS_EXECUTOR_", version: version, options: executorOptions}
}

// LoadExecutor reads the executor's settings from its arguments (without the program's name) and environment.
// Errors: ErrDone when the program shall exit with 0, ErrUsage otherwise. What --help and the like print goes to out.
func LoadExecutor(args, environ []string, out io.Writer, version string) (Executor, error) {
	var c Executor
	err := executorProgram(version).load(args, environ, out, &c)
	c.Version = version
	if err == nil {
		c.SecretFile, err = secretFile(c.SecretFile, environ)
	}
	return c, err
}

// secretFile is the setting, or the place that daemons and clients agree on without one.
func secretFile(setting string, environ []string) (string, error) {
	if setting != "" {
		return setting, nil
	}
	return control.SecretPath(func(name string) string {
		value := ""
		for _, kv := range environ {
			if n, v, _ := strings.Cut(kv, "="); n == name {
				value = v
			}
		}
		return value
	})
}

// maxSandboxPaths leaves room for those of LD_LIBRARY_PATH: DP_SANDBOX_PATHS_MAX.
const maxSandboxPaths = 48

// minSandboxFiles is what a worker opens itself, and a little more.
const minSandboxFiles = 64

// SandboxPathList is the setting's paths.
func (c *Executor) SandboxPathList() []string {
	return strings.FieldsFunc(c.SandboxPaths, func(r rune) bool { return r == ':' })
}

// SandboxEnvList is the setting's names.
func (c *Executor) SandboxEnvList() []string {
	return strings.FieldsFunc(c.SandboxEnv, func(r rune) bool { return r == ',' })
}

// ProviderList returns the providers that were asked for by name; nil means auto.
func (c *Executor) ProviderList() []string { return c.providersParsed }

// Logger makes the logger that the settings describe.
func (c *Executor) Logger(w io.Writer) *slog.Logger { return newLogger(w, c.LogFormat, c.LogLevel) }

func (c *Executor) validate() error {
	var v validator
	v.address("listen", c.Listen, c.AllowPlaintext || c.IdentityDir != "")
	v.http(c.HTTPListen)
	if c.Advertise != "" {
		_, err := control.ParseAddress(c.Advertise)
		v.check("advertise", err)
	}
	if c.Manager != "" {
		v.address("manager", c.Manager, c.AllowPlaintext || c.IdentityDir != "")
	}
	c.providersParsed = v.providers(c.Providers)
	if len(c.VerbsDevice) > 63 {
		v.failf("verbs-device: %q has more than 63 characters", c.VerbsDevice)
	}
	v.between("verbs-port", c.VerbsPort, 0, 255)
	v.between("verbs-gid-index", c.VerbsGIDIndex, -1, 1<<15)
	v.between("verbs-pkey-index", c.VerbsPKeyIndex, 0, 1<<15)
	v.between("verbs-traffic-class", c.VerbsTrafficClass, 0, 255)
	v.between("verbs-service-level", c.VerbsServiceLevel, 0, 15)
	if !slices.Contains([]int{0, 256, 512, 1024, 2048, 4096}, c.VerbsMTU) {
		v.failf("verbs-mtu: %d is not 0, 256, 512, 1024, 2048 or 4096", c.VerbsMTU)
	}
	if c.CodeLimit == 0 || c.CodeLimit > c.CodeCache {
		v.failf("code-limit: %v is not between 1 and code-cache (%v)", c.CodeLimit, c.CodeCache)
	}
	if c.MaxBulk > 1<<32 {
		v.failf("max-bulk: %v is above 4GiB", c.MaxBulk)
	}
	v.between("warm-pool", c.WarmPool, 0, maxWarm)
	if c.KeepTime < 0 || c.KeepTime > maxKeep {
		v.failf("keep-time: %v is not in 0s..%v", c.KeepTime, maxKeep)
	}
	v.between("keep-most", c.KeepMost, 0, maxWarm)
	v.between("max-workers", c.MaxWorkers, 0, maxCPU)
	v.positive("lease-default", c.LeaseDefault)
	v.positive("lease-max", c.LeaseMax)
	if c.LeaseDefault > c.LeaseMax {
		v.failf("lease-default: %v is longer than lease-max (%v)", c.LeaseDefault, c.LeaseMax)
	}
	v.positive("lease-margin", c.LeaseMargin)
	v.positive("lease-notice", c.LeaseNotice)
	if _, err := privilege.Find(c.User); err != nil {
		v.failf("%v", err)
	}
	v.between("share-cores", c.ShareCores, 1, 64)
	v.positive("holder-first-use", c.HolderFirstUse)
	v.positive("holder-return", c.HolderReturn)
	v.positive("spawn-timeout", c.SpawnTimeout)
	if c.CallLimit < 0 || c.CallLimit > 0 && c.CallLimit < time.Millisecond {
		v.failf("call-limit: %v is neither 0 nor 1ms or more", c.CallLimit)
	}
	for _, p := range c.SandboxPathList() {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p || p == "/" {
			v.failf("sandbox-paths: %q is no absolute path in its shortest form", p)
		} else if p == "/tmp" || strings.HasPrefix(p, "/tmp/") {
			v.failf("sandbox-paths: %q: every worker has a /tmp of its own", p)
		}
	}
	if n := len(c.SandboxPathList()); n > maxSandboxPaths {
		v.failf("sandbox-paths: %d paths, at most %d", n, maxSandboxPaths)
	}
	for _, name := range c.SandboxEnvList() {
		if name = strings.TrimSuffix(name, "*"); name == "" || strings.ContainsAny(name, "*= \t") {
			v.failf("sandbox-environment: %q is no name of a variable, and no beginning of one before a *", name)
		} else if strings.HasPrefix(name, "RFAAS_") {
			v.failf("sandbox-environment: %q: the settings of rfaas are not for workers", name)
		}
	}
	v.between("sandbox-processes", c.SandboxProcesses, 0, 1<<22)
	if c.SandboxFiles != 0 {
		v.between("sandbox-files", c.SandboxFiles, minSandboxFiles, 1<<20)
	}
	v.port(&c.Port)
	v.between("tenant-leases", c.TenantLeases, 0, mostRate)
	v.between("tenant-replaces", c.TenantReplaces, 0, mostRate)
	v.between("tenant-log-lines", c.TenantLogLines, 0, mostRate)
	if c.TenantUpload > 1<<40 {
		v.failf("tenant-upload: %v is above 1TiB", c.TenantUpload)
	}
	v.positive("grace", c.Grace)
	if c.ChargeInterval < 10*time.Millisecond || c.ChargeInterval > time.Hour {
		v.failf("charge-interval: %v is not in 10ms..1h", c.ChargeInterval)
	}
	v.logFormat(c.LogFormat)
	if c.LimitUnknown != "admit" && c.LimitUnknown != "refuse" {
		v.failf("limit-unknown: %q is neither admit nor refuse", c.LimitUnknown)
	}
	return v.err()
}

// Bounds is what callers may take of the executor. leases is how many one client can have.
func (c *Executor) Bounds(leases int) control.Bounds {
	return c.Port.Bounds(leases, quota.Limits{quota.Leases: c.TenantLeases, quota.Replaces: c.TenantReplaces,
		quota.UploadBytes: int(c.TenantUpload), quota.LogLines: c.TenantLogLines})
}

// validator collects what is wrong, so that one run shows all of it.
type validator struct{ errs *multierror.Error }

func (v *validator) failf(format string, args ...any) {
	v.errs = multierror.Append(v.errs, fmt.Errorf(format, args...))
}

func (v *validator) add(err error) {
	if err != nil {
		v.errs = multierror.Append(v.errs, err)
	}
}

func (v *validator) check(key string, err error) {
	if err != nil {
		v.failf("%s: %w", key, err)
	}
}

func (v *validator) between(key string, n, lo, hi int) {
	if n < lo || n > hi {
		v.failf("%s: %d is not in %d..%d", key, n, lo, hi)
	}
}

func (v *validator) positive(key string, d time.Duration) {
	if d <= 0 {
		v.failf("%s: %v is not above 0", key, d)
	}
}

// providers reads a list of providers; nil means auto.
func (v *validator) providers(list string) []string {
	if list == "auto" {
		return nil
	}
	var names []string
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		if name != "shm" && name != "verbs" {
			v.failf("providers: %q is neither shm nor verbs", name)
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (v *validator) address(key, addr string, plaintext bool) {
	a, err := control.ParseAddress(addr)
	if err == nil {
		err = a.CheckPlaintext(plaintext)
	}
	v.check(key, err)
}

func (v *validator) http(addr string) {
	if addr != "" {
		_, err := control.ParseAddress(addr)
		v.check("http-listen", err)
	}
}

func (v *validator) logFormat(f string) {
	if f != "text" && f != "json" {
		v.failf("log-format: %q is neither text nor json", f)
	}
}

func (v *validator) err() error {
	if v.errs != nil {
		v.errs.ErrorFormat = lines
	}
	return v.errs.ErrorOrNil()
}

// AdvertisedAddress is what clients shall dial: the setting, else the bound address with the host's name in the place
// of a wildcard.
func AdvertisedAddress(setting, bound string) string {
	if setting != "" {
		return setting
	}
	host, port, err := net.SplitHostPort(bound)
	if err != nil {
		return bound
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		if name, err := os.Hostname(); err == nil {
			return net.JoinHostPort(name, port)
		}
	}
	return bound
}
