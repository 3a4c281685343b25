/* A worker's check of a library before the dynamic linker loads it, and of its list of function names. Byte 0: 0 a library,
 * otherwise the number of names. */
#include "worker/load.c"

#include <sys/mman.h>

#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int fd = -1;
    static void *self;
    static char text[4096];
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        self = dlopen(NULL, RTLD_NOW);
        MUST(fd >= 0 && self);
    }
    input in = {data, size};
    uint8_t n = take8(&in);
    reason r = {text, sizeof text};
    text[0] = 0;
    int st;
    if (n == 0) {
        MUST(ftruncate(fd, 0) == 0 && pwrite(fd, in.at, in.left, 0) == (ssize_t)in.left);
        st = check_elf(fd, &r);
    } else {
        char *names = exact_copy(in.at, in.left);
        dp_function *table = calloc(n, sizeof *table);
        st = find_functions(self, names, in.left, n, table, &r);
        for (int i = 0; st == DP_OK && i < n; i++)
            MUST(table[i]);
        free(table);
        free(names);
    }
    MUST(st == DP_OK || text[0]);
    return 0;
}
