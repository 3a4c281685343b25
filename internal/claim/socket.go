package claim

import (
	"encoding/binary"
	"io"
)

// An executor hands out its regions in this way: an agent connects to a socket whose name begins with Sockets, and sends a token. The executor answers with a
// proof and the region's descriptor. Token and proof have Secret bytes.
const (
	Sockets = "@rfaas-claims-"
	Secret  = 16
)

// Claimed reports whether a client has claimed the workers of a line of a region. It also returns true if the line stands for other workers by now:
// then a client had claimed these, or the executor had closed the line. It returns false if the region cannot be read.
func Claimed(region io.ReaderAt, line uint32, sequence uint64) bool {
	var b [8]byte
	_, err := region.ReadAt(b[:], lineAt+int64(line)*lineSize)
	word := binary.NativeEndian.Uint64(b[:])
	return err == nil && (word&0xff == claimedState || word>>8 != sequence)
}
