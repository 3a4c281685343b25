/* Loads libibverbs, and of its providers those that this node's devices need.
 *
 * ibv_get_device_list loads all providers that are installed, some twenty libraries with their dependencies, unless those that are loaded already
 * match all devices. In the soft-RoCE VM this takes 25 to 40 ms of a process's first 50 to 55 ms with a device. The device list takes 4 to 7 ms
 * if its provider was loaded before, which takes 1 to 3 ms. So load_providers loads those whose names match. If it misses one,
 * ibv_get_device_list loads all. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dlvsym */
#endif
#include "dp_verbs_load.h"

#include <dirent.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* ---- providers ---- */

/* Kernel drivers whose names do not begin with that of their provider. */
static const struct {
    const char *driver, *provider;
} others[] = {{"be2net", "ocrdma"}, {"bnxt_en", "bnxt_re"}, {"hfi1", "hfi1verbs"}, {"i40e", "irdma"}, {"ib_mthca", "mthca"},
              {"ib_qib", "ipathverbs"}, {"ice", "irdma"}, {"qede", "qedr"}};

bool dpv_provider_matches(const char *provider, const char *device, const char *driver) {
    size_t n = strlen(provider);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(driver, others[i].driver))
            return !strcmp(provider, others[i].provider);
    return n && (!strncmp(driver, provider, n) || !strncmp(device, provider, n));
}

/* Reports whether a device of this node may need a provider. */
static bool needed(const char *classes, const char *provider) {
    DIR *d = opendir(classes);
    bool is = false;
    for (const struct dirent *e; d && !is && (e = readdir(d));) {
        char path[512], target[512] = "";
        snprintf(path, sizeof path, "%s/%s/device/driver", classes, e->d_name);
        ssize_t n = e->d_name[0] == '.' ? 0 : readlink(path, target, sizeof target - 1); /* soft-RoCE has no such link */
        target[n > 0 ? n : 0] = 0;
        const char *slash = strrchr(target, '/');
        is = e->d_name[0] != '.' && dpv_provider_matches(provider, e->d_name, slash ? slash + 1 : "");
    }
    if (d)
        closedir(d);
    return is;
}

void dpv_load_providers(const char *library, const char *classes) {
    char path[512];
    const char *slash = strrchr(library, '/');
    if (!slash || getenv("RDMAV_DRIVERS") || getenv("IBV_DRIVERS")) /* libibverbs reads them only if it loads all */
        return;
    int n = snprintf(path, sizeof path, "%.*s/libibverbs/", (int)(slash - library), library);
    DIR *d = n < (int)sizeof path ? opendir(path) : NULL;
    for (const struct dirent *e; d && (e = readdir(d));) { /* libNAME-rdmavVERSION.so */
        char name[64];
        const char *end = strstr(e->d_name, "-rdmav");
        if (strncmp(e->d_name, "lib", 3) || !end || snprintf(name, sizeof name, "%.*s", (int)(end - e->d_name - 3), e->d_name + 3) >= (int)sizeof name ||
            !needed(classes, name) || snprintf(path + n, sizeof path - (size_t)n, "%s", e->d_name) >= (int)(sizeof path - (size_t)n))
            continue;
        dlopen(path, RTLD_NOW | RTLD_LOCAL); /* registers itself. If it cannot be loaded, ibv_get_device_list says so */
    }
    if (d)
        closedir(d);
}

int dp_verbs_load(dp_error *err) {
    static bool loaded;
    dp_load_lock();
    int st = loaded ? DP_OK : dpv_ibv_load_from(DPV_IBV_LIBRARY, &dpv_ibv, err);
    Dl_info at;
    if (!st && !loaded && dladdr((void *)dpv_ibv.get_device_list, &at))
        dpv_load_providers(at.dli_fname, "/sys/class/infiniband");
    loaded = st == DP_OK;
    dp_load_unlock();
    return st;
}
