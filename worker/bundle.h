/* Files that travel with the library of functions: libraries that it needs, and files that the client's program names. */
#ifndef RFAAS_WORKER_BUNDLE_H
#define RFAAS_WORKER_BUNDLE_H

#include <stddef.h>

#include "sandbox.h"

/* dp_bundle_use sets where this worker finds its bundle: at DP_BUNDLE_AT if it has a file system of its own, otherwise in the executor's
 * directory. `id` has DP_BUNDLE_ID bytes. Without a call, or if all of them are 0, the worker has none. Call it before dp_sandbox_enter, which
 * lets the worker read this directory. */
void dp_bundle_use(const dp_sandbox *s, const uint8_t *id);

/* dp_bundle_directory returns the path that dp_bundle_use has set, or NULL if there is none. */
const char *dp_bundle_directory(void);

/* dp_bundle_load loads the libraries of the bundle, so that the linker finds them by their names when it loads the library of functions.
 * Returns DP_OK, even if there are none, or DP_BAD_LIBRARY with the linker's reason in text. */
int dp_bundle_load(char *text, size_t room);

#endif
