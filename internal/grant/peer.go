package grant

import (
	"fmt"

	"google.golang.org/grpc/peer"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// checkWorkers returns an error if this process must not connect to an address in the blobs of workers on tcp. p sent the blobs. For provider
// tcp, h is the home of the executor. Malformed blobs are left to the client library, which refuses them.
func (cand *Candidate) checkWorkers(op string, p *peer.Peer, workers ...Worker) (h control.Home, err error) {
	if cand.Provider != "tcp" {
		return control.Home{}, nil
	}
	h = control.ListOwnAddresses().Home(p)
	for i := range workers {
		if err = cand.checkBlob(op, h, workers[i].Blob); err != nil {
			break
		}
	}
	return h, err
}

func (cand *Candidate) checkBlob(op string, h control.Home, blob []byte) error {
	for _, a := range dataplane.ChannelAddresses(blob) {
		if why := h.Refuse("executor", a.Addr()); why != "" {
			return fail(op, dataplane.StatusConnection, "executor %s names %v as the address of its workers, which %s: set data-advertise of the executor",
				cand.named(), a, why)
		}
	}
	return nil
}

// named returns the candidate's address and node for messages.
func (cand *Candidate) named() string { return fmt.Sprintf("%s on node %q", cand.Address, cand.Node) }
