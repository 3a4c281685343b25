/* What a worker sees of the file system: a small root in memory, in which the node's files that programs and libraries need are
 * mounted read-only, name by name. Nothing else is visible unless the executor's settings name it: no homes, secrets, /run or
 * other file systems. */
#include "sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#ifndef MNT_DETACH
#define MNT_DETACH 2
#endif

/* struct mount_attr of linux/mount.h, which older systems lack. */
typedef struct mount_attributes {
    uint64_t set, clear, propagation, userns;
} mount_attributes;
enum { ATTR_RDONLY = 1, ATTR_NOSUID = 2, ATTR_NODEV = 4, RECURSIVE = 0x8000 /* AT_RECURSIVE */ };

/* Mounted read-only and without set-uid programs. Missing paths are left out. */
static const char *const shown[] = {
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/alternatives", /* on Debian libblas.so.3 goes through here */
    "/etc/group",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/libibverbs.d",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/sys/devices/system", /* processors and memory, for OpenMP and BLAS */
};

static const char *const devices[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"};

/* The old root is mounted here while the new one is filled. */
#define OLD "/.old"

/* Makes a directory that workers of any user may search, whatever the umask. One that exists stays as it is. */
static int make_directory(const char *path) {
    if (mkdir(path, 0755))
        return errno == EEXIST ? 0 : errno;
    return chmod(path, 0755) ? errno : 0;
}

/* Makes the directories of a path below the root, without its last name. */
static int make_parents(const char *path) {
    char part[PATH_MAX];
    if (strlen(path) >= sizeof part)
        return ENAMETOOLONG;
    strcpy(part, path);
    for (char *slash = strchr(part + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        int e = make_directory(part);
        if (e)
            return e;
        *slash = '/';
    }
    return 0;
}

/* Makes a mount point of the same kind as a file of the old root. */
static int make_like(const char *path, const struct stat *of) {
    int e = make_parents(path);
    if (e)
        return e;
    if (S_ISDIR(of->st_mode))
        return make_directory(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        return errno;
    close(fd);
    return 0;
}

/* Makes a file or directory of the old root visible at the same path. A symbolic link is copied as a link. It is no error if the
 * path does not exist, or is visible already as part of another one. */
static int show(const char *path, bool recursive) {
    char old[PATH_MAX], target[PATH_MAX];
    struct stat at, new;
    if (snprintf(old, sizeof old, OLD "%s", path) >= (int)sizeof old)
        return ENAMETOOLONG;
    if (lstat(old, &at))
        return 0;
    if (S_ISLNK(at.st_mode)) {
        ssize_t n = readlink(old, target, sizeof target - 1);
        if (n < 0)
            return errno;
        target[n] = 0;
        int e = make_parents(path);
        return e ? e : symlink(target, path) && errno != EEXIST ? errno : 0;
    }
    if (lstat(path, &new) == 0 && new.st_dev == at.st_dev && new.st_ino == at.st_ino)
        return 0;
    int e = make_like(path, &at);
    if (e)
        return e == EROFS || e == EACCES ? 0 : e;
    return mount(old, path, NULL, MS_BIND | (recursive ? MS_REC : 0), NULL) ? errno : 0;
}

/* A path of the settings, or a directory to which a link in such a path leads. Paths are resolved before the change of root. */
typedef struct wanted {
    char real[PATH_MAX];
    const char *as;
} wanted;

static int show_wanted(const wanted *w) {
    int e = show(w->real, true);
    if (e || !strcmp(w->real, w->as))
        return e;
    struct stat st;
    if (lstat(w->as, &st) == 0)
        return 0;
    e = make_parents(w->as);
    return e ? e : symlink(w->real, w->as) && errno != EEXIST ? errno : 0;
}

static int read_only(const char *path) {
    mount_attributes a = {.set = ATTR_RDONLY | ATTR_NOSUID};
    if (syscall(SYS_mount_setattr, AT_FDCWD, path, RECURSIVE, &a, sizeof a) == 0)
        return 0;
    return errno;
}

/* Mounts a file system in memory and makes it the root, with the old one in OLD. */
static int new_root(const char **what) {
    *what = "private mounts";
    if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL))
        return errno;
    *what = "mount a file system in memory";
    static const char *const places[] = {"/tmp", "/mnt", "/var", "/usr"};
    const char *at = NULL;
    for (size_t i = 0; i < sizeof places / sizeof *places && !at; i++)
        if (mount("rfaas", places[i], "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m,nr_inodes=4096") == 0)
            at = places[i];
    if (!at || chdir(at))
        return errno;
    *what = "change the root";
    if (mkdir(&OLD[1], 0700) || syscall(SYS_pivot_root, ".", &OLD[1]) || chdir("/"))
        return errno;
    return 0;
}

static int fill_root(const dp_sandbox *s, const wanted *extra, bool verbs, const char **what) {
    int e = 0;
    for (size_t i = 0; i < sizeof shown / sizeof *shown && !e; i++)
        e = show(*what = shown[i], !strcmp(shown[i], "/usr"));
    for (int i = 0; i < s->n_paths && !e; i++)
        if (*extra[i].real)
            e = (*what = extra[i].as, show_wanted(&extra[i]));
    for (size_t i = 0; i < sizeof devices / sizeof *devices && !e; i++)
        e = show(*what = devices[i], false);
    if (e)
        return e;
    *what = "make directories";
    static const char *const empty[] = {"/proc", "/tmp", "/var", DP_BUNDLE_AT};
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++)
        if ((e = make_directory(empty[i])))
            return e;
    static const char *const links[][2] = {{"/tmp", "/var/tmp"}, {"/tmp", "/dev/shm"}, {"/proc/self/fd", "/dev/fd"}};
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1]) && errno != EEXIST)
            return errno;
    if (verbs) {
        /* Covers /sys/devices/system, which is visible again when this mount is removed. */
        *what = "/dev/infiniband";
        if ((e = show(*what, true)))
            return e;
        *what = "/sys";
        if (mount(OLD "/sys", "/sys", NULL, MS_BIND | MS_REC, NULL))
            return errno;
    }
    if (s->bundles) {
        char old[PATH_MAX];
        struct stat st;
        *what = "the directory of bundles";
        if (snprintf(old, sizeof old, OLD "%s", s->bundles) >= (int)sizeof old)
            return ENAMETOOLONG;
        if (lstat(old, &st) || (!S_ISDIR(st.st_mode) && (errno = ENOTDIR)) || mount(old, "/tmp", NULL, MS_BIND, NULL))
            return errno;
    }
    *what = "make the mounts read-only";
    if ((e = read_only("/")))
        return e;
    *what = "/proc"; /* for the zygote; each guard mounts its own over it */
    if (mount(OLD "/proc", "/proc", NULL, MS_BIND | MS_REC, NULL))
        return errno;
    *what = "leave the old root";
    return umount2(OLD, MNT_DETACH) ? errno : 0;
}

int dp_sandbox_root(const dp_sandbox *s, bool verbs, const char **what) {
    *what = "memory";
    wanted *extra = calloc((size_t)s->n_paths + 1, sizeof *extra);
    if (!extra)
        return ENOMEM;
    for (int i = 0; i < s->n_paths; i++) {
        extra[i].as = s->paths[i];
        if (!realpath(s->paths[i], extra[i].real))
            *extra[i].real = 0; /* it does not exist */
    }
    int e = new_root(what);
    if (!e)
        e = fill_root(s, extra, verbs, what);
    free(extra);
    return e;
}

void dp_bundle_name(const uint8_t id[DP_BUNDLE_ID], char name[2 * DP_BUNDLE_ID + 1]) {
    for (int i = 0; i < DP_BUNDLE_ID; i++)
        snprintf(name + 2 * (size_t)i, 3, "%02x", id[i]);
}

/* The executor's bundles are below /tmp until the worker's own /tmp hides them. */
static int show_bundle(const uint8_t *id) {
    static const uint8_t none[DP_BUNDLE_ID];
    char name[2 * DP_BUNDLE_ID + 1];
    if (!memcmp(id, none, sizeof none))
        return 0;
    dp_bundle_name(id, name);
    /* The new mount is read-only, as the one that it is a part of. */
    return chdir("/tmp") || mount(name, DP_BUNDLE_AT, NULL, MS_BIND, NULL) || chdir("/") ? errno : 0;
}

int dp_sandbox_own_mounts(const uint8_t *bundle, const char **what) {
    *what = "mount the bundle";
    int e = show_bundle(bundle);
    if (e)
        return e;
    *what = "mount /tmp";
    /* Private to this worker and counted as its memory where a control group counts. */
    if (mount("rfaas-tmp", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m,nr_inodes=16384"))
        return errno;
    *what = "mount /proc";
    return mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) ? errno : 0;
}

int dp_sandbox_hide_devices(void) {
    /* A worker could open its device again by /proc/self/fd, but not on a mount without devices. */
    mount_attributes no_devices = {.set = ATTR_NODEV};
    if (syscall(SYS_mount_setattr, AT_FDCWD, "/dev/infiniband", RECURSIVE, &no_devices, sizeof no_devices) && errno != ENOENT)
        return errno;
    if (umount2("/dev/infiniband", MNT_DETACH) && errno != EINVAL && errno != ENOENT)
        return errno;
    return umount2("/sys", MNT_DETACH) && errno != EINVAL ? errno : 0;
}
