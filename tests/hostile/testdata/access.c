/* Attacks on files and sockets. */
#include "attack.h"

/* ---- files ---- */

/* arg: paths, one a line. */
ATTACK(reads_paths) {
    for (char *save, *path = strtok_r(arg, "\n", &save); path; path = strtok_r(NULL, "\n", &save)) {
        DIR *d = opendir(path);
        if (d) {
            say(t, "lists %s; ", path);
            closedir(d);
        } else {
            attempt(t, path, reads(path));
        }
    }
}

/* arg: paths, one a line. They are opened for writing and not created. */
ATTACK(writes_paths) {
    for (char *save, *path = strtok_r(arg, "\n", &save); path; path = strtok_r(NULL, "\n", &save)) {
        int fd = open(path, O_WRONLY);
        attempt(t, path, fd);
        if (fd >= 0)
            close(fd);
    }
}

static unsigned creates_in(text *t, const char *dir, int depth) {
    char path[1024];
    unsigned tried = 1;
    if (!strcmp(dir, "/tmp") || !strcmp(dir, "/dev/shm") || !strcmp(dir, "/proc"))
        return 0;
    snprintf(path, sizeof path, "%s/rfaas-hostile", dir);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    if (fd >= 0) {
        say(t, "created %s; ", path);
        close(fd);
        unlink(path);
    }
    DIR *d = depth > 0 ? opendir(dir) : NULL;
    for (struct dirent *e; d && tried < 3000 && (e = readdir(d));) {
        if (e->d_type != DT_DIR || !strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        snprintf(path, sizeof path, "%s/%s", strcmp(dir, "/") ? dir : "", e->d_name);
        tried += creates_in(t, path, depth - 1);
    }
    if (d)
        closedir(d);
    return tried;
}

/* Creates a file in every directory near the root, except where a worker may write. */
ATTACK(creates_everywhere) {
    (void)arg;
    if (creates_in(t, "/", 3) < 5)
        say(t, "hardly a directory was tried; ");
}

/* arg: a name. */
ATTACK(leaves_file) {
    char path[256];
    snprintf(path, sizeof path, "/tmp/%.100s", arg);
    if (writes(path))
        say(t, "%s: %s; ", path, strerror(errno));
}

/* arg: the name of a file in another worker's /tmp. */
ATTACK(finds_file) {
    char path[512];
    snprintf(path, sizeof path, "/tmp/%.100s", arg);
    attempt(t, path, reads(path));
    DIR *d = opendir("/proc");
    for (struct dirent *e; d && (e = readdir(d));) {
        if (atoi(e->d_name) <= 0 || atoi(e->d_name) == getpid())
            continue;
        snprintf(path, sizeof path, "/proc/%.20s/root/tmp/%.100s", e->d_name, arg);
        attempt(t, path, reads(path));
    }
    if (d)
        closedir(d);
}

/* Reads /proc of process 1, of the parent, and of process arg, which is the executor's. */
ATTACK(reads_memory) {
    char path[64];
    const int pids[] = {1, getppid(), atoi(arg)};
    static const char *const files[] = {"mem", "maps", "environ", "syscall", "stack", "auxv", "root/etc/passwd", "cwd/x", "map_files"};
    for (size_t i = 0; i < sizeof pids / sizeof *pids; i++)
        for (size_t f = 0; f < sizeof files / sizeof *files; f++) {
            snprintf(path, sizeof path, "/proc/%d/%s", pids[i], files[f]);
            attempt(t, path, reads(path));
        }
}

ATTACK(makes_setuid_root) {
    (void)arg;
    int fd = open("/tmp/setuid", O_RDWR | O_CREAT, 0700);
    if (fd < 0)
        say(t, "no file to try it with; ");
    ATTEMPT(t, fchown(fd, 0, 0));
    ATTEMPT(t, chown("/tmp/setuid", 0, 0));
    close(fd);
    unlink("/tmp/setuid");
}

ATTACK(makes_devices) {
    (void)arg;
    ATTEMPT(t, mknod("/tmp/mem", S_IFCHR | 0666, 1 << 8 | 1));
    ATTEMPT(t, mknod("/tmp/disk", S_IFBLK | 0666, 8 << 8));
    ATTEMPT(t, mknodat(AT_FDCWD, "/tmp/kmsg", S_IFCHR | 0666, 1 << 8 | 11));
}

/* ---- sockets ---- */

/* arg: "family type protocol". */
ATTACK(opens_socket) {
    int family = 0, type = 0, protocol = 0;
    if (sscanf(arg, "%d %d %d", &family, &type, &protocol) != 3)
        say(t, "bad argument; ");
    int fd = socket(family, type, protocol);
    attempt(t, "socket", fd);
    if (fd >= 0)
        close(fd);
}

/* Binds a socket to the abstract name of a shm endpoint. */
ATTACK(squats) {
    (void)arg;
    int pair[2];
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    memcpy(name.sun_path + 1, "rfaas-shm-00112233445566778899aabbccddeeff", 42);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair)) {
        say(t, "no pair of sockets: %s; ", strerror(errno));
        return;
    }
    ATTEMPT(t, bind(pair[0], (struct sockaddr *)&name, offsetof(struct sockaddr_un, sun_path) + 43));
    ATTEMPT(t, bind(pair[0], (struct sockaddr *)&name, sizeof name.sun_family)); /* a name that the kernel chooses */
    ATTEMPT(t, connect(pair[0], (struct sockaddr *)&name, offsetof(struct sockaddr_un, sun_path) + 43));
    ATTEMPT(t, listen(pair[0], 8));
    close(pair[0]);
    close(pair[1]);
}

/* Attaches a program of the packet filter to a socket that a worker may have. */
ATTACK(attaches_filter) {
    (void)arg;
    struct {
        uint16_t code;
        uint8_t jt, jf;
        uint32_t k;
    } accept_all = {6 /* return k */, 0, 0, 0xffff};
    struct {
        uint16_t len;
        void *filter;
    } program = {1, &accept_all};
    int pair[2], fd = 0;
    if (socketpair(AF_UNIX, SOCK_DGRAM, 0, pair)) {
        say(t, "no pair of sockets: %s; ", strerror(errno));
        return;
    }
    ATTEMPT(t, setsockopt(pair[0], SOL_SOCKET, 26 /* SO_ATTACH_FILTER */, &program, sizeof program));
    ATTEMPT(t, setsockopt(pair[0], SOL_SOCKET, 50 /* SO_ATTACH_BPF */, &fd, sizeof fd));
    ATTEMPT(t, setsockopt(pair[0], SOL_SOCKET, 51 /* SO_ATTACH_REUSEPORT_CBPF */, &program, sizeof program));
    close(pair[0]);
    close(pair[1]);
}
