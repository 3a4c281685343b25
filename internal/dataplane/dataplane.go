package dataplane

/*
#cgo CFLAGS: -std=gnu11 -D_GNU_SOURCE -O2 -Wall -Wextra -Wno-unused-parameter
#cgo LDFLAGS: -ldl -pthread
#include <stdlib.h>
#include "dp_channel.h"
#include "dp_tcp_crypto.h"
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/rfaas-go/rfaas/internal/api"
)

// Provider names, as Open takes them.
const (
	SHM   = "shm"   // processes of one host
	Verbs = "verbs" // InfiniBand, RoCE, soft-RoCE
	TCP   = "tcp"   // plain Ethernet
	OFI   = "ofi"   // libfabric
)

// Options choose and configure a verbs, tcp or ofi device; shm has none. The zero value with GIDIndex -1 is the default.
type Options struct {
	Device       string // "" takes the first with an active port
	Port         int    // from 1; 0 takes the first active one
	GIDIndex     int    // -1 chooses: RoCE v2 over IPv4, then RoCE v2, then any
	PKeyIndex    int
	TrafficClass int // 0..255
	ServiceLevel int // 0..15
	MTU          int // bytes; 0 takes the port's

	// Address is the numeric IPv4 or IPv6 address that a tcp device listens on, "" for 127.0.0.1. PortFirst and PortLast are the
	// ports to try, 0 for any.
	Address             string
	PortFirst, PortLast int
	// Advertise names where peers connect to: up to four of "IPv4:port" or "[IPv6]:port", separated by commas. "": the address at
	// which the tcp device listens. Required if Address is a wildcard.
	Advertise string
	// ActiveOnly makes a tcp device that does not listen: it connects to peers that do.
	ActiveOnly bool
	// Handed makes a tcp device that neither listens nor connects. It gets its connections by Hand, and Advertise is where its peers
	// connect to.
	Handed bool
	// OFIProvider is the libfabric provider of an ofi device: "tcp", "cxi", "efa", "opx" or "psm3"; "" is "tcp". OFIDevice is its
	// domain, for "tcp" a numeric IP address of this node; "" is the first domain, for "tcp" 127.0.0.1.
	OFIProvider, OFIDevice string
	Encrypt                int // tcp and ofi: EncryptOff to EncryptRequire
	// Packable makes a shm device keep the descriptors that Channels.Pack needs.
	Packable bool
	// OneThread makes a verbs device whose Conns can be used by all threads of a process that has changed its user. Their operations run on
	// the thread that has opened the device.
	OneThread bool
}

// Device is an open provider instance. Safe for concurrent use.
type Device struct {
	c      *C.dp_dev
	thread *thread // of Options.OneThread
}

// c returns the options as a C structure. Its strings are in C memory until free is called.
func (o Options) c() (opts C.dp_dev_options, free func()) {
	device, address, advertise := C.CString(o.Device), C.CString(o.Address), C.CString(o.Advertise)
	opts = C.dp_dev_options{
		device: device, port: C.int(o.Port), gid_index: C.int(o.GIDIndex), pkey_index: C.int(o.PKeyIndex),
		traffic_class: C.int(o.TrafficClass), service_level: C.int(o.ServiceLevel), mtu: C.int(o.MTU),
		address: address, port_first: C.int(o.PortFirst), port_last: C.int(o.PortLast), advertise: advertise, encrypt: C.int(o.Encrypt),
	}
	ofiProvider, ofiDevice := C.CString(o.OFIProvider), C.CString(o.OFIDevice)
	if o.OFIProvider != "" {
		C.dp_ofi_choose(&opts, ofiProvider, ofiDevice)
	}
	if o.ActiveOnly {
		opts.active_side_only = 1
	}
	if o.Handed {
		opts.handed = 1
	}
	if o.Packable {
		opts.packable = 1
	}
	return opts, func() {
		for _, s := range []*C.char{device, address, advertise, ofiProvider, ofiDevice} {
			C.free(unsafe.Pointer(s))
		}
	}
}

// LoadVerbs loads libibverbs, which Open does when it is asked for verbs. The error is ErrUnsupported and names the packages
// to install.
func LoadVerbs() error {
	var e C.dp_error
	if C.dp_verbs_load(&e) != 0 {
		return cError("load libibverbs", &e)
	}
	return nil
}

// Encrypt values: encryption of the data on provider tcp; see dp_fabric.h.
const (
	EncryptOff     = C.DP_ENCRYPT_OFF
	EncryptAllow   = C.DP_ENCRYPT_ALLOW
	EncryptOn      = C.DP_ENCRYPT_ON
	EncryptRequire = C.DP_ENCRYPT_REQUIRE
)

// Encryption returns the value for a setting "off", "on" or "require". plaintext: the operator has allowed control connections to other
// nodes without TLS. Then keys for "on" would travel in the clear, so only the peer's wish encrypts. False: another word.
func Encryption(setting string, plaintext bool) (value int, ok bool) {
	switch setting {
	case "off":
		return EncryptOff, true
	case "on":
		if plaintext {
			return EncryptAllow, true
		}
		return EncryptOn, true
	case "require":
		return EncryptRequire, true
	}
	return 0, false
}

// LoadCrypto loads libcrypto, which encrypted connections on tcp need. The error is ErrUnsupported and names the package to install.
func LoadCrypto() error {
	var e C.dp_error
	if C.dp_crypto_load(&e) != 0 {
		return cError("load libcrypto", &e)
	}
	return nil
}

// Open opens a device of the provider. Errors are ErrUnsupported (no such device, or no libibverbs or libfabric) and ErrInvalid.
func Open(provider string, o Options) (*Device, error) {
	name := C.CString(provider)
	defer C.free(unsafe.Pointer(name))
	opts, free := o.c()
	defer free()
	var d Device
	if o.OneThread && provider == Verbs {
		d.thread = startThread()
	}
	var e C.dp_error
	var st C.int
	d.thread.do(func() { st = C.dp_dev_open(name, &opts, &d.c, &e) })
	if st != 0 {
		d.thread.end()
		return nil, cError("open "+provider, &e)
	}
	return &d, nil
}

// Close closes the device; its endpoints must be closed.
func (d *Device) Close() {
	C.dp_dev_close(d.c)
	d.c = nil
	d.thread.end()
}

// Handle is the C object, for C code outside of this package.
func (d *Device) Handle() unsafe.Pointer { return unsafe.Pointer(d.c) }

// Name describes the device for people: "shm", "rxe0 port 1 gid 1", "tcp 10.1.2.3".
func (d *Device) Name() string { return C.GoString(&d.c.name[0]) }

// Provider is SHM, Verbs, TCP or OFI.
func (d *Device) Provider() string {
	switch d.c.provider {
	case C.DP_PROVIDER_VERBS:
		return Verbs
	case C.DP_PROVIDER_TCP:
		return TCP
	case C.DP_PROVIDER_OFI:
		return OFI
	}
	return SHM
}

// Address is where an RDMA device is reached.
type Address struct {
	InfiniBand bool // else RoCE
	GID        [16]byte
	LID        uint16 // InfiniBand
}

// Address is the device's; false: it has none, as shm.
func (d *Device) Address() (a Address, ok bool) {
	for i, b := range d.c.gid {
		a.GID[i] = byte(b)
	}
	a.InfiniBand, a.LID = d.c.link == 1, uint16(d.c.lid)
	return a, d.c.link != 0
}

// WaitMode says how a thread waits for a message; package invoke defines the terms.
type WaitMode int

// The waiting policies.
const (
	Adaptive WaitMode = api.WaitAdaptive
	Hot      WaitMode = api.WaitHot
	Warm     WaitMode = api.WaitWarm
)

// The data plane and rfaas.h use the same numbers.
var (
	_ = [1]struct{}{}[C.DP_WAIT_ADAPTIVE-Adaptive]
	_ = [1]struct{}{}[C.DP_WAIT_HOT-Hot]
	_ = [1]struct{}{}[C.DP_WAIT_WARM-Warm]
)

func (m WaitMode) String() string {
	if m < Adaptive || m > Warm {
		return fmt.Sprintf("WaitMode(%d)", int(m))
	}
	return api.WaitNames[m]
}

// ParseWaitMode is the inverse of String.
func ParseWaitMode(s string) (WaitMode, error) {
	for _, m := range []WaitMode{Adaptive, Hot, Warm} {
		if s == m.String() {
			return m, nil
		}
	}
	return 0, fmt.Errorf("%w: wait mode %q (adaptive, hot, warm)", ErrInvalid, s)
}

// Now is the clock of deadlines: CLOCK_MONOTONIC in nanoseconds.
func Now() int64 { return int64(C.dp_now_ns()) }
