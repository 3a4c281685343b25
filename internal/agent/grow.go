package agent

import (
	"context"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
)

// growth adds workers to a lease that was granted with fewer than it asked for:
//
//	executor has room ──▶ event ROOM ──▶ the library asks for the next worker (REPLACE) ──▶ granted: it asks for another
//	      ▲                                                                         └──▶ refused
//	      └──────────────────────────────────────────────────────────────────────────────────┘
//
// The library makes the request, not the agent, because a worker can start only while the client's process accepts its connection. The zero
// value belongs to a lease that has not been granted.
type growth struct {
	mu      sync.Mutex
	present int // the first `present` workers have been granted or added
	wanted  int
	stop    context.CancelFunc // nil: no goroutine waits for room
	refused chan struct{}      // a request of the library was refused; capacity 1
	over    bool
}

// begin starts to wait for room if workers are missing.
func (g *growth) begin(l *lease) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.wanted = l.held.Wanted; g.present >= g.wanted || g.over || g.stop != nil {
		return
	}
	var ctx context.Context
	ctx, g.stop = context.WithCancel(l.c.ctx)
	g.refused = make(chan struct{}, 1)
	l.c.background(func() { g.run(ctx, l) })
}

// run tells the client whenever there is room, until all workers are there.
func (g *growth) run(ctx context.Context, l *lease) {
	b := backoff{pause: pauseMin}
	for {
		room := l.held.AwaitRoom(ctx, l.plan()) == nil
		if room {
			l.c.event(&protocol.Event{Key: l.key, Kind: protocol.Room})
			select {
			case <-g.refused:
			case <-ctx.Done():
			}
		}
		pause := time.NewTimer(b.pause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return
		}
		b.next(room)
	}
}

// tried records the outcome of a request for worker i.
func (g *growth) tried(i int, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if i < g.present || g.stop == nil {
		return // a worker was replaced
	}
	if err == nil {
		if g.present = i + 1; g.present == g.wanted {
			g.stop()
		}
		return
	}
	select {
	case g.refused <- struct{}{}:
	default:
	}
}

// end stops waiting for room: the lease has ended, or the client has released it.
func (g *growth) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.over = true
	if g.stop != nil {
		g.stop()
	}
}
