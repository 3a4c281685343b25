package hostile

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/control"
)

// upload sends chunks until the executor ends the stream or limit bytes are sent. It returns the bytes sent and the reply.
func (c *cluster) upload(ctx context.Context, first *control.UploadChunk, limit int) (sent int, reply *control.UploadReply, err error) {
	c.Helper()
	s, err := c.tenant("uploads").Upload(ctx)
	if err != nil {
		return 0, nil, err
	}
	chunk := first
	chunk.Data = make([]byte, 256<<10)
	for sent < limit {
		if err := s.Send(chunk); err != nil {
			break // the reply says why
		}
		sent += len(chunk.Data)
		chunk = &control.UploadChunk{Data: chunk.Data}
	}
	reply, err = s.CloseAndRecv()
	return sent, reply, err
}

func sumOf(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }

func uploadsMore(c *cluster) string {
	grown := c.executor.peak()
	const limit = 256 << 20
	sent, _, err := c.upload(c.within(patience), &control.UploadChunk{Sha256: sumOf(1), Size: 1 << 20, Name: "more"}, limit)
	switch {
	case err == nil:
		return "accepted"
	case sent >= limit:
		return fmt.Sprintf("all of %d MiB were read", limit>>20)
	case grown() > 64:
		return fmt.Sprintf("%d MiB of the executor", grown())
	}
	return ""
}

func declaresHuge(c *cluster) string {
	got := ""
	for _, size := range []uint64{1 << 63, 1 << 40, 1 << 30, 0} {
		sent, _, err := c.upload(c.within(patience), &control.UploadChunk{Sha256: sumOf(2), Size: size, Name: "huge"}, 64<<20)
		if err == nil || sent >= 64<<20 {
			got += fmt.Sprintf("%d bytes: %d sent, %v; ", size, sent, err)
		}
	}
	return got
}

// uploadsForEver opens many uploads and never sends their last byte. The executor keeps the bytes that arrived.
func uploadsForEver(c *cluster) string {
	const n, each = 64, 16 << 20
	d := c.newExecutor() // its memory is that of no earlier attack
	e := control.NewExecutorClient(c.dial(d.address, control.DialConfig{TokenFile: c.token("uploads")}))
	grown := d.peak()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wg sync.WaitGroup
	var sending, arrived atomic.Int64
	data := make([]byte, 1<<20)
	for i := range n {
		sending.Add(1)
		wg.Go(func() {
			s, err := e.Upload(ctx)
			for sent := 0; err == nil && sent < each; sent += len(data) {
				err = s.Send(&control.UploadChunk{Sha256: sumOf(byte(i)), Size: each + 1, Name: "for ever", Data: data})
				arrived.Add(1)
			}
			if sending.Add(-1); err == nil {
				<-s.Context().Done()
			}
		})
	}
	settle(func() int { return int(arrived.Load()) }, func() bool { return sending.Load() == 0 })
	most := grown()
	cancel()
	wg.Wait()
	if most > n*each>>20/2 {
		return fmt.Sprintf("%d MiB of the executor for %d uploads", most, n)
	}
	return ""
}

func uploadsForged(c *cluster) string {
	code, err := os.ReadFile(c.library)
	if err != nil {
		c.Fatal(err)
	}
	sum := sha256.Sum256(append(bytes.Clone(code), 0)) // the hash of another library
	s, err := c.tenant("uploads").Upload(c.within(patience))
	if err != nil {
		return err.Error()
	}
	s.Send(&control.UploadChunk{Sha256: sum[:], Size: uint64(len(code)), Name: "forged", Data: code})
	_, err = s.CloseAndRecv()
	return refusal("upload", err, codes.InvalidArgument)
}
