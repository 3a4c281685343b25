package config

import (
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// Issuer has the settings of `rfaas cluster serve`.
type Issuer struct {
	Dir         string        `mapstructure:"dir"`
	Listen      string        `mapstructure:"listen"`
	Hosts       string        `mapstructure:"hosts"`
	Reserved    string        `mapstructure:"reserved"`
	NodeLife    time.Duration `mapstructure:"node-life"`
	Tenants     string        `mapstructure:"tenants"` // empty: no tokens by MUNGE
	TokenLife   time.Duration `mapstructure:"token-life"`
	MungeSocket string        `mapstructure:"munge-socket"`
	AuditFile   string        `mapstructure:"audit-file"` // empty: the log
	LogLevel    slog.Level    `mapstructure:"log-level"`
	LogFormat   string        `mapstructure:"log-format"`

	hostsParsed   []string
	reserved      []string
	tenantsParsed identity.Tenants
}

var issuerOptions = []option{
	{"dir", "", "directory of the cluster's keys (default: $RFAAS_CLUSTER_DIR or ~/.rfaas/cluster)"},
	{"listen", "127.0.0.1:7466", "address: host:port"},
	{"hosts", "", "names and addresses at which nodes and users reach the service, like service,10.0.0.1; the first one stands in codes (default: this host's name)"},
	{"reserved", "", "further names and addresses that no node may choose itself, like the resource manager's; codes that name a node can have them"},
	{"node-life", "2160h", "how long certificates of nodes are valid; nodes renew them when two thirds are left"},
	{"tenants", "", "tenants of users who ask for tokens by MUNGE, like ann=physics,1005=chem,@climate=climate,*=u-%u; the first match counts; @ stands " +
		"before a group, * for all users with ids from 1000, %u is the user's name and %g that of the user's primary group (default: no tokens by MUNGE)"},
	{"token-life", "24h", "how long tokens by MUNGE are valid; agents renew them when a third is left"},
	{"munge-socket", "", "socket of munged (default: that of unmunge)"},
	{"audit-file", "", "file of JSON lines about certificates, tokens and refusals (default: the log only)"},
	{"log-level", "info", "debug, info, warn or error"},
	{"log-format", "text", "text or json"},
}

// minNodeLife is the shortest life of a certificate that leaves a daemon time for several attempts to renew it.
const minNodeLife = 10 * time.Minute

func issuerProgram(version string) program {
	return program{name: "rfaas cluster serve", about: "gives certificates to nodes and tokens to users; it has the cluster's keys", prefix: "RFAAS_ISSUER_",
		version: version, options: issuerOptions}
}

// LoadIssuer reads the issuer's settings from flags, their environment variables and a file; see LoadExecutor. dir is the default of the
// setting dir, and host that of hosts.
func LoadIssuer(args []string, getenv func(string) string, out io.Writer, version, dir, host string) (Issuer, error) {
	p := issuerProgram(version)
	p.options = slices.Clone(p.options)
	var environ []string
	for i, o := range p.options {
		switch o.key {
		case "dir":
			p.options[i].value = dir
		case "hosts":
			p.options[i].value = host
		}
		if value := getenv(p.envName(o.key)); value != "" {
			environ = append(environ, p.envName(o.key)+"="+value)
		}
	}
	var c Issuer
	err := p.load(args, environ, out, &c)
	return c, err
}

// IssuerUsage describes the settings of the issuer.
func IssuerUsage() Usage {
	p := issuerProgram("")
	return Usage{p.name, p.about, p.otherSources(), p.flags()}
}

// HostList returns the names and addresses at which the issuer is reached.
func (c *Issuer) HostList() []string { return c.hostsParsed }

// ReservedList returns further names and addresses that no node may choose.
func (c *Issuer) ReservedList() []string { return c.reserved }

// TenantRules returns the tenants of users.
func (c *Issuer) TenantRules() identity.Tenants { return c.tenantsParsed }

// Logger makes the logger that the settings describe.
func (c *Issuer) Logger(w io.Writer) *slog.Logger { return newLogger(w, c.LogFormat, c.LogLevel) }

// opensCluster returns an error if a directory does not have a cluster's keys.
func opensCluster(dir string) error {
	_, err := identity.OpenCluster(dir)
	return err
}

func (c *Issuer) here() error {
	return here(nil, "", place{"dir", c.Dir, opensCluster}, place{"audit-file", c.AuditFile, canAppend})
}

func (c *Issuer) validate() error {
	var v validator
	v.address("listen", c.Listen, true)
	if a, err := control.ParseAddress(c.Listen); err == nil && a.Network == "unix" {
		v.failf("listen: %q is a unix socket, want host:port", c.Listen)
	}
	list := func(key, text string) (all []string) {
		for h := range strings.SplitSeq(text, ",") {
			if h = strings.TrimSpace(h); h != "" {
				all = append(all, h)
				if _, _, err := net.SplitHostPort(h); err == nil {
					v.failf("%s: %q has a port, want names and addresses without (listen has the issuer's port)", key, h)
				}
			}
		}
		return all
	}
	c.hostsParsed, c.reserved = list("hosts", c.Hosts), list("reserved", c.Reserved)
	if len(c.hostsParsed) == 0 {
		v.failf("hosts: %q is empty", c.Hosts)
	}
	if c.NodeLife < minNodeLife || c.NodeLife > 10*366*24*time.Hour {
		v.failf("node-life: %v is not in %v..10 years: daemons ask for a new certificate once a minute at most, and need time for several attempts", c.NodeLife, minNodeLife)
	}
	if c.TokenLife < time.Minute || c.TokenLife > 366*24*time.Hour {
		v.failf("token-life: %v is not in 1m..8784h", c.TokenLife)
	}
	var err error
	c.tenantsParsed, err = identity.ParseTenants(c.Tenants)
	v.check("tenants", err)
	v.logFormat(c.LogFormat)
	return v.err()
}
