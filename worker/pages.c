#include "pages.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* Older headers lack them. */
#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif
#ifndef UFFD_FEATURE_MINOR_SHMEM
#define UFFD_FEATURE_MINOR_SHMEM (1 << 10)
#endif

int dp_pages_open(int device) {
    int fd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM};
    if (fd >= 0 && ioctl(fd, UFFDIO_API, &api)) {
        close(fd);
        return -1;
    }
    return fd;
}

bool dp_pages_work(int device) {
    int fd = dp_pages_open(device);
    return fd >= 0 && !close(fd);
}
