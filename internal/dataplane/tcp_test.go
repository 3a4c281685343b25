package dataplane

import (
	"errors"
	"strings"
	"testing"
)

// TestTCPDevice passes each option of a tcp device to C.
func TestTCPDevice(t *testing.T) {
	d, err := Open(TCP, Options{GIDIndex: -1, Address: "127.0.0.2"})
	if err != nil {
		t.Fatal(err)
	}
	if d.Provider() != TCP || d.Name() != "tcp 127.0.0.2" {
		t.Errorf("provider %q, name %q", d.Provider(), d.Name())
	}
	if _, ok := d.Address(); ok {
		t.Error("a tcp device has an RDMA address")
	}
	d.Close()
	d, err = Open(TCP, Options{ActiveOnly: true, Address: "::"})
	if err != nil {
		t.Fatal(err) // it does not listen, so it needs nothing to advertise
	}
	d.Close()
	for _, c := range []struct {
		o     Options
		named string
	}{
		{Options{Address: "nowhere"}, "nowhere"},
		{Options{PortFirst: 9, PortLast: 8}, "9 to 8"},
		{Options{Advertise: "10.0.0.1"}, "10.0.0.1"},
		{Options{Address: "0.0.0.0"}, "advertise"},
	} {
		d, err := Open(TCP, c.o)
		if err == nil {
			d.Close()
		}
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), c.named) {
			t.Errorf("%+v: %v", c.o, err)
		}
	}
}
