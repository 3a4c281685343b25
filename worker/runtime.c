/* Starting a runtime in the zygote. Workers are cloned from it, so they have the interpreter and the modules at once, in memory that they
 * share copy on write. client/python/worker/worker.c continues in the worker.
 *
 * The worker program is not linked with Python: the libpython beside the interpreter is opened, and its functions are looked up. */
#include "runtime.h"

#include <dlfcn.h>
#include <errno.h>
#include <grp.h>
#include <libgen.h>
#include <limits.h>
#include <link.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NOBODY 65534
#define GROUPS_MAX 1024
#define LIST_MAX 16384 /* bytes of a list of modules or paths */

/* Imports the modules. Its variables come in the environment. Reports a failure in the variable `failed` of __main__. The base modules are
 * those that the worker's side of rfaas.Executor and cloudpickle use. Dictionaries of modules are frozen, so that no garbage collection of a
 * worker touches their pages. */
static const char preload_code[] =
    "import os, sys\n"
    "failed = ''\n"
    "def check(path):\n"
    "    while os.path.exists(path):\n"
    "        is_ = os.stat(path)\n"
    "        if is_.st_uid != 0 or is_.st_mode & 0o002:\n"
    "            raise PermissionError(f'{path} can be changed by others than root (owner {is_.st_uid}, mode {is_.st_mode & 0o7777:04o})')\n"
    "        if path == '/':\n"
    "            break\n"
    "        path = os.path.dirname(path)\n"
    "def preload():\n"
    "    import importlib\n"
    "    take = lambda name: [x for x in os.environ.pop(name).split('\\n') if x]\n"
    "    paths, modules, root = take('RFAAS_RUNTIME_PATHS'), take('RFAAS_RUNTIME_PRELOAD'), take('RFAAS_RUNTIME_ROOT')\n"
    "    sys.argv = ['']\n"
    "    sys.path[:0] = paths\n"
    "    if root:\n"
    "        for path in sys.path:\n"
    "            check(os.path.realpath(path))\n"
    "    for name in ('collections.abc', 'copyreg', 'dis', 'functools', 'importlib.abc', 'importlib.machinery', 'io', 'itertools', 'logging',\n"
    "                 'marshal', 'pickle', 'platform', 'random', 'site', 'struct', 'threading', 'traceback', 'typing', 'uuid', 'weakref'):\n"
    "        importlib.import_module(name)\n"
    "    for name in modules:\n"
    "        try:\n"
    "            importlib.import_module(name)\n"
    "        except BaseException as e:\n"
    "            raise ImportError(f'import {name}: {type(e).__name__}: {e}') from e\n"
    "    threads = len(os.listdir('/proc/self/task'))\n"
    "    if threads != 1:\n"
    "        raise RuntimeError(f'the modules have started {threads - 1} threads, which workers would not have')\n"
    "    import gc\n"
    "    gc.collect()\n"
    "    gc.freeze()\n"
    "try:\n"
    "    preload()\n"
    "except BaseException as e:\n"
    "    failed = str(e) or type(e).__name__\n";

bool dp_runtime_argument(dp_runtime *r, const char *argument) {
    if (!strncmp(argument, "--runtime=", 10))
        r->name = argument + 10;
    else if (!strncmp(argument, "--python=/", 10))
        r->python = argument + 9;
    else if (!strncmp(argument, "--preload=", 10) && r->n_preload < DP_RUNTIME_PRELOAD_MAX)
        r->preload[r->n_preload++] = argument + 10;
    else if (!strncmp(argument, "--module-path=/", 15) && r->n_paths < DP_RUNTIME_PATHS_MAX)
        r->paths[r->n_paths++] = argument + 14;
    else
        return false;
    return true;
}

/* ---- the rights of modules ---- */

typedef struct rights {
    struct __user_cap_data_struct caps[2];
    gid_t groups[GROUPS_MAX];
    int n_groups;
    bool root;
} rights;

static const struct __user_cap_header_struct self = {.version = _LINUX_CAPABILITY_VERSION_3};

/* Gives up the effective rights. The permitted ones stay, so that give_back can return them. Returns 0 or an errno. */
static int drop(rights *r) {
    struct __user_cap_header_struct head = self;
    if (syscall(SYS_capget, &head, r->caps))
        return errno;
    r->root = geteuid() == 0 && r->caps[0].effective & 1u << CAP_SETUID && r->caps[0].effective & 1u << CAP_SETGID;
    if (r->root) {
        r->n_groups = getgroups(GROUPS_MAX, r->groups);
        if (r->n_groups < 0 || setgroups(0, NULL) || setegid(NOBODY) || seteuid(NOBODY))
            return errno;
    }
    struct __user_cap_data_struct none[2] = {{.permitted = r->caps[0].permitted}, {.permitted = r->caps[1].permitted}};
    return syscall(SYS_capset, &head, none) ? errno : 0;
}

static int give_back(const rights *r) {
    struct __user_cap_header_struct head = self;
    pid_t parent = getppid();
    if (r->root && seteuid(0))
        return errno;
    if (syscall(SYS_capset, &head, r->caps))
        return errno;
    if (r->root && (setegid(0) || setgroups((size_t)r->n_groups, r->groups)))
        return errno;
    /* The changes of credentials have undone both. */
    prctl(PR_SET_DUMPABLE, 1);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return getppid() == parent ? 0 : ESRCH;
}

/* ---- the interpreter ---- */

/* Returns whether only root can change a file, which is named by a path without symbolic links. */
static bool only_root_changes(const char *path, dp_error *err) {
    char at[PATH_MAX];
    snprintf(at, sizeof at, "%s", path);
    for (;;) {
        struct stat st;
        if (stat(at, &st))
            return dp_fail(err, DP_INVALID, errno, "%s", at), false;
        if (st.st_uid || st.st_mode & 2)
            return dp_fail(err, DP_INVALID, 0, "%s can be changed by others than root (owner %u, mode %04o)", at, st.st_uid, st.st_mode & 07777), false;
        if (!strcmp(at, "/"))
            return true;
        dirname(at);
    }
}

/* Opens the libpython that belongs to an interpreter. Its symbols become global, because most extension modules are not linked with it. */
static void *open_libpython(const char *python, bool root, dp_error *err) {
    char real[PATH_MAX], path[PATH_MAX + 64], name[64];
    if (!realpath(python, real))
        return dp_fail(err, DP_INVALID, errno, "python %s", python), NULL;
    const char *base = strrchr(real, '/') + 1;
    unsigned minor;
    int end = 0;
    if (sscanf(base, "python3.%u%n", &minor, &end) != 1 || base[end])
        return dp_fail(err, DP_INVALID, 0, "python %s: the file's name is %s, want python3.N", python, base), NULL;
    if (root && !only_root_changes(real, err))
        return NULL;
    snprintf(name, sizeof name, "libpython3.%u.so.1.0", minor);
    snprintf(path, sizeof path, "%.*s../lib/%s", (int)(base - real), real, name);
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    struct link_map *map = NULL;
    if (!library || dlinfo(library, RTLD_DI_LINKMAP, &map))
        return dp_fail(err, DP_INVALID, 0, "python %s: its library cannot be loaded (Debian: libpython3.%u): %s", python, minor, dlerror()), NULL;
    if (root && (!realpath(map->l_name, real) || !only_root_changes(real, err)))
        return NULL;
    return library;
}

static bool put_list(const char *name, const char *const *items, int n) {
    char list[LIST_MAX] = "";
    size_t at = 0;
    for (int i = 0; i < n && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s\n", items[i]);
    return at < sizeof list && !setenv(name, list, 1);
}

/* Runs the code in __main__. Returns NULL, or why it has failed. */
static const char *run_preload(void *library) {
    int (*run)(const char *, void *) = (int (*)(const char *, void *))dlsym(library, "PyRun_SimpleStringFlags");
    void *(*import)(const char *) = (void *(*)(const char *))dlsym(library, "PyImport_AddModule");
    void *(*get)(void *, const char *) = (void *(*)(void *, const char *))dlsym(library, "PyObject_GetAttrString");
    const char *(*text)(void *) = (const char *(*)(void *))dlsym(library, "PyUnicode_AsUTF8");
    void *(*save)(void) = (void *(*)(void))dlsym(library, "PyEval_SaveThread");
    if (!run || !import || !get || !text || !save)
        return "libpython lacks functions that are needed";
    void *failed = run(preload_code, NULL) ? NULL : get(import("__main__"), "failed");
    const char *why = failed ? text(failed) : "see the traceback";
    save(); /* the worker takes the interpreter's lock, also on another thread */
    return why && !*why ? NULL : why;
}

static const char *run_python(void *library, const dp_runtime *r) {
    wchar_t *(*decode)(const char *, size_t *) = (wchar_t * (*)(const char *, size_t *)) dlsym(library, "Py_DecodeLocale");
    void (*set_program)(const wchar_t *) = (void (*)(const wchar_t *))dlsym(library, "Py_SetProgramName");
    void (*initialize)(int) = (void (*)(int))dlsym(library, "Py_InitializeEx");
    wchar_t *program = decode ? decode(r->python, NULL) : NULL; /* Python keeps it */
    if (!program || !set_program || !initialize)
        return "libpython lacks functions that are needed";
    set_program(program);
    initialize(0); /* without signal handlers. If there is no standard library, it prints why and ends the process */
    return run_preload(library);
}

int dp_runtime_start(const dp_runtime *r, dp_error *err) {
    bool root = getuid() == 0 && geteuid() == 0;
    if (!r->python)
        return dp_fail(err, DP_INVALID, 0, "runtime %s: no python", r->name);
    if (!put_list("RFAAS_RUNTIME_PATHS", r->paths, r->n_paths) || !put_list("RFAAS_RUNTIME_PRELOAD", r->preload, r->n_preload) ||
        setenv("RFAAS_RUNTIME_ROOT", root ? "1" : "", 1))
        return dp_fail(err, DP_INVALID, 0, "runtime %s: the lists of modules and paths have more than %d bytes", r->name, LIST_MAX);
    setenv("RFAAS_RUNTIME", r->name, 1);
    setenv("PYTHONDONTWRITEBYTECODE", "1", 1);
    setenv("PYTHONNOUSERSITE", "1", 1);
    setenv("OPENBLAS_NUM_THREADS", "1", 1); /* no thread survives the clone of a worker, which may start more */
    setenv("OMP_NUM_THREADS", "1", 1);
    unsetenv("PYTHONHASHSEED");
    rights before;
    int e = drop(&before);
    if (e)
        return dp_fail(err, DP_FATAL, e, "runtime %s: give up rights", r->name);
    dp_error why = {0};
    void *library = open_libpython(r->python, root, &why);
    const char *failed = library ? run_python(library, r) : why.msg;
    if (failed)
        return dp_fail(err, DP_INVALID, 0, "runtime %s: %s", r->name, failed);
    e = give_back(&before);
    return e ? dp_fail(err, DP_FATAL, e, "runtime %s: regain rights", r->name) : DP_OK;
}
