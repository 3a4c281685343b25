// Package control measures the resource manager's work: a placement decision by reading its board, a change announced to every
// subscriber, charging an account, and the messages of executors. It starts resource managers with simulated executors: their
// lines on the board are real, their nodes are not.
package control

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/benchmarks/raw"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/daemon"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
)

// Config says what to measure. Manager and Latency are mandatory; only provider, device, pairs, peer and CPUs of Latency are used.
type Config struct {
	Latency     latency.Config
	Manager     string // path of the resource manager
	Executors   []int  // numbers of executors on the boards that are compared; nil: 10 and 10,000
	Subscribers []int  // numbers of subscribers that get a change; nil: 100, 300 and 1000
	Batch       int    // operations of a batch; 0: 200
}

// manager is a running resource manager with simulated executors.
type manager struct {
	*daemon.Daemon
	conn  *grpc.ClientConn
	calls control.ManagerClient
	ids   []uint64
	infos []*control.InfoReply
	took  []int64 // time of each registration, ns
}

func (m *manager) close() {
	_ = m.conn.Close()
	m.Stop()
}

func info(i int) *control.InfoReply {
	in := &control.InfoReply{ProtocolVersion: control.ProtocolVersion, Node: fmt.Sprintf("node%d", i), NodeId: fmt.Sprintf("simulated/%d", i),
		Incarnation: make([]byte, 16), Cores: 64, FreeCores: 64, MemoryBytes: 256 << 30, FreeMemoryBytes: 256 << 30, Providers: []string{"verbs"},
		MaxDepth: 1024, MaxEager: 64 << 10, MaxBulk: 1 << 30}
	for k := range 4 {
		in.Incarnation[k] = byte(i >> (8 * k))
	}
	return in
}

// startManager starts a manager with n executors. Its heartbeat interval is longer than any measurement.
func startManager(ctx context.Context, cfg *Config, n int, secret string) (*manager, error) {
	args := []string{"--listen", "127.0.0.1:0", "--secret-file", secret, "--heartbeat", "1h", "--executors", fmt.Sprint(max(n, 16)), "--providers",
		cfg.Latency.Provider, "--log-level", "info"}
	if d := cfg.Latency.Device.Device; d != "" {
		args = append(args, "--verbs-device", d)
	}
	d, err := daemon.Start(ctx, cfg.Manager, args...)
	if err != nil {
		return nil, err
	}
	m := &manager{Daemon: d}
	if m.conn, err = control.Dial(d.Address, control.DialConfig{SecretFile: secret}); err != nil {
		d.Stop()
		return nil, err
	}
	m.calls = control.NewManagerClient(m.conn)
	for i := range n {
		began := time.Now()
		in := info(i)
		r, err := m.calls.Register(ctx, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion,
			Address: fmt.Sprintf("198.18.%d.%d:7465", i/250, i%250+1), Info: in})
		if err != nil {
			m.close()
			return nil, fmt.Errorf("register executor %d of %d: %w", i, n, err)
		}
		m.took = append(m.took, int64(time.Since(began)))
		m.ids, m.infos = append(m.ids, r.GetExecutorId()), append(m.infos, in)
	}
	return m, nil
}

// run is one measurement in progress.
type run struct {
	ctx   context.Context
	cfg   *Config
	floor *latency.Floor
	dev   *dataplane.Device
	emit  func(*latency.Result) error
}

// Run measures everything, and passes each result to emit.
func Run(ctx context.Context, cfg Config, emit func(*latency.Result) error) error {
	cfg.Latency.Payloads = []int{board.GroupLines*board.LineSize + board.LineSize}
	cfg.Latency.Modes = []dataplane.WaitMode{dataplane.Warm}
	if err := cfg.Latency.Validate(); err != nil {
		return err
	}
	if cfg.Executors == nil {
		cfg.Executors = []int{10, 10_000}
	}
	if cfg.Subscribers == nil {
		cfg.Subscribers = []int{100, 300, 1000}
	}
	for _, n := range append(append([]int{}, cfg.Executors...), cfg.Subscribers...) {
		if n < 1 || n > 50_000 {
			return fmt.Errorf("%d executors or subscribers: want 1 to 50000", n)
		}
	}
	if cfg.Batch == 0 {
		cfg.Batch = 200
	}
	dir, err := os.MkdirTemp("", "rfaas-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	r := run{ctx: ctx, cfg: &cfg, emit: emit}
	if r.dev, err = dataplane.Open(cfg.Latency.Provider, cfg.Latency.Device); err != nil {
		return err
	}
	defer r.dev.Close()
	if r.floor, err = latency.OpenFloor(cfg.Latency); err != nil {
		return err
	}
	defer r.floor.Close()
	managers := make([]*manager, len(cfg.Executors))
	for i, n := range cfg.Executors {
		cfg.Latency.Progress(fmt.Sprintf("control: a resource manager with %d executors", n))
		if managers[i], err = startManager(ctx, &cfg, n, filepath.Join(dir, "secret")); err != nil {
			return err
		}
		defer managers[i].close()
	}
	last := managers[len(managers)-1]
	for _, step := range []func() error{
		func() error { return r.placement(managers) },
		func() error { return r.messages(last) },
		func() error { return r.charge(last) },
		func() error { return r.notify(last) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// result returns a result without figures.
func (r *run) result(function string, payload int) *latency.Result {
	c, p := r.floor.CPUs()
	return &latency.Result{Name: "control", Provider: r.cfg.Latency.Provider, Client: "go", Mode: "one-sided", Function: function,
		Buffers: latency.BuffersRegistered, Payload: payload, Depth: 1, CPUClient: c, CPUPeer: p, BatchCalls: r.cfg.Batch}
}

// operation is one of several that are measured in turn.
type operation struct {
	result *latency.Result
	n      int // of a batch
	do     func() error
	paired latency.Paired
}

// interleave runs batches of all operations in turn, each with a batch of the floor, and emits their results.
func (r *run) interleave(kind raw.Kind, size int, ops ...*operation) error {
	var end []func()
	for _, o := range ops {
		end = append(end, latency.Start(o.result))
	}
	const rounds = 200
	bare := make([]int64, rounds)
	for pair := range r.cfg.Latency.Pairs {
		for _, o := range ops {
			if err := r.ctx.Err(); err != nil {
				return err
			}
			before, err := r.floor.Calibrate()
			if err != nil {
				return err
			}
			base, err := r.floor.Batch(kind, size, rounds, bare)
			if err != nil {
				return err
			}
			samples := make([]int64, o.n)
			began := time.Now()
			last := began
			for i := range samples {
				if err := o.do(); err != nil {
					return fmt.Errorf("%s: %w", o.result.Function, err)
				}
				now := time.Now()
				samples[i] = int64(now.Sub(last))
				last = now
			}
			mean := float64(last.Sub(began)) / float64(o.n)
			after, err := r.floor.Calibrate()
			if err != nil {
				return err
			}
			o.paired.Samples.Add(samples...)
			if !math.IsNaN(base) {
				o.paired.FloorSamples.Add(bare...)
			}
			o.paired.Add(mean, base, before, after)
		}
		r.cfg.Latency.Progress(fmt.Sprintf("control: %s: pair %d of %d", ops[0].result.Function, pair+1, r.cfg.Latency.Pairs))
	}
	for i, o := range ops {
		o.paired.Fill(o.result, kind.String())
		end[i]()
		o.result.Complete = o.result.Pairs >= r.cfg.Latency.Pairs
		o.result.Method = fmt.Sprintf("%d interleaved batches of %d, each paired with %d bare operations; one client, not pinned, resource manager in a process of its own", r.cfg.Latency.Pairs, o.n, rounds)
		if err := r.emit(o.result); err != nil {
			return err
		}
	}
	return nil
}

// unseen reads what is needed to connect to one executor after the other: its line and its identity. None was read before.
type unseen struct {
	c      *link.Client
	reader *board.Reader
	slot   uint32
}

func (u *unseen) next() (err error) {
	if u.reader == nil || u.slot == u.reader.Header().Used {
		if u.reader, err = board.NewReader(u.c, ""); err != nil {
			return err
		}
		u.slot = 0
	}
	l, err := u.reader.Line(u.slot)
	if err != nil {
		return err
	}
	u.slot++
	_, err = u.reader.Identity(&l)
	return err
}

// readClock reads the clock for a microsecond, which is about the time of a look-up, and touches no other memory. Its percentiles show how much the machine
// disturbs any operation of that length.
func readClock() error {
	for began := time.Now(); time.Since(began) < time.Microsecond; {
	}
	return nil
}

// placement compares decisions on boards of different sizes, and looking executors up with asking the manager for its list, which is the shortest message that
// names executors. Then it repeats what reads the largest board while its manager is stopped.
func (r *run) placement(managers []*manager) error {
	var ops []*operation
	bytes := board.GroupLines * board.LineSize
	for i, m := range managers {
		c, err := link.AttachClient(r.ctx, m.calls, r.dev)
		if err != nil {
			return err
		}
		defer c.Close()
		reader, err := board.NewReader(c, "")
		if err != nil {
			return err
		}
		pick := func() error {
			_, err := reader.Pick(board.Need{Cores: 1, Remote: board.Verbs}, nil, time.Now(), 1)
			return err
		}
		ops = append(ops, &operation{result: r.result(fmt.Sprintf("placement, %d executors", r.cfg.Executors[i]), bytes), n: r.cfg.Batch, do: pick})
	}
	last := managers[len(managers)-1]
	c, err := link.AttachClient(r.ctx, last.calls, r.dev)
	if err != nil {
		return err
	}
	defer c.Close()
	u := unseen{c: c}
	lookUp := func(how string) *operation {
		return &operation{result: r.result("look-up"+how, board.LineSize+board.IdentitySize), n: r.cfg.Batch, do: u.next}
	}
	message := &operation{result: r.result(fmt.Sprintf("look-up by message, %d executors", r.cfg.Executors[0]), 0), n: r.cfg.Batch, do: func() error {
		_, err := managers[0].calls.List(r.ctx, &control.ListRequest{})
		return err
	}}
	message.result.Mode = "message"
	clock := &operation{result: r.result("clock, 1 us", 0), n: r.cfg.Batch, do: readClock}
	if err := r.interleave(raw.Read, bytes, append(ops, lookUp(""), clock, message)...); err != nil {
		return err
	}
	n := r.cfg.Executors[len(managers)-1]
	if err := last.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	defer func() { _ = last.Signal(syscall.SIGCONT) }()
	stopped := &operation{result: r.result(fmt.Sprintf("placement, %d executors, manager stopped", n), bytes), n: r.cfg.Batch, do: ops[len(ops)-1].do}
	return r.interleave(raw.Read, bytes, stopped, lookUp(", manager stopped"))
}

// messages measures heartbeats of executors without remote memory: one gRPC call each.
func (r *run) messages(m *manager) error {
	i := 0
	beat := &operation{result: r.result("heartbeat by message", 0), n: r.cfg.Batch, do: func() error {
		i++
		k := i % len(m.ids)
		_, err := m.calls.Heartbeat(r.ctx, &control.HeartbeatRequest{ExecutorId: m.ids[k], Info: m.infos[k]})
		return err
	}}
	beat.result.Mode = "message"
	return r.interleave(r.floor.PingPong(), 8, beat)
}

// charge measures additions to the counters of one lease, and writes of an executor's line.
func (r *run) charge(m *manager) error {
	var incarnation [16]byte
	copy(incarnation[:], m.infos[0].GetIncarnation())
	x, err := link.AttachExecutor(r.ctx, m.calls, r.dev, m.ids[0], incarnation)
	if err != nil {
		return err
	}
	defer x.Close()
	if err := x.WriteHead(0, accounting.CellHead{Key: accounting.Key{Incarnation: incarnation, Lease: 1}, Tenant: "bench", Began: time.Now()}); err != nil {
		return err
	}
	var sums accounting.Use
	charge := func(counters int) func() error {
		return func() error {
			to := sums
			for c := range counters {
				to[c]++
			}
			err := x.Charge(0, sums, to)
			sums = to
			return err
		}
	}
	line := board.Line{State: board.Open, Cores: 64, FreeCores: 64, Providers: board.Verbs, Written: time.Now(), Incarnation: board.ShortIncarnation(incarnation)}
	return r.interleave(raw.FetchAdd, 8,
		&operation{result: r.result("charge, 1 counter", 8), n: r.cfg.Batch, do: charge(1)},
		&operation{result: r.result(fmt.Sprintf("charge, %d counters", accounting.NumCounters), 8*accounting.NumCounters), n: r.cfg.Batch, do: charge(accounting.NumCounters)},
		&operation{result: r.result("heartbeat by write", board.LineSize), n: r.cfg.Batch, do: func() error {
			line.Beat++
			line.Written = time.Now()
			return x.WriteLine(line)
		}})
}

// changesPerBatch gives 750 changes in 15 pairs. With ten in a batch, the second worst of all changes would be the p99.
const changesPerBatch = 50

// notify changes an executor's state by a message and waits until a scanner has seen it in every mailbox.
func (r *run) notify(m *manager) error {
	var boxes []*link.Client
	defer func() {
		for _, b := range boxes {
			b.Close()
		}
	}()
	last := len(m.ids) - 1
	for _, n := range r.cfg.Subscribers {
		r.cfg.Latency.Progress(fmt.Sprintf("control: %d subscribers", n))
		for len(boxes) < n {
			b, err := link.AttachClient(r.ctx, m.calls, r.dev)
			if err != nil {
				return fmt.Errorf("subscriber %d of %d: %w", len(boxes)+1, n, err)
			}
			boxes = append(boxes, b)
		}
		changes, err := settled(r.ctx, boxes)
		if err != nil {
			return err
		}
		op := &operation{result: r.result(fmt.Sprintf("change told to %d subscribers", n), board.MailboxSize), n: changesPerBatch, do: func() error {
			m.infos[last].Draining = !m.infos[last].Draining
			if _, err := m.calls.Heartbeat(r.ctx, &control.HeartbeatRequest{ExecutorId: m.ids[last], Info: m.infos[last]}); err != nil {
				return err
			}
			changes++
			return seen(r.ctx, boxes, changes)
		}}
		op.result.Clients = n
		op.result.Mode = "message, then one-sided"
		if err := r.interleave(r.floor.PingPong(), 8, op); err != nil {
			return err
		}
	}
	return nil
}

// seen scans until every mailbox has that many changes.
func seen(ctx context.Context, boxes []*link.Client, changes uint64) error {
	deadline := time.Now().Add(20 * time.Second)
	for i, b := range boxes {
		for {
			if got, err := b.Mailbox(); err == nil && got.Changes >= changes {
				break
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("mailbox %d of %d did not get change %d within 20 s", i+1, len(boxes), changes)
			}
		}
	}
	return nil
}

// settled waits until all mailboxes have the same number of changes, and returns that number.
func settled(ctx context.Context, boxes []*link.Client) (uint64, error) {
	most := uint64(0)
	deadline := time.Now().Add(20 * time.Second)
	for time.Now().Before(deadline) && ctx.Err() == nil {
		same := true
		for _, b := range boxes {
			got, err := b.Mailbox()
			if err != nil || got.Epoch == 0 || got.Changes < most {
				same = false
			}
			most = max(most, got.Changes)
		}
		if same {
			return most, nil
		}
	}
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	return 0, fmt.Errorf("the mailboxes of %d subscribers still differ after 20 s: %d changes at most", len(boxes), most)
}
