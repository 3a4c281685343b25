package control

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"google.golang.org/grpc/peer"
)

// Home is the address at which this process reaches a peer, an executor or a resource manager, for control messages. The peer chooses the
// address of its data connections. Home bounds that choice, so that a peer on another node cannot make this process connect to services of
// its own node, which may trust every local process.
type Home struct {
	IP   netip.Addr // invalid: a unix socket, or unknown
	Here bool       // the peer is on this node
	own  OwnAddresses
}

// OwnAddresses are the addresses of this node's interfaces.
type OwnAddresses struct {
	All []netip.Addr
	Err error // why the interfaces cannot be listed, or nil
}

// ListOwnAddresses lists the addresses of this node's interfaces.
func ListOwnAddresses() (own OwnAddresses) {
	all, err := net.InterfaceAddrs()
	own.Err = err
	for _, a := range all {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			own.All = append(own.All, prefix.Addr().Unmap().WithZone(""))
		}
	}
	return own
}

// Home returns the home of the other end of a control connection.
func (own OwnAddresses) Home(p *peer.Peer) Home {
	remote, local := ipOf(p.Addr), ipOf(p.LocalAddr)
	if !remote.IsValid() {
		_, unix := p.Addr.(*net.UnixAddr)
		return Home{Here: unix, own: own}
	}
	return own.HomeOf(remote, local)
}

// HomeOf returns the home of a peer at remote. local is this end of the connection, and may be invalid.
func (own OwnAddresses) HomeOf(remote, local netip.Addr) Home {
	return Home{remote, remote.IsLoopback() || remote == local || slices.Contains(own.All, remote), own}
}

func ipOf(a net.Addr) netip.Addr {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}

// Refuse returns why this process must not connect to an address that the peer names, or "" if it may connect. who is what the peer is:
// "executor" or "resource manager".
func (h Home) Refuse(who string, a netip.Addr) string {
	a = a.Unmap().WithZone("")
	switch {
	case a.IsUnspecified():
		return "is not an address that a client can connect to"
	case a.IsMulticast(), a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "is not the address of one node"
	case h.Here:
		return ""
	case a.IsLoopback():
		return fmt.Sprintf("is a loopback address, and the %s is on another node", who)
	case slices.Contains(h.own.All, a):
		return fmt.Sprintf("is an address of this node, and the %s is on another node", who)
	case a.IsLinkLocalUnicast() && !h.IP.IsLinkLocalUnicast():
		return fmt.Sprintf("is a link-local address, and the control address of the %s is not", who)
	case h.own.Err != nil && a != h.IP:
		return fmt.Sprintf("may be an address of this node, whose interfaces cannot be listed (%v), and is not the control address of the %s", h.own.Err, who)
	}
	return ""
}
