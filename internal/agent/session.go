package agent

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// session is one session of a client.
type session struct {
	control *grant.Control

	tables tables
	seeds  seeds

	mu      sync.Mutex // held while CHANGES runs
	changes *grant.Changes
	left    []grant.Change // changes for which the last reply had no room
}

func failed(op string, st dataplane.Status, format string, args ...any) error {
	return &dataplane.Error{Op: op, Status: st, Detail: fmt.Sprintf(format, args...)}
}

// body appends the body of a reply.
type body = func([]byte) []byte

func (c *client) openSession(r *request) (body, error) {
	const op = "open session"
	m, err := protocol.DecodeSession(r.body)
	if err != nil {
		return nil, err
	}
	o := grant.Options{Manager: c.env.address(m.Manager), Executor: c.env.address(m.Executor), Provider: m.Provider, Tenant: m.Tenant,
		SecretFile: c.env.path(m.SecretFile), TokenFile: c.env.path(m.TokenFile),
		AllowPlaintext: m.Flags&protocol.AllowPlaintext != 0, Later: m.Flags&protocol.SessionLocal != 0, Known: m.Flags&protocol.Reopen != 0, DataEncryption: m.DataEncryption,
		Verbs: &dataplane.Options{Device: m.Device, Port: int(m.Port), GIDIndex: int(int32(m.GID - 1)), PKeyIndex: int(m.PKeyIndex),
			TrafficClass: int(m.TrafficClass), ServiceLevel: int(m.ServiceLevel), MTU: int(m.MTU)},
		Timeout: time.Duration(m.TimeoutNs), Keep: int(m.Keep),
		Dropped: c.dropped}.WithEnvironment(c.env.get)
	o.Broker = o.Broker && m.VirtualPairs == dataplane.VirtualPairs
	// Reserve the name first, so that of two requests with the same name only one connects.
	c.mu.Lock()
	_, exists := c.sessions[m.Session]
	switch {
	case c.closed:
		err = failed(op, dataplane.StatusCancelled, "the connection has ended")
	case exists:
		err = failed(op, dataplane.StatusInvalid, "session %#x is open already", m.Session)
	case len(c.sessions) >= mostSessions:
		err = failed(op, dataplane.StatusBusy, "%d sessions are open, the most for a process", mostSessions)
	default:
		c.sessions[m.Session] = nil
	}
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	control, err := c.a.pool.Open(c.ctx, o)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && c.closed {
		go control.Close()
		err = failed(op, dataplane.StatusCancelled, "the connection has ended")
	}
	if err != nil {
		delete(c.sessions, m.Session)
		return nil, err
	}
	c.sessions[m.Session] = &session{control: control}
	likely := control.LikelyProvider()
	if c.a.held.Load() > 0 { // the first lease may take channels that another client has handed over
		likely = ""
	}
	encrypt, _ := dataplane.Encryption(o.DataEncryption, o.AllowPlaintext)
	return func(b []byte) []byte { return protocol.EncodeOpened(b, likely, encrypt, control.Configured()) }, nil
}

func (c *client) closeSession(r *request) error {
	m, err := protocol.DecodeSessionName(r.Op, r.body)
	if err != nil {
		return err
	}
	c.mu.Lock()
	s := c.sessions[m.Session]
	if s != nil {
		delete(c.sessions, m.Session)
	}
	c.mu.Unlock()
	if s != nil { // nil: an earlier agent had opened the session, which ended with that agent
		s.tables.close()
		s.seeds.close()
		s.control.Close()
	}
	return nil
}

func (c *client) session(op string, name uint64) (*session, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.sessions[name]; s != nil {
		return s, nil
	}
	return nil, failed(op, dataplane.StatusInvalid, "unknown session %#x", name)
}

// dropped tells the client that the workers cached under a key have ended.
func (c *client) dropped(key uint64) { c.event(&protocol.Event{Key: key, Kind: protocol.Dropped}) }

// spread answers which executors have room for how many workers.
func (c *client) spread(r *request) (body, error) {
	const op = "lease across executors"
	m, err := protocol.DecodeSpread(r.body)
	if err != nil {
		return nil, err
	}
	s, err := c.session(op, m.Session)
	if err != nil {
		return nil, err
	}
	executor := c.env.address(m.Executor)
	if at := cmp.Or(executor, s.control.Executor()); m.One && at != "" {
		return func(b []byte) []byte {
			return protocol.EncodeShares(b, []protocol.Share{{Workers: m.Workers, Executor: at}})
		}, nil
	}
	found, err := c.waitForShares(s.control, &m, grant.Spec{Workers: int(min(m.Workers, 1<<32)), CoresPerWorker: int(min(m.CoresPerWorker, 1<<32)),
		Memory: m.Memory, Duration: time.Duration(m.DurationNs), Executor: executor})
	if err != nil {
		return nil, err
	}
	var shares []protocol.Share
	for _, x := range found {
		if err := fits(op, x.Address); err != nil {
			return nil, err
		}
		shares = append(shares, protocol.Share{Workers: uint64(x.Workers), Executor: x.Address})
	}
	return func(b []byte) []byte { return protocol.EncodeShares(b, shares) }, nil
}

// waitForShares finds room, and waits for it as long as the request permits.
func (c *client) waitForShares(control *grant.Control, m *protocol.Spread, spec grant.Spec) ([]grant.Share, error) {
	until, b := time.Now().Add(time.Duration(max(m.WaitNs, 0))), backoff{pause: pauseMin}
	var w waiter
	defer w.close()
	for {
		seen := control.Arrivals()
		found, err := control.Spread(c.ctx, spec, m.Avoid)
		later := errors.Is(err, dataplane.ErrBusy) || errors.Is(err, dataplane.ErrConnection)
		if !later || !w.await(c.ctx, control.Spreading(spec), until, seen, &b) {
			return found, err
		}
	}
}

// fits returns an error for an address that a message has no room for.
func fits(op, address string) error {
	if len(address) <= protocol.MaxAddress {
		return nil
	}
	return failed(op, dataplane.StatusUnsupported, "executor %s: its address has %d bytes, want at most %d; start it with a shorter --advertise",
		address, len(address), protocol.MaxAddress)
}

// changes answers with the changes of executors.
func (c *client) changes(r *request) (body, error) {
	const op = "session changes"
	m, err := protocol.DecodeSessionName(r.Op, r.body)
	if err != nil {
		return nil, err
	}
	s, err := c.session(op, m.Session)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changes == nil {
		s.changes = s.control.Changes()
	}
	if len(s.left) == 0 {
		if s.left, err = s.changes.Poll(c.ctx); err != nil {
			return nil, err
		}
	}
	n := min(m.Count, uint64(len(s.left)), protocol.MaxChanges)
	var changes []protocol.Change
	for _, x := range s.left[:n] {
		changes = append(changes, protocol.Change{State: uint32(x.State), Executor: x.Address, Node: x.Node})
	}
	s.left = s.left[n:]
	return func(b []byte) []byte { return protocol.EncodeChanges(b, changes) }, nil
}
