package dataplane

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"testing"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// records seals or opens the records of one direction, as docs/PROTOCOL.md says.
type records struct {
	aead cipher.AEAD
	iv   []byte
	n    uint64
}

// records returns a direction of a peer's connection: 0 from the peer, 1 to the peer.
func (p *forgedPeer) records(direction byte) *records {
	s := sha256.Sum256(slices.Concat(p.blobs[0][104:120], p.blobs[1][104:120], []byte("rfaas tcp keys\x00"), []byte{direction}, p.hellos[0], p.hellos[1]))
	k := sha256.Sum256(append(s[:], 'k'))
	block, err := aes.NewCipher(k[:16])
	if err != nil {
		p.t.Fatal(err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		p.t.Fatal(err)
	}
	return &records{aead: aead, iv: k[16:28]}
}

func (r *records) nonce() []byte {
	nonce := slices.Clone(r.iv)
	binary.LittleEndian.PutUint64(nonce, binary.LittleEndian.Uint64(nonce)^r.n)
	r.n++
	return nonce
}

// seal returns the next records, which contain frames.
func (r *records) seal(frames ...byte) (out []byte) {
	for part := range slices.Chunk(frames, 16384) {
		head := binary.LittleEndian.AppendUint32(nil, uint32(len(part)))
		out = append(append(out, head...), r.aead.Seal(nil, r.nonce(), part, head)...)
	}
	return out
}

// open reads the next record, and returns it as it is and opened.
func (r *records) open(from io.Reader) (raw, frames []byte, err error) {
	head := make([]byte, 4)
	if _, err := io.ReadFull(from, head); err != nil {
		return nil, nil, err
	}
	body := make([]byte, binary.LittleEndian.Uint32(head)+16)
	if _, err := io.ReadFull(from, body); err != nil {
		return nil, nil, err
	}
	frames, err = r.aead.Open(nil, r.nonce(), body, head)
	return append(head, body...), frames, err
}

// A peer that implements docs/PROTOCOL.md on its own reads and adds. The answers have no byte of the memory in the clear.
func TestServerSealedPeer(t *testing.T) {
	h := newHall(t, EncryptRequire)
	const secret = "what nobody on the network may read"
	copy(h.memory.Bytes()[64:], secret)
	h.memory.Bytes()[0] = 40
	p := h.forge(t)
	tx, rx := p.records(0), p.records(1)
	ref := h.memory.Ref()
	request := frame(3, uint32(len(secret)), ref.Key, ref.Addr+64)
	for _, part := range []int{len(request), 7} { // 7: a frame that two records share
		if _, err := p.Write(slices.Concat(tx.seal(request[:part]...), tx.seal(request[part:]...))); err != nil {
			t.Fatal(err)
		}
		raw, got, err := rx.open(p)
		if err != nil || string(got) != string(frame(6, uint32(len(secret)), 0, 0))+secret {
			t.Fatalf("answer %q, %v", got, err)
		}
		if bytes.Contains(raw, []byte("nobody")) {
			t.Errorf("in the clear: %q", raw)
		}
	}
	if _, err := p.Write(tx.seal(append(frame(4, 8, ref.Key, ref.Addr), 2, 0, 0, 0, 0, 0, 0, 0)...)); err != nil {
		t.Fatal(err)
	}
	if _, got, err := rx.open(p); err != nil || !bytes.Equal(got, frame(7, 0, 0, 40)) || h.memory.Bytes()[0] != 42 {
		t.Errorf("answer %x, %v; the word is %d", got, err, h.memory.Bytes()[0])
	}
	if n := h.dev.Forged(); n != 0 {
		t.Errorf("%d connections are counted as forged", n)
	}
}

// A peer whose records are not the next ones loses its own connection, and is counted. A sealed violation is not counted. The others are
// served, and memory is unchanged.
func TestServerHostileRecords(t *testing.T) {
	h := newHall(t, EncryptRequire)
	_, good := h.join()
	ref := h.memory.Ref()
	read := frame(3, 8, ref.Key, ref.Addr)
	add := append(frame(4, 8, ref.Key, ref.Addr), 9, 0, 0, 0, 0, 0, 0, 0)
	changed := func(b []byte, at int) []byte {
		b[at] ^= 1
		return b
	}
	for name, c := range map[string]struct {
		bytes func(p *forgedPeer, tx *records) []byte
		valid bool // the record is; what it contains is not
	}{
		"plain frame":        {bytes: func(*forgedPeer, *records) []byte { return add }},
		"no record":          {bytes: func(*forgedPeer, *records) []byte { return bytes.Repeat([]byte{0xff}, 64) }},
		"empty record":       {bytes: func(*forgedPeer, *records) []byte { return make([]byte, 20) }},
		"too long":           {bytes: func(*forgedPeer, *records) []byte { return []byte{1, 0x40, 0, 0} }},
		"changed length":     {bytes: func(_ *forgedPeer, tx *records) []byte { return append(changed(tx.seal(add...), 0), 0, 0) }},
		"changed ciphertext": {bytes: func(_ *forgedPeer, tx *records) []byte { return changed(tx.seal(add...), 4) }},
		"changed tag":        {bytes: func(_ *forgedPeer, tx *records) []byte { return changed(tx.seal(add...), 4+32) }},
		"repeated":           {bytes: func(_ *forgedPeer, tx *records) []byte { return bytes.Repeat(tx.seal(read...), 2) }},
		"left out": {bytes: func(_ *forgedPeer, tx *records) []byte {
			tx.seal(read...)
			return tx.seal(add...)
		}},
		"of the other direction": {bytes: func(p *forgedPeer, _ *records) []byte { return p.records(1).seal(add...) }},
		"of another connection": {bytes: func(p *forgedPeer, _ *records) []byte {
			other := p.h.forge(p.t)
			return other.records(0).seal(add...)
		}},
		"of other secrets": {bytes: func(p *forgedPeer, _ *records) []byte {
			p.blobs[0] = changed(slices.Clone(p.blobs[0]), 104)
			return p.records(0).seal(add...)
		}},
		"wrong key": {valid: true, bytes: func(_ *forgedPeer, tx *records) []byte { return tx.seal(frame(3, 8, ref.Key+1, ref.Addr)...) }},
		"immediate": {valid: true, bytes: func(_ *forgedPeer, tx *records) []byte {
			return tx.seal(append(frame(2, 8, ref.Key, ref.Addr), make([]byte, 8)...)...)
		}},
		"takes no answers": {valid: true, bytes: func(_ *forgedPeer, tx *records) []byte {
			return tx.seal(bytes.Repeat(frame(3, 4096, ref.Key, ref.Addr), 4096)...)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			before := h.dev.Forged()
			p := h.forge(t)
			_, _ = p.Write(c.bytes(p, p.records(0))) // the server may close the connection before the last byte
			p.loses(good)
			if forged := h.dev.Forged() - before; forged > 1 || (forged == 1) == c.valid {
				t.Errorf("%d connections were counted as forged", forged)
			}
		})
	}
}

// A peer that stops in the middle of a record occupies its own connection only, and does not wake the thread.
func TestServerHalfARecord(t *testing.T) {
	h := newHall(t, EncryptRequire)
	_, good := h.join()
	ref := h.memory.Ref()
	p := h.forge(t)
	record := p.records(0).seal(append(frame(4, 8, ref.Key, ref.Addr), 9, 0, 0, 0, 0, 0, 0, 0)...)
	before := h.server.Wakes()
	if _, err := p.Write(record[:len(record)-1]); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the part has arrived", func() bool { return h.server.Wakes() > before })
	before = h.server.Wakes()
	buf := make([]byte, 8)
	for range 100 {
		if err := errors.Join(good.Read(buf, ref.Addr, ref.Key, soon), p.mine.Err()); err != nil || binary.LittleEndian.Uint64(buf) != 0 {
			t.Fatalf("read %x, %v", buf, err)
		}
	}
	if n := h.server.Wakes() - before; n > 101 { // 1: an event that had not been counted
		t.Errorf("100 reads woke the thread %d times", n)
	}
	if _, err := p.Write(record[len(record)-1:]); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the addition is made", func() bool {
		err := good.Read(buf, ref.Addr, ref.Key, soon)
		return err == nil && binary.LittleEndian.Uint64(buf) == 9
	})
}
