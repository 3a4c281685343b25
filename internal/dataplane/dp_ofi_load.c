/* Loads libfabric. */
#include "dp_ofi_load.h"

#ifdef DP_HAVE_LIBFABRIC
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>

#include "dp_load.h"

ofi_functions ofi_lib;

static bool loaded;

/* psm, psm2 and others replace signal handlers of the process when they are loaded or initialised. */
typedef struct handlers {
    struct sigaction act[NSIG];
    bool known[NSIG];
} handlers;

static void save_handlers(handlers *h) {
    for (int s = 1; s < NSIG; s++)
        h->known[s] = sigaction(s, NULL, &h->act[s]) == 0;
}

static void restore_handlers(const handlers *h) {
    for (int s = 1; s < NSIG; s++) {
        struct sigaction now;
        if (h->known[s] && sigaction(s, NULL, &now) == 0 && now.sa_sigaction != h->act[s].sa_sigaction)
            sigaction(s, &h->act[s], NULL);
    }
}

/* Sets variables that libfabric or a provider's library reads when it is loaded. Values that the user has set stay. */
static void set_environment(void) {
    static const char *const settings[][2] = {
        {"IPATH_NO_BACKTRACE", "1"}, /* psm: no signal handlers */
        {"HFI_NO_BACKTRACE", "1"},   /* psm2: no signal handlers */
        {"CXI_FORK_SAFE", "1"},      /* cxi: children of a client do not take over its pinned pages */
        {"PSM3_RCVTHREAD", "0"},     /* psm3: no thread */
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        setenv(settings[i][0], settings[i][1], 0);
}

/* Returns the version of an exported function that uses the structures of this build's header files. */
static void *find(void *lib, const char *name, const char *version) {
    bool known = FI_MAJOR_VERSION == 1 && FI_MINOR_VERSION < 20;
    return known ? dlvsym(lib, name, version) : dlsym(lib, name);
}

static int load(dp_error *err) {
    const char *named = getenv("RFAAS_LIBFABRIC"), *library = named && *named ? named : OFI_LIBRARY;
    set_environment();
    handlers before;
    dp_handlers_lock();
    save_handlers(&before);
    void *lib = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    restore_handlers(&before);
    dp_handlers_unlock();
    if (!lib) {
        const char *why = dlerror();
        return dp_fail(err, DP_UNSUPPORTED, 0, "ofi needs %.60s: %.90s; install libfabric1 (Debian) or libfabric (Red Hat)", library,
                       why ? why : "unknown error");
    }
    ofi_functions f;
    f.getinfo = (__typeof__(f.getinfo))find(lib, "fi_getinfo", "FABRIC_1.3");
    f.freeinfo = (__typeof__(f.freeinfo))find(lib, "fi_freeinfo", "FABRIC_1.3");
    f.dupinfo = (__typeof__(f.dupinfo))find(lib, "fi_dupinfo", "FABRIC_1.3");
    f.fabric = (__typeof__(f.fabric))find(lib, "fi_fabric", "FABRIC_1.1");
    f.strerror = (__typeof__(f.strerror))dlsym(lib, "fi_strerror");
    if (!f.getinfo || !f.freeinfo || !f.dupinfo || !f.fabric || !f.strerror) {
        dlclose(lib);
        return dp_fail(err, DP_UNSUPPORTED, 0, "ofi needs libfabric %d.%d or later; %.60s is older", FI_MAJOR_VERSION, FI_MINOR_VERSION,
                       library);
    }
    ofi_lib = f;
    return DP_OK;
}

int ofi_load(dp_error *err) {
    dp_load_lock();
    int st = loaded ? DP_OK : load(err);
    loaded = st == DP_OK;
    dp_load_unlock();
    return st;
}

int ofi_getinfo(const char *node, uint64_t flags, const struct fi_info *hints, struct fi_info **out) {
    dp_handlers_lock();
    handlers before;
    save_handlers(&before);
    int e = ofi_lib.getinfo(OFI_VERSION, node, NULL, flags, hints, out);
    restore_handlers(&before);
    dp_handlers_unlock();
    return e;
}
#endif
