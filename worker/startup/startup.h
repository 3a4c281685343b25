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
 *   touch.c  Writable pages of the program, of its libraries, of the heap (256 KiB) and of the stack (32 KiB), made present in
 *            a pooled worker. Opening the user's library: 190 -> 110 us. Pooled start on shm: 1.05 to 1.22 -> 0.83 to 0.90 ms,
 *            together with fewer messages. An earlier version also touched read-only pages, unused pages next to used ones,
 *            and 64 KiB of the stack. Leaving these out saves 160 KiB of private memory for each worker, and opening the library
 *            takes no longer (115 to 121 us, and 117 to 145 us with them, in seven alternating runs).
 *
 *   inherit.c Descriptors, dispositions of signals, the mode of the standard output and the environment, which the zygote prepares once. Without
 *            copies, placing the descriptors takes 9 us instead of 36 us. Resetting only the signals that the zygote has changed,
 *            instead of all 64, takes 6 us. The rest of the worker's first steps is mostly setsid (32 us).
 *
 * Other parts of a start that are done ahead belong to their subject and are described there:
 *
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

/* dp_worker_touch makes own copies of the pages that the process has used of its heap and stack, and of the writable data of the program and its libraries. It
 * keeps errno. */
void dp_worker_touch(void);

#endif
