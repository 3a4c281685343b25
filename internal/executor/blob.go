package executor

import (
	"fmt"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/invoke"
)

// providerID is the number of a provider in blobs, 0 for an unknown name.
func providerID(name string) invoke.Provider {
	switch name {
	case "shm":
		return invoke.ProviderSHM
	case "verbs":
		return invoke.ProviderVerbs
	case "tcp":
		return invoke.ProviderTCP
	case "ofi":
		return invoke.ProviderOFI
	}
	return 0
}

// checkBlob checks a client's channel blob, so that a client's mistake gets its answer before anything is started. Its
// queue-pair part is the provider's own: the worker checks that. spare: the request is for spare workers. On verbs, the blob is then that of an agent's
// queue pair (invoke.RoleBroker), or has none, because the workers connect later.
func (e *Executor) checkBlob(b []byte, provider string, spare bool) error {
	blob, err := invoke.UnmarshalChannelBlob(b)
	if err != nil {
		return err
	}
	late := spare && provider == dataplane.Verbs
	brokered := late && blob.Role == invoke.RoleBroker
	switch most := uint64(e.cfg.Settings.MaxBulk); {
	case blob.Role != invoke.RoleClient && !brokered:
		return fmt.Errorf("role %d, want %d (client)", blob.Role, invoke.RoleClient)
	case blob.Provider != providerID(provider):
		return fmt.Errorf("made for provider %d (%v), the lease asks for %s (%d)", uint8(blob.Provider), blob.Provider,
			provider, uint8(providerID(provider)))
	case late && !brokered && len(blob.QueuePair) > 0:
		return fmt.Errorf("it has a queue pair of a client, but spare workers of provider %s connect only when a lease takes them: send only the sizes", provider)
	case (!late || brokered) && len(blob.QueuePair) == 0:
		return fmt.Errorf("it has no queue pair, which only requests for spare workers on verbs may omit")
	case blob.Bulk > most:
		return fmt.Errorf("bulk area of %d bytes, this executor allows %d (its max-bulk)", blob.Bulk, most)
	}
	return nil
}
