/* Functions that a worker calls when it starts from a seed (rfaas_on_resume), and the number of the worker among those of its seed. */
#ifndef RFAAS_SEED_RESUME_H
#define RFAAS_SEED_RESUME_H

#include <stdint.h>

/* dp_resume_hold makes rfaas_on_resume note its functions in the heap, instead of calling them at once. A heap is open. */
void dp_resume_hold(void);
/* dp_resume_run calls the noted functions in their order, on the serving thread. The seed has been laid over the process, or the process goes on
 * without it. child: the worker's number, from 1; 0: it has no seed. */
void dp_resume_run(uint32_t child);
/* rfaas_on_resume and rfaas_child_number of rfaas_function.h. */
int dp_resume_add(void (*f)(void *), void *arg);
uint32_t dp_resume_child(void);

#endif
