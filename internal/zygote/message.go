package zygote

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unicode/utf8"
)

// The messages of internal/dataplane/dp_worker.h, byte for byte. TestMessagesMatchC compares the two.
const (
	msgMagic    = 0x4b574652
	wireVersion = 1
	msgMax      = 4096
	headSize    = 16
	spawnSize   = 536
	bodyUID     = 504 // offset of user, group and number of processes
	bodyChannel = 516 // offset of depth, bulk size and eager size of the client's channel
	spawnFDs    = 5

	cpusMax      = 1024
	functionsMax = 65536
	namesMax     = 4 << 20
	blobMax      = 256
	deviceMax    = 63
	depthMax     = 1024
	eagerMax     = 256 << 10
	bulkMax      = 1 << 32
)

type msgType uint16

const (
	msgSpawn       msgType = 1
	msgSpawned     msgType = 2
	msgSpawnFailed msgType = 3
	msgLoaded      msgType = 5
	msgFailed      msgType = 6
	msgStop        msgType = 7
	msgHello       msgType = 8
	msgStarted     msgType = 9
	msgFinish      msgType = 10
	msgPrepare     msgType = 11
	msgPrepared    msgType = 12
	msgPark        msgType = 14
	msgParked      msgType = 15
	msgResume      msgType = 16
	msgResumed     msgType = 17
	msgInspect     msgType = 18
	msgSymbols     msgType = 19
	msgInspected   msgType = 20
)

// Statuses of dp_status.h that this package gives itself.
const (
	statusInvalid     int32 = -200
	statusBadBlob     int32 = -203
	statusBadLibrary  int32 = -204
	statusWorkerDied  int32 = -502
	statusProtocol    int32 = -503
	statusTimeLimit   int32 = -504
	statusMemoryLimit int32 = -505
	statusFatal       int32 = -700
)

// Exit statuses of dp_worker.h.
const (
	exitStopped    = 0
	exitFailed     = 90
	exitClientGone = 91
	exitProtocol   = 92
	exitFabric     = 93
	exitOrphan     = 94
)

// WorkerError says why a worker could not be started: what the worker or the zygote reported, or what is wrong with the
// Spec. Status is a dp_status; its class (-Status/100) says what the caller does next.
type WorkerError struct {
	Status int32
	Text   string
}

func (e *WorkerError) Error() string { return e.Text }

func invalid(format string, args ...any) error {
	return &WorkerError{statusInvalid, fmt.Sprintf(format, args...)}
}

type message struct {
	typ  msgType
	id   uint32
	body []byte
}

func (m *message) encode() []byte {
	b := make([]byte, headSize, headSize+len(m.body))
	binary.LittleEndian.PutUint32(b[0:], msgMagic)
	binary.LittleEndian.PutUint16(b[4:], wireVersion)
	binary.LittleEndian.PutUint16(b[6:], uint16(m.typ))
	binary.LittleEndian.PutUint32(b[8:], m.id)
	binary.LittleEndian.PutUint32(b[12:], uint32(len(m.body)))
	return append(b, m.body...)
}

// decodeMessage checks the head against the packet. The body aliases b.
func decodeMessage(b []byte) (message, error) {
	if len(b) < headSize {
		return message{}, fmt.Errorf("message of %d bytes, the head alone has %d", len(b), headSize)
	}
	if magic := binary.LittleEndian.Uint32(b); magic != msgMagic {
		return message{}, fmt.Errorf("message begins %#x, not %#x", magic, msgMagic)
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != wireVersion {
		return message{}, fmt.Errorf("message of wire version %d, this executor speaks %d", v, wireVersion)
	}
	if n := binary.LittleEndian.Uint32(b[12:]); uint64(n) != uint64(len(b)-headSize) {
		return message{}, fmt.Errorf("message announces a body of %d bytes and has %d", n, len(b)-headSize)
	}
	return message{
		typ:  msgType(binary.LittleEndian.Uint16(b[6:])),
		id:   binary.LittleEndian.Uint32(b[8:]),
		body: b[headSize:],
	}, nil
}

// u32 is the i-th word of the body, 0 if there is none.
func (m *message) u32(i int) uint32 {
	if len(m.body) < 4*i+4 {
		return 0
	}
	return binary.LittleEndian.Uint32(m.body[4*i:])
}

// failure is the content of FAILED and SPAWN_FAILED.
func (m *message) failure() *WorkerError {
	if len(m.body) < 4 {
		return &WorkerError{statusFatal, fmt.Sprintf("failure message of %d bytes", len(m.body))}
	}
	e := &WorkerError{int32(m.u32(0)), printable(m.body[4:])}
	if e.Status >= 0 {
		e.Status = statusFatal
	}
	return e
}

// printable makes one line of text from bytes that user code may have made.
func printable(b []byte) string {
	var s strings.Builder
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		b = b[n:]
		if r < ' ' || r == 0x7f || r == utf8.RuneError {
			r = ' '
		}
		s.WriteRune(r)
	}
	return strings.TrimSpace(s.String())
}

// prepareBody is the body of PREPARE for s.
func prepareBody(s *Spec) ([]byte, error) {
	b, err := deviceBody(s)
	if err != nil || s.MaxDepth == 0 {
		return b, err
	}
	return b, putLimits(b, s)
}

// putLimits puts the largest channel, or the one to be made ahead, into a message.
func putLimits(b []byte, s *Spec) error {
	err := putNumbers(b, []number{
		{"depth limit", int64(s.MaxDepth), 0, depthMax, 24, 4},
		{"eager limit", int64(s.MaxEager), 0, eagerMax, 28, 4},
	})
	if err == nil && s.MaxBulk > bulkMax {
		err = invalid("bulk limit %d not in 0..%d", s.MaxBulk, uint64(bulkMax))
	}
	binary.LittleEndian.PutUint64(b[32:], s.MaxBulk)
	return err
}

// deviceBody is as much of the bodies of PREPARE and SPAWN as says a worker is to be connected, checked on the way.
func deviceBody(s *Spec) ([]byte, error) {
	b := make([]byte, spawnSize)
	switch s.Provider {
	case "shm":
		b[0] = 1
	case "verbs":
		b[0] = 2
	default:
		return nil, invalid("unknown provider %q (shm, verbs)", s.Provider)
	}
	err := putNumbers(b, []number{
		{"port", int64(s.Port), 0, 255, 2, 1},
		{"GID index", int64(s.GIDIndex), -1, 255, 4, 4},
		{"P_Key index", int64(s.PKeyIndex), 0, 65535, 8, 4},
		{"traffic class", int64(s.TrafficClass), 0, 255, 12, 4},
		{"service level", int64(s.ServiceLevel), 0, 15, 16, 4},
		{"MTU", int64(s.MTU), 0, 4096, 20, 4},
	})
	if err != nil {
		return nil, err
	}
	if len(s.Device) > deviceMax {
		return nil, invalid("device name of %d bytes, at most %d", len(s.Device), deviceMax)
	}
	for i := range len(s.Device) {
		if s.Device[i] <= ' ' || s.Device[i] > '~' {
			return nil, invalid("device name %q", s.Device)
		}
	}
	copy(b[184:], s.Device)
	return b, nil
}

// number is a field of a message with the range of its values.
type number struct {
	what           string
	v, low, high   int64
	offset, octets int
}

func putNumbers(b []byte, list []number) error {
	for _, r := range list {
		if r.v < r.low || r.v > r.high {
			return invalid("%s %d not in %d..%d", r.what, r.v, r.low, r.high)
		}
		if r.octets == 1 {
			b[r.offset] = byte(r.v)
		} else {
			binary.LittleEndian.PutUint32(b[r.offset:], uint32(int32(r.v)))
		}
	}
	return nil
}

// spawnBody is the body of SPAWN for s, which is checked on the way.
func spawnBody(s *Spec) ([]byte, error) {
	b, err := deviceBody(s)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	if err = putLimits(b, s); err != nil {
		return nil, err
	}
	if err = putNumbers(b, []number{{"wait mode", int64(s.WaitMode), 0, 2, 1, 1}}); err != nil {
		return nil, err
	}
	if len(s.ClientBlob) == 0 || len(s.ClientBlob) > blobMax {
		return nil, &WorkerError{statusBadBlob,
			fmt.Sprintf("client's blob of %d bytes, not 1..%d", len(s.ClientBlob), blobMax)}
	}
	if len(s.Names) > functionsMax {
		return nil, invalid("%d functions, at most %d", len(s.Names), functionsMax)
	}
	le.PutUint64(b[40:], s.MemoryLimit)
	le.PutUint32(b[48:], uint32(len(s.Names)))
	le.PutUint32(b[52:], uint32(len(s.ClientBlob)))
	for _, cpu := range s.CPUs {
		if cpu < 0 || cpu >= cpusMax {
			return nil, invalid("CPU %d not in 0..%d", cpu, cpusMax-1)
		}
		b[56+cpu/8] |= 1 << (cpu % 8)
	}
	copy(b[248:], s.ClientBlob)
	le.PutUint32(b[bodyUID:], s.UID)
	le.PutUint32(b[bodyUID+4:], s.GID)
	if s.Channel.Bulk > bulkMax {
		return nil, invalid("channel bulk size %d not in 0..%d", s.Channel.Bulk, uint64(bulkMax))
	}
	le.PutUint64(b[bodyChannel+4:], s.Channel.Bulk)
	return b, putNumbers(b, []number{
		{"channel depth", int64(s.Channel.Depth), 0, depthMax, bodyChannel, 4},
		{"channel eager size", int64(s.Channel.Eager), 0, eagerMax, bodyChannel + 12, 4},
	})
}

// namesBlock is the content of the names memfd: each name ended by a NUL, in index order.
func namesBlock(names []string) ([]byte, error) {
	if len(names) == 0 {
		return nil, &WorkerError{statusBadLibrary, "no functions named"}
	}
	var b []byte
	for i, name := range names {
		if name == "" {
			return nil, &WorkerError{statusBadLibrary, fmt.Sprintf("function %d has an empty name", i)}
		}
		if strings.IndexByte(name, 0) >= 0 {
			return nil, &WorkerError{statusBadLibrary, fmt.Sprintf("function %d: name %q contains a NUL", i, name)}
		}
		b = append(append(b, name...), 0)
	}
	if len(b) > namesMax {
		return nil, &WorkerError{statusBadLibrary,
			fmt.Sprintf("function names of %d bytes, at most %d", len(b), namesMax)}
	}
	return b, nil
}
