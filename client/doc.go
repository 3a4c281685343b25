// Package client calls functions on leased cores of other nodes by remote memory write.
//
//	s, err := client.Connect(ctx, client.Options{Executor: "127.0.0.1:7465"})
//	l, err := s.Lease(ctx, client.LeaseOptions{Library: "libprices.so", Workers: 4})
//	price, err := l.Function("price")
//	n, err := price.Invoke(ctx, in, out) // from any number of goroutines
//	err = l.Release(ctx)
//	err = s.Close()
//
// A session knows where executors are. A lease is a number of workers on one executor, each connected by a
// queue pair of its own; the library of functions is loaded there. An invocation takes a free worker and no lock, makes
// no allocation, and is C from the request's write to the result's arrival.
//
// # Errors
//
// Every error is of one class, found by errors.Is: ErrBusy, ErrInvalid, ErrUnsupported, ErrFunction, ErrConnection,
// ErrLease, ErrFatal, ErrCredential. The class says what to do next. errors.As finds *Error, which has the exact status, names the
// offending value and, for calls, tells whether the function may have run. An error that a context caused is also
// context.Canceled or context.DeadlineExceeded.
//
// A worker that dies ends its calls with ErrConnection and a text that says how it died. It is replaced in the
// background; calls in the meantime use the other workers or wait for the replacement.
//
// # Failover
//
// Calls made with [Idempotent] are made again when their worker dies or their lease ends. With LeaseOptions.Failover a lease goes on at
// another executor when its own is lost or drains, and with LeaseOptions.Local functions run in this process while there is no
// executor for them.
package client
