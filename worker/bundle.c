#define RFAAS_FUNCTION_IMPLEMENTATION
#include "rfaas_function.h"

#include "bundle.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Each bundle has this library (loaderLibrary in internal/bundle). It needs all other libraries of the bundle, so loading it loads them. */
#define DP_BUNDLE_LOADER "/.rfaas/libraries.so"

static char at[PATH_MAX]; /* empty: there is none */

void dp_bundle_use(const dp_sandbox *s, const uint8_t *id) {
    static const uint8_t none[DP_BUNDLE_ID];
    char name[2 * DP_BUNDLE_ID + 1];
    if (!memcmp(id, none, sizeof none))
        return;
    dp_bundle_name(id, name);
    if (s->parts & DP_SANDBOX_FILES)
        strcpy(at, DP_BUNDLE_AT);
    else
        snprintf(at, sizeof at, "%s/%s", s->bundles ? s->bundles : "", name);
}

const char *dp_bundle_directory(void) { return *at ? at : NULL; }

int dp_bundle_load(char *text, size_t room) {
    char path[sizeof at + sizeof DP_BUNDLE_LOADER];
    if (!*at)
        return DP_OK;
    snprintf(path, sizeof path, "%s" DP_BUNDLE_LOADER, at);
    if (access(path, F_OK) && errno == ENOENT)
        return DP_OK; /* it has data only */
    if (dlopen(path, RTLD_NOW | RTLD_LOCAL)) /* stays open */
        return DP_OK;
    const char *e = dlerror();
    snprintf(text, room, "a library that it needs: %s", e ? e : "the dynamic linker gave no reason");
    return DP_BAD_LIBRARY;
}

const char *rfaas_bundle_path(const char *name) {
    static __thread char path[PATH_MAX];
    if (!*at || !name || !*name || strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, "..") ||
        snprintf(path, sizeof path, "%s/%s", at, name) >= (int)sizeof path || access(path, F_OK))
        return NULL;
    return path;
}
