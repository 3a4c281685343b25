// Package invoke is the part of the invocation protocol that Go needs: the terms, the waiting policies and the channel
// blob. The C core (internal/dataplane) implements the protocol. The executor uses this package to check the blob that
// a client sends before a worker is made for it. docs/PROTOCOL.md is the specification.
//
// # Terms
//
// A hot invocation finds its worker spinning on its receive queue: the request costs the network's latency and no
// system call on either side.
//
// A warm invocation finds its worker connected, loaded and blocked: the request's completion event wakes it, so the
// call costs one wake-up more than a hot one in each direction that blocks.
//
// A cold invocation finds no worker: one is made (forked, connected, its code loaded) first.
//
// # Policies
//
// Each side of a connection waits by one of three policies. Hot spins. Warm blocks. Adaptive, the default, spins for
// about as long as one wake-up takes and then blocks: it is never more than twice as slow as the better of the two.
// Under every policy a side that notices that it shares its core with another runnable thread blocks for a
// while, 50 ms at first and longer each time it is found again at once, before it tries to spin: when spinners exceed
// cores, everybody blocks. A hot side whose wait has become long yields its core every 50 us.
package invoke
