/* The report that a worker leaves in its page when user code ends the process. */
#ifndef RFAAS_WORKER_CRASH_H
#define RFAAS_WORKER_CRASH_H

#include "page.h"

/* dp_crash_prepare loads what backtraces need, so that a dying process need not; once, in the zygote. */
void dp_crash_prepare(void);
/* dp_crash_note makes this process write into the page how it dies: by a signal that user code can cause, or exit().
 * SIGXCPU counts as one: the executor sends it to learn where a function hangs. Call it on the serving thread. */
void dp_crash_note(dp_worker_page *page);

#endif
