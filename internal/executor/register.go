package executor

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
)

const (
	managerCall     = 3 * time.Second // bound of one call to the manager
	registerBackoff = 100 * time.Millisecond
	registerLongest = 2 * time.Second
)

// registrar keeps the manager informed. It decides nothing: leases go on with and without a manager.
type registrar struct {
	client  control.ManagerClient
	manager string // its address, for the log
	address string // of this executor, as clients shall use it
	info    func() *control.InfoReply
	log     *slog.Logger
	poke    chan struct{} // capacity 1: report now

	id       uint64 // as the manager knows us; 0: it does not
	interval time.Duration
	away     bool // the manager did not answer last time, and the log says so
}

func newRegistrar(conn grpc.ClientConnInterface, manager, address string, info func() *control.InfoReply, log *slog.Logger) *registrar {
	return &registrar{client: control.NewManagerClient(conn), manager: manager, address: address, info: info, log: log,
		poke: make(chan struct{}, 1)}
}

// report makes run report at once.
func (r *registrar) report() {
	select {
	case r.poke <- struct{}{}:
	default:
	}
}

// run registers and reports until ctx ends, then signs off.
func (r *registrar) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	backoff := registerBackoff
	for {
		select {
		case <-ctx.Done():
			r.signOff()
			return
		case <-r.poke:
		case <-timer.C:
		}
		if r.step(ctx) {
			backoff = registerBackoff
			timer.Reset(r.interval)
		} else {
			timer.Reset(backoff)
			backoff = min(2*backoff, registerLongest)
		}
	}
}

// step registers, or reports if registered. False: try again soon.
func (r *registrar) step(run context.Context) bool {
	ctx, cancel := context.WithTimeout(run, managerCall)
	defer cancel()
	if r.id != 0 {
		reply, err := r.client.Heartbeat(ctx, &control.HeartbeatRequest{ExecutorId: r.id, Info: r.info()})
		if err != nil {
			return r.failed(run, err)
		}
		r.away = false
		if !reply.GetUnknown() {
			return true
		}
		r.id = 0 // it was started anew, or thought us dead
	}
	reply, err := r.client.Register(ctx, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion,
		Address: r.address, Info: r.info()})
	if err != nil {
		return r.failed(run, err)
	}
	r.id, r.away = reply.GetExecutorId(), false
	r.interval = min(max(time.Duration(reply.GetHeartbeatMs())*time.Millisecond, 10*time.Millisecond), time.Minute)
	r.log.Info("registered", "manager", r.manager, "id", r.id, "heartbeat", r.interval)
	return true
}

// failed logs once until the manager answers again.
func (r *registrar) failed(run context.Context, err error) bool {
	if run.Err() != nil {
		return false // we gave up, not the manager
	}
	if !r.away {
		r.log.Warn("the manager does not answer; leases go on, and it is tried again", "manager", r.manager, "error", control.Text(err))
	}
	r.away = true
	return false
}

// signOff tells the manager that this executor leaves, if it listens.
func (r *registrar) signOff() {
	if r.id == 0 || r.away {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), control.CloseTimeout)
	defer cancel()
	if _, err := r.client.Deregister(ctx, &control.DeregisterRequest{ExecutorId: r.id}); err != nil {
		r.log.Debug("not deregistered", "manager", r.manager, "error", err)
	}
}
