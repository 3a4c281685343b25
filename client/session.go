package client

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/go-multierror"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// Options say where executors are and how to reach them. Empty fields are taken from the environment
// (RFAAS_MANAGER, RFAAS_EXECUTOR, RFAAS_PROVIDER, RFAAS_ALLOW_PLAINTEXT), then from defaults.
type Options struct {
	Manager  string // host:port or unix:PATH of a resource manager
	Executor string // or of one executor; not both
	// Provider is "shm", "verbs" or "auto": shm on the executor's own node, else verbs. Empty: auto.
	Provider       string
	Verbs          VerbsOptions
	Tenant         string        // account that pays; empty: the token's, else the user's name
	SecretFile     string        // empty: $RFAAS_SECRET_FILE, else where the daemons of this user put it
	TokenFile      string        // of rfaas token issue; empty: $RFAAS_TOKEN_FILE, else ~/.rfaas/token if it is there
	AllowPlaintext bool          // speak without TLS, also to addresses that are neither loopback nor unix sockets
	Timeout        time.Duration // bound of each control operation; 0: 10 s
	// KeepLeases is how many released leases are kept connected for later ones like them; 0: RFAAS_KEEP_LEASES or 16,
	// negative: none.
	KeepLeases int
}

// VerbsOptions choose an RDMA device and its path. The zero value takes the defaults.
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

func (v VerbsOptions) dataplane() dataplane.Options {
	gid := v.GIDIndex
	if gid == 0 && !v.ForceGID {
		gid = -1
	}
	return dataplane.Options{Device: v.Device, Port: v.Port, GIDIndex: gid, PKeyIndex: v.PKeyIndex,
		TrafficClass: v.TrafficClass, ServiceLevel: v.ServiceLevel, MTU: v.MTU}
}

// Session takes leases. Safe for concurrent use.
type Session struct {
	control *grant.Control
	verbs   VerbsOptions

	mu      sync.Mutex
	devices map[string]*dataplane.Device
	leases  map[*Lease]struct{}
	closed  bool
	starts  [len(startNames)]uint64 // workers, by Start

	spares spares
}

// Statistics counts how the workers of a session's leases came to them.
type Statistics struct {
	Cold, Warm, Cached uint64
	Kept               int // released leases that are kept now
}

// Statistics returns the counters.
func (s *Session) Statistics() Statistics {
	kept := s.control.Kept()
	s.mu.Lock()
	defer s.mu.Unlock()
	return Statistics{Cold: s.starts[StartCold], Warm: s.starts[StartWarm], Cached: s.starts[StartCached], Kept: kept}
}

func (s *Session) started(how Start) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if how < 0 || int(how) >= len(s.starts) {
		how = StartUnknown
	}
	s.starts[how]++
}

func (s *Session) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Connect reaches the manager or executor once and checks that it speaks our protocol, so that a wrong or dead
// address is found here. Errors: ErrInvalid, ErrConnection (nobody there, or somebody else).
func Connect(ctx context.Context, o Options) (*Session, error) {
	s := &Session{verbs: o.Verbs, devices: make(map[string]*dataplane.Device), leases: make(map[*Lease]struct{})}
	var err error
	s.control, err = grant.Open(ctx, grant.Options{
		Device:         s.device,
		Manager:        o.Manager,
		Executor:       o.Executor,
		Provider:       o.Provider,
		Tenant:         o.Tenant,
		SecretFile:     o.SecretFile,
		TokenFile:      o.TokenFile,
		AllowPlaintext: o.AllowPlaintext,
		Timeout:        o.Timeout,
		Keep:           o.KeepLeases,
		Dropped:        func(state any) { state.(connections).close() },
	}.WithEnvironment(os.Getenv))
	if err != nil {
		return nil, err
	}
	return s, nil
}

// device opens the provider's device, once per session.
func (s *Session) device(provider string) (*dataplane.Device, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := s.devices[provider]; d != nil {
		return d, nil
	}
	d, err := dataplane.Open(provider, s.verbs.dataplane())
	if err != nil {
		return nil, err
	}
	s.devices[provider] = d
	return d, nil
}

// enter notes a lease; false when the session is closed.
func (s *Session) enter(l *Lease) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.leases[l] = struct{}{}
	}
	return !s.closed
}

func (s *Session) leave(l *Lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leases, l)
}

// Close releases the leases that are left and closes everything. A second Close does nothing. No Lease call may be
// running.
func (s *Session) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	leases := make([]*Lease, 0, len(s.leases))
	for l := range s.leases {
		leases = append(leases, l)
	}
	s.mu.Unlock()
	var errs *multierror.Error
	for _, l := range leases {
		errs = multierror.Append(errs, l.Release(context.Background()))
	}
	s.control.Close()
	s.spares.close()
	for _, d := range s.devices {
		d.Close()
	}
	return errs.ErrorOrNil()
}
