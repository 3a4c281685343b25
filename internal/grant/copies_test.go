package grant

import (
	"context"
	"crypto/sha256"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// One executor makes a seed, and the requests to others wait for it. If it fails, the next one makes it. If the state cannot be kept, none waits any more.
func TestSeedTurns(t *testing.T) {
	var c copies
	p := &Pending{spec: Spec{Seed: &control.Seed{Function: "f", LimitMs: 3600e3}}}
	turn := func(at string) <-chan *seedTurn {
		got := make(chan *seedTurn, 1)
		go func() { got <- c.begin(t.Context(), p, at) }()
		return got
	}
	made := func(id uint64) *control.LeaseReply {
		return &control.LeaseReply{LeaseId: id, Seed: make([]byte, sha256.Size)}
	}
	first := <-turn("a")
	if same := <-turn("a"); !first.makes || same.makes {
		t.Error("two requests to one executor do not leave the order to it")
	}
	second := turn("b")
	first.end(nil, nil) // no lease
	b := <-second
	if !b.makes || len(b.from) != 0 {
		t.Fatalf("after a failure: %+v", b)
	}
	third, fourth := turn("c"), turn("d")
	b.end(made(1), &control.InfoReply{})
	for _, next := range []<-chan *seedTurn{third, fourth} {
		x := <-next
		if req := x.request(p.spec.Seed); x.makes || !req.GetElsewhere() || req.GetFunction() != "f" || p.spec.Seed.GetElsewhere() {
			t.Errorf("with a seed elsewhere: %+v", req)
		}
		x.end(made(2), &control.InfoReply{})
	}
	e := <-turn("e")
	one, done := e.take()
	other, _ := e.take()
	if one == other || len(e.from) != 3 {
		t.Errorf("two readers of one executor, while others have the seed, too: %v", e.from)
	}
	done(true)
	if slices.Contains(e.from, one) || slices.Contains((<-turn("f")).from, one) {
		t.Error("an executor that could not lend is asked again")
	}
	e.giveUp(errors.New("why"))
	if req := e.request(p.spec.Seed); req.GetElsewhere() || req.GetNoCopy() != "why" {
		t.Errorf("without a copy: %+v", req)
	}
	p.spec.Seed.Function = "g"
	g := <-turn("a")
	waits := turn("b")
	g.end(&control.LeaseReply{LeaseId: 3}, nil)
	if x := <-waits; x.makes || len(x.from) != 0 {
		t.Errorf("after a state that cannot be kept: %+v", x)
	}
	ctx, cancel := context.WithCancel(t.Context())
	p.spec.Seed.Function = "h"
	<-turn("a")
	time.AfterFunc(time.Millisecond, cancel)
	if x := c.begin(ctx, p, "b"); x.makes {
		t.Error("a request whose time is over makes the seed")
	}
}

// What is known about seeds is bounded.
func TestSeedsAreForgotten(t *testing.T) {
	var c copies
	for i := range 2 * seedsMost {
		p := &Pending{spec: Spec{Memory: uint64(i), Seed: &control.Seed{Function: "f", LimitMs: 1000}}}
		c.begin(t.Context(), p, "a").end(&control.LeaseReply{LeaseId: 1}, nil)
	}
	if len(c.seeds) != seedsMost {
		t.Errorf("%d seeds, want %d", len(c.seeds), seedsMost)
	}
}

func TestSharedProviders(t *testing.T) {
	info := func(node string, p ...string) *control.InfoReply {
		return &control.InfoReply{NodeId: node, Providers: p}
	}
	all := []string{dataplane.OFI, dataplane.TCP, dataplane.Verbs, dataplane.SHM}
	for _, c := range []struct {
		a, b *control.InfoReply
		want []string
	}{
		{info("x", all...), info("x", all...), []string{dataplane.SHM, dataplane.Verbs, dataplane.TCP}},
		{info("x", all...), info("y", all...), []string{dataplane.Verbs, dataplane.TCP}},
		{info("", all...), info("", dataplane.SHM), nil},
		{info("x", dataplane.SHM, dataplane.TCP), info("y", dataplane.TCP), []string{dataplane.TCP}},
		{nil, info("x", all...), nil},
	} {
		if got := sharedProviders(c.a, c.b); !slices.Equal(got, c.want) {
			t.Errorf("%v and %v: %v, want %v", c.a, c.b, got, c.want)
		}
	}
}
