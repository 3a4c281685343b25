package c

/*
#include "shim.h"
*/
import "C"

import (
	"runtime"
	"time"
	"unsafe"
)

// Seed is rfaas_seed.
type Seed C.rfaas_seed

func (s *Seed) c() *C.rfaas_seed { return (*C.rfaas_seed)(s) }

// SeedDetails are rfaas_seed_details.
type SeedDetails struct {
	Version              uint32
	Bytes, Memory        uint64
	Children             uint64
	Left                 time.Duration
	Load, Setup, Capture time.Duration
	Executor, Node       string
	Function             string
	Warning              string // what may be wrong with the seed: words of its heap that look like pointers which workers cannot use; "": nothing
}

// SeedCreate executes a function, and keeps its memory under a name.
func (l *Lease) SeedCreate(setup string, payload []byte, name string, ttl time.Duration) (*Seed, error) {
	var texts strings
	defer texts.free()
	var pin runtime.Pinner
	defer pin.Unpin()
	var in unsafe.Pointer
	if len(payload) > 0 {
		in = unsafe.Pointer(unsafe.SliceData(payload))
		pin.Pin(in)
	}
	o := C.rfaas_seed_options{struct_size: C.sizeof_rfaas_seed_options, name: texts.c(name), ttl_ns: C.int64_t(ttl)}
	var s *C.rfaas_seed
	err := errorOf(C.rfaas_shim_seed_create(l.c(), texts.c(setup), in, C.size_t(len(payload)), &o, &s))
	return (*Seed)(s), err
}

// SeedOpen opens a seed by its full name.
func (s *Session) SeedOpen(name string) (*Seed, error) {
	var texts strings
	defer texts.free()
	var d *C.rfaas_seed
	err := errorOf(C.rfaas_shim_seed_open(s.c(), texts.c(name), &d))
	return (*Seed)(d), err
}

// Name returns the full name, "" if the session is closed.
func (s *Seed) Name() string {
	if name := C.rfaas_seed_name(s.c()); name != nil {
		return C.GoString(name)
	}
	return ""
}

// Info describes the seed.
func (s *Seed) Info() (SeedDetails, error) {
	d := C.rfaas_seed_details{struct_size: C.sizeof_rfaas_seed_details}
	err := errorOf(C.rfaas_shim_seed_info(s.c(), &d))
	return SeedDetails{uint32(d.version), uint64(d.bytes), uint64(d.memory), uint64(d.children), time.Duration(d.left_ns), time.Duration(d.load_ns), time.Duration(d.setup_ns),
		time.Duration(d.capture_ns), C.GoString(&d.executor[0]), C.GoString(&d.node[0]), C.GoString(&d.setup[0]), C.GoString(&d.warning[0])}, err
}

// Release withdraws the seed, or frees the handle of an opened one.
func (s *Seed) Release() error { return errorOf(C.rfaas_shim_seed_release(s.c())) }
