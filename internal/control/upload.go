package control

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
)

// Upload sends a library of size bytes to an executor, which stores it under its SHA-256. It reads r once, in pieces of
// UploadChunkSize, and keeps one piece in memory. It blocks until the executor has the library or refused it.
func Upload(ctx context.Context, c ExecutorClient, name string, sum [sha256.Size]byte, size int64, r io.Reader) (*UploadReply, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream if reading fails
	stream, err := c.Upload(ctx)
	if err != nil {
		return nil, err
	}
	chunk := &UploadChunk{Sha256: sum[:], Size: uint64(size), Name: name}
	for left := size; ; {
		data := make([]byte, min(left, UploadChunkSize)) // gRPC may read a sent message later
		if _, err := io.ReadFull(r, data); err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		left -= int64(len(data))
		chunk.Data = data
		if err := stream.Send(chunk); err != nil {
			if errors.Is(err, io.EOF) {
				break // the executor answered early: it has the library, or refuses it
			}
			return nil, err
		}
		if left == 0 {
			break
		}
		chunk = &UploadChunk{}
	}
	return stream.CloseAndRecv()
}
