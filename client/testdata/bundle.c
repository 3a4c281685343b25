/* Functions of a library that needs others, and that reads files of its bundle. Payloads are texts with their NUL. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "rfaas_function.h"

#ifdef NEEDS
int first(int n);
static int from_constructor;
__attribute__((constructor)) static void load(void) { from_constructor = first(4); }

/* Calls a function of a library. It recurses through a second library, and each of the two needs the other. */
uint32_t bundle_sum(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    int *out = res;
    out[0] = first(10);
    out[1] = from_constructor;
    return 2 * sizeof *out;
}
#endif

/* Returns the path of a name in the bundle. */
uint32_t bundle_path(void *args, uint32_t size, void *res) {
    const char *path = rfaas_bundle_path(args);
    (void)size;
    return path ? (uint32_t)(stpcpy(res, path) - (char *)res) : 0;
}

/* Opens NAME/REST of the bundle. */
static int open_in(const char *name, int flags) {
    char path[8192], top[256];
    const char *slash = strchr(name, '/');
    snprintf(top, sizeof top, "%.*s", slash ? (int)(slash - name) : 255, name);
    const char *at = rfaas_bundle_path(top);
    if (!at) {
        errno = ENOENT;
        return -1;
    }
    snprintf(path, sizeof path, "%s%s", at, slash ? slash : "");
    return open(path, flags, 0644);
}

/* Returns the content of a file. */
uint32_t bundle_read(void *args, uint32_t size, void *res) {
    (void)size;
    int fd = open_in(args, O_RDONLY);
    ssize_t n = fd < 0 ? -1 : read(fd, res, rfaas_result_capacity());
    if (n < 0)
        return rfaas_fail("%s: %s", (char *)args, strerror(errno));
    close(fd);
    return (uint32_t)n;
}

/* Returns the number of files in a directory and below. */
static int count(const char *path) {
    DIR *d = opendir(path);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));) {
        char below[8192];
        if (e->d_name[0] == '.')
            continue;
        snprintf(below, sizeof below, "%s/%s", path, e->d_name);
        n += e->d_type == DT_DIR ? count(below) : 1;
    }
    if (d)
        closedir(d);
    return n;
}

uint32_t bundle_count(void *args, uint32_t size, void *res) {
    const char *path = rfaas_bundle_path(args);
    (void)size;
    int n = path ? count(path) : -1;
    memcpy(res, &n, sizeof n);
    return sizeof n;
}

/* Tries to change the bundle. Returns the error, 0 for success. */
uint32_t bundle_write(void *args, uint32_t size, void *res) {
    (void)size;
    errno = 0;
    int fd = open_in(args, O_WRONLY | O_CREAT);
    int e = fd < 0 ? errno : 0;
    if (fd >= 0)
        close(fd);
    memcpy(res, &e, sizeof e);
    return sizeof e;
}

/* Returns 1 if a path of the node exists for the worker. */
uint32_t bundle_sees(void *args, uint32_t size, void *res) {
    (void)size;
    int sees = access(args, F_OK) == 0;
    memcpy(res, &sees, sizeof sees);
    return sizeof sees;
}
