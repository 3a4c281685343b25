package grant

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"google.golang.org/grpc/peer"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// home is the address at which this process reaches an executor for control messages. An executor chooses the address at which its clients
// reach workers on tcp. home bounds that choice, so that an executor on another node cannot make clients connect to services of their own
// node, which may trust every local process.
type home struct {
	ip   netip.Addr // invalid: a unix socket
	here bool       // the executor is on this node
}

// homeOf returns the home of the other end of a connection. own has the addresses of this node.
func homeOf(p *peer.Peer, own []netip.Addr) home {
	remote, local := addressOf(p.Addr), addressOf(p.LocalAddr)
	if !remote.IsValid() {
		_, unix := p.Addr.(*net.UnixAddr)
		return home{here: unix}
	}
	return homeOfIP(remote, local, own)
}

func homeOfIP(remote, local netip.Addr, own []netip.Addr) home {
	return home{remote, remote.IsLoopback() || remote == local || slices.Contains(own, remote)}
}

func addressOf(a net.Addr) netip.Addr {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}

// ownAddresses returns the addresses of this node's interfaces.
func ownAddresses() (own []netip.Addr) {
	all, _ := net.InterfaceAddrs() // without them, loopback is still refused
	for _, a := range all {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			own = append(own, prefix.Addr().Unmap().WithZone(""))
		}
	}
	return own
}

// refuse returns why this process must not connect to an address that the executor names, or "" if it may connect.
func (h home) refuse(a netip.Addr, own []netip.Addr) string {
	a = a.Unmap().WithZone("")
	switch {
	case a.IsUnspecified():
		return "is no address that a client can connect to"
	case a.IsMulticast(), a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "is not the address of one node"
	case h.here:
		return ""
	case a.IsLoopback():
		return "is a loopback address, and the executor is on another node"
	case slices.Contains(own, a):
		return "is an address of this node, and the executor is on another node"
	case a.IsLinkLocalUnicast() && !h.ip.IsLinkLocalUnicast():
		return "is a link-local address, and the control address of the executor is not"
	}
	return ""
}

// checkWorkers returns an error if this process must not connect to an address in the blobs of workers on tcp. p sent the blobs. For provider
// tcp, h is the home of the executor. Malformed blobs are left to the client library, which refuses them.
func (cand *Candidate) checkWorkers(op string, p *peer.Peer, workers ...Worker) (h home, err error) {
	if cand.Provider != "tcp" {
		return home{}, nil
	}
	own := ownAddresses()
	h = homeOf(p, own)
	for i := range workers {
		if err = cand.checkBlob(op, h, own, workers[i].Blob); err != nil {
			break
		}
	}
	return h, err
}

func (cand *Candidate) checkBlob(op string, h home, own []netip.Addr, blob []byte) error {
	for _, a := range dataplane.ChannelAddresses(blob) {
		if why := h.refuse(a.Addr(), own); why != "" {
			return fail(op, dataplane.StatusConnection, "executor %s names %v as the address of its workers, which %s: set data-advertise of the executor",
				cand.named(), a, why)
		}
	}
	return nil
}

// named returns the candidate's address and node for messages.
func (cand *Candidate) named() string { return fmt.Sprintf("%s on node %q", cand.Address, cand.Node) }
