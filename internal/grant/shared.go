package grant

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/bundle"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// shared is the part of a session that sessions of one user can share: the connections to the manager and to executors, the manager's
// board, and the libraries that were read. Safe for concurrent use.
type shared struct {
	opts   Options // those of part
	nodeID string
	// devices reports whether this node has an RDMA device.
	devices func() bool
	client  [16]byte // identifies this process to executors that cache its workers

	mu         sync.Mutex
	conns      map[string]*grpc.ClientConn
	infos      map[string]*control.InfoReply // replies of executors, by address
	libraries  map[fileState]*Library
	inUse      map[[sha256.Size]byte]weak.Pointer[Library] // libraries of leases, including those that are too large for `libraries`
	streams    map[string][]*leasing                       // idle ones, by address
	regions    map[string]*Region                          // by executor
	farRegions map[string]*farRegion                       // by executor
	followed   map[string]*followers                       // by executor
	reading    map[fileState]*fileLock                     // of libraries that are being read
	token      *control.Token                              // nil: none is used yet
	refusal    string                                      // why the credential was refused at the last renewal of a lease; "": it was not
	closed     bool
	// The last answer of the session's manager or executor came with this token. Set by reach.
	reached      bool
	reachedWith  fileState
	lastProvider string // of the last grant

	cache    cache
	places   places
	arrivals arrivals
	sources  dataplane.Exposer
	copies   copies
	bundles  bundle.Finder

	retain func() func() // keeps the connections open until the function that it returns is called
	fill   func() func() // like retain, while a seed arrives at an executor: see Pool.Filling

	// Set and protected by the pool.
	users int
	timer *time.Timer // closes an unused part; nil while it is used
}

func newShared(o *Options) (*shared, error) {
	id, err := control.NodeID()
	if err != nil {
		return nil, fail("connect", dataplane.StatusFatal, "%v", err)
	}
	s := &shared{opts: *o, nodeID: id, devices: anyDevice, conns: make(map[string]*grpc.ClientConn), infos: make(map[string]*control.InfoReply),
		streams: make(map[string][]*leasing), regions: make(map[string]*Region), farRegions: make(map[string]*farRegion), followed: make(map[string]*followers), libraries: make(map[fileState]*Library), reading: make(map[fileState]*fileLock), inUse: make(map[[sha256.Size]byte]weak.Pointer[Library])}
	s.places.open()
	s.opts.Dropped = nil // belongs to one session
	rand.Read(s.client[:])
	return s, nil
}

// close closes the connections.
func (c *shared) close() {
	c.cache.close()
	c.places.close()
	c.mu.Lock()
	conns, streams := c.conns, c.streams
	c.conns, c.streams, c.closed = nil, nil, true
	for _, r := range c.regions {
		r.File.Close()
	}
	for _, r := range c.farRegions {
		r.close()
	}
	c.mu.Unlock()
	for _, idle := range streams {
		for _, s := range idle {
			s.cancel()
		}
	}
	for _, conn := range conns {
		conn.Close()
	}
	c.sources.Close() // closing the connections has ended the transfers
}

// dial returns the connection to addr. There is one for each address.
func (c *shared) dial(op, addr string) (*grpc.ClientConn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fail(op, dataplane.StatusInvalid, "the session is closed")
	}
	if conn := c.conns[addr]; conn != nil {
		return conn, nil
	}
	cfg := c.opts.dial()
	if path, _, _ := cfg.Files(); c.token == nil && path != "" {
		c.token, _ = control.OpenToken(path) // Dial reports why it cannot be used
	}
	cfg.Token = c.token
	conn, err := control.Dial(addr, cfg)
	if err != nil {
		e := fromControl(op, "", err)
		if control.ClassOf(err) == control.ClassFatal { // a file of the token or secret is missing, unreadable or malformed
			e = fail(op, dataplane.StatusCredential, "%v", err)
		}
		return nil, e
	}
	c.conns[addr] = conn
	return conn, nil
}

// note records the provider of a grant.
func (c *shared) note(provider string) {
	c.mu.Lock()
	c.lastProvider = provider
	c.mu.Unlock()
}

// Pool lets sessions with the same addresses and credentials share connections. Connections without a session stay open for a while.
// Safe for concurrent use.
type Pool struct {
	idle  time.Duration
	fills atomic.Int64 // seeds that still arrive

	mu     sync.Mutex
	parts  map[part]*shared
	closed bool
}

// part has the options that sessions must have in common to share connections.
type part struct {
	manager, executor, provider, tenant, encryption string
	plaintext, ofi, named                           bool // named: the files are not those at the default paths
	token, secret, ca                               string
	verbs                                           dataplane.Options
	secretState                                     fileState // zero: there is no such file. A token file is read again when it changes.
}

// NewPool returns an empty pool. idle is how long unused connections stay open.
func NewPool(idle time.Duration) *Pool {
	return &Pool{idle: idle, parts: make(map[part]*shared)}
}

// Open checks the options and connects to the manager or executor, so that a wrong address is reported here. See Options.Later.
func (p *Pool) Open(ctx context.Context, o Options) (*Control, error) {
	const op = "connect"
	if o.Manager != "" && o.Executor != "" {
		return nil, fail(op, dataplane.StatusInvalid, "both a manager (%s) and an executor (%s) are given, want one", o.Manager, o.Executor)
	}
	switch o.Provider {
	case "":
		o.Provider = "auto"
	case "auto", "shm", "verbs", "tcp":
	case "ofi":
		if o.DataEncryption == "require" {
			return nil, fail(op, dataplane.StatusUnsupported, "data encryption is required, but provider ofi does not encrypt; use tcp")
		}
	default:
		return nil, fail(op, dataplane.StatusInvalid, "provider %q is not one of auto, shm, verbs, tcp, ofi", o.Provider)
	}
	if o.DataEncryption == "" {
		o.DataEncryption = "on"
	}
	if _, known := dataplane.Encryption(o.DataEncryption, o.AllowPlaintext); !known {
		return nil, fail(op, dataplane.StatusInvalid, "data encryption %q (from the options or %s) is not one of off, on, require", o.DataEncryption, EnvDataEncryption)
	}
	if o.Timeout < 0 {
		return nil, fail(op, dataplane.StatusInvalid, "time-out %v is negative", o.Timeout)
	}
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	s, done, err := p.connect(&o)
	if err != nil {
		return nil, err
	}
	c := &Control{shared: s, opts: o, done: done}
	ctx, cancel := c.bound(ctx)
	defer cancel()
	switch {
	case !c.Configured():
		if _, err = c.manager(); o.Later {
			err = nil
		}
	case o.Known:
	default:
		if err = c.reach(ctx); o.Later && mayComeLater(err) {
			err = nil
		}
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func partOf(o *Options) part {
	getenv := o.Getenv
	if getenv == nil {
		getenv = os.Getenv
	}
	k := part{manager: o.Manager, executor: o.Executor, provider: o.Provider, tenant: o.Tenant, encryption: o.DataEncryption,
		plaintext: o.AllowPlaintext, ofi: o.OFI, verbs: o.verbs(), ca: getenv(identity.CAFileEnv)}
	dial := o.dial()
	k.token, k.secret, k.named = dial.Files()
	if i, err := os.Stat(k.secret); err == nil {
		k.secretState, _ = stateOf(i)
	}
	return k
}

// connect returns the connections for the options, and a function that gives them up.
func (p *Pool) connect(o *Options) (*shared, func(), error) {
	key := partOf(o)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, nil, fail("connect", dataplane.StatusInvalid, "the pool of connections is closed")
	}
	s := p.parts[key]
	if s == nil {
		var err error
		if s, err = newShared(o); err != nil {
			return nil, nil, err
		}
		s.retain, s.fill = func() func() { return p.retain(key, s) }, func() func() { return p.fill(key, s) }
		p.parts[key] = s
	}
	if s.timer != nil {
		s.timer.Stop()
		s.timer = nil
	}
	s.users++
	return s, func() { p.release(key, s) }, nil
}

// retain adds a user to connections that already have a user.
func (p *Pool) retain(key part, s *shared) func() {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.users++
	return func() { p.release(key, s) }
}

// fill is retain while a seed arrives at an executor.
func (p *Pool) fill(key part, s *shared) func() {
	unused := p.retain(key, s)
	p.fills.Add(1)
	return func() {
		unused()
		p.fills.Add(-1)
	}
}

// Filling reports whether seeds still arrive at executors over streams of this pool.
func (p *Pool) Filling() bool { return p.fills.Load() > 0 }

func (p *Pool) release(key part, s *shared) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.users--; s.users > 0 || p.closed {
		return
	}
	s.timer = time.AfterFunc(p.idle, func() {
		p.mu.Lock()
		unused := s.users == 0 && p.parts[key] == s
		if unused {
			delete(p.parts, key)
		}
		p.mu.Unlock()
		if unused {
			s.close()
		}
	})
}

// Close closes all connections. Sessions that use them fail from then on.
func (p *Pool) Close() {
	p.mu.Lock()
	parts := p.parts
	p.parts, p.closed = nil, true
	p.mu.Unlock()
	for _, s := range parts {
		if s.timer != nil {
			s.timer.Stop()
		}
		s.close()
	}
}

// Connections counts the open connections of a pool.
type Connections struct {
	Executors int    // with a control connection
	Board     string // provider by which a manager's board is attached; empty: none is
}

// Connections returns the open connections.
func (p *Pool) Connections() (n Connections) {
	p.mu.Lock()
	defer p.mu.Unlock()
	executors := map[string]bool{} // counts an executor once: each set of credentials has its own connection to it
	for _, s := range p.parts {
		s.mu.Lock()
		for address := range s.conns {
			if address != s.opts.Manager {
				executors[address] = true
			}
		}
		s.mu.Unlock()
		if provider := s.places.attached.Load(); provider != nil {
			n.Board = *provider
		}
	}
	n.Executors = len(executors)
	return n
}
