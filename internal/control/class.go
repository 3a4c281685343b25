package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Class says what the caller of a failed operation should do next. The numbers are those of dp_status_class.
type Class uint8

// The classes.
const (
	ClassBusy        Class = 1 // try again later
	ClassInvalid     Class = 2 // fix the call
	ClassUnsupported Class = 3 // take another path
	ClassFunction    Class = 4 // the function failed, the connection is good
	ClassConnection  Class = 5 // reconnect
	ClassLease       Class = 6 // acquire again
	ClassFatal       Class = 7 // stop
	ClassCredential  Class = 8 // get another token, or set the clock
)

var classNames = [...]string{ClassBusy: "busy", ClassInvalid: "invalid", ClassUnsupported: "unsupported",
	ClassFunction: "function", ClassConnection: "connection", ClassLease: "lease", ClassFatal: "fatal", ClassCredential: "credential"}

// String returns the class's name, "none" for 0.
func (c Class) String() string {
	if c == 0 || int(c) >= len(classNames) {
		return "none"
	}
	return classNames[c]
}

// Code returns the gRPC code of the class. Several classes may share a code; ErrorInfo has the class.
func (c Class) Code() codes.Code {
	switch c {
	case ClassBusy:
		return codes.ResourceExhausted
	case ClassInvalid:
		return codes.InvalidArgument
	case ClassUnsupported:
		return codes.Unimplemented
	case ClassFunction:
		return codes.Aborted
	case ClassConnection:
		return codes.Unavailable
	case ClassLease:
		return codes.NotFound
	case ClassCredential:
		return codes.Unauthenticated
	default:
		return codes.Internal
	}
}

// errorDomain marks our ErrorInfo among those that others may attach.
const errorDomain = "rfaas"

// statusKey is ErrorInfo metadata: the data plane's status number (dp_status.h) as decimal text.
const statusKey = "dp_status"

// Errorf makes an error of the class with the class's code. It crosses gRPC unchanged.
func Errorf(c Class, format string, args ...any) error {
	return makeError(c, c.Code(), -100*int32(c), fmt.Sprintf(format, args...))
}

// CodeErrorf is Errorf with another code, where a class has two (a lease that ended is FailedPrecondition).
func CodeErrorf(c Class, code codes.Code, format string, args ...any) error {
	return makeError(c, code, -100*int32(c), fmt.Sprintf(format, args...))
}

// StatusError makes an error of a data plane status (a negative dp_status) with its text.
func StatusError(dpStatus int32, text string) error {
	c := Class(-dpStatus / 100)
	if c.String() == "none" {
		c, dpStatus = ClassFatal, -100*int32(ClassFatal)
	}
	return makeError(c, c.Code(), dpStatus, text)
}

func makeError(c Class, code codes.Code, dpStatus int32, text string) error {
	// gRPC only sends messages that are valid UTF-8.
	st := status.New(code, strings.ToValidUTF8(text, "\ufffd"))
	with, err := st.WithDetails(&errdetails.ErrorInfo{Reason: c.String(), Domain: errorDomain,
		Metadata: map[string]string{statusKey: strconv.Itoa(int(dpStatus))}})
	if err == nil {
		st = with
	}
	return st.Err()
}

// Text returns an error's message for people, without gRPC's wrapping.
func Text(err error) string {
	st, ok := status.FromError(err)
	if !ok || st.Code() == codes.OK {
		return err.Error()
	}
	text, _ := Unwrapped(st)
	return text
}

const closedEarly = "the server closed the connection before its first answer"

// Unwrapped returns a status's message. If gRPC could not talk to the server, the message says why in plain words.
// foreign is true if the server does not speak the control protocol, or is another kind of daemon.
func Unwrapped(st *status.Status) (text string, foreign bool) {
	text = st.Message()
	if _, dial, ok := strings.Cut(text, "Error while dialing: "); ok {
		return strings.TrimSuffix(dial, "\""), false // "dial tcp 127.0.0.1:1: connect: connection refused"
	}
	is := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(text, part) })
	}
	switch {
	case st.Code() == codes.Unimplemented && strings.HasPrefix(text, "unknown service"):
		return "the server is another kind of daemon (" + text + "); check whether the addresses of executor and resource manager are swapped", true
	case st.Code() != codes.Unavailable:
		return text, false
	case is("failed to write", "write tcp ", "write unix ") && is("connection reset", "broken pipe"): // the client's own greeting
		return closedEarly, false
	case !is("error reading server preface"):
		return text, false
	// The kernel connects for a process that is stopped or about to end.
	case is("deadline exceeded", "i/o timeout", "use of closed network connection"): // closed by gRPC, in the end
		return "the server accepts connections but does not answer", false
	case is("EOF", "connection reset", "broken pipe"):
		return closedEarly, false
	}
	return "the server does not speak the control protocol", true
}

// ClosedEarly reports whether an error says that the server accepted the connection and closed it before its first answer.
func ClosedEarly(err error) bool {
	st, ok := status.FromError(err)
	if !ok {
		return false
	}
	text, _ := Unwrapped(st)
	return text == closedEarly
}

// StatusOf returns the dp_status that stands for an error: the one that it carries, else the plain one of its
// class; 0 for nil.
func StatusOf(err error) int32 {
	if info := infoOf(err); info != nil {
		if n, err := strconv.ParseInt(info.GetMetadata()[statusKey], 10, 32); err == nil && n < 0 {
			return int32(n)
		}
	}
	return -100 * int32(ClassOf(err))
}

// infoOf returns our detail, nil if there is none.
func infoOf(err error) *errdetails.ErrorInfo {
	st, ok := status.FromError(err)
	if !ok {
		return nil
	}
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetDomain() == errorDomain {
			return info
		}
	}
	return nil
}

// ClassOf returns the class of an error that came over gRPC or from Errorf, wrapped or not; 0 for nil. An error
// without our detail (the peer is gone, the message was too long) is classed by its code.
func ClassOf(err error) Class {
	if err == nil {
		return 0
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return ClassConnection
	}
	st, ok := status.FromError(err)
	if !ok {
		return ClassFatal
	}
	if info := infoOf(err); info != nil {
		for c, name := range classNames {
			if name != "" && name == info.GetReason() {
				return Class(c)
			}
		}
	}
	switch st.Code() {
	case codes.ResourceExhausted:
		return ClassBusy
	case codes.InvalidArgument, codes.OutOfRange, codes.AlreadyExists, codes.PermissionDenied:
		return ClassInvalid
	case codes.Unauthenticated:
		return ClassCredential
	case codes.Unimplemented:
		return ClassUnsupported
	case codes.NotFound, codes.FailedPrecondition:
		return ClassLease
	case codes.Unavailable, codes.Canceled, codes.DeadlineExceeded, codes.Aborted:
		return ClassConnection
	default:
		return ClassFatal
	}
}

// IsClassed reports whether the error, or one that it wraps, carries a class.
func IsClassed(err error) bool { return infoOf(err) != nil }
