/* Loads libibverbs. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dlvsym */
#endif
#include "dp_verbs_load.h"

#include <dlfcn.h>
#include <stdbool.h>

#include "dp_load.h"

dpv_ibv_functions dpv_ibv;

static const char *load_error(void) {
    const char *text = dlerror();
    return text ? text : "unknown error";
}

int dpv_ibv_load_from(const char *library, dpv_ibv_functions *out, dp_error *err) {
    /* Local: the names of libibverbs must not reach libraries of the user. */
    void *lib = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        return dp_fail(err, DP_UNSUPPORTED, 0,
                       "verbs needs %.40s: %.90s; install libibverbs1 and ibverbs-providers (Debian) or libibverbs (Red Hat)",
                       library, load_error());
    dpv_ibv_functions f;
#define RESOLVE(member, function, version)                                                                             \
    if (!(f.member = (__typeof__(f.member))dlvsym(lib, #function, version))) {                                         \
        dlclose(lib);                                                                                                  \
        return dp_fail(err, DP_UNSUPPORTED, 0, "verbs needs %.40s of rdma-core 32 or later: it has no " #function      \
                       " of " version "; upgrade the package that owns it", library);                                  \
    }
    DPV_IBV_FUNCTIONS(RESOLVE)
#undef RESOLVE
    *out = f;
    return DP_OK;
}

int dp_verbs_load(dp_error *err) {
    static bool loaded;
    dp_load_lock();
    int st = loaded ? DP_OK : dpv_ibv_load_from(DPV_IBV_LIBRARY, &dpv_ibv, err);
    loaded = st == DP_OK;
    dp_load_unlock();
    return st;
}
