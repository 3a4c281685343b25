#include "local_library.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct rfaas_local {
    void *handle;
    ElfW(Addr) base;   /* where the library is */
    uint8_t *in, *out; /* half of `mapped` each; NULL: none */
    uint64_t mapped;
};

static _Thread_local rfaas_local_failure *failing; /* of the call that runs on this thread */

/* rfaas_fail_code for functions in this process. */
static uint32_t fail_here(int32_t code, const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    if (failing) {
        failing->failed = true;
        failing->code = code;
        vsnprintf(failing->text, sizeof failing->text, format, ap);
    } else {
        vfprintf(stderr, format, ap);
    }
    va_end(ap);
    return 0;
}

static void *open_path(const char *path) {
    /* Without a slash dlopen would search its own directories. */
    char *here = NULL;
    if (!strchr(path, '/') && asprintf(&here, "./%s", path) < 0)
        return NULL;
    void *handle = dlopen(here ? here : path, RTLD_NOW | RTLD_LOCAL);
    free(here);
    return handle;
}

static void *open_bytes(const void *data, uint64_t size) {
    char path[64];
    void *handle = NULL;
    int fd = memfd_create("rfaas-library", MFD_CLOEXEC);
    uint64_t at = 0;
    while (fd >= 0 && at < size) {
        ssize_t n = write(fd, (const char *)data + at, size - at);
        if (n < 0 && errno != EINTR)
            break;
        at += n > 0 ? (uint64_t)n : 0;
    }
    if (fd >= 0 && at == size) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    if (fd >= 0)
        close(fd);
    return handle;
}

int rfaas_local_open(const char *path, const void *data, uint64_t size, rfaas_local **out, dp_error *err) {
    rfaas_local *l = calloc(1, sizeof *l);
    struct link_map *map;
    if (!l)
        return dp_fail(err, DP_FATAL, ENOMEM, "open the library");
    dlerror();
    l->handle = path ? open_path(path) : open_bytes(data, size);
    if (!l->handle || dlinfo(l->handle, RTLD_DI_LINKMAP, &map)) {
        const char *why = dlerror();
        int status = dp_fail(err, DP_BAD_LIBRARY, 0, "%s", why ? why : strerror(errno));
        free(l);
        return status;
    }
    l->base = map->l_addr;
    uint32_t (**fail)(int32_t, const char *, ...) = dlsym(l->handle, "rfaas_fail_elsewhere");
    if (fail)
        *fail = fail_here;
    *out = l;
    return DP_OK;
}

void rfaas_local_finders(rfaas_local *l, const void *(*table)(const char *name, size_t *size), const char *(*path)(const char *name)) {
    const void *(**tables)(const char *, size_t *) = dlsym(l->handle, "rfaas_table_elsewhere");
    const char *(**paths)(const char *) = dlsym(l->handle, "rfaas_bundle_path_elsewhere");
    if (tables)
        *tables = table;
    if (paths)
        *paths = path;
}

#define KEPT (16ull << 20) /* bytes of a mapping that the next call reuses */

static void let_go(rfaas_local *l) {
    if (l->in)
        munmap(l->in, l->mapped);
    l->in = l->out = NULL;
    l->mapped = 0;
}

void rfaas_local_close(rfaas_local *l) {
    if (!l)
        return;
    let_go(l);
    dlclose(l->handle);
    free(l);
}

rfaas_local_fn *rfaas_local_find(const rfaas_local *l, const char *name) {
    struct link_map *map;
    Dl_info info;
    void *at = dlsym(l->handle, name);
    if (!at || !dladdr1(at, &info, (void **)&map, RTLD_DL_LINKMAP) || map->l_addr != l->base)
        return NULL;
    rfaas_local_fn *f; /* POSIX lets a data pointer from dlsym become a function; ISO C only through memory */
    memcpy(&f, &at, sizeof f);
    return f;
}

/* Makes room for `bytes` of payload and as many of the result. */
static bool make_room(rfaas_local *l, uint64_t bytes) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) & ~(page - 1);
    if (l->in && 2 * whole <= l->mapped)
        return true;
    let_go(l);
    void *at = mmap(NULL, 2 * whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return false;
    l->in = at;
    l->out = l->in + whole;
    l->mapped = 2 * whole;
    return true;
}

/* Runs f, and then `then` on its result unless that is NULL. Returns the size of the last result, and in *res its place. */
static uint32_t run(rfaas_local *l, rfaas_local_fn *f, rfaas_local_fn *then, uint64_t limit, uint32_t size, uint8_t **res,
                    rfaas_local_failure *failure) {
    failure->failed = failure->second = false;
    *res = l->out;
    size = f(l->in, size, l->out);
    if (!then || failure->failed)
        return size;
    if (size > limit) {
        fail_here(0, "its result has %u bytes, and in this lease a chain passes on at most %llu: lease a larger bulk area", size,
                  (unsigned long long)limit);
        return 0;
    }
    failure->second = true;
    *res = l->in; /* the payload is not needed any more */
    return then(l->out, size, l->in);
}

int rfaas_local_call(rfaas_local *l, rfaas_local_fn *f, rfaas_local_fn *then, uint64_t limit, const dp_pieces *in, uint32_t in_size,
                     const dp_pieces *out, uint32_t capacity, uint32_t *got, rfaas_local_failure *failure) {
    uint64_t most = in_size > capacity ? in_size : capacity;
    if (!make_room(l, most > limit ? most : limit))
        return DP_FATAL;
    dp_gather(l->in, in, in_size);
    rfaas_local_failure *before = failing; /* a function may use a lease of its own */
    failing = failure;
    uint8_t *res;
    uint32_t size = run(l, f, then, limit, in_size, &res, failure);
    failing = before;
    *got = size;
    int status = failure->failed ? DP_FUNCTION_FAILED : size > capacity ? DP_RESULT_TOO_LARGE : DP_OK;
    if (status == DP_OK)
        dp_scatter(out, res, size);
    if (most > limit && l->mapped > 2 * KEPT)
        let_go(l);
    return status;
}
