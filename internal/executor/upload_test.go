package executor

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

func library(size int) ([]byte, sum) {
	b := make([]byte, size)
	rand.Read(b)
	return b, sha256.Sum256(b)
}

func (n *node) upload(b []byte, h sum, size int) (*control.UploadReply, error) {
	return control.Upload(n.ctx(), n.ExecutorClient, "lib.so", h, int64(size), bytes.NewReader(b))
}

func TestUpload(t *testing.T) {
	n := newNode(t)
	b, h := library(700_001)
	r, err := n.upload(b, h, len(b))
	if err != nil || r.GetWasKnown() || fmt.Sprint(r.GetFunctions()) != "[alpha beta]" {
		t.Fatalf("upload: %v, %v", r, err)
	}
	if r, err = n.upload(b, h, len(b)); err != nil || !r.GetWasKnown() || len(r.GetFunctions()) != 2 {
		t.Fatalf("second upload: %v, %v", r, err)
	}
	c := n.e.codes.acquire(h, "")
	defer n.e.codes.release(c)
	got := make([]byte, len(b))
	if _, err := c.file.ReadAt(got, 0); err != nil || !bytes.Equal(got, b) {
		t.Fatalf("stored code differs (%v)", err)
	}
	if _, err := c.file.WriteAt([]byte{0}, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("writing into stored code: %v, want EPERM", err)
	}
	if err := c.file.Truncate(1); !errors.Is(err, unix.EPERM) {
		t.Errorf("cutting stored code: %v, want EPERM", err)
	}
}

func TestBadUploads(t *testing.T) {
	n := newNode(t)
	b, h := library(1000)
	send := func(chunks ...*control.UploadChunk) error {
		s, err := n.Upload(n.ctx())
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range chunks {
			if s.Send(c) != nil {
				break // the answer is there
			}
		}
		_, err = s.CloseAndRecv()
		return err
	}
	head := func(size uint64, data []byte) *control.UploadChunk {
		return &control.UploadChunk{Sha256: h[:], Size: size, Data: data}
	}
	const invalid, inv = codes.InvalidArgument, control.ClassInvalid
	n.e.codes.inspect = func(context.Context, *os.File) ([]string, error) {
		return nil, fmt.Errorf("inspect the library: %w", &zygote.WorkerError{Status: statusBadLibrary, Text: "it exports no functions"})
	}
	for name, c := range map[string]struct {
		err  error
		text []string
	}{
		"nothing":         {send(), []string{"before all bytes"}},
		"short hash":      {send(&control.UploadChunk{Sha256: h[:5], Size: 10}), []string{"sha256 has 5 bytes", "32"}},
		"no size":         {send(head(0, b)), []string{"0 bytes"}},
		"above the limit": {send(head(1<<20+1, nil)), []string{"1048577", "1048576"}},
		"absurd size":     {send(head(1<<63, nil)), []string{"9223372036854775808"}},
		"cut":             {send(head(1000, b[:999])), []string{"before all bytes"}},
		"too long":        {send(head(999, b)), []string{"more bytes than"}},
		"too long later":  {send(head(1000, b[:500]), &control.UploadChunk{Data: b[:501]}), []string{"more bytes than"}},
		"empty chunk":     {send(head(1000, b[:500]), &control.UploadChunk{}), []string{"without data"}},
		"other bytes":     {send(head(1000, bytes.Repeat([]byte{7}, 1000))), []string{"SHA-256", fmt.Sprintf("%x", h[:])}},
		"not a library":   {send(head(1000, b)), []string{"it exports no functions", fmt.Sprintf("%x", h[:6])}},
	} {
		t.Run(name, func(t *testing.T) { wantError(t, c.err, invalid, inv, c.text...) })
	}
	// An error that the library has not caused has another class: the same upload may succeed later.
	n.e.codes.inspect = func(context.Context, *os.File) ([]string, error) {
		return nil, fmt.Errorf("inspect the library: %w", context.DeadlineExceeded)
	}
	wantError(t, send(head(1000, b)), codes.ResourceExhausted, control.ClassBusy, "inspect the library")
	if c := n.e.codes.acquire(h, ""); c != nil {
		t.Error("a refused library is stored")
	}
	n.e.codes.mu.Lock()
	defer n.e.codes.mu.Unlock()
	if n.e.codes.used != uint64(len(n.lib)) || len(n.e.codes.uploads) != 0 {
		t.Errorf("refused uploads left %d bytes in use and %d uploads", n.e.codes.used, len(n.e.codes.uploads))
	}
}

// Simultaneous uploads of the same library are merged into one. If the first uploader fails, another one takes over.
func TestUploadsCollapse(t *testing.T) {
	s := newCodeStore(1<<20, 1<<20, nil)
	var inspected atomic.Int32
	s.inspect = func(context.Context, *os.File) ([]string, error) { inspected.Add(1); return []string{"f"}, nil }
	b, h := library(1000)

	broken := errors.New("connection lost")
	entered, fail := make(chan struct{}), make(chan struct{})
	first := make(chan error, 1)
	go func() {
		_, _, err := s.add(context.Background(), h, "", 1000, func() ([]byte, error) {
			close(entered)
			<-fail
			return nil, broken
		})
		first <- err
	}()
	<-entered
	var read atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			names, _, err := s.add(context.Background(), h, "", 1000, func() ([]byte, error) { read.Add(1); return b, nil })
			if err != nil || len(names) != 1 {
				t.Errorf("add: %v, %v", names, err)
			}
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, _, err := s.add(ctx, h, "", 1000, nil); control.ClassOf(err) != control.ClassConnection {
		t.Errorf("waiting with an ended context: %v", err)
	}
	if read.Load() != 0 {
		t.Error("a read during the first upload")
	}
	close(fail)
	wg.Wait()
	if err := <-first; control.ClassOf(err) != control.ClassFatal {
		t.Errorf("the broken upload: %v", err)
	}
	if read.Load() != 1 || inspected.Load() != 1 {
		t.Errorf("read %d times, inspected %d times; want once", read.Load(), inspected.Load())
	}
	s.close()
}

// A handover does not wait for a client that sends nothing more of its library or table. Nothing of the transfer is left.
func TestHandoverEndsTransfers(t *testing.T) {
	n := newTCPNode(t)
	b, h := library(100_000)
	s, err := n.Upload(n.ctx())
	if err == nil {
		err = s.Send(&control.UploadChunk{Sha256: h[:], Size: uint64(len(b)), Data: b[:1]})
	}
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the upload begins", func() bool {
		n.e.codes.mu.Lock()
		defer n.e.codes.mu.Unlock()
		return len(n.e.codes.uploads) > 0
	})
	table, tableSum := library(1000)
	over := make(chan error, 1)
	// On tcp the client must connect. This one never does, so the transfer keeps waiting.
	go func() {
		over <- n.provide(newSource(t, table), tableSum, false, func(r *control.FetchRequest) { r.Provider = "tcp" })
	}()
	eventually(t, "the table's transfer begins", func() bool { return n.e.table.Capacity().SetAside > 0 })
	if err := n.e.turns.close(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.e.codes.mu.Lock()
	if n.e.codes.used != uint64(len(n.lib)) || len(n.e.codes.uploads) != 0 {
		t.Errorf("the upload left %d bytes in use and %d uploads", n.e.codes.used, len(n.e.codes.uploads))
	}
	n.e.codes.mu.Unlock()
	if aside := n.e.table.Capacity().SetAside; aside != 0 {
		t.Errorf("%d bytes set aside", aside)
	}
	n.e.turns.open() // as after a handover that is refused
	_, err = s.CloseAndRecv()
	for what, err := range map[string]error{"upload": err, "table": <-over} {
		if status.Code(err) != codes.Unavailable || control.IsClassed(err) {
			t.Errorf("%s: %v, want an error after which the client repeats the request", what, err)
		}
	}
	if _, err := n.upload(b, h, len(b)); err != nil {
		t.Errorf("the upload, once more: %v", err)
	}
}

// An upload that is too slow fails and gives its space back. The upload of one owner does not wait for that of another.
func TestSlowUpload(t *testing.T) {
	n := newNode(t)
	b, h := library(100_000)
	n.e.codes.slowest = 1 << 20 // bytes per second: 95 ms for this library, in addition to the pause
	n.e.codes.pause = 200 * time.Millisecond
	s, err := n.Upload(n.ctx())
	if err != nil {
		t.Fatal(err)
	}
	err = s.Send(&control.UploadChunk{Sha256: h[:], Size: uint64(len(b)), Data: b[:1]})
	sent := 1
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for ; err == nil && sent < 1000; <-tick.C {
		err = s.Send(&control.UploadChunk{Data: b[sent : sent+1]})
		sent++
	}
	_, err = s.CloseAndRecv()
	wantError(t, err, codes.Unavailable, control.ClassConnection, "upload: not complete within 295")
	n.e.codes.mu.Lock()
	if n.e.codes.used != uint64(len(n.lib)) || len(n.e.codes.uploads) != 0 {
		t.Errorf("a slow upload left %d bytes in use and %d uploads", n.e.codes.used, len(n.e.codes.uploads))
	}
	n.e.codes.mu.Unlock()

	entered, goOn := make(chan struct{}), make(chan struct{})
	slow := make(chan error, 1)
	go func() {
		_, _, err := n.e.codes.add(context.Background(), h, "mallory", uint64(len(b)), func() ([]byte, error) {
			close(entered)
			<-goOn
			return b, nil
		})
		slow <- err
	}()
	<-entered
	if names, known, err := n.e.codes.add(t.Context(), h, "ann", uint64(len(b)), once(b)); err != nil || known || len(names) == 0 {
		t.Errorf("another owner's upload: %v, %v, %v", names, known, err)
	}
	close(goOn)
	if err := <-slow; err != nil {
		t.Error(err)
	}
	for _, owner := range []string{"ann", "mallory"} {
		c := n.e.codes.acquire(h, owner)
		if c == nil {
			t.Fatalf("%s does not have what it sent", owner)
		}
		n.e.codes.release(c)
	}
	if want := uint64(len(n.lib) + len(b)); n.e.codes.used != want {
		t.Errorf("%d bytes are in use, want %d", n.e.codes.used, want)
	}
}

func TestCodeMakesRoom(t *testing.T) {
	s := newCodeStore(1000, 2500, nil)
	s.inspect = func(context.Context, *os.File) ([]string, error) { return []string{"f"}, nil }
	add := func() (sum, error) {
		b, h := library(1000)
		_, _, err := s.add(t.Context(), h, "", 1000, once(b))
		return h, err
	}
	a, _ := add()
	b, _ := add()
	inUse := s.acquire(a, "")
	if _, err := add(); err != nil {
		t.Fatal(err)
	}
	if s.acquire(b, "") != nil {
		t.Error("the unused library is still there")
	}
	keep := s.acquire(a, "")
	if keep == nil {
		t.Fatal("a library in use was dropped")
	}
	c, err := add() // drops the third
	if err != nil {
		t.Fatal(err)
	}
	both := s.acquire(c, "")
	if _, err := add(); control.ClassOf(err) != control.ClassBusy {
		t.Errorf("no room: %v, want busy", err)
	}
	s.release(inUse)
	s.release(keep)
	s.release(both)
	if _, err := add(); err != nil {
		t.Errorf("room again: %v", err)
	}
	s.close()
}

// A library is written piece by piece to where it stays: of one far larger than a piece nothing else holds more than a piece.
func TestUploadIsStreamed(t *testing.T) {
	const pieces, size = 64, 1 << 20
	s := newCodeStore(pieces*size, pieces*size, nil)
	s.inspect = func(context.Context, *os.File) ([]string, error) { return []string{"f"}, nil }
	piece, _ := library(size)
	hash := sha256.New()
	for range pieces {
		hash.Write(piece)
	}
	given := 0
	next := func() ([]byte, error) { given++; return piece, nil }
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, known, err := s.add(t.Context(), sum(hash.Sum(nil)), "ann", pieces*size, next); err != nil || known || given != pieces {
		t.Fatalf("known %t, %v, %d pieces were read", known, err, given)
	}
	runtime.ReadMemStats(&after)
	if more := after.TotalAlloc - before.TotalAlloc; more > 4*size {
		t.Errorf("%d bytes were allocated for a library of %d", more, pieces*size)
	}
	if _, _, err := s.add(t.Context(), sum{1}, "ann", pieces*size+1, next); given != pieces || control.ClassOf(err) != control.ClassInvalid {
		t.Errorf("one byte above the limit: %d pieces were read, %v", given-pieces, err)
	}
	s.close()
}

// Libraries are bounded in number too: each uses descriptors of the executor, however small it is.
func TestManySmallLibraries(t *testing.T) {
	n := newNode(t)
	n.e.codes.most = 4
	descriptors := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	b, used := library(64)
	if _, err := n.upload(b, used, len(b)); err != nil {
		t.Fatal(err)
	}
	c := n.e.codes.acquire(used, "")
	defer n.e.codes.release(c)
	before := descriptors()
	for range 100 {
		b, h := library(64)
		if _, err := n.upload(b, h, len(b)); err != nil {
			t.Fatal(err)
		}
	}
	if more := descriptors() - before; more > 50 {
		t.Errorf("100 libraries of 64 bytes have taken %d descriptors", more)
	}
	if n.e.codes.acquire(used, "") == nil {
		t.Error("a library in use was dropped")
	} else {
		n.e.codes.release(c)
	}
	for range 3 { // all in use
		b, h := library(64)
		if _, err := n.upload(b, h, len(b)); err != nil {
			t.Fatal(err)
		}
		defer n.e.codes.release(n.e.codes.acquire(h, ""))
	}
	b, h := library(64)
	if _, err := n.upload(b, h, len(b)); control.ClassOf(err) != control.ClassBusy {
		t.Errorf("a library more than there is room for: %v", err)
	}
}

// Only one library of an owner is read at a time. However many libraries it uploads, and however long reading them takes,
// other owners find a free reader.
func TestLibrariesOfOneOwnerTakeTurns(t *testing.T) {
	const readers = 2 // as internal/zygote has
	free := make(chan struct{}, readers)
	slow := make(chan struct{})
	var ofAnn, mostOfAnn atomic.Int32
	s := newCodeStore(1<<20, 1<<20, func(ctx context.Context, f *os.File) ([]string, error) {
		free <- struct{}{}
		defer func() { <-free }()
		if st, err := f.Stat(); err != nil || st.Size() != 100 {
			return []string{"f"}, err
		}
		mostOfAnn.Store(max(mostOfAnn.Load(), ofAnn.Add(1)))
		defer ofAnn.Add(-1)
		<-slow
		return []string{"f"}, nil
	})
	add := func(owner string, size int) error {
		b, h := library(size)
		_, _, err := s.add(t.Context(), h, owner, uint64(size), func() ([]byte, error) { return b, nil })
		return err
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := add("tenant ann", 100); err != nil {
				t.Error(err)
			}
		})
	}
	waiting := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		if r := s.reading["tenant ann"]; r != nil {
			return r.users
		}
		return 0
	}
	eventually(t, "one of ann's uploads is read and the others wait", func() bool { return ofAnn.Load() > 0 && waiting() >= 8 })
	done := make(chan error, 1)
	go func() { done <- add("tenant ben", 99) }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("ben's library is not read while those of ann are")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.takeTurn(ctx, "tenant ann"); !errors.Is(err, context.Canceled) {
		t.Errorf("an owner that has given up: %v", err)
	}
	close(slow)
	wg.Wait()
	if n := mostOfAnn.Load(); n != 1 {
		t.Errorf("%d of ann's libraries were read at a time, want 1", n)
	}
	if len(s.reading) > 0 {
		t.Errorf("%d owners are remembered", len(s.reading))
	}
}
