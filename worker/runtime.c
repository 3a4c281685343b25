/* Starting a runtime in the zygote. Workers are cloned from it, so they have the interpreter and the modules at once, in memory that they
 * share copy on write. client/python/worker/worker.c continues in the worker.
 *
 * The worker program is not linked with Python: the interpreter's libpython is opened, and its functions are looked up. */
#include "runtime.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <grp.h>
#include <libgen.h>
#include <limits.h>
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
#define LINKS_MAX 40

/* The source of the code that executes Python functions in workers. If a client has the same source, its workers need not execute it. */
__asm__(".pushsection .rodata\n"
        ".globl dp_remote_source\n" /* so that -flto finds it */
        ".hidden dp_remote_source\n"
        "dp_remote_source:\n"
        ".incbin \"client/python/rfaas/_frames.py\"\n"
        ".incbin \"client/python/rfaas/_remote.py\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const char dp_remote_source[] __attribute__((visibility("hidden")));

/* Imports the modules. Its variables come in the environment. Reports a failure in the variable `failed` of __main__. The base modules are
 * those that the worker's side of rfaas.Executor and cloudpickle use. Dictionaries of modules are frozen, so that no garbage collection of a
 * worker touches their pages.
 *
 * In a process of root, Finder checks the file of a module before Python runs it, and addsitedir the .pth files. The checks at the end find
 * modules that came by other ways, and shared libraries. A refusal counts even if a module catches the exception. */
static const char preload_code[] =
    "import sys\n"
    "failed = ''\n"
    "refused = []\n"
    "def check(path):\n"
    "    why = only_root_changes(path) if root else ''\n"
    "    if why:\n"
    "        refused.append(why)\n"
    "        raise PermissionError(why)\n"
    "class Finder:\n"
    "    @staticmethod\n"
    "    def find_spec(name, path=None, target=None):\n"
    "        for finder in sys.meta_path:\n"
    "            spec = None if finder is Finder else finder.find_spec(name, path, target)\n"
    "            if spec:\n"
    "                for file in filter(None, (spec.origin, spec.cached) if spec.has_location else ()):\n"
    "                    check(file)\n"
    "                return spec\n"
    "def mapped():\n"
    "    with open('/proc/self/maps') as maps:\n"
    "        return {line[line.index('/'):].rstrip('\\n') for line in maps if line.split()[1] == 'r-xp' and '/' in line}\n"
    "def preload():\n"
    "    global root\n"
    "    root = False\n"
    "    import os\n"
    "    take = lambda name: [x for x in os.environ.pop(name).split('\\n') if x]\n"
    "    paths, modules, root = take('RFAAS_RUNTIME_PATHS'), take('RFAAS_RUNTIME_PRELOAD'), take('RFAAS_RUNTIME_ROOT')\n"
    "    before = mapped()\n"
    "    for path in sys.path + paths:\n"
    "        check(path)\n"
    "    sys.meta_path.insert(0, Finder)\n"
    "    import importlib, site\n"
    "    add = site.addsitedir\n"
    "    def addsitedir(directory, *args, **kwargs):\n"
    "        check(directory)\n"
    "        for entry in os.scandir(directory) if os.path.isdir(directory) else ():\n"
    "            if entry.name.endswith(('.pth', '.start')):\n"
    "                check(entry.path)\n"
    "        return add(directory, *args, **kwargs)\n"
    "    site.addsitedir = addsitedir\n"
    "    site.main()\n"
    "    site.addsitedir = add\n"
    "    sys.argv = ['']\n"
    "    sys.path[:0] = paths\n"
    "    for name in ('collections.abc', 'copyreg', 'dis', 'functools', 'importlib.abc', 'importlib.machinery', 'importlib.util', 'io', 'itertools', 'logging',\n"
    "                 'marshal', 'pickle', 'platform', 'random', 'struct', 'threading', 'traceback', 'typing', 'uuid', 'weakref'):\n"
    "        importlib.import_module(name)\n"
    "    for name in modules:\n"
    "        try:\n"
    "            importlib.import_module(name)\n"
    "        except BaseException as e:\n"
    "            raise ImportError(f'import {name}: {type(e).__name__}: {e}') from e\n"
    "    sys.meta_path.remove(Finder)\n"
    "    remote = type(sys)('rfaas_remote')\n"
    "    remote.SOURCE_HASH = importlib.util.source_hash(remote_source.encode()).hex()\n"
    "    exec(compile(remote_source, 'rfaas/_remote.py', 'exec', dont_inherit=True), vars(remote))\n"
    "    remote.adapt_own()\n"
    "    sys.modules['rfaas_remote'] = remote\n"
    "    files = {file for m in list(sys.modules.values()) for file in (getattr(m, '__file__', None), getattr(m, '__cached__', None))}\n"
    "    for path in [*sys.path, *(mapped() - before), *(file for file in files if isinstance(file, str))]:\n"
    "        check(path)\n"
    "    threads = len(os.listdir('/proc/self/task'))\n"
    "    if threads != 1:\n"
    "        raise RuntimeError(f'the modules have started {threads - 1} threads, which workers would not have')\n"
    "    import gc\n"
    "    gc.collect()\n"
    "    gc.freeze()\n"
    "try:\n"
    "    preload()\n"
    "except BaseException as e:\n"
    "    failed = str(e) or type(e).__name__\n"
    "if refused:\n"
    "    failed = refused[0]\n";

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

/* Gives up the effective rights, so that a module cannot do damage by mistake. This does not confine modules: the zygote needs the rights
 * for the sandboxes of workers, so the permitted ones stay, and a module's code is still in the process when give_back returns them. Returns
 * 0 or an errno. */
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

/* Fails if others than root can change what an absolute path names: the file, or the directory in which it could be created, and all
 * directories and symbolic links that lead there. Write permission of a group counts, also because it is the mask of access control lists. */
static bool only_root_changes(const char *path, int links, dp_error *err) {
    char at[PATH_MAX] = "/", target[PATH_MAX], next[PATH_MAX];
    if (*path != '/' || strlen(path) >= sizeof at || links > LINKS_MAX)
        return dp_fail(err, DP_INVALID, 0, "%.200s is not an absolute path, is too long, or has too many symbolic links", path), false;
    for (const char *rest = path;;) {
        struct stat st;
        if (lstat(at, &st))
            return errno == ENOENT || errno == ENOTDIR || (dp_fail(err, DP_INVALID, errno, "%s", at), false);
        if (S_ISLNK(st.st_mode)) {
            ssize_t n = readlink(at, target, sizeof target - 1);
            if (n <= 0)
                return dp_fail(err, DP_INVALID, errno, "%s", at), false;
            target[n] = 0;
            size_t dir = *target == '/' ? 0 : (size_t)(strrchr(at, '/') - at) + 1;
            if (snprintf(next, sizeof next, "%.*s%s%s", (int)dir, at, target, rest) >= (int)sizeof next)
                return dp_fail(err, DP_INVALID, ENAMETOOLONG, "%s", at), false;
            return only_root_changes(next, links + 1, err);
        }
        if (st.st_uid || st.st_mode & 022)
            return dp_fail(err, DP_INVALID, 0, "%s can be changed by others than root (owner %u, mode %04o)", at, st.st_uid, st.st_mode & 07777), false;
        rest += strspn(rest, "/");
        if (!*rest)
            return true;
        rest += strcspn(rest, "/");
        snprintf(at, sizeof at, "%.*s", (int)(rest - path), path);
    }
}

/* Checks a directory and the files in it. */
static bool only_root_changes_all(const char *directory, dp_error *err) {
    char path[PATH_MAX];
    if (!only_root_changes(directory, 0, err))
        return false;
    DIR *d = opendir(directory);
    if (!d)
        return errno == ENOENT || (dp_fail(err, DP_INVALID, errno, "%s", directory), false);
    bool good = true;
    for (const struct dirent *e; good && (e = readdir(d));)
        if (snprintf(path, sizeof path, "%s/%s", directory, e->d_name) < (int)sizeof path)
            good = only_root_changes(path, 0, err);
    closedir(d);
    return good;
}

/* Checks the files that the start of an interpreter reads before it can check others. python: its path, prefix: that of its installation,
 * which ends in a slash. */
static bool check_start(const char *python, const char *prefix, unsigned minor, dp_error *err) {
    static const char *const lib[] = {"lib", "lib64"}, *const below[] = {"", "/__pycache__", "/encodings", "/encodings/__pycache__"};
    char path[PATH_MAX + 64];
    const char *base = strrchr(python, '/') + 1;
    if (!only_root_changes(python, 0, err))
        return false;
    for (int up = 0; up < 2; up++) {
        snprintf(path, sizeof path, "%.*s%spyvenv.cfg", (int)(base - python), python, up ? "../" : "");
        if (!only_root_changes(path, 0, err))
            return false;
    }
    for (size_t i = 0; i < 2 * 4; i++) {
        snprintf(path, sizeof path, "%s%s/python3.%u%s", prefix, lib[i / 4], minor, below[i % 4]);
        if (!only_root_changes_all(path, err))
            return false;
    }
    return true;
}

/* Finds the libpython of an installation: in its own directories, or else beside the C library. */
static bool find_libpython(const char *prefix, unsigned minor, char path[DP_RUNTIME_PATH_MAX]) {
    Dl_info c;
    char *system = dladdr(dlsym(RTLD_DEFAULT, "gnu_get_libc_version"), &c) ? strdup(c.dli_fname) : NULL;
    char own[2][PATH_MAX + 8];
    snprintf(own[0], sizeof own[0], "%slib", prefix);
    snprintf(own[1], sizeof own[1], "%slib64", prefix);
    const char *const directories[] = {own[0], own[1], system ? dirname(system) : own[0]};
    bool found = false;
    for (int i = 0; i < 3 && !found; i++) {
        snprintf(path, DP_RUNTIME_PATH_MAX, "%s/libpython3.%u.so.1.0", directories[i], minor);
        found = !access(path, F_OK);
    }
    free(system);
    return found;
}

int dp_runtime_check(dp_runtime *r, dp_error *err) {
    char real[PATH_MAX];
    r->root = getuid() == 0 && geteuid() == 0;
    if (!r->python)
        return dp_fail(err, DP_INVALID, 0, "runtime %s: no python", r->name);
    if (!realpath(r->python, real))
        return dp_fail(err, DP_INVALID, errno, "runtime %s: python %s", r->name, r->python);
    char *base = strrchr(real, '/') + 1;
    unsigned minor;
    int end = 0;
    if (sscanf(base, "python3.%u%n", &minor, &end) != 1 || base[end])
        return dp_fail(err, DP_INVALID, 0, "runtime %s: python %s: the file's name is %s, want python3.N", r->name, r->python, base);
    /* Workers see all of DIRECTORY. */
    if (base - real < 6 || strncmp(base - 5, "/bin/", 5))
        return dp_fail(err, DP_INVALID, 0, "runtime %s: python %s: the file is %s, want DIRECTORY/bin/python3.%u", r->name, r->python, real, minor);
    base[-4] = 0; /* real is now the prefix, with a slash */
    dp_error why = {0};
    bool good = !r->root || check_start(r->python, real, minor, &why);
    if (good && !find_libpython(real, minor, r->library))
        good = (dp_fail(&why, DP_INVALID, 0, "python %s: its library is not there (Debian: libpython3.%u)", r->python, minor), false);
    good = good && (!r->root || only_root_changes(r->library, 0, &why));
    for (int i = 0; i < r->n_paths && good && r->root; i++)
        good = only_root_changes(r->paths[i], 0, &why);
    return good ? DP_OK : dp_fail(err, DP_INVALID, 0, "runtime %s: %s", r->name, why.msg);
}

static bool put_list(const char *name, const char *const *items, int n) {
    char list[LIST_MAX] = "";
    size_t at = 0;
    for (int i = 0; i < n && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s\n", items[i]);
    return at < sizeof list && !setenv(name, list, 1);
}

/* The function only_root_changes of preload_code: returns "", or why others than root can change a path. The layout of PyMethodDef is part of
 * Python's stable ABI. */
static const char *(*as_text)(void *);
static void *(*new_text)(const char *);

static void *check_path(void *module, void *path) {
    (void)module;
    const char *name = as_text(path);
    dp_error err = {0};
    return name ? new_text(only_root_changes(name, 0, &err) ? "" : err.msg) : NULL;
}

static struct {
    const char *name;
    void *(*function)(void *, void *);
    int flags;
    const char *doc;
} check_method = {"only_root_changes", check_path, 8 /* METH_O */, NULL};

static const char lacks[] = "libpython lacks functions that are needed";

/* Runs the code in __main__. Returns NULL, or why it has failed. */
static const char *run_preload(void *library) {
    int (*run)(const char *, void *) = (int (*)(const char *, void *))dlsym(library, "PyRun_SimpleStringFlags");
    void *(*import)(const char *) = (void *(*)(const char *))dlsym(library, "PyImport_AddModule");
    void *(*get)(void *, const char *) = (void *(*)(void *, const char *))dlsym(library, "PyObject_GetAttrString");
    const char *(*text)(void *) = (const char *(*)(void *))dlsym(library, "PyUnicode_AsUTF8");
    int (*set)(void *, const char *, void *) = (int (*)(void *, const char *, void *))dlsym(library, "PyObject_SetAttrString");
    void *(*function)(void *, void *, void *) = (void *(*)(void *, void *, void *))dlsym(library, "PyCFunction_NewEx");
    void *(*save)(void) = (void *(*)(void))dlsym(library, "PyEval_SaveThread");
    as_text = text;
    new_text = (void *(*)(const char *))dlsym(library, "PyUnicode_DecodeFSDefault");
    if (!run || !import || !get || !text || !set || !function || !save || !new_text)
        return lacks;
    void *main = import("__main__"), *check = function(&check_method, NULL, NULL), *source = new_text(dp_remote_source);
    if (!main || !check || !source || set(main, "only_root_changes", check) || set(main, "remote_source", source))
        return "no memory";
    void *failed = run(preload_code, NULL) ? NULL : get(main, "failed");
    const char *why = failed ? text(failed) : "see the traceback";
    save(); /* the worker takes the interpreter's lock, also on another thread */
    return why && !*why ? NULL : why;
}

static const char *run_python(void *library, const dp_runtime *r) {
    wchar_t *(*decode)(const char *, size_t *) = (wchar_t * (*)(const char *, size_t *)) dlsym(library, "Py_DecodeLocale");
    void (*set_program)(const wchar_t *) = (void (*)(const wchar_t *))dlsym(library, "Py_SetProgramName");
    void (*initialize)(int) = (void (*)(int))dlsym(library, "Py_InitializeEx");
    int *no_site = dlsym(library, "Py_NoSiteFlag");
    wchar_t *program = decode ? decode(r->python, NULL) : NULL; /* Python keeps it */
    if (!program || !set_program || !initialize || !no_site)
        return lacks;
    set_program(program);
    *no_site = 1; /* preload_code imports it, after its checks */
    initialize(0); /* without signal handlers. If there is no standard library, it prints why and ends the process */
    return run_preload(library);
}

/* Removes Python's variables: the setting alone says where the runtime's modules are. */
static void clear_environment(void) {
    for (char **v = environ; *v;) {
        char name[256];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(*v, "="), *v);
        if (strncmp(name, "PYTHON", 6) || unsetenv(name))
            v++;
        else
            v = environ;
    }
}

int dp_runtime_start(const dp_runtime *r, dp_error *err) {
    if (!put_list("RFAAS_RUNTIME_PATHS", r->paths, r->n_paths) || !put_list("RFAAS_RUNTIME_PRELOAD", r->preload, r->n_preload) ||
        setenv("RFAAS_RUNTIME_ROOT", r->root ? "1" : "", 1))
        return dp_fail(err, DP_INVALID, 0, "runtime %s: the lists of modules and paths have more than %d bytes", r->name, LIST_MAX);
    clear_environment();
    setenv("RFAAS_RUNTIME", r->name, 1);
    setenv("PYTHONDONTWRITEBYTECODE", "1", 1);
    setenv("PYTHONNOUSERSITE", "1", 1);
    setenv("OPENBLAS_NUM_THREADS", "1", 1); /* no thread survives the clone of a worker, which may start more */
    setenv("OMP_NUM_THREADS", "1", 1);
    rights before;
    int e = drop(&before);
    if (e)
        return dp_fail(err, DP_FATAL, e, "runtime %s: give up rights", r->name);
    /* Its symbols become global, because most extension modules are not linked with it. */
    void *library = dlopen(r->library, RTLD_NOW | RTLD_GLOBAL);
    const char *failed = library ? run_python(library, r) : dlerror();
    if (failed)
        return dp_fail(err, DP_INVALID, 0, "runtime %s: %s", r->name, failed);
    e = give_back(&before);
    return e ? dp_fail(err, DP_FATAL, e, "runtime %s: regain rights", r->name) : DP_OK;
}
