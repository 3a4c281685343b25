package executor

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/invoke"
	"google.golang.org/protobuf/proto"
)

// wantError checks code, class and text of an error that came over gRPC.
func wantError(t *testing.T, err error, code codes.Code, class control.Class, text ...string) {
	t.Helper()
	if status.Code(err) != code || control.ClassOf(err) != class {
		t.Errorf("error %v: code %v, class %v; want %v, %v", err, status.Code(err), control.ClassOf(err), code, class)
		return
	}
	for _, s := range text {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("error %q does not say %q", err, s)
		}
	}
	if strings.HasSuffix(err.Error(), ": "+class.String()) {
		t.Errorf("error %q says its class again", err)
	}
}

func TestLeaseAndRelease(t *testing.T) {
	n := newNode(t)
	req := n.request(2)
	req.CoresPerWorker, req.WaitMode, req.MemoryPerWorker, req.DurationMs = 2, control.WaitMode_WAIT_MODE_HOT, 1<<30, proto.Uint64(60_000)
	l, err := n.Lease(n.ctx(), req)
	if err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(l.GetFunctions()) != "[alpha beta]" || l.GetDurationMs() != 60_000 || l.GetLeaseId() == 0 {
		t.Errorf("grant %v", l)
	}
	for i, w := range l.GetWorkers() {
		f := n.z.alive()
		var spec zygote.Spec
		for _, x := range f {
			if x.pid == int(w.GetPid()) {
				spec = x.spec
			}
		}
		if string(w.GetBlob()) != fmt.Sprintf("worker %d", w.GetPid()) || fmt.Sprint(w.GetCpus()) != fmt.Sprint([]int{2 * i, 2*i + 1}) {
			t.Errorf("worker %d: %v", i, w)
		}
		if s := w.GetSteps(); s.GetFork() != 1 || s.GetConnect() != 2 || s.GetCode() != 3 {
			t.Errorf("worker %d: steps %v", i, s)
		}
		if string(spec.ClientBlob) != string(req.GetClientBlobs()[i]) || spec.WaitMode != 1 || spec.MemoryLimit != 1<<30 ||
			spec.Provider != "shm" || spec.Code == nil || fmt.Sprint(spec.Names) != "[alpha beta]" || spec.GIDIndex != -1 {
			t.Errorf("worker %d was started as %+v", i, spec)
		}
	}
	ev := n.events(l.GetLeaseId())
	if n.free() != 0 {
		t.Errorf("%d cores free, want 0", n.free())
	}
	n.release(l.GetLeaseId())
	if n.free() != 4 || len(n.z.alive()) != 0 {
		t.Errorf("after Release returned: %d cores free, %d workers alive", n.free(), len(n.z.alive()))
	}
	if e := ev.want(control.Event_KIND_LEASE_ENDED); e.GetReason() != "released" {
		t.Errorf("ended for reason %q", e.GetReason())
	}
	ev.wantEnd()
	// A normal lease and its end say nothing above debug.
	if s := n.log.String(); strings.Contains(s, "INFO") || strings.Contains(s, "WARN") || strings.Contains(s, "ERROR") {
		t.Errorf("the log of a normal lease:\n%s", s)
	}
}

// blobOf replaces the first client blob of a request by one that differs from a good one.
func blobOf(change func(*invoke.ChannelBlob)) func(*control.LeaseRequest) {
	return func(r *control.LeaseRequest) { r.ClientBlobs[0] = clientBlob(invoke.ProviderSHM, change) }
}

func TestBadLeaseRequests(t *testing.T) {
	n := newNode(t)
	const invalid, inv = codes.InvalidArgument, control.ClassInvalid
	for name, c := range map[string]struct {
		change func(r *control.LeaseRequest)
		code   codes.Code
		class  control.Class
		text   []string
	}{
		"version":          {func(r *control.LeaseRequest) { r.ProtocolVersion = 7 }, codes.FailedPrecondition, control.ClassUnsupported, []string{"7", "speaks 1"}},
		"no request id":    {func(r *control.LeaseRequest) { r.RequestId = nil }, invalid, inv, []string{"request_id", "0 bytes", "16"}},
		"long request id":  {func(r *control.LeaseRequest) { r.RequestId = make([]byte, 17) }, invalid, inv, []string{"17"}},
		"short hash":       {func(r *control.LeaseRequest) { r.CodeSha256 = r.CodeSha256[:31] }, invalid, inv, []string{"code_sha256", "31"}},
		"no workers":       {func(r *control.LeaseRequest) { r.Workers, r.ClientBlobs = 0, nil }, invalid, inv, []string{"workers 0", "1 to 4"}},
		"too many workers": {func(r *control.LeaseRequest) { r.Workers = 5 }, invalid, inv, []string{"workers 5"}},
		"absurd workers":   {func(r *control.LeaseRequest) { r.Workers = ^uint32(0) }, invalid, inv, []string{"4294967295"}},
		"too many cores":   {func(r *control.LeaseRequest) { r.CoresPerWorker = 5 }, invalid, inv, []string{"cores_per_worker 5", "4 cores"}},
		"cores wrap":       {func(r *control.LeaseRequest) { r.CoresPerWorker = 1 << 31 }, invalid, inv, []string{"2147483648"}},
		"little memory":    {func(r *control.LeaseRequest) { r.MemoryPerWorker = 1 }, invalid, inv, []string{"memory_per_worker 1 ", "at least 16MiB"}},
		"too much memory":  {func(r *control.LeaseRequest) { r.MemoryPerWorker = 1 << 63 }, invalid, inv, []string{"9223372036854775808"}},
		"no duration":      {func(r *control.LeaseRequest) { r.DurationMs = proto.Uint64(0) }, invalid, inv, []string{"duration_ms 0", "24h"}},
		"long":             {func(r *control.LeaseRequest) { r.DurationMs = proto.Uint64(86_400_001) }, invalid, inv, []string{"86400001", "24h"}},
		"duration wraps":   {func(r *control.LeaseRequest) { r.DurationMs = proto.Uint64(1 << 63) }, invalid, inv, []string{"9223372036854775808"}},
		"no provider":      {func(r *control.LeaseRequest) { r.Provider = "" }, invalid, inv, []string{`""`}},
		"unknown provider": {func(r *control.LeaseRequest) { r.Provider = "pigeon" }, invalid, inv, []string{`"pigeon"`}},
		"absent provider":  {func(r *control.LeaseRequest) { r.Provider = "verbs" }, codes.FailedPrecondition, control.ClassUnsupported, []string{`"verbs"`, "[shm]"}},
		"wait mode":        {func(r *control.LeaseRequest) { r.WaitMode = 9 }, invalid, inv, []string{"wait_mode 9"}},
		"missing blob":     {func(r *control.LeaseRequest) { r.ClientBlobs = r.ClientBlobs[:1] }, invalid, inv, []string{"1 client_blobs for 2 workers"}},
		"additional blob":  {func(r *control.LeaseRequest) { r.ClientBlobs = append(r.ClientBlobs, nil) }, invalid, inv, []string{"3 client_blobs for 2 workers"}},
		"empty blob":       {func(r *control.LeaseRequest) { r.ClientBlobs[1] = nil }, invalid, inv, []string{"client_blobs[1]", "0 bytes"}},
		"cut blob":         {func(r *control.LeaseRequest) { r.ClientBlobs[1] = r.ClientBlobs[1][:90] }, invalid, inv, []string{"client_blobs[1]", "90 bytes"}},
		"long blob":        {func(r *control.LeaseRequest) { r.ClientBlobs[1] = make([]byte, 257) }, invalid, inv, []string{"257 bytes"}},
		"verbs blob":       {blobOf(func(b *invoke.ChannelBlob) { b.Provider = invoke.ProviderVerbs }), invalid, inv, []string{"provider 2", "shm"}},
		"third provider":   {blobOf(func(b *invoke.ChannelBlob) { b.Provider = 3 }), invalid, inv, []string{"provider 3"}},
		"flipped bit":      {func(r *control.LeaseRequest) { r.ClientBlobs[0][70] ^= 1 }, invalid, inv, []string{"checksum"}},
		"random blob":      {func(r *control.LeaseRequest) { rand.Read(r.ClientBlobs[0]) }, invalid, inv, []string{"client_blobs[0]", "magic"}},
		"blob's version":   {func(r *control.LeaseRequest) { r.ClientBlobs[0][4] = 2 }, invalid, inv, []string{"version 2"}},
		"worker's blob":    {blobOf(func(b *invoke.ChannelBlob) { b.Role = invoke.RoleWorker }), invalid, inv, []string{"role 2"}},
		"generation":       {blobOf(func(b *invoke.ChannelBlob) { b.Generation = 0 }), invalid, inv, []string{"generation 0"}},
		"depth 0":          {blobOf(func(b *invoke.ChannelBlob) { b.Depth = 0 }), invalid, inv, []string{"depth 0"}},
		"depth 1025":       {blobOf(func(b *invoke.ChannelBlob) { b.Depth = 1025 }), invalid, inv, []string{"depth 1025"}},
		"eager":            {blobOf(func(b *invoke.ChannelBlob) { b.Eager = 1 << 20 }), invalid, inv, []string{"eager size 1048576"}},
		"no queue pair":    {blobOf(func(b *invoke.ChannelBlob) { b.QueuePair = nil }), invalid, inv, []string{"client_blobs[0]", "no queue pair"}},
		"bulk":             {blobOf(func(b *invoke.ChannelBlob) { b.Bulk = 1<<30 + 64 }), invalid, inv, []string{"bulk area of 1073741888", "allows 1073741824", "max-bulk"}},
		"tenant":           {func(r *control.LeaseRequest) { r.Tenant = strings.Repeat("x", 256) }, invalid, inv, []string{"256"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := n.request(2)
			c.change(r)
			_, err := n.Lease(n.ctx(), r)
			wantError(t, err, c.code, c.class, c.text...)
			if n.free() != 4 {
				t.Errorf("%d cores free, want 4", n.free())
			}
		})
	}
	if w := n.z.alive(); len(w) != 0 {
		t.Errorf("%d workers were started", len(w))
	}
	// And the daemon goes on.
	n.release(n.lease(4).GetLeaseId())
}

func TestCodeUnknown(t *testing.T) {
	n := newNode(t)
	r := n.request(1)
	r.CodeSha256 = make([]byte, 32)
	l, err := n.Lease(n.ctx(), r)
	if err != nil || !l.GetCodeUnknown() || l.GetLeaseId() != 0 || n.free() != 4 {
		t.Fatalf("reply %v, error %v, %d cores free", l, err, n.free())
	}
}

func TestBusy(t *testing.T) {
	n := newNode(t)
	l := n.lease(3)
	_, err := n.Lease(n.ctx(), n.request(2))
	wantError(t, err, codes.ResourceExhausted, control.ClassBusy, "2 cores wanted", "1 of 4")
	n.release(l.GetLeaseId())
	n.release(n.lease(4).GetLeaseId())
}

// Fault 7, 8 and 19 of the first rFaaS: what arrives while a lease is being made got lost or met a lease that was not in
// the books yet.
func TestRepeatedRequestLeasesOnce(t *testing.T) {
	n := newNode(t)
	gate := make(chan struct{})
	entered := make(chan struct{}, 8)
	n.z.before = func(ctx context.Context, s zygote.Spec) error {
		entered <- struct{}{}
		<-gate
		return nil
	}
	req := n.request(1)
	ids := make(chan uint64, 8)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			l, err := n.Lease(n.ctx(), req)
			if err != nil {
				t.Error(err)
			}
			ids <- l.GetLeaseId()
		})
	}
	<-entered
	if n.free() != 3 {
		t.Errorf("%d cores free, want 3", n.free())
	}
	close(gate)
	wg.Wait()
	first := <-ids
	for range 7 {
		if id := <-ids; id != first {
			t.Errorf("one request id got leases %d and %d", first, id)
		}
	}
	if len(n.z.alive()) != 1 {
		t.Errorf("%d workers, want 1", len(n.z.alive()))
	}
	other := n.request(2)
	other.RequestId = req.RequestId
	_, err := n.Lease(n.ctx(), other)
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "other terms")
	n.release(first)
	_, err = n.Lease(n.ctx(), req)
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "released")
}

// A client whose connection broke while its lease was made repeats the request and gets it.
func TestLeaseSurvivesItsCaller(t *testing.T) {
	n := newNode(t)
	gate := make(chan struct{})
	entered := make(chan struct{}, 1)
	n.z.before = func(context.Context, zygote.Spec) error {
		entered <- struct{}{}
		<-gate
		return nil
	}
	req := n.request(1)
	ctx, cancel := context.WithCancel(n.ctx())
	failed := make(chan error, 1)
	go func() {
		_, err := n.Lease(ctx, req)
		failed <- err
	}()
	<-entered
	cancel()
	if err := <-failed; status.Code(err) != codes.Canceled {
		t.Fatalf("cancelled call: %v", err)
	}
	close(gate)
	l, err := n.Lease(n.ctx(), req)
	if err != nil {
		t.Fatal(err)
	}
	if len(n.z.alive()) != 1 {
		t.Errorf("%d workers, want 1", len(n.z.alive()))
	}
	n.release(l.GetLeaseId())
}

// Fault 9 and 20: an executor that could not start a worker left its client waiting for ever.
func TestFailedSpawnUndoesEverything(t *testing.T) {
	n := newNode(t)
	var count atomic.Int32
	n.z.before = func(ctx context.Context, s zygote.Spec) error {
		switch count.Add(1) {
		case 3:
			return &zygote.WorkerError{Status: -204, Text: "libm.so.9: cannot open shared object file"}
		case 4:
			<-ctx.Done() // is cancelled with the others
			return context.Cause(ctx)
		}
		return nil
	}
	req := n.request(4)
	_, err := n.Lease(n.ctx(), req)
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "libm.so.9: cannot open shared object file", "worker ")
	if control.StatusOf(err) != -204 {
		t.Errorf("status %d, want -204", control.StatusOf(err))
	}
	if n.free() != 4 || len(n.z.alive()) != 0 {
		t.Errorf("%d cores free, %d workers alive after a failed lease", n.free(), len(n.z.alive()))
	}
	n.z.before = nil
	l, err := n.Lease(n.ctx(), req) // the same id may try again
	if err != nil {
		t.Fatal(err)
	}
	n.release(l.GetLeaseId())
}

func TestSpawnTimeout(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Settings.SpawnTimeout = 20 * time.Millisecond })
	n.z.before = func(ctx context.Context, s zygote.Spec) error {
		<-ctx.Done()
		return fmt.Errorf("start worker: %w", context.Cause(ctx))
	}
	_, err := n.Lease(n.ctx(), n.request(2))
	wantError(t, err, codes.Unavailable, control.ClassConnection, "20ms")
	if n.free() != 4 {
		t.Errorf("%d cores free", n.free())
	}
}

// deadlineOnly is a context with a deadline at which nothing happens. A test sees from the answer whether the executor respects the deadline, without
// a race of two timers.
type deadlineOnly struct {
	context.Context
	end time.Time
}

func (d deadlineOnly) Deadline() (time.Time, bool) { return d.end, true }

// When workers hang, the answer that says where comes before the caller gives up: nine tenths of its time are theirs.
func TestHangIsToldInTime(t *testing.T) {
	n := newNode(t)
	n.z.before = func(ctx context.Context, s zygote.Spec) error {
		<-ctx.Done()
		return fmt.Errorf("start worker: connecting to the client: %w", context.Cause(ctx))
	}
	ask := func() error {
		t.Helper()
		_, err := n.e.Lease(deadlineOnly{anOperator(t.Context()), time.Now().Add(time.Second)}, n.request(1))
		_, within, _ := strings.Cut(fmt.Sprint(err), "timed out after ")
		if d, bad := time.ParseDuration(strings.Fields(within + " -")[0]); bad != nil || d > 900*time.Millisecond {
			t.Errorf("%v: the caller has a second", err)
		}
		return err
	}
	wantError(t, ask(), codes.Unavailable, control.ClassConnection, "worker 0", "connecting to the client")
	n.z.before = func(ctx context.Context, s zygote.Spec) error {
		<-ctx.Done()
		return fmt.Errorf("%w: %w", &zygote.WorkerError{Status: statusBadLibrary, Text: "worker hangs while loading the library"}, context.Cause(ctx))
	}
	wantError(t, ask(), codes.InvalidArgument, control.ClassInvalid, "loading the library")
	if n.free() != 4 {
		t.Errorf("%d cores free", n.free())
	}
}

func TestZygoteTrouble(t *testing.T) {
	n := newNode(t)
	n.z.before = func(context.Context, zygote.Spec) error { return errors.New("no zygote") }
	_, err := n.Lease(n.ctx(), n.request(1))
	wantError(t, err, codes.Internal, control.ClassFatal, "no zygote")
	// Its worker program is of another version: another executor may serve.
	n.z.before = func(context.Context, zygote.Spec) error {
		return fmt.Errorf("start zygote: %w", &zygote.WorkerError{Status: -503, Text: "it is version v2"})
	}
	_, err = n.Lease(n.ctx(), n.request(1))
	wantError(t, err, codes.Unavailable, control.ClassConnection, "worker 0: start zygote: it is version v2")
}

// A node that is short of descriptors or memory refuses leases as busy, so that clients try another node, or try again later.
func TestScarceNodeIsBusy(t *testing.T) {
	for _, lacks := range []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM} {
		n := newNode(t)
		n.z.before = func(context.Context, zygote.Spec) error {
			return errors.Join(errors.New("control group"), &os.PathError{Op: "open", Path: "pids.max", Err: lacks})
		}
		_, err := n.Lease(n.ctx(), n.request(1))
		wantError(t, err, codes.ResourceExhausted, control.ClassBusy, "worker 0", "pids.max", lacks.Error())
	}
}

func TestReleaseErrors(t *testing.T) {
	n := newNode(t)
	_, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: 42})
	wantError(t, err, codes.NotFound, control.ClassLease, "42")
	l := n.lease(2)
	n.release(l.GetLeaseId())
	_, err = n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId()})
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "released")
	if n.free() != 4 {
		t.Errorf("%d cores free after a double release, want 4", n.free())
	}
}

// The fence: a core is not free before the last process on it is reaped.
func TestCoresAreFreeOnlyAfterReaping(t *testing.T) {
	n := newNode(t)
	hold := make(chan struct{})
	ended := make(chan struct{}, 4)
	n.z.reap = func(*fakeWorker) { ended <- struct{}{}; <-hold }
	l := n.lease(4)
	done := make(chan error, 1)
	go func() {
		_, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId()})
		done <- err
	}()
	for range 4 {
		<-ended
	}
	_, err := n.Lease(n.ctx(), n.request(1))
	wantError(t, err, codes.ResourceExhausted, control.ClassBusy, "0 of 4")
	select {
	case err := <-done:
		t.Fatalf("Release returned (%v) before the workers were reaped", err)
	default:
	}
	close(hold)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	n.release(n.lease(4).GetLeaseId())
}

// A worker that does not stop when asked is killed.
func TestReleaseKillsTheStubborn(t *testing.T) {
	n := newNode(t)
	l := n.lease(1)
	w := n.z.alive()[0]
	w.stubborn = true
	n.release(l.GetLeaseId())
	if !w.stopped.Load() || !w.killed.Load() {
		t.Errorf("asked to stop: %t, killed: %t; want both", w.stopped.Load(), w.killed.Load())
	}
}

func TestInfo(t *testing.T) {
	n := newNode(t)
	l := n.lease(1)
	i, err := n.Info(n.ctx(), &control.InfoRequest{ProtocolVersion: 1})
	if err != nil {
		t.Fatal(err)
	}
	if i.GetCores() != 4 || i.GetFreeCores() != 3 || i.GetMemoryBytes() != 4<<30 || i.GetFreeMemoryBytes() != 3<<30 ||
		i.GetNode() != "node" || i.GetNodeId() != "id" || len(i.GetIncarnation()) != 16 || fmt.Sprint(i.GetProviders()) != "[shm]" ||
		i.GetMaxDepth() != 1024 || i.GetMaxEager() != 256<<10 || i.GetMaxBulk() == 0 || i.GetDraining() {
		t.Errorf("info %v", i)
	}
	_, err = n.Info(n.ctx(), &control.InfoRequest{})
	wantError(t, err, codes.FailedPrecondition, control.ClassUnsupported, "protocol_version 0")
	n.release(l.GetLeaseId())
}

// The memory of a channel is reserved and listed with that of the functions, so a lease with a large channel is not
// small.
func TestChannelMemoryIsReserved(t *testing.T) {
	n := newNode(t) // 4 GiB
	const bulk, functions = 200 << 20, 16 << 20
	large := func(b *invoke.ChannelBlob) { b.Bulk = bulk }
	channel := channelMemory(16, 4096, bulk)
	free := func() uint64 {
		i, err := n.Info(n.ctx(), &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
		if err != nil {
			t.Fatal(err)
		}
		return i.GetFreeMemoryBytes()
	}
	before := free()
	req := n.request(1)
	req.MemoryPerWorker, req.ClientBlobs[0] = functions, clientBlob(invoke.ProviderSHM, large)
	l, err := n.Lease(n.ctx(), req)
	if err != nil {
		t.Fatal(err)
	}
	if took := before - free(); took != functions+channel {
		t.Errorf("%d bytes are reserved, want %d for functions and %d for the channel", took, functions, channel)
	}
	list, err := n.Leases(n.ctx(), &control.LeasesRequest{})
	if err != nil || list.GetLeases()[0].GetMemoryBytes() != functions+channel {
		t.Errorf("listed as %v, %v", list, err)
	}
	if spec := n.z.alive()[0].spec; spec.MemoryLimit != functions || spec.ChannelMemory != channel {
		t.Errorf("the worker has %d bytes and %d for its channel", spec.MemoryLimit, spec.ChannelMemory)
	}
	// Nor can it be enlarged later, or exceed the lent memory.
	_, err = n.Replace(n.ctx(), &control.ReplaceRequest{LeaseId: l.GetLeaseId(),
		ClientBlob: clientBlob(invoke.ProviderSHM, func(b *invoke.ChannelBlob) { b.Bulk = bulk + 64 })})
	if err == nil || !strings.Contains(err.Error(), "has reserved") {
		t.Errorf("a larger channel: %v", err)
	}
	n.release(l.GetLeaseId())
	for _, memory := range []uint64{4<<30 - channel + 1, 4 << 30} {
		req := n.request(1)
		req.MemoryPerWorker, req.ClientBlobs[0] = memory, clientBlob(invoke.ProviderSHM, large)
		_, err := n.Lease(n.ctx(), req)
		wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "for the channel of each")
	}
	// All cores can be leased with the default memory, which includes the channels.
	n.lease(4)
}
