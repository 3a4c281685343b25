#include "apart.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* How their file names begin. */
static const char *const names[] = {"libgomp.so", "libomp.so", "libiomp5.so", "libopenblas"};

static bool stays_apart(const char *path) {
    const char *slash = strrchr(path, '/');
    for (size_t i = 0; slash && i < sizeof names / sizeof *names; i++)
        if (!strncmp(slash + 1, names[i], strlen(names[i])))
            return true;
    return false;
}

static int add(struct dl_phdr_info *i, size_t size, void *arg) {
    dp_apart *list = arg;
    (void)size;
    if (stays_apart(i->dlpi_name) && strlen(i->dlpi_name) < DP_APART_PATH && list->n < DP_APART_MAX)
        strcpy(list->path[list->n++], i->dlpi_name);
    return 0;
}

/* The list is written last: a process that ends earlier has written none. */
_Noreturn static void list_and_exit(bool (*load)(void *arg), void *arg, int to) {
    dp_apart list = {0};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int null = open("/dev/null", O_WRONLY);
    if (null >= 0) { /* constructors print once, in the process that keeps the library */
        dup2(null, STDOUT_FILENO);
        dup2(null, STDERR_FILENO);
    }
    if (load(arg))
        dl_iterate_phdr(add, &list);
    ssize_t n = write(to, &list, sizeof list);
    _exit(n != sizeof list);
}

int dp_apart_find(bool (*load)(void *arg), void *arg, dp_apart *found, dp_error *err) {
    int p[2];
    memset(found, 0, sizeof *found);
    if (pipe2(p, O_CLOEXEC))
        return dp_fail(err, DP_UNSUPPORTED, errno, "seed: make a pipe");
    pid_t pid = fork();
    if (pid == 0)
        list_and_exit(load, arg, p[1]);
    int e = errno;
    close(p[1]);
    ssize_t n = -1;
    if (pid > 0) {
        do
            n = read(p[0], found, sizeof *found);
        while (n < 0 && errno == EINTR);
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
    close(p[0]);
    if (pid < 0)
        return dp_fail(err, DP_UNSUPPORTED, e, "seed: start a process that lists the library's dependencies");
    if (n != sizeof *found || !dp_apart_valid(found))
        memset(found, 0, sizeof *found);
    return DP_OK;
}

bool dp_apart_valid(const dp_apart *list) {
    if (list->n > DP_APART_MAX)
        return false;
    for (uint32_t i = 0; i < list->n; i++)
        if (!memchr(list->path[i], 0, DP_APART_PATH) || !stays_apart(list->path[i]))
            return false;
    return true;
}

static int load_one(const char *path, dp_error *err) {
    if (dlopen(path, RTLD_NOW | RTLD_LOCAL))
        return DP_OK;
    const char *why = dlerror();
    return dp_fail(err, DP_UNSUPPORTED, 0, "seed: load %.60s: %.80s", path, why ? why : "unknown error");
}

#define BLAS_THREADS "OPENBLAS_NUM_THREADS"
static char *blas_threads; /* what the variable was; NULL: not set */

int dp_apart_load(const dp_apart *list, dp_error *err) {
    int st = load_one("libgcc_s.so.1", err);
    const char *was = getenv(BLAS_THREADS);
    blas_threads = was ? strdup(was) : NULL;
    for (uint32_t i = 0; i < list->n && !st; i++) {
        if (strstr(list->path[i], "libopenblas")) /* its threads would take part in the seed's heap */
            setenv(BLAS_THREADS, "1", 1);
        st = load_one(list->path[i], err);
    }
    return st;
}

void dp_apart_unseeded(const dp_apart *list) {
    if (blas_threads)
        setenv(BLAS_THREADS, blas_threads, 1);
    else
        unsetenv(BLAS_THREADS);
    int n = blas_threads ? atoi(blas_threads) : 0;
    for (uint32_t i = 0; i < list->n; i++) {
        void *l = dlopen(list->path[i], RTLD_NOW | RTLD_NOLOAD);
        int (*processors)(void) = NULL;
        void (*set)(int) = NULL;
        if (l) {
            *(void **)&processors = dlsym(l, "openblas_get_num_procs");
            *(void **)&set = dlsym(l, "openblas_set_num_threads");
        }
        if (processors && set)
            set(n > 0 ? n : processors());
        if (l)
            dlclose(l);
    }
}

void dp_apart_pause(const dp_apart *list) {
    enum { HARD = 2 }; /* omp_pause_hard */
    for (uint32_t i = 0; i < list->n; i++) {
        void *l = dlopen(list->path[i], RTLD_NOW | RTLD_NOLOAD);
        int (*pause_all)(int) = NULL;
        if (l)
            *(void **)&pause_all = dlsym(l, "omp_pause_resource_all");
        if (pause_all)
            pause_all(HARD);
        if (l)
            dlclose(l);
    }
}
