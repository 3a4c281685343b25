/* Checking and loading the user's library. */
#ifndef RFAAS_WORKER_LOAD_H
#define RFAAS_WORKER_LOAD_H

#include <stddef.h>
#include <stdint.h>

#include "dp_serve.h"

/* dp_worker_load checks and loads the library in the sealed memfd `code` and looks up n functions by the names in the
 * memfd `names`. On failure returns DP_BAD_LIBRARY (or DP_INVALID, DP_FATAL) with the reason in text. The library stays
 * loaded and the table allocated until the process ends. Runs the library's constructors. */
int dp_worker_load(int code, int names, uint32_t n, dp_function **table, char *text, size_t room);

#endif
