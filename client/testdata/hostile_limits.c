/* Functions that try to use more than the sandbox allows: limits, processes, memory, files in /tmp. The result is text: empty when
 * the limits held, else what the function got. */
#include "hostile.h"

/* Limits that the worker could raise, or that are too high. arg: most open files. */
FUNCTION(raises_limits) {
    text t = *out;
    static const int resources[] = {RLIMIT_CORE, RLIMIT_NOFILE, RLIMIT_MEMLOCK, RLIMIT_NICE};
    for (size_t i = 0; i < sizeof resources / sizeof *resources; i++) {
        struct rlimit now;
        if (getrlimit(resources[i], &now) || now.rlim_cur != now.rlim_max) {
            say(&t, "limit %d is soft; ", resources[i]);
            continue;
        }
        now.rlim_max++;
        REFUSED(setrlimit(resources[i], &now), EPERM);
    }
    struct rlimit core;
    if (getrlimit(RLIMIT_CORE, &core) || core.rlim_max)
        say(&t, "core dumps may have %llu bytes; ", (unsigned long long)core.rlim_max);
    int most = atoi(arg), n = 0, highest = 0, opened[1024];
    while (n < 1024 && (opened[n] = dup(0)) >= 0)
        highest = opened[n++];
    if (highest >= most)
        say(&t, "descriptor %d; ", highest);
    while (n > 0)
        close(opened[--n]);
    size_t size = 16 << 20;
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REFUSED(mlock(p, size), ENOMEM);
    munmap(p, size);
    errno = 0;
    if (nice(-1) >= 0 && errno == 0)
        say(&t, "it has raised its priority; ");
    *out = t;
}

/* A /tmp of 64 MiB and 16384 names holds no more. */
FUNCTION(fills_tmp) {
    (void)arg;
    text t = *out;
    static char block[1 << 20];
    int fd = open("/tmp/large", O_RDWR | O_CREAT, 0600), n = 0;
    while (n < 100 && write(fd, block, sizeof block) == sizeof block)
        n++;
    if (n < 60 || n > 64)
        say(&t, "/tmp holds %d MiB, then %s; ", n, strerror(errno));
    close(fd);
    unlink("/tmp/large");
    char path[64];
    for (n = 0; n < 20000; n++) {
        snprintf(path, sizeof path, "/tmp/%d", n);
        if (mkdir(path, 0700))
            break;
    }
    if (n < 16000 || n > 16384)
        say(&t, "/tmp holds %d names, then %s; ", n, strerror(errno));
    while (n-- > 0) {
        snprintf(path, sizeof path, "/tmp/%d", n);
        rmdir(path);
    }
    *out = t;
}

/* Forks until it may not any more; all wait. arg: as many as must not be reached. */
FUNCTION(fork_bomb) {
    text t = *out;
    int most = atoi(arg), n = 0;
    while (n < most) {
        pid_t pid = fork();
        if (pid == 0)
            for (;;)
                pause();
        if (pid < 0)
            break;
        n++;
    }
    if (n == most)
        say(&t, "%d processes; ", n);
    *out = t;
}

/* Leaves a process behind that nothing ties to the worker: another session, no parent, another name. arg: that name. */
FUNCTION(leaves_behind) {
    text t = *out;
    int ready[2];
    if (pipe(ready))
        say(&t, "pipe: %s; ", strerror(errno));
    pid_t pid = fork();
    if (pid == 0) {
        setsid();
        if (fork() == 0) {
            setsid();
            prctl(PR_SET_NAME, arg);
            for (int sig = 1; sig < 32; sig++)
                signal(sig, SIG_IGN);
            if (write(ready[1], "x", 1) != 1)
                _exit(1);
            for (;;)
                pause();
        }
        _exit(0);
    }
    char c;
    close(ready[1]);
    if (pid < 0 || read(ready[0], &c, 1) != 1)
        say(&t, "no process was left behind: %s; ", strerror(errno));
    close(ready[0]);
    waitpid(pid, NULL, 0);
    *out = t;
}

/* Fills memory that no limit of one process counts. arg: MiB, and of what kind: shared (the default), file of no name, System V.
 * Does not come back if it is killed. */
FUNCTION(eats_shared_memory) {
    text t = *out;
    size_t n = (size_t)atoi(arg) << 20;
    char *p = MAP_FAILED;
    if (strstr(arg, "memfd")) {
        int fd = memfd_create("x", 0);
        if (ftruncate(fd, (off_t)n) == 0)
            p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
    } else if (strstr(arg, "segment")) {
        int id = shmget(IPC_PRIVATE, n, IPC_CREAT | 0600);
        p = shmat(id, NULL, 0);
        shmctl(id, IPC_RMID, NULL);
    } else {
        p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    }
    if (p == MAP_FAILED)
        say(&t, "%s: %s; ", arg, strerror(errno));
    for (size_t i = 0; p != MAP_FAILED && i < n; i += 4096)
        p[i] = 1;
    say(&t, "%zu MiB; ", n >> 20);
    *out = t;
}
