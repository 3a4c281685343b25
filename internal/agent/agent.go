package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/grant"
)

// Config has the settings of an agent.
type Config struct {
	Socket  *Socket
	Linger  time.Duration // how long the agent runs without a client and without cached workers; 0: without a limit
	Version string
	Log     *slog.Logger
}

// mostClients bounds the connections. Each takes up to three descriptors, including those that come with requests.
const mostClients = 4096

// idleConnections is how long connections to executors and managers stay open without a session.
const idleConnections = 5 * time.Second

// Agent serves the client processes of one user.
type Agent struct {
	cfg      Config
	log      *slog.Logger
	pool     *grant.Pool
	began    time.Time
	served   atomic.Uint64 // requests answered
	barriers barriers
	held     atomic.Int64 // descriptors of channels that were handed over, and of spare leases' channels
	spares   *spares
	renewals *tokenRenewals
	learning chan struct{} // capacity 1: full while the library of an adopted lease is read

	spare *os.File // closed to make room for a client that is refused when all descriptors are in use; nil: none could be opened

	ctx    context.Context // ends when the agent has to stop
	cancel context.CancelFunc

	mu       sync.Mutex
	clients  map[*client]struct{}
	stopping bool
	all      sync.WaitGroup // clients
}

// Serve accepts clients until ctx ends, a client asks the agent to stop, or the agent has had neither a client nor cached workers for
// Linger. It releases no leases at the end: another agent may take them over. It removes the socket, unless another agent has replaced it.
func Serve(ctx context.Context, cfg Config) error {
	return newAgent(ctx, cfg).serve()
}

func newAgent(ctx context.Context, cfg Config) *Agent {
	a := &Agent{cfg: cfg, log: cfg.Log, pool: grant.NewPool(idleConnections), began: time.Now(), learning: make(chan struct{}, 1), clients: make(map[*client]struct{}), renewals: newTokenRenewals()}
	a.ctx, a.cancel = context.WithCancel(ctx)
	a.spares = newSpares(a)
	a.spare, _ = os.Open(os.DevNull)
	return a
}

func (a *Agent) serve() error {
	defer a.cancel()
	// Ends a pending Accept.
	defer context.AfterFunc(a.ctx, func() { _ = a.cfg.Socket.listener.SetDeadline(time.Unix(1, 0)) })()
	a.log.Info("ready", "socket", a.cfg.Socket.path, "version", a.cfg.Version, "linger", a.cfg.Linger)
	go a.watchStopped(a.ctx)
	go a.watchTokens(a.ctx)
	err := a.accept()
	a.log.Info("stopping", "clients", a.count(), "served", a.served.Load(), "error", err)
	a.close()
	return err
}

func (a *Agent) stop() { a.cancel() }

func (a *Agent) isStopping() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.stopping
}

func (a *Agent) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.clients)
}

// accept accepts clients until the agent stops.
func (a *Agent) accept() error {
	a.linger()
	for {
		conn, err := a.cfg.Socket.listener.AcceptUnix()
		switch {
		case a.ctx.Err() != nil:
			if err == nil {
				conn.Close()
			}
			a.cfg.Socket.remove()
			return nil
		case err == nil:
			a.welcome(conn)
		case errors.Is(err, os.ErrDeadlineExceeded):
			conn, gone := a.lastLook()
			if gone {
				return nil
			}
			if conn != nil {
				a.welcome(conn)
			}
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
			a.log.Warn("cannot accept a client", "error", err)
			a.turnAway()
		case errors.Is(err, unix.ECONNABORTED):
		default:
			a.cfg.Socket.remove()
			return fmt.Errorf("accept on %s: %w", a.cfg.Socket.path, err)
		}
	}
}

// linger sets when accept is interrupted, to end an agent that has no client.
func (a *Agent) linger() {
	a.mu.Lock()
	defer a.mu.Unlock()
	var at time.Time
	if len(a.clients) == 0 && a.cfg.Linger > 0 {
		at = time.Now().Add(a.cfg.Linger)
	}
	if a.ctx.Err() == nil {
		_ = a.cfg.Socket.listener.SetDeadline(at)
	}
	if a.ctx.Err() != nil { // ctx may have ended in between
		_ = a.cfg.Socket.listener.SetDeadline(time.Unix(1, 0))
	}
}

// lastLook removes the socket unless a client is connected or connecting, workers that a client has used are cached, or a seed still arrives at an executor.
// gone reports that it was removed.
func (a *Agent) lastLook() (conn *net.UnixConn, gone bool) {
	defer func() {
		if !gone {
			a.linger()
		}
	}()
	if a.count() > 0 || a.cfg.Linger == 0 || a.pool.Filling() || slices.ContainsFunc(a.pool.Cached(), func(k grant.CachedLease) bool { return !k.Spare }) {
		return nil, false
	}
	return a.cfg.Socket.lastLook()
}

// errForeignUser is the error for a connection of another user.
var errForeignUser = errors.New("connection of another user refused")

// welcome begins to serve a connection.
func (a *Agent) welcome(conn *net.UnixConn) {
	pid, err := peer(conn)
	if err != nil {
		a.log.Warn("client refused", "error", err)
		conn.Close()
		return
	}
	c, err := newClient(a, conn, pid)
	if err != nil {
		conn.Close()
		return
	}
	a.mu.Lock()
	full := len(a.clients) >= mostClients
	if !full {
		a.clients[c] = struct{}{}
		a.all.Add(1)
	}
	a.mu.Unlock()
	if full {
		a.log.Warn("client refused", "error", fmt.Sprintf("%d clients are connected, the most", mostClients))
		c.cancel()
		go refuse(conn, tooMany())
		return
	}
	a.linger()
	_ = conn.SetReadDeadline(time.Now().Add(helloPatience))
	c.watch()
	c.work.Add(1)
	go c.serve()
}

// credentials returns the process and user at the other end of a connection.
func credentials(conn *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, cerr); err != nil {
		return nil, fmt.Errorf("SO_PEERCRED: %w", err)
	}
	return cred, nil
}

// peer returns the process at the other end, which must be of this user.
func peer(conn *net.UnixConn) (pid int, err error) {
	cred, err := credentials(conn)
	if err != nil {
		return 0, err
	}
	if int(cred.Uid) != os.Geteuid() {
		return 0, fmt.Errorf("%w: pid %d has uid %d, this agent uid %d; each user has an agent of its own", errForeignUser, cred.Pid, cred.Uid, os.Geteuid())
	}
	return int(cred.Pid), nil
}

// gone removes a client.
func (a *Agent) gone(c *client) {
	a.mu.Lock()
	delete(a.clients, c)
	last := len(a.clients) == 0
	a.mu.Unlock()
	if last {
		a.linger()
	}
	a.all.Done()
}

// close ends all connections.
func (a *Agent) close() {
	a.cfg.Socket.listener.Close()
	if a.spare != nil {
		a.spare.Close()
	}
	a.mu.Lock()
	a.stopping = true
	var clients []*client
	for c := range a.clients {
		clients = append(clients, c)
	}
	a.mu.Unlock()
	for _, c := range clients {
		c.end(net.ErrClosed)
	}
	a.spares.close()
	a.pool.Close() // before the wait, so that requests in progress fail
	a.all.Wait()
}
