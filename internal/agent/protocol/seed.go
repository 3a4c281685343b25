package protocol

/*
#include "agent_protocol.h"
*/
import "C"

import "bytes"

// MaxSeedName is the longest full name of a seed, in bytes, without the NUL.
const MaxSeedName = C.RFAAS_AGENT_SEED_NAME - 1

// SeedCreate creates a seed beside a granted lease.
type SeedCreate struct {
	Key            uint64
	LimitNs, TTLNs int64
	Name, Function string
	Payload        []byte
}

// DecodeSeedCreate decodes the body of the message.
func DecodeSeedCreate(b []byte) (SeedCreate, error) {
	var c C.rfaas_agent_seed_create
	rest, err := take(OpSeedCreate, b, &c)
	if err != nil {
		return SeedCreate{}, err
	}
	t := texts{op: OpSeedCreate}
	s := SeedCreate{Key: uint64(c.key), LimitNs: int64(c.limit_ns), TTLNs: int64(c.ttl_ns), Name: t.of("name", c.name[:])}
	if t.err != nil {
		return SeedCreate{}, t.err
	}
	s.Function, s.Payload, err = setup(OpSeedCreate, rest, uint32(c.function), uint32(c.payload))
	return s, err
}

// setup returns the function and the payload that follow a structure.
func setup(op Op, rest []byte, function, payload uint32) (string, []byte, error) {
	if payload > C.RFAAS_AGENT_SEED_MAX || uint64(len(rest)) != uint64(function)+uint64(payload) {
		return "", nil, malformed(op, "%d bytes, want a function of %d bytes and a payload of %d", len(rest), function, payload)
	}
	if payload == 0 {
		return string(rest), nil, nil
	}
	return string(rest[:function]), bytes.Clone(rest[function:]), nil
}

// SeedName names a seed.
type SeedName struct {
	Session uint64
	Name    string // in full
}

// DecodeSeedName decodes the body of the message.
func DecodeSeedName(op Op, b []byte) (SeedName, error) {
	var c C.rfaas_agent_seed_name
	t := texts{op: op, err: exactly(op, b, &c)}
	if t.err != nil {
		return SeedName{}, t.err
	}
	return SeedName{uint64(c.session), t.of("name", c.name[:])}, t.err
}

// TableSeed publishes a seed as a table.
type TableSeed struct {
	Session    uint64
	Name, Seed string // Seed is the full name of the seed
}

// DecodeTableSeed decodes the body of the message.
func DecodeTableSeed(b []byte) (TableSeed, error) {
	var c C.rfaas_agent_table_seed
	t := texts{op: OpTableSeed, err: exactly(OpTableSeed, b, &c)}
	if t.err != nil {
		return TableSeed{}, t.err
	}
	m := TableSeed{uint64(c.session), t.of("name", c.name[:]), t.of("seed", c.seed[:])}
	if t.err == nil && m.Name == "" {
		t.err = malformed(OpTableSeed, "a table without a name")
	}
	return m, t.err
}

// Seed describes a seed.
type Seed struct {
	Bytes, Memory                      uint64
	LoadNs, SetupNs, CaptureNs, LeftNs int64
	Version, Children                  uint32
	Name, Executor, Node, Function     string // Name in full
	Warning                            string // cut to the bytes behind Node
	Payload                            []byte
}

// Encode appends the body of the message.
func (s *Seed) Encode(b []byte) []byte {
	c := C.rfaas_agent_seed{bytes: C.uint64_t(s.Bytes), memory: C.uint64_t(s.Memory), load_ns: C.int64_t(s.LoadNs), setup_ns: C.int64_t(s.SetupNs),
		capture_ns: C.int64_t(s.CaptureNs), left_ns: C.int64_t(s.LeftNs), version: C.uint32_t(s.Version), children: C.uint32_t(s.Children),
		function: C.uint32_t(len(s.Function)), payload: C.uint32_t(len(s.Payload))}
	set(c.name[:], s.Name)
	set(c.executor[:], s.Executor)
	set(c.node[:], s.Node)
	if behind := len(s.Node) + 1; behind < len(c.node) {
		set(c.node[behind:], s.Warning)
	}
	return append(append(put(b, &c), s.Function...), s.Payload...)
}
