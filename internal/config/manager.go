package config

import (
	"io"
	"log/slog"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
)

// Manager is what cmd/resource-manager can be told.
type Manager struct {
	Listen         string        `mapstructure:"listen"`
	AllowPlaintext bool          `mapstructure:"allow-plaintext"`
	AddressFile    string        `mapstructure:"address-file"`
	SecretFile     string        `mapstructure:"secret-file"`
	Heartbeat      time.Duration `mapstructure:"heartbeat"`
	LogLevel       slog.Level    `mapstructure:"log-level"`
	LogFormat      string        `mapstructure:"log-format"`
}

var managerOptions = []option{
	{"listen", control.DefaultManagerAddress, "control address: host:port or unix:PATH"},
	{"allow-plaintext", "false", "permit a control address that is not loopback, without TLS"},
	{"address-file", "", "write the bound address into this file once ready"},
	{"secret-file", "", "shared secret (default: $RFAAS_SECRET_FILE, $XDG_RUNTIME_DIR/rfaas/secret or ~/.rfaas/secret)"},
	{"heartbeat", "1s", "how often executors shall report; three missed ones make an executor dead"},
	{"log-level", "info", "debug, info, warn or error"},
	{"log-format", "text", "text or json"},
}

// LoadManager reads the resource manager's settings; see LoadExecutor.
func LoadManager(args, environ []string, out io.Writer, version string) (Manager, error) {
	var c Manager
	p := program{name: "resource-manager", about: "knows which executors lend cores",
		prefix: "RFAAS_MANAGER_", version: version, options: managerOptions}
	err := p.load(args, environ, out, &c)
	if err == nil {
		c.SecretFile, err = secretFile(c.SecretFile, environ)
	}
	return c, err
}

// Logger makes the logger that the settings describe.
func (c *Manager) Logger(w io.Writer) *slog.Logger { return newLogger(w, c.LogFormat, c.LogLevel) }

func (c *Manager) validate() error {
	var v validator
	v.address("listen", c.Listen, c.AllowPlaintext)
	if c.Heartbeat < 10*time.Millisecond || c.Heartbeat > time.Hour {
		v.failf("heartbeat: %v is not in 10ms..1h", c.Heartbeat)
	}
	v.logFormat(c.LogFormat)
	return v.err()
}
