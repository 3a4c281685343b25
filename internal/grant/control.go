package grant

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc/connectivity"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Environment variables that fill in what Options leaves empty.
const (
	EnvManager        = "RFAAS_MANAGER"
	EnvExecutor       = "RFAAS_EXECUTOR"
	EnvProvider       = "RFAAS_PROVIDER"
	EnvAllowPlaintext = control.AllowPlaintextEnv
	EnvDataEncryption = "RFAAS_DATA_ENCRYPTION"
	EnvOFIProvider    = "RFAAS_OFI_PROVIDER"
	EnvOFIDevice      = "RFAAS_OFI_DEVICE"
)

// DefaultTimeout bounds a control operation whose context has no deadline.
const DefaultTimeout = 10 * time.Second

// Options says where executors are found. WithEnvironment fills the empty fields.
type Options struct {
	Manager        string             // host:port or unix:PATH of a resource manager
	Executor       string             // host:port or unix:PATH of one executor, instead of a manager
	Provider       string             // "shm", "verbs", "tcp", "ofi" or "auto"
	OFI            bool               // the client has a libfabric provider configured, so that "auto" may choose ofi
	Tenant         string             // account to charge
	SecretFile     string             // empty: control's default
	TokenFile      string             // the same
	AllowPlaintext bool               // see control.DialConfig
	DataEncryption string             // "off", "on" or "require", for data on tcp; empty: "on"
	Verbs          *dataplane.Options // this node's RDMA device; nil: the first with an active port
	Timeout        time.Duration      // 0: DefaultTimeout
	// Getenv looks up the variables that name credentials. nil: os.Getenv, or what WithEnvironment was called with.
	Getenv func(string) string
	// Keep is the most released leases to cache; 0: the environment's number or 16, negative: none.
	Keep int
	// Pool is the most spare leases with the same terms that this session's leases cause. WithEnvironment sets it.
	Pool int
	// Broker permits that the first calls of leases with spare workers on verbs pass through this process. WithEnvironment sets it.
	Broker bool
	// Later makes Open succeed even if no address is configured, or the manager or executor cannot be reached. Each lease then tries again.
	Later bool
	// Known makes Open ask neither the manager nor the executor, because another process of the user has opened the session before.
	Known bool
	// Dropped is called with the name of a cached lease that was given up, on any goroutine. May be nil.
	Dropped func(name uint64)
}

// verbs returns the options of this node's RDMA device.
func (o *Options) verbs() dataplane.Options {
	if o.Verbs == nil {
		return dataplane.Options{GIDIndex: -1}
	}
	return *o.Verbs
}

// WithEnvironment returns o with empty fields taken from the environment. An address in o wins over both
// addresses there; with both in the environment the manager wins.
func (o Options) WithEnvironment(getenv func(string) string) Options {
	if o.Getenv == nil {
		o.Getenv = getenv
	}
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
	o.DataEncryption = cmp.Or(o.DataEncryption, getenv(EnvDataEncryption), "on")
	o.OFI = getenv(EnvOFIProvider) != "" && o.DataEncryption != "require"
	if o.Tenant == "" {
		o.Tenant = cmp.Or(o.dial().TokenTenant(), getenv("USER"), getenv("LOGNAME"), "uid"+strconv.Itoa(os.Getuid()))
	}
	o.Keep = cachedOf(o.Keep, getenv(EnvCached))
	if o.Keep == 0 {
		o.Keep = -1
	}
	o.Pool = poolOf(getenv(EnvPool))
	o.Broker = brokerOf(getenv(EnvBroker))
	return o
}

func (o *Options) dial() control.DialConfig {
	return control.DialConfig{SecretFile: o.SecretFile, TokenFile: o.TokenFile, AllowPlaintext: o.AllowPlaintext, Getenv: o.Getenv}
}

// Control is one session with a manager or an executor. Its connections may be shared with other sessions (Pool); the
// time-out and the cached leases are its own. Safe for concurrent use.
type Control struct {
	*shared
	opts Options
	done func() // gives up the shared part

	claimants claimants

	mu     sync.Mutex
	closed bool
	left   bool // protected by the cache: its leases are cached without an owner from now on
}

// Configured reports whether the session has the address of a manager or of an executor. Without Options.Later it has one.
func (c *Control) Configured() bool { return c.opts.Manager != "" || c.opts.Executor != "" }

// manager returns the manager's address, or an error if none is configured.
func (c *shared) manager() (string, error) {
	if c.opts.Manager == "" {
		return "", fail("connect", dataplane.StatusInvalid, "no address: give a manager or an executor, set %s or %s, or "+tryRun, EnvManager, EnvExecutor)
	}
	return c.opts.Manager, nil
}

// mayComeLater reports whether a session with Options.Later is opened although reach returned this error.
func mayComeLater(err error) bool {
	return errors.Is(err, dataplane.ErrConnection) || errors.Is(err, dataplane.ErrCredential) || errors.Is(err, context.DeadlineExceeded)
}

// reach checks that the session's manager or executor answers. It sends no message if, since the last answer, the connection has not
// broken and the token has not changed.
func (c *shared) reach(ctx context.Context) (err error) {
	at, token := cmp.Or(c.opts.Manager, c.opts.Executor), c.tokenState()
	c.mu.Lock()
	known := c.conns[at] != nil && c.conns[at].GetState() == connectivity.Ready && c.reached && c.reachedWith == token
	c.mu.Unlock()
	switch {
	case known:
		return nil
	case c.opts.Manager != "":
		_, err = c.hello(ctx)
	default:
		_, err = c.info(ctx, c.opts.Executor)
	}
	c.mu.Lock()
	c.reached, c.reachedWith = err == nil, token
	c.mu.Unlock()
	return err
}

// tokenState returns the state of the token's file; zero if there is none.
func (c *shared) tokenState() (st fileState) {
	dial := c.opts.dial()
	path, _, _ := dial.Files()
	if i, err := os.Stat(path); err == nil {
		st, _ = stateOf(i)
	}
	return st
}

// LikelyProvider returns the provider that the session's next lease will probably use; "" if nothing is known.
func (c *shared) LikelyProvider() string {
	c.mu.Lock()
	last, info := c.lastProvider, c.infos[c.opts.Executor]
	c.mu.Unlock()
	if info != nil {
		last, _ = c.provider(c.opts.Executor, info)
	}
	return last
}

// Close gives up the cached leases whose channels were not handed over. It closes the connections, unless other sessions share them or
// cached leases are left. The caller releases all leases before;
// executors end leases that were not released when they notice that the client has disconnected. A second call does nothing.
func (c *Control) Close() { c.close(false) }

// Leave is Close for a client process that lives and goes on by another connection or agent. It keeps the leases that it has got by claims.
func (c *Control) Leave() { c.close(true) }

func (c *Control) close(lives bool) {
	c.mu.Lock()
	closed := c.closed
	c.closed = true
	c.mu.Unlock()
	if closed {
		return
	}
	c.leaveCached(lives)
	c.leaveClaimants()
	c.done()
}

// isOpen returns an error once the session is closed.
func (c *Control) isOpen(op string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fail(op, dataplane.StatusInvalid, "the session is closed")
	}
	return nil
}

// Timeout is the bound of each control operation.
func (c *Control) Timeout() time.Duration { return c.opts.Timeout }

// bound applies the session's time-out to a context that has no earlier deadline.
func (c *Control) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, c.opts.Timeout)
}

func (c *shared) list(ctx context.Context) ([]*control.ExecutorEntry, error) {
	const op = "ask the resource manager"
	at, err := c.manager()
	if err != nil {
		return nil, err
	}
	conn, err := c.dial(op, at)
	if err != nil {
		return nil, err
	}
	r, err := control.NewManagerClient(conn).List(ctx, &control.ListRequest{})
	if err != nil {
		return nil, c.explainAbsent(fromControl(op, at, err), at)
	}
	return r.Executors, nil
}

// Candidate is an executor that may grant a lease.
type Candidate struct {
	Address  string
	Node     string // host name, for messages
	Provider string // "shm", "verbs", "tcp" or "ofi", decided
	info     *control.InfoReply
	Cached   *Cached // whose workers are to be resumed; nil: start new ones
}

// provider chooses the provider for the node that info describes. An error says why none is possible.
func (c *shared) provider(addr string, info *control.InfoReply) (string, error) {
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
	case "tcp":
		if !offers("tcp") {
			return "", fail(op, dataplane.StatusUnsupported, "executor %s offers %v, not tcp (setting providers of the executor)", addr, info.Providers)
		}
		return "tcp", nil
	case "ofi":
		if !offers("ofi") {
			return "", fail(op, dataplane.StatusUnsupported, "executor %s offers %v, not ofi (settings providers and ofi-provider of the executor)", addr, info.Providers)
		}
		return "ofi", nil
	}
	switch {
	case local && offers("shm"):
		return "shm", nil
	case offers("verbs") && c.devices():
		return "verbs", nil
	case offers("ofi") && c.opts.OFI:
		return "ofi", nil
	case offers("tcp"):
		return "tcp", nil
	}
	if offers("verbs") {
		return "", fail(op, dataplane.StatusUnsupported, "executor %s on node %q offers %v, and not tcp, and this node has no RDMA device", addr, info.Node,
			info.Providers)
	}
	return "", fail(op, dataplane.StatusUnsupported, "executor %s on node %q offers %v: shm needs the same node and network namespace, "+
		"verbs an RDMA device, tcp an executor that offers it (setting providers), ofi "+EnvOFIProvider+" in the client's environment", addr, info.Node,
		info.Providers)
}

// providerRank orders providers by the time of a call, the shortest first.
func providerRank(name string) int { return slices.Index([]string{"shm", "verbs", "ofi", "tcp"}, name) }

// named is provider for an executor that the resource manager has named. A local address is accepted only on the
// executor's own node.
func (c *shared) named(addr string, info *control.InfoReply) (string, error) {
	if err := control.CheckLocal(addr, info.NodeId, c.nodeID); err != nil {
		return "", fail("find an executor", dataplane.StatusUnsupported, "%v", err)
	}
	return c.provider(addr, info)
}

// candidates returns the executors to ask for a lease, the best first, and for each other executor the reason why it cannot be asked. If
// no executor can be asked, it returns an error.
func (c *shared) candidates(ctx context.Context, s *Spec) (found []Candidate, unusable []error, err error) {
	if addr := cmp.Or(s.Executor, c.opts.Executor); addr != "" {
		cand, err := c.only(ctx, addr, s)
		if err != nil {
			return nil, nil, err
		}
		return []Candidate{cand}, nil, nil
	}
	entries, err := c.list(ctx)
	if err != nil {
		return nil, nil, err
	}
	// The manager knows what was free at the last heartbeat. An executor that seemed full then may have room now, so it is asked after the
	// others.
	need := uint32(s.Workers * s.CoresPerWorker)
	for _, e := range entries {
		cand, err := c.usable(e, need)
		if err != nil {
			unusable = append(unusable, err)
			continue
		}
		found = append(found, cand)
	}
	if len(found) == 0 {
		return nil, unusable, c.nothingUsable(s, unusable)
	}
	// Executors of this node first, then those with the most free cores. Equal ones are in random order, so that many ranks do not
	// all ask the same executor.
	rand.Shuffle(len(found), func(i, j int) { found[i], found[j] = found[j], found[i] })
	slices.SortStableFunc(found, func(a, b Candidate) int {
		if aFits, bFits := a.info.FreeCores >= need, b.info.FreeCores >= need; aFits != bFits {
			if aFits {
				return -1
			}
			return 1
		}
		if c.opts.Provider == "auto" && a.Provider != b.Provider {
			return cmp.Compare(providerRank(a.Provider), providerRank(b.Provider))
		}
		return cmp.Compare(b.info.FreeCores, a.info.FreeCores)
	})
	return found, unusable, nil
}
