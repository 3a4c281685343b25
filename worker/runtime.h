/* Runtimes: interpreters that a zygote starts before it clones workers, with modules of the administrator's choice. */
#ifndef RFAAS_WORKER_RUNTIME_H
#define RFAAS_WORKER_RUNTIME_H

#include "dp_fabric.h"

#define DP_RUNTIME_PRELOAD_MAX 64
#define DP_RUNTIME_PATHS_MAX 32

typedef struct dp_runtime {
    const char *name;   /* NULL: no runtime */
    const char *python; /* absolute path of the interpreter, whose name ends in python3.N or is a link to such a file */
    const char *preload[DP_RUNTIME_PRELOAD_MAX]; /* names of modules */
    int n_preload;
    const char *paths[DP_RUNTIME_PATHS_MAX]; /* directories in which Python finds modules, before its own */
    int n_paths;
} dp_runtime;

/* Reads one argument of the program. Returns false if it is not one of a runtime, or is one too many. */
bool dp_runtime_argument(dp_runtime *r, const char *argument);

/* dp_runtime_start starts the interpreter and imports the modules, in the calling process, which must have one thread and still has one
 * afterwards. While modules run, the process has no capabilities, and as root it is user nobody. A process of root refuses files and
 * directories that other users may change. Returns DP_OK, or DP_INVALID with the reason. After an error the process must end. */
int dp_runtime_start(const dp_runtime *r, dp_error *err);

#endif
