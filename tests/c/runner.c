/* The program that runs the cases. Each runs in a child process. The parent enforces its deadline and finds what it leaves behind. */
#include "runner.h"

#include "nodes.h"

#include <dirent.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static bool verbose;
static int crossed; /* passed cases with a connection between the two nodes */
static bool private_dev_shm; /* this program has its own /dev/shm, so all files in it are its own */

/* ---- the child of a case ---- */

/* Prints this thread's stack, on SIGQUIT after a hang and after a crash. */
static void print_stack(int sig) {
    void *frames[48];
    const t_slot *s = t_my_slot();
    dprintf(2, "    %s, process %d thread %d: %s after %s:%d%s%s; stack (addr2line -fe):\n",
            s && s->name[0] ? s->name : "main", getpid(), (int)syscall(SYS_gettid),
            sig == SIGQUIT ? "still running" : strsignal(sig), t_base_name(s ? s->file : NULL), s ? s->line : 0,
            s && s->note[0] ? ", at: " : "", s ? s->note : "");
    backtrace_symbols_fd(frames, backtrace(frames, 48), 2);
    if (sig != SIGQUIT) {
        signal(sig, SIG_DFL);
        raise(sig);
    }
}

static void install_reporters(void) {
    struct sigaction sa = {.sa_handler = print_stack, .sa_flags = SA_RESTART};
    sigaction(SIGQUIT, &sa, NULL);
    if (!T_ASAN && !T_TSAN) {
        static const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
        for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++)
            sigaction(crashes[i], &sa, NULL);
    }
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
}

static void run_child(const t_case *c, int log) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (log >= 0) {
        dup2(log, 1);
        dup2(log, 2);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    install_reporters();
    t_claim_slot();
    t_usage before;
    t_usage_now(&before);
    c->run(c);
    t_note("after the case: leaks");
    t_usage_check(&before);
    exit(0);
}

/* ---- leaks of memory ---- */

#if T_ASAN
#include <pthread.h>
#include <sanitizer/lsan_interface.h>

size_t __sanitizer_get_current_allocated_bytes(void); /* gcc 12 has no header for it */

static size_t allocated_at_start; /* what the processes before this one had allocated */
static __thread size_t allocated_at_fork; /* taken before fork, because afterwards another thread's lock may stay locked */

static void before_fork(void) { allocated_at_fork = __sanitizer_get_current_allocated_bytes(); }
static void in_child(void) { allocated_at_start = allocated_at_fork; }

/* Ends a process, after all other handlers, with a search for leaks. The search reads all global variables, 20 MB with those of the sanitizer, and takes
 * longer than most cases. So a process that has freed exactly as many bytes as it has allocated is not searched. The process ends here, because the
 * sanitizer's own end would search always, and copy a megabyte to mark the global variables as unusable. */
static void end_with_leak_check(int status, void *arg) {
    (void)arg;
    fflush(NULL);
    if (__sanitizer_get_current_allocated_bytes() != allocated_at_start)
        __lsan_do_leak_check();
    _exit(status);
}

static void check_leaks_at_exit(void) {
    on_exit(end_with_leak_check, NULL);
    pthread_atfork(before_fork, NULL, in_child);
}
#else
static void check_leaks_at_exit(void) {}
#endif

/* ---- the runner ---- */

static int open_pidfd(pid_t pid) { return (int)syscall(SYS_pidfd_open, pid, 0); }

static bool wait_pidfd(int pidfd, int64_t until) {
    for (;;) {
        int64_t left = until - dp_now_ns();
        struct pollfd p = {pidfd, POLLIN, 0};
        int n = poll(&p, 1, left > 0 ? (int)(left / 1000000) + 1 : 0);
        if (n > 0)
            return true;
        if (n == 0 && left <= 0)
            return false;
    }
}

static bool read_task_file(pid_t pid, pid_t tid, const char *name, char *text, size_t len) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d/%s", pid, tid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, len - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    return n > 0;
}

/* Prints whether a thread runs or sleeps, and how long it waited for a CPU: a lost wake-up leaves it asleep, a busy machine waiting. */
static void print_thread_state(pid_t pid, pid_t tid) {
    char stat[512], sched[96];
    unsigned long long ran = 0, waited = 0;
    if (!read_task_file(pid, tid, "stat", stat, sizeof stat))
        return;
    const char *end = strrchr(stat, ')'); /* end of the name, which may contain any character */
    if (read_task_file(pid, tid, "schedstat", sched, sizeof sched))
        sscanf(sched, "%llu %llu", &ran, &waited);
    printf("    process %d thread %d: state %c, ran for %llu ms, waited %llu ms for a CPU\n", pid, tid, end && end[1] ? end[2] : '?',
           ran / 1000000, waited / 1000000);
}

/* Sends SIGQUIT to every thread of every process of the group, so that each prints its stack. Prints the state that the thread had. */
static void ask_for_stacks(pid_t group) {
    DIR *proc = opendir("/proc");
    for (struct dirent *e; proc && (e = readdir(proc));) {
        pid_t pid = atoi(e->d_name);
        if (pid <= 0 || getpgid(pid) != group)
            continue;
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/task", pid);
        DIR *tasks = opendir(path);
        for (struct dirent *t; tasks && (t = readdir(tasks));)
            if (t->d_name[0] != '.') {
                print_thread_state(pid, atoi(t->d_name));
                syscall(SYS_tgkill, pid, atoi(t->d_name), SIGQUIT);
                t_sleep_ms(20); /* keeps the stacks apart */
            }
        if (tasks)
            closedir(tasks);
    }
    if (proc)
        closedir(proc);
}

static void print_where(void) {
    uint32_t n = this_run.board->claimed < SLOTS ? this_run.board->claimed : SLOTS;
    for (uint32_t i = 0; i < n; i++) {
        t_slot *s = &this_run.board->slots[i];
        if (!s->file || kill(s->pid, 0))
            continue;
        printf("    last check of %s, process %d thread %d: %s:%d%s%s\n", s->name[0] ? s->name : "main", s->pid, s->tid,
               t_base_name(s->file), s->line, s->note[0] ? ", at: " : "", s->note);
    }
}

static void print_log(int log) {
    char buf[4096];
    off_t at = 0;
    for (ssize_t n; log >= 0 && (n = pread(log, buf, sizeof buf, at)) > 0; at += n)
        fwrite(buf, 1, (size_t)n, stdout);
}

/* Kills and reaps the rest of the group. Returns the number of processes. */
static int sweep_group(pid_t group) {
    int n = 0;
    /* Peers that died with the case are zombies here. They do not count as left behind. */
    while (waitpid(-group, NULL, WNOHANG) > 0)
        ;
    if (kill(-group, SIGKILL))
        return 0;
    int64_t until = dp_now_ns() + 5000000000;
    while (dp_now_ns() < until) {
        pid_t p = waitpid(-group, NULL, WNOHANG);
        if (p > 0)
            n++;
        else if (p < 0 && errno == ECHILD)
            break;
        else
            t_sleep_ms(1);
    }
    return n ? n : 1;
}

static void own_dev_shm(void) {
    if (unshare(CLONE_NEWNS))
        return;
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return;
    private_dev_shm = mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, NULL) == 0;
}

/* Names one file left in /dev/shm, or returns false. In a shared /dev/shm only files with this program's names count. */
static bool left_in_dev_shm(char *name, size_t len) {
    DIR *d = opendir("/dev/shm");
    bool found = false;
    for (struct dirent *e; d && !found && (e = readdir(d));) {
        if (e->d_name[0] == '.' || (!private_dev_shm && !strstr(e->d_name, "rfaas")))
            continue;
        snprintf(name, len, "%s", e->d_name);
        found = true;
        if (private_dev_shm) {
            char path[300];
            snprintf(path, sizeof path, "/dev/shm/%s", e->d_name);
            unlink(path);
        }
    }
    if (d)
        closedir(d);
    return found;
}

static bool has_suffix(const char *name, const char *suffix) {
    size_t n = strlen(name), m = strlen(suffix);
    return n >= m && !strcmp(name + n - m, suffix);
}

/* The ends of this case are on different nodes. */
static bool must_cross(const t_case *c) {
    return nodes_two() && (has_suffix(c->name, "@two-devices") || has_suffix(c->name, "@processes"));
}

/* Counts the checks that the case has made. */
static uint64_t checks_made(void) {
    uint64_t n = 0;
    for (uint32_t i = 0; i < SLOTS; i++)
        n += __atomic_load_n(&this_run.board->slots[i].checks, __ATOMIC_RELAXED);
    return n;
}

/* Waits until the case has ended. On a busy machine that may take long. Returns false if it hangs: it has checked nothing for at least this many
 * seconds, or goes on after ten times as long. */
static bool wait_case(int pidfd, double seconds) {
    int64_t bound = (int64_t)(seconds * 1e9), start = dp_now_ns();
    for (uint64_t before = 0, now;; before = now) {
        if (wait_pidfd(pidfd, dp_now_ns() + bound))
            return true;
        now = checks_made();
        if (now == before || dp_now_ns() - start >= 10 * bound)
            return false;
    }
}

/* Runs one case. Returns EXIT_FAILED, EXIT_SKIPPED or 0. */
static int run_case(const t_case *c) {
    int log = verbose ? -1 : memfd_create("case-output", MFD_CLOEXEC);
    memset(this_run.board, 0, sizeof *this_run.board);
    int seconds = t_is_verbs() ? (c->verbs_seconds ? c->verbs_seconds : 30) : c->seconds ? c->seconds : t_is_tcp() || t_is_ofi() ? 20 : 10;
    fflush(NULL);
    uint64_t received = nodes_received();
    int64_t start = dp_now_ns();
    pid_t pid = fork();
    if (pid == 0)
        run_child(c, log);
    if (pid < 0) {
        printf("FAIL %s: fork: %s\n", c->name, strerror(errno));
        return EXIT_FAILED;
    }
    setpgid(pid, pid);
    int pidfd = open_pidfd(pid);
    bool in_time = wait_case(pidfd, seconds * t_time_scale());
    if (!in_time) {
        printf("HANG %s: not done after %.0f s, with a bound of %.0f s between checks\n", c->name, (double)(dp_now_ns() - start) / 1e9,
               seconds * t_time_scale());
        print_where();
        ask_for_stacks(pid);
        kill(-pid, SIGKILL);
        if (!wait_pidfd(pidfd, dp_now_ns() + 5000000000))
            printf("    process %d survives SIGKILL\n", pid);
    }
    int st = 0;
    bool reaped = waitpid(pid, &st, in_time ? 0 : WNOHANG) == pid;
    close(pidfd);
    double ms = (double)(dp_now_ns() - start) / 1e6;
    char left[280];
    int result = EXIT_FAILED;
    int strays = sweep_group(pid);
    bool file_left = left_in_dev_shm(left, sizeof left);
    if (!in_time || !reaped) {
        printf("FAIL %s: hang\n", c->name);
    } else if (WIFSIGNALED(st)) {
        printf("FAIL %s: killed by signal %d (%s)\n", c->name, WTERMSIG(st), strsignal(WTERMSIG(st)));
    } else if (WEXITSTATUS(st) == EXIT_SKIPPED) {
        printf("skip %s: %s\n", c->name, this_run.board->skip);
        result = EXIT_SKIPPED;
    } else if (WEXITSTATUS(st)) {
        printf("FAIL %s: exit status %d, seed %llu\n", c->name, WEXITSTATUS(st), (unsigned long long)this_run.seed);
    } else if (__atomic_load_n(&this_run.board->failed, __ATOMIC_ACQUIRE)) {
        printf("FAIL %s: a peer failed, seed %llu\n", c->name, (unsigned long long)this_run.seed);
    } else if (strays) {
        printf("FAIL %s: left %d processes behind\n", c->name, strays);
    } else if (file_left) {
        printf("FAIL %s: left /dev/shm/%s behind\n", c->name, left);
    } else if (must_cross(c) && !nodes_crossed(received)) {
        printf("FAIL %s: no connection has crossed the link between the nodes\n", c->name);
    } else {
        crossed += nodes_crossed(received);
        printf("ok   %s (%.0f ms%s)\n", c->name, ms, nodes_crossed(received) ? ", between nodes" : "");
        result = 0;
    }
    if (result == EXIT_FAILED)
        print_log(log);
    if (log >= 0)
        close(log);
    fflush(stdout);
    return result;
}

/* Finds a usable device in a child, because nothing may be open when cases fork. */
static bool provider_present(char *why, size_t len) {
    int fds[2];
    if (pipe2(fds, O_CLOEXEC))
        return false;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dp_error err = {0};
        dp_dev *dev;
        int st = dp_dev_open(this_run.provider, NULL, &dev, &err);
        if (st == DP_OK) {
            dp_dev_close(dev);
            _exit(0);
        }
        dprintf(fds[1], "%s", err.msg[0] ? err.msg : dp_status_text(st));
        _exit(EXIT_NO_DEVICE);
    }
    close(fds[1]);
    ssize_t n = read(fds[0], why, len - 1);
    why[n > 0 ? n : 0] = 0;
    close(fds[0]);
    int st = 0;
    waitpid(pid, &st, 0);
    if (WIFSIGNALED(st))
        snprintf(why, len, "opening the device ended with signal %d", WTERMSIG(st));
    return WIFEXITED(st) && WEXITSTATUS(st) == 0;
}

/* Loads and initialises libfabric once for all cases that follow: Debian's library takes 0.3 s. It keeps nothing open. */
static void load_library(void) {
    dp_dev *dev;
    if (t_is_ofi() && dp_dev_open("ofi", NULL, &dev, NULL) == DP_OK)
        dp_dev_close(dev);
}

static bool selected(const t_case *c, char **globs, int n) {
    if (c->providers && !(c->providers & (t_is_verbs() ? T_VERBS : t_is_tcp() ? T_TCP : t_is_ofi() ? T_OFI : T_SHM)))
        return false;
    if (this_run.encrypt && c->providers == T_TCP) /* peers made by hand, which do not encrypt */
        return false;
    /* One device is on one node. The cases of provider tcp alone choose their addresses themselves. */
    if (nodes_two() && ((c->providers && !(c->providers & ~(T_TCP | T_ENCRYPT))) || has_suffix(c->name, "@one-device")))
        return false;
    for (int i = 0; i < n; i++)
        if (!fnmatch(globs[i], c->name, 0))
            return true;
    return n == 0;
}

static int usage(const char *problem, const char *value) {
    fprintf(stderr, "dp_test: %s%s\nusage: dp_test [--list] [--provider shm|verbs|tcp|ofi] [--encrypt] [--case GLOB]... "
                    "[--repeat N] [--verbose] [GLOB]...\n",
            problem, value);
    return 2;
}

int main(int argc, char **argv) {
    char **globs = calloc((size_t)argc + 1, sizeof *globs);
    int n_globs = 0, repeat = 1;
    bool list = false;
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (!strcmp(argv[i], "--list"))
            list = true;
        else if (!strcmp(argv[i], "--verbose"))
            verbose = true;
        else if (!strcmp(argv[i], "--encrypt"))
            this_run.encrypt = true;
        else if (!strcmp(argv[i], "--provider") && more)
            this_run.provider = argv[++i];
        else if (!strcmp(argv[i], "--case") && more)
            globs[n_globs++] = argv[++i];
        else if (!strcmp(argv[i], "--repeat") && more)
            repeat = atoi(argv[++i]);
        else if (argv[i][0] == '-')
            return usage("bad option ", argv[i]);
        else
            globs[n_globs++] = argv[i];
    }
    if (strcmp(this_run.provider, "shm") && strcmp(this_run.provider, "verbs") && strcmp(this_run.provider, "tcp") &&
        strcmp(this_run.provider, "ofi"))
        return usage("unknown provider ", this_run.provider);
    if (repeat < 1)
        return usage("--repeat must be at least 1", "");
    char why[300];
    if (!nodes_open(why, sizeof why))
        return usage("cannot open ", why);
    if (list) {
        for (t_case *c = this_run.cases; c; c = c->next)
            if (selected(c, globs, n_globs))
                puts(c->name);
        free(globs);
        return 0;
    }
    const char *s = getenv("RFAAS_TEST_SEED");
    this_run.seed = s ? strtoull(s, NULL, 0) : (uint64_t)dp_now_ns();
    this_run.board = mmap(NULL, sizeof *this_run.board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (this_run.board == MAP_FAILED)
        return usage("mmap failed", "");
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    own_dev_shm();

    if (t_is_ofi()) { /* each case loads libfabric and connects: Debian's other providers take 0.4 s, connecting 10 ms a step */
        setenv("FI_PROVIDER", "tcp,ofi_rxm", 0);
        setenv("FI_OFI_RXM_CM_PROGRESS_INTERVAL", "100", 0);
    }
    void *frame;
    backtrace(&frame, 1); /* loads the unwinder now, not in a handler */
    check_leaks_at_exit();
    bool present = provider_present(why, sizeof why);
    const char *req = getenv("RFAAS_REQUIRE_VERBS");
    bool required = !t_is_verbs() || (req && !strcmp(req, "1"));
    int passed = 0, failed = 0, skipped = 0;
    for (int i = 0; i < 2 * repeat; i++) {
        bool loading = i < repeat; /* cases that load a library themselves come first */
        if (i == repeat && present)
            load_library();
        for (t_case *c = this_run.cases; c; c = c->next) {
            if (!selected(c, globs, n_globs) || loading != !strncmp(c->name, "load/", 5))
                continue;
            int result;
            if (present) {
                result = run_case(c);
            } else {
                result = required ? EXIT_FAILED : EXIT_SKIPPED;
                printf("%s %s: no %s device: %s\n", required ? "FAIL" : "skip", c->name, this_run.provider, why);
            }
            passed += result == 0;
            failed += result == EXIT_FAILED;
            skipped += result == EXIT_SKIPPED;
        }
    }
    free(globs);
    if (passed + failed + skipped == 0) {
        fprintf(stderr, "dp_test: no case matches\n");
        return 1;
    }
    if (nodes_two())
        printf("%d of %d cases crossed the link between the nodes\n", crossed, passed + failed + skipped);
    if (skipped)
        printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    else
        printf("%d passed, %d failed\n", passed, failed);
    return failed || (nodes_two() && !crossed) ? 1 : 0;
}
