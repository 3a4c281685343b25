// Package lease keeps the leases of one executor: which cores and how much memory are granted to whom, in
// which state each lease is, and which deadline comes next. It is pure bookkeeping: no network, no processes, no
// goroutines and no clock of its own. The owner (internal/executor) starts and kills workers and tells the table
// what happened; the table says what is allowed and what is due.
//
//	            Request              Grant                 Open
//	(nothing) ──────────▶ requested ────────▶ granted ───────────────▶ active ◀──┐ Open: the holder
//	                          │                  │                      │  └─────┘ is back
//	                          │ Fail             │ not opened in time   │
//	                          ▼                  ▼                      ▼
//	                      forgotten           revoked         released, expired, revoked
//
//	granted, active ── End ──▶ released | expired | revoked ── Reaped ──▶ remembered without resources
//
// An ended lease keeps its cores and memory until the owner has reaped the last worker and says so: that is the
// fence, nobody else gets a core on which the old holder's code could still run. Afterwards the table
// remembers for a while how the lease ended, so that a second release or a late request gets an answer that
// says why, and so that it changes nothing.
//
// A request id leases once. A repetition gets the first one's lease, also when the first is still being
// granted (Wait); with other terms it is refused. A request that failed is forgotten, since it holds nothing.
package lease
