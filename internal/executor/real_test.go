package executor

import (
	"bytes"
	"compress/zlib"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/invoke"
	"github.com/rfaas-go/rfaas/tests/channel"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

const realSource = `
#include <stdint.h>
#include <string.h>
#include <unistd.h>
uint32_t crash(void *a, uint32_t n, void *r) { write(2, "last words", 10); *(volatile int *)8 = 1; return 0; }
uint32_t echo(void *a, uint32_t n, void *r) { memcpy(r, a, n); return n; }
`

// realProvider returns the provider of tests with real workers: verbs in the virtual machine, where a missing device is a failure, else shm.
func realProvider() string {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		return dataplane.Verbs
	}
	return dataplane.SHM
}

// real is an executor with real workers, and a client's side to it.
type real struct {
	*node
	stop     context.CancelFunc
	done     chan error
	endpoint *channel.Endpoint
}

// newReal starts an executor as cmd/executor does.
func newReal(t *testing.T, settings ...string) *real {
	t.Helper()
	leakcheck.Check(t, objects)
	worker := os.Getenv("RFAAS_WORKER")
	if worker == "" {
		worker = "../../libexec/rfaas-worker"
	}
	if _, err := os.Stat(worker); err != nil {
		t.Fatalf("no rfaas-worker (run make build, or set RFAAS_WORKER): %v", err)
	}
	s := testSettings(t, append([]string{"--providers", realProvider()}, settings...)...)
	s.Worker, s.Cores, s.AddressFile = worker, config.Cores{Count: 1}, filepath.Join(t.TempDir(), "address")
	r := &real{node: &node{t: t, log: &testkit.Buffer{}}, done: make(chan error, 1)}
	log := slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	go func() { r.done <- Serve(ctx, context.Background(), s, Handover{}, log) }()
	var address string
	eventually(t, "the executor is ready", func() bool {
		select {
		case err := <-r.done:
			t.Fatal(err)
		default:
		}
		b, err := os.ReadFile(s.AddressFile)
		address = strings.TrimSpace(string(b))
		return err == nil
	})
	conn, err := control.Dial(address, control.DialConfig{SecretFile: s.SecretFile})
	if err != nil {
		t.Fatal(err)
	}
	r.conn, r.ExecutorClient = conn, control.NewExecutorClient(conn)
	dev, err := dataplane.Open(realProvider(), dataplane.Options{GIDIndex: -1})
	if err != nil {
		t.Fatal(err)
	}
	if r.endpoint, err = channel.NewEndpoint(dev, 4, 4); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.endpoint.Close()
		dev.Close()
		conn.Close()
		stop()
		if err := <-r.done; err != nil {
			t.Errorf("serve: %v", err)
		}
		if t.Failed() {
			t.Logf("the executor said:\n%s", r.log.String())
		}
	})
	return r
}

func (r *real) channel() (*channel.Channel, []byte) {
	r.t.Helper()
	ch, err := r.endpoint.NewChannel(1, 4096)
	if err != nil {
		r.t.Fatal(err)
	}
	blob, err := ch.Offer()
	if err != nil {
		r.t.Fatal(err)
	}
	return ch, blob
}

func (r *real) deploy(lib []byte) (sum, []string) {
	r.t.Helper()
	h := sum(sha256.Sum256(lib))
	reply, err := control.Upload(r.ctx(), r.ExecutorClient, "lib.so", h, int64(len(lib)), bytes.NewReader(lib))
	if err != nil {
		r.t.Fatal(err)
	}
	return h, reply.GetFunctions()
}

func (r *real) ask(h sum, blob []byte) (*control.LeaseReply, error) {
	n := &node{t: r.t, sum: h}
	req := n.request(1)
	req.Provider, req.ClientBlobs[0] = realProvider(), blob
	return r.Lease(r.ctx(), req)
}

// call invokes function fn and checks that the result is the argument.
func (r *real) call(ch *channel.Channel, fn uint32) {
	r.t.Helper()
	out := make([]byte, 64)
	n, st := ch.Call(fn, []byte("over there"), out, dataplane.Now()+int64(testBound))
	if st != 0 || string(out[:n]) != "over there" {
		r.t.Fatalf("call: %q, status %d", out[:n], st)
	}
}

func gone(pid int32) bool { return unix.Kill(int(pid), 0) == unix.ESRCH }

func TestRealWorkers(t *testing.T) {
	r := newReal(t)
	h, functions := r.deploy(compile(t, realSource, "-shared", "-fPIC"))
	if fmt.Sprint(functions) != "[crash echo]" {
		t.Fatalf("functions %v", functions)
	}
	ch, blob := r.channel()
	defer ch.Close()
	l, err := r.ask(h, blob)
	if err != nil {
		t.Fatal(err)
	}
	ev := r.events(l.GetLeaseId())
	w := l.GetWorkers()[0]
	if s := w.GetSteps(); s.GetFork() == 0 || s.GetConnect() == 0 || s.GetCode() == 0 {
		t.Errorf("the steps of the start: %v", s)
	}
	if err := ch.Connect(w.GetBlob()); err != nil {
		t.Fatal(err)
	}
	r.call(ch, 1)
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(int(w.GetPid()), &set); err != nil || set.Count() != 1 || !set.IsSet(int(w.GetCpus()[0])) {
		t.Errorf("the worker's cores are %v (%v), its grant says %v", set, err, w.GetCpus())
	}

	// A crash is reported, and the worker can be replaced on its core.
	ended := make(chan dataplane.Status, 1)
	go func() {
		_, st := ch.Call(0, nil, nil, dataplane.Now()+int64(testBound))
		ended <- st
	}()
	e := ev.want(control.Event_KIND_WORKER_DIED)
	ch.Fail(dataplane.StatusWorkerDied) // as clients do: on verbs a connection does not tell by itself
	if st := <-ended; st.Class() != dataplane.ErrConnection {
		t.Errorf("the call ended with %v", st)
	}
	if !strings.Contains(e.GetReason(), "SIGSEGV") || string(e.GetOutputTail()) != "last words" || e.GetPid() != w.GetPid() {
		t.Errorf("event %v", e)
	}
	ch2, blob2 := r.channel()
	defer ch2.Close()
	rep, err := r.Replace(r.ctx(), &control.ReplaceRequest{LeaseId: l.GetLeaseId(), ClientBlob: blob2})
	if err != nil {
		t.Fatal(err)
	}
	if err := ch2.Connect(rep.GetWorker().GetBlob()); err != nil {
		t.Fatal(err)
	}
	r.call(ch2, 1)
	r.release(l.GetLeaseId())
	if !gone(rep.GetWorker().GetPid()) {
		t.Error("Release returned and the worker is still there")
	}
	ev.want(control.Event_KIND_LEASE_ENDED)

	// A lease that goes on when the executor drains.
	ch3, blob3 := r.channel()
	defer ch3.Close()
	if l, err = r.ask(h, blob3); err != nil {
		t.Fatal(err)
	}
	ev = r.events(l.GetLeaseId())
	r.stop()
	ev.want(control.Event_KIND_DRAINING)
	ev.want(control.Event_KIND_LEASE_ENDED)
	if pid := l.GetWorkers()[0].GetPid(); !gone(pid) {
		t.Error("the lease ended and its worker is still there")
	}
}

func TestRealFailures(t *testing.T) {
	r := newReal(t)
	refused := func(h sum, text string) {
		t.Helper()
		ch, blob := r.channel() // a blob connects once
		defer ch.Close()
		_, err := r.ask(h, blob)
		wantError(t, err, codes.InvalidArgument, control.ClassInvalid, text)
		if control.StatusOf(err) != statusBadLibrary {
			t.Errorf("status %d", control.StatusOf(err))
		}
	}
	dep := filepath.Join(t.TempDir(), "libnotthere.so")
	if err := os.WriteFile(dep, compile(t, "int dep(void) { return 1; }", "-shared", "-fPIC", "-Wl,-soname,libnotthere.so.7"), 0o600); err != nil {
		t.Fatal(err)
	}
	h, _ := r.deploy(compile(t, "int dep(void); int f(void) { return dep(); }", "-shared", "-fPIC", dep))
	refused(h, "libnotthere.so.7")
	h, _ = r.deploy(compile(t, "int absent_symbol(void); int f(void) { return absent_symbol(); }", "-shared", "-fPIC"))
	refused(h, "absent_symbol")
	h, _ = r.deploy(compile(t, "#include <stdlib.h>\n__attribute__((constructor)) static void c(void) { abort(); } int f(void) { return 1; }", "-shared", "-fPIC"))
	refused(h, "SIGABRT")

	// Queue-pair blobs that only the provider in the worker can judge. The last ones belong to no client.
	h, _ = r.deploy(compile(t, realSource, "-shared", "-fPIC"))
	ch, good := r.channel()
	defer ch.Close()
	other := byte(invoke.ProviderVerbs)
	if realProvider() == dataplane.Verbs {
		other = byte(invoke.ProviderSHM)
	}
	for name, c := range map[string]struct {
		change func(qp []byte) []byte
		text   string
	}{
		"short":          {func(qp []byte) []byte { return qp[:len(qp)-1] }, fmt.Sprint(len(queuePair(t, good)) - 1)},
		"long":           {func(qp []byte) []byte { return append(qp, 0) }, fmt.Sprint(len(queuePair(t, good)) + 1)},
		"other provider": {func(qp []byte) []byte { qp[6] = other; return qp }, fmt.Sprintf("provider %d", other)},
		"magic":          {func(qp []byte) []byte { qp[0] ^= 0xff; return qp }, "magic"},
	} {
		t.Run(name, func(t *testing.T) {
			b, err := invoke.UnmarshalChannelBlob(good)
			if err != nil {
				t.Fatal(err)
			}
			b.QueuePair = c.change(b.QueuePair)
			_, err = r.ask(h, b.Marshal())
			wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "worker 0", c.text)
			if control.StatusOf(err) != statusBadBlob {
				t.Errorf("status %d", control.StatusOf(err))
			}
		})
	}

	i, err := r.Info(r.ctx(), &control.InfoRequest{ProtocolVersion: 1})
	if err != nil || i.GetFreeCores() != i.GetCores() {
		t.Errorf("after refused leases: %v, %v", i, err)
	}
}

func queuePair(t *testing.T, blob []byte) []byte {
	t.Helper()
	b, err := invoke.UnmarshalChannelBlob(blob)
	if err != nil {
		t.Fatal(err)
	}
	return b.QueuePair
}

// Leases come and go and leave nothing: no descriptor, no process, no core.
func TestRealLeaseCycles(t *testing.T) {
	r := newReal(t, "--pool", "0") // workers that wait hold descriptors, sometimes
	h, _ := r.deploy(compile(t, realSource, "-shared", "-fPIC"))
	cycle := func() {
		ch, blob := r.channel()
		defer ch.Close()
		l, err := r.ask(h, blob)
		if err != nil {
			t.Fatal(err)
		}
		if err := ch.Connect(l.GetWorkers()[0].GetBlob()); err != nil {
			t.Fatal(err)
		}
		ev := r.events(l.GetLeaseId())
		r.call(ch, 1)
		r.release(l.GetLeaseId())
		ev.want(control.Event_KIND_LEASE_ENDED)
		ev.wantEnd()
	}
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	cycle() // what is made once is there now
	before := -1
	eventually(t, "what is made ahead is there too", func() bool { // a control group, 5 ms after a start
		last := before
		before = open()
		time.Sleep(20 * time.Millisecond)
		return last == before
	})
	start := time.Now()
	cycles := 100
	if realProvider() == dataplane.Verbs {
		cycles = 20 // an emulated machine
	}
	for range cycles {
		cycle()
	}
	t.Logf("%v for a lease, a first call and the release", (time.Since(start) / time.Duration(cycles)).Round(time.Microsecond))
	eventually(t, "the descriptors are back", func() bool { return open() <= before })
	i, err := r.Info(r.ctx(), &control.InfoRequest{ProtocolVersion: 1})
	if err != nil || i.GetFreeCores() != i.GetCores() || i.GetFreeMemoryBytes() != i.GetMemoryBytes() {
		t.Errorf("capacity at the end: %v, %v", i, err)
	}
}

// bombSource crashes in a static function.
const bombSource = `
static __attribute__((noinline)) void inner(volatile int *p) { *p = 1; __asm__ volatile(""); }
static __attribute__((noinline)) void middle(volatile int *p) { inner(p); __asm__ volatile(""); }
unsigned visible(void *a, unsigned n, void *r) { (void)a, (void)n, (void)r; middle((volatile int *)8); __asm__ volatile(""); return 0; }
`

// compressedNames gives a library a compressed table of section names of the given size: bytes that are zeros, deflated.
func compressedNames(t *testing.T, lib []byte, size int) []byte {
	t.Helper()
	le := binary.LittleEndian
	var packed bytes.Buffer
	packed.Write(le.AppendUint64(le.AppendUint64(le.AppendUint32(le.AppendUint32(nil, 1), 0), uint64(size)), 1)) // Elf64_Chdr: zlib
	z, err := zlib.NewWriterLevel(&packed, zlib.BestCompression)
	if err != nil {
		t.Fatal(err)
	}
	zeros := make([]byte, 1<<20)
	for range size / len(zeros) {
		if _, err := z.Write(zeros); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	out := bytes.Clone(lib)
	header := out[int(le.Uint64(out[40:]))+64*int(le.Uint16(out[62:])):] // of .shstrtab
	le.PutUint64(header[8:], le.Uint64(header[8:])|uint64(elf.SHF_COMPRESSED))
	le.PutUint64(header[24:], uint64(len(out)))
	le.PutUint64(header[32:], uint64(packed.Len()))
	return append(out, packed.Bytes()...)
}

// manySymbols gives a library a symbol table of n entries, each of which contains every offset and has no name, and an
// overlapping string table.
func manySymbols(t *testing.T, lib []byte, n int) []byte {
	t.Helper()
	le := binary.LittleEndian
	out := bytes.Clone(lib)
	for len(out)%8 != 0 {
		out = append(out, 0)
	}
	symbols := make([]byte, 24*n)
	for i := range n {
		s := symbols[24*i:]
		le.PutUint32(s, 1<<30)
		s[4] = elf.ST_INFO(elf.STB_LOCAL, elf.STT_FUNC)
		le.PutUint64(s[16:], 1<<62)
	}
	sections := out[le.Uint64(out[40:]):]
	for h := sections; len(h) >= 64; h = h[64:] {
		if elf.SectionType(le.Uint32(h[4:])) != elf.SHT_SYMTAB {
			continue
		}
		strings := sections[64*le.Uint32(h[40:]):]
		for _, table := range [][]byte{h, strings} {
			le.PutUint64(table[24:], uint64(len(out)))
			le.PutUint64(table[32:], uint64(len(symbols)))
		}
		return append(out, symbols...)
	}
	t.Fatal("the library has no symbol table")
	return nil
}

// peakRSS returns the largest memory use of this process since the last resetPeak, in bytes.
func peakRSS(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	var kib int
	_, after, _ := strings.Cut(string(b), "VmHWM:")
	if _, err := fmt.Sscan(after, &kib); err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

func resetPeak(t *testing.T) {
	t.Helper()
	debug.FreeOSMemory()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
}

// Libraries that exhaust their reader use no memory of the executor, neither on an upload nor after a crash. Static
// functions are still named after a crash, if the library's tables can be read.
func TestLibrariesAreNotReadHere(t *testing.T) {
	r := newReal(t, "--code-limit", "64MiB", "--code-cache", "256MiB")
	plain := compile(t, bombSource, "-shared", "-fPIC", "-O1")
	const inflated, most = 256 << 20, 64 << 20
	defer debug.SetGCPercent(debug.SetGCPercent(10)) // so that garbage of earlier tests does not count as growth
	for name, c := range map[string]struct {
		lib    []byte
		frames []string
	}{
		"plain":            {plain, []string{"inner+0x", "middle+0x", "visible+0x"}},
		"compressed names": {compressedNames(t, plain, inflated), []string{"inner+0x", "middle+0x", "visible+0x"}},
		"many symbols":     {manySymbols(t, plain, 1<<20), []string{"library+0x", "library+0x", "visible+0x"}},
	} {
		t.Run(name, func(t *testing.T) {
			sub := *r
			sub.node = &node{t: t, conn: r.conn, ExecutorClient: r.ExecutorClient, log: r.log}
			resetPeak(t)
			before := peakRSS(t)
			h, functions := sub.deploy(c.lib)
			if fmt.Sprint(functions) != "[visible]" {
				t.Fatalf("functions %v", functions)
			}
			ch, blob := sub.channel()
			defer ch.Close()
			l, err := sub.ask(h, blob)
			if err != nil {
				t.Fatal(err)
			}
			if err := ch.Connect(l.GetWorkers()[0].GetBlob()); err != nil {
				t.Fatal(err)
			}
			ev := sub.events(l.GetLeaseId())
			begun := time.Now()
			var call sync.WaitGroup
			call.Go(func() { ch.Call(0, nil, nil, dataplane.Now()+int64(testBound)) })
			e := ev.want(control.Event_KIND_WORKER_DIED)
			t.Logf("told after %v; the executor grew by %d KiB", time.Since(begun).Round(10*time.Microsecond), (peakRSS(t)-before)>>10)
			ch.Fail(dataplane.StatusWorkerDied)
			call.Wait() // before ch is closed
			lines := strings.Split(e.GetBacktrace(), "\n")
			for i, frame := range c.frames {
				if i >= len(lines) || !strings.HasPrefix(lines[i], frame) {
					t.Errorf("frame %d is not %s in\n%s", i, frame, e.GetBacktrace())
				}
			}
			if grew := peakRSS(t) - before; grew > most {
				t.Errorf("the executor grew by %d bytes", grew)
			}
			sub.release(l.GetLeaseId())
		})
	}
}
