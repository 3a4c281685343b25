#include "runner.h"

#include "nodes.h"

#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

t_run this_run = {.provider = "shm"};
static t_peer *peers; /* process peers of this process; later ones close the sockets of earlier ones */

static __thread t_slot *my_slot;
static __thread uint64_t random_state;
__thread void (*t_idle)(void);

/* ---- registration ---- */

void t_register(t_case *c) {
    t_case **at = &this_run.cases;
    while (*at && strcmp((*at)->name, c->name) < 0)
        at = &(*at)->next;
    c->next = *at;
    *at = c;
}

const char *t_provider(void) { return this_run.provider; }
bool t_is_shm(void) { return this_run.provider[0] == 's'; }
bool t_is_verbs(void) { return this_run.provider[0] == 'v'; }
bool t_is_tcp(void) { return this_run.provider[0] == 't'; }
bool t_is_ofi(void) { return this_run.provider[0] == 'o'; }

#undef dp_dev_open
int t_dev_open(const char *provider, const dp_dev_options *opts, dp_dev **out, dp_error *err) {
    dp_dev_options o = opts ? *opts : (dp_dev_options){.gid_index = -1};
    if (!provider || strcmp(provider, "tcp"))
        return dp_dev_open(provider, opts, out, err);
    if (this_run.encrypt && !o.encrypt)
        o.encrypt = DP_ENCRYPT_REQUIRE;
    return nodes_dev_open(&o, out, err);
}

double t_time_scale(void) {
    const char *s = getenv("RFAAS_TEST_TIMEOUT_SCALE");
    double v = s ? strtod(s, NULL) : 0;
    if (v <= 0)
        v = 1;
    return T_ASAN || T_TSAN ? v * 4 : v;
}

/* ---- last CHECK of each thread ---- */

t_slot *t_claim_slot(void) {
    t_slot *s = &this_run.board->slots[__atomic_fetch_add(&this_run.board->claimed, 1, __ATOMIC_RELAXED) % SLOTS];
    memset(s, 0, sizeof *s);
    s->pid = getpid();
    s->tid = (pid_t)syscall(SYS_gettid);
    my_slot = s;
    return s;
}

const t_slot *t_my_slot(void) { return my_slot; }

static t_slot *here(void) { return my_slot ? my_slot : t_claim_slot(); }

void t_at(const char *file, int line) {
    t_slot *s = here();
    s->file = file;
    s->line = line;
    __atomic_store_n(&s->checks, s->checks + 1, __ATOMIC_RELAXED);
}

void t_note(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(here()->note, sizeof here()->note, fmt, ap);
    va_end(ap);
}

void t_name(const char *name) { snprintf(here()->name, sizeof here()->name, "%s", name); }

const char *t_base_name(const char *file) {
    const char *slash = file ? strrchr(file, '/') : NULL;
    return slash ? slash + 1 : file ? file : "?";
}

void t_fail_at(const char *file, int line, const char *fmt, ...) {
    char text[800];
    int n = snprintf(text, sizeof text, "    %s:%d: ", t_base_name(file), line);
    va_list ap;
    va_start(ap, fmt);
    n += vsnprintf(text + n, sizeof text - (size_t)n, fmt, ap);
    va_end(ap);
    if (n >= (int)sizeof text)
        n = sizeof text - 1;
    t_slot *s = here();
    dprintf(2, "%s\n        in %s, process %d thread %d%s%s\n", text, s->name[0] ? s->name : "main", s->pid, s->tid,
            s->note[0] ? ", at: " : "", s->note);
    __atomic_store_n(&this_run.board->failed, 1, __ATOMIC_RELEASE);
    _exit(EXIT_FAILED);
}

void t_skip(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(this_run.board->skip, sizeof this_run.board->skip, fmt, ap);
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
        random_state = this_run.seed * 0x9E3779B97F4A7C15ull + (uint64_t)syscall(SYS_gettid) + 1;
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
        now.threads -= T_TSAN && now.threads > 1; /* without the sanitizer's thread, which it starts with the first other one */
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
    t_claim_slot();
    t_name("peer thread");
    nodes_peer(false);
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
        t_claim_slot();
        t_name("peer process");
        nodes_peer(true);
        t_usage before;
        t_usage_now(&before);
        fn(sv[1], arg);
        t_usage_check(&before);
        exit(0); /* not _exit: the leak sanitizer checks in exit */
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
        ssize_t n = recv(sock, b, len, t_idle ? MSG_DONTWAIT : 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN && t_idle) {
            t_idle();
            sched_yield();
            continue;
        }
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
