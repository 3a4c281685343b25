package invoke

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"os"
	"regexp"
	"strings"
	"testing"
)

// golden returns the bytes that docs/PROTOCOL.md states under a name.
func golden(t *testing.T, name string) []byte {
	t.Helper()
	doc, err := os.ReadFile("../docs/PROTOCOL.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```hex " + name + "\n(.*?)```").FindSubmatch(doc)
	if m == nil {
		t.Fatalf("docs/PROTOCOL.md has no golden bytes %q", name)
	}
	b, err := hex.DecodeString(strings.Join(strings.Fields(string(m[1])), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func testBlob() *ChannelBlob {
	return &ChannelBlob{Role: RoleClient, Provider: ProviderSHM, Generation: 0x1a2b3c4d, Depth: 8, Eager: 16384,
		Bulk: 2 << 20, SlotsAddr: 0x7f0011223340, SlotsRkey: 0x11, BulkAddr: 0x7f0011223340 + 8*(64+16384), BulkRkey: 0x11,
		QueuePair: []byte{1, 2, 3, 4}}
}

func TestGoldenChannelBlob(t *testing.T) {
	want := golden(t, "channel_blob")
	if got := testBlob().Marshal(); !bytes.Equal(got, want) {
		t.Fatalf("%x, the specification says %x", got, want)
	}
	b, err := UnmarshalChannelBlob(want)
	if err != nil {
		t.Fatal(err)
	}
	if again := b.Marshal(); !bytes.Equal(again, want) {
		t.Fatalf("decoded and encoded again: %x", again)
	}
}

func TestDamagedChannelBlobs(t *testing.T) {
	good := testBlob().Marshal()
	for n := range good {
		if _, err := UnmarshalChannelBlob(good[:n]); !errors.Is(err, ErrBlob) {
			t.Errorf("%d of %d bytes: %v", n, len(good), err)
		}
	}
	for bit := range 8 * len(good) {
		bad := bytes.Clone(good)
		bad[bit/8] ^= 1 << (bit % 8)
		if _, err := UnmarshalChannelBlob(bad); !errors.Is(err, ErrBlob) {
			t.Errorf("bit %d changed: %v", bit, err)
		}
	}
	for name, change := range map[string]func(*ChannelBlob){
		"role 4":       func(b *ChannelBlob) { b.Role = 4 },
		"provider 9":   func(b *ChannelBlob) { b.Provider = 9 },
		"generation 0": func(b *ChannelBlob) { b.Generation = 0 },
		"depth 0":      func(b *ChannelBlob) { b.Depth = 0 },
		"depth 1025":   func(b *ChannelBlob) { b.Depth = 1025 },
		"eager size 0": func(b *ChannelBlob) { b.Eager = 0 },
		"eager size 9": func(b *ChannelBlob) { b.Eager = 9 },
		"bulk size 65": func(b *ChannelBlob) { b.Bulk = 65 },
	} {
		b := testBlob()
		change(b)
		if _, err := UnmarshalChannelBlob(b.Marshal()); !errors.Is(err, ErrBlob) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// If mend is set, the test corrects the checksum of input that is at least as long as a header. Random bytes never have the right checksum.
func FuzzChannelBlob(f *testing.F) {
	f.Add(false, testBlob().Marshal())
	f.Add(true, testBlob().Marshal())
	worker := testBlob()
	worker.Role, worker.Provider, worker.Depth, worker.Eager, worker.Bulk = RoleWorker, ProviderVerbs, MaxDepth, MaxEager, MaxBulk
	worker.QueuePair = make([]byte, MaxBlob-HeaderSize)
	f.Add(true, worker.Marshal())
	f.Fuzz(func(t *testing.T, mend bool, data []byte) {
		if mend && len(data) >= HeaderSize {
			data = bytes.Clone(data)
			copy(data[52:56], []byte{0, 0, 0, 0})
			binary.LittleEndian.PutUint32(data[52:], crc32.Checksum(data, castagnoli))
		}
		b, err := UnmarshalChannelBlob(data)
		if err != nil {
			if !errors.Is(err, ErrBlob) {
				t.Errorf("%v", err)
			}
			return
		}
		if !bytes.Equal(b.Marshal(), data) {
			t.Fatalf("%x decodes to %+v, which encodes to %x", data, b, b.Marshal())
		}
		if b.Generation == 0 || b.Depth == 0 || b.Depth > MaxDepth || b.Eager == 0 || b.Eager > MaxEager || b.Bulk > MaxBulk {
			t.Errorf("%+v", b)
		}
	})
}
