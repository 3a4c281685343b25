/* Seeds of the worker, without an executor: a maker and children that start from its seed are clones of this process, as workers are of
 * the zygote.
 *
 *   seed_test LIBRARY                    the answers of three queries are the same in the maker and in three children
 *   seed_test LIBRARY WAY                the seed is refused, because setup was told WAY; prints why
 *   seed_test LIBRARY "" APART [APART]   libraries that stay each process's own */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "heap.h"
#include "place.h"
#include "seed.h"

#define HEAP (128ull << 20)
enum { QUERIES = 3, CHILDREN = 3 };

typedef uint32_t function(void *, uint32_t, void *);
static char answers[1 + CHILDREN][QUERIES][4096];
static char (*shared)[QUERIES][4096];

static void must(int st, const dp_error *err) {
    if (st) {
        puts(err->msg);
        fflush(stdout);
        _exit(st == DP_UNSUPPORTED ? 3 : 4);
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void live(int fd, char **argv, int n_apart, int child) {
    const char *path = argv[1], *way = argv[2];
    static const char *apart[8] = {"libgcc_s.so.1"};
    dp_error err = {0};
    static dp_seed s;
    for (int i = 0; i < child; i++) /* no two workers have the same history */
        mmap(NULL, 4096ul << (4 * i), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < n_apart && i < 7; i++)
        apart[1 + i] = argv[3 + i];
    double began = now();
    must(dp_seed_begin(&s, fd, HEAP, child == 0, apart, 1 + (uint32_t)n_apart, &err), &err);
    dp_heap_outside = 0;
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    dp_heap_outside = 1;
    if (!lib) {
        puts(dlerror());
        exit(4);
    }
    dp_seed_loaded(&s);
    function *setup, *query;
    *(void **)&setup = dlsym(lib, "setup");
    *(void **)&query = dlsym(lib, "query");
    double loaded = now();
    if (child) {
        must(dp_seed_apply(&s, &err), &err);
    } else {
        dp_heap_outside = 0;
        setup((void *)way, way ? (uint32_t)strlen(way) + 1 : 0, NULL);
        dp_heap_outside = 1;
        loaded = now();
        must(dp_seed_capture(&s, &err), &err);
    }
    double done = now();
    dp_heap_outside = 0;
    for (int q = 0; q < QUERIES; q++)
        query(NULL, 0, shared[child][q]);
    printf("%s: loaded in %.2f ms, %s in %.3f ms: %s\n", child ? "child" : "maker", loaded - began, child ? "applied" : "captured", done - loaded,
           shared[child][0]);
    fflush(stdout);
    _exit(0);
}

int main(int argc, char **argv) {
    dp_error err = {0};
    if (argc < 2)
        return 2;
    int fd = memfd_create("seed", MFD_CLOEXEC);
    must(dp_place_reserve(&err), &err);
    shared = mmap(NULL, sizeof answers, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (fd < 0 || ftruncate(fd, (off_t)dp_seed_file_size(HEAP)) || shared == MAP_FAILED)
        return 4;
    for (int child = 0; child <= CHILDREN; child++) {
        fflush(stdout);
        pid_t pid = fork();
        if (!pid) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            live(fd, argv, argc > 3 ? argc - 3 : 0, child);
        }
        int status;
        if (waitpid(pid, &status, 0) != pid || status)
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        for (int q = 0; q < QUERIES && child; q++)
            if (strcmp(shared[0][q], shared[child][q])) {
                printf("child %d, query %d: \"%s\", the maker: \"%s\"\n", child, q, shared[child][q], shared[0][q]);
                return 1;
            }
    }
    return 0;
}
