package grant

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"google.golang.org/grpc"
)

// Environment variables that fill in what Options leaves empty.
const (
	EnvManager        = "RFAAS_MANAGER"
	EnvExecutor       = "RFAAS_EXECUTOR"
	EnvProvider       = "RFAAS_PROVIDER"
	EnvAllowPlaintext = "RFAAS_ALLOW_PLAINTEXT"
)

// DefaultTimeout bounds a control operation whose context has no deadline.
const DefaultTimeout = 10 * time.Second

// Options says where executors are found. WithEnvironment fills the empty fields.
type Options struct {
	Manager        string        // host:port or unix:PATH of a resource manager
	Executor       string        // or of one executor
	Provider       string        // "shm", "verbs" or "auto"
	Tenant         string        // account that pays
	SecretFile     string        // empty: control's default
	TokenFile      string        // the same
	AllowPlaintext bool          // see control.DialConfig
	Timeout        time.Duration // 0: DefaultTimeout
	// Device opens a device of a provider, which stays the caller's, for reading the manager's memory. nil: its own.
	Device func(provider string) (*dataplane.Device, error)
	// Keep is how many released leases are kept connected; 0: the environment's number or 16, negative: none.
	Keep int
	// Dropped is called with the State of a kept lease that nobody will use any more, on any goroutine. May be nil.
	Dropped func(state any)
}

// WithEnvironment returns o with empty fields taken from the environment. An address in o wins over both
// addresses there; with both in the environment the manager wins.
func (o Options) WithEnvironment(getenv func(string) string) Options {
	if o.Manager == "" && o.Executor == "" {
		o.Manager = getenv(EnvManager)
		if o.Manager == "" {
			o.Executor = getenv(EnvExecutor)
		}
	}
	if o.Provider == "" {
		o.Provider = getenv(EnvProvider)
	}
	if !o.AllowPlaintext {
		o.AllowPlaintext, _ = strconv.ParseBool(getenv(EnvAllowPlaintext))
	}
	if o.Tenant == "" {
		o.Tenant = cmp.Or(o.dial().TokenTenant(), getenv("USER"), getenv("LOGNAME"), "uid"+strconv.Itoa(os.Getuid()))
	}
	o.Keep = keepOf(o.Keep, getenv(EnvKeep))
	if o.Keep == 0 {
		o.Keep = -1
	}
	return o
}

func (o *Options) dial() control.DialConfig {
	return control.DialConfig{SecretFile: o.SecretFile, TokenFile: o.TokenFile, AllowPlaintext: o.AllowPlaintext}
}

// Control holds the connections of one session to a manager and to executors. Safe for concurrent use.
type Control struct {
	opts   Options
	nodeID string

	mu        sync.Mutex
	conns     map[string]*grpc.ClientConn
	infos     map[string]*control.InfoReply // what executors have said of themselves, by address
	libraries map[string]*library           // by path
	closed    bool
	kept      []*Kept // released leases, the oldest first
	client    [16]byte
	streams   map[string]*leasing // that rest, by address
	work      sync.WaitGroup      // what expire began

	places places
}

// Open checks the options and reaches the manager or executor once, so that a wrong address is found here.
func Open(ctx context.Context, o Options) (*Control, error) {
	const op = "connect"
	if o.Manager == "" && o.Executor == "" {
		return nil, fail(op, dataplane.StatusInvalid, "no address: give a manager or an executor, or set %s or %s", EnvManager, EnvExecutor)
	}
	if o.Manager != "" && o.Executor != "" {
		return nil, fail(op, dataplane.StatusInvalid, "both a manager (%s) and an executor (%s) are given, want one", o.Manager, o.Executor)
	}
	switch o.Provider {
	case "":
		o.Provider = "auto"
	case "auto", "shm", "verbs":
	default:
		return nil, fail(op, dataplane.StatusInvalid, "provider %q is none of auto, shm, verbs", o.Provider)
	}
	if o.Timeout < 0 {
		return nil, fail(op, dataplane.StatusInvalid, "time-out %v is negative", o.Timeout)
	}
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	id, err := control.NodeID()
	if err != nil {
		return nil, fail(op, dataplane.StatusFatal, "%v", err)
	}
	c := &Control{opts: o, nodeID: id, conns: make(map[string]*grpc.ClientConn),
		infos: make(map[string]*control.InfoReply), streams: make(map[string]*leasing), libraries: make(map[string]*library), places: places{open: o.Device}}
	crand.Read(c.client[:])
	ctx, cancel := c.bound(ctx)
	defer cancel()
	if o.Manager != "" {
		_, err = c.hello(ctx)
	} else {
		_, err = c.info(ctx, o.Executor)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Close closes the connections. Leases must have been released; those that were not end when their executor
// notices.
func (c *Control) Close() {
	c.places.close()
	c.mu.Lock()
	conns, streams := c.conns, c.streams
	c.conns, c.streams, c.closed = nil, nil, true
	c.mu.Unlock()
	c.dropKept()
	for _, s := range streams {
		s.cancel()
	}
	for _, conn := range conns {
		conn.Close()
	}
	c.work.Wait()
}

// Timeout is the bound of each control operation.
func (c *Control) Timeout() time.Duration { return c.opts.Timeout }

// bound gives control operations the session's time-out unless the context has a tighter one.
func (c *Control) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, c.opts.Timeout)
}

// dial returns the connection to addr: one per address and session.
func (c *Control) dial(op, addr string) (*grpc.ClientConn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fail(op, dataplane.StatusInvalid, "the session is closed")
	}
	if conn := c.conns[addr]; conn != nil {
		return conn, nil
	}
	conn, err := control.Dial(addr, c.opts.dial())
	if err != nil {
		e := fromControl(op, "", err)
		if control.ClassOf(err) == control.ClassFatal { // the secret or token file: something for the caller to put right
			e = fail(op, dataplane.StatusInvalid, "%v", err)
		}
		return nil, e
	}
	c.conns[addr] = conn
	return conn, nil
}

func (c *Control) list(ctx context.Context) ([]*control.ExecutorEntry, error) {
	const op = "ask the resource manager"
	conn, err := c.dial(op, c.opts.Manager)
	if err != nil {
		return nil, err
	}
	r, err := control.NewManagerClient(conn).List(ctx, &control.ListRequest{})
	if err != nil {
		return nil, fromControl(op, c.opts.Manager, err)
	}
	return r.Executors, nil
}

// Candidate is an executor that may grant a lease.
type Candidate struct {
	Address  string
	Node     string // host name, for people
	Provider string // "shm" or "verbs", decided
	info     *control.InfoReply
	Kept     *Kept // its workers wait there; nil for a new lease
}

// provider decides how to reach the node that info describes; an error says why there is no way.
func (c *Control) provider(addr string, info *control.InfoReply) (string, error) {
	const op = "choose a provider"
	local := info.NodeId != "" && info.NodeId == c.nodeID
	offers := func(p string) bool { return slices.Contains(info.Providers, p) }
	switch c.opts.Provider {
	case "shm":
		if !local {
			return "", fail(op, dataplane.StatusUnsupported, "provider shm: executor %s runs on node %q, not on this one", addr, info.Node)
		}
		if !offers("shm") {
			return "", fail(op, dataplane.StatusUnsupported, "executor %s offers %v, not shm", addr, info.Providers)
		}
		return "shm", nil
	case "verbs":
		if !offers("verbs") {
			return "", fail(op, dataplane.StatusUnsupported, "executor %s offers %v, not verbs", addr, info.Providers)
		}
		return "verbs", nil
	}
	if local && offers("shm") {
		return "shm", nil
	}
	if offers("verbs") {
		return "verbs", nil
	}
	return "", fail(op, dataplane.StatusUnsupported, "executor %s on node %q offers %v: shm needs the same node and network namespace, "+
		"verbs an RDMA device", addr, info.Node, info.Providers)
}

// named is provider for an executor that the resource manager has named. A local address is accepted only on the
// executor's own node.
func (c *Control) named(addr string, info *control.InfoReply) (string, error) {
	if err := control.CheckLocal(addr, info.NodeId, c.nodeID); err != nil {
		return "", fail("find an executor", dataplane.StatusUnsupported, "%v", err)
	}
	return c.provider(addr, info)
}

// candidates lists the executors to try for a lease, the best first. With none, the error tells why.
func (c *Control) candidates(ctx context.Context, s *Spec) ([]Candidate, error) {
	const op = "find an executor"
	if addr := cmp.Or(s.Executor, c.opts.Executor); addr != "" {
		cand, err := c.only(ctx, addr, s)
		if err != nil {
			return nil, err
		}
		return []Candidate{cand}, nil
	}
	entries, err := c.list(ctx)
	if err != nil {
		return nil, err
	}
	var (
		found  []Candidate
		alive  int
		mostOf uint32
		noWay  error
	)
	need := uint32(s.Workers * s.CoresPerWorker)
	for _, e := range entries {
		if !e.Alive || e.Info == nil || e.Info.Draining {
			continue
		}
		alive++
		mostOf = max(mostOf, e.Info.Cores)
		// The manager knows what was free at the last heartbeat; only the executor knows what is free now. So one
		// that seems full is asked too, after the others.
		if e.Info.Cores < need {
			continue
		}
		p, err := c.named(e.Address, e.Info)
		if err != nil {
			noWay = err
			continue
		}
		found = append(found, Candidate{Address: e.Address, Node: e.Info.Node, Provider: p, info: e.Info})
	}
	switch {
	case len(found) > 0:
	case noWay != nil:
		return nil, noWay
	case alive == 0:
		return nil, fail(op, dataplane.StatusBusy, "the resource manager %s knows %d executors, none of them alive and open", c.opts.Manager, len(entries))
	default:
		return nil, fail(op, dataplane.StatusInvalid, "%d workers of %d cores need %d cores on one node, the largest of %d executors has %d",
			s.Workers, s.CoresPerWorker, need, alive, mostOf)
	}
	// This node first, then the freest; equal ones in random order, so that many ranks do not run after one.
	rand.Shuffle(len(found), func(i, j int) { found[i], found[j] = found[j], found[i] })
	slices.SortStableFunc(found, func(a, b Candidate) int {
		if aFits, bFits := a.info.FreeCores >= need, b.info.FreeCores >= need; aFits != bFits {
			if aFits {
				return -1
			}
			return 1
		}
		if c.opts.Provider == "auto" && a.Provider != b.Provider {
			return cmp.Compare(a.Provider, b.Provider) // "shm" before "verbs"
		}
		return cmp.Compare(b.info.FreeCores, a.info.FreeCores)
	})
	return found, nil
}
