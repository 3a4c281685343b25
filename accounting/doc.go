// Package accounting counts what leases use and what that costs. It is pure: no network, no processes, no clock of its
// own.
//
//	Meter ──▶ Use ──▶ Journal ──▶ cells (remote memory) ──▶ Ledger ──▶ Bill
//	          executor's node                               resource manager's
//
// Everything is built on one rule: a counter only grows, and what travels is its sum so far, never a difference. The sums
// of one lease are named by a Key that nobody uses twice. Merging two states of the same Key takes the larger
// of each counter, so reports may be lost, repeated, delayed or reordered, and the result is that of the newest. Nothing is
// counted twice, and nothing is lost that anybody still holds: the executor's Journal keeps the sums of a lease on
// disk until the Ledger has said that it has them on its own (the watermark, Receipt).
//
// # Units
//
// A counter is an unsigned 64-bit number. How long it lasts for one lease of a whole machine of 1024 cores and 4 TiB, with
// 10 million calls a second on each core and 4 TB/s of payload:
//
//	CoreMicros       allocated cores, in core-microseconds                570 years
//	MemoryMiBMillis  allocated memory, in MiB-milliseconds                139 years
//	ExecMicros       time in functions, in core-microseconds              570 years
//	HotMicros        time spent polling, in core-microseconds             570 years
//	Calls, Failures  calls, and those that failed                          57 years
//	BytesIn, BytesOut  payload and results, in bytes                       53 days
//
// Because of the bytes a lease is counted in parts (Key.Part): when a counter passes SplitAt, a quarter of its range, the
// executor closes the part and goes on with the next, from zero. So none ever wraps. Totals of many leases are 128 bits wide (Total).
// Fractions of a unit are not lost: each counter is the rounded-down total since the lease began.
package accounting
