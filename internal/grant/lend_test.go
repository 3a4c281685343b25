package grant

import (
	"context"
	"errors"
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
	left   chan struct{} // nil: nobody waits for the end of the loan
}

func (x *lending) Lend(s grpc.BidiStreamingServer[control.LendRequest, control.LendReply]) error {
	x.asked <- struct{}{}
	if !x.silent {
		if err := s.Send(&control.LendReply{Seed: &control.SeedCopy{}}); err != nil {
			return err
		}
	}
	<-s.Context().Done()
	if x.left != nil {
		x.left <- struct{}{}
	}
	return s.Context().Err()
}

// borrowing is an executor that copies a seed that never arrives completely.
type borrowing struct {
	lessor
	answer func() (*control.LeaseReply, error)
}

func (x *borrowing) Leasing(s grpc.BidiStreamingServer[control.LeaseRequest, control.LeaseReply]) error {
	for {
		if _, err := s.Recv(); err != nil {
			return err
		}
		r, err := x.answer()
		if err == nil {
			err = s.Send(r)
		}
		if err != nil {
			return err
		}
	}
}

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

// An executor that has a seed is asked to lend it while the candidate is asked for the lease. The loan ends if the candidate does not need it. No loan is
// requested for a candidate that had the seed before, because it probably still has the seed.
func TestLoanIsAskedEarly(t *testing.T) {
	x := &borrowing{}
	c, port, secret, _ := lessee(t, x)
	info := &control.InfoReply{Providers: []string{dataplane.TCP}}
	cand := Candidate{Address: port.Address, info: info}
	p := &Pending{c: c, spec: Spec{Seed: &control.Seed{Function: "f", LimitMs: 3600e3}}, candidates: []Candidate{cand}}
	lender := &lending{asked: make(chan struct{}, 2), left: make(chan struct{}, 2)}
	s := c.copies.seed(p.seedID())
	s.at = append(s.at, &seedPlace{address: serveLessor(t, lender, secret, "").Address, key: make([]byte, 32), info: info})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	happens := func(what string, c chan struct{}) {
		t.Helper()
		select {
		case <-c:
		case <-ctx.Done():
			t.Error(what)
		}
	}
	grant := func(answers ...*control.LeaseReply) { // the candidate waits until the lender is asked, gives the answers and then refuses the lease
		t.Helper()
		first := true
		x.answer = func() (*control.LeaseReply, error) {
			if first {
				happens("the lender was not asked while the candidate was", lender.asked)
			}
			if first = false; len(answers) == 0 {
				return nil, control.Errorf(control.ClassBusy, "no cores")
			}
			r := answers[0]
			answers = answers[1:]
			return r, nil
		}
		var e *dataplane.Error
		if _, err := p.Grant(ctx, nil); !errors.As(err, &e) || e.Status != dataplane.StatusBusy {
			t.Errorf("%v, want that the candidate has no cores", err)
		}
	}

	grant()
	happens("the loan goes on, although it is not needed", lender.left)

	grant(&control.LeaseReply{SeedUnknown: true})
	if p.turn.why != nil || len(lender.asked) > 0 {
		t.Errorf("%v, and the lender was asked %d more times", p.turn.why, len(lender.asked))
	}

	s.at = append(s.at, &seedPlace{address: port.Address})
	p.turn = c.copies.begin(ctx, p, port.Address)
	if p.lendEarly(ctx, &cand); p.turn.early != nil {
		t.Error("the lender was asked for a seed that the candidate has had")
	}
}

func (x *lending) Info(context.Context, *control.InfoRequest) (*control.InfoReply, error) {
	return &control.InfoReply{ProtocolVersion: control.ProtocolVersion, Providers: []string{dataplane.TCP}}, nil
}

// If the known description of an executor that has the seed shares no provider with the candidate, the agent asks for a new description. The executor was
// perhaps restarted with other providers.
func TestLenderWithNewProviders(t *testing.T) {
	c, port, secret, _ := lessee(t, &borrowing{})
	p := &Pending{c: c, spec: Spec{Seed: &control.Seed{Function: "f", LimitMs: 3600e3}}}
	lender := serveLessor(t, &lending{asked: make(chan struct{}, 1)}, secret, "").Address
	conn, err := c.dial("test", port.Address)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	from := &seedPlace{address: lender, key: make([]byte, 32), info: &control.InfoReply{Providers: []string{dataplane.Verbs}}}
	cand := &Candidate{Address: port.Address, info: &control.InfoReply{Providers: []string{dataplane.TCP}}}
	if _, err := p.copyFrom(ctx, control.NewExecutorClient(conn), cand, from, nil, nil, false); err != nil {
		t.Error(err)
	}
}
