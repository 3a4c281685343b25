package executor

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/config"
)

// Without libcrypto an executor starts only if its settings and its data address do not demand encryption.
func TestDataEncryptionWithoutLibrary(t *testing.T) {
	const far, near = "10.0.0.1:7200", "127.0.0.1:7200"
	missing := func() error { return errors.New("no libcrypto.so.3: install libssl3") }
	for name, c := range map[string]struct {
		settings config.Executor
		address  string
		starts   bool
	}{
		"off":                          {config.Executor{DataEncryption: "off"}, far, true},
		"on":                           {config.Executor{DataEncryption: "on"}, far, false},
		"on, loopback":                 {config.Executor{DataEncryption: "on"}, near, true},
		"on, plaintext is permitted":   {config.Executor{DataEncryption: "on", AllowPlaintext: true}, far, true},
		"required":                     {config.Executor{DataEncryption: "require", AllowPlaintext: true}, far, false},
		"required, loopback":           {config.Executor{DataEncryption: "require"}, near, false},
		"required, loopback over IPv6": {config.Executor{DataEncryption: "require"}, "[::1]:7200", false},
		"on, loopback over IPv6":       {config.Executor{DataEncryption: "on"}, "[::1]:7200", true},
	} {
		err := checkEncryption(&c.settings, c.address, missing, slog.New(slog.DiscardHandler))
		if (err == nil) != c.starts || err != nil && !strings.Contains(err.Error(), "libssl3") {
			t.Errorf("%s: %v", name, err)
		}
		if err := checkEncryption(&c.settings, c.address, func() error { return nil }, slog.New(slog.DiscardHandler)); err != nil {
			t.Errorf("%s, with the library: %v", name, err)
		}
	}
}
