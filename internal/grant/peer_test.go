package grant

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/peer"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/channel"
)

// tcpBlob returns the blob of a channel on tcp that names addresses.
func tcpBlob(t *testing.T, addresses string) []byte {
	t.Helper()
	dev, err := dataplane.Open("tcp", dataplane.Options{GIDIndex: -1, Advertise: addresses})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	ep, err := channel.NewEndpoint(dev, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ep.Close)
	ch, err := ep.NewChannel(1, 64)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ch.Close)
	blob, err := ch.Offer()
	if err != nil {
		t.Fatal(err)
	}
	return blob
}

// If an executor on another node names an address of the client's own node, or a group address, the client does not connect to it. An executor on
// this node may name the addresses of this node.
func TestAddressesOfWorkers(t *testing.T) {
	own := control.OwnAddresses{All: []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8::1")}}
	const far, near, self = "198.51.100.2:7465", "127.0.0.1:7465", "198.51.100.1:7465"
	for _, k := range []struct{ executor, address, refused string }{
		{far, "198.51.100.2:1", ""},
		{far, "203.0.113.9:1", ""}, // another network of its node
		{far, "[2001:db8::2]:1", ""},
		{far, "127.0.0.1:1", "loopback"},
		{far, "127.1.2.3:1", "loopback"},
		{far, "[::1]:1", "loopback"},
		{far, "[::ffff:127.0.0.1]:1", "loopback"},
		{far, "198.51.100.1:1", "address of this node"},
		{far, "[2001:db8::1]:1", "address of this node"},
		{far, "[::ffff:198.51.100.1]:1", "address of this node"},
		{far, "169.254.169.254:80", "link-local"},
		{far, "[fe80::1]:1", "link-local"},
		{"169.254.0.2:7465", "169.254.0.3:1", ""},
		{far, "[::ffff:0.0.0.0]:1", "not an address"},
		{far, "224.0.0.1:1", "one node"},
		{far, "255.255.255.255:1", "one node"},
		{far, "198.51.100.2:1,127.0.0.1:1", "loopback"},
		{near, "127.0.0.1:1", ""},
		{near, "198.51.100.1:1", ""},
		{near, "203.0.113.9:1", ""},
		{near, "[ff02::1]:1", "one node"},
		{near, "[::ffff:0.0.0.0]:1", "not an address"},
		{self, "127.0.0.1:1", ""},
		{"unix", "127.0.0.1:1", ""},
		{"", "127.0.0.1:1", "loopback"}, // not known
	} {
		p := &peer.Peer{}
		switch k.executor {
		case "":
		case "unix":
			p.Addr = &net.UnixAddr{Name: "/run/executor", Net: "unix"}
		default:
			p.Addr = net.TCPAddrFromAddrPort(netip.MustParseAddrPort(k.executor))
			p.LocalAddr = &net.TCPAddr{IP: net.IPv4(192, 0, 2, 77)}
		}
		blob := tcpBlob(t, k.address)
		addresses := dataplane.ChannelAddresses(blob)
		if len(addresses) != 1+strings.Count(k.address, ",") {
			t.Errorf("%s: the blob has the addresses %v", k.address, addresses)
		}
		cand := Candidate{Address: k.executor, Node: "far", Provider: "tcp"}
		err := cand.checkBlob("lease", own.Home(p), blob)
		switch {
		case k.refused == "" && err != nil:
			t.Errorf("an executor at %q names %s: %v", k.executor, k.address, err)
		case k.refused == "":
		case !errors.Is(err, dataplane.ErrConnection):
			t.Errorf("an executor at %q names %s: %v", k.executor, k.address, err)
		default:
			for _, word := range []string{k.refused, "data-advertise", `on node "far"`} {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("an executor at %q names %s: the error does not contain %q: %v", k.executor, k.address, word, err)
				}
			}
		}
	}
	for _, blob := range [][]byte{nil, make([]byte, 56), make([]byte, 168), make([]byte, 256)} {
		if all := dataplane.ChannelAddresses(blob); all != nil {
			t.Errorf("%d zeros name %v", len(blob), all)
		}
	}
}

// The remedy for a data address that cannot be reached is a firewall's, or says that address translation is not supported.
func TestRemedy(t *testing.T) {
	for _, k := range []struct {
		control, data string
		here, nat     bool
	}{
		{"203.0.113.9", "10.0.0.5", false, true},
		{"2001:db8::9", "fd00::5", false, true},
		{"203.0.113.9", "203.0.113.9", false, false},
		{"203.0.113.9", "203.0.113.10", false, false},
		{"10.0.0.5", "10.0.0.5", false, false},
		{"10.0.0.5", "10.1.0.5", false, false}, // two private networks of one cluster
		{"203.0.113.9", "10.0.0.5", true, false},
	} {
		text := remedy(control.Home{IP: netip.MustParseAddr(k.control), Here: k.here}, netip.MustParseAddr(k.data))
		if strings.Contains(text, "NAT") != k.nat || strings.Contains(text, k.control) != k.nat || !strings.Contains(text, "data-advertise") {
			t.Errorf("%+v: %s", k, text)
		}
	}
}

// CheckData says why a data port cannot be used from here.
func TestCheckData(t *testing.T) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err == nil {
		err = syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	if err == nil {
		err = syscall.Listen(fd, 0) // one connection waits to be accepted; the kernel does not answer others
	}
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	silent := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	if _, err := CheckData(t.Context(), "127.0.0.1:1", silent); err != nil {
		t.Errorf("a port that can be reached: %v", err)
	}
	for _, k := range []struct{ control, data, reason, remedy string }{
		{"127.0.0.1:1", silent, "no answer within", "firewalls"},
		{"localhost:1", refusing(t), "connection refused", "firewalls"},
		{"unix:/run/x", refusing(t), "connection refused", "firewalls"},
		{"198.51.100.2:1", "127.0.0.1:1", "loopback", "data-advertise"},
		{"198.51.100.2:1", "10.0.0.1", "not an IP address and a port", "upgrade"},
		{"nonsense", "127.0.0.1:1", "want host:port", ""},
	} {
		remedy, err := CheckData(t.Context(), k.control, k.data)
		if err == nil || !strings.Contains(err.Error(), k.reason) || !strings.Contains(remedy, k.remedy) {
			t.Errorf("%s at %s: %v -> %q", k.control, k.data, err, remedy)
		}
	}
}
