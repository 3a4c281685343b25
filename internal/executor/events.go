package executor

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/lease"
)

// aliveEvery is how often a stream says something: a holder sees by its silence that the executor is stopped or its node gone.
const aliveEvery = time.Second

// Events tells a holder what happens to its lease, until the lease ends. While it is open the holder counts as
// present. A newer stream of the same lease takes the place of an older one.
func (e *Executor) Events(req *control.EventsRequest, stream grpc.ServerStreamingServer[control.Event]) error {
	id := lease.ID(req.GetLeaseId())
	h, err := e.findFor(stream.Context(), "Events", id)
	if err != nil {
		return err
	}
	presence, err := e.table.Open(id)
	if err != nil {
		return grpcError(err)
	}
	defer e.table.Away(id, presence)
	h.newest(presence)
	if err := stream.Send(&control.Event{Kind: control.Event_KIND_OPEN, InMs: uint64(aliveEvery.Milliseconds())}); err != nil {
		return err
	}
	alive := time.NewTicker(aliveEvery)
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
			if err := stream.Send(&control.Event{Kind: control.Event_KIND_ALIVE}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// newest notes the latest stream, so that older ones end.
func (h *holding) newest(presence uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.presence = max(h.presence, presence)
	h.forgetConnection()
	h.notify()
}

// teller is one stream's memory of what it has told.
type teller struct {
	h        *holding
	presence uint64
	told     []uint64          // deaths of each seat
	sent     [2]*control.Event // the latest notice, and that the node drains
}

// newTeller makes a stream's memory. Deaths of workers that have been replaced are no news to a new stream.
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

// news returns what the stream has not told yet; last says that nothing will follow, changed is closed when there is more.
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
	if !h.ending { // then a worker's end is no news
		events = t.deaths(events)
	}
	if h.final != nil {
		events, last = append(events, h.final), true
	}
	return events, last, h.changed, nil
}

// deaths appends the latest death of each seat that is not told yet. Under the holding's lock.
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
