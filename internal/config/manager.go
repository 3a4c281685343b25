package config

import (
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/quota"
)

// Manager has the settings of cmd/resource-manager.
type Manager struct {
	Listen         string        `mapstructure:"listen"`
	AllowPlaintext bool          `mapstructure:"allow-plaintext"`
	AddressFile    string        `mapstructure:"address-file"`
	SecretFile     string        `mapstructure:"secret-file"`
	HTTPListen     string        `mapstructure:"http-listen"` // empty: none
	HTTPTokenFile  string        `mapstructure:"http-token-file"`
	HTTPCert       string        `mapstructure:"http-cert"` // empty: from identity-dir
	HTTPKey        string        `mapstructure:"http-key"`
	IdentityDir    string        `mapstructure:"identity-dir"` // empty: no TLS and no tokens
	AuditFile      string        `mapstructure:"audit-file"`   // empty: the log
	Heartbeat      time.Duration `mapstructure:"heartbeat"`
	Executors      int           `mapstructure:"executors"`
	NodeExecutors  int           `mapstructure:"node-executors"`
	NodeMemory     Bytes         `mapstructure:"node-memory"`
	StateDir       string        `mapstructure:"state-dir"`      // empty: accounts in memory only
	EtcdEndpoints  string        `mapstructure:"etcd-endpoints"` // empty: the ledger is in state-dir
	EtcdPrefix     string        `mapstructure:"etcd-prefix"`
	EtcdCA         string        `mapstructure:"etcd-ca"`
	EtcdCert       string        `mapstructure:"etcd-cert"`
	EtcdKey        string        `mapstructure:"etcd-key"`
	LedgerKeep     time.Duration `mapstructure:"ledger-keep"`
	Tariff         string        `mapstructure:"tariff"`
	Currency       string        `mapstructure:"currency"`
	TenantCores    string        `mapstructure:"tenant-cores"`
	AttachAttempts int           `mapstructure:"attach-attempts"`
	TenantAttached int           `mapstructure:"tenant-attached"`
	Providers      string        `mapstructure:"providers"`
	DataListen     string        `mapstructure:"data-listen"`     // for provider tcp: host:port or host:first-last
	DataAdvertise  string        `mapstructure:"data-advertise"`  // IP address or name; empty: the bound address
	DataEncryption string        `mapstructure:"data-encryption"` // "off", "on" or "require"
	VerbsDevice    string        `mapstructure:"verbs-device"`
	VerbsPort      int           `mapstructure:"verbs-port"`
	VerbsGIDIndex  int           `mapstructure:"verbs-gid-index"`
	LogLevel       slog.Level    `mapstructure:"log-level"`
	LogFormat      string        `mapstructure:"log-format"`
	Port           `mapstructure:",squash"`
	TenantAttaches int `mapstructure:"tenant-attaches"` // per second; 0: no limit

	providersParsed []string
	tariffParsed    accounting.Tariff
	limitsParsed    accounting.Limits
	Version         string `mapstructure:"-"` // of this program
}

var managerOptions = slices.Concat([]option{
	{"listen", control.DefaultManagerAddress, "control address: host:port or unix:PATH"},
	{"allow-plaintext", "false", "permit control addresses that are not loopback without TLS"},
	{"address-file", "", "write the bound address into this file once ready"},
	{"secret-file", "", "shared secret (default: $RFAAS_SECRET_FILE, $XDG_RUNTIME_DIR/rfaas/secret or ~/.rfaas/secret)"},
	{"http-listen", "", "address of the page, JSON at /api/v1 and metrics, all read-only: host:port or unix:PATH (default: none)"},
	{"http-token-file", "", "token that http-listen requires for data of tenants, except on a unix socket; created if missing (default: http-token beside the secret)"},
	{"http-cert", "", "certificate of the HTTPS page, PEM with its chain, instead of the one in identity-dir; loaded again when it changes"},
	{"http-key", "", "its private key, PEM, mode 0600"},
	{"identity-dir", "", "directory from rfaas cluster node: this node's certificate and the keys that it trusts (default: no TLS, no tokens)"},
	{"audit-file", "", "file of JSON lines about executors that register and deregister, refusals and operators' calls (default: the log only)"},
	{"heartbeat", "1s", "how often executors report; an executor that misses three reports is silent"},
	{"executors", "16384", "most executors at a time; each uses about 1.1 KiB of memory"},
	{"node-executors", "64", "most executors that one node certificate may have registered at a time"},
	{"node-memory", "64MiB", "most memory of the resource manager that the executors of one node certificate may use together"},
	{"state-dir", "", "directory of the ledger (default: accounts in memory, lost when the program ends)"},
	{"etcd-endpoints", "", "etcd for the ledger, host:port,host:port; resource managers with the same etcd-prefix serve one at a time (default: the ledger is in state-dir)"},
	{"etcd-prefix", "/rfaas", "beginning of all keys in etcd"},
	{"etcd-ca", "", "certificates to check etcd with, PEM (default: plain text, for loopback or with allow-plaintext)"},
	{"etcd-cert", "", "certificate of this resource manager for etcd, PEM"},
	{"etcd-key", "", "its private key, PEM"},
	{"ledger-keep", "9600h", "how long records of single ended leases are kept in the ledger, 0s for ever; bills keep their usage"},
	{"tariff", "", "prices, like core-hour=0.02,gib-hour=0.001 (see docs/operations.md); items without a price are free"},
	{"currency", "", "currency on bills"},
	{"tenant-cores", "", "most cores that each tenant may have at a time, like ann=64,*=16 (*: tenants that are not named; default: no limits)"},
	{"attach-attempts", "8", "connections to the manager's memory that are made at a time; one tenant or node may use a quarter; more wait"},
	{"tenant-attached", "4096", "connections to the board that one tenant may have, one for each process that looks for executors"},
	{"providers", "auto", "providers through which the manager's memory can be reached: auto (shm, and verbs if there is a device), or a list of shm, verbs and tcp"},
	{"data-listen", "127.0.0.1:0", "address for connections to the manager's memory on provider tcp: host:port, or host:first-last for the first free port of a range"},
	{"data-advertise", "", "IP address or host name to which executors and clients connect for data-listen (default: the bound address)"},
	{"data-encryption", "on", "encryption of connections to the manager's memory on provider tcp: on (unless both ends are loopback, or allow-plaintext is set " +
		"and the peer does not ask for it), require (always; other peers are refused) or off"},
	{"verbs-device", "", "verbs device (default: the first with an active port)"},
	{"verbs-port", "0", "port of the verbs device, 0 for the first active one"},
	{"verbs-gid-index", "-1", "GID index, -1 chooses (RoCE v2 preferred)"},
	{"log-level", "info", "debug, info, warn or error"},
	{"log-format", "text", "text or json"},
}, portOptions, []option{
	{"tenant-attaches", "200", "clients of one tenant that may attach to the board per second, 0 for no limit; ten seconds' worth at once after a pause"},
})

func managerProgram(version string) program {
	return program{name: "resource-manager", about: "tracks the executors that lend cores, and keeps the accounts of tenants",
		prefix: "RFAAS_MANAGER_", version: version, options: managerOptions}
}

// LoadManager reads the resource manager's settings; see LoadExecutor.
func LoadManager(args, environ []string, out io.Writer, version string) (Manager, error) {
	var c Manager
	err := managerProgram(version).load(args, environ, out, &c)
	c.Version = version
	if err == nil {
		err = absolute(&c.IdentityDir, &c.AuditFile, &c.StateDir, &c.EtcdCA, &c.EtcdCert, &c.EtcdKey)
	}
	if err == nil {
		c.SecretFile, err = secretFile(c.SecretFile, environ)
	}
	if err == nil && c.HTTPTokenFile == "" {
		c.HTTPTokenFile = filepath.Join(filepath.Dir(c.SecretFile), "http-token")
	}
	return c, err
}

// maxExecutors is the largest size of a board, in executors.
const maxExecutors = 1 << 20

// ProviderList returns the providers that were asked for by name; nil means auto.
func (c *Manager) ProviderList() []string { return c.providersParsed }

// EtcdList returns the addresses of etcd.
func (c *Manager) EtcdList() []string {
	var list []string
	for part := range strings.SplitSeq(c.EtcdEndpoints, ",") {
		list = append(list, strings.TrimSpace(part))
	}
	return list
}

// checkEtcd checks the settings of etcd.
func (c *Manager) checkEtcd(v *validator) {
	if (c.EtcdCert == "") != (c.EtcdKey == "") || c.EtcdCert != "" && c.EtcdCA == "" {
		v.failf("etcd-cert: %q, etcd-key: %q, etcd-ca: %q: set etcd-cert and etcd-key together, and only with etcd-ca", c.EtcdCert, c.EtcdKey, c.EtcdCA)
	}
	if c.EtcdEndpoints == "" {
		return
	}
	if !strings.HasPrefix(c.EtcdPrefix, "/") || len(c.EtcdPrefix) < 2 || len(c.EtcdPrefix) > 256 {
		v.failf("etcd-prefix: %q does not begin with / and a name, or has more than 256 bytes", c.EtcdPrefix)
	}
	for _, endpoint := range c.EtcdList() {
		a, err := control.ParseAddress(endpoint)
		switch {
		case err != nil || a.Network != "tcp":
			v.failf("etcd-endpoints: %q is not host:port", endpoint)
		case c.EtcdCA == "" && !a.Local() && !c.AllowPlaintext:
			v.failf("etcd-endpoints: %s is not loopback: set etcd-ca, or on a trusted network allow-plaintext", endpoint)
		}
	}
}

// Prices returns the tariff.
func (c *Manager) Prices() accounting.Tariff { return c.tariffParsed }

// TenantLimits returns the largest numbers of cores of tenants.
func (c *Manager) TenantLimits() accounting.Limits { return c.limitsParsed }

// Logger makes the logger that the settings describe.
func (c *Manager) Logger(w io.Writer) *slog.Logger { return newLogger(w, c.LogFormat, c.LogLevel) }

// Bounds returns the limits for callers of the manager.
func (c *Manager) Bounds() control.Bounds {
	return c.Port.Bounds(0, quota.Limits{quota.Attaches: c.TenantAttaches})
}

func (c *Manager) here() error {
	return here(c.providersParsed, c.DataListen, place{"identity-dir", c.IdentityDir, opensIdentity}, place{"state-dir", c.StateDir, canMake},
		place{"audit-file", c.AuditFile, canAppend}, place{"address-file", c.AddressFile, canReplace}, place{"secret-file", c.SecretFile, canHaveSecret})
}

func (c *Manager) validate() error {
	var v validator
	v.address("listen", c.Listen, c.AllowPlaintext || c.IdentityDir != "")
	if c.HTTPListen != "" {
		v.address("http-listen", c.HTTPListen, c.AllowPlaintext || c.IdentityDir != "" || c.HTTPCert != "")
	}
	if (c.HTTPCert == "") != (c.HTTPKey == "") {
		v.failf("http-cert: %q, http-key: %q: set both or neither", c.HTTPCert, c.HTTPKey)
	}
	if c.Heartbeat < 10*time.Millisecond || c.Heartbeat > time.Hour {
		v.failf("heartbeat: %v is not in 10ms..1h", c.Heartbeat)
	}
	v.between("executors", c.Executors, 1, maxExecutors)
	v.between("node-executors", c.NodeExecutors, 1, maxExecutors)
	if c.NodeMemory < 1<<20 {
		v.failf("node-memory: %v is less than 1MiB", c.NodeMemory)
	}
	c.checkEtcd(&v)
	if c.LedgerKeep != 0 && c.LedgerKeep < 24*time.Hour {
		v.failf("ledger-keep: %v is neither 0s nor at least 24h", c.LedgerKeep)
	}
	v.port(&c.Port)
	v.between("tenant-attaches", c.TenantAttaches, 0, mostRate)
	v.between("attach-attempts", c.AttachAttempts, 1, 1024)
	v.between("tenant-attached", c.TenantAttached, 1, 1<<20)
	var err error
	c.tariffParsed, err = accounting.ParseTariff(c.Currency, c.Tariff)
	v.check("tariff", err)
	c.limitsParsed, err = accounting.ParseLimits(c.TenantCores)
	v.check("tenant-cores", err)
	c.providersParsed = v.providers(c.Providers, "shm", "verbs", "tcp")
	v.dataListen(c.DataListen, c.DataAdvertise, c.Listen, c.DataEncryption, c.AllowPlaintext, c.providersParsed)
	if len(c.VerbsDevice) > 63 {
		v.failf("verbs-device: %q has more than 63 characters", c.VerbsDevice)
	}
	v.between("verbs-port", c.VerbsPort, 0, 255)
	v.between("verbs-gid-index", c.VerbsGIDIndex, -1, 1<<15)
	v.logFormat(c.LogFormat)
	return v.err()
}
