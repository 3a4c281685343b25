// Package wire defines the messages among an executor, its spawner, the zygote and the workers.
//
//	executor ◀──▶ spawner ◀──▶ zygote     one seqpacket socket each
//	executor ◀──▶ worker                  one seqpacket socket for each worker
//
// The C side of the zygote's and the workers' messages is worker/message.h, which also says which
// descriptors travel with which message. The spawner's own messages are below. One message is one packet: a head of
// HeadSize bytes, then the body. All numbers are little-endian. The package has no cgo.
package wire

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unicode/utf8"
)

const (
	Magic    = 0x4b574652 // "RFWK"
	Version  = 1          // of the messages
	Max      = 4096       // bytes of a message
	HeadSize = 16
)

// Type is the kind of a message.
type Type uint16

// Messages of the zygote or a worker (DP_MSG_* in worker/message.h).
const (
	Spawn       Type = 1
	Spawned     Type = 2
	SpawnFailed Type = 3
	Loaded      Type = 5
	Failed      Type = 6
	Stop        Type = 7
	Hello       Type = 8
	Started     Type = 9
	Finish      Type = 10
	Prepare     Type = 11
	Prepared    Type = 12
	Suspend     Type = 14
	Suspended   Type = 15
	Resume      Type = 16
	Inspect     Type = 18
	Symbols     Type = 19
	Inspected   Type = 20
	Socket      Type = 21
	Table       Type = 22
	Tabled      Type = 23
	Resumed     Type = 24
	Seed        Type = 25
	Seeded      Type = 26
	Unseeded    Type = 27
	Pages       Type = 28
	Laid        Type = 29
	Paged       Type = 30
)

// Messages between an executor and its spawner only. The executor also sends Spawn and Prepare, with a SpawnRequest as
// the body. The spawner answers each with exactly one of Spawned, SpawnFailed and NoZygote. Each Spawned is followed by
// exactly one Exited.
const (
	// ZygoteEnded {i32 status, text} says that the zygote whose position is the id of the head does not run, and why. The spawner is starting
	// another one. Hello has the position of its zygote, too.
	ZygoteEnded Type = 64
	// NoZygote says that the zygote ended before it answered, or that there was none. Nothing is left of the worker.
	NoZygote Type = 65
	// Kill ends the worker.
	Kill Type = 66
	// Explain makes the worker report where it is (SIGXCPU).
	Explain Type = 67
	// Exited, with an Exit as the body, says that the worker and all processes that it started have ended and are
	// reaped.
	Exited Type = 68
	// Device asks whether the worker still has its RDMA device open. DeviceIs {u32} answers with DeviceOpen,
	// DeviceClosed or DeviceUnknown.
	Device   Type = 69
	DeviceIs Type = 70
	// Open, with an OpenRequest as the body, asks for a file of the spawner's list. Opened answers with the descriptor,
	// OpenFailed {u32 errno} without one. Both repeat the id of the head.
	Open       Type = 71
	Opened     Type = 72
	OpenFailed Type = 73
	// Connect {u32 index in the spawner's list} asks for a connection to that unix stream socket. It is answered like
	// Open.
	Connect Type = 75
	// Remove removes the files that the spawner was configured to remove. It is not answered.
	Remove Type = 74
	// Renew makes the spawner run the program that renews the node's certificate. It is answered like Open. The descriptor is a pipe with the
	// program's output.
	Renew Type = 76
)

// Answers to Device.
const (
	DeviceUnknown = 0
	DeviceOpen    = 1
	DeviceClosed  = 2
)

// Sandbox parts (DP_SANDBOX_* in worker/sandbox.h), as Hello reports them.
const (
	PartUID      = 1 << 0
	PartPIDs     = 1 << 1
	PartFiles    = 1 << 2
	PartIPC      = 1 << 3
	PartNet      = 1 << 4
	PartPrivs    = 1 << 5
	PartSeccomp  = 1 << 6
	PartLandlock = 1 << 7
	PartAll      = 1<<8 - 1
	// WithoutReturn is not a part: with it among the parts that tests leave out, the zygote clones workers through a stem.
	WithoutReturn = 1 << 8
	// PartPages is not a part either: it says that memory of workers can be filled on demand.
	PartPages = 1 << 9
)

// Statuses of dp_status.h that Go code reports itself.
const (
	StatusInvalid     int32 = -200
	StatusBadBlob     int32 = -203
	StatusBadLibrary  int32 = -204
	StatusUnsupported int32 = -300
	StatusWorkerDied  int32 = -502
	StatusProtocol    int32 = -503
	StatusTimeLimit   int32 = -504
	StatusMemoryLimit int32 = -505
	StatusFatal       int32 = -700
)

// Error reports why a worker could not be started: a failure that the zygote or the worker reported, or an invalid request.
// Status is a dp_status. Its class (-Status/100) tells the caller what to do next.
type Error struct {
	Status int32
	Text   string
}

func (e *Error) Error() string { return e.Text }

// Message is one packet. Body aliases the buffer that it was decoded from.
type Message struct {
	Type Type
	ID   uint32 // of the worker, chosen by the executor
	Body []byte
}

// Encode returns the packet.
func (m *Message) Encode() []byte {
	b := make([]byte, HeadSize, HeadSize+len(m.Body))
	binary.LittleEndian.PutUint32(b[0:], Magic)
	binary.LittleEndian.PutUint16(b[4:], Version)
	binary.LittleEndian.PutUint16(b[6:], uint16(m.Type))
	binary.LittleEndian.PutUint32(b[8:], m.ID)
	binary.LittleEndian.PutUint32(b[12:], uint32(len(m.Body)))
	return append(b, m.Body...)
}

// Decode checks the head of a packet. The message's body aliases b.
func Decode(b []byte) (Message, error) {
	if len(b) < HeadSize {
		return Message{}, fmt.Errorf("message of %d bytes is shorter than its head of %d bytes", len(b), HeadSize)
	}
	if magic := binary.LittleEndian.Uint32(b); magic != Magic {
		return Message{}, fmt.Errorf("message begins with %#x instead of %#x", magic, Magic)
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != Version {
		return Message{}, fmt.Errorf("message of wire version %d, this program speaks version %d", v, Version)
	}
	if n := binary.LittleEndian.Uint32(b[12:]); uint64(n) != uint64(len(b)-HeadSize) {
		return Message{}, fmt.Errorf("message announces a body of %d bytes and has %d", n, len(b)-HeadSize)
	}
	return Message{
		Type: Type(binary.LittleEndian.Uint16(b[6:])),
		ID:   binary.LittleEndian.Uint32(b[8:]),
		Body: b[HeadSize:],
	}, nil
}

// U32 returns the i-th word of the body, or 0 if the body is shorter.
func (m *Message) U32(i int) uint32 {
	if len(m.Body) < 4*i+4 {
		return 0
	}
	return binary.LittleEndian.Uint32(m.Body[4*i:])
}

// Failure decodes the body of Failed, SpawnFailed and ZygoteEnded. It never returns a status of success.
func (m *Message) Failure() *Error {
	if len(m.Body) < 4 {
		return &Error{StatusFatal, fmt.Sprintf("failure message of %d bytes", len(m.Body))}
	}
	e := &Error{int32(m.U32(0)), Printable(m.Body[4:])}
	if e.Status >= 0 {
		e.Status = StatusFatal
	}
	return e
}

// EncodeFailure returns the body that Failure decodes. A text that does not fit into one packet is cut.
func EncodeFailure(status int32, text string) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(status))
	return append(b, text[:min(len(text), Max-HeadSize-4)]...)
}

// Printable returns one line of text from bytes that may come from user code. Control characters and invalid UTF-8
// become spaces.
func Printable(b []byte) string {
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

// SpawnSize is the size of dp_msg_spawn, the body of Spawn and Prepare that the zygote and a worker receive.
const SpawnSize = 560

const (
	SpawnUID     = 504 // offset in dp_msg_spawn of the fields that the spawner sets: u32 user, u32 group, u32 number of processes
	SpawnCPUsLen = 128 // bytes of a set of CPUs
)

// Descriptors that travel with Spawn and Prepare.
const (
	SpawnFDs   = 5 // worker socket, code, names, output, page
	PrepareFDs = 3 // worker socket, output, page
)

// SpawnRequest is the body of Spawn and Prepare from an executor to its spawner.
type SpawnRequest struct {
	Worker []byte // dp_msg_spawn of SpawnSize bytes; the spawner replaces user, group and number of processes
	UID    uint32 // verified user to run as, 0: one of the spawner's range
	GID    uint32
	Memory uint64 // memory limit of the control group in bytes, 0: none
	Zygote uint32 // position of the zygote that clones it: 0 without a runtime
	CPUs   CPUs   // of the control group; empty: all of the executor's
}

// CPUs is a set of logical CPUs, one bit for each, in the format of dp_msg_spawn.
type CPUs [SpawnCPUsLen]byte

// Set adds a CPU, which must be in 0..1023.
func (c *CPUs) Set(cpu int) { c[cpu/8] |= 1 << (cpu % 8) }

// List returns the CPUs of the set, ascending.
func (c *CPUs) List() (list []int) {
	for i := range 8 * len(c) {
		if c[i/8]&(1<<(i%8)) != 0 {
			list = append(list, i)
		}
	}
	return list
}

const requestSize = SpawnSize + 20 + SpawnCPUsLen

// Encode returns the body.
func (r *SpawnRequest) Encode() []byte {
	b := append(make([]byte, 0, requestSize), r.Worker...)
	b = binary.LittleEndian.AppendUint32(b, r.UID)
	b = binary.LittleEndian.AppendUint32(b, r.GID)
	b = binary.LittleEndian.AppendUint64(b, r.Memory)
	b = binary.LittleEndian.AppendUint32(b, r.Zygote)
	return append(b, r.CPUs[:]...)
}

// DecodeSpawnRequest decodes the body of Spawn and Prepare. The result does not alias b.
func DecodeSpawnRequest(b []byte) (r SpawnRequest, err error) {
	if len(b) != requestSize {
		return r, fmt.Errorf("spawn request of %d bytes, want %d", len(b), requestSize)
	}
	le := binary.LittleEndian
	return SpawnRequest{Worker: append([]byte(nil), b[:SpawnSize]...), UID: le.Uint32(b[SpawnSize:]), GID: le.Uint32(b[SpawnSize+4:]),
		Memory: le.Uint64(b[SpawnSize+8:]), Zygote: le.Uint32(b[SpawnSize+16:]), CPUs: CPUs(b[SpawnSize+20:])}, nil
}

// Exit is the body of Exited.
type Exit struct {
	Signal  int32  // signal that ended the process, or 0
	Code    int32  // exit status, if no signal ended it
	Stopped bool   // it was stopped (SIGSTOP) for too long, and the spawner killed it
	Killed  uint32 // processes of the control group that the kernel killed because memory ran out
	Full    bool   // the control group had reached its own memory limit
	CPU     uint64 // processor time of the control group in nanoseconds, 0: not known
}

const exitSize = 28

// Encode returns the body.
func (e *Exit) Encode() []byte {
	le := binary.LittleEndian
	b := le.AppendUint32(nil, uint32(e.Signal))
	b = le.AppendUint32(b, uint32(e.Code))
	for _, is := range []bool{e.Stopped, e.Full} {
		n := uint32(0)
		if is {
			n = 1
		}
		b = le.AppendUint32(b, n)
	}
	b = le.AppendUint32(b, e.Killed)
	return le.AppendUint64(b, e.CPU)
}

// DecodeExit decodes the body of Exited.
func DecodeExit(b []byte) (e Exit, err error) {
	if len(b) != exitSize {
		return e, fmt.Errorf("exit of %d bytes, want %d", len(b), exitSize)
	}
	le := binary.LittleEndian
	return Exit{Signal: int32(le.Uint32(b)), Code: int32(le.Uint32(b[4:])), Stopped: le.Uint32(b[8:]) != 0, Full: le.Uint32(b[12:]) != 0,
		Killed: le.Uint32(b[16:]), CPU: le.Uint64(b[20:])}, nil
}

// SpawnedSize is the size of a spawner's Spawned body: {u32 process id, u32 layout of the control group's files}. These
// files travel with it as descriptors (sandbox.Group.Files). The zygote's Spawned has the process id alone.
const SpawnedSize = 8

// MaxFDs bounds the descriptors of one message.
const MaxFDs = 16

// HelloText is the offset of the text in a spawner's Hello. The body is {u32 wire version, u32 RDMA devices, u32
// sandbox parts that work, u32 process id of the zygote, text: missing parts and why, NUL, text: version of the
// spawner}.
const HelloText = 16

// NameMax bounds the name in an OpenRequest.
const NameMax = 63

// OpenRequest is the body of Open.
type OpenRequest struct {
	File   uint32 // index in the spawner's list
	Append bool   // open for appending and create the file if necessary; else open for reading
	Name   string // file name, if the entry is a directory; else empty
}

// Encode returns the body. A name that is too long is cut to a length that the spawner still refuses.
func (r *OpenRequest) Encode() []byte {
	b := binary.LittleEndian.AppendUint32(nil, r.File)
	how := uint32(0)
	if r.Append {
		how = 1
	}
	b = binary.LittleEndian.AppendUint32(b, how)
	return append(b, r.Name[:min(len(r.Name), NameMax+1)]...)
}

// DecodeOpenRequest decodes the body of Open.
func DecodeOpenRequest(b []byte) (r OpenRequest, err error) {
	if len(b) < 8 || len(b) > 8+NameMax {
		return r, fmt.Errorf("open request of %d bytes, want 8 to %d", len(b), 8+NameMax)
	}
	r = OpenRequest{File: binary.LittleEndian.Uint32(b), Name: string(b[8:])}
	switch how := binary.LittleEndian.Uint32(b[4:]); how {
	case 0, 1:
		r.Append = how == 1
	default:
		return r, fmt.Errorf("open request with mode %d, want 0 or 1", how)
	}
	for _, c := range []byte(r.Name) {
		if c != '.' && c != '-' && c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') {
			return r, fmt.Errorf("open request for the name %q", r.Name)
		}
	}
	if r.Name == "." || r.Name == ".." {
		return r, fmt.Errorf("open request for the name %q", r.Name)
	}
	return r, nil
}
