package executor

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/beat"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/lease"
)

// aliveEvery is how often a stream sends an event. From its silence a client concludes that the executor is stopped or
// its node is gone.
const aliveEvery = time.Second

// Events streams the events of a lease to its client until the lease ends. While a stream is open the client counts as
// present. A new stream of the same lease replaces an older one.
func (e *Executor) Events(req *control.EventsRequest, stream grpc.ServerStreamingServer[control.Event]) error {
	id := lease.ID(req.GetLeaseId())
	e.bookClaimFor(id)
	h, err := e.findFor(stream.Context(), "Events", id)
	if err != nil {
		return err
	}
	presence, err := e.table.Open(id)
	if err != nil {
		return grpcError(err)
	}
	defer e.away(h, presence)
	h.newest(presence)
	if err := stream.Send(&control.Event{Kind: control.Event_KIND_OPEN, InMs: uint64(aliveEvery.Milliseconds())}); err != nil {
		return err
	}
	alive := beat.New(aliveEvery)
	defer alive.Stop()
	t := newTeller(h, presence)
	for {
		events, last, changed, err := t.news()
		if err != nil {
			return err
		}
		for _, ev := range events {
			if err := stream.Send(ev); err != nil {
				return err
			}
		}
		if last {
			return nil
		}
		select {
		case <-changed:
		case <-alive.C:
			alive.Next()
			if err := stream.Send(&control.Event{Kind: control.Event_KIND_ALIVE}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// newest records the latest stream, so that older ones end.
func (h *holding) newest(presence uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.presence = max(h.presence, presence)
	h.forgetConnection()
	h.notify()
}

// teller has the events that one stream has sent.
type teller struct {
	h        *holding
	presence uint64
	told     []uint64          // deaths of each seat
	sent     [2]*control.Event // the latest notice, and the latest drain event
}

// newTeller returns the state of a new stream. It does not report deaths of workers that have been replaced.
func newTeller(h *holding, presence uint64) *teller {
	t := &teller{h: h, presence: presence, told: make([]uint64, len(h.seats))}
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.seats {
		if !h.seats[i].dead {
			t.told[i] = h.seats[i].deaths
		}
	}
	return t
}

// news returns the events that the stream has not sent yet. last means that no more will follow. changed is closed when
// there are more.
func (t *teller) news() (events []*control.Event, last bool, changed <-chan struct{}, err error) {
	h := t.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.presence != t.presence {
		return nil, false, nil, control.CodeErrorf(control.ClassConnection, codes.Aborted,
			"another event stream of lease %d was opened", h.id)
	}
	for i, ev := range []*control.Event{h.notice, h.leaving} {
		if ev != nil && ev != t.sent[i] && !h.ending {
			t.sent[i] = ev
			left := max(time.Until(h.deadline), 0).Milliseconds()
			events = append(events, &control.Event{Kind: ev.Kind, Reason: ev.Reason, InMs: uint64(left)})
		}
	}
	if !h.ending { // workers of an ending lease are expected to end
		events = t.deaths(events)
	}
	if h.final != nil {
		events, last = append(events, h.final), true
	}
	return events, last, h.changed, nil
}

// deaths appends the latest unsent death of each seat. The caller holds the holding's lock.
func (t *teller) deaths(events []*control.Event) []*control.Event {
	for i := range t.h.seats {
		s := &t.h.seats[i]
		if t.told[i] == s.deaths {
			continue
		}
		t.told[i] = s.deaths
		events = append(events, s.death)
	}
	return events
}
