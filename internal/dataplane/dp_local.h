/* Functions of a library in this very process, for clients that have no executor. */
#ifndef DP_LOCAL_H
#define DP_LOCAL_H

#include "dp_fabric.h"

typedef struct dp_local dp_local;

/* As functions of workers are (rfaas_function.h). */
typedef uint32_t dp_local_fn(void *args, uint32_t size, void *res);

/* dp_local_open opens a library by its path (relative to the current directory also without a slash), or, where that is NULL,
 * by its bytes. Its constructors run. DP_BAD_LIBRARY: err->msg is the dynamic linker's reason. */
int dp_local_open(const char *path, const void *data, uint64_t size, dp_local **out, dp_error *err);

/* dp_local_close closes it, which must not be in use. NULL does nothing. */
void dp_local_close(dp_local *l);

/* dp_local_find returns a function of the library itself, not of those that it is linked with; NULL: there is none. */
dp_local_fn *dp_local_find(const dp_local *l, const char *name);

/* dp_local_call calls f, with payload and result in memory of the library's own: functions may write to their arguments, and more to a
 * result than is wanted, up to `limit` bytes of either, which is the same in every call. *got is the result's size. One
 * thread at a time. DP_TOO_LARGE: the payload, and f was not called; DP_RESULT_TOO_LARGE: it was; DP_FATAL: no memory. */
int dp_local_call(dp_local *l, dp_local_fn *f, uint64_t limit, const void *in, uint32_t in_size, void *out, uint32_t capacity,
                  uint32_t *got);

#endif
