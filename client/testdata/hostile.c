/* Functions that try to get out of the sandbox, one for each of its restrictions. The result is text: empty when all that was
 * tried was refused, else what succeeded. */
#include "hostile.h"

/* arg: a file of the executor's user, outside. */
FUNCTION(files) {
    text t = *out;
    REFUSED(reads(arg), ENOENT);
    REFUSED(reads("/etc/shadow"), ENOENT);
    REFUSED(reads("/root/.bashrc"), ENOENT);
    REFUSED(reads("/dev/mem"), ENOENT);
    REFUSED(reads("/proc/1/environ"), 0);
    REFUSED(reads("/proc/1/root/etc/passwd"), 0);
    REFUSED(writes("/usr/lib/x"), 0);
    REFUSED(writes("/etc/passwd"), 0);
    REFUSED(writes("/x"), 0);
    REFUSED(writes("/dev/x"), 0);
    REFUSED(writes("/proc/self/oom_score_adj"), 0);
    REFUSED(writes("/proc/sys/kernel/core_pattern"), 0);
    REFUSED(mkdir("/home", 0777), 0);
    REFUSED(chmod("/usr", 0777), 0);
    REFUSED(unlink("/etc/passwd"), 0);
    REFUSED(mount("none", "/tmp", "tmpfs", 0, NULL), EPERM);
    REFUSED(umount("/tmp"), EPERM);
    REFUSED(syscall(SYS_pivot_root, "/tmp", "/tmp"), EPERM);
    REFUSED(chroot("/tmp"), EPERM);
    REFUSED(mknod("/tmp/null", S_IFCHR | 0666, 1 << 8 | 3), 0);
    *out = t;
}

/* /tmp is there, empty, and the worker's own. */
FUNCTION(has_tmp) {
    (void)arg;
    text t = *out;
    DIR *d = opendir("/tmp");
    for (struct dirent *e; d && (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            say(&t, "there is %s; ", e->d_name);
    if (!d)
        say(&t, "no /tmp; ");
    else
        closedir(d);
    if (writes("/tmp/mine") || reads("/tmp/mine"))
        say(&t, "cannot write /tmp: %s; ", strerror(errno));
    int fd = shm_open("/rfaas-test", O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, 4096))
        say(&t, "no shared memory: %s; ", strerror(errno));
    close(fd);
    if (writes("/dev/null"))
        say(&t, "cannot write /dev/null: %s; ", strerror(errno));
    *out = t;
}

/* arg: a process of the executor's. */
FUNCTION(processes) {
    text t = *out;
    pid_t executor = atoi(arg);
    REFUSED(kill(executor, 0), ESRCH);
    REFUSED(kill(executor, SIGTERM), ESRCH);
    REFUSED(syscall(SYS_pidfd_open, executor, 0), 0);
    REFUSED(ptrace(PTRACE_ATTACH, executor, NULL, NULL), EPERM);
    REFUSED(ptrace(PTRACE_ATTACH, 1, NULL, NULL), EPERM);
    struct iovec v = {&t, 1};
    REFUSED(syscall(SYS_process_vm_readv, 1, &v, 1, &v, 1, 0), EPERM);
    REFUSED(setpriority(PRIO_PROCESS, executor, 19), 0);
    kill(1, SIGKILL); /* no error, and no effect */
    DIR *d = opendir("/proc");
    for (struct dirent *e; d && (e = readdir(d));) {
        int pid = atoi(e->d_name);
        if (pid > 0 && pid != 1 && pid != getpid())
            say(&t, "process %d is in sight; ", pid);
    }
    if (d)
        closedir(d);
    if (getppid() != 0)
        say(&t, "the parent is in sight: %d; ", getppid());
    *out = t;
}

/* arg: id of a System V segment outside. */
FUNCTION(ipc) {
    text t = *out;
    struct shmid_ds ds;
    REFUSED(shmctl(atoi(arg), IPC_STAT, &ds), EINVAL);
    REFUSED(shmctl(atoi(arg), IPC_RMID, NULL), EINVAL);
    *out = t;
}

/* arg: name of an abstract socket outside. */
FUNCTION(network) {
    (void)arg;
    text t = *out;
    REFUSED(socket(AF_INET, SOCK_STREAM, 0), EPERM);
    REFUSED(socket(AF_INET6, SOCK_DGRAM, 0), EPERM);
    REFUSED(socket(AF_UNIX, SOCK_STREAM, 0), EPERM);
    REFUSED(socket(AF_NETLINK, SOCK_RAW, 0), EPERM);
    REFUSED(socket(AF_PACKET, SOCK_RAW, 0), EPERM);
    REFUSED(socket(AF_ALG, SOCK_SEQPACKET, 0), EPERM);
    /* A datagram socket without a peer takes from anybody who knows its name; pairs may be made, and give themselves names. */
    int ours[2], others[2], on = 1;
    struct sockaddr_un name = {0};
    socklen_t len = sizeof name;
    if (socketpair(AF_UNIX, SOCK_DGRAM, 0, ours) || socketpair(AF_UNIX, SOCK_DGRAM, 0, others) ||
        setsockopt(ours[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof on) || close(ours[1]) || close(others[1]))
        say(&t, "no pairs of sockets: %s; ", strerror(errno));
    send(ours[0], "x", 1, MSG_NOSIGNAL); /* takes a name, and finds its peer gone */
    getsockname(ours[0], (struct sockaddr *)&name, &len);
    REFUSED(sendto(others[0], "x", 1, MSG_NOSIGNAL, (struct sockaddr *)&name, len), EPERM);
    REFUSED(connect(others[0], (struct sockaddr *)&name, len), EPERM);
    REFUSED(bind(others[0], (struct sockaddr *)&name, len), EPERM);
    REFUSED(listen(others[0], 1), EPERM);
    struct mmsghdr message = {.msg_hdr = {.msg_name = &name, .msg_namelen = len}};
    REFUSED(syscall(SYS_sendmmsg, others[0], &message, 1, 0), EPERM);
    close(ours[0]);
    close(others[0]);
    FILE *f = fopen("/proc/net/dev", "r");
    char line[256];
    for (int n = 0; f && fgets(line, sizeof line, f); n++)
        if (n >= 2 && !strstr(line, "lo:") && !strstr(line, "tunl") && !strstr(line, "sit") && !strstr(line, "gre") && !strstr(line, "ip6") &&
            !strstr(line, "vti") && !strstr(line, "erspan"))
            say(&t, "interface %s; ", line);
    if (!f)
        say(&t, "no /proc/net/dev; ");
    else
        fclose(f);
    *out = t;
}

/* arg: the user that it must be; empty: any but root. */
FUNCTION(privileges) {
    text t = *out;
    if (getuid() == 0 || geteuid() != getuid() || getgid() == 0)
        say(&t, "it is user %u, group %u; ", geteuid(), getegid());
    if (*arg && getuid() != (uid_t)atoi(arg))
        say(&t, "it is user %u, not %s; ", getuid(), arg);
    if (getgroups(0, NULL) > 0 && !*arg)
        say(&t, "it has %d groups; ", getgroups(0, NULL));
    if (prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1)
        say(&t, "new privileges could be had; ");
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct caps[2];
    if (syscall(SYS_capget, &head, caps) || caps[0].effective | caps[0].permitted | caps[1].effective | caps[1].permitted)
        say(&t, "capabilities %x; ", caps[0].permitted);
    REFUSED(setuid(0), EPERM);
    REFUSED(setgid(0), EPERM);
    REFUSED(setgroups(0, NULL), EPERM);
    REFUSED(unshare(CLONE_NEWUSER), EPERM);
    REFUSED(unshare(CLONE_NEWNET), EPERM);
    REFUSED(setns(0, 0), EPERM);
    REFUSED(cloned(CLONE_NEWUSER), EPERM);
    REFUSED(cloned(CLONE_NEWPID), EPERM);
    REFUSED(cloned(CLONE_PARENT), EPERM); /* it would be the executor's child */
    REFUSED(prctl(PR_SET_PDEATHSIG, 0), EPERM);
    REFUSED(prctl(PR_SET_DUMPABLE, 1), EPERM);
    struct rlimit more = {RLIM_INFINITY, RLIM_INFINITY};
    REFUSED(setrlimit(RLIMIT_DATA, &more), EPERM);
    *out = t;
}

/* System calls that computing does not need. */
FUNCTION(calls) {
    (void)arg;
    text t = *out;
    char page[4096];
    REFUSED(syscall(SYS_bpf, 0, NULL, 0), EPERM);
    REFUSED(syscall(SYS_perf_event_open, NULL, 0, 0, -1, 0), EPERM);
    REFUSED(syscall(SYS_userfaultfd, 0), EPERM);
    REFUSED(syscall(SYS_io_uring_setup, 1, page), EPERM);
    REFUSED(syscall(SYS_keyctl, 0, 0, 0, 0, 0), EPERM);
    REFUSED(syscall(SYS_add_key, "user", "x", "x", 1, -1), EPERM);
    REFUSED(syscall(SYS_init_module, page, 1, ""), EPERM);
    REFUSED(syscall(SYS_kexec_load, 0, 0, NULL, 0), EPERM);
    REFUSED(syscall(SYS_reboot, 0, 0, 0, NULL), EPERM);
    REFUSED(syscall(SYS_swapon, "/tmp", 0), EPERM);
    REFUSED(syscall(SYS_open_by_handle_at, 0, page, 0), EPERM);
    REFUSED(syscall(SYS_syslog, 3, page, sizeof page), EPERM);
    REFUSED(syscall(SYS_clock_settime, 0, NULL), EPERM);
    REFUSED(syscall(SYS_personality, 0x0400000 /* READ_IMPLIES_EXEC */), EPERM);
    REFUSED(syscall(SYS_seccomp, 0, 0, NULL), EPERM);
    REFUSED(syscall(SYS_sendmsg, 1, page, 0), EPERM);
    REFUSED(syscall(SYS_connect, 1, page, 16), EPERM);
    REFUSED(syscall(444 /* landlock_create_ruleset */, NULL, 0, 1), EPERM);
    REFUSED(syscall(446 /* landlock_restrict_self */, -1, 0), EPERM);
    REFUSED(syscall(5000), ENOSYS);
    REFUSED(ioctl(0, TIOCSTI, "x"), EPERM);
    REFUSED(syscall(SYS_kcmp, getpid(), 1, 0, 0, 0), EPERM);
    REFUSED(syscall(SYS_request_key, "user", "x", NULL, 0), EPERM);
    REFUSED(syscall(SYS_mq_open, "x", O_CREAT | O_RDWR, 0600, NULL), EPERM);
    REFUSED(syscall(SYS_fanotify_init, 0, 0), EPERM);
    REFUSED(syscall(SYS_inotify_init1, 0), EPERM);
    REFUSED(syscall(SYS_name_to_handle_at, AT_FDCWD, "/", page, page, 0), EPERM);
    REFUSED(syscall(SYS_process_vm_writev, getpid(), NULL, 0, NULL, 0, 0), EPERM);
    REFUSED(syscall(SYS_vmsplice, 1, NULL, 0, 0), EPERM);
    REFUSED(syscall(SYS_move_pages, 0, 0, NULL, NULL, NULL, 0), EPERM);
    REFUSED(syscall(SYS_sched_setscheduler, 0, 1 /* FIFO */, page), EPERM);
    REFUSED(syscall(SYS_sched_setattr, 0, page, 0), EPERM);
    REFUSED(syscall(SYS_ptrace, PTRACE_TRACEME, 0, 0, 0), EPERM);
    REFUSED(syscall(SYS_mount_setattr, AT_FDCWD, "/", 0, NULL, 0), EPERM);
    REFUSED(syscall(SYS_open_tree, AT_FDCWD, "/", 0), EPERM);
    REFUSED(syscall(SYS_migrate_pages, 0, 0, NULL, NULL), EPERM);
    REFUSED(syscall(SYS_setxattr, "/tmp", "user.x", "x", 1, 0), EPERM);
    REFUSED(syscall(SYS_quotactl, 0, "/", 0, NULL), EPERM);
    REFUSED(syscall(SYS_acct, NULL), EPERM);
#ifdef SYS_modify_ldt
    REFUSED(syscall(SYS_modify_ldt, 0, page, 0), EPERM);
    REFUSED(syscall(SYS_iopl, 3), EPERM);
#endif
    REFUSED(syscall(SYS_ioprio_set, 1, 0, 0), EPERM);
    REFUSED(syscall(SYS_accept4, 1, NULL, NULL, 0), EPERM);
    REFUSED(syscall(438 /* pidfd_getfd */, 1, 0, 0), EPERM);
    REFUSED(syscall(440 /* process_madvise */, 1, NULL, 0, 0, 0), EPERM);
    REFUSED(syscall(447 /* memfd_secret */, 0), EPERM);
    REFUSED(syscall(435 /* clone3 */, page, 0), ENOSYS); /* flags out of the filter's sight; libraries take clone then */
    int space = open("/proc/self/ns/net", O_RDONLY);
    REFUSED(setns(space, 0), EPERM);
    close(space);
    REFUSED(unshare(0x80 /* CLONE_NEWTIME */), EPERM);
#ifdef __x86_64__
    REFUSED(syscall(0x40000000 | SYS_getpid), ENOSYS); /* the same calls by other numbers (x32) */
    pid_t pid = fork();
    if (pid == 0) { /* and by another gate: getpid of i386 */
        long got;
        __asm__ volatile("int $0x80" : "=a"(got) : "a"(20) : "memory");
        _exit(0);
    }
    int st = 0;
    if (pid < 0 || waitpid(pid, &st, 0) != pid || !WIFSIGNALED(st))
        say(&t, "a call of i386 leaves status %d; ", st);
#endif
    *out = t;
}

/* Calls that are allowed, with arguments that are not. */
FUNCTION(arguments) {
    (void)arg;
    text t = *out;
    /* Pages that the node has set aside. */
    REFUSED((intptr_t)mmap(NULL, 2 << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0), EPERM);
    REFUSED(memfd_create("x", MFD_HUGETLB), EPERM);
    REFUSED(shmget(IPC_PRIVATE, 2 << 20, IPC_CREAT | SHM_HUGETLB | 0600), EPERM);
    /* What tells of other processes, or holds them up. */
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REFUSED(madvise(page, 4096, MADV_MERGEABLE), EPERM);
    munmap(page, 4096);
    REFUSED(syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0), EPERM);
    REFUSED(syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0), EPERM);
    /* Other processes of the same user, where there are no process namespaces. */
    struct rlimit few = {16, 16};
    REFUSED(prlimit(1, RLIMIT_NOFILE, &few, NULL), EPERM);
    REFUSED(setpriority(PRIO_USER, 0, 19), EPERM);
    REFUSED(setpriority(PRIO_PGRP, 0, 19), EPERM);
    REFUSED(setpriority(PRIO_PROCESS, 1, 19), EPERM);
    int pair[2], one = 1;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
        say(&t, "no pair of sockets: %s; ", strerror(errno));
    REFUSED(fcntl(pair[0], F_SETOWN, 1), EPERM);
    struct f_owner_ex owner = {F_OWNER_PID, 1};
    REFUSED(fcntl(pair[0], F_SETOWN_EX, &owner), EPERM);
    REFUSED(fcntl(pair[0], F_SETSIG, SIGKILL), EPERM);
    REFUSED(fcntl(pair[0], F_SETLEASE, F_RDLCK), EPERM);
    REFUSED(fcntl(pair[0], F_NOTIFY, DN_MULTISHOT), EPERM);
    /* Programs for the kernel, and other entrances to it. */
    struct sock_filter code = {0x06 /* return */, 0, 0, 0};
    struct sock_fprog program = {1, &code};
    REFUSED(setsockopt(pair[0], SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program), EPERM);
    REFUSED(setsockopt(pair[0], SOL_SOCKET, SO_ATTACH_BPF, &one, sizeof one), EPERM);
    REFUSED(setsockopt(pair[0], SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &program, sizeof program), EPERM);
    REFUSED(setsockopt(pair[0], SOL_SOCKET, SO_LOCK_FILTER, &one, sizeof one), EPERM);
    REFUSED(setsockopt(pair[0], SOL_SOCKET, SO_MARK, &one, sizeof one), EPERM);
    REFUSED(setsockopt(pair[0], SOL_SOCKET, SO_BUSY_POLL, &one, sizeof one), EPERM);
    REFUSED(setsockopt(pair[0], 0 /* IP */, SO_RCVTIMEO, &one, sizeof one), EPERM);
    REFUSED(send(pair[0], "x", 1, MSG_OOB | MSG_NOSIGNAL), EPERM);
    close(pair[0]);
    close(pair[1]);
    /* What the process is to others. */
    static const int options[] = {PR_SET_MM, PR_SET_PTRACER, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_SECUREBITS,
                                  PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_MCE_KILL, PR_SET_SPECULATION_CTRL, 59 /* SYSCALL_USER_DISPATCH */,
                                  62 /* SCHED_CORE */, 67 /* MEMORY_MERGE */};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (prctl(options[i], 1, 0, 0, 0) >= 0 || errno != EPERM)
            say(&t, "prctl(%d): %s; ", options[i], strerror(errno));
    *out = t;
}

/* Variables of the executor's that are not for it. arg: the name of one. */
FUNCTION(environment) {
    text t = *out;
    if (getenv(arg))
        say(&t, "%s is %s; ", arg, getenv(arg));
    char all[1 << 16];
    int fd = open("/proc/self/environ", O_RDONLY);
    ssize_t n = read(fd, all, sizeof all);
    close(fd);
    if (n > 0 && memmem(all, (size_t)n, arg, strlen(arg)))
        say(&t, "%s stands in /proc/self/environ; ", arg);
    *out = t;
}

/* Device files, and those that the worker holds. arg: "verbs" when there must be one. */
FUNCTION(device) {
    text t = *out;
    int held = -1;
    char path[64], to[256];
    for (int fd = 0; fd < 256; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(path, to, sizeof to - 1);
        if (n < 0)
            continue;
        to[n] = 0;
        if (strstr(to, "uverbs"))
            held = fd;
    }
    if (*arg && held < 0)
        say(&t, "no device is open; ");
    REFUSED(open("/dev/infiniband/uverbs0", O_RDWR), ENOENT);
    REFUSED(open("/sys/class/infiniband", O_RDONLY), ENOENT);
    if (held >= 0) {
        char command[64] = {0};
        snprintf(path, sizeof path, "/proc/self/fd/%d", held);
        REFUSED(open(path, O_RDWR), 0); /* another context, which rfaas does not know */
        REFUSED(ioctl(held, _IOWR(0x1b, 1, char[24]), command), EPERM);
        REFUSED(syscall(SYS_ioctl, held, 0xc0181b01ul, command), EPERM);
    }
    *out = t;
}

/* Descriptors that a function must not have. arg: how many there may be. */
FUNCTION(descriptors) {
    text t = *out;
    int n = 0;
    char path[64], to[256], all[1500] = "";
    for (int fd = 0; fd < 256; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t len = readlink(path, to, sizeof to - 1);
        if (len < 0)
            continue;
        to[len] = 0;
        n++;
        snprintf(all + strlen(all), sizeof all - strlen(all), "%d %s, ", fd, to);
        if (strstr(to, "pidfd") || strstr(to, "net:") || strstr(to, "memfd:rfaas-page") || strstr(to, "memfd:code"))
            say(&t, "descriptor %d is %s; ", fd, to);
    }
    if (n > atoi(arg))
        say(&t, "%d descriptors: %s; ", n, all);
    *out = t;
}

/* What computing needs works: a library's mathematics, a thread, a program, a file, a signal, an alarm. */
FUNCTION(works) {
    (void)arg;
    text t = *out;
    FILE *p = popen("echo $((6 * 7)); ls / >/dev/null", "r");
    char line[64] = "";
    if (!p || !fgets(line, sizeof line, p) || strcmp(line, "42\n"))
        say(&t, "a program: %s; ", line);
    if (p && pclose(p))
        say(&t, "a program failed; ");
    FILE *f = fopen("/proc/cpuinfo", "r");
    if (!f)
        say(&t, "/proc/cpuinfo: %s; ", strerror(errno));
    else
        fclose(f);
    if (sysconf(_SC_NPROCESSORS_ONLN) < 1)
        say(&t, "no processors; ");
    if (reads("/etc/passwd") || reads("/dev/urandom"))
        say(&t, "files: %s; ", strerror(errno));
    raise(SIGCHLD);
    int fd = memfd_create("x", 0);
    if (fd < 0)
        say(&t, "memfd: %s; ", strerror(errno));
    close(fd);
    int pair[2];
    char got = 0;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || send(pair[0], "x", 1, 0) != 1 || recv(pair[1], &got, 1, 0) != 1 || got != 'x')
        say(&t, "a pair of sockets: %s; ", strerror(errno));
    struct timeval soon = {1, 0};
    int copy = fcntl(pair[0], F_DUPFD_CLOEXEC, 3);
    if (setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof soon) || copy < 0 || fcntl(copy, F_SETFL, O_NONBLOCK) || close(copy))
        say(&t, "a socket's options: %s; ", strerror(errno));
    char *block = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED || madvise(block, 1 << 20, MADV_DONTNEED) || mlock(block, 1 << 20) || munmap(block, 1 << 20))
        say(&t, "memory: %s; ", strerror(errno));
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) || setrlimit(RLIMIT_NOFILE, &files) || setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0)))
        say(&t, "its own limits: %s; ", strerror(errno));
    close(pair[0]);
    close(pair[1]);
    *out = t;
}
