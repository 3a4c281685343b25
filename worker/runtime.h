/* Runtimes: interpreters that a zygote starts before it clones workers, with modules of the administrator's choice. */
#ifndef RFAAS_WORKER_RUNTIME_H
#define RFAAS_WORKER_RUNTIME_H

#include "dp_fabric.h"

#define DP_RUNTIME_PRELOAD_MAX 64
#define DP_RUNTIME_PATHS_MAX 32
#define DP_RUNTIME_PATH_MAX (4096 + 64)

typedef struct dp_runtime {
    const char *name;   /* NULL: no runtime */
    const char *python; /* absolute path of the interpreter, whose name ends in python3.N or is a link to such a file */
    const char *preload[DP_RUNTIME_PRELOAD_MAX]; /* names of modules */
    int n_preload;
    const char *paths[DP_RUNTIME_PATHS_MAX]; /* directories in which Python finds modules, before its own */
    int n_paths;
    bool root;                         /* set by dp_runtime_check: only files that nobody but root can change */
    char library[DP_RUNTIME_PATH_MAX]; /* likewise: libpython */
} dp_runtime;

/* Reads one argument of the program. Returns false if it is not one of a runtime, or is one too many. */
bool dp_runtime_argument(dp_runtime *r, const char *argument);

/* Checks the setting and finds the interpreter's library. In a process of root, it refuses files and directories that others than root can
 * change: the interpreter, its library, what it reads before it can check files itself, and the paths. To be called before the root of the
 * file system changes, because the new one does not have the parents of these paths. Returns DP_OK, or DP_INVALID with the reason. */
int dp_runtime_check(dp_runtime *r, dp_error *err);

/* dp_runtime_start starts the interpreter and imports the modules, in the calling process, which must have one thread and still has one
 * afterwards. A process of root refuses modules that others than root can change, because their code can take all rights of the process.
 * While modules run, the process has no effective capabilities, and as root it is user nobody, so that they do no damage by mistake.
 * Returns DP_OK, or DP_INVALID with the reason. After an error the process must end. */
int dp_runtime_start(const dp_runtime *r, dp_error *err);

#endif
