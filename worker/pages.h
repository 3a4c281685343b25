/* Memory of a worker that is filled on demand: the executor answers the page faults, by a userfaultfd of the worker.
 *
 * The spawner opens /dev/userfaultfd for the zygote, because only root may. A prepared worker makes its userfaultfd before it is sealed, gives it
 * to the executor and to its guard, and closes it, so that user code never has it. The guard keeps it from being closed before the worker has
 * ended: when the last descriptor is closed, the kernel fills absent pages with zeros. */
#ifndef RFAAS_WORKER_PAGES_H
#define RFAAS_WORKER_PAGES_H

#include <stdbool.h>

/* dp_pages_open makes a nonblocking userfaultfd for the memory of the calling process. -1: the kernel does not support what is needed (Linux 5.14). */
int dp_pages_open(int device);
/* Returns whether dp_pages_open works with this device. */
bool dp_pages_work(int device);

#endif
