/* A fixed piece of work, timed beside the workers of this node and with the workers kept from running. */
#ifndef RFAAS_REFERENCE_H
#define RFAAS_REFERENCE_H

#include <stdbool.h>
#include <stdint.h>

enum { REFERENCE_BUFFER = 4 << 20 }; /* bytes of memory that the work reads: more than most caches of a single core */

typedef struct reference reference;

typedef struct {
  bool complete;   /* false: another program interrupted it, and `beside` and `alone` say nothing */
  uint64_t beside; /* ns of processor time of the work while workers run */
  uint64_t alone;  /* the same while other threads of this process keep the workers from running */
  bool waited;     /* false: the kernel does not report `wait` */
  uint64_t wait;   /* ns that the thread waited for its CPU when it woke beside workers */
  uint64_t cost;   /* ns of processor time of all threads */
} reference_times;

/* reference_start begins a measurement in threads of its own, and does not wait for it. `buffer` has REFERENCE_BUFFER bytes, whose pages exist. The work
 * runs on `cpu`. `others` are the n other CPUs on which workers may run. `alone_first`: the run without workers comes first. Returns 0 or an errno. */
int reference_start(reference **r, void *buffer, int cpu, const int *others, int n, bool alone_first);
/* reference_finish waits until all threads have ended, a few milliseconds after the start, and frees r. */
reference_times reference_finish(reference *r);

#endif
