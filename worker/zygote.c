/* The zygote: its start, and its loop, which answers each SPAWN and PREPARE. */
#include "zygote.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clone.h"
#include "crash.h"
#include "dp_tcp.h"
#include "message.h"
#include "pages.h"
#include "seed/layout.h"
#include "seed/place.h"
#include "seed/seed.h"
#include "startup/startup.h"
#include "worker.h"

typedef struct zygote {
    int sock;
    pid_t parent; /* executor */
    dp_sandbox *sandbox;
    dp_runtime *runtime; /* without a name: none */
    dp_cloner cloner;
    const char *version;
    dp_spare spare;
} zygote;

/* Reports to the spawner the processes to reap: the worker, and in a sandbox the guard and the stem. */
static int answer(const zygote *z, uint32_t id, dp_clones *c) {
    dp_error err = c->err;
    int st = c->status;
    if (st == DP_OK && c->pid < 0)
        st = dp_fail(&err, DP_FATAL, -c->pid, "clone worker %u", id);
    int e = 0;
    if (st == DP_OK) {
        uint32_t body = (uint32_t)c->pid;
        const int fds[DP_MSG_FDS_MAX] = {c->worker, c->sandbox.guard, c->sandbox.stem};
        e = dp_msg_send_fds(z->sock, DP_MSG_SPAWNED, id, &body, sizeof body, fds, c->sandbox.guard < 0 ? 1 : c->sandbox.stem < 0 ? 2 : 3);
        if (!e)
            return 0;
        syscall(SYS_pidfd_send_signal, c->worker, SIGKILL, NULL, 0);
        st = dp_fail(&err, DP_FATAL, e, "pass the descriptor of worker %u", id);
    }
    /* The processes that the spawner reaps, in this order: a guard ends only when its worker was reaped. */
    int reap[DP_MSG_FDS_MAX], n = 0;
    if (c->worker >= 0)
        reap[n++] = c->worker;
    if (c->sandbox.stem >= 0)
        reap[n++] = c->sandbox.stem;
    if (c->sandbox.guard >= 0) {
        syscall(SYS_pidfd_send_signal, c->sandbox.guard, SIGKILL, NULL, 0);
        reap[n++] = c->sandbox.guard;
    }
    return dp_msg_send_failure_fds(z->sock, DP_MSG_SPAWN_FAILED, id, st, err.msg, reap, n);
}

/* The cloned process: it lives as a worker, or tells the executor why its sandbox failed. */
_Noreturn static void be_worker(const zygote *z, const dp_packet *p, const dp_msg_spawn *m, const dp_clones *c, dp_ahead *memory) {
    if (c->status != DP_OK) {
        dp_msg_send_failure(p->fds[0], DP_MSG_FAILED, p->head.id, c->status, c->err.msg);
        _exit(DP_EXIT_FAILED);
    }
    dp_worker_fds fds = {p->fds[0], p->fds[1], p->fds[2], p->fds[3], p->fds[4], c->sandbox};
    if (p->head.type == DP_MSG_PREPARE)
        fds = (dp_worker_fds){p->fds[0], -1, -1, p->fds[1], p->fds[2], c->sandbox};
    dp_worker_live(p->head.id, m, &fds, z->parent, z->sandbox, memory);
}

/* Answers one SPAWN or PREPARE. Returns 0, or the errno with which the executor's socket failed. */
static int spawn(zygote *z, dp_packet *p) {
    uint32_t id = p->len >= sizeof p->head ? p->head.id : 0;
    dp_msg_spawn m;
    dp_error err;
    int st = dp_packet_spawn(p, &m, &err);
    if (st != DP_OK)
        return dp_msg_send_failure(z->sock, DP_MSG_SPAWN_FAILED, id, st, err.msg);

    if (m.provider == DP_PROVIDER_TCP && m.encrypt)
        dp_tcp_preload(); /* once, for all clones; if it fails, the worker reports it */
    if (m.provider == DP_PROVIDER_OFI)
        dp_ofi_preload(); /* likewise: Debian's libfabric takes 0.2 s to load */

    dp_channel_config sizes;
    dp_ahead *memory = dp_spare_take(&z->spare, dp_msg_pinned_channel(&m, &sizes) ? &sizes : NULL);
    int needed = p->head.type == DP_MSG_PREPARE ? DP_PREPARE_FDS : DP_SPAWN_FDS;
    dp_guard_files files = {.alive = p->fds[0], .join = p->fds + needed, .n_join = p->n_fds - needed, .memory = memory, .bundle = m.bundle};
    dp_clones c;
    /* No signal may arrive in the child while it still has the zygote's state. The worker unblocks signals. */
    sigset_t all, old;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &old);
    if (dp_clone_worker(&z->cloner, &files, &c) == 0)
        be_worker(z, p, &m, &c, memory);
    sigprocmask(SIG_SETMASK, &old, NULL);
    int e = answer(z, id, &c);
    dp_clones_close(&c);
    return e;
}

/* Without a guard or a filter of system calls, no worker can have its memory filled on demand. */
static bool keep_pages(dp_sandbox *s) {
    const uint32_t needed = DP_SANDBOX_PIDS | DP_SANDBOX_SECCOMP;
    if (!s->pages)
        return false;
    fcntl(s->pages, F_SETFD, FD_CLOEXEC);
    if ((s->parts & needed) != needed || !dp_pages_work(s->pages)) {
        close(s->pages);
        s->pages = 0;
    }
    return s->pages;
}

static int zygote_start(zygote *z) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* If the parent has ended before this call, the socket is closed, and the loop ends at once. */
    z->parent = getppid();
    prctl(PR_SET_NAME, "rfaas-zygote");
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, SIG_IGN); /* the executor decides; workers set it back */
    if (dp_cloner_init(&z->cloner, z->sandbox))
        return DP_EXIT_ZYGOTE;
    dp_crash_prepare();
    dp_modules_program();
    dp_seed_prepare();
    dp_error err;
    struct {
        uint32_t numbers[3];
        char text[DP_SANDBOX_TEXT_MAX + DP_VERSION_MAX]; /* missing parts, NUL, version */
    } hello = {{DP_WIRE_VERSION, (uint32_t)dp_verbs_preload(&err), 0}, ""};
    if (err.status != DP_OK)
        fprintf(stderr, "rfaas-worker: no verbs: %s\n", err.msg);
    dp_layout_end();
    dp_error no_seeds;
    if (dp_place_reserve(&no_seeds))
        fprintf(stderr, "rfaas-worker: %s\n", no_seeds.msg);
    if (z->runtime->name && dp_runtime_check(z->runtime, &err)) {
        dp_msg_send_failure(z->sock, DP_MSG_FAILED, 0, err.status, err.msg);
        return DP_EXIT_ZYGOTE;
    }
    dp_sandbox_prepare(z->sandbox, hello.numbers[1] > 0);
    hello.numbers[2] = z->sandbox->parts | (keep_pages(z->sandbox) ? DP_SANDBOX_PAGES : 0);
    if (dp_cloner_share(&z->cloner))
        return DP_EXIT_ZYGOTE;
    if (z->runtime->name && dp_runtime_start(z->runtime, &err)) {
        dp_msg_send_failure(z->sock, DP_MSG_FAILED, 0, err.status, err.msg);
        return DP_EXIT_ZYGOTE;
    }
    dp_shm_preload();
    dp_inherit_prepare();
    size_t text = strlen(z->sandbox->missing) + 1, version = strnlen(z->version, DP_VERSION_MAX);
    memcpy(hello.text, z->sandbox->missing, text);
    memcpy(hello.text + text, z->version, version);
    text += version;
    int e = dp_msg_send(z->sock, DP_MSG_HELLO, 0, &hello, (uint32_t)(sizeof hello.numbers + text), -1);
    if (e) {
        fprintf(stderr, "rfaas-worker: descriptor %d: %s\n", z->sock, strerror(e));
        return DP_EXIT_ZYGOTE;
    }
    return 0;
}

int dp_zygote_run(int sock, dp_sandbox *sandbox, dp_runtime *runtime, const char *version) {
    zygote z = {.sock = sock, .sandbox = sandbox, .runtime = runtime, .version = version};
    int st = zygote_start(&z);
    if (st)
        return st;
    for (;;) {
        dp_packet p;
        dp_spare_fill(&z.spare, sock);
        int got = dp_packet_recv(sock, &p);
        if (got == 0)
            return DP_EXIT_STOPPED;
        if (got < 0) {
            fprintf(stderr, "rfaas-worker: receive from the executor: %s\n", strerror(-got));
            return DP_EXIT_ZYGOTE;
        }
        int e = spawn(&z, &p);
        dp_packet_close(&p);
        if (e) {
            if (e != EPIPE && e != ECONNRESET)
                fprintf(stderr, "rfaas-worker: send to the executor: %s\n", strerror(e));
            return e == EPIPE || e == ECONNRESET ? DP_EXIT_STOPPED : DP_EXIT_ZYGOTE;
        }
    }
}
