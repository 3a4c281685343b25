package board

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Identity is what does not change about an executor while it runs.
type Identity struct {
	Incarnation [16]byte
	Slot        uint32
	Cores       uint32
	MaxDepth    uint32
	MaxEager    uint32
	MaxBulk     uint64 // bytes
	Memory      uint64 // bytes
	Node        string // host name, at most 255 bytes
	NodeID      string // equal on both sides: shared memory can be used; at most 255 bytes
	Control     string // control address to dial, host:port or unix:PATH, at most 255 bytes
	Addresses   []Address
}

// Kind of an Address.
type Kind uint8

// The kinds. Numbers 1 to 3 are the texts of an identity.
const (
	IPv4       Kind = 4 // 4 bytes, port
	IPv6       Kind = 5 // 16 bytes, port
	InfiniBand Kind = 6 // GID of 16 bytes, LID
	RoCE       Kind = 7 // GID of 16 bytes
)

const (
	tagNode    = 1
	tagNodeID  = 2
	tagControl = 3
)

// Address is one way to reach an executor.
type Address struct {
	Kind Kind
	IP   netip.Addr // IPv4, IPv6; for InfiniBand and RoCE the GID
	Port uint16     // IPv4, IPv6
	LID  uint16     // InfiniBand
}

func (a Address) String() string {
	switch a.Kind {
	case IPv4, IPv6:
		return netip.AddrPortFrom(a.IP, a.Port).String()
	case InfiniBand:
		return fmt.Sprintf("ib:%v,lid=%d", a.IP, a.LID)
	case RoCE:
		return fmt.Sprintf("roce:%v", a.IP)
	}
	return fmt.Sprintf("address of kind %d", a.Kind)
}

// bytes of the address; nil if it is none.
func (a Address) bytes() []byte {
	le := binary.LittleEndian
	switch {
	case a.Kind == IPv4 && a.IP.Is4():
		return le.AppendUint16(a.IP.AsSlice(), a.Port)
	case a.Kind == IPv6 && a.IP.Is6():
		return le.AppendUint16(a.IP.WithZone("").AsSlice(), a.Port)
	case a.Kind == InfiniBand && a.IP.Is6():
		return le.AppendUint16(a.IP.WithZone("").AsSlice(), a.LID)
	case a.Kind == RoCE && a.IP.Is6():
		return a.IP.WithZone("").AsSlice()
	}
	return nil
}

func parseAddress(k Kind, b []byte) (Address, bool) {
	a := Address{Kind: k}
	n := map[Kind]int{IPv4: 4, IPv6: 16, InfiniBand: 16, RoCE: 16}[k]
	extra := 2
	if k == RoCE {
		extra = 0
	}
	if n == 0 || len(b) != n+extra {
		return a, false
	}
	a.IP, _ = netip.AddrFromSlice(b[:n])
	switch k {
	case IPv4, IPv6:
		a.Port = binary.LittleEndian.Uint16(b[n:])
	case InfiniBand:
		a.LID = binary.LittleEndian.Uint16(b[n:])
	}
	return a, true
}

const (
	identityMagic = 0x44494652 // "RFID"
	identityFixed = 64
)

// Encode writes the identity into IdentitySize bytes. Texts that are too long or addresses that do not fit are an error
// that names them.
func (i *Identity) Encode(b []byte) error {
	b = b[:IdentitySize]
	rest := make([]byte, 0, IdentitySize)
	add := func(tag uint8, what string, value []byte) error {
		if len(value) > 255 {
			return fmt.Errorf("identity: %s has %d bytes, want at most 255", what, len(value))
		}
		rest = append(append(rest, tag, uint8(len(value))), value...)
		if len(rest) > IdentitySize-identityFixed-4 {
			return fmt.Errorf("identity: no room for %s of %d bytes", what, len(value))
		}
		return nil
	}
	for _, t := range []struct {
		tag  uint8
		what string
		text string
	}{{tagNode, "the node's name", i.Node}, {tagNodeID, "the node's id", i.NodeID}, {tagControl, "the control address", i.Control}} {
		if err := add(t.tag, t.what, []byte(t.text)); err != nil {
			return err
		}
	}
	for _, a := range i.Addresses {
		v := a.bytes()
		if v == nil {
			return fmt.Errorf("identity: kind %d does not go with %v", a.Kind, a.IP)
		}
		if err := add(uint8(a.Kind), a.String(), v); err != nil {
			return err
		}
	}
	le := binary.LittleEndian
	clear(b)
	le.PutUint32(b[0:], identityMagic)
	le.PutUint16(b[4:], Version)
	le.PutUint16(b[6:], uint16(len(rest)))
	copy(b[8:], i.Incarnation[:])
	le.PutUint32(b[24:], i.Slot)
	le.PutUint32(b[28:], i.Cores)
	le.PutUint32(b[32:], i.MaxDepth)
	le.PutUint32(b[36:], i.MaxEager)
	le.PutUint64(b[40:], i.MaxBulk)
	le.PutUint64(b[48:], i.Memory)
	copy(b[identityFixed:], rest)
	seal(b)
	return nil
}

// ParseIdentity reads the identity of a slot. Address kinds that it does not know are left out. Errors: ErrTorn, ErrLayout.
func ParseIdentity(b []byte, slot uint32) (Identity, error) {
	var i Identity
	if len(b) < IdentitySize || !sealed(b[:IdentitySize]) {
		return i, fmt.Errorf("identity %d: %w", slot, ErrTorn)
	}
	b = b[:IdentitySize]
	le := binary.LittleEndian
	n := int(le.Uint16(b[6:]))
	switch {
	case le.Uint32(b) != identityMagic || le.Uint16(b[4:]) != Version:
		return i, fmt.Errorf("%w: identity %d: magic %08x version %d", ErrLayout, slot, le.Uint32(b), le.Uint16(b[4:]))
	case n > IdentitySize-identityFixed-4:
		return i, fmt.Errorf("%w: identity %d: %d bytes of texts", ErrLayout, slot, n)
	case le.Uint32(b[24:]) != slot:
		return i, fmt.Errorf("%w: identity %d stands in slot %d", ErrLayout, le.Uint32(b[24:]), slot)
	}
	i = Identity{Slot: slot, Cores: le.Uint32(b[28:]), MaxDepth: le.Uint32(b[32:]), MaxEager: le.Uint32(b[36:]),
		MaxBulk: le.Uint64(b[40:]), Memory: le.Uint64(b[48:])}
	copy(i.Incarnation[:], b[8:])
	for rest := b[identityFixed : identityFixed+n]; len(rest) > 0; {
		if len(rest) < 2 || len(rest) < 2+int(rest[1]) {
			return i, fmt.Errorf("%w: identity %d: %d bytes of texts end in the middle of one", ErrLayout, slot, n)
		}
		tag, value := rest[0], rest[2:2+int(rest[1])]
		rest = rest[2+int(rest[1]):]
		switch tag {
		case tagNode:
			i.Node = string(value)
		case tagNodeID:
			i.NodeID = string(value)
		case tagControl:
			i.Control = string(value)
		default:
			if a, ok := parseAddress(Kind(tag), value); ok {
				i.Addresses = append(i.Addresses, a)
			}
		}
	}
	return i, nil
}
