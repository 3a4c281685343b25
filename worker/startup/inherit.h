/* What the zygote does once, so that each worker inherits it instead of doing it after it was cloned. */
#ifndef RFAAS_WORKER_INHERIT_H
#define RFAAS_WORKER_INHERIT_H

/* Descriptors below this number have fixed meanings in a worker. */
#define DP_INHERIT_FREE 10

/* dp_inherit_prepare is called in the zygote, after everything that installs signal handlers. It opens /dev/null at the free descriptors below
 * DP_INHERIT_FREE, so that those of a worker, which the zygote receives, never lie there and can be moved without a copy. It also notes
 * which signals have a disposition that workers must reset, and sets what the standard output and the environment of workers need. */
void dp_inherit_prepare(void);

/* dp_inherit_null returns a descriptor of /dev/null from DP_INHERIT_FREE on, or -1 and sets errno. */
int dp_inherit_null(void);

/* dp_inherit_signals gives each signal its default disposition in a process that the zygote has cloned. */
void dp_inherit_signals(void);

#endif
