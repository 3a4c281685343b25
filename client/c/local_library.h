/* A library of functions that is opened in this process, for leases with RFAAS_LEASE_LOCAL that have no executor. */
#ifndef RFAAS_LOCAL_LIBRARY_H
#define RFAAS_LOCAL_LIBRARY_H

#include "dp_fabric.h"
#include "dp_pieces.h"
#include "dp_wire.h"

typedef struct rfaas_local rfaas_local;

/* As functions of workers are (rfaas_function.h). */
typedef uint32_t rfaas_local_fn(void *args, uint32_t size, void *res);

/* rfaas_local_open opens a library by its path (relative to the current directory, even without a slash), or if the path is
 * NULL, by its bytes. Its constructors run. DP_BAD_LIBRARY: err->msg is the dynamic linker's reason. */
int rfaas_local_open(const char *path, const void *data, uint64_t size, rfaas_local **out, dp_error *err);

/* rfaas_local_finders makes the library's functions find tables and files by these functions (rfaas_table and rfaas_bundle_path of
 * rfaas_function.h). */
void rfaas_local_finders(rfaas_local *l, const void *(*table)(const char *name, size_t *size), const char *(*path)(const char *name));

/* rfaas_local_close closes a library that is not in use. NULL does nothing. */
void rfaas_local_close(rfaas_local *l);

/* rfaas_local_find returns a function that the library itself defines, or NULL. Functions of libraries that it is linked
 * with do not count. */
rfaas_local_fn *rfaas_local_find(const rfaas_local *l, const char *name);

/* What a function said when it failed, by rfaas_fail or rfaas_fail_code. */
typedef struct rfaas_local_failure {
    bool failed;
    bool second; /* in a chain: true if the second function failed, false if the first failed */
    int32_t code;
    char text[DP_FAILURE_TEXT + 1];
} rfaas_local_failure;

/* rfaas_local_call calls f. If `then` is not NULL, it calls `then` with the result of f. It copies payload and result through memory of
 * the library, because functions may write to their arguments and may write a result larger than the capacity. It has at least `limit`
 * bytes for each, which is the same in every call. *got is the result's size. The pieces have in_size and capacity bytes. One thread at a
 * time. DP_RESULT_TOO_LARGE: the result does not fit. DP_FUNCTION_FAILED:
 * a function reported an error, or the result of f for `then` exceeds `limit`; *failure says which. DP_FATAL: no memory. */
int rfaas_local_call(rfaas_local *l, rfaas_local_fn *f, rfaas_local_fn *then, uint64_t limit, const dp_pieces *in, uint32_t in_size,
                     const dp_pieces *out, uint32_t capacity, uint32_t *got, rfaas_local_failure *failure);

#endif
