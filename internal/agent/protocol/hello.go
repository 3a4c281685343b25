package protocol

/*
#include "agent_protocol.h"
*/
import "C"

import (
	"bytes"
	"strings"
)

// Hello begins a connection. Its descriptor is the shared page.
type Hello struct {
	Connection  uint32 // its number; see OffsetConnection
	Version     string // of the library
	Directory   string // working directory, for relative paths in the environment
	Environment []string
}

// Greeting is what a hello of any version begins with.
type Greeting struct{ Magic, Protocol uint32 }

// DecodeGreeting decodes the beginning of a hello of any version.
func DecodeGreeting(b []byte) (Greeting, error) {
	var c struct{ magic, protocol C.uint32_t }
	if _, err := take(OpHello, b, &c); err != nil {
		return Greeting{}, err
	}
	return Greeting{uint32(c.magic), uint32(c.protocol)}, nil
}

// DecodeHello decodes the body of a hello of this version.
func DecodeHello(b []byte) (Hello, error) {
	var c C.rfaas_agent_hello
	rest, err := take(OpHello, b, &c)
	if err != nil {
		return Hello{}, err
	}
	if uint64(len(rest)) != uint64(c.environment_size) {
		return Hello{}, malformed(OpHello, "%d bytes of environment, want %d", len(rest), uint32(c.environment_size))
	}
	if len(rest) > 0 && rest[len(rest)-1] != 0 {
		return Hello{}, malformed(OpHello, "the environment does not end")
	}
	t := texts{op: OpHello}
	h := Hello{Connection: uint32(c.connection), Version: t.of("version", c.version[:]), Directory: t.of("directory", c.directory[:])}
	if len(rest) > 0 {
		h.Environment = strings.Split(string(rest[:len(rest)-1]), "\x00")
	}
	return h, t.err
}

// Welcome answers a hello.
type Welcome struct {
	Protocol uint32
	PID      int
	Version  string // of the agent
}

// Encode appends the body of the message.
func (w *Welcome) Encode(b []byte) []byte {
	c := C.rfaas_agent_welcome{protocol: C.uint32_t(w.Protocol), pid: C.int32_t(w.PID)}
	set(c.version[:], w.Version)
	return put(b, &c)
}

// EncodeReport appends the body of a reply to a request for the status.
func EncodeReport(b []byte, text []byte) []byte {
	return append(put(b, &C.rfaas_agent_report{text_size: C.uint32_t(len(text))}), text...)
}

// DecodeReport decodes the body of the message.
func DecodeReport(b []byte) ([]byte, error) {
	var c C.rfaas_agent_report
	rest, err := take(OpStatus, b, &c)
	if err == nil && uint64(len(rest)) != uint64(c.text_size) {
		err = malformed(OpStatus, "%d bytes of text, want %d", len(rest), uint32(c.text_size))
	}
	return bytes.Clone(rest), err
}
