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
// queue pair of its own; the library of functions is loaded there. An invocation makes no allocation, and is C from the request's
// write to the result's arrival.
//
// The package is a binding of the C library (rfaas.h), which it contains: docs/languages.md says which function of C each method
// is. The control plane runs in the agent of this user on this node, a program that the first session starts. It is found at
// $RFAAS_AGENT, in ../libexec or libexec from the program's own directory, beside the program, or in /usr/local/libexec,
// /usr/libexec and /opt/rfaas/libexec. `make install` puts it there, and `go install
// github.com/rfaas-go/rfaas/cmd/rfaas-agent` makes it too.
//
// # Errors
//
// Every error is of one class, found by errors.Is: ErrBusy, ErrInvalid, ErrUnsupported, ErrFunction, ErrConnection,
// ErrLease, ErrFatal, ErrCredential. The class says what to do next. errors.As finds *Error, which has the exact status, a text
// that names the offending value and, for calls, tells whether the function may have run. An error that a context caused is also
// context.Canceled or context.DeadlineExceeded.
//
// A worker that dies ends its calls with ErrConnection and a text that says how it died. So does the first call to a worker that died
// while the program made no calls. The next call replaces the worker. Meanwhile calls use the other workers, or wait for the
// replacement. When the executor is lost, calls in flight end with ErrConnection, and later calls with ErrLease.
//
// # Contexts
//
// A context's deadline bounds a call in C. A call whose context can be cancelled stays in C for 5 ms at most before it looks
// whether it was. A call that is answered within 200 us is still one crossing into C. Other operations return when their context ends,
// and go on in the background.
//
// # Many short calls
//
// A crossing into C costs about as much as a short call. A [Batch] makes many calls in one crossing.
//
// # Threads
//
// A goroutine inside C occupies a thread of the operating system. As many goroutines as there are workers invoke at a time; others wait
// for a turn without a thread. Each goroutine in Call.Wait occupies a thread.
//
// # Failover
//
// Calls with a context of [Idempotent] are repeated when their worker dies or their lease ends. With LeaseOptions.Failover a lease moves to
// another executor when its executor is lost or drains. With LeaseOptions.Local, functions run in this process while no executor has
// room.
package client
