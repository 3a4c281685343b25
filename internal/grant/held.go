package grant

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// broke reports whether a request should be repeated because its connection broke before the reply, as when another program has
// taken the executor's place. The request must be one that may be carried out twice.
func broke(ctx context.Context, err error) bool {
	return status.Code(err) == codes.Unavailable && ctx.Err() == nil && !dialFailed(err)
}

const (
	againFirst = 10 * time.Millisecond // before the third attempt
	againMost  = 500 * time.Millisecond
)

// repeat makes a request that may be carried out twice. If its connection breaks before the reply, repeat makes it once more. After that, it repeats the request for as
// long as the executor closes new connections before its first answer, as a busy one does. Until gRPC has connected again, each attempt returns the error of the one before.
func repeat(ctx context.Context, request func() error) error {
	err := request()
	if !broke(ctx, err) {
		return err
	}
	for pause := againFirst; ; pause = min(2*pause, againMost) {
		if err = request(); !broke(ctx, err) || !control.ClosedEarly(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

// whileWatched takes the context of a request to the executor, and its cancel function. The end of the watch cancels it, too, because an executor
// that is lost never answers.
func (h *Held) whileWatched(ctx context.Context, cancel context.CancelFunc) (context.Context, context.CancelFunc) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watch == nil {
		return ctx, cancel
	}
	stop := context.AfterFunc(h.watch.ctx, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// failed returns the error of a request that the executor refused or did not answer: the end of the lease if that is known, else err.
func (h *Held) failed(op string, err error) error {
	if ended := h.ended(op); ended != nil {
		return ended
	}
	return fromControl(op, h.Address, err)
}

// Replace asks for a new worker in place of worker i, which is killed if it is alive: with kill at once, otherwise after a moment in which it may
// end by itself. If the connection breaks before the reply, it
// repeats the request. A repeated blob gets the worker that was started for it.
func (h *Held) Replace(ctx context.Context, i int, blob []byte, kill bool) (Worker, error) {
	const op = "replace a worker"
	ctx, cancel := h.whileWatched(h.c.bound(ctx))
	defer cancel()
	req := &control.ReplaceRequest{LeaseId: h.ID, Worker: uint32(i), ClientBlob: blob, Kill: kill}
	var from peer.Peer
	var r *control.ReplaceReply
	err := repeat(ctx, func() (err error) {
		r, err = h.cl.Replace(ctx, req, grpc.Peer(&from))
		return err
	})
	if err != nil {
		return Worker{}, h.failed(op, err)
	}
	w := workerOf(r.GetWorker())
	if _, err := h.checkWorkers(op, &from, w); err != nil {
		return Worker{}, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.newer == nil {
		h.newer = map[int]Worker{}
	}
	h.newer[i] = w
	return w, nil
}

// present returns the workers that the lease has now, by index.
func (h *Held) present() []Worker {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := append(slices.Clone(h.Workers), make([]Worker, max(h.Wanted-len(h.Workers), 0))...)
	for i, w := range h.newer {
		all[i] = w
	}
	return all
}

// Inspection describes a worker, as its executor knows it.
type Inspection struct {
	PID     int    // 0: there is none
	Running string // function that runs now, "" between calls
	Output  []byte // last bytes that the worker printed
	// Counted by the worker itself.
	Calls    uint64 // functions that returned
	Failed   uint64 // of Calls: failed, or the result was too large
	Refused  uint64 // malformed requests
	BytesIn  uint64 // of payload
	BytesOut uint64 // of results
	// As the kernel counts.
	CPU      time.Duration
	Runnable bool // its main thread runs or is ready to run
}

// Inspect asks the executor about worker i.
func (h *Held) Inspect(ctx context.Context, i int) (Inspection, error) { return h.inspect(ctx, i, 0) }

// inspect is Inspect, and also reports how long the worker has not answered.
func (h *Held) inspect(ctx context.Context, i int, unanswered time.Duration) (Inspection, error) {
	ctx, cancel := h.whileWatched(h.c.bound(ctx))
	defer cancel()
	req := &control.InspectRequest{LeaseId: h.ID, Worker: uint32(i), UnansweredMs: uint64(max(unanswered, 0) / time.Millisecond)}
	var r *control.InspectReply
	err := repeat(ctx, func() (err error) {
		r, err = h.cl.Inspect(ctx, req)
		return err
	})
	if err != nil {
		return Inspection{}, h.failed("inspect a worker", err)
	}
	return Inspection{PID: int(r.Pid), Running: r.Running, Output: r.OutputTail, Calls: r.Calls, Failed: r.Failed,
		Refused: r.Refused, BytesIn: r.BytesIn, BytesOut: r.BytesOut, CPU: time.Duration(r.CpuNs), Runnable: r.Runnable}, nil
}

func milliseconds(ms uint64) time.Duration {
	return time.Duration(min(ms, math.MaxInt64/uint64(time.Millisecond))) * time.Millisecond
}

// Until returns when the client stops using the lease unless it is renewed. That is a margin before the executor ends it.
func (h *Held) Until() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.end
}

// Renew makes the lease last at least d from now; 0: the duration for which it was granted. Errors: ErrLease (it has ended), ErrBusy
// (the node drains), ErrInvalid (longer than the executor permits), ErrConnection.
func (h *Held) Renew(ctx context.Context, d time.Duration) error {
	const op = "renew"
	if d < 0 {
		return fail(op, dataplane.StatusInvalid, "duration %v is negative", d)
	}
	if err := h.ended(op); err != nil {
		return err
	}
	ctx, cancel := h.whileWatched(h.c.bound(ctx))
	defer cancel()
	req := &control.RenewRequest{LeaseId: h.ID}
	if d > 0 {
		req.DurationMs = proto.Uint64(uint64(max(d/time.Millisecond, 1)))
	}
	asked := time.Now()
	var r *control.RenewReply
	err := repeat(ctx, func() (err error) {
		r, err = h.cl.Renew(ctx, req)
		return err
	})
	if err != nil {
		return h.failed(op, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if end := asked.Add(milliseconds(r.ClientMs)); end.After(h.end) {
		h.end = end
		if h.watch != nil {
			h.watch.wake()
		}
	}
	return nil
}

// Finish ends the lease after the calls that were sent, for a client that starts no more calls. It returns when these calls have
// ended, the executor's time for draining is over, or the executor is lost. The watch continues and reports the end.
func (h *Held) Finish(ctx context.Context) error {
	ctx, cancel := h.whileWatched(context.WithCancel(ctx))
	defer cancel()
	_, err := h.cl.Release(ctx, &control.ReleaseRequest{LeaseId: h.ID, Finish: true})
	if err == nil {
		return nil
	}
	if err = h.failed("finish", err); errors.Is(err, dataplane.ErrLease) {
		return nil
	}
	return err
}

// Release ends the lease and its watch. It is no error if the lease has ended already, or if its executor has, since its workers
// ended with it.
func (h *Held) Release(ctx context.Context) error {
	_, err := h.release(ctx, false, 0)
	return err
}

func (h *Held) release(ctx context.Context, keep bool, claimant uint64) (*control.ReleaseReply, error) {
	h.leaving.Store(true)
	defer h.StopWatch() // after the release: if the event stream ends first, the executor assumes that the client is away
	h.mu.Lock()
	nothing := h.over != "" && !h.lost
	h.mu.Unlock()
	if nothing {
		return nil, nil
	}
	ctx, cancel := h.c.bound(ctx)
	defer cancel()
	req := &control.ReleaseRequest{LeaseId: h.ID, Keep: keep, Claims: keep && h.Provider != dataplane.OFI, Claimant: claimant}
	// If the executor has ended during the request, the second attempt finds that nobody listens, or an executor without this lease.
	var r *control.ReleaseReply
	err := repeat(ctx, func() (err error) {
		r, err = h.cl.Release(ctx, req)
		return err
	})
	if err = fromControl("release", h.Address, err); errors.Is(err, dataplane.ErrLease) || nobodyListens(err) {
		return nil, nil
	}
	return r, err
}
