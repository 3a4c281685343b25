package datalisten

import (
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// CheckEncryption returns an error if a dataplane.Encrypt value demands encryption for peers that connect to an address, and this node
// cannot encrypt. load loads the library for it.
func CheckEncryption(value int, address string, load func() error, log *slog.Logger) error {
	if value == dataplane.EncryptOff {
		return nil
	}
	err := load()
	if err == nil {
		return nil
	}
	at, perr := netip.ParseAddrPort(address)
	if value == dataplane.EncryptRequire || value == dataplane.EncryptOn && (perr != nil || !at.Addr().IsLoopback()) {
		return fmt.Errorf("data-encryption for peers that connect to %s: %w", address, err)
	}
	log.Warn("data connections cannot be encrypted; peers that require it are refused", "address", address, "error", err)
	return nil
}
