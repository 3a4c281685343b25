#include "seed.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined __x86_64__
#include <cpuid.h>
#endif

#include "heap.h"
#include "mapped.h"
#include "place.h"
#include "resume.h"
#include "state.h"

#ifndef MADV_POPULATE_READ /* older headers */
#define MADV_POPULATE_READ 22
#endif

#define PAGE 4096ull
#define UP(x) (((x) + PAGE - 1) & ~(PAGE - 1))

uint64_t dp_seed_file_size(uint64_t heap_size) { return heap_size + UP(sizeof(dp_seed_header)); }

static int map_arena(const dp_seed *s, bool shared, bool of_file, dp_error *err) {
    int flags = MAP_FIXED | MAP_NORESERVE | (shared ? MAP_SHARED : MAP_PRIVATE) | (of_file ? 0 : MAP_ANONYMOUS);
    void *at = (void *)DP_HEAP_AT;
    if (mmap(at, s->heap_size, PROT_READ | PROT_WRITE, flags, of_file ? s->fd : -1, 0) == at)
        return DP_OK;
    return dp_fail(err, DP_FATAL, errno, "seed: map %llu MiB for the heap", (unsigned long long)(s->heap_size >> 20));
}

/* Returns the end of the pages that are in memory without a gap from an offset of the arena on. All of them have memory in the file. lseek takes 15 to 65 ns
 * for each page, mincore takes 1 ns. */
static uint64_t resident_end(uint64_t from, uint64_t limit) {
    unsigned char in_memory[1024];
    for (uint64_t most = 16;; most *= 2) { /* mincore is slow for pages without memory */
        uint64_t n = (limit - from) / PAGE, k = 0;
        most = most < sizeof in_memory ? most : sizeof in_memory;
        n = n < most ? n : most;
        if (n == 0 || mincore((void *)(uintptr_t)(DP_HEAP_AT + from), n * PAGE, in_memory))
            return from;
        while (k < n && in_memory[k] & 1)
            k++;
        from += k * PAGE;
        if (k < n)
            return from;
    }
}

/* Finds the next bytes of the file at or after *from and before `limit` that have memory, with gaps of at most `gap` bytes. Returns their end, 0: there are
 * none. */
static uint64_t next_extent(const dp_seed *s, uint64_t *from, uint64_t limit, uint64_t gap) {
    off_t data = lseek(s->fd, (off_t)*from, SEEK_DATA), hole;
    if (data < 0 || (uint64_t)data >= limit)
        return 0;
    *from = (uint64_t)data;
    do
        hole = lseek(s->fd, limit <= s->heap_size ? (off_t)resident_end((uint64_t)data, limit) : data, SEEK_HOLE);
    while (hole >= 0 && (uint64_t)hole < limit && (data = lseek(s->fd, hole, SEEK_DATA)) >= 0 && (uint64_t)data < limit && (uint64_t)(data - hole) <= gap);
    return hole < 0 || (uint64_t)hole > limit ? limit : (uint64_t)hole;
}

/* Lists what has memory between two offsets of the file, with gaps that make the list short enough. Returns the number of extents. */
static uint32_t find_extents(const dp_seed *s, uint64_t at, uint64_t limit, dp_seed_extent *list) {
    uint64_t gap = 0, from, end;
    uint32_t n = DP_SEED_EXTENTS + 1;
    for (; n > DP_SEED_EXTENTS; gap = gap ? 4 * gap : 16 * PAGE)
        for (n = 0, from = at; n <= DP_SEED_EXTENTS && (end = next_extent(s, &from, limit, gap)); from = end, n++)
            if (n < DP_SEED_EXTENTS)
                list[n] = (dp_seed_extent){from, end};
    return n;
}

/* Maps `size` bytes of the seed privately at an address that is anonymous memory of zeros. What the list does not have stays anonymous memory: to read a
 * hole of a memory file allocates a page in it, which would stay. */
static int lay(const dp_seed *s, uint64_t address, uint64_t size, uint64_t at, const dp_seed_extent *list, uint32_t n, dp_error *err) {
    for (uint32_t i = 0; i < n && i < DP_SEED_EXTENTS; i++) {
        uint64_t from = list[i].from & ~(PAGE - 1), end = list[i].to & ~(PAGE - 1);
        from = from < at ? at : from;
        end = end > at + size ? at + size : end;
        void *to = (void *)(uintptr_t)(address + from - at);
        if (from < end && mmap(to, end - from, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_NORESERVE, s->fd, (off_t)from) == MAP_FAILED)
            return dp_fail(err, DP_FATAL, errno, "seed: map %llu KiB of the file", (unsigned long long)((end - from) >> 10));
    }
    return DP_OK;
}

/* Maps the seed's heap. */
static int lay_arena(const dp_seed *s, const dp_seed_header *h, dp_error *err) {
    int st = map_arena(s, false, false, err);
    return st ? st : lay(s, DP_HEAP_AT, s->heap_size, 0, h->extents, h->n_extents, err);
}

int dp_seed_read(int fd, void *to, uint64_t size, uint64_t at, dp_error *err) {
    for (uint64_t done = 0; done < size;) {
        ssize_t n = pread(fd, (char *)to + done, size - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return dp_fail(err, DP_FATAL, n < 0 ? errno : 0, "seed: the file is too short");
        done += (uint64_t)n;
    }
    return DP_OK;
}

enum { HELD = 32 }; /* those that pthread_getspecific finds fastest */

static pthread_key_t held[HELD];
static int n_held;

static uint64_t features[4]; /* of the processor */

static void find_features(void) {
    features[0] = getauxval(AT_HWCAP);
    features[1] = getauxval(AT_HWCAP2);
#if defined __x86_64__
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d))
        features[2] = (uint64_t)c << 32 | d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d))
        features[3] = (uint64_t)c << 32 | b;
#endif
}

void dp_seed_prepare(void) {
    dp_error ignored; /* dp_seed_begin tries again and returns the error */
    dp_heap_load(&ignored);
    find_features();
    while (n_held < HELD && !pthread_key_create(&held[n_held], NULL))
        n_held++;
}

void dp_seed_free_keys(void) {
    while (n_held > 0)
        pthread_key_delete(held[--n_held]);
}

static int begin(dp_seed *s, dp_error *err) {
    dp_seed_free_keys();
    int st = map_arena(s, s->makes, s->makes, err);
    if (!st)
        st = dp_place_begin(err);
    if (st)
        return st;
    dp_modules_list(&s->modules, UINT32_MAX);
    st = dp_apart_load(&s->apart, err);
    if (!st) {
        if (s->makes)
            dp_state_note(&s->was);
        dp_modules_list(&s->modules, DP_MODULES_MAX);
        s->before = s->modules.n;
        st = dp_heap_open(s->heap_size, err);
    }
    if (st) {
        dp_place_end();
    } else {
        dp_heap_outside = 1;
        dp_resume_hold();
    }
    return st;
}

static int prepare(dp_seed *s, int fd, uint64_t heap_size, dp_error *err) {
    s->fd = fd;
    s->heap_size = heap_size;
    if (heap_size < 2 * DP_HEAP_UNIT || heap_size % DP_HEAP_UNIT || heap_size > DP_HEAP_MOST)
        return dp_fail(err, DP_INVALID, 0, "seed: a heap of %llu bytes, want a multiple of %llu, and at least twice that",
                       (unsigned long long)heap_size, DP_HEAP_UNIT);
    struct stat sb;
    if (fstat(fd, &sb) || (uint64_t)sb.st_size < dp_seed_file_size(heap_size))
        return dp_fail(err, DP_INVALID, 0, "seed: the file is too short for a heap of %llu bytes", (unsigned long long)heap_size);
    return DP_OK;
}

int dp_seed_make_begin(dp_seed *s, int fd, uint64_t heap_size, const dp_apart *apart, dp_error *err) {
    int st = prepare(s, fd, heap_size, err);
    if (st)
        return st;
    s->apart = *apart;
    s->makes = true;
    return begin(s, err);
}

int dp_seed_begin(dp_seed *s, int fd, uint64_t heap_size, dp_error *err) {
    int st = prepare(s, fd, heap_size, err);
    if (!st)
        st = dp_seed_read(fd, &s->apart, sizeof s->apart, heap_size + offsetof(dp_seed_header, apart), err);
    if (!st && !dp_apart_valid(&s->apart))
        st = dp_fail(err, DP_UNSUPPORTED, 0, "seed: its list of libraries is damaged");
    return st ? st : begin(s, err);
}

/* A key that does not exist has no value, and cannot be given one. */
static bool key_exists(unsigned k) { return !pthread_setspecific(k, pthread_getspecific(k)); }

void dp_seed_loaded(dp_seed *s) {
    dp_modules_touch_tls(&s->modules, s->before);
    dp_heap_linked();
    dp_place_end();
    if (!s->makes)
        return;
    dp_state_loaded(&s->was);
    for (unsigned k = 0; k < DP_SEED_KEYS; k++)
        s->keys[k / 64] |= (uint64_t)key_exists(k) << k % 64;
}

int dp_seed_check_library(const dp_seed *s, dp_error *err) { return dp_state_library(&s->was, err); }

/* ---- comparing ---- */

/* *h is zero. This writes only to those of its pages that get values, because most get none. */
static void fill_header(const dp_seed *s, dp_seed_header *h) {
    h->magic = DP_SEED_MAGIC;
    h->version = DP_SEED_VERSION;
    h->n_modules = s->modules.n;
    h->heap_size = s->heap_size;
    h->thread_pointer = (uintptr_t)__builtin_thread_pointer();
    h->apart = s->apart;
    memcpy(h->processor, features, sizeof features);
    memcpy(h->modules, s->modules.list, s->modules.n * sizeof *h->modules);
}

static bool kernels_own(const dp_module *m) { return !strncmp(m->name, "linux-vdso", 10); }

/* Returns the module at or after *i that must be the same in all workers, NULL: there is none. */
static const dp_module *next_module(const dp_seed_header *h, uint32_t *i) {
    while (*i < h->n_modules && (kernels_own(&h->modules[*i]) || h->modules[*i].own == DP_MODULE_UNRELATED))
        ++*i;
    return *i < h->n_modules ? &h->modules[*i] : NULL;
}

static const char *module_name(const dp_module *m) { return *m->name ? m->name : "the worker program"; }

static int differs(const dp_seed_header *own, const dp_seed_header *seed, dp_error *err) {
    if (seed->magic != DP_SEED_MAGIC || seed->version != DP_SEED_VERSION)
        return dp_fail(err, DP_UNSUPPORTED, 0, "seed: the file is not a seed of this version");
    if (seed->heap_size != own->heap_size)
        return dp_fail(err, DP_UNSUPPORTED, 0, "seed: a heap of %llu bytes, here of %llu", (unsigned long long)seed->heap_size,
                       (unsigned long long)own->heap_size);
    if (memcmp(seed->processor, own->processor, sizeof own->processor))
        return dp_fail(err, DP_UNSUPPORTED, 0, "seed: it was made on a processor with other features");
    if (seed->thread_pointer != own->thread_pointer)
        return dp_fail(err, DP_UNSUPPORTED, 0, "seed: the thread pointer is %#llx, here %#llx", (unsigned long long)seed->thread_pointer,
                       (unsigned long long)own->thread_pointer);
    if (seed->n_modules > DP_MODULES_MAX)
        return dp_fail(err, DP_UNSUPPORTED, 0, "seed: it names %u libraries, want at most %u", seed->n_modules, DP_MODULES_MAX);
    for (uint32_t i = 0, k = 0;; i++, k++) {
        const dp_module *a = next_module(own, &i), *b = next_module(seed, &k);
        if (!a && !b)
            break;
        if (!a || !b)
            return dp_fail(err, DP_UNSUPPORTED, 0, "seed: it was made with%s library %.60s, unlike this worker", a ? "out" : "", a ? a->name : b->name);
        if (memcmp(a->name, b->name, sizeof a->name) || memcmp(a->build, b->build, sizeof a->build))
            return dp_fail(err, DP_UNSUPPORTED, 0, "seed: it was made with another build of %.60s, or with %.60s instead", module_name(a), module_name(b));
        if (a->base != b->base || a->data != b->data || a->data_size != b->data_size || a->own != b->own || a->tls != b->tls ||
            a->tls_size != b->tls_size)
            return dp_fail(err, DP_UNSUPPORTED, 0, "seed: %.60s lies at %#llx, here at %#llx", module_name(a), (unsigned long long)b->base,
                           (unsigned long long)a->base);
    }
    return DP_OK;
}

/* ---- capture ---- */

static int put(int fd, const void *from, uint64_t size, uint64_t at, dp_error *err) {
    for (uint64_t done = 0; done < size;) {
        ssize_t n = pwrite(fd, (const char *)from + done, size - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return dp_fail(err, DP_FATAL, n < 0 ? errno : 0, "seed: write %llu bytes of static data", (unsigned long long)size);
        done += (uint64_t)n;
    }
    return DP_OK;
}

static bool zero_page(const char *p) {
    const uint64_t *word = (const void *)p;
    for (uint32_t i = 0; i < PAGE / sizeof *word; i++)
        if (word[i])
            return false;
    return true;
}

/* Writes whole pages of static data. Pages of zeros stay holes. */
static int put_pages(int fd, uint64_t data, uint64_t size, uint64_t at, dp_error *err) {
    const char *from = (const char *)(uintptr_t)data;
    int st = DP_OK;
    for (uint64_t done = 0, n; done < size && !st; done += n) {
        bool zero = zero_page(from + done);
        for (n = PAGE; done + n < size && zero_page(from + done + n) == zero; n += PAGE)
            ;
        st = zero ? DP_OK : put(fd, from + done, n, at + done, err);
    }
    return st;
}

static bool tls_apart(const dp_module *m) { return m->own == DP_MODULE_OWN && m->tls && !dp_heap_has((const void *)(uintptr_t)m->tls); }

/* Writes the root of rfaas_set_root to the header. It must lie in the arena, because workers of other libraries map nothing else of the seed. */
static int put_root(const dp_seed *s, dp_seed_header *h, dp_error *err) {
    const dp_heap_kept *k = dp_heap_kept_at();
    h->root = (uintptr_t)k->root;
    h->root_size = k->root_size;
    if (!h->root || dp_seed_root_lies(h, s->heap_size))
        return DP_OK;
    return dp_fail(err, DP_UNSUPPORTED, 0, "seed: rfaas_set_root was called with %llu bytes at %p, which are not in memory from malloc or new: copy the root there, and what it "
                                           "points to", (unsigned long long)h->root_size, k->root);
}

int dp_seed_capture(dp_seed *s, dp_error *err) {
    uint32_t loaded = s->modules.n;
    dp_modules_list(&s->modules, s->before);
    if (s->modules.n != loaded)
        return dp_fail(err, DP_UNSUPPORTED, 0, "seed: the init call has loaded %.60s: load it in the library's constructor, or link the library with it",
                       s->modules.n > loaded ? s->modules.list[loaded].name : "a library and closed another");
    for (uint32_t i = s->before; i < s->modules.n; i++)
        if (!strncmp(s->modules.list[i].name, "libpython", 9))
            return dp_fail(err, DP_UNSUPPORTED, 0, "seed: the library uses %.60s, whose state cannot be kept: use the init call without RFAAS_LEASE_SEED", s->modules.list[i].name);
    if (s->modules.more)
        return dp_fail(err, DP_UNSUPPORTED, 0, "seed: the process has %u libraries, and a seed can keep the state of at most %u", s->modules.n + s->modules.more, DP_MODULES_MAX);
    int st = dp_state_compare(&s->was, &s->modules, err);
    static dp_foreign foreign;
    if (!st) {
        dp_foreign_find(&foreign, s->payload, s->payload_size);
        st = dp_state_scan(&foreign, &s->modules, err);
    }
    if (st)
        return st;
    static dp_seed_header h;
    fill_header(s, &h);
    for (uint32_t k = 0; k < DP_SEED_KEYS; k++) {
        const void *value = pthread_getspecific(k);
        h.keys[k] = dp_heap_has(value) ? (uintptr_t)value : 0;
        if (key_exists(k) && !(s->keys[k / 64] >> k % 64 & 1))
            h.made[k / 64] |= 1ull << k % 64;
    }
    uint64_t at = dp_seed_file_size(s->heap_size);
    for (uint32_t i = 0; i < s->modules.n && !st; i++) {
        const dp_module *m = &s->modules.list[i];
        if (m->data_size) {
            st = put_pages(s->fd, m->data, m->data_size, at, err);
            at += m->data_size;
        }
    }
    for (uint32_t i = 0; i < s->modules.n && !st; i++) {
        const dp_module *m = &s->modules.list[i];
        if (tls_apart(m)) {
            st = put(s->fd, (const void *)(uintptr_t)m->tls, m->tls_size, at, err);
            at += m->tls_size;
        }
    }
    h.n_extents = find_extents(s, 0, s->heap_size, h.extents);
    mprotect((void *)DP_HEAP_AT, s->heap_size, PROT_READ | PROT_WRITE); /* the init call may have made pages unreadable; workers get all rights anyway */
    dp_state_scan_heap(&foreign, h.extents, h.n_extents, s->warning, sizeof s->warning);
    if (!st)
        st = put_root(s, &h, err);
    if (!st)
        st = put(s->fd, &h, sizeof h, s->heap_size, err);
    dp_heap_watch_maps(false);
    return st ? st : lay_arena(s, &h, err);
}

/* ---- apply ---- */

/* Maps the seed's data of an object over its own, except the slots of .got.plt. `kept` holds these meanwhile, in libc's heap. */
static int lay_data(const dp_seed *s, const dp_module *m, uint64_t at, char *kept, dp_error *err) {
    void *data = (void *)(uintptr_t)m->data;
    if (m->slots_size)
        memcpy(kept, (const void *)(uintptr_t)m->slots, m->slots_size);
    if (mmap(data, m->data_size, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != data)
        return dp_fail(err, DP_FATAL, errno, "seed: map the data of %.60s", m->name);
    static dp_seed_extent list[DP_SEED_EXTENTS];
    uint32_t n = find_extents(s, at, at + m->data_size, list);
    int st = lay(s, m->data, m->data_size, at, list, n, err);
    if (st)
        return st;
    if (m->slots_size)
        memcpy((void *)(uintptr_t)m->slots, kept, m->slots_size);
    return DP_OK;
}

/* Makes the keys that setup has made, which get the same numbers. Their destructors are in the arena. */
static int make_keys(const dp_seed *s, const dp_seed_header *seed, dp_error *err) {
    static dp_heap_kept kept;
    int st = dp_seed_read(s->fd, &kept, sizeof kept, 0, err);
    for (unsigned k = 0; k < DP_SEED_KEYS && !st; k++) {
        pthread_key_t got;
        if (seed->made[k / 64] >> k % 64 & 1 && (pthread_key_create(&got, kept.destructors[k]) || got != k))
            st = dp_fail(err, DP_UNSUPPORTED, 0, "seed: the thread-specific key %u is in use here", k);
    }
    return st;
}

/* The heap's extents in a worker whose pages are filled on demand. The executor fills those of this process only. A process that is forked would see zeros,
 * so it does not get them, and before a regular fork all pages are fetched. */
static struct {
    const dp_seed_header *of; /* NULL: nothing is filled on demand any more */
    uint64_t heap_size;
} on_demand;

static bool each_extent(int advice) {
    bool ok = true;
    for (uint32_t i = 0; i < on_demand.of->n_extents && i < DP_SEED_EXTENTS; i++) {
        uint64_t from = on_demand.of->extents[i].from & ~(PAGE - 1), end = on_demand.of->extents[i].to & ~(PAGE - 1);
        end = end > on_demand.heap_size ? on_demand.heap_size : end;
        if (from >= end)
            continue;
        void *at = (void *)(uintptr_t)(DP_HEAP_AT + from);
        if (advice == MADV_DOFORK && madvise(at, end - from, MADV_POPULATE_READ))
            ok = false; /* a part is not readable, so a forked process does not get this extent */
        else
            ok = !madvise(at, end - from, advice) && ok;
    }
    return ok;
}

static void before_fork(void) {
    if (on_demand.of && each_extent(MADV_DOFORK))
        on_demand.of = NULL;
}

static int begin_on_demand(const dp_seed *s, const dp_seed_header *h, dp_error *err) {
    on_demand.of = h;
    on_demand.heap_size = s->heap_size;
    if (!each_extent(MADV_DONTFORK))
        return dp_fail(err, DP_FATAL, errno, "seed: keep its heap from forked processes");
    int e = pthread_atfork(before_fork, NULL, NULL);
    if (e)
        return dp_fail(err, DP_FATAL, e, "seed: fetch its heap before a fork");
    return s->laid(s->laid_arg, err);
}

/* Reads what a worker needs of the header, without the unused parts of its lists. */
static int read_header(const dp_seed *s, dp_seed_header *h, dp_error *err) {
    int st = dp_seed_read(s->fd, h, offsetof(dp_seed_header, modules), s->heap_size, err);
    if (!st && h->n_modules <= DP_MODULES_MAX)
        st = dp_seed_read(s->fd, h->modules, h->n_modules * sizeof *h->modules, s->heap_size + offsetof(dp_seed_header, modules), err);
    if (!st)
        st = dp_seed_read(s->fd, &h->n_extents, sizeof h->n_extents, s->heap_size + offsetof(dp_seed_header, n_extents), err);
    uint32_t n = h->n_extents < DP_SEED_EXTENTS ? h->n_extents : DP_SEED_EXTENTS;
    return st ? st : dp_seed_read(s->fd, h->extents, n * sizeof *h->extents, s->heap_size + offsetof(dp_seed_header, extents), err);
}

/* Everything that can be refused is looked at before the first byte changes. */
int dp_seed_apply(dp_seed *s, dp_error *err) {
    static dp_seed_header own, seed;
    int st = read_header(s, &seed, err);
    fill_header(s, &own);
    if (!st)
        st = differs(&own, &seed, err);
    if (!st)
        st = make_keys(s, &seed, err);
    if (st) {
        dp_heap_outside = 0;
        return st;
    }
    uint64_t slots = 0;
    for (uint32_t i = 0; i < s->modules.n; i++)
        slots = s->modules.list[i].slots_size > slots ? s->modules.list[i].slots_size : slots;
    char *kept = malloc(slots + 1);
    uint64_t at = dp_seed_file_size(s->heap_size);
    if (!kept)
        st = dp_fail(err, DP_FATAL, ENOMEM, "seed");
    for (uint32_t i = 0; i < s->modules.n && !st; i++)
        if (s->modules.list[i].data_size) {
            st = lay_data(s, &s->modules.list[i], at, kept, err);
            at += s->modules.list[i].data_size;
        }
    if (!st)
        st = lay_arena(s, &seed, err);
    if (!st && s->laid)
        st = begin_on_demand(s, &seed, err);
    dp_heap_watch_maps(false);
    for (uint32_t i = 0; i < s->modules.n && !st; i++)
        if (tls_apart(&s->modules.list[i])) {
            st = dp_seed_read(s->fd, (void *)(uintptr_t)s->modules.list[i].tls, s->modules.list[i].tls_size, at, err);
            at += s->modules.list[i].tls_size;
        }
    for (uint32_t k = 0; k < DP_SEED_KEYS && !st; k++)
        if (seed.keys[k] && dp_heap_has((const void *)(uintptr_t)seed.keys[k]) && pthread_setspecific(k, (const void *)(uintptr_t)seed.keys[k]))
            st = dp_fail(err, DP_FATAL, 0, "seed: the thread-specific key %u does not exist here", k);
    free(kept);
    dp_heap_outside = 0; /* functions run on this thread from now on */
    return st;
}

void dp_seed_unseeded(dp_seed *s) {
    if (dp_apart_valid(&s->apart))
        dp_apart_unseeded(&s->apart);
}
