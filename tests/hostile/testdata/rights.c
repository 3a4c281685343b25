/* Attacks on other processes, rights and limits, and system calls that are refused. */
#include "attack.h"

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
