package executor

import (
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// encryption returns the dataplane.Encrypt value of the settings. Tests may leave the setting empty, which means off.
func encryption(s *config.Executor) int {
	value, _ := dataplane.Encryption(s.DataEncryption, s.AllowPlaintext)
	return value
}

// checkEncryption returns an error if the settings demand encryption for clients that connect to an address, and workers cannot encrypt.
// load loads the library for it.
func checkEncryption(s *config.Executor, address string, load func() error, log *slog.Logger) error {
	value := encryption(s)
	if value == dataplane.EncryptOff {
		return nil
	}
	err := load()
	if err == nil {
		return nil
	}
	at, perr := netip.ParseAddrPort(address)
	if value == dataplane.EncryptRequire || value == dataplane.EncryptOn && (perr != nil || !at.Addr().IsLoopback()) {
		return fmt.Errorf("data-encryption %s for clients that connect to %s: %w", s.DataEncryption, address, err)
	}
	log.Warn("workers cannot encrypt the data of calls; clients that require it are refused", "address", address, "error", err)
	return nil
}
