package protocol

/*
#include "agent_protocol.h"
#include "rfaas.h"
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// Session opens a session.
type Session struct {
	Session                             uint64
	Flags                               uint32
	Keep                                int32
	TimeoutNs                           int64
	Manager, Executor, Tenant, Provider string
	SecretFile, TokenFile               string
	DataEncryption                      string // "off", "on", "require", or "" for the environment's
	Device                              string // RDMA device, "" chooses
	// GID is the index of the device's GID, and 1; 0 chooses.
	Port, PKeyIndex, TrafficClass, ServiceLevel, MTU int32
	GID                                              uint32
	VirtualPairs                                     uint32 // version of the library's virtual queue pairs; 0: it knows none
}

// encryptions are the words for RFAAS_DATA_ENCRYPTION_*.
var encryptions = [...]string{0: "", C.RFAAS_DATA_ENCRYPTION_OFF: "off", C.RFAAS_DATA_ENCRYPTION_ON: "on", C.RFAAS_DATA_ENCRYPTION_REQUIRE: "require"}

// DecodeSession decodes the body of the message.
func DecodeSession(b []byte) (Session, error) {
	var c C.rfaas_agent_session
	t := texts{op: OpOpen, err: exactly(OpOpen, b, &c)}
	if t.err == nil && int(c.data_encryption) >= len(encryptions) {
		t.err = &Error{Op: OpOpen, Text: fmt.Sprintf("data encryption %d is unknown", c.data_encryption)}
	}
	if t.err != nil {
		return Session{}, t.err
	}
	return Session{Session: uint64(c.session), Flags: uint32(c.flags), Keep: int32(c.keep), TimeoutNs: int64(c.timeout_ns),
		Manager: t.of("manager", c.manager[:]), Executor: t.of("executor", c.executor[:]), Tenant: t.of("tenant", c.tenant[:]),
		Provider: t.of("provider", c.provider[:]), SecretFile: t.of("secret file", c.secret_file[:]),
		TokenFile: t.of("token file", c.token_file[:]), DataEncryption: encryptions[c.data_encryption],
		Device: t.of("device", c.device[:]), Port: int32(c.port), PKeyIndex: int32(c.pkey_index), TrafficClass: int32(c.traffic_class),
		ServiceLevel: int32(c.service_level), MTU: int32(c.mtu), GID: uint32(c.gid), VirtualPairs: uint32(c.virtual_pairs)}, t.err
}

// EncodeOpened appends the body of a reply to OPEN. encrypt is a dataplane.Encrypt value. configured: the session has an address.
func EncodeOpened(b []byte, provider string, encrypt int, configured bool) []byte {
	c := C.rfaas_agent_opened{encrypt: C.uint32_t(encrypt)}
	if configured {
		c.configured = 1
	}
	set(c.provider[:], provider)
	return put(b, &c)
}

// SessionName names a session. Count is of CHANGES.
type SessionName struct{ Session, Count uint64 }

// DecodeSessionName decodes the body of the message.
func DecodeSessionName(op Op, b []byte) (SessionName, error) {
	var c C.rfaas_agent_session_name
	err := exactly(op, b, &c)
	return SessionName{uint64(c.session), uint64(c.count)}, err
}

// Spread asks for executors with room.
type Spread struct {
	Session, Workers, CoresPerWorker, Memory uint64
	DurationNs, WaitNs                       int64
	One                                      bool // every share is for leases of one worker each
	Executor                                 string
	Avoid                                    []string
}

type address [C.RFAAS_AGENT_ADDRESS]C.char

// DecodeSpread decodes the body of the message.
func DecodeSpread(b []byte) (Spread, error) {
	var c C.rfaas_agent_spread
	rest, err := take(OpSpread, b, &c)
	if err == nil {
		err = list[address](OpSpread, "executors", rest, uint64(c.avoid), MaxMessage/uint64(unsafe.Sizeof(address{})))
	}
	t := texts{op: OpSpread, err: err}
	s := Spread{Session: uint64(c.session), Workers: uint64(c.workers), CoresPerWorker: uint64(c.cores_per_worker),
		Memory: uint64(c.memory), DurationNs: int64(c.duration_ns), WaitNs: int64(c.wait_ns), One: c.one != 0, Executor: t.of("executor", c.executor[:])}
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

// Table publishes a table, or names the one to drop. The descriptor of TABLE is its file.
type Table struct {
	Session, Size, Address uint64
	Name                   string
}

// DecodeTable decodes the body of the message.
func DecodeTable(op Op, b []byte) (Table, error) {
	var c C.rfaas_agent_table
	t := texts{op: op, err: exactly(op, b, &c)}
	if t.err != nil {
		return Table{}, t.err
	}
	m := Table{uint64(c.session), uint64(c.size), uint64(c.address), t.of("name", c.name[:])}
	if t.err == nil && m.Name == "" {
		t.err = malformed(op, "a table without a name")
	}
	return m, t.err
}
