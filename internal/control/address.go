package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// Address is a parsed control address: "host:port", "[v6]:port" or "unix:PATH".
type Address struct {
	Network string // "tcp" or "unix"
	Target  string // what package net wants: host:port or the path
}

// String is the address as it is written in configuration.
func (a Address) String() string {
	if a.Network == "unix" {
		return "unix:" + a.Target
	}
	return a.Target
}

// ParseAddress checks the form of an address without resolving anything.
func ParseAddress(s string) (Address, error) {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		if strings.HasPrefix(path, "//") { // unix:///run/x as gRPC writes it
			path = "/" + strings.TrimLeft(path, "/")
		}
		// sun_path holds 108 bytes with its NUL.
		if path == "" || len(path) > 107 {
			return Address{}, fmt.Errorf("address %q: the socket path has %d bytes, want 1 to 107", s, len(path))
		}
		return Address{Network: "unix", Target: path}, nil
	}
	_, port, err := net.SplitHostPort(s)
	if err != nil {
		return Address{}, fmt.Errorf("address %q: want host:port or unix:PATH", s)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return Address{}, fmt.Errorf("address %q: port %q is not in 0..65535", s, port)
	}
	return Address{Network: "tcp", Target: s}, nil
}

// ParsePortRange splits host:port or host:first-last. Port 0 stands for any free port.
func ParsePortRange(s string) (host string, first, last int, err error) {
	host, ports, err := net.SplitHostPort(s)
	if err != nil {
		return "", 0, 0, fmt.Errorf("address %q: want host:port or host:first-last", s)
	}
	low, high, isRange := strings.Cut(ports, "-")
	if !isRange {
		high = low
	}
	first, err = strconv.Atoi(low)
	if err == nil {
		last, err = strconv.Atoi(high)
	}
	if err != nil || first < 0 || last > 65535 || first > last || isRange && first == 0 {
		return "", 0, 0, fmt.Errorf("address %q: %q is neither a port in 0..65535 nor a range of ports like 7200-7299", s, ports)
	}
	return host, first, last, nil
}

// Local reports whether connections to the address stay on this node: a unix socket or a loopback address. A host name
// other than localhost is not local, whatever it resolves to.
func (a Address) Local() bool {
	if a.Network == "unix" {
		return true
	}
	host, _, err := net.SplitHostPort(a.Target)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// AllowPlaintextEnv names the environment variable by which clients turn TLS off.
const AllowPlaintextEnv = "RFAAS_ALLOW_PLAINTEXT"

// CheckPlaintext returns an error if control messages to the address could be read on the network, unless allow is set.
func (a Address) CheckPlaintext(allow bool) error {
	if allow || a.Local() {
		return nil
	}
	return fmt.Errorf("address %s is not loopback or a unix socket, and nothing for TLS is configured: a daemon needs --identity-dir "+
		"(rfaas cluster node), a client a token (%s) or the cluster's certificate (%s); on a trusted network, --allow-plaintext (a client: "+
		"%s=1) turns TLS off", a, identity.TokenFileEnv, identity.CAFileEnv, AllowPlaintextEnv)
}

// Listen opens a control port. A non-local address is refused unless allowPlaintext is set. A unix socket is made with
// mode 0600. A socket file without a server is replaced. One that is served is an error.
func Listen(addr string, allowPlaintext bool) (net.Listener, error) {
	a, err := ParseAddress(addr)
	if err != nil {
		return nil, err
	}
	if err := a.CheckPlaintext(allowPlaintext); err != nil {
		return nil, err
	}
	if a.Network == "unix" {
		if err := removeStaleSocket(a.Target); err != nil {
			return nil, err
		}
	}
	lc := net.ListenConfig{}
	if a.Network == "unix" {
		lc.Control = closeToOthers
	}
	l, err := lc.Listen(context.Background(), a.Network, a.Target)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	return l, nil
}

// closeToOthers sets the mode of a unix socket before it is bound, and the file then gets that mode. A chmod by name
// could reach another file.
func closeToOthers(_, _ string, c syscall.RawConn) error {
	var err error
	if cerr := c.Control(func(fd uintptr) { err = syscall.Fchmod(int(fd), 0o600) }); cerr != nil {
		return cerr
	}
	return err
}

// ListenerAddress returns the bound address in the form that ParseAddress takes, with the real port.
func ListenerAddress(l net.Listener) string {
	if l.Addr().Network() == "unix" {
		return "unix:" + l.Addr().String()
	}
	return l.Addr().String()
}

// removeStaleSocket removes a socket file that a killed daemon left behind.
func removeStaleSocket(path string) error {
	st, err := os.Lstat(path)
	if err != nil {
		return nil // absent, or net.Listen says it better
	}
	if st.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("listen: %s exists and is not a socket", path)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		c.Close()
		return fmt.Errorf("listen: %s: %w", path, syscall.EADDRINUSE)
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		return os.Remove(path)
	}
	return fmt.Errorf("listen: %w", err)
}
