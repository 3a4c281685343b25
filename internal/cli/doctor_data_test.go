package cli

import (
	"net"
	"strings"
	"testing"
)

// The doctor connects to the data port of an executor on tcp, and says why it cannot and what to do. If it finds
// an executor at two addresses, that of the manager's list and the one that it is given, it counts the executor once.
func TestDoctorDataPorts(t *testing.T) {
	s, _, run := world(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	for _, k := range []struct {
		data, state string
		words       []string
	}{
		{"", "note", []string{"no executor offers tcp", "shm,tcp"}},
		{l.Addr().String(), "ok", []string{"accept connections: 1"}},
		{closed.Addr().String(), "problem", []string{"executor 127.0.0.2:1", closed.Addr().String(), "connection refused", "firewalls", "data-listen", "data-advertise"}},
		{"0.0.0.0:1", "problem", []string{"executor 127.0.0.2:1", "is not an address that a client can connect to", "data-advertise"}},
		{"nonsense", "problem", []string{"executor 127.0.0.2:1", `"nonsense" is not an IP address and a port`}},
	} {
		s.data.Store(k.data)
		_, out, _ := run("doctor")
		_, found, _ := strings.Cut(out, "\n"+k.state+strings.Repeat(" ", 9-len(k.state))+"data ports")
		for _, word := range k.words {
			if !strings.Contains(found, word) {
				t.Errorf("%q: no %s with %q:\n%s", k.data, k.state, word, out)
			}
		}
	}
}
