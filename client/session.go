package client

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-multierror"

	"github.com/rfaas-go/rfaas/client/c"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Options say where executors are and how to reach them. Empty fields are taken from the environment
// (RFAAS_MANAGER, RFAAS_EXECUTOR, RFAAS_PROVIDER, RFAAS_ALLOW_PLAINTEXT, RFAAS_DATA_ENCRYPTION), then from defaults.
type Options struct {
	Manager  string // host:port or unix:PATH of a resource manager
	Executor string // or of one executor; not both
	// Provider is "shm", "verbs", "tcp", "ofi" or "auto": shm on the executor's own node, elsewhere verbs if the executor and this node
	// have a device, ofi if the executor offers it and RFAAS_OFI_PROVIDER is set, else tcp. Empty: RFAAS_PROVIDER, else auto.
	Provider       string
	Verbs          VerbsOptions
	Tenant         string // account that pays; empty: the token's, else the user's name
	SecretFile     string // empty: $RFAAS_SECRET_FILE, else where the daemons of this user put it
	TokenFile      string // of rfaas token issue; empty: $RFAAS_TOKEN_FILE, else ~/.rfaas/token if that exists
	AllowPlaintext bool   // use no TLS, even for addresses that are neither loopback nor unix sockets
	// Local makes Connect succeed even if no daemon can be used: no address is configured, no daemon listens at the address, the credential is
	// missing, or the agent cannot be started. Each lease then tries again. With LeaseOptions.Local its calls run in this process until there
	// are workers. Without it, Session.Lease returns the error of the attempt. A malformed option is still an error.
	Local bool
	// DataEncryption is the encryption on tcp of calls and of reads of the resource manager's memory: "on" (unless all addresses of a connection are loopback), "require"
	// (always) or "off". An executor on another node with a setting that contradicts this one is refused. With
	// AllowPlaintext, "on" leaves the choice to the executor. Empty: RFAAS_DATA_ENCRYPTION, else on.
	DataEncryption string
	Timeout        time.Duration // bound of each control operation; 0: 10 s
	// CachedLeases is how many released leases the session caches for later leases with the same terms; 0: RFAAS_CACHED_LEASES
	// or 16, negative: none, and leases get no cached workers of other sessions.
	CachedLeases int
}

// VerbsOptions choose an RDMA device and its path. The zero value selects the defaults.
type VerbsOptions struct {
	Device       string // empty: the first with an active port
	Port         int    // from 1; 0: the first active one
	GIDIndex     int    // 0 chooses (RoCE v2 preferred) unless ForceGID
	ForceGID     bool   // take GIDIndex as it is, also 0
	PKeyIndex    int
	TrafficClass int // 0..255
	ServiceLevel int // 0..15
	MTU          int // 256..4096 bytes; 0: the port's
}

// Session takes leases. Safe for concurrent use.
type Session struct {
	c       *c.Session
	timeout time.Duration
	work    sync.WaitGroup // operations inside C, including those whose callers have returned

	mu     sync.Mutex
	leases map[*Lease]struct{}
	closed bool
}

// The C library is initialised once for each session. The last Finalize ends it, and nothing may begin meanwhile.
var library sync.Mutex

func initLibrary() error {
	library.Lock()
	defer library.Unlock()
	return c.Init()
}

func finalizeLibrary() error {
	library.Lock()
	defer library.Unlock()
	return c.Finalize()
}

// Connect opens a session. It calls the manager or executor once, so that a wrong address is reported here. It does so through this user's
// agent on this node, and starts the agent if none runs. Errors: ErrInvalid, ErrConnection (no daemon of rfaas answers at the address),
// ErrCredential, ErrUnsupported (no agent can be started). With Options.Local only ErrInvalid is left.
func Connect(ctx context.Context, o Options) (*Session, error) {
	if o.Timeout < 0 {
		return nil, fail("connect", dataplane.StatusInvalid, "time-out %v is negative", o.Timeout)
	}
	encryption := slices.Index([]string{"", "off", "on", "require"}, o.DataEncryption)
	if encryption < 0 {
		return nil, fail("connect", dataplane.StatusInvalid, "DataEncryption %q is not one of off, on, require", o.DataEncryption)
	}
	s := &Session{timeout: cmp.Or(o.Timeout, 10*time.Second), leases: make(map[*Lease]struct{})}
	gid := o.Verbs.GIDIndex
	if gid == 0 && !o.Verbs.ForceGID {
		gid = -1
	}
	options := c.SessionOptions{Manager: o.Manager, Executor: o.Executor, Provider: o.Provider, Tenant: o.Tenant,
		Device: o.Verbs.Device, SecretFile: o.SecretFile, TokenFile: o.TokenFile, Port: o.Verbs.Port, GIDIndex: gid,
		PKeyIndex: o.Verbs.PKeyIndex, TrafficClass: o.Verbs.TrafficClass, ServiceLevel: o.Verbs.ServiceLevel, MTU: o.Verbs.MTU,
		AllowPlaintext: o.AllowPlaintext, Local: o.Local, DataEncryption: encryption, Timeout: o.Timeout, CachedLeases: o.CachedLeases}
	return within(ctx, "connect", func() (*Session, error) {
		if err := initLibrary(); err != nil {
			return nil, err
		}
		var err error
		if s.c, err = c.SessionOpen(&options); err != nil {
			_ = finalizeLibrary() // the first error is the one to tell
			return nil, err
		}
		return s, nil
	}, func(s *Session) { _ = s.Close() }, func() {})
}

// within runs f, which blocks in C. When the context ends first it returns at once: f goes on, and what it returns is undone. over is called
// when neither f nor undo runs any more.
func within[T any](ctx context.Context, op string, f func() (T, error), undo func(T), over func()) (none T, err error) {
	if ctx.Done() == nil {
		defer over()
		return f()
	}
	if ctx.Err() != nil {
		over()
		return none, contextError(ctx, op, "before it began", false)
	}
	type result struct {
		value T
		err   error
	}
	done := make(chan result)
	go func() {
		defer over()
		v, err := f()
		select {
		case done <- result{v, err}:
		case <-ctx.Done():
			if err == nil && undo != nil {
				undo(v)
			}
		}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		return none, contextError(ctx, op, "it goes on in the background", false)
	}
}

// begin notes an operation of the session, which Close waits for: call end.
func (s *Session) begin(op string) (end func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fail(op, dataplane.StatusInvalid, "the session is closed")
	}
	s.work.Add(1)
	return s.work.Done, nil
}

// during is within for an operation of a session.
func during[T any](ctx context.Context, s *Session, op string, f func() (T, error), undo func(T)) (none T, err error) {
	end, err := s.begin(op)
	if err != nil {
		return none, err
	}
	return within(ctx, op, f, undo, end)
}

// Cached returns how many released leases the session caches now.
func (s *Session) Cached() int { return s.c.Cached() }

// Close releases the leases that are left and closes everything. A second Close does nothing. No Lease call may be
// running.
func (s *Session) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	leases := slices.Collect(maps.Keys(s.leases))
	s.mu.Unlock()
	var errs *multierror.Error
	for _, l := range leases {
		errs = multierror.Append(errs, l.Release(context.Background()))
		<-l.gone
	}
	s.work.Wait()
	errs = multierror.Append(errs, s.c.Close(), finalizeLibrary())
	return errs.ErrorOrNil()
}
