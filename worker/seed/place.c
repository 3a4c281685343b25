#include "place.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HOLE (8ull << 30) /* bytes of address space, for libraries and what they map while they are loaded */
#define PAGE 4096ul
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
#define SANITIZED 1 /* a sanitizer has rules for addresses */
#else
#define SANITIZED 0
#endif

enum { MAPS_MAX = 256 << 10 };

static dp_range hole;
static dp_range filled[DP_RANGES_MAX];
static int n_filled;

static void *reserve(uintptr_t at, size_t size, int flags) {
    return mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

static const uintptr_t bases[] = {0x7a0000000000, 0x0a0000000000};

bool dp_place_is_base(uintptr_t at) { return at == bases[0] || at == bases[1]; }

uintptr_t dp_place_base(void) {
    void *p = reserve(0, PAGE, 0);
    if (SANITIZED || p == MAP_FAILED)
        return 0;
    munmap(p, PAGE);
    for (size_t i = 0; i < sizeof bases / sizeof *bases; i++)
        if ((uintptr_t)p >= bases[i] + DP_PLACE_SIZE)
            return bases[i];
    return 0;
}

int dp_place_reserve(dp_error *err) {
    uintptr_t base = dp_place_base();
    void *p = base ? reserve(base, HOLE, MAP_FIXED_NOREPLACE) : MAP_FAILED;
    if (p == MAP_FAILED)
        p = reserve(0, HOLE, 0);
    if (p == MAP_FAILED)
        return dp_fail(err, DP_FATAL, errno, "seeds: reserve %llu bytes of address space", HOLE);
    hole = (dp_range){(uintptr_t)p, (uintptr_t)p + HOLE};
    return DP_OK;
}

long dp_place_maps(char *text, size_t room) {
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    ssize_t n = 0, got = fd < 0 ? -1 : 1;
    while (got > 0 && (size_t)n < room - 1) {
        got = read(fd, text + n, room - 1 - (size_t)n);
        n += got > 0 ? got : 0;
    }
    if (fd >= 0)
        close(fd);
    text[n] = 0;
    return got < 0 || (size_t)n == room - 1 ? -1 : n;
}

const char *dp_place_next(const char *maps, dp_range *r, const char **name) {
    if (!*maps)
        return NULL;
    char *dash;
    r->from = strtoull(maps, &dash, 16);
    r->to = strtoull(dash + 1, NULL, 16);
    const char *end = strchr(maps, '\n');
    end = end ? end : maps + strlen(maps);
    *name = maps;
    for (int column = 0; column < 5 && *name < end; column++) { /* addresses, rights, offset, device, inode */
        *name += strcspn(*name, " \n");
        *name += strspn(*name, " ");
    }
    return *end ? end + 1 : end;
}

/* The kernel chooses the highest gap in which a mapping fits, below an address that it does not tell. */
int dp_place_fill(const char *maps, dp_range below, dp_range out[DP_RANGES_MAX]) {
    uintptr_t last = below.to, end = (uintptr_t)reserve(0, PAGE, 0) + PAGE;
    int n = 0, why = 0;
    dp_range r;
    const char *name;
    if (end == (uintptr_t)MAP_FAILED + PAGE)
        return -1;
    munmap((void *)(end - PAGE), PAGE);
    while (last < end && !why && (maps = dp_place_next(maps, &r, &name))) {
        dp_range gap = {last, r.from < end ? r.from : end};
        if (r.to > last)
            last = r.to;
        if (gap.from >= gap.to)
            continue;
        if (n == DP_RANGES_MAX)
            why = E2BIG;
        else if (reserve(gap.from, gap.to - gap.from, MAP_FIXED_NOREPLACE) == MAP_FAILED)
            why = errno;
        else
            out[n++] = gap;
    }
    if (why)
        dp_place_free(out, n);
    errno = why;
    return why ? -1 : n;
}

void dp_place_free(const dp_range *list, int n) {
    for (int i = 0; i < n; i++)
        munmap((void *)list[i].from, list[i].to - list[i].from);
}

int dp_place_begin(dp_error *err) {
    static char maps[MAPS_MAX];
    if (!hole.to)
        return dp_fail(err, DP_UNSUPPORTED, 0, "seeds: the zygote has reserved no address space");
    if (dp_place_maps(maps, sizeof maps) < 0)
        return dp_fail(err, DP_UNSUPPORTED, errno, "seeds: read /proc/self/maps");
    n_filled = dp_place_fill(maps, hole, filled);
    if (n_filled < 0) {
        n_filled = 0;
        return dp_fail(err, DP_FATAL, errno, "seeds: fill a gap of the address space");
    }
    munmap((void *)hole.from, HOLE);
    return DP_OK;
}

void dp_place_end(void) {
    dp_place_free(filled, n_filled);
    n_filled = 0;
}
