package control

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"
)

// severalConnect is how long an attempt to connect may take, if there are several addresses.
const severalConnect = 2 * time.Second

// mostAddresses bounds the addresses of resource managers.
const mostAddresses = 8

// ParseAddresses checks the form of one control address, or of several of resource managers, separated by commas. At most one of these
// managers serves, and the others are its standbys, which refuse connections. If there are several, either all or none are of this node,
// and none is a unix socket.
func ParseAddresses(s string) ([]Address, error) {
	parts := strings.Split(s, ",")
	if strings.HasPrefix(s, "unix:") {
		parts = []string{s}
	}
	if len(parts) > mostAddresses {
		return nil, fmt.Errorf("address %q: %d addresses, want at most %d", s, len(parts), mostAddresses)
	}
	var list []Address
	for _, part := range parts {
		a, err := ParseAddress(strings.TrimSpace(part))
		if err != nil {
			return nil, err
		}
		if list = append(list, a); a.Network == "unix" && len(parts) > 1 || a.Local() != list[0].Local() {
			return nil, fmt.Errorf("address %q: several addresses must be host:port, and either all loopback or none", s)
		}
	}
	return list, nil
}

// Several reports whether an address names several resource managers.
func Several(addr string) bool {
	list, err := ParseAddresses(addr)
	return err == nil && len(list) > 1
}

// dialer connects to an address of the list, as String returns it.
type dialer struct {
	list    []Address
	connect func(path string) (net.Conn, error) // see DialConfig.Connect
}

func (d *dialer) dial(ctx context.Context, addr string) (net.Conn, error) {
	which := slices.IndexFunc(d.list, func(a Address) bool { return a.String() == addr })
	if which < 0 {
		return nil, fmt.Errorf("dial %q: unknown address", addr)
	}
	a := d.list[which]
	if a.Network == "unix" && d.connect != nil {
		return d.connect(a.Target)
	}
	var n net.Dialer
	conn, err := n.DialContext(ctx, a.Network, a.Target)
	if err != nil || len(d.list) == 1 {
		return conn, err
	}
	return &routed{conn, which}, nil
}

// target returns what gRPC dials. It tries several addresses one after the other, a quarter of a second apart, and takes the first that
// answers: a standby refuses connections, and a manager whose process is stopped accepts them and does not answer.
func (d *dialer) target() (string, grpc.DialOption) {
	r := manual.NewBuilderWithScheme("rfaas")
	var state resolver.State
	for _, a := range d.list {
		state.Addresses = append(state.Addresses, resolver.Address{Addr: a.String()})
	}
	r.InitialState(state)
	return "rfaas:///managers", grpc.WithResolvers(r)
}

// routed is a connection to one of several addresses.
type routed struct {
	net.Conn
	which int
}

// silentAfter is how long nothing has to arrive from a manager before the client gives up the connection. It is less than the
// time limit of the call that asks whether the manager still serves.
const silentAfter = 750 * time.Millisecond

// leaveSilent makes a call. If the call is not answered in time, and nothing else has arrived on its connection for silentAfter either, it closes
// the connection, so that the next call can reach another manager. If the manager is only slow, other calls on the connection go on.
func (l *live) leaveSilent(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	began := time.Now()
	var with peer.Peer
	err := invoke(ctx, method, req, reply, cc, append(slices.Clone(opts), grpc.Peer(&with))...)
	if status.Code(err) != codes.DeadlineExceeded {
		return err
	}
	if on, ok := with.AuthInfo.(*link); ok && on.tracked != nil && on.tracked.silentSince(began) {
		on.tracked.Close()
	}
	return err
}

// silentSince notes the beginning of a call that was not answered in time. It reports whether nothing has arrived since the first such call began, and
// whether that was at least silentAfter ago.
func (t *tracked) silentSince(began time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.read.After(began) {
		return false
	}
	if t.silent.IsZero() {
		t.silent = began
	}
	return time.Since(t.silent) >= silentAfter
}
