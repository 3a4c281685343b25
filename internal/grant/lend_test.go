package grant

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// lending is an executor that lends a seed, or if it is silent, does not answer.
type lending struct {
	control.UnimplementedExecutorServer
	silent bool
	asked  chan struct{}
}

func (x *lending) Lend(s grpc.BidiStreamingServer[control.LendRequest, control.LendReply]) error {
	x.asked <- struct{}{}
	if !x.silent {
		if err := s.Send(&control.LendReply{Seed: &control.SeedCopy{}}); err != nil {
			return err
		}
	}
	<-s.Context().Done()
	return s.Context().Err()
}

// borrowing is an executor that copies a seed that never arrives completely.
type borrowing struct{ lessor }

func (*borrowing) Fetch(_ *control.FetchRequest, s grpc.ServerStreamingServer[control.FetchReply]) error {
	if err := s.Send(&control.FetchReply{Done: true, Filling: true}); err != nil {
		return err
	}
	<-s.Context().Done()
	return s.Context().Err()
}

// An executor whose workers wait for pages gets another source in time, although the first one that is asked does not answer.
func TestAnotherSourceInTime(t *testing.T) {
	c, port, secret, _ := lessee(t, &borrowing{})
	c.opts.Timeout = time.Hour
	p := &Pending{c: c, spec: Spec{Seed: &control.Seed{Function: "f", LimitMs: 3600e3}}}
	info := &control.InfoReply{Providers: []string{dataplane.TCP}}
	asked := make(chan struct{}, 2)
	for i := range 2 {
		at := serveLessor(t, &lending{silent: i == 0, asked: asked}, secret, "").Address
		s := c.copies.seed(p.seedID())
		s.at = append(s.at, &seedPlace{address: at, key: make([]byte, 32), info: info})
	}
	conn, err := c.dial("test", port.Address)
	if err != nil {
		t.Fatal(err)
	}
	const fetchConnect = 10 * time.Second // of the executor, which gives up then
	ctx, cancel := context.WithTimeout(t.Context(), fetchConnect)
	defer cancel()
	var tried []string
	if !p.anotherSource(ctx, p.seedID(), control.NewExecutorClient(conn), &Candidate{Address: port.Address, info: info}, &tried) {
		t.Error("no executor has lent the seed")
	}
	if len(tried) != 2 || len(asked) != 2 {
		t.Errorf("%d executors were asked, %d have been reached", len(tried), len(asked))
	}
}
