package protocol

/*
#include "agent_protocol.h"
*/
import "C"

import "unsafe"

// Session opens a session.
type Session struct {
	Session                             uint64
	Flags                               uint32
	Keep                                int32
	TimeoutNs                           int64
	Manager, Executor, Tenant, Provider string
	SecretFile, TokenFile               string
}

// Encode appends the body of the message.
func (s *Session) Encode(b []byte) []byte {
	c := C.rfaas_agent_session{session: C.uint64_t(s.Session), flags: C.uint32_t(s.Flags), keep: C.int32_t(s.Keep),
		timeout_ns: C.int64_t(s.TimeoutNs)}
	set(c.manager[:], s.Manager)
	set(c.executor[:], s.Executor)
	set(c.tenant[:], s.Tenant)
	set(c.provider[:], s.Provider)
	set(c.secret_file[:], s.SecretFile)
	set(c.token_file[:], s.TokenFile)
	return put(b, &c)
}

// DecodeSession decodes the body of the message.
func DecodeSession(b []byte) (Session, error) {
	var c C.rfaas_agent_session
	t := texts{op: OpOpen, err: exactly(OpOpen, b, &c)}
	return Session{Session: uint64(c.session), Flags: uint32(c.flags), Keep: int32(c.keep), TimeoutNs: int64(c.timeout_ns),
		Manager: t.of("manager", c.manager[:]), Executor: t.of("executor", c.executor[:]), Tenant: t.of("tenant", c.tenant[:]),
		Provider: t.of("provider", c.provider[:]), SecretFile: t.of("secret file", c.secret_file[:]),
		TokenFile: t.of("token file", c.token_file[:])}, t.err
}

// EncodeOpened appends the body of a reply to OPEN.
func EncodeOpened(b []byte, provider string) []byte {
	var c C.rfaas_agent_opened
	set(c.provider[:], provider)
	return put(b, &c)
}

// SessionName names a session. Count is of CHANGES.
type SessionName struct{ Session, Count uint64 }

// Encode appends the body of the message.
func (s *SessionName) Encode(b []byte) []byte {
	return put(b, &C.rfaas_agent_session_name{C.uint64_t(s.Session), C.uint64_t(s.Count)})
}

// DecodeSessionName decodes the body of the message.
func DecodeSessionName(op Op, b []byte) (SessionName, error) {
	var c C.rfaas_agent_session_name
	err := exactly(op, b, &c)
	return SessionName{uint64(c.session), uint64(c.count)}, err
}

// Spread asks for executors with room.
type Spread struct {
	Session, Workers, CoresPerWorker, Memory uint64
	DurationNs                               int64
	One                                      bool // every share is for leases of one worker each
	Executor                                 string
	Avoid                                    []string
}

type address [C.RFAAS_AGENT_ADDRESS]C.char

// Encode appends the body of the message.
func (s *Spread) Encode(b []byte) []byte {
	c := C.rfaas_agent_spread{session: C.uint64_t(s.Session), workers: C.uint64_t(s.Workers),
		cores_per_worker: C.uint64_t(s.CoresPerWorker), memory: C.uint64_t(s.Memory), duration_ns: C.int64_t(s.DurationNs),
		avoid: C.uint32_t(len(s.Avoid))}
	if s.One {
		c.one = 1
	}
	set(c.executor[:], s.Executor)
	b = put(b, &c)
	for _, x := range s.Avoid {
		var a address
		set(a[:], x)
		b = put(b, &a)
	}
	return b
}

// DecodeSpread decodes the body of the message.
func DecodeSpread(b []byte) (Spread, error) {
	var c C.rfaas_agent_spread
	rest, err := take(OpSpread, b, &c)
	if err == nil {
		err = list[address](OpSpread, "executors", rest, uint64(c.avoid), MaxMessage/uint64(unsafe.Sizeof(address{})))
	}
	t := texts{op: OpSpread, err: err}
	s := Spread{Session: uint64(c.session), Workers: uint64(c.workers), CoresPerWorker: uint64(c.cores_per_worker),
		Memory: uint64(c.memory), DurationNs: int64(c.duration_ns), One: c.one != 0, Executor: t.of("executor", c.executor[:])}
	for err == nil && len(rest) > 0 {
		var a address
		rest, _ = take(OpSpread, rest, &a)
		s.Avoid = append(s.Avoid, t.of("avoid", a[:]))
	}
	if t.err != nil {
		return Spread{}, t.err
	}
	return s, nil
}

// Share is room for workers at an executor.
type Share struct {
	Workers  uint64
	Executor string
}

// EncodeShares appends the body of a reply to SPREAD.
func EncodeShares(b []byte, shares []Share) []byte {
	b = put(b, &C.rfaas_agent_count{C.uint64_t(len(shares))})
	for _, s := range shares {
		c := C.rfaas_agent_share{workers: C.uint64_t(s.Workers)}
		set(c.executor[:], s.Executor)
		b = put(b, &c)
	}
	return b
}

// DecodeShares decodes the body of the message.
func DecodeShares(b []byte) (shares []Share, err error) {
	var n C.rfaas_agent_count
	rest, err := take(OpSpread, b, &n)
	if err == nil {
		err = list[C.rfaas_agent_share](OpSpread, "shares", rest, uint64(n.count), MaxMessage)
	}
	t := texts{op: OpSpread, err: err}
	for t.err == nil && len(rest) > 0 {
		var c C.rfaas_agent_share
		rest, _ = take(OpSpread, rest, &c)
		shares = append(shares, Share{uint64(c.workers), t.of("executor", c.executor[:])})
	}
	return shares, t.err
}

// Change is a change of an executor's state.
type Change struct {
	State          uint32
	Executor, Node string
}

// MaxChanges is how many changes a message holds.
const MaxChanges = (MaxMessage - HeaderSize - C.sizeof_rfaas_agent_count) / C.sizeof_rfaas_agent_change

// EncodeChanges appends the body of a reply to CHANGES.
func EncodeChanges(b []byte, changes []Change) []byte {
	b = put(b, &C.rfaas_agent_count{C.uint64_t(len(changes))})
	for _, x := range changes {
		c := C.rfaas_agent_change{state: C.uint32_t(x.State)}
		set(c.executor[:], x.Executor)
		set(c.node[:], x.Node)
		b = put(b, &c)
	}
	return b
}

// DecodeChanges decodes the body of the message.
func DecodeChanges(b []byte) (changes []Change, err error) {
	var n C.rfaas_agent_count
	rest, err := take(OpChanges, b, &n)
	if err == nil {
		err = list[C.rfaas_agent_change](OpChanges, "changes", rest, uint64(n.count), MaxChanges)
	}
	t := texts{op: OpChanges, err: err}
	for t.err == nil && len(rest) > 0 {
		var c C.rfaas_agent_change
		rest, _ = take(OpChanges, rest, &c)
		changes = append(changes, Change{uint32(c.state), t.of("executor", c.executor[:]), t.of("node", c.node[:])})
	}
	return changes, t.err
}
