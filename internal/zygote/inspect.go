package zygote

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Libraries are arbitrary bytes from tenants. A worker that was prepared only for this reads them: in the sandbox of
// workers, with limits on memory and processor time, and without system calls (worker/inspect.c).
// It exits after one answer. This file trusts nothing in that answer, because the library may have taken over its
// reader.

// InspectTimeout bounds the reading of one library, including its process, if the context has no earlier deadline.
const InspectTimeout = 10 * time.Second

const (
	inspectorsMost   = 2        // inspectors at a time, for uploads and for crashes each
	inspectMemory    = 16 << 20 // additional memory of an inspector in bytes; it needs 2 MiB
	inspectSeconds   = 2        // processor time of an inspector
	inspectFixed     = 16       // bytes of dp_msg_inspect before the offsets
	inspectedNameMax = 1024     // DP_ELF_NAME_MAX
	inspectedMax     = 2 << 20  // DP_ELF_NAMES_MAX
	offsetsMax       = 128      // DP_ELF_OFFSETS_MAX
	symbolLineMax    = 275      // DP_ELF_LINE_MAX
)

// inspectors bounds how many processes read libraries. Uploads and crashes do not wait for each other.
type inspectors struct{ uploads, crashes chan struct{} }

func newInspectors() inspectors {
	return inspectors{make(chan struct{}, inspectorsMost), make(chan struct{}, inspectorsMost)}
}

// Inspect returns the functions that a library exports, sorted by bytes. The position of a function is its index. code
// is a sealed memfd, which the caller keeps. A *WorkerError of status DP_BAD_LIBRARY says why the node cannot run the
// library. Inspect waits while two other libraries are being read. Its process is gone when it returns.
func (z *Zygote) Inspect(ctx context.Context, code *os.File) ([]string, error) {
	count, text, err := z.readLibrary(ctx, z.inspectors.uploads, code, nil, inspectedMax)
	if err != nil {
		return nil, fmt.Errorf("inspect the library: %w", err)
	}
	names, err := inspectedNames(count, text)
	if err != nil {
		return nil, &WorkerError{Status: wire.StatusBadLibrary, Text: fmt.Sprintf("inspect the library: the process that read it answered nonsense: %v", err)}
	}
	return names, nil
}

// Symbols returns the names of the functions at offsets from the beginning of a library, as "name+0x1f", in the order
// of the offsets. This includes static functions if the library is not stripped. Unknown names are "", as are those of
// offsets beyond the first 128. Symbols waits while the libraries of two other crashes are being read.
func (z *Zygote) Symbols(ctx context.Context, code *os.File, offsets []uint64) ([]string, error) {
	asked := offsets[:min(len(offsets), offsetsMax)]
	names := make([]string, len(offsets))
	if len(asked) == 0 {
		return names, nil
	}
	count, text, err := z.readLibrary(ctx, z.inspectors.crashes, code, asked, len(asked)*symbolLineMax)
	if err != nil {
		return nil, fmt.Errorf("name %d offsets in the library: %w", len(asked), err)
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	if count != len(asked) || len(lines) != count+1 || len(lines[count]) != 0 {
		return nil, fmt.Errorf("name %d offsets in the library: %d lines for %d offsets", len(asked), len(lines)-1, count)
	}
	for i, line := range lines[:count] {
		if len(line) > symbolLineMax {
			return nil, fmt.Errorf("name %d offsets in the library: a name of %d bytes", len(asked), len(line))
		}
		names[i] = wire.Printable(line)
	}
	return names, nil
}

// inspectedNames checks and splits the names that an inspector has written.
func inspectedNames(count int, b []byte) ([]string, error) {
	if count < 1 || count > functionsMax || len(b) == 0 || b[len(b)-1] != 0 {
		return nil, fmt.Errorf("%d functions in %d bytes", count, len(b))
	}
	names := strings.Split(string(b[:len(b)-1]), "\x00")
	if len(names) != count {
		return nil, fmt.Errorf("%d names of %d functions", len(names), count)
	}
	for i, name := range names {
		if name == "" || len(name) > inspectedNameMax || !utf8.ValidString(name) {
			return nil, fmt.Errorf("function %d has a name of %d bytes, or one that is not UTF-8", i, len(name))
		}
		if i > 0 && names[i-1] >= name {
			return nil, fmt.Errorf("function %d is out of order", i)
		}
	}
	return names, nil
}

// inspectBody returns the body of INSPECT, or of SYMBOLS if there are offsets.
func inspectBody(offsets []uint64) []byte {
	le := binary.LittleEndian
	b := make([]byte, inspectFixed, inspectFixed+8*len(offsets))
	le.PutUint64(b, inspectMemory)
	le.PutUint32(b[8:], inspectSeconds)
	le.PutUint32(b[12:], uint32(len(offsets)))
	for _, o := range offsets {
		b = le.AppendUint64(b, o)
	}
	return b
}

// readLibrary starts an inspector for a library, and returns what it has written: at most room bytes.
func (z *Zygote) readLibrary(ctx context.Context, turn chan struct{}, code *os.File, offsets []uint64, room int) (count int, text []byte, err error) {
	select {
	case turn <- struct{}{}:
		defer func() { <-turn }()
	case <-ctx.Done():
		return 0, nil, fmt.Errorf("waiting for other libraries to be read: %w", context.Cause(ctx))
	case <-z.ctx.Done():
		return 0, nil, errClosed
	}
	ctx, cancel := context.WithTimeoutCause(ctx, InspectTimeout, fmt.Errorf("timed out after %v", InspectTimeout))
	defer cancel()
	fd, err := fixedMemfd("rfaas-inspect", room, unix.F_SEAL_SEAL)
	if err != nil {
		return 0, nil, err
	}
	out := os.NewFile(uintptr(fd), "memfd:rfaas-inspect")
	defer out.Close()
	w, err := z.inspector(ctx)
	if err != nil {
		return 0, nil, err
	}
	count, n, err := w.inspect(ctx, code, out, offsets)
	err = w.finishTask(err, unreadable) // the inspector is reaped, so the output does not change any more
	if err != nil {
		return 0, nil, err
	}
	if n > room {
		return 0, nil, &WorkerError{Status: wire.StatusBadLibrary, Text: fmt.Sprintf("the process that read it answered with %d bytes, at most %d were asked for", n, room)}
	}
	text = make([]byte, n)
	if _, err := out.ReadAt(text, 0); err != nil {
		return 0, nil, err
	}
	return count, text, nil
}

// inspector clones a worker with a complete sandbox and no lease. It does not use the pool, which is for leases.
func (z *Zygote) inspector(ctx context.Context) (*Worker, error) {
	return z.prepared(ctx, &Spec{Provider: "shm", GIDIndex: -1, MemoryLimit: inspectMemory})
}

// unreadable is the error of an inspector that has ended without an answer.
func unreadable(x *Exit) error {
	reason := x.Reason
	if x.Signal == int(unix.SIGKILL) && x.Status != wire.StatusMemoryLimit {
		reason = fmt.Sprintf("it takes more than %d s of processor time, or the node has no memory left", inspectSeconds)
	}
	return &WorkerError{Status: wire.StatusBadLibrary, Text: "its ELF tables cannot be read: " + reason}
}

var errNoAnswer = errors.New("the process that read the library ended without an answer")

// inspect sends a prepared worker its task and reads the answer: the number of names or lines, and of their bytes.
func (w *Worker) inspect(ctx context.Context, code, out *os.File, offsets []uint64) (count, n int, err error) {
	typ := wire.Inspect
	if len(offsets) > 0 {
		typ = wire.Symbols
	}
	m := wire.Message{Type: typ, ID: w.id, Body: inspectBody(offsets)}
	stop := context.AfterFunc(ctx, func() { w.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err = leaseFDs(code, out, func(code, out int) error {
		_, _, err := w.conn.WriteMsgUnix(m.Encode(), unix.UnixRights(code, out), nil)
		return err
	})
	if err != nil && ctx.Err() == nil {
		return 0, 0, errNoAnswer
	}
	buf := make([]byte, wire.Max)
	got, err := w.conn.Read(buf)
	switch {
	case ctx.Err() != nil:
		return 0, 0, context.Cause(ctx)
	case err != nil:
		return 0, 0, errNoAnswer
	}
	answer, err := wire.Decode(buf[:got])
	switch {
	case err != nil:
	case answer.Type == wire.Inspected && len(answer.Body) == 8 && answer.U32(0) <= functionsMax && answer.U32(1) <= inspectedMax:
		return int(answer.U32(0)), int(answer.U32(1)), nil
	case answer.Type == wire.Failed:
		return 0, 0, answer.Failure()
	default:
		err = fmt.Errorf("message of type %d with %d bytes", answer.Type, len(answer.Body))
	}
	return 0, 0, &WorkerError{Status: wire.StatusBadLibrary, Text: fmt.Sprintf("the process that read the library broke the protocol: %v", err)}
}
