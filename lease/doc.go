// Package lease keeps the leases of one executor: which cores and how much memory are granted to whom, in
// which state each lease is, and which deadline comes next. It is pure bookkeeping: no network, no processes, no
// goroutines and no clock of its own. The owner (internal/executor) starts and kills workers and tells the table
// what happened; the table says what is allowed and what is due.
//
//	            Request              Grant                 Open                  Notice
//	(nothing) ──────────▶ requested ────────▶ granted ─────────────▶ active ◀───────────────▶ expiring
//	                          │                  │                    │  └──┐ Open: the         │  Renew, back to
//	                          │ Fail             │ not opened in      │  ◀──┘ client is back    │  active
//	                          ▼                  ▼ time: revoked      ▼                         ▼
//	                      forgotten           released, expired, revoked, drained (End, from any of the three)
//	                                             │                    │
//	                                             │ Keep               │ Reaped: the cores are free
//	                                             ▼ (released only)    ▼
//	                                           cached ─────────▶ remembered without resources
//	                                             │     Drop, Reaped
//	                                             └──▶ requested, as the next lease of the same client (Reuse)
//
// An ended lease keeps its cores and memory until the owner has reaped the last worker and says so. This is the
// fence: no other lease gets a core on which code of the earlier client could still run. Afterwards the table
// remembers for a while how the lease ended. So a second release or a late request changes nothing, and its
// answer says how the lease ended.
//
// A released lease may be cached, with its workers, for the next lease of the same client. Its resources count as free: when
// another lease needs them, Request takes them, and Lease.Evict names the cached leases whose workers must be reaped first.
//
// # Cores
//
// The unit is the physical core: all of its logical CPUs that may be leased belong to one worker. Config.Share permits
// that several leases get the same core; 1 is the rule. Cores of the NUMA nodes in Config.Near go first, and a lease
// stays on one node where it can.
//
// # Time
//
// A lease ends at Expires by the executor's clock. Its client gets durations, never times of day, counts them from
// before its request, and stops Config.Margin earlier. So a wrong clock does no harm, and a client never uses a lease
// that has expired at the executor.
//
// # Requests
//
// A request id leases once. A repetition gets the first one's lease, even if the first is still being
// granted (Wait); with other terms it is refused. A request that failed is forgotten, since it holds nothing.
package lease
