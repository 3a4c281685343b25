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
		t.Fatal(err) // it does not listen, so it needs no addresses to advertise
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

// TestTCPTokens finds the tokens of a blob and of a hello, and reports bytes that have no token.
func TestTCPTokens(t *testing.T) {
	s := openSide(t, TCP)
	conn, err := s.domain().NewConn()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	blob, err := conn.Blob()
	if err != nil {
		t.Fatal(err)
	}
	token, ok := BlobToken(blob)
	if !ok || token == (Token{}) {
		t.Fatalf("token %x, %t", token, ok)
	}
	channel := append(make([]byte, 56), blob...)
	if got, ok := ChannelToken(channel); !ok || got != token {
		t.Errorf("of a channel's blob: %x, %t", got, ok)
	}
	hello := make([]byte, HelloSize)
	copy(hello, "RFHT\x01\x00")
	copy(hello[8:], token[:])
	if got, ok := HelloToken(hello); !ok || got != token {
		t.Errorf("of a hello: %x, %t", got, ok)
	}
	for name, bad := range map[string][]byte{"nothing": nil, "a short blob": blob[:len(blob)-1], "zeros": make([]byte, len(blob))} {
		if _, ok := BlobToken(bad); ok {
			t.Errorf("%s has a token as a blob", name)
		}
		if _, ok := ChannelToken(bad); ok {
			t.Errorf("%s has a token as a channel's blob", name)
		}
		if _, ok := HelloToken(bad); ok {
			t.Errorf("%s has a token as a hello", name)
		}
	}
	hello[4]++
	if _, ok := HelloToken(hello); ok {
		t.Error("a hello of another version has a token")
	}
}
