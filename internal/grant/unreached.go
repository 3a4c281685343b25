package grant

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// unreached is an executor that has granted the lease, but to whose workers the client could not or must not connect.
type unreached struct {
	address string
	err     error
}

// giveUp records that the executor at an address must not be asked again, and why.
func (p *Pending) giveUp(address string, err error) {
	p.unreached = append(slices.Clip(p.unreached), unreached{address, err})
	p.last = nil
}

func (p *Pending) gaveUp(address string) bool {
	return slices.ContainsFunc(p.unreached, func(u unreached) bool { return u.address == address })
}

// nobody returns the error of a lease for which no candidate is left. It names each executor that granted the lease, but whose
// workers could not be reached.
func (p *Pending) nobody() error {
	last, others := p.last, slices.Clone(p.unusable)
	for i, u := range p.unreached {
		if last == nil && i == len(p.unreached)-1 {
			last = u.err
		} else {
			others = append(others, u.err)
		}
	}
	if last == nil {
		last = fail("lease", dataplane.StatusBusy, "no executor is left to ask")
	}
	return withUnusable(last, others)
}

// Beyond returns a copy of p that asks only executors that p has not asked. h is the lease that p was granted. st and reason say why the
// client could not connect to its workers. They come from the client and may be wrong.
func (p *Pending) Beyond(h *Held, st dataplane.Status, reason string) (*Pending, error) {
	const op = "connect to the workers"
	if p.current < 0 {
		return nil, fail(op, dataplane.StatusInvalid, "the lease was not granted to this agent, but adopted")
	}
	q := *p
	q.candidates, q.refused = slices.Clip(p.candidates), maps.Clone(p.refused) // a faulty client may continue two searches from one lease
	q.granted = false
	const text = "executor %s granted the lease, but this node cannot connect to its workers: %s"
	switch {
	case st == dataplane.StatusUnsupported: // the settings of data encryption: the reason names the remedy
		q.giveUp(h.Address, fail(op, st, text, h.named(), reason))
	case st == dataplane.StatusBadBlob, st == dataplane.StatusProtocol:
		q.giveUp(h.Address, fail(op, dataplane.StatusConnection, text+": check that client and executor have the same version", h.named(), reason))
	default:
		q.giveUp(h.Address, fail(op, dataplane.StatusConnection, text+": %s", h.named(), reason, h.remedy()))
	}
	return &q, nil
}

// remedy says what to do if the client cannot connect to the workers.
func (h *Held) remedy() string {
	for i := range h.Workers {
		for _, a := range dataplane.ChannelAddresses(h.Workers[i].Blob) {
			return remedy(h.home, a.Addr())
		}
	}
	return "see the log of the executor"
}

// remedy says what to do if this process cannot connect to the data address of an executor whose home is h.
func remedy(h control.Home, data netip.Addr) string {
	if h.IP.IsValid() && !h.Here && h.IP != data && data.IsPrivate() && !h.IP.IsPrivate() {
		return "that address is private, and the executor is reached at " + h.IP.String() + " for control messages: address translation (NAT) is not " +
			"supported, so set data-advertise of the executor to an address that clients can reach"
	}
	return "open the executor's data-listen port in the firewalls between the nodes, or set data-advertise of the executor to an address that clients can reach"
}
