package etcd

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/rfaas-go/rfaas/accounting"
)

// A member of etcd whose host has failed answers nothing, and closes no connection. The leader stays the leader, and a standby becomes the leader in time.
func TestSilentMember(t *testing.T) {
	for silent := range 3 {
		t.Run(fmt.Sprint(silent), func(t *testing.T) {
			t.Parallel()
			server := start(t)
			var members []*proxy // all of them lead to the same etcd, as members of one cluster have the same keys
			var endpoints []string
			for range 3 {
				p := newProxy(t, server.Endpoint)
				members, endpoints = append(members, p), append(endpoints, p.l.Addr().String())
			}
			candidate := func(name string) *Cluster {
				c, err := Open(Config{Endpoints: endpoints, Prefix: "/test", Name: name, Log: slog.New(slog.DiscardHandler)})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(c.Close)
				return c
			}
			first := lead(t, candidate("first"))
			next := make(chan *Leader, 1)
			ctx, cancel := context.WithTimeout(t.Context(), 8*leaseSeconds*time.Second)
			defer cancel()
			second := candidate("second")
			go func() {
				l, _ := second.Lead(ctx)
				next <- l
			}()
			waiting := open(t, server.Endpoint, "observer")
			for n := int64(0); n < 2; { // both are candidates
				r, err := waiting.client.Get(ctx, waiting.key(candidates), clientv3.WithPrefix(), clientv3.WithCountOnly())
				if err != nil {
					t.Fatal(err)
				}
				n = r.Count
			}
			members[silent].mute(true)
			select {
			case <-first.Lost():
				t.Fatalf("the leadership was lost: %v", first.Why())
			case <-time.After(2 * leaseSeconds * time.Second):
			}
			since := time.Now()
			if _, err := waiting.client.Revoke(ctx, first.lease); err != nil {
				t.Fatal(err)
			}
			l := <-next
			if l == nil {
				t.Fatal("the standby is not the leader")
			}
			took := time.Since(since)
			if err := l.Load(ctx, func(accounting.Change) error { return nil }); err != nil {
				t.Error(err)
			}
			t.Logf("the standby led after %v, and had the ledger after %v", took, time.Since(since))
			l.Resign()
		})
	}
}
