// Package executor is the daemon on a node that lends its cores: it grants leases, stores uploaded code, starts and
// reaps workers, reports their deaths to clients, and reports to the resource manager.
//
// cmd/executor is a thin main, so that the daemon can be tested in one process, with a fake in place of the zygote, on a
// loopback connection, under the race detector.
//
// The executor never runs user code and takes no part in invocations: workers write results straight into the
// client's memory. Its bookkeeping is package lease; this package adds processes and connections.
//
// # Lock order
//
// Executor.mu, then holding.mu, then the lease table's own lock. codeStore.mu is taken alone. No lock is held while
// a worker starts or ends, or while something is sent.
package executor
