package executor

import (
	"context"
	"encoding/binary"
	"sync"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/channel"
	"google.golang.org/protobuf/proto"
)

const countSource = `
#include <stdint.h>
#include <string.h>
uint32_t count(void *a, uint32_t n, void *r) { static uint64_t c; c++; memcpy(r, &c, 8); return 8; }
`

// counted calls the function that counts its calls, until a deadline.
func counted(ch *channel.Channel, within time.Duration) (uint64, dataplane.Status) {
	out := make([]byte, 8)
	n, st := ch.Call(0, []byte("x"), out, dataplane.Now()+int64(within))
	if st != 0 || n != 8 {
		return 0, st
	}
	return binary.LittleEndian.Uint64(out), st
}

// The fence: after the end of its lease a client still has its connection, addresses and keys, and goes on writing. Nothing of this
// reaches the next client of the same core, and the old client gets an error and no result. The lease was revoked, expired or released.
func TestLateWritesAreFenced(t *testing.T) {
	r := newReal(t)
	h, _ := r.deploy(compile(t, countSource, "-shared", "-fPIC"))
	lease := func(ms uint64) (*channel.Channel, *control.LeaseReply) {
		t.Helper()
		ch, blob := r.channel()
		req := (&node{t: t, sum: h}).request(1)
		req.Provider, req.ClientBlobs[0] = realProvider(), blob
		if ms > 0 {
			req.DurationMs = proto.Uint64(ms)
		}
		l, err := r.Lease(r.ctx(), req)
		if err != nil {
			t.Fatal(err)
		}
		if err := ch.Connect(l.GetWorkers()[0].GetBlob()); err != nil {
			t.Fatal(err)
		}
		return ch, l
	}
	for name, end := range map[string]func(id uint64) error{
		"revoked": func(id uint64) error {
			_, err := r.Revoke(r.ctx(), &control.RevokeRequest{LeaseId: id})
			return err
		},
		"released": func(id uint64) error {
			_, err := r.Release(r.ctx(), &control.ReleaseRequest{LeaseId: id})
			return err
		},
		"expired": nil,
	} {
		t.Run(name, func(t *testing.T) {
			var ms uint64
			if end == nil {
				ms = 2500 // for the start and the first call
			}
			old, l := lease(ms)
			defer old.Close()
			ev := r.events(l.GetLeaseId())
			if n, st := counted(old, testBound); n != 1 {
				t.Fatalf("first call: %d, %v", n, st)
			}
			if end == nil {
				for e, err := ev.s.Recv(); err == nil && e.GetKind() != control.Event_KIND_LEASE_ENDED; e, err = ev.s.Recv() {
				}
				eventually(t, "the core is free", func() bool {
					i, err := r.Info(r.ctx(), &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
					return err == nil && i.GetFreeCores() == i.GetCores()
				})
			} else if err := end(l.GetLeaseId()); err != nil {
				t.Fatal(err)
			}
			if !gone(l.GetWorkers()[0].GetPid()) {
				t.Fatal("the core is free and the worker is still there")
			}
			next, l2 := lease(0)
			defer next.Close()
			if a, b := l.GetWorkers()[0].GetCpus()[0], l2.GetWorkers()[0].GetCpus()[0]; a != b {
				t.Fatalf("the leases had cores %d and %d: the test needs one", a, b)
			}
			for i := range uint64(5) {
				if n, st := counted(old, 100*time.Millisecond); st == 0 {
					t.Fatalf("a call of the old client succeeded: %d", n)
				}
				if n, st := counted(next, testBound); st != 0 || n != i+1 {
					t.Fatalf("call %d of the new client: the function was called %d times (%v)", i+1, n, st)
				}
			}
			r.release(l2.GetLeaseId())
		})
	}
}

// Many leases come and go, from several clients at once: no error, nothing is left, and the capacity is exact.
func TestManyLeaseCycles(t *testing.T) {
	const clients = 8
	cycles := 10_000
	if testing.Short() {
		cycles = 2_000
	}
	n := newNode(t, func(c *Config) { c.Cores = testCores(clients) })
	var wg sync.WaitGroup
	began := time.Now()
	for range clients {
		wg.Go(func() {
			conn := n.dial()
			defer conn.Close()
			c := control.NewExecutorClient(conn)
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			for range cycles / clients {
				l, err := c.Lease(ctx, n.request(1))
				if err != nil {
					t.Error(err)
					return
				}
				s, err := c.Events(ctx, &control.EventsRequest{LeaseId: l.GetLeaseId()})
				if err == nil {
					_, err = s.Recv()
				}
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := c.Release(ctx, &control.ReleaseRequest{LeaseId: l.GetLeaseId()}); err != nil {
					t.Error(err)
					return
				}
				if e, err := news(s); err != nil || e.GetKind() != control.Event_KIND_LEASE_ENDED {
					t.Errorf("event %v, %v", e, err)
					return
				}
			}
		})
	}
	wg.Wait()
	t.Logf("figure: leases.cycles = %d", cycles)
	t.Logf("%d cycles from %d clients in %v", cycles, clients, time.Since(began).Round(time.Millisecond))
	c := n.e.table.Capacity()
	if c.FreeCores != clients || c.FreeMemory != c.Memory || c.Leases != 0 {
		t.Errorf("capacity at the end: %+v", c)
	}
	n.z.mu.Lock()
	started := len(n.z.workers)
	n.z.mu.Unlock()
	if started != cycles {
		t.Errorf("%d workers were started for %d leases", started, cycles)
	}
}
