package hostile

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/rfaas-go/rfaas/internal/control"
)

// endpoint is the socket name of an attacker's shm endpoint.
type endpoint [16]byte

// blackHole opens an endpoint that listens and accepts no connection: a peer that connects gets no answer.
func (c *cluster) blackHole() endpoint {
	c.Helper()
	var e endpoint
	rand.Read(e[:])
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: "@rfaas-shm-" + hex.EncodeToString(e[:]), Net: "unixpacket"})
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { l.Close() })
	return e
}

// queuePair returns a shm queue-pair blob that names the endpoint (docs/PROTOCOL.md).
func (e endpoint) queuePair(c *cluster) []byte {
	c.Helper()
	id, err := control.NodeID()
	if err != nil {
		c.Fatal(err)
	}
	boot, space, _ := strings.Cut(id, "/")
	netns, err := strconv.ParseUint(space, 10, 64)
	if err != nil {
		c.Fatal(err)
	}
	bootID, err := hex.DecodeString(strings.ReplaceAll(boot, "-", ""))
	if err != nil {
		c.Fatal(err)
	}
	b := []byte("RFQS\x02\x00\x01\x00")
	b = binary.LittleEndian.AppendUint64(b, netns)
	b = append(append(b, bootID...), e[:]...)
	var token [16]byte
	rand.Read(token[:])
	return append(append(b, token[:]...), make([]byte, 16)...)
}

// channel returns a client's channel blob that names the endpoint. It is valid unless change damages it. The checksum is made last.
func (e endpoint) channel(c *cluster, change func(b []byte)) []byte {
	c.Helper()
	le, qp := binary.LittleEndian, e.queuePair(c)
	b := make([]byte, 56, 256)
	copy(b, "RFCH\x01\x00\x01\x01\x01\x00\x00\x00")
	le.PutUint16(b[12:], 8)
	le.PutUint16(b[14:], uint16(len(qp)))
	le.PutUint32(b[16:], 16<<10)
	le.PutUint32(b[20:], 0x11)
	const slots, bulk = 0x7f0011223340, 2 << 20
	le.PutUint64(b[24:], slots)
	le.PutUint64(b[32:], bulk)
	le.PutUint64(b[40:], slots+8*(64+16<<10))
	le.PutUint32(b[48:], 0x11)
	b = append(b, qp...)
	if change != nil {
		change(b)
	}
	le.PutUint32(b[52:], 0)
	le.PutUint32(b[52:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// request returns a request for a lease of one worker. It is valid unless change damages it.
func (c *cluster) request(change func(*control.LeaseRequest)) *control.LeaseRequest {
	c.Helper()
	code, err := os.ReadFile(c.library)
	if err != nil {
		c.Fatal(err)
	}
	sum := sha256.Sum256(code)
	r := &control.LeaseRequest{ProtocolVersion: control.ProtocolVersion, RequestId: make([]byte, 16), CodeSha256: sum[:], Workers: 1,
		MemoryPerWorker: 64 << 20, Provider: "shm", ClientBlobs: [][]byte{endpoint{1}.channel(c, nil)}}
	rand.Read(r.RequestId)
	if change != nil {
		change(r)
	}
	return r
}
