package datalisten

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Without libcrypto a daemon starts only if its settings and its data address do not demand encryption.
func TestDataEncryptionWithoutLibrary(t *testing.T) {
	const far, near = "10.0.0.1:7200", "127.0.0.1:7200"
	value := func(setting string, plaintext bool) int {
		v, ok := dataplane.Encryption(setting, plaintext)
		if !ok {
			t.Fatal(setting)
		}
		return v
	}
	missing := func() error { return errors.New("no libcrypto.so.3: install libssl3") }
	for name, c := range map[string]struct {
		value   int
		address string
		starts  bool
	}{
		"off":                          {value("off", false), far, true},
		"on":                           {value("on", false), far, false},
		"on, loopback":                 {value("on", false), near, true},
		"on, plaintext is permitted":   {value("on", true), far, true},
		"required":                     {value("require", true), far, false},
		"required, loopback":           {value("require", false), near, false},
		"required, loopback over IPv6": {value("require", false), "[::1]:7200", false},
		"on, loopback over IPv6":       {value("on", false), "[::1]:7200", true},
	} {
		err := CheckEncryption(c.value, c.address, missing, slog.New(slog.DiscardHandler))
		if (err == nil) != c.starts || err != nil && !strings.Contains(err.Error(), "libssl3") {
			t.Errorf("%s: %v", name, err)
		}
		if err := CheckEncryption(c.value, c.address, func() error { return nil }, slog.New(slog.DiscardHandler)); err != nil {
			t.Errorf("%s, with the library: %v", name, err)
		}
	}
}
