package config

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/go-multierror"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/privilege"
	"github.com/rfaas-go/rfaas/internal/quota"
	"github.com/rfaas-go/rfaas/internal/sandbox/isolation"
)

// Values of the setting seed-fill.
const (
	SeedFillAll     = "all"
	SeedFillTouched = "touched"
)

// Executor has the settings of cmd/executor. Sizes are in bytes.
type Executor struct {
	Listen         string `mapstructure:"listen"`
	Advertise      string `mapstructure:"advertise"` // empty: the bound address
	AllowPlaintext bool   `mapstructure:"allow-plaintext"`
	AddressFile    string `mapstructure:"address-file"`
	SecretFile     string `mapstructure:"secret-file"`
	IdentityDir    string `mapstructure:"identity-dir"` // empty: no TLS and no tokens
	AuditFile      string `mapstructure:"audit-file"`   // empty: the log
	HTTPListen     string `mapstructure:"http-listen"`  // health and metrics; empty: none
	Manager        string `mapstructure:"manager"`      // empty: none

	Port           `mapstructure:",squash"`
	TenantLeases   int   `mapstructure:"tenant-leases"`    // per second; 0: no limit
	TenantReplaces int   `mapstructure:"tenant-replaces"`  // per second; 0: no limit
	TenantUpload   Bytes `mapstructure:"tenant-upload"`    // per second; 0: no limit
	TenantLogLines int   `mapstructure:"tenant-log-lines"` // per second; 0: no limit

	StateDir       string        `mapstructure:"state-dir"` // of the journal; empty: none
	ChargeInterval time.Duration `mapstructure:"charge-interval"`
	LimitUnknown   string        `mapstructure:"limit-unknown"` // admit or refuse

	Cores       Cores         `mapstructure:"cores"`
	ShareCores  int           `mapstructure:"share-cores"`  // leases that may share a core
	YieldAfter  time.Duration `mapstructure:"yield-after"`  // 0: other programs do not use the lent cores
	YieldMemory Bytes         `mapstructure:"yield-memory"` // 0: a sixteenth of the node's memory with YieldAfter, else it is not watched
	Memory      Bytes         `mapstructure:"memory"`       // 0: memory available at start
	Providers   string        `mapstructure:"providers"`

	DataListen    string `mapstructure:"data-listen"`    // for provider tcp: host:port or host:first-last
	DataAdvertise string `mapstructure:"data-advertise"` // IP address or name; empty: the bound address
	// DataEncryption is "off", "on" or "require".
	DataEncryption string `mapstructure:"data-encryption"`

	OFIProvider string `mapstructure:"ofi-provider"` // of libfabric; empty: tcp, and providers auto leaves ofi out
	OFIDevice   string `mapstructure:"ofi-device"`   // libfabric's domain, for its tcp an IP address; empty: chosen

	VerbsDevice       string `mapstructure:"verbs-device"` // empty: the first usable one
	VerbsPort         int    `mapstructure:"verbs-port"`
	VerbsGIDIndex     int    `mapstructure:"verbs-gid-index"` // -1: choose
	VerbsPKeyIndex    int    `mapstructure:"verbs-pkey-index"`
	VerbsTrafficClass int    `mapstructure:"verbs-traffic-class"`
	VerbsServiceLevel int    `mapstructure:"verbs-service-level"`
	VerbsMTU          int    `mapstructure:"verbs-mtu"` // 0: the port's

	Worker     string `mapstructure:"worker"` // empty: ../libexec/rfaas-worker from the executable
	CodeLimit  Bytes  `mapstructure:"code-limit"`
	CodeCache  Bytes  `mapstructure:"code-cache"`
	TableLimit Bytes  `mapstructure:"table-limit"`
	SeedFill   string `mapstructure:"seed-fill"` // SeedFillAll or SeedFillTouched
	BundleDir  string `mapstructure:"bundle-dir"`
	MaxBulk    Bytes  `mapstructure:"max-bulk"`

	Pool           int           `mapstructure:"pool"`        // pooled workers for each provider
	CacheAwake     time.Duration `mapstructure:"cache-awake"` // how long released workers stay awake before they are frozen
	CacheTime      time.Duration `mapstructure:"cache-time"`  // how long released workers are cached; 0: not cached
	CacheMost      int           `mapstructure:"cache-most"`  // leases whose workers are cached
	MaxWorkers     int           `mapstructure:"max-workers"` // per lease; 0: as many as cores
	LeaseDefault   time.Duration `mapstructure:"lease-default"`
	LeaseMax       time.Duration `mapstructure:"lease-max"`
	LeaseMargin    time.Duration `mapstructure:"lease-margin"`
	LeaseNotice    time.Duration `mapstructure:"lease-notice"`
	ClientFirstUse time.Duration `mapstructure:"client-first-use"`
	ClientReturn   time.Duration `mapstructure:"client-return"`
	AgentGrace     time.Duration `mapstructure:"agent-grace"`
	SpawnTimeout   time.Duration `mapstructure:"spawn-timeout"`
	CallLimit      time.Duration `mapstructure:"call-limit"` // 0: none
	InitLimit      time.Duration `mapstructure:"init-limit"` // 0: CallLimit

	Sandbox          isolation.Mode  `mapstructure:"sandbox"`
	SandboxPaths     string          `mapstructure:"sandbox-paths"`       // separated by colons
	SandboxEnv       string          `mapstructure:"sandbox-environment"` // separated by commas
	SandboxUIDs      isolation.Range `mapstructure:"sandbox-uids"`
	SandboxProcesses int             `mapstructure:"sandbox-processes"` // 0: no limit
	SandboxFiles     int             `mapstructure:"sandbox-files"`     // 0: no limit
	Runtimes         Runtimes        `mapstructure:"runtimes"`

	User            string        `mapstructure:"user"` // user that an executor started by root becomes; empty: default of privilege.Find
	Separate        bool          `mapstructure:"-"`    // give up privileges after the start; set by programs, not by tests in one process
	Grace           time.Duration `mapstructure:"grace"`
	Until           Instant       `mapstructure:"until"` // zero: not known
	LogLevel        slog.Level    `mapstructure:"log-level"`
	LogFormat       string        `mapstructure:"log-format"`
	Version         string        `mapstructure:"-"` // of this program
	providersParsed []string
}

// maxPool bounds the pooled workers: each is a process.
const maxPool = 1024

// maxKeep bounds how long workers are cached.
const maxKeep = 24 * time.Hour

// maxAwake bounds how long released workers stay awake.
const maxAwake = time.Second

// minYield and maxYield bound yield-after. The kernel counts the time of a CPU in ticks of 10 ms.
const (
	minYield = 200 * time.Millisecond
	maxYield = time.Minute
)

var executorOptions = slices.Concat([]option{
	{"listen", control.DefaultExecutorAddress, "control address: host:port or unix:PATH"},
	{"advertise", "", "address that clients dial (default: the bound address)"},
	{"allow-plaintext", "false", "allow control addresses other than loopback and unix sockets without TLS"},
	{"address-file", "", "write the bound address into this file once ready"},
	{"secret-file", "", "shared secret (default: $RFAAS_SECRET_FILE, $XDG_RUNTIME_DIR/rfaas/secret or ~/.rfaas/secret)"},
	{"identity-dir", "", "directory from rfaas cluster node: this node's certificate and the keys that it trusts (default: no TLS, no tokens)"},
	{"audit-file", "", "file of JSON lines about grants, releases, kills, drains, refusals and operators' calls (default: the log only)"},
	{"http-listen", "", "address of /healthz, /readyz and /metrics: host:port or unix:PATH (default: none)"},
	{"manager", "", "resource manager to register with: host:port, several with the same ledger as host:port,host:port, or unix:PATH (default: none)"},
	{"state-dir", "", "directory of the journal, which keeps accounts while the resource manager is unreachable (default: in memory)"},
	{"charge-interval", "1s", "how often leases are charged; a killed executor leaves at most this time of each lease uncharged"},
	{"limit-unknown", "admit", "what to do with a lease if its tenant's limit cannot be read: admit (and flag it) or refuse"},
	{"cores", "auto", "cores to lend: a count of cores, a list of logical CPUs like 2-5,8-9, or auto for all that this process may use"},
	{"share-cores", "1", "leases that may share a core; above 1 the node is oversubscribed and calls take turns"},
	{"yield-after", "0s", "lend cores that other programs of the node may use: workers have idle priority, and when other programs use half of a lent core for this long, its leases end and it is not lent until they stop; 0s if the cores are the executor's alone"},
	{"yield-memory", "auto", "lend memory that other programs of the node may need: when less than this is available on the node, or little is free and programs wait for it, the executor ends cached workers, then the youngest leases; auto: a sixteenth of the node's memory with yield-after, else the memory is not watched"},
	{"memory", "auto", "memory to lend, like 16GiB, or auto for the memory available at start"},
	{"providers", "auto", "providers to offer: auto (shm, verbs if there is a device, and ofi if ofi-provider is set), or a list of shm, verbs, tcp and ofi"},
	{"data-listen", "127.0.0.1:0", "address for the data of calls on provider tcp: host:port, or host:first-last for the first free port of a range"},
	{"data-advertise", "", "IP address or host name to which clients of provider tcp connect (default: the bound address)"},
	{"data-encryption", "on", "encryption of the data of calls, and of connections to the resource manager's memory, on provider tcp: on (unless both ends are " +
		"loopback, or allow-plaintext is set and the peer does not ask for it), require (always; other peers are refused) or off"},
	{"ofi-provider", "", "provider of libfabric that provider ofi uses: cxi, efa, opx, psm3 or tcp (default: tcp, if providers names ofi)"},
	{"ofi-device", "", "domain of libfabric's provider, as fi_info shows it; for tcp this node's IP address (default: the first domain; for tcp 127.0.0.1)"},
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
	{"table-limit", "auto", "memory that the tables, bundles and seeds of one tenant may use, of the memory that the executor lends (auto: three quarters)"},
	{"seed-fill", SeedFillAll, "what to read of a seed that workers use while it is copied from another executor: all of it, so that they soon depend on no other node, or only the pages that workers touch: all or touched"},
	{"bundle-dir", "/dev/shm", "directory in which the executor makes its own directory for unpacked bundles; their files count as memory (table-limit)"},
	{"max-bulk", "1GiB", "largest bulk area of one worker"},
	{"pool", "2", "pooled workers for each provider: processes that wait for a lease, so that it starts faster; they use no core; 0 for none"},
	{"cache-awake", "1ms", "how long cached workers stay awake before they are frozen; the released lease pays for that time; a lease that the same process opens meanwhile starts at once; 0s to freeze them at the release"},
	{"cache-time", "1m", "how long released workers are cached for the next lease of the same user with the same terms (on verbs and ofi: of the same process); the executor ends them if another lease needs their cores; 0s for no cache"},
	{"cache-most", "64", "most released leases whose workers are cached"},
	{"max-workers", "0", "most workers of one lease, 0 for as many as cores"},
	{"lease-default", "1h", "duration of a lease whose request names none"},
	{"lease-max", "24h", "longest lease, and longest renewal"},
	{"lease-margin", "500ms", "how long before the end of a lease its client stops using it (at most a tenth of the lease)"},
	{"lease-notice", "30s", "how long before the end of a lease its client is notified (at most a third of the lease)"},
	{"client-first-use", "10s", "how long a granted lease waits for its client's first use"},
	{"client-return", "2s", "how long a lease waits for its client or agent to come back after the control connection broke"},
	{"agent-grace", "1m", "how long the lease waits instead of client-return while a worker is connected to the client's process, for example after the end of its agent; the lease is charged"},
	{"spawn-timeout", "10s", "how long starting a lease's workers may take"},
	{"call-limit", "0s", "longest that one call may run before its worker is killed, 0s for no limit; leases may ask for less"},
	{"init-limit", "0s", "longest that the init call of a worker or seed may run, 0s for call-limit; the limits of leases do not concern it"},
	{"sandbox", "auto", "confine workers: require (the executor does not start without a complete sandbox), on (use what the node supports and log the rest), " +
		"off, or auto (require with identity-dir or as root, else on)"},
	{"sandbox-paths", "", "paths that workers can read besides the system's libraries and programs: absolute, separated by colons"},
	{"sandbox-environment", "", "environment variables that workers keep besides those for computing: names, separated by commas; * at the end matches any suffix"},
	{"sandbox-uids", "1900000000-1900001023", "user and group ids of workers, a different one for each, if the executor is root: FIRST-LAST"},
	{"sandbox-processes", "512", "processes and threads that one worker may have, 0 for no limit"},
	{"user", "", "user, by name or number, that an executor becomes after root has started it (default: rfaas if the node has that user, else 1899999999)"},
	{"sandbox-files", "1024", "open files that each process of a worker may have, 0 for as many as the executor may have"},
	{"runtimes", "", `Python interpreters that start before the workers of a lease: {"NAME": {"python": PATH, "preload": [MODULE, ...], "paths": [DIRECTORY, ...]}, ...}`},
	{"grace", "10s", "how long running calls may take to finish after SIGTERM"},
	{"until", "", "when this node is wanted back, RFC 3339 or Unix seconds: no lease lasts longer, and the executor drains one grace before it (default: not known)"},
	{"log-level", "info", "debug, info, warn or error"},
	{"log-format", "text", "text or json"},
}, portOptions, []option{
	{"tenant-leases", "2000", "lease requests of one tenant per second, 0 for no limit; for all rates, ten seconds' worth at once after a pause"},
	{"tenant-replaces", "100", "worker replacements of one tenant per second, 0 for no limit"},
	{"tenant-upload", "128MiB", "bytes of libraries that one tenant may upload per second, 0 for no limit"},
	{"tenant-log-lines", "20", "log lines per second about workers of one tenant, 0 for no limit; further lines are counted and dropped"},
})

func executorProgram(version string) program {
	return program{name: "executor", about: "lends this node's cores to functions that are called by remote memory write",
		prefix: "RFAAS_EXECUTOR_", version: version, options: executorOptions}
}

// LoadExecutor reads the executor's settings from its arguments (without the program's name) and environment. It prints
// the output of --help and similar flags to out. The error is ErrDone if the program should exit with 0, and ErrUsage
// otherwise.
func LoadExecutor(args, environ []string, out io.Writer, version string) (Executor, error) {
	var c Executor
	err := executorProgram(version).load(args, environ, out, &c)
	c.Version = version
	if err == nil {
		err = errors.Join(absolute(&c.IdentityDir, &c.AuditFile, &c.StateDir), absoluteSocket(&c.Manager))
	}
	if err == nil {
		c.SecretFile, err = secretFile(c.SecretFile, environ)
	}
	return c, err
}

// absolute makes paths absolute and brings them into their shortest form, so that everything that opens a file uses the same name. It leaves
// empty settings as they are.
func absolute(paths ...*string) (err error) {
	for _, p := range paths {
		if *p != "" && err == nil {
			*p, err = filepath.Abs(*p)
		}
	}
	return err
}

// absoluteSocket does the same for the path of a unix socket's address, and leaves other addresses as they are.
func absoluteSocket(address *string) error {
	path, ok := strings.CutPrefix(*address, "unix:")
	if !ok {
		return nil
	}
	err := absolute(&path)
	*address = "unix:" + path
	return err
}

// secretFile returns the setting, or the default path that daemons and clients share.
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

// maxSandboxPaths is DP_SANDBOX_PATHS_MAX less the paths of LD_LIBRARY_PATH.
const maxSandboxPaths = 48

// minSandboxFiles is a little more than what a worker opens itself.
const minSandboxFiles = 64

// SandboxPathList returns the paths of the setting sandbox-paths.
func (c *Executor) SandboxPathList() []string {
	return strings.FieldsFunc(c.SandboxPaths, func(r rune) bool { return r == ':' })
}

// SandboxEnvList returns the names of the setting sandbox-environment.
func (c *Executor) SandboxEnvList() []string {
	return strings.FieldsFunc(c.SandboxEnv, func(r rune) bool { return r == ',' })
}

// ProviderList returns the providers of the setting; nil means auto.
func (c *Executor) ProviderList() []string { return c.providersParsed }

// Logger returns the logger of the settings.
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
		v.addresses("manager", c.Manager, c.AllowPlaintext || c.IdentityDir != "")
	}
	c.providersParsed = v.providers(c.Providers, "shm", "verbs", "tcp", "ofi")
	v.ofi(c)
	v.dataListen(c.DataListen, c.DataAdvertise, c.Listen, c.DataEncryption, c.AllowPlaintext, c.providersParsed)
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
	v.between("pool", c.Pool, 0, maxPool)
	if c.CacheAwake < 0 || c.CacheAwake > maxAwake {
		v.failf("cache-awake: %v is not in 0s..%v", c.CacheAwake, maxAwake)
	}
	if c.YieldAfter != 0 && (c.YieldAfter < minYield || c.YieldAfter > maxYield) {
		v.failf("yield-after: %v is neither 0s nor in %v..%v", c.YieldAfter, minYield, maxYield)
	}
	if c.CacheTime < 0 || c.CacheTime > maxKeep {
		v.failf("cache-time: %v is not in 0s..%v", c.CacheTime, maxKeep)
	}
	v.between("cache-most", c.CacheMost, 0, maxPool)
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
	v.between("share-cores", c.ShareCores, 1, 1024)
	v.positive("client-first-use", c.ClientFirstUse)
	v.positive("client-return", c.ClientReturn)
	v.positive("agent-grace", c.AgentGrace)
	v.positive("spawn-timeout", c.SpawnTimeout)
	if c.CallLimit < 0 || c.CallLimit > 0 && c.CallLimit < time.Millisecond {
		v.failf("call-limit: %v is neither 0 nor 1ms or more", c.CallLimit)
	}
	if c.InitLimit < 0 || c.InitLimit > 0 && c.InitLimit < time.Millisecond {
		v.failf("init-limit: %v is neither 0 nor 1ms or more", c.InitLimit)
	}
	for _, p := range c.SandboxPathList() {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p || p == "/" {
			v.failf("sandbox-paths: %q is not an absolute path in its shortest form", p)
		} else if p == "/tmp" || strings.HasPrefix(p, "/tmp/") {
			v.failf("sandbox-paths: %q: every worker has its own private /tmp", p)
		}
	}
	if n := len(c.SandboxPathList()); n > maxSandboxPaths {
		v.failf("sandbox-paths: %d paths, at most %d", n, maxSandboxPaths)
	}
	for _, name := range c.SandboxEnvList() {
		if name = strings.TrimSuffix(name, "*"); name == "" || strings.ContainsAny(name, "*= \t") {
			v.failf("sandbox-environment: %q is neither the name of a variable nor the beginning of one with a * at the end", name)
		} else if strings.HasPrefix(name, "RFAAS_") {
			v.failf("sandbox-environment: %q: workers cannot have settings of rfaas", name)
		}
	}
	v.between("sandbox-processes", c.SandboxProcesses, 0, 1<<22)
	if c.SandboxFiles != 0 {
		v.between("sandbox-files", c.SandboxFiles, minSandboxFiles, 1<<20)
	}
	v.runtimes(c.Runtimes)
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
	if c.SeedFill != SeedFillAll && c.SeedFill != SeedFillTouched {
		v.failf("seed-fill: %q is neither %s nor %s", c.SeedFill, SeedFillAll, SeedFillTouched)
	}
	if c.LimitUnknown != "admit" && c.LimitUnknown != "refuse" {
		v.failf("limit-unknown: %q is neither admit nor refuse", c.LimitUnknown)
	}
	return v.err()
}

// Bounds returns the limits for callers of the executor. leases is how many leases one client can have.
func (c *Executor) Bounds(leases int) control.Bounds {
	return c.Port.Bounds(leases, quota.Limits{quota.Leases: c.TenantLeases, quota.Replaces: c.TenantReplaces,
		quota.UploadBytes: int(c.TenantUpload), quota.LogLines: c.TenantLogLines})
}

// validator collects all errors, so that one run shows all of them.
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

// providers parses a list of providers; nil means auto.
func (v *validator) providers(list string, known ...string) []string {
	if list == "auto" {
		return nil
	}
	var names []string
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		if !slices.Contains(known, name) {
			v.failf("providers: %q is not one of %s", name, strings.Join(known, ", "))
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// dataListen checks the address and the encryption of data connections on provider tcp against the control address.
func (v *validator) dataListen(data, advertise, listen, encryption string, plaintext bool, providers []string) {
	if !slices.Contains([]string{"off", "on", "require"}, encryption) {
		v.failf("data-encryption: %q is not one of off, on, require", encryption)
	}
	host, _, _, err := control.ParsePortRange(data)
	v.check("data-listen", err)
	if err != nil || !slices.Contains(providers, "tcp") {
		return
	}
	if ip, err := netip.ParseAddr(host); advertise == "" && (host == "" || err == nil && ip.IsUnspecified()) {
		v.failf("data-listen: %s is not an address that peers can connect to: set data-advertise to this node's address or name", data)
	}
	local := control.Address{Network: "tcp", Target: net.JoinHostPort(host, "0")}.Local()
	if a, err := control.ParseAddress(listen); err == nil && local && !a.Local() {
		v.failf("data-listen: %s is loopback, but other nodes ask at %s: set data-listen to an address of this node's network, or to 0.0.0.0 with data-advertise", data, a)
	}
	if encryption == "off" && !local && !plaintext {
		v.failf("data-listen: %s is not loopback, and data-encryption is off: set it to on or require; on a trusted network, --allow-plaintext allows data in the clear", data)
	}
}

// ofiProviders are the providers of libfabric that provider ofi knows.
var ofiProviders = []string{"tcp", "cxi", "efa", "opx", "psm3"}

// OffersOFI reports whether the settings ask for provider ofi.
func (c *Executor) OffersOFI() bool {
	if c.providersParsed == nil {
		return c.OFIProvider != ""
	}
	return slices.Contains(c.providersParsed, "ofi")
}

// OFI returns libfabric's provider and its device.
func (c *Executor) OFI() (provider, device string) { return cmp.Or(c.OFIProvider, "tcp"), c.OFIDevice }

// ofi checks the settings of provider ofi, which does not encrypt.
func (v *validator) ofi(c *Executor) {
	if c.OFIProvider != "" && !slices.Contains(ofiProviders, c.OFIProvider) {
		v.failf("ofi-provider: %q is not one of %s", c.OFIProvider, strings.Join(ofiProviders, ", "))
		return
	}
	provider, device := c.OFI()
	if len(device) > 50 || strings.ContainsFunc(device, func(r rune) bool { return r <= ' ' || r > '~' }) {
		v.failf("ofi-device: %q is not a name of at most 50 characters without spaces", device)
		return
	}
	loopback := provider == "tcp" && device == ""
	if provider == "tcp" && device != "" {
		addr, err := netip.ParseAddr(device)
		if err != nil || addr.Zone() != "" {
			v.failf("ofi-device: %q is not an IP address, which ofi-provider tcp needs", device)
			return
		}
		loopback = addr.IsLoopback()
	}
	switch {
	case !c.OffersOFI():
	case c.DataEncryption == "require":
		v.failf("data-encryption: require, but provider ofi does not encrypt: leave ofi out of providers, or set data-encryption to off on a trusted network")
	case c.DataEncryption == "on" && !loopback && !c.AllowPlaintext:
		v.failf("providers: ofi does not encrypt the data of calls, and data-encryption is on: use tcp, or on a trusted network set data-encryption to off")
	}
}

func (v *validator) address(key, addr string, plaintext bool) {
	a, err := control.ParseAddress(addr)
	if err == nil {
		err = a.CheckPlaintext(plaintext)
	}
	v.check(key, err)
}

func (v *validator) addresses(key, addr string, plaintext bool) {
	list, err := control.ParseAddresses(addr)
	if err == nil {
		err = list[0].CheckPlaintext(plaintext)
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

// AdvertisedAddress returns the address that clients dial: the setting, or the bound address with the host's name
// instead of a wildcard.
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
