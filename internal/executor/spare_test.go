package executor

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/zygote"
	"github.com/rfaas-go/rfaas/invoke"
)

func spare(r *control.LeaseRequest) { r.Spare, r.Provider = true, "shm" }

// Spare workers cost nobody anything and are frozen until a lease takes them.
func TestSpareWorkers(t *testing.T) {
	n := newNode(t)
	n.e.accounts = newAccounts("node", n.e.incarnation, time.Now, nil, slog.New(slog.DiscardHandler))
	s := n.mustLease(n.keepable(1, spare))
	if len(s.GetWorkers()) != 1 || s.GetCacheMs() == 0 {
		t.Fatalf("spare workers: %v", s)
	}
	n.freeAndLiving(4, 1)
	if e := n.e.accounts.measure(); len(e) != 0 {
		t.Errorf("accounts %v for a worker without a lease", e)
	}
	if l := n.e.table.List(); len(l) != 0 {
		t.Errorf("leases %v", l)
	}
	l := n.mustLease(n.keepable(1, reuse(s.GetLeaseId()), func(r *control.LeaseRequest) { r.Provider = "shm" }))
	if len(l.GetWorkers()) != 1 || l.GetWorkers()[0].GetPid() != s.GetWorkers()[0].GetPid() || l.GetWorkers()[0].GetStart() != control.StartPath_START_PATH_POOLED {
		t.Errorf("the lease on spare workers: %v", l)
	}
	n.freeAndLiving(3, 1)
	// Two spare workers would leave only one of three free cores.
	if r, err := n.Lease(n.ctx(), n.keepable(2, spare)); control.ClassOf(err) != control.ClassBusy {
		t.Errorf("two spare workers on three free cores: %v, %v", r, err)
	}
	// An evicted spare worker is reaped before the lease that needs its core starts.
	n.mustLease(n.keepable(1, spare))
	n.freeAndLiving(3, 2)
	n.mustLease(n.keepable(3))
	n.freeAndLiving(0, 4)
}

// On tcp, spare workers are suspended when their client has connected. Before that they can be evicted, too.
func TestSpareWorkersOnTCP(t *testing.T) {
	n := newTCPNode(t)
	// tcp has the workers that are started next wait for a connection with the token of qp.
	var qp []byte
	tcp := func(r *control.LeaseRequest) {
		_, qp = newTCPConn(t, dataplane.Options{Handed: true, Advertise: n.e.cfg.Data.Address})
		b := invoke.ChannelBlob{Role: invoke.RoleWorker, Provider: invoke.ProviderTCP, Generation: 77, Depth: 16, Eager: 4096, QueuePair: qp}
		n.z.blob = b.Marshal()
		r.Provider, r.ClientBlobs = "tcp", [][]byte{clientBlob(invoke.ProviderTCP)}
	}
	s := n.mustLease(n.keepable(1, spare, tcp))
	suspended := func() bool {
		n.z.mu.Lock()
		defer n.z.mu.Unlock()
		return n.z.workers[0].suspended
	}
	if suspended() {
		t.Fatal("the worker was suspended before its client could connect")
	}
	client, _ := newTCPConn(t, dataplane.Options{ActiveOnly: true})
	if err := client.Connect(t.Context(), qp); err == nil {
		t.Fatal("a worker that does nothing has answered")
	}
	eventually(t, "the connected worker is suspended", suspended)
	l := n.mustLease(n.keepable(1, func(r *control.LeaseRequest) {
		r.Provider, r.ClientBlobs = "tcp", [][]byte{clientBlob(invoke.ProviderTCP)}
	}, reuse(s.GetLeaseId())))
	if len(l.GetWorkers()) != 1 || l.GetWorkers()[0].GetPid() != s.GetWorkers()[0].GetPid() {
		t.Errorf("the lease on a spare worker: %v", l)
	}
	n.mustLease(n.keepable(1, spare, tcp)) // nobody connects
	n.mustLease(n.keepable(3))
	n.freeAndLiving(0, 4)
}

func sizesBlob(p invoke.Provider) []byte {
	return clientBlob(p, func(b *invoke.ChannelBlob) { b.QueuePair = nil })
}

// On verbs, spare workers are suspended before they have a client. The lease that takes them names the client, and its blob must have a queue pair.
func TestSpareWorkersOnVerbs(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Providers = []string{"verbs"} })
	verbs := func(blob []byte) func(r *control.LeaseRequest) {
		return func(r *control.LeaseRequest) { r.Provider, r.ClientBlobs = "verbs", [][]byte{blob} }
	}
	s := n.mustLease(n.keepable(1, spare, verbs(sizesBlob(invoke.ProviderVerbs))))
	w := n.z.workers[0]
	if !w.suspended || !w.spec.Late || w.spec.Channel.Depth != 16 {
		t.Fatalf("a spare worker that is late=%v, suspended=%v, for depth %d", w.spec.Late, w.suspended, w.spec.Channel.Depth)
	}
	if r, err := n.Lease(n.ctx(), n.keepable(1, verbs(sizesBlob(invoke.ProviderVerbs)), reuse(s.GetLeaseId()))); control.ClassOf(err) != control.ClassInvalid {
		t.Errorf("a lease of a client without a queue pair: %v, %v", r, err)
	}
	client := clientBlob(invoke.ProviderVerbs)
	l := n.mustLease(n.keepable(1, verbs(client), reuse(s.GetLeaseId())))
	if len(l.GetWorkers()) != 1 || l.GetWorkers()[0].GetStart() != control.StartPath_START_PATH_POOLED || !bytes.Equal(w.spec.ClientBlob, client) {
		t.Errorf("the lease on a spare worker: %v, for the client %x", l, w.spec.ClientBlob)
	}
}

// Spare workers whose client's agent posts for it are connected before they are suspended. The lease that takes them names the agent's queue pair again.
func TestBrokeredSpareWorkers(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Providers = []string{"verbs"} })
	blob := clientBlob(invoke.ProviderVerbs, func(b *invoke.ChannelBlob) { b.Role = invoke.RoleBroker })
	verbs := func(r *control.LeaseRequest) { r.Provider, r.ClientBlobs = "verbs", [][]byte{blob} }
	if r, err := n.Lease(n.ctx(), n.keepable(1, verbs)); control.ClassOf(err) != control.ClassInvalid {
		t.Errorf("an agent's queue pair without spare workers: %v, %v", r, err)
	}
	s := n.mustLease(n.keepable(1, spare, verbs))
	w := n.z.workers[0]
	if !w.suspended || w.spec.Late || !bytes.Equal(w.spec.ClientBlob, blob) {
		t.Fatalf("a spare worker that is late=%v, suspended=%v", w.spec.Late, w.suspended)
	}
	client := func(r *control.LeaseRequest) {
		r.Provider, r.ClientBlobs = "verbs", [][]byte{clientBlob(invoke.ProviderVerbs)}
	}
	l := n.mustLease(n.keepable(1, client, reuse(s.GetLeaseId())))
	if len(l.GetWorkers()) != 1 || l.GetWorkers()[0].GetStart() != control.StartPath_START_PATH_POOLED {
		t.Errorf("the lease on a spare worker: %v", l)
	}
}

func TestSpareRequestsThatAreRefused(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Settings.CacheMost = 1; c.Settings.CacheTime = time.Hour })
	for what, change := range map[string]func(*control.LeaseRequest){
		"no client":    func(r *control.LeaseRequest) { r.ClientId = nil },
		"provider ofi": func(r *control.LeaseRequest) { r.Provider = "ofi" },
		"queue pair on verbs": func(r *control.LeaseRequest) {
			r.Provider, r.ClientBlobs = "verbs", [][]byte{clientBlob(invoke.ProviderVerbs)}
		},
		"no queue pair on shm": func(r *control.LeaseRequest) { r.ClientBlobs = [][]byte{sizesBlob(invoke.ProviderSHM)} },
		"queue pair of an agent on shm": func(r *control.LeaseRequest) {
			r.ClientBlobs = [][]byte{clientBlob(invoke.ProviderSHM, func(b *invoke.ChannelBlob) { b.Role = invoke.RoleBroker })}
		},
		"reuse": func(r *control.LeaseRequest) { r.Reuse = 1 },
	} {
		if r, err := n.Lease(n.ctx(), n.keepable(1, spare, change)); err == nil || !slices.Contains([]control.Class{control.ClassInvalid, control.ClassUnsupported}, control.ClassOf(err)) {
			t.Errorf("%s: %v, %v", what, r, err)
		}
	}
	kept := n.keepLease(1)
	if r, err := n.Lease(n.ctx(), n.keepable(1, spare)); control.ClassOf(err) != control.ClassBusy {
		t.Errorf("beside the most cached leases: %v, %v", r, err)
	}
	n.freeAndLiving(4, 1)
	if r := n.mustLease(n.keepable(1, reuse(kept.GetLeaseId()))); r.GetNotCached() {
		t.Error("a refused request has ended cached workers")
	}
}

// A lease that needs the cores of spare workers that are being started gets them at once, and the start is given up.
func TestSpareWorkersThatAreStarted(t *testing.T) {
	n := newNode(t)
	var starts atomic.Int32
	n.z.before = func(ctx context.Context, _ zygote.Spec) error {
		if starts.Add(1) <= 2 { // the spare ones
			<-ctx.Done()
		}
		return ctx.Err()
	}
	done := make(chan error, 1)
	go func() {
		_, err := n.Lease(n.ctx(), n.keepable(2, spare))
		done <- err
	}()
	eventually(t, "the start of spare workers", func() bool { return starts.Load() == 2 })
	if c := n.e.table.Capacity(); c.FreeCores != 4 {
		t.Errorf("%d cores are free, want 4", c.FreeCores)
	}
	n.mustLease(n.keepable(4))
	if err := <-done; control.ClassOf(err) != control.ClassBusy {
		t.Errorf("the start that was given up: %v", err)
	}
	n.freeAndLiving(0, 4)
}
