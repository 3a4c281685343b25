package main

import (
	"encoding/binary"
	"fmt"
)

// Operations, tags and events of the seam: rfaas_api.h has their meaning, a test binds the numbers.
const (
	opSessionOpen  = 1
	opSessionClose = 2
	opPlan         = 3
	opNext         = 4
	opGrant        = 5
	opReplace      = 6
	opRelease      = 7
	opInspect      = 8
	opRenew        = 9
	opFinish       = 10
	opSpread       = 11
	opChanges      = 12
	opAwait        = 13
	opSilent       = 14
)

const (
	tagSession     = 1
	tagKey         = 2
	tagManager     = 3
	tagExecutor    = 4
	tagProvider    = 5
	tagTenant      = 6
	tagFlags       = 7
	tagTimeoutNs   = 8
	tagLibrary     = 9
	tagCode        = 10
	tagWorkers     = 11
	tagCores       = 12
	tagMemory      = 13
	tagWaitMode    = 14
	tagDurationNs  = 15
	tagDepth       = 16
	tagEager       = 17
	tagBulk        = 18
	tagBlob        = 19
	tagFunction    = 20
	tagNode        = 21
	tagLeaseID     = 22
	tagWorker      = 23
	tagEvent       = 24
	tagStatus      = 25
	tagText        = 26
	tagOutput      = 27
	tagPID         = 28
	tagBacktrace   = 29
	tagCallLimitNs = 30
	tagCount       = 31
	tagInNs        = 32
	tagFrom        = 33
	tagAt          = 34
	tagKept        = 35
	tagStart       = 36
	tagKeep        = 37
)

const (
	newsWorkerDied = 1
	newsEnded      = 2
	newsDraining   = 3
	newsExpiring   = 4
	newsDropped    = 5
)

const fieldHead = 8 // u16 tag, u16 0, u32 length

// message builds a message of the seam.
type message []byte

func (m *message) bytes(tag uint16, b []byte) {
	*m = binary.LittleEndian.AppendUint16(*m, tag)
	*m = binary.LittleEndian.AppendUint16(*m, 0)
	*m = binary.LittleEndian.AppendUint32(*m, uint32(len(b)))
	*m = append(*m, b...)
}

func (m *message) str(tag uint16, s string) { m.bytes(tag, []byte(s)) }

func (m *message) u64(tag uint16, v uint64) {
	m.bytes(tag, binary.LittleEndian.AppendUint64(nil, v))
}

// fields is a decoded message: values by tag, in order. They alias the message.
type fields map[uint16][][]byte

func decode(b []byte) (fields, error) {
	f := make(fields)
	for at := 0; at < len(b); {
		if len(b)-at < fieldHead {
			return nil, fmt.Errorf("message of %d bytes: %d bytes at %d are no field", len(b), len(b)-at, at)
		}
		tag := binary.LittleEndian.Uint16(b[at:])
		n := int(binary.LittleEndian.Uint32(b[at+4:]))
		if n > len(b)-at-fieldHead {
			return nil, fmt.Errorf("message of %d bytes: field %d at %d claims %d bytes", len(b), tag, at, n)
		}
		at += fieldHead
		f[tag] = append(f[tag], b[at:at+n:at+n])
		at += n
	}
	return f, nil
}

func (f fields) str(tag uint16) string {
	if v := f[tag]; len(v) > 0 {
		return string(v[0])
	}
	return ""
}

func (f fields) u64(tag uint16) uint64 { return f.nth(tag, 0) }

// nth is the number of the n-th field with the tag, 0 if there is none.
func (f fields) nth(tag uint16, n int) uint64 {
	if v := f[tag]; len(v) > n && len(v[n]) == 8 {
		return binary.LittleEndian.Uint64(v[n])
	}
	return 0
}
