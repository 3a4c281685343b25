/* Functions in the calling process, for leases with RFAAS_LEASE_LOCAL that have no executor: the same library, opened by
 * dlopen, called on the caller's thread. */
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "rfaas_api_call.h"

typedef uint32_t native(void *args, uint32_t size, void *res);

struct rfaas_local {
    void *handle;
    ElfW(Addr) base; /* where the library is */
    uint64_t limit;  /* bytes of a payload or a result */
    uint8_t *in, *out; /* limit each: functions may write to their arguments, and more to a result than is wanted */
    uint64_t mapped;
};

static void *open_bytes(const void *data, size_t size) {
    char path[64];
    void *handle = NULL;
    int fd = memfd_create("rfaas-library", MFD_CLOEXEC);
    size_t at = 0;
    while (fd >= 0 && at < size) {
        ssize_t n = write(fd, (const char *)data + at, size - at);
        if (n < 0 && errno != EINTR)
            break;
        at += n > 0 ? (size_t)n : 0;
    }
    if (at == size) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    if (fd >= 0)
        close(fd);
    return handle;
}

int rfaas_api_local_load(rfaas_lease *l) {
    static const char op[] = "lease";
    const rfaas_lease_options *o = &l->options;
    rfaas_local *c = calloc(1, sizeof *c);
    if (!c)
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op);
    dlerror();
    /* Without a slash dlopen would search its own directories. */
    char *path = NULL;
    if (o->library && !strchr(o->library, '/') && asprintf(&path, "./%s", o->library) < 0)
        path = NULL;
    c->handle = o->library ? dlopen(path ? path : o->library, RTLD_NOW | RTLD_LOCAL) : open_bytes(o->library_data, o->library_size);
    free(path);
    struct link_map *map;
    if (!c->handle || dlinfo(c->handle, RTLD_DI_LINKMAP, &map)) {
        const char *why = dlerror();
        int status = rfaas_api_fail(RFAAS_BAD_LIBRARY, 0, "%s: it cannot be loaded into this process, as RFAAS_LEASE_LOCAL wants: %s",
                                    op, why ? why : strerror(errno));
        free(c);
        return status;
    }
    c->base = map->l_addr;
    l->local = c;
    return RFAAS_OK;
}

void rfaas_api_local_free(rfaas_lease *l) {
    rfaas_local *c = l->local;
    l->local = NULL;
    if (!c)
        return;
    if (c->in)
        munmap(c->in, c->mapped);
    dlclose(c->handle);
    free(c);
}

/* A function of the library itself, not of those that it is linked with. NULL: there is none. */
static native *find(const rfaas_local *c, const char *name) {
    struct link_map *map;
    Dl_info info;
    void *at = dlsym(c->handle, name);
    if (!at || !dladdr1(at, &info, (void **)&map, RTLD_DL_LINKMAP) || map->l_addr != c->base)
        return NULL;
    native *f;
    memcpy(&f, &at, sizeof f);
    return f;
}

int rfaas_api_local_open(rfaas_lease *l) {
    rfaas_home *h = rfaas_api_home_new(l);
    if (!h)
        return rfaas_api_fail(RFAAS_FATAL, 0, "lease: out of memory");
    rfaas_api_home_free(l, l->home);
    h->cfg = (dp_channel_config){.depth = l->options.depth, .eager = l->options.eager, .bulk = l->options.bulk};
    snprintf(h->provider, sizeof h->provider, "local");
    gethostname(h->node, sizeof h->node - 1);
    l->home = h;
    l->leaving = LEAVING_LOCAL;
    return RFAAS_OK;
}

int rfaas_api_local_function(rfaas_lease *l, const char *name) {
    if (!find(l->local, name))
        return rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "find function: \"%.128s\" is not in the library", name);
    char **more = realloc(l->functions, (l->n_functions + 1) * sizeof *more), *copy = strdup(name);
    if (more)
        l->functions = more;
    if (!more || !copy) {
        free(copy);
        return rfaas_api_fail(RFAAS_FATAL, 0, "find function: out of memory");
    }
    l->functions[l->n_functions++] = copy;
    return RFAAS_OK;
}

static int make_room(rfaas_local *c, const dp_channel_config *cfg) {
    uint64_t limit = cfg->bulk > cfg->eager ? cfg->bulk : cfg->eager, page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t whole = (limit + page - 1) & ~(page - 1);
    void *at = mmap(NULL, 2 * whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return rfaas_api_fail(RFAAS_FATAL, 0, "invoke: no memory for %llu bytes", (unsigned long long)(2 * whole));
    c->in = at;
    c->out = c->in + whole;
    c->mapped = 2 * whole;
    c->limit = limit;
    return RFAAS_OK;
}

int rfaas_api_here(rfaas_lease *l, const char *op, rfaas_function fn, const void *in, uint32_t in_size, void *out,
                   uint32_t capacity, uint32_t *got) {
    rfaas_local *c = l->local;
    native *f = find(c, l->functions[fn]);
    int status;
    if (!f)
        return rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "%s %s: not in the library as this process has it", op, l->functions[fn]);
    if (!c->in && (status = make_room(c, &l->cfg)))
        return status;
    if (in_size > c->limit)
        return rfaas_api_too_large(l, op, fn, in_size, capacity);
    if (in_size)
        memcpy(c->in, in, in_size);
    uint32_t size = f(c->in, in_size, c->out);
    *got = size;
    l->past.local++;
    if (size > capacity)
        return rfaas_api_fail(RFAAS_RESULT_TOO_LARGE, RFAAS_MAYBE_EXECUTED, "%s %s in this process: %s", op, l->functions[fn],
                              rfaas_strerror(RFAAS_RESULT_TOO_LARGE));
    if (size)
        memcpy(out, c->out, size);
    return RFAAS_OK;
}
