package executor

import (
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// encryption returns the dataplane.Encrypt value of the settings. Tests may leave the setting empty, which means off.
func encryption(s *config.Executor) int {
	value, _ := dataplane.Encryption(s.DataEncryption, s.AllowPlaintext)
	return value
}
