package executor

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
)

const (
	managerCall     = 3 * time.Second // bound of one call to the manager
	registerBackoff = 100 * time.Millisecond
	registerLongest = 2 * time.Second
	attachEvery     = 30 * time.Second       // an executor that reports by messages tries the manager's memory again
	otherLongest    = 300 * time.Millisecond // registerLongest for an executor that has several managers
	otherManager    = time.Second            // interval and time limit of asking the manager, for an executor that has several managers and reports by memory
)

// registrar reports this executor's state to the manager: by writes to the manager's memory if that can be reached, else by messages. It decides
// nothing: leases continue without a manager.
type registrar struct {
	client   control.ManagerClient
	manager  string // its address, for the log
	address  string // at which clients reach this executor
	info     func() *control.InfoReply
	log      *slog.Logger
	poke     chan struct{} // capacity 1: report now
	stay     atomic.Bool   // another program takes over: do not deregister
	nodeID   string
	devices  *link.Devices // nil: messages only
	limits   *limiter      // gets way, too; may be nil
	accounts *accounts     // gets way while it exists; may be nil

	id       uint64 // this executor's id at the manager; 0: not registered
	interval time.Duration
	away     bool // the manager did not answer the last call, which was logged
	hello    *control.ManagerHelloReply
	way      *link.Executor // connection to the manager's memory; nil: messages
	provider string         // of way
	tried    time.Time      // of the last attempt to make a way
	again    time.Duration  // attachEvery
	several  bool           // manager contains several addresses
	asked    time.Time      // when the manager was last asked for its epoch
	beat     uint64
}

func newRegistrar(conn grpc.ClientConnInterface, manager, address string, info func() *control.InfoReply, log *slog.Logger) *registrar {
	return &registrar{client: control.NewManagerClient(conn), manager: manager, address: address, info: info, log: log,
		poke: make(chan struct{}, 1), again: attachEvery, several: control.Several(manager)}
}

// report makes run report at once.
func (r *registrar) report() {
	select {
	case r.poke <- struct{}{}:
	default:
	}
}

// run registers and reports until ctx ends, then deregisters.
func (r *registrar) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	backoff, longest := registerBackoff, registerLongest
	if r.several {
		longest = otherLongest
	}
	for {
		select {
		case <-ctx.Done():
			if r.way != nil {
				_ = r.write() // what was counted since the last report
			}
			r.detach()
			if !r.stay.Load() {
				r.signOff()
			}
			if r.devices != nil {
				r.devices.Close()
			}
			return
		case <-r.poke:
		case <-timer.C:
		}
		if r.step(ctx) {
			backoff = registerBackoff
			timer.Reset(r.interval)
		} else {
			timer.Reset(backoff)
			backoff = min(2*backoff, longest)
		}
	}
}

// step registers, or reports if registered. It returns false after a failure, to be called again soon.
func (r *registrar) step(run context.Context) bool {
	ctx, cancel := context.WithTimeout(run, managerCall)
	defer cancel()
	if r.way != nil {
		err := r.write()
		if err == nil {
			if err = r.ask(ctx); err == nil {
				r.away = false
				r.limits.beat()
				return true
			}
			if !errors.Is(err, errReplaced) {
				return r.failed(run, err) // a manager that is slow keeps its executors
			}
		}
		if run.Err() == nil {
			r.log.Info("the manager's memory cannot be reached any more", "manager", r.manager, "error", err)
		}
		r.detach()
		r.id = 0 // registering again shows whether the manager answers
	}
	if r.id != 0 {
		reply, err := r.client.Heartbeat(ctx, &control.HeartbeatRequest{ExecutorId: r.id, Info: r.info()})
		if err != nil {
			return r.failed(run, err)
		}
		r.away = false
		if !reply.GetUnknown() {
			if time.Since(r.tried) >= r.again { // messages cost the manager time
				if r.attach(run) == nil {
					r.log.Info("the manager's memory can be reached now", "manager", r.manager, "provider", r.provider)
				}
			}
			r.limits.beat()
			return true
		}
		r.id = 0 // the manager was restarted, or has forgotten this executor after a silence
	}
	reply, err := r.register(run)
	if err != nil {
		return r.failed(run, err)
	}
	r.id, r.away = reply.GetExecutorId(), false
	if run.Err() != nil {
		return true
	}
	r.interval = min(max(time.Duration(reply.GetHeartbeatMs())*time.Millisecond, 10*time.Millisecond), time.Minute)
	r.limits.registered(reply.GetManager().GetLimits())
	r.hello = reply.GetManager()
	if why := r.attach(run); why != nil {
		r.limits.join(nil)
		r.log.Info("registered", "manager", r.manager, "id", r.id, "heartbeat", r.interval, "by", "messages", "reason", control.Text(why))
	} else {
		r.log.Info("registered", "manager", r.manager, "id", r.id, "heartbeat", r.interval, "by", "memory", "provider", r.provider)
	}
	return true
}

// errReplaced means that the memory belongs to a manager that does not serve any more.
var errReplaced = errors.New("another resource manager has taken over")

// ask returns errReplaced if another manager has taken over, and another error if none answers. The memory of a manager whose process is
// stopped can still be reached.
func (r *registrar) ask(ctx context.Context) error {
	if !r.several || time.Since(r.asked) < otherManager {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, otherManager)
	defer cancel()
	hello, err := r.client.Hello(ctx, &control.ManagerHelloRequest{ProtocolVersion: control.ProtocolVersion})
	if err != nil {
		return err
	}
	r.asked = time.Now()
	if hello.GetEpoch() != r.hello.GetEpoch() {
		return errReplaced
	}
	return nil
}

// register asks for an id. If run ends meanwhile, it waits a little longer for the answer, because an executor with an id must deregister.
func (r *registrar) register(run context.Context) (*control.RegisterReply, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(run), managerCall)
	defer cancel()
	ended := context.AfterFunc(run, func() {
		late := time.AfterFunc(control.CloseTimeout, cancel)
		context.AfterFunc(ctx, func() { late.Stop() })
	})
	defer ended()
	return r.client.Register(ctx, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: r.address, Info: r.info()})
}

// attach connects to the manager's memory and writes the line there. The error says why messages are used instead.
func (r *registrar) attach(run context.Context) error {
	ctx, cancel := context.WithTimeout(run, managerCall)
	defer cancel()
	r.tried = time.Now()
	if r.devices == nil {
		return link.ErrNoWay
	}
	var incarnation [16]byte
	copy(incarnation[:], r.info().GetIncarnation())
	provider, err := r.devices.Try(link.Providers(r.hello, r.nodeID, ""), func(dev *dataplane.Device) (err error) {
		if r.way, err = link.AttachExecutor(ctx, r.client, dev, r.id, incarnation); err == nil {
			if err = r.write(); err != nil { // on verbs, connecting says nothing about the path to the peer
				r.way.Close()
				r.way = nil
			}
		}
		if err != nil {
			r.log.Warn("cannot reach the manager's memory by this provider", "manager", r.manager, "provider", dev.Provider(), "error", control.Text(err))
		}
		return err
	})
	if err != nil {
		return err
	}
	r.provider = provider
	r.accounts.join(r.way)
	r.limits.join(r.way)
	return nil
}

func (r *registrar) detach() {
	if r.way == nil {
		return
	}
	r.accounts.detach()
	r.limits.detach()
	r.way.Close()
	r.way = nil
}

// write writes the line.
func (r *registrar) write() error {
	r.beat++
	info := r.info()
	l := board.Line{Beat: r.beat, Incarnation: binary.LittleEndian.Uint64(info.GetIncarnation()), Written: time.Now(),
		Cores: info.GetCores(), FreeCores: info.GetFreeCores(), MemoryMiB: mebibytes(info.GetMemoryBytes()),
		FreeMiB: mebibytes(info.GetFreeMemoryBytes()), Leases: info.GetLeases(), State: board.Open, Providers: board.ProvidersOf(info.GetProviders()),
		Slowdown: info.GetNeighbourSlowdown()}
	if info.GetDraining() {
		l.State, l.Cordoned = board.Draining, info.GetCordoned()
	}
	if until := info.GetAvailableUntil(); until > 0 && until < 1<<40 {
		l.Until = time.Unix(int64(until), 0)
	}
	if err := r.way.WriteLine(l); err != nil {
		return err
	}
	return r.way.WriteStats(board.StatsOf(info.GetStats()), l.Incarnation)
}

func mebibytes(n uint64) uint32 { return uint32(min(n>>20, 1<<32-1)) }

// failed logs an error of the manager, but only the first one until the manager answers again. It returns false.
func (r *registrar) failed(run context.Context, err error) bool {
	if run.Err() != nil {
		return false // this executor ends, and cancelled the call
	}
	if !r.away {
		if control.ClassOf(err) == control.ClassCredential {
			r.log.Warn("the manager refuses this executor: check identity-dir, or that both daemons read the same secret-file; leases continue, and this executor tries again",
				"manager", r.manager, "error", control.Text(err))
		} else {
			r.log.Warn("the manager does not answer; leases continue, and this executor tries again", "manager", r.manager, "error", control.Text(err))
		}
	}
	r.away = true
	return false
}

// signOff deregisters, if the manager has answered lately.
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
