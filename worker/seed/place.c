#include "place.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HOLE (8ull << 30) /* bytes of address space, for libraries and what they map while they are loaded */
#define STACK (64ull << 20) /* bytes below the stack that stay free, so that it can grow */

enum { GAPS_MAX = 1024, MAPS_MAX = 256 << 10 };

typedef struct gap {
    uintptr_t from, to;
} gap;

static gap hole;
static gap filled[GAPS_MAX];
static int n_filled;

static void *reserve(void *at, size_t size, int flags) {
    return mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

int dp_place_reserve(dp_error *err) {
    void *p = reserve(NULL, HOLE, 0);
    if (p == MAP_FAILED)
        return dp_fail(err, DP_FATAL, errno, "seeds: reserve %llu bytes of address space", HOLE);
    hole = (gap){(uintptr_t)p, (uintptr_t)p + HOLE};
    return DP_OK;
}

/* Reads /proc/self/maps. The buffer is not on the heap, which may map memory. Returns the number of bytes, or -1. */
static ssize_t read_maps(char *text, size_t room) {
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

/* Finds the gaps between the hole and the stack, and leaves the stack room to grow. The kernel maps nothing above it. */
static int find_gaps(const char *maps, gap *gaps) {
    uintptr_t last = hole.to;
    int n = 0;
    for (const char *line = maps; line && *line; line = strchr(line, '\n'), line += line != NULL) {
        char *dash;
        uintptr_t from = strtoull(line, &dash, 16), to = strtoull(dash + 1, NULL, 16);
        const char *end = strchr(line, '\n');
        bool stack = end && end - line > 7 && !strncmp(end - 7, "[stack]", 7);
        if (from >= last && from - last > (stack ? STACK : 0) && n < GAPS_MAX)
            gaps[n++] = (gap){last, stack ? from - STACK : from};
        if (stack)
            break;
        if (to > last)
            last = to;
    }
    return n;
}

int dp_place_begin(dp_error *err) {
    static char maps[MAPS_MAX];
    if (!hole.to)
        return dp_fail(err, DP_UNSUPPORTED, 0, "seeds: the zygote has reserved no address space");
    if (read_maps(maps, sizeof maps) < 0)
        return dp_fail(err, DP_UNSUPPORTED, errno, "seeds: read /proc/self/maps");
    int n = find_gaps(maps, filled);
    for (n_filled = 0; n_filled < n; n_filled++)
        if (reserve((void *)filled[n_filled].from, filled[n_filled].to - filled[n_filled].from, MAP_FIXED_NOREPLACE) == MAP_FAILED) {
            int why = errno;
            dp_place_end();
            return dp_fail(err, DP_FATAL, why, "seeds: fill a gap of the address space");
        }
    munmap((void *)hole.from, HOLE);
    return DP_OK;
}

void dp_place_end(void) {
    while (n_filled > 0) {
        n_filled--;
        munmap((void *)filled[n_filled].from, filled[n_filled].to - filled[n_filled].from);
    }
}
