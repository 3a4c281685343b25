/* Steps that the zygote takes once, so that its clones, the workers, need not take them. */
#ifndef RFAAS_WORKER_INHERIT_H
#define RFAAS_WORKER_INHERIT_H

/* Descriptors below this number have fixed meanings in a worker. */
#define DP_INHERIT_FREE 10

/* dp_inherit_prepare is called in the zygote, after everything that installs signal handlers. It opens /dev/null at all free descriptors below
 * DP_INHERIT_FREE. So descriptors for workers, which the zygote receives later, never get these numbers, and can be moved without a copy. It also notes
 * which signals have a disposition that workers must reset, and sets the buffering of the standard output and the environment for workers. */
void dp_inherit_prepare(void);

/* dp_inherit_null returns a descriptor of /dev/null that is not below DP_INHERIT_FREE. After an error it returns -1 and sets errno. */
int dp_inherit_null(void);

/* dp_inherit_signals gives each signal its default disposition in a process that the zygote has cloned. */
void dp_inherit_signals(void);

#endif
