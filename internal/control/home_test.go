package control

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/grpc/peer"
)

// A connection to any address of this node counts as a connection to this node, even if its two ends have different addresses.
func TestHome(t *testing.T) {
	own := OwnAddresses{All: []netip.Addr{netip.MustParseAddr("198.51.100.1")}}
	for _, k := range []struct {
		remote, local string
		here          bool
	}{
		{"198.51.100.2", "198.51.100.1", false},
		{"198.51.100.1", "198.51.100.9", true},
		{"203.0.113.1", "203.0.113.1", true},
		{"127.0.0.1", "127.0.0.1", true},
		{"::ffff:127.0.0.1", "::ffff:127.0.0.1", true},
	} {
		p := &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(k.remote), Port: 1}, LocalAddr: &net.TCPAddr{IP: net.ParseIP(k.local), Port: 2}}
		if got := own.Home(p).Here; got != k.here {
			t.Errorf("%s from %s: here %v", k.remote, k.local, got)
		}
	}
	if own := ListOwnAddresses(); len(own.All) == 0 || own.Err != nil {
		t.Errorf("this node has the addresses %v: %v", own.All, own.Err)
	}
}

// If the interfaces of this node cannot be listed, a peer on another node can name only its control address, and a peer on this node any
// address.
func TestUnknownInterfaces(t *testing.T) {
	far := netip.MustParseAddr("198.51.100.2")
	none := OwnAddresses{Err: errors.New("no netlink here")}
	for _, k := range []struct {
		home    Home
		address string
		refused bool
	}{
		{none.HomeOf(far, netip.Addr{}), "198.51.100.2", false},
		{none.HomeOf(far, netip.Addr{}), "203.0.113.9", true},
		{OwnAddresses{}.HomeOf(far, netip.Addr{}), "203.0.113.9", false},
		{none.HomeOf(netip.MustParseAddr("127.0.0.1"), netip.Addr{}), "203.0.113.9", false},
	} {
		why := k.home.Refuse("executor", netip.MustParseAddr(k.address))
		if (why != "") != k.refused || k.refused && !strings.Contains(why, "no netlink here") {
			t.Errorf("%v names %s: %q", k.home.IP, k.address, why)
		}
	}
}
