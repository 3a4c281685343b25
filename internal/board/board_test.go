package board

import (
	"encoding/hex"
	"errors"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
)

func goldenHeader(t *testing.T) Header {
	t.Helper()
	h, err := NewHeader(0x1122334455667788, 20, 1000)
	if err != nil {
		t.Fatal(err)
	}
	h.Used, h.Changes = 3, 7
	return h
}

func goldenLine() Line {
	return Line{Beat: 5, Incarnation: 0x0807060504030201, Written: time.UnixMilli(1_700_000_000_123), Until: time.Unix(1_700_003_600, 0),
		Slot: 2, Cores: 64, FreeCores: 48, MemoryMiB: 262144, FreeMiB: 200000, Leases: 4, State: Open, Providers: SHM | Verbs}
}

func goldenIdentity() Identity {
	return Identity{Incarnation: [16]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, Slot: 2, Cores: 64, MaxDepth: 1024,
		MaxEager: 262144, MaxBulk: 1 << 30, Memory: 1 << 38, Node: "n2", NodeID: "boot/1", Control: "n2:7465",
		Addresses: []Address{{Kind: IPv4, IP: netip.MustParseAddr("192.0.2.7"), Port: 7465}, {Kind: RoCE, IP: netip.MustParseAddr("fe80::1")}}}
}

func goldenMailbox() Mailbox {
	return Mailbox{Epoch: 0x1122334455667788, Changes: 9, Latest: [MailboxChanges]Change{{Slot: 2, Incarnation: 0x04030201, State: Silent},
		{Slot: 1, Incarnation: 7, State: Open}, {Slot: 0, Incarnation: 6, State: Draining}}}
}

// encodings are the golden records by their name in docs/BOARD.md, long runs of zeros at the end before the checksum cut.
func encodings(t *testing.T) map[string][]byte {
	h, l, i, m := goldenHeader(t), goldenLine(), goldenIdentity(), goldenMailbox()
	all := map[string][]byte{"header": make([]byte, HeaderSize), "line": make([]byte, LineSize), "mailbox": make([]byte, MailboxSize),
		"identity": make([]byte, IdentitySize)}
	h.Encode(all["header"])
	l.Encode(all["line"])
	m.Encode(all["mailbox"])
	if err := i.Encode(all["identity"]); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, h.Size())
	table, err := NewTable(b, h)
	if err != nil {
		t.Fatal(err)
	}
	table.index("boot/1", 2)
	for n := range h.Buckets {
		if bucket := b[h.BucketOffset(n):][:BucketSize]; !empty(bucket[:8]) {
			all["bucket"] = bucket
		}
	}
	all["identity"] = append(all["identity"][:128:128], all["identity"][IdentitySize-4:]...)
	return all
}

var hexBlock = regexp.MustCompile("(?s)```hex (\\w+)\n(.*?)```")

func TestGoldenBytes(t *testing.T) {
	doc, err := os.ReadFile("../../docs/BOARD.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	for _, m := range hexBlock.FindAllStringSubmatch(string(doc), -1) {
		documented[m[1]] = strings.Join(strings.Fields(m[2]), "")
	}
	for name, b := range encodings(t) {
		if got := hex.EncodeToString(b); got != documented[name] {
			t.Errorf("%s:\n%s\ndocs/BOARD.md has\n%s", name, got, documented[name])
		}
	}
}

func TestRecordsComeBack(t *testing.T) {
	var b [IdentitySize]byte
	h := goldenHeader(t)
	h.Encode(b[:])
	if got, err := ParseHeader(b[:], h.Size()); err != nil || got != h {
		t.Errorf("%+v %v", got, err)
	}
	if _, err := ParseHeader(b[:], h.Size()-1); !errors.Is(err, ErrLayout) {
		t.Errorf("a board that is too small: %v", err)
	}
	l := goldenLine()
	l.Encode(b[:])
	if got, err := ParseLine(b[:], 2); err != nil || got != l {
		t.Errorf("%+v %v", got, err)
	}
	if _, err := ParseLine(b[:], 3); !errors.Is(err, ErrLayout) {
		t.Errorf("a line in the wrong slot: %v", err)
	}
	if got, err := ParseLine(make([]byte, LineSize), 3); err != nil || got.State != Empty {
		t.Errorf("%+v %v", got, err)
	}
	m := goldenMailbox()
	m.Encode(b[:])
	if got, err := ParseMailbox(b[:]); err != nil || got != m {
		t.Errorf("%+v %v", got, err)
	}
	for _, id := range []Identity{goldenIdentity(), {Incarnation: [16]byte{1}, Slot: 9, Node: strings.Repeat("n", 255), NodeID: strings.Repeat("i", 255),
		Control: strings.Repeat("c", 255), Addresses: []Address{{IPv6, netip.MustParseAddr("2001:db8::1"), 1, 0},
			{InfiniBand, netip.MustParseAddr("fe80::2"), 0, 17}, {RoCE, netip.MustParseAddr("::ffff:192.0.2.1"), 0, 0}, {IPv4, netip.MustParseAddr("192.0.2.1"), 65535, 0}}}} {
		if err := id.Encode(b[:]); err != nil {
			t.Fatal(err)
		}
		got, err := ParseIdentity(b[:], id.Slot)
		if err != nil || got.Node != id.Node || got.NodeID != id.NodeID || got.Control != id.Control || len(got.Addresses) != len(id.Addresses) {
			t.Errorf("%+v %v", got, err)
		}
		for i, a := range got.Addresses {
			if a != id.Addresses[i] || a.String() == "" {
				t.Errorf("%v, want %v", a, id.Addresses[i])
			}
		}
		if _, err := ParseIdentity(b[:], id.Slot+1); !errors.Is(err, ErrLayout) {
			t.Errorf("an identity in the wrong slot: %v", err)
		}
	}
	for text, bad := range map[string]Identity{
		"256 bytes":   {Node: strings.Repeat("n", 256)},
		"no room for": {Node: strings.Repeat("n", 255), NodeID: strings.Repeat("n", 255), Control: strings.Repeat("n", 255), Addresses: make4(40)},
		"kind 6":      {Addresses: []Address{{Kind: InfiniBand, IP: netip.MustParseAddr("192.0.2.1")}}},
		"kind 0":      {Addresses: []Address{{}}},
	} {
		if err := bad.Encode(b[:]); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func make4(n int) []Address {
	var all []Address
	for range n {
		all = append(all, Address{Kind: IPv4, IP: netip.MustParseAddr("192.0.2.1")})
	}
	return all
}

// Any single wrong bit is found, in every record.
func TestFlippedBitsAreFound(t *testing.T) {
	for name, golden := range encodings(t) {
		if name == "identity" {
			golden = make([]byte, IdentitySize)
			id := goldenIdentity()
			if err := id.Encode(golden); err != nil {
				t.Fatal(err)
			}
		}
		for bit := range len(golden) * 8 {
			golden[bit/8] ^= 1 << (bit % 8)
			var err error
			switch name {
			case "header":
				_, err = ParseHeader(golden, 1<<30)
			case "line":
				_, err = ParseLine(golden, 2)
			case "mailbox":
				_, err = ParseMailbox(golden)
			case "identity":
				_, err = ParseIdentity(golden, 2)
			case "bucket":
				_, err = parseBucket(golden)
			}
			if !errors.Is(err, ErrTorn) {
				t.Fatalf("%s: bit %d: %v", name, bit, err)
			}
			golden[bit/8] ^= 1 << (bit % 8)
		}
	}
}

// Sealed nonsense is refused, not followed.
func TestHostileRecords(t *testing.T) {
	le32 := func(b []byte, at int, v uint32) {
		b[at], b[at+1], b[at+2], b[at+3] = byte(v), byte(v>>8), byte(v>>16), byte(v>>24)
	}
	h, l, id := goldenHeader(t), goldenLine(), goldenIdentity()
	for name, c := range map[string]func() error{
		"capacity 0":        func() error { return header(h, func(b []byte) { le32(b, 16, 0) }) },
		"capacity 9":        func() error { return header(h, func(b []byte) { le32(b, 16, 9) }) },
		"capacity too big":  func() error { return header(h, func(b []byte) { le32(b, 16, 1<<31) }) },
		"used > capacity":   func() error { return header(h, func(b []byte) { le32(b, 20, 25) }) },
		"3 buckets":         func() error { return header(h, func(b []byte) { le32(b, 24, 3) }) },
		"version 2":         func() error { return header(h, func(b []byte) { b[4] = 2 }) },
		"size":              func() error { return header(h, func(b []byte) { le32(b, 40, 4096) }) },
		"free > cores":      func() error { return line(l, func(b []byte) { le32(b, 40, 65) }) },
		"free > memory":     func() error { return line(l, func(b []byte) { le32(b, 48, 1<<31) }) },
		"state 9":           func() error { return line(l, func(b []byte) { b[56] = 9 }) },
		"written in 10^12":  func() error { return line(l, func(b []byte) { b[23] = 0xff }) },
		"until in 10^12":    func() error { return line(l, func(b []byte) { b[31] = 0xff }) },
		"texts too long":    func() error { return identity(id, func(b []byte) { b[6], b[7] = 0xff, 0xff }) },
		"text ends outside": func() error { return identity(id, func(b []byte) { b[6]-- }) },
		"identity magic":    func() error { return identity(id, func(b []byte) { b[0]++ }) },
		"mailbox state": func() error {
			m, b := goldenMailbox(), make([]byte, MailboxSize)
			m.Encode(b)
			b[24] = 77
			seal(b)
			_, err := ParseMailbox(b)
			return err
		},
	} {
		if err := c(); !errors.Is(err, ErrLayout) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := identity(id, func(b []byte) { b[64] = 200 }); err != nil {
		t.Errorf("a text of a kind that is not known: %v", err)
	}
	if _, err := NewHeader(1, 0, 1); err == nil {
		t.Error("a board of no slots")
	}
}

func header(h Header, change func([]byte)) error {
	b := make([]byte, HeaderSize)
	h.Encode(b)
	change(b)
	seal(b)
	_, err := ParseHeader(b, 1<<40)
	return err
}

func line(l Line, change func([]byte)) error {
	b := make([]byte, LineSize)
	l.Encode(b)
	change(b)
	seal(b)
	_, err := ParseLine(b, 2)
	return err
}

func identity(id Identity, change func([]byte)) error {
	b := make([]byte, IdentitySize)
	if err := id.Encode(b); err != nil {
		return err
	}
	change(b)
	seal(b)
	_, err := ParseIdentity(b, 2)
	return err
}

func TestMailboxSince(t *testing.T) {
	m := goldenMailbox() // 9 changes, the last three known
	for _, c := range []struct {
		seen uint64
		n    int
		all  bool
	}{{9, 0, true}, {8, 1, true}, {6, 3, true}, {5, 3, false}, {10, 0, true}} {
		got, all := m.Since(c.seen)
		if len(got) != c.n || all != c.all || c.n == 3 && (got[0].Slot != 0 || got[2].Slot != 2) {
			t.Errorf("since %d: %v %v", c.seen, got, all)
		}
	}
}

func FuzzRecords(f *testing.F) {
	l, id := goldenLine(), goldenIdentity()
	b := make([]byte, IdentitySize)
	l.Encode(b)
	f.Add(b)
	b = make([]byte, IdentitySize)
	if err := id.Encode(b); err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		r := make([]byte, IdentitySize)
		copy(r, b)
		seal(r)
		seal(r[:LineSize])
		_, _ = ParseLine(r, 2)
		_, _ = ParseHeader(r, 1<<30)
		_, _ = ParseMailbox(r)
		_, _ = parseBucket(r)
		seal(r)
		if id, err := ParseIdentity(r, 2); err == nil {
			if err := id.Encode(r); err != nil {
				t.Errorf("%+v: %v", id, err)
			}
		}
	})
}

func TestFlagsOfLine(t *testing.T) {
	for _, slowdown := range []uint32{0, 1, 1010, MaxSlowdown, MaxSlowdown + 1} {
		for _, cordoned := range []bool{false, true} {
			l := goldenLine()
			l.State, l.Cordoned, l.Slowdown = Draining, cordoned, slowdown
			var b [LineSize]byte
			l.Encode(b[:])
			l.Slowdown = min(slowdown, MaxSlowdown)
			if got, err := ParseLine(b[:], l.Slot); err != nil || got != l {
				t.Errorf("%+v %v, want %+v", got, err, l)
			}
		}
	}
}
