// Code generated from client/api/rfaas.yaml by internal/apigen (make api). DO NOT EDIT.

package dataplane

import "errors"

// The statuses.
const (
	OK                   Status = 0
	StatusBusy           Status = -100 // no free slot or core; finish a request and retry
	StatusInvalid        Status = -200 // an argument is wrong; the error text names it
	StatusTooLarge       Status = -201 // the payload or capacity exceeds the lease's limits
	StatusNoFunction     Status = -202 // the library has no function of this name
	StatusBadBlob        Status = -203 // the peer sent a malformed queue pair address
	StatusBadLibrary     Status = -204 // the library cannot be read or loaded; the error text says why
	StatusBadRequest     Status = -205 // the worker refused a malformed request
	StatusWrongThread    Status = -206 // two threads used an object that only one thread may use
	StatusUnsupported    Status = -300 // this provider, device or executor does not support the operation
	StatusNoDevice       Status = -301 // no such RDMA device, port or GID
	StatusFunctionFailed Status = -400 // the function reported an error (the text), or wrote beyond its capacity
	StatusResultTooLarge Status = -401 // the result exceeds the capacity that the caller gave
	StatusDeadline       Status = -402 // the deadline passed; the function may still be running
	StatusCancelled      Status = -403 // the caller cancelled the call with rfaas_cancel
	StatusConnection     Status = -500 // the connection to the worker or to the control port broke
	StatusPeerGone       Status = -501 // the other process or node ended, or cannot be reached
	StatusWorkerDied     Status = -502 // the worker died; the error text says how. The next call gets a new worker
	StatusProtocol       Status = -503 // the peer broke the protocol or speaks another version
	StatusTimeLimit      Status = -504 // the function exceeded the lease's call_limit_ns and its worker was killed
	StatusMemoryLimit    Status = -505 // the function exceeded the lease's memory and its worker was killed
	StatusLeaseEnded     Status = -600 // the lease was released, revoked, expired or lost its executor; open another
	StatusFatal          Status = -700 // out of memory, device removed, or refused by the kernel
	StatusCredential     Status = -800 // the token or secret is missing, wrong, expired, revoked or not yet valid
)

// The classes of errors, by what the caller does next. Every *Error is one of them by errors.Is.
var (
	ErrBusy        = errors.New("busy")        // retry
	ErrInvalid     = errors.New("invalid")     // fix the call
	ErrUnsupported = errors.New("unsupported") // take another path
	ErrFunction    = errors.New("function")    // this call failed, the lease is good
	ErrConnection  = errors.New("connection")  // the worker is lost, the next call gets a new one
	ErrLease       = errors.New("lease")       // open a new lease
	ErrFatal       = errors.New("fatal")       // stop
	ErrCredential  = errors.New("credential")  // get another token or set the clock, then repeat the call
)

// Class returns the sentinel of the status's class, nil for OK.
func (s Status) Class() error {
	if s >= 0 {
		return nil
	}
	switch -s / 100 {
	case 1:
		return ErrBusy
	case 2:
		return ErrInvalid
	case 3:
		return ErrUnsupported
	case 4:
		return ErrFunction
	case 5:
		return ErrConnection
	case 6:
		return ErrLease
	case 8:
		return ErrCredential
	}
	return ErrFatal
}
