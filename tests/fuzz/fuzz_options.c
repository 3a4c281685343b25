/* Option files of examples/mpi/blackscholes. */
#include "examples/mpi/blackscholes/options.c"

#include <sys/mman.h>
#include <unistd.h>

#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        MUST(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    MUST(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    int n = -1;
    char error[256] = "";
    entry *e = options_read(path, &n, error, sizeof error);
    if (e) {
        MUST(n > 0);
        for (int i = 0; i < n; i++) {
            MUST(!isnan(bs_price(&e[i].option)));
            MUST(isnan(e[i].reference) || e[i].tolerance > 0);
        }
    } else {
        MUST(error[0]);
    }
    free(e);
    return 0;
}
