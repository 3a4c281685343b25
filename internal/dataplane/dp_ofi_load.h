/* libfabric, loaded when the first ofi device is opened. No program links it. Inline functions of <rdma/...> that only use an
 * object's function table (fi_write, fi_cq_read) are called by their own names. The few exported functions are members of ofi_lib.
 *
 * The header files are optional: without them at build time, dp_ofi_open returns DP_UNSUPPORTED.
 */
#ifndef RFAAS_DP_OFI_LOAD_H
#define RFAAS_DP_OFI_LOAD_H

#include "dp_fabric.h"

#if __has_include(<rdma/fabric.h>) && !defined(RFAAS_NO_LIBFABRIC)
#define DP_HAVE_LIBFABRIC 1
#include <rdma/fabric.h>

#define OFI_LIBRARY "libfabric.so.1"
#define OFI_VERSION FI_VERSION(1, 15) /* of the interface that this code asks for */

typedef struct ofi_functions {
    int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                   struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info);
    int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
    const char *(*strerror)(int errnum);
} ofi_functions;

/* Filled by the first ofi_load that succeeds, and constant from then on. */
extern ofi_functions ofi_lib;

/* Loads libfabric unless it is loaded already. It stays loaded. RFAAS_LIBFABRIC names another file. The signal handlers of the process stay
 * as they were. Thread safe. DP_UNSUPPORTED: the library is missing or too old. */
int ofi_load(dp_error *err);
/* Calls fi_getinfo, which initialises the libfabric providers the first time, and restores the signal handlers that they replace. */
int ofi_getinfo(const char *node, uint64_t flags, const struct fi_info *hints, struct fi_info **out);
#endif

#endif
