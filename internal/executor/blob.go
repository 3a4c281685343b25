package executor

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// What the executor knows of a channel blob (dp_wire.h; a test binds the numbers). It looks at the outside only,
// so that a client's mistake gets its answer before anything is started; the worker checks the rest.
const (
	blobMagic   = 0x48434652
	blobVersion = 1
	blobHead    = 56
	blobMax     = 256
	roleClient  = 1

	providerShm   = 1
	providerVerbs = 2

	maxDepth = 1024
	maxEager = 256 << 10
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// providerID is the number of a provider in blobs, 0 for an unknown name.
func providerID(name string) byte {
	switch name {
	case "shm":
		return providerShm
	case "verbs":
		return providerVerbs
	}
	return 0
}

// checkBlob checks a client's channel blob for a provider.
func checkBlob(b []byte, provider string) error {
	if len(b) < blobHead || len(b) > blobMax {
		return fmt.Errorf("%d bytes, want %d to %d", len(b), blobHead, blobMax)
	}
	le := binary.LittleEndian
	if m := le.Uint32(b); m != blobMagic {
		return fmt.Errorf("magic %#x, want %#x", m, blobMagic)
	}
	if v := le.Uint16(b[4:]); v != blobVersion {
		return fmt.Errorf("wire version %d, this executor speaks %d", v, blobVersion)
	}
	if b[6] != roleClient {
		return fmt.Errorf("role %d, want %d (client)", b[6], roleClient)
	}
	if b[7] != providerID(provider) {
		return fmt.Errorf("made for provider %d, the lease asks for %s (%d)", b[7], provider, providerID(provider))
	}
	if le.Uint32(b[8:]) == 0 {
		return fmt.Errorf("generation 0")
	}
	if d := le.Uint16(b[12:]); d < 1 || d > maxDepth {
		return fmt.Errorf("depth %d, want 1 to %d", d, maxDepth)
	}
	if n := int(le.Uint16(b[14:])); blobHead+n != len(b) {
		return fmt.Errorf("%d bytes, its head and the queue-pair part of %d make %d", len(b), n, blobHead+n)
	}
	if e := le.Uint32(b[16:]); e > maxEager {
		return fmt.Errorf("eager size %d, want at most %d", e, maxEager)
	}
	sum := crc32.Update(0, castagnoli, b[:blobHead-4])
	sum = crc32.Update(sum, castagnoli, []byte{0, 0, 0, 0})
	sum = crc32.Update(sum, castagnoli, b[blobHead:])
	if got := le.Uint32(b[blobHead-4:]); got != sum {
		return fmt.Errorf("checksum %#08x, its bytes give %#08x", got, sum)
	}
	return nil
}
