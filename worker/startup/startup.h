/* What the zygote and its workers do ahead of a lease or beside it, so that a worker starts in less time.
 *
 * Each figure is before -> after. "VM" is the soft-RoCE virtual machine, "shm" a machine with two cores; times are medians.
 * `rfaas bench cold` measures starts.
 *
 *   spare.c  Channel memory for the next worker on verbs. The zygote fills it when nothing has arrived for 40 ms; the next
 *            worker inherits it. A device pins what is registered, so all pages must be present, and filling the 4.3 MiB of
 *            a default channel took 18 to 20 of 57 to 66 ms of a cold start. Inherited pages take 1.5 ms.
 *            Cold start on verbs, VM: 64 -> 53 ms (17 pairs of runs), together with the list of devices below.
 *            Waiting 40 instead of 20 ms keeps the zygote from filling while a first call is on its way, on CPUs that they
 *            share. First call, VM: 6 -> 0.4 to 0.5 ms.
 *   ahead.c  The memory itself. What is not ready, or is on another NUMA node, a second thread of the worker fills while
 *            the worker opens its device. Not measured by itself. The thread has a stack of 64 KiB instead of the default
 *            8 MiB, as has the worker's monitor thread; the effect of that was not measured.
 *   touch.c  Own copies of the writable pages that the zygote has used: of the program, its libraries, the heap (256 KiB) and the stack (32 KiB). Each worker makes
 *            them at its start, with one call for each run of pages, instead of one page fault for each page. Page faults of a worker until it waits in the
 *            pool, without the sandbox: 50 -> 36. Its processor time: 0.89 of before (together with -z now: 0.79; four pairs of 40 starts in turn, on a busy
 *            virtual machine in which a page fault takes some 14 us, 28 November 2026; the zygote's time for a clone did not change, 1.1 ms).
 *            Opening the user's library in a pooled worker: 190 -> 110 us. Read-only pages, unused pages next to used ones, and more of the stack are left out.
 *            They took 160 KiB of private memory for each worker and saved no time.
 *
 *   inherit.c Descriptors, dispositions of signals, the mode of the standard output and the environment, which the zygote prepares once. Without
 *            copies, placing the descriptors takes 9 us instead of 36 us. Resetting only the signals that the zygote has changed,
 *            instead of all 64, takes 6 us. The rest of the worker's first steps is mostly setsid (32 us).
 *
 * Other parts of a start that are done ahead belong to their subject and are described there:
 *
 *   Symbols of libc, which the zygote resolves once for all workers: -z now in the Makefile. Page faults of a worker until it waits in the pool: 56 -> 50. Its
 *   processor time: 0.97 of before (four pairs of 40 starts in turn, 28 November 2026).
 *   The pool: worker.c, prepare(). Lease to first result on shm: 2.49 -> 1.46 ms, together with a client that remembers
 *   executors and libraries.
 *   The filter of system calls in two parts: filter.c. Sealing a pooled worker: 390 -> 40 us.
 *   Sealing and loading the library while the client answers, and the client's pages after the answer: worker.c, close_up()
 *   and listen_to_executor(). Pooled start on shm: 0.10 to 0.15 ms less of about 1 ms, together with stacks of the executor's goroutines.
 *   The identity of the node for shm: dp_shm_preload. Opening the device: 31 -> 16 us.
 *   The executor's descriptors of the next worker: makeParts in internal/zygote/zygote.go. From the request to the zygote's first step: 145 -> 85 us.
 *   The list of devices, read once by the zygote: dp_verbs_preload. 1.7 -> 0.2 ms of each start on verbs, VM.
 *   Cloning into the control group instead of moving: clone.c. Cold start, VM: 69 -> 51 ms.
 *   The process namespace without a stem: clone.c. It saves 0.3 ms of 2.4 ms of a cold start.
 *   The control group of the next worker: spare in internal/sandbox/groups.go. Making a group takes about 0.4 ms of a start.
 *   When that group is made: prepareAfter in internal/spawner/spawner.go. After 0.3 instead of 5 ms, the fork step of leases
 *   back to back takes 1382 instead of 1984 us (six pairs of runs, two busy cores).
 *   When the pool clones the next worker: settleTime in internal/zygote/pool.go. At once -> after 5 ms: pooled start on shm
 *   4.4 -> 3.4 ms, 0.74 in the median of nine pairs of runs (two cores with a load of 25 to 70, so the times are long).
 *   Stacks of the executor's goroutines: deepen in internal/executor/stack.go. Pooled start on shm: 0.94 -> 0.90 ms (ten
 *   alternating runs), together with goroutines of gRPC that stay for the next calls.
 *   The unwinder, loaded before a crash: crash.c, dp_crash_prepare. It is for safety, not for speed; not measured. */
#ifndef RFAAS_WORKER_STARTUP_H
#define RFAAS_WORKER_STARTUP_H

#include "ahead.h"
#include "inherit.h"
#include "spare.h"

/* Stack of a thread that executes no user code. */
#define DP_STARTUP_STACK (64u << 10)

/* dp_worker_touch makes own copies of the pages that the zygote has used of its heap and stack, and of the writable data of the program and its libraries. It
 * keeps errno. */
void dp_worker_touch(void);

#endif
