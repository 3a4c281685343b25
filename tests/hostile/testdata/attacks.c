/* The attacks of the hostile-tenant suite that run as functions in a worker. Each returns text: empty when everything that it tried
 * was refused, else what it got. Functions that measure return their figures instead. The functions of the client's own
 * sandbox test are in the same library. */
#include "../../../client/testdata/hostile.c"

#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <time.h>

/* A worker that is root tries nothing: without a sandbox it would damage the node. The attack has failed the suite then. */
#define ATTACK(name)                                                                                                                   \
    static void name##_runs(char *arg, text *t);                                                                                       \
    FUNCTION(name) {                                                                                                                   \
        char copy[4096];                                                                                                               \
        snprintf(copy, sizeof copy, "%s", arg);                                                                                        \
        if (getuid() == 0 || geteuid() == 0) {                                                                                         \
            say(out, "the worker is root: nothing was tried; ");                                                                       \
            return;                                                                                                                    \
        }                                                                                                                              \
        name##_runs(copy, out);                                                                                                        \
    }                                                                                                                                  \
    static void name##_runs(char *arg, text *t)

/* Notes a call unless it failed with an error that refuses it. Other errors, like EINVAL and EFAULT, mean that the kernel has looked at
 * the arguments. */
static void attempt(text *t, const char *what, long result) {
    static const int refusals[] = {EPERM, EACCES, ENOENT, ESRCH, ENOSYS, EROFS, ENOSPC, EAGAIN, ENOTDIR, EMFILE, ENXIO, ENODEV};
    int e = errno;
    if (result >= 0) {
        say(t, "%s: %ld; ", what, result);
        return;
    }
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        if (e == refusals[i])
            return;
    say(t, "%s: %s; ", what, strerror(e));
}
#define ATTEMPT(t, call) (errno = 0, attempt(t, #call, (long)(call)))

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void burn(clockid_t clock, double how_long) {
    for (double end = seconds(clock) + how_long; seconds(clock) < end;) {
    }
}

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

/* ---- other processes and rights ---- */

ATTACK(traces) {
    (void)arg;
    pid_t child = fork();
    if (child == 0)
        for (;;)
            pause();
    ATTEMPT(t, ptrace(PTRACE_ATTACH, 1, NULL, NULL));
    ATTEMPT(t, ptrace(PTRACE_SEIZE, getppid(), NULL, NULL));
    ATTEMPT(t, ptrace(PTRACE_ATTACH, child, NULL, NULL)); /* computing needs no ptrace at all */
    ATTEMPT(t, ptrace(PTRACE_TRACEME, 0, NULL, NULL));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

ATTACK(copies_memory) {
    char bytes[8];
    struct iovec here = {bytes, sizeof bytes}, there = {(void *)(uintptr_t)0x400000, sizeof bytes};
    const pid_t pids[] = {1, getppid(), atoi(arg)};
    for (size_t i = 0; i < sizeof pids / sizeof *pids; i++) {
        ATTEMPT(t, process_vm_readv(pids[i], &here, 1, &there, 1, 0));
        ATTEMPT(t, process_vm_writev(pids[i], &here, 1, &there, 1, 0));
    }
}

/* Kills the executor and every process that it may signal. arg: process of the executor. */
ATTACK(kills_all) {
    pid_t executor = atoi(arg);
    ATTEMPT(t, kill(executor, SIGKILL));
    ATTEMPT(t, kill(-executor, SIGKILL));
    ATTEMPT(t, syscall(SYS_tgkill, executor, executor, SIGKILL));
    ATTEMPT(t, syscall(SYS_pidfd_open, executor, 0));
    kill(-1, SIGKILL); /* every process in reach but this one */
}

ATTACK(takes_ids) {
    (void)arg;
    ATTEMPT(t, setuid(0));
    ATTEMPT(t, setgid(0));
    ATTEMPT(t, setreuid(0, 0));
    ATTEMPT(t, setresuid(0, 0, 0));
    ATTEMPT(t, setresgid(0, 0, 0));
    ATTEMPT(t, setgroups(0, NULL));
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct all[2] = {{~0u, ~0u, ~0u}, {~0u, ~0u, ~0u}};
    ATTEMPT(t, syscall(SYS_capset, &head, all));
    syscall(SYS_setfsuid, 0);
    if (syscall(SYS_setfsuid, -1) == 0)
        say(t, "it is root for files; ");
    if (!getuid() || !geteuid() || !getgid() || !getegid())
        say(t, "it is root; ");
}

ATTACK(makes_spaces) {
    (void)arg;
    static const struct {
        unsigned long flag;
        const char *name;
    } spaces[] = {{CLONE_NEWUSER, "user"}, {CLONE_NEWNS, "mount"},         {CLONE_NEWPID, "pid"},       {CLONE_NEWNET, "net"},
                  {CLONE_NEWIPC, "ipc"},   {CLONE_NEWUTS, "uts"},          {0x02000000, "cgroup"},      {0x80, "time (unshare alone)"}};
    for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++) {
        char what[64];
        snprintf(what, sizeof what, "unshare %s", spaces[i].name);
        attempt(t, what, unshare((int)spaces[i].flag));
        snprintf(what, sizeof what, "clone %s", spaces[i].name);
        if (spaces[i].flag != 0x80)
            attempt(t, what, cloned(spaces[i].flag));
        snprintf(what, sizeof what, "clone user and %s", spaces[i].name);
        if (spaces[i].flag != 0x80 && spaces[i].flag != CLONE_NEWUSER)
            attempt(t, what, cloned(CLONE_NEWUSER | spaces[i].flag));
    }
}

ATTACK(enters_spaces) {
    (void)arg;
    static const char *const names[] = {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"};
    for (int pid = 1; pid <= 2; pid++)
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            char path[64];
            snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, names[i]);
            int fd = open(path, O_RDONLY);
            if (fd < 0)
                continue; /* refused */
            attempt(t, path, setns(fd, 0));
            close(fd);
        }
}

ATTACK(mounts) {
    (void)arg;
    ATTEMPT(t, mount("none", "/tmp", "tmpfs", 0, NULL));
    ATTEMPT(t, mount("/", "/tmp", NULL, MS_BIND, NULL));
    ATTEMPT(t, mount(NULL, "/usr", NULL, MS_REMOUNT, NULL));
    ATTEMPT(t, umount2("/proc", MNT_DETACH));
    ATTEMPT(t, umount2("/", MNT_DETACH));
    ATTEMPT(t, syscall(428 /* open_tree */, AT_FDCWD, "/", 1));
    ATTEMPT(t, syscall(429 /* move_mount */, AT_FDCWD, "/", AT_FDCWD, "/tmp", 0));
    ATTEMPT(t, syscall(430 /* fsopen */, "tmpfs", 0));
    ATTEMPT(t, syscall(442 /* mount_setattr */, AT_FDCWD, "/", 0, NULL, 0));
}

ATTACK(changes_root) {
    (void)arg;
    ATTEMPT(t, chroot("/tmp"));
    ATTEMPT(t, syscall(SYS_pivot_root, "/tmp", "/tmp"));
    int fd = open("/", O_RDONLY | O_DIRECTORY);
    if (fd < 0)
        return;
    struct stat root, up;
    fchdir(fd);
    for (int i = 0; i < 64; i++)
        if (chdir(".."))
            break;
    if (stat("/", &root) || stat(".", &up) || root.st_ino != up.st_ino || root.st_dev != up.st_dev)
        say(t, ".. leads out of /; ");
    close(fd);
}

/* Runs a setuid program that waits for input, and looks at its user id. arg: its path. */
ATTACK(runs_setuid) {
    int in_of[2];
    char path[64], all[2048];
    if (access(arg, X_OK))
        return; /* not in sight: refused */
    if (pipe(in_of)) {
        say(t, "pipe: %s; ", strerror(errno));
        return;
    }
    pid_t child = fork();
    if (child == 0) {
        dup2(in_of[0], 0);
        close(in_of[1]);
        execl(arg, arg, NULL);
        _exit(127);
    }
    snprintf(path, sizeof path, "/proc/%d/status", child);
    double end = seconds(CLOCK_MONOTONIC) + 2;
    for (int root = 0; !root && child > 0 && waitpid(child, NULL, WNOHANG) == 0 && seconds(CLOCK_MONOTONIC) < end;) {
        int fd = open(path, O_RDONLY);
        ssize_t n = fd < 0 ? -1 : read(fd, all, sizeof all - 1);
        unsigned effective = 1;
        if (fd >= 0)
            close(fd);
        all[n < 0 ? 0 : n] = 0;
        char *uid = strstr(all, "\nUid:");
        root = uid && sscanf(uid, "\nUid: %*u %u", &effective) == 1 && effective == 0;
        if (root)
            say(t, "%s runs as root; ", arg);
    }
    close(in_of[0]);
    close(in_of[1]);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

/* ---- system calls ---- */

/* arg: lines of "name number a b c d"; "page" is the address of a page of zeros. */
ATTACK(makes_calls) {
    static char page[4096];
    for (char *save, *line = strtok_r(arg, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char name[32] = "", words[6][24] = {"", "", "", "", "", ""};
        long number = -1, a[6] = {0};
        if (sscanf(line, "%31s %ld %23s %23s %23s %23s %23s %23s", name, &number, words[0], words[1], words[2], words[3], words[4],
                   words[5]) < 2) {
            say(t, "bad line; ");
            continue;
        }
        for (int i = 0; i < 6; i++)
            a[i] = strcmp(words[i], "page") ? strtol(words[i], NULL, 0) : (long)page;
        errno = 0;
        attempt(t, name, syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]));
    }
}

ATTACK(takes_huge_pages) {
    (void)arg;
    ATTEMPT(t, memfd_create("huge", MFD_HUGETLB));
    ATTEMPT(t, memfd_create("huge", MFD_HUGETLB | 30u << 26));
    errno = 0;
    void *p = mmap(NULL, 2 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    attempt(t, "MAP_HUGETLB", p == MAP_FAILED ? -1 : 0);
    errno = 0;
    p = mmap(NULL, 2 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    attempt(t, "MAP_HUGETLB, shared", p == MAP_FAILED ? -1 : 0);
    ATTEMPT(t, shmget(IPC_PRIVATE, 2 << 20, IPC_CREAT | SHM_HUGETLB | 0600));
}

ATTACK(dumps_core) {
    (void)arg;
    struct rlimit core;
    if (getrlimit(RLIMIT_CORE, &core) || core.rlim_cur || core.rlim_max)
        say(t, "a core may have %llu bytes, at most %llu; ", (unsigned long long)core.rlim_cur, (unsigned long long)core.rlim_max);
    struct rlimit more = {1 << 20, 1 << 20};
    ATTEMPT(t, setrlimit(RLIMIT_CORE, &more));
}

ATTACK(raises_hard_limits) {
    (void)arg;
    static const struct {
        int which;
        const char *name;
    } limits[] = {{RLIMIT_NOFILE, "descriptors"}, {RLIMIT_CORE, "core"}, {RLIMIT_NPROC, "processes"}, {RLIMIT_RTPRIO, "priority"},
                  {RLIMIT_NICE, "nice"}};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        struct rlimit now, more;
        getrlimit(limits[i].which, &now);
        if (now.rlim_max == RLIM_INFINITY) {
            say(t, "%s: no limit; ", limits[i].name);
            continue;
        }
        more.rlim_cur = more.rlim_max = now.rlim_max + 1;
        attempt(t, limits[i].name, setrlimit((__rlimit_resource_t)limits[i].which, &more));
        attempt(t, limits[i].name, prlimit(1, (enum __rlimit_resource)limits[i].which, &more, NULL));
    }
}

/* Opens descriptors until it may not any more; returns how many. arg: as many as it stops at. */
ATTACK(counts_descriptors) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    int most = atoi(arg), n = 0, last = -1, first = -1;
    for (int fd; n < most && n + 64 < (int)files.rlim_cur && (fd = dup(1)) >= 0; n++) { /* the library needs a few itself */
        if (first < 0)
            first = fd;
        last = fd;
    }
    if (first >= 0)
        syscall(SYS_close_range, first, last, 0);
    say(t, "%d", n);
}

ATTACK(takes_priority) {
    (void)arg;
    struct sched_param high = {50};
    ATTEMPT(t, sched_setscheduler(0, SCHED_FIFO, &high));
    ATTEMPT(t, sched_setscheduler(0, SCHED_RR, &high));
    ATTEMPT(t, sched_setscheduler(getppid(), SCHED_FIFO, &high));
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } deadline = {sizeof deadline, 6, 0, 0, 0, 9000000, 10000000, 10000000};
    ATTEMPT(t, syscall(SYS_sched_setattr, 0, &deadline, 0));
}

ATTACK(lowers_nice) {
    (void)arg;
    ATTEMPT(t, setpriority(PRIO_PROCESS, 0, -5));
    ATTEMPT(t, setpriority(PRIO_USER, 0, -20));
    errno = 0;
    if (getpriority(PRIO_PROCESS, 0) < 0)
        say(t, "nice is %d; ", getpriority(PRIO_PROCESS, 0));
}

/* ---- processors ---- */

static struct {
    double until;
    pthread_barrier_t *begin;
    unsigned char cpus[1024];
} crowd;

static void *spins(void *unused) {
    (void)unused;
    unsigned char all[128];
    memset(all, 0xff, sizeof all);
    while (seconds(CLOCK_MONOTONIC) < crowd.until) {
        syscall(SYS_sched_setaffinity, 0, sizeof all, all);
        unsigned cpu = (unsigned)sched_getcpu();
        if (cpu < sizeof crowd.cpus)
            crowd.cpus[cpu] = 1;
        burn(CLOCK_THREAD_CPUTIME_ID, 0.002);
    }
    return NULL;
}

/* As many threads as it may have, on all processors that it can get. arg: threads and ms. Returns "CPU ms, wall ms, processors". */
ATTACK(spreads) {
    int wanted = 0, ms = 0, n = 0;
    if (sscanf(arg, "%d %d", &wanted, &ms) != 2 || wanted > 1000)
        return;
    static pthread_t threads[1000];
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 64 << 10);
    memset(crowd.cpus, 0, sizeof crowd.cpus);
    double wall = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    crowd.until = wall + ms / 1e3;
    while (n < wanted && !pthread_create(&threads[n], &small, spins, NULL))
        n++;
    spins(NULL);
    while (n-- > 0)
        pthread_join(threads[n], NULL);
    int processors = 0;
    for (size_t i = 0; i < sizeof crowd.cpus; i++)
        processors += crowd.cpus[i];
    say(t, "%.0f %.0f %d", (seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu) * 1e3, (seconds(CLOCK_MONOTONIC) - wall) * 1e3, processors);
}

static void *spins_on(void *unused) {
    (void)unused;
    double began = seconds(CLOCK_MONOTONIC); /* it ends by itself */
    while (seconds(CLOCK_MONOTONIC) < began + 20) {
    }
    return NULL;
}

static void does_nothing(int sig) { (void)sig; }

/* Has the kernel continue this process every 10 ms, and a thread spin. */
ATTACK(wakes_itself) {
    (void)arg;
    timer_t timer;
    struct sigevent to = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGCONT};
    struct itimerspec often = {{0, 10000000}, {0, 10000000}};
    pthread_t thread;
    signal(SIGCONT, does_nothing);
    if (timer_create(CLOCK_MONOTONIC, &to, &timer) || timer_settime(timer, 0, &often, NULL))
        return; /* refused */
    if (pthread_create(&thread, NULL, spins_on, NULL))
        say(t, "no thread; ");
    else
        pthread_detach(thread);
}

/* Uses processor time in a grandchild that has no parent, and waits for it. arg: ms. */
ATTACK(burns_in_child) {
    int over[2];
    char c;
    if (pipe(over)) {
        say(t, "pipe: %s; ", strerror(errno));
        return;
    }
    pid_t child = fork();
    if (child == 0) {
        setsid();
        if (fork())
            _exit(0);
        burn(CLOCK_PROCESS_CPUTIME_ID, atoi(arg) / 1e3);
        _exit(write(over[1], "x", 1) != 1);
    }
    close(over[1]);
    waitpid(child, NULL, 0);
    if (child < 0 || read(over[0], &c, 1) != 1)
        say(t, "no child: %s; ", strerror(errno));
    close(over[0]);
}

/* ---- memory ---- */

static int touch(size_t bytes) {
    char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return -1;
    for (size_t i = 0; i < bytes; i += 4096)
        ((volatile char *)p)[i] = 1;
    return 0;
}

/* Private memory. arg: MiB. */
ATTACK(eats_memory) {
    if (!touch((size_t)atoi(arg) << 20))
        say(t, "%s MiB; ", arg);
}

/* The same in children, which are alive at the same time: it ends when the first of them dies. arg: children and MiB of each. */
ATTACK(eats_in_children) {
    int children = 0, mib = 0, ready[2], held = 0;
    if (sscanf(arg, "%d %d", &children, &mib) != 2 || pipe(ready))
        return;
    pid_t pids[64];
    for (int i = 0; i < children && i < 64; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            if (touch((size_t)mib << 20) || write(ready[1], "x", 1) != 1)
                _exit(1);
            for (;;)
                pause();
        }
    }
    close(ready[1]);
    for (struct pollfd in = {ready[0], POLLIN, 0}; held < children && waitpid(-1, NULL, WNOHANG) == 0;) {
        char c;
        if (poll(&in, 1, 10) > 0 && read(ready[0], &c, 1) == 1)
            held++;
    }
    for (int i = 0; i < children && i < 64; i++)
        if (pids[i] > 0) {
            kill(pids[i], SIGKILL);
            waitpid(pids[i], NULL, 0);
        }
    if (held == children)
        say(t, "%d children with %d MiB each; ", held, mib);
}

/* Touches every page of shared memory that it can write, the channel among it. Returns MiB. */
ATTACK(touches_channel) {
    (void)arg;
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    size_t touched = 0;
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        char rights[8] = "";
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) != 3 || strncmp(rights, "rw-s", 4))
            continue;
        for (volatile char *p = (volatile char *)from; p < (volatile char *)to; p += 4096) /* NOLINT */
            *p = *p;
        touched += to - from;
    }
    if (maps)
        fclose(maps);
    say(t, "%zu", touched >> 20);
}

/* ---- what a worker shares ---- */

/* The page that the worker shares with the executor (dp_worker.h); NULL if it is not in sight. */
static void *shared_page(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    void *page = NULL;
    while (maps && !page && fgets(line, sizeof line, maps)) {
        unsigned long from;
        char rights[8] = "";
        if (sscanf(line, "%lx-%*x %7s", &from, rights) == 2 && rights[1] == 'w' && strstr(line, "rfaas-page"))
            page = (void *)from; /* NOLINT */
    }
    if (maps)
        fclose(maps);
    return page;
}

/* Writes lines of a log into its report of death and to its output, and ends. arg: a line. */
ATTACK(forges_death) {
    char *page = shared_page();
    char said[512];
    const struct {
        uint32_t state;
        int32_t signal, code, sys_errno;
        uint64_t address;
        uint32_t sender, flags, text_len, pad;
    } death = {0x44454145, 11, 1, 0, 8, 0, 0, 400, 0};
    (void)t;
    memset(said, 0, sizeof said);
    snprintf(said, sizeof said, "crash+0x1\n%.100s\n\r%.100s\033[2J\033]0;x\007\n", arg, arg);
    printf("%s", said);
    fflush(stdout);
    if (page) {
        memcpy(page + 256 + sizeof death, said, 400);
        memcpy(page + 256, &death, sizeof death);
    }
    kill(getpid(), SIGKILL);
}

/* Writes into the page that a new call has just begun, again and again, and does not return. */
ATTACK(forges_page) {
    (void)arg;
    volatile uint64_t *page = shared_page();
    if (!page) {
        say(t, "no page in sight; ");
        return;
    }
    double end = seconds(CLOCK_MONOTONIC) + 60;
    for (uint64_t call = page[0] >> 16; seconds(CLOCK_MONOTONIC) < end; call++) {
        page[1] = call; /* calls that are over */
        page[0] = (call + 1) << 16 | (page[0] & 0xffff);
    }
    say(t, "a call of 60 s; ");
}

/* Prints for a while. arg: ms. Returns MiB. */
ATTACK(prints) {
    static char block[1 << 16];
    memset(block, 'x', sizeof block);
    double end = seconds(CLOCK_MONOTONIC) + atoi(arg) / 1e3;
    unsigned long long n = 0;
    int flags = fcntl(1, F_GETFL);
    fcntl(1, F_SETFL, flags | O_NONBLOCK);
    while (seconds(CLOCK_MONOTONIC) < end) {
        ssize_t did = write(1, block, sizeof block);
        if (did > 0)
            n += (unsigned long long)did;
    }
    fcntl(1, F_SETFL, flags);
    say(t, "%llu", n >> 20);
}

ATTACK(closes_all) {
    (void)arg;
    (void)t;
    syscall(SYS_close_range, 0, ~0u, 0);
}

/* Fills all shared memory with garbage, its queues among it. */
ATTACK(overwrites_queues) {
    (void)arg;
    (void)t;
    int fd = open("/proc/self/maps", O_RDONLY);
    static char all[1 << 16];
    ssize_t n, have = 0;
    while ((n = read(fd, all + have, sizeof all - 1 - (size_t)have)) > 0)
        have += n;
    close(fd);
    for (char *save, *line = strtok_r(all, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        unsigned long from, to;
        char rights[8] = "";
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) == 3 && !strncmp(rights, "rw-s", 4))
            memset((void *)from, 0xa5, to - from); /* NOLINT */
    }
}

/* Returns its argument. */
ATTACK(answers) { say(t, "%s", arg); }
