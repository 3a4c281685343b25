#include "harness.h"

#include <dirent.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { EXIT_FAILED = 1, EXIT_SKIPPED = 77, EXIT_NO_DEVICE = 78, SLOTS = 256 };

/* Where one thread of the case is. Lives in memory shared by the runner and everything it forks; the
 * file names are literals of the same program, so the runner can follow the pointers. */
typedef struct slot {
    pid_t pid, tid;
    const char *file;
    int line;
    char name[24];
    char note[120];
} slot;

typedef struct board {
    uint32_t claimed;
    uint32_t failed;
    char skip[200];
    slot slots[SLOTS];
} board;

static t_case *cases;
static board *shared;
static const char *provider = "shm";
static uint64_t seed;
static bool verbose;
static bool private_dev_shm; /* /dev/shm is ours alone, so that whatever is left there is ours */
static t_peer *peers;        /* process peers of this process, so that later ones can drop their sockets */

static __thread slot *my_slot;
static __thread uint64_t random_state;

/* ---- registration ---- */

void t_register(t_case *c) {
    t_case **at = &cases;
    while (*at && strcmp((*at)->name, c->name) < 0)
        at = &(*at)->next;
    c->next = *at;
    *at = c;
}

const char *t_provider(void) { return provider; }
bool t_is_verbs(void) { return provider[0] == 'v'; }

double t_time_scale(void) {
    const char *s = getenv("RFAAS_TEST_TIMEOUT_SCALE");
    double v = s ? strtod(s, NULL) : 0;
    if (v <= 0)
        v = 1;
    return T_ASAN || T_TSAN ? v * 4 : v;
}

/* ---- where we are ---- */

static slot *claim_slot(void) {
    slot *s = &shared->slots[__atomic_fetch_add(&shared->claimed, 1, __ATOMIC_RELAXED) % SLOTS];
    memset(s, 0, sizeof *s);
    s->pid = getpid();
    s->tid = (pid_t)syscall(SYS_gettid);
    my_slot = s;
    return s;
}

static slot *here(void) { return my_slot ? my_slot : claim_slot(); }

void t_at(const char *file, int line) {
    slot *s = here();
    s->file = file;
    s->line = line;
}

void t_note(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(here()->note, sizeof here()->note, fmt, ap);
    va_end(ap);
}

void t_name(const char *name) { snprintf(here()->name, sizeof here()->name, "%s", name); }

static const char *base_name(const char *file) {
    const char *slash = file ? strrchr(file, '/') : NULL;
    return slash ? slash + 1 : file ? file : "?";
}

void t_fail_at(const char *file, int line, const char *fmt, ...) {
    char text[800];
    int n = snprintf(text, sizeof text, "    %s:%d: ", base_name(file), line);
    va_list ap;
    va_start(ap, fmt);
    n += vsnprintf(text + n, sizeof text - (size_t)n, fmt, ap);
    va_end(ap);
    if (n >= (int)sizeof text)
        n = sizeof text - 1;
    slot *s = here();
    dprintf(2, "%s\n        in %s, process %d thread %d%s%s\n", text, s->name[0] ? s->name : "main", s->pid, s->tid,
            s->note[0] ? ", at: " : "", s->note);
    __atomic_store_n(&shared->failed, 1, __ATOMIC_RELEASE);
    _exit(EXIT_FAILED);
}

void t_skip(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(shared->skip, sizeof shared->skip, fmt, ap);
    va_end(ap);
    _exit(EXIT_SKIPPED);
}

void t_check_bytes(const char *file, int line, const void *p, int value, size_t n, const char *what) {
    const unsigned char *b = p;
    t_at(file, line);
    for (size_t i = 0; i < n; i++)
        if (b[i] != (unsigned char)value)
            t_fail_at(file, line, "%s[%zu of %zu] is %#x, wanted %#x", what, i, n, b[i], (unsigned char)value);
}

void t_check_same(const char *file, int line, const void *got, const void *want, size_t n, const char *what) {
    const unsigned char *a = got, *b = want;
    t_at(file, line);
    if (!memcmp(a, b, n))
        return;
    size_t i = 0;
    while (i + 1 < n && a[i] == b[i])
        i++;
    t_fail_at(file, line, "%s[%zu of %zu] is %#x, wanted %#x", what, i, n, a[i], b[i]);
}

/* ---- randomness, time ---- */

uint64_t t_random(void) {
    if (!random_state)
        random_state = seed * 0x9E3779B97F4A7C15ull + (uint64_t)syscall(SYS_gettid) + 1;
    /* splitmix64 */
    uint64_t z = random_state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

void t_sleep_ms(int ms) {
    struct timespec ts = {ms / 1000, (long)(ms % 1000) * 1000000};
    while (nanosleep(&ts, &ts) && errno == EINTR)
        ;
}

/* ---- leaks ---- */

static int count_dir(const char *path, uint64_t *bits) {
    DIR *d = opendir(path);
    if (!d)
        T_FAIL("open %s: %s", path, strerror(errno));
    int n = 0;
    for (struct dirent *e; (e = readdir(d));) {
        int fd = atoi(e->d_name);
        if (e->d_name[0] == '.' || (bits && fd == dirfd(d)))
            continue;
        n++;
        if (bits && fd < 1024)
            bits[fd / 64] |= 1ull << (fd % 64);
    }
    closedir(d);
    return n;
}

void t_usage_now(t_usage *u) {
    memset(u, 0, sizeof *u);
    u->n_fds = count_dir("/proc/self/fd", u->fds);
    u->threads = count_dir("/proc/self/task", NULL);
    dp_live_now(&u->live);
    FILE *f = fopen("/proc/self/maps", "re");
    if (!f)
        T_FAIL("open /proc/self/maps: %s", strerror(errno));
    char line[512], perms[8];
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%*s %7s", perms) == 1) {
            u->maps++;
            u->shared_maps += perms[3] == 's';
        }
    }
    fclose(f);
}

void t_usage_check(const t_usage *before) {
    t_usage now;
    /* A joined thread may stay in /proc for a moment. */
    for (int i = 0; i < 200; i++) {
        t_usage_now(&now);
        now.threads -= T_TSAN && now.threads > 1; /* the sanitizer's own, which it starts with the first other */
        if (now.threads <= before->threads)
            break;
        t_sleep_ms(2);
    }
    for (int fd = 0; fd < 1024; fd++) {
        if (!(now.fds[fd / 64] & ~before->fds[fd / 64] & 1ull << (fd % 64)))
            continue;
        char path[64], target[200];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(path, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        T_FAIL("leak: descriptor %d (%s) left open", fd, target);
    }
    const struct {
        const char *what;
        int32_t before, now;
    } objects[] = {
        {"devices", before->live.devices, now.live.devices},
        {"domains", before->live.domains, now.live.domains},
        {"regions", before->live.regions, now.live.regions},
        {"completion queues", before->live.queues, now.live.queues},
        {"queue pairs", before->live.queue_pairs, now.live.queue_pairs},
    };
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++)
        if (objects[i].now != objects[i].before)
            T_FAIL("leak: %d %s, %d before", objects[i].now, objects[i].what, objects[i].before);
    if (now.shared_maps > before->shared_maps)
        T_FAIL("leak: %d shared mappings, %d before", now.shared_maps, before->shared_maps);
    if (now.threads > before->threads)
        T_FAIL("leak: %d threads, %d before", now.threads, before->threads);
}

/* ---- peers ---- */

typedef struct peer_start {
    void (*fn)(int, void *);
    void *arg;
    int sock;
} peer_start;

static void *peer_thread(void *p) {
    peer_start s = *(peer_start *)p;
    free(p);
    claim_slot();
    t_name("peer thread");
    s.fn(s.sock, s.arg);
    close(s.sock);
    return NULL;
}

void t_peer_start(t_peer *p, bool process, void (*fn)(int, void *), void *arg) {
    int sv[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv))
        T_FAIL("socketpair: %s", strerror(errno));
    *p = (t_peer){.sock = sv[0], .process = process};
    if (!process) {
        peer_start *s = malloc(sizeof *s);
        *s = (peer_start){fn, arg, sv[1]};
        if (pthread_create(&p->thread, NULL, peer_thread, s))
            T_FAIL("pthread_create: %s", strerror(errno));
        return;
    }
    pid_t parent = getpid();
    p->pid = fork();
    if (p->pid < 0)
        T_FAIL("fork: %s", strerror(errno));
    if (p->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(EXIT_FAILED);
        close(sv[0]);
        for (t_peer *q = peers; q; q = q->next)
            close(q->sock);
        peers = NULL;
        random_state = 0;
        claim_slot();
        t_name("peer process");
        t_usage before;
        t_usage_now(&before);
        fn(sv[1], arg);
        t_usage_check(&before);
        exit(0); /* not _exit: the leak sanitizer looks now */
    }
    close(sv[1]);
    p->next = peers;
    peers = p;
}

static void forget_peer(t_peer *p) {
    close(p->sock);
    for (t_peer **at = &peers; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            return;
        }
}

static int reap(pid_t pid) {
    int st;
    while (waitpid(pid, &st, 0) < 0)
        if (errno != EINTR)
            T_FAIL("waitpid %d: %s", pid, strerror(errno));
    return st;
}

void t_peer_join(t_peer *p) {
    if (!p->process) {
        pthread_join(p->thread, NULL);
        close(p->sock);
        return;
    }
    int st = reap(p->pid);
    forget_peer(p);
    if (WIFSIGNALED(st))
        T_FAIL("peer process %d killed by signal %d (%s)", p->pid, WTERMSIG(st), strsignal(WTERMSIG(st)));
    if (WEXITSTATUS(st))
        T_FAIL("peer process %d failed (exit status %d)", p->pid, WEXITSTATUS(st));
}

void t_peer_kill(t_peer *p) {
    kill(p->pid, SIGKILL);
    reap(p->pid);
    forget_peer(p);
}

void t_send(int sock, const void *msg, size_t len) {
    const char *b = msg;
    while (len) {
        ssize_t n = send(sock, b, len, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            T_FAIL("the other side ended early (send: %s)", strerror(errno));
        b += n;
        len -= (size_t)n;
    }
}

void t_recv(int sock, void *msg, size_t len) {
    char *b = msg;
    while (len) {
        ssize_t n = recv(sock, b, len, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            T_FAIL("the other side ended early (recv: %s)", n ? strerror(errno) : "end of stream");
        b += n;
        len -= (size_t)n;
    }
}

void t_sync(int sock) {
    char c = 's';
    t_send(sock, &c, 1);
    t_recv(sock, &c, 1);
    CHECK_EQ(c, 's');
}

/* ---- the child of a case ---- */

/* Prints this thread's stack. SIGQUIT asks for it after a hang; a crash gets it too. */
static void print_stack(int sig) {
    void *frames[48];
    slot *s = my_slot;
    dprintf(2, "    %s, process %d thread %d: %s after %s:%d%s%s; stack (addr2line -fe):\n",
            s && s->name[0] ? s->name : "main", getpid(), (int)syscall(SYS_gettid),
            sig == SIGQUIT ? "still running" : strsignal(sig), base_name(s ? s->file : NULL), s ? s->line : 0,
            s && s->note[0] ? ", at: " : "", s ? s->note : "");
    backtrace_symbols_fd(frames, backtrace(frames, 48), 2);
    if (sig != SIGQUIT) {
        signal(sig, SIG_DFL);
        raise(sig);
    }
}

static void install_reporters(void) {
    void *frame;
    backtrace(&frame, 1); /* loads the unwinder now, not in the handler */
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
    claim_slot();
    t_usage before;
    t_usage_now(&before);
    c->run(c);
    t_note("after the case: leaks");
    t_usage_check(&before);
    exit(0);
}

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

/* Sends SIGQUIT to every thread of every process of the group, so that each prints its stack. */
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
    uint32_t n = shared->claimed < SLOTS ? shared->claimed : SLOTS;
    for (uint32_t i = 0; i < n; i++) {
        slot *s = &shared->slots[i];
        if (!s->file || kill(s->pid, 0))
            continue;
        printf("    last check of %s, process %d thread %d: %s:%d%s%s\n", s->name[0] ? s->name : "main", s->pid, s->tid,
               base_name(s->file), s->line, s->note[0] ? ", at: " : "", s->note);
    }
}

static void print_log(int log) {
    char buf[4096];
    off_t at = 0;
    for (ssize_t n; log >= 0 && (n = pread(log, buf, sizeof buf, at)) > 0; at += n)
        fwrite(buf, 1, (size_t)n, stdout);
}

/* Kills and reaps what is left of the group; returns how many processes there were. */
static int sweep_group(pid_t group) {
    int n = 0;
    /* Peers that were killed with the case's own exit come to us as zombies: those are not left behind. */
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

/* Names one file left in /dev/shm, or returns false. Without a /dev/shm of our own only ours by name count. */
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

/* Runs one case. Returns EXIT_FAILED, EXIT_SKIPPED or 0. */
static int run_case(const t_case *c) {
    int log = verbose ? -1 : memfd_create("case-output", MFD_CLOEXEC);
    memset(shared, 0, sizeof *shared);
    int seconds = t_is_verbs() ? (c->verbs_seconds ? c->verbs_seconds : 30) : (c->seconds ? c->seconds : 10);
    fflush(NULL);
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
    bool in_time = wait_pidfd(pidfd, start + (int64_t)(seconds * t_time_scale() * 1e9));
    if (!in_time) {
        printf("HANG %s: not done after %.0f s\n", c->name, seconds * t_time_scale());
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
        printf("skip %s: %s\n", c->name, shared->skip);
        result = EXIT_SKIPPED;
    } else if (WEXITSTATUS(st)) {
        printf("FAIL %s: exit status %d, seed %llu\n", c->name, WEXITSTATUS(st), (unsigned long long)seed);
    } else if (__atomic_load_n(&shared->failed, __ATOMIC_ACQUIRE)) {
        printf("FAIL %s: a peer failed, seed %llu\n", c->name, (unsigned long long)seed);
    } else if (strays) {
        printf("FAIL %s: left %d processes behind\n", c->name, strays);
    } else if (file_left) {
        printf("FAIL %s: left /dev/shm/%s behind\n", c->name, left);
    } else {
        printf("ok   %s (%.0f ms)\n", c->name, ms);
        result = 0;
    }
    if (result == EXIT_FAILED)
        print_log(log);
    if (log >= 0)
        close(log);
    fflush(stdout);
    return result;
}

/* Looks for a usable device in a child, since nothing may be open when cases fork. */
static bool provider_present(char *why, size_t len) {
    int fds[2];
    if (pipe2(fds, O_CLOEXEC))
        return false;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dp_error err = {0};
        dp_dev *dev;
        int st = dp_dev_open(provider, NULL, &dev, &err);
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

static bool selected(const t_case *c, char **globs, int n) {
    if (c->providers && !(c->providers & (t_is_verbs() ? T_VERBS : T_SHM)))
        return false;
    for (int i = 0; i < n; i++)
        if (!fnmatch(globs[i], c->name, 0))
            return true;
    return n == 0;
}

static int usage(const char *problem, const char *value) {
    fprintf(stderr, "dp_test: %s%s\nusage: dp_test [--list] [--provider shm|verbs] [--case GLOB]... [--repeat N] "
                    "[--verbose] [GLOB]...\n",
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
        else if (!strcmp(argv[i], "--provider") && more)
            provider = argv[++i];
        else if (!strcmp(argv[i], "--case") && more)
            globs[n_globs++] = argv[++i];
        else if (!strcmp(argv[i], "--repeat") && more)
            repeat = atoi(argv[++i]);
        else if (argv[i][0] == '-')
            return usage("bad option ", argv[i]);
        else
            globs[n_globs++] = argv[i];
    }
    if (strcmp(provider, "shm") && strcmp(provider, "verbs"))
        return usage("unknown provider ", provider);
    if (repeat < 1)
        return usage("--repeat must be at least 1", "");
    if (list) {
        for (t_case *c = cases; c; c = c->next)
            if (selected(c, globs, n_globs))
                puts(c->name);
        free(globs);
        return 0;
    }
    const char *s = getenv("RFAAS_TEST_SEED");
    seed = s ? strtoull(s, NULL, 0) : (uint64_t)dp_now_ns();
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return usage("mmap failed", "");
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    own_dev_shm();

    char why[300];
    bool present = provider_present(why, sizeof why);
    const char *req = getenv("RFAAS_REQUIRE_VERBS");
    bool required = !t_is_verbs() || (req && !strcmp(req, "1"));
    int passed = 0, failed = 0, skipped = 0;
    for (int r = 0; r < repeat; r++) {
        for (t_case *c = cases; c; c = c->next) {
            if (!selected(c, globs, n_globs))
                continue;
            int result;
            if (present) {
                result = run_case(c);
            } else {
                result = required ? EXIT_FAILED : EXIT_SKIPPED;
                printf("%s %s: no %s device: %s\n", required ? "FAIL" : "skip", c->name, provider, why);
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
    if (skipped)
        printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    else
        printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}
