/* The worker from its first instruction to its exit. The order of its steps matters:
 *
 *   die with the executor, own session, signals             before anything can hang or crash
 *   own descriptors only                                     before a device opens new ones
 *   own user id; on verbs and tcp: into the sandbox          before a device is opened, which remembers the opener's credentials
 *   pin                                                      before memory is touched, so that its pages are near
 *   device, memory, queue pair, connect; memory limit        with final credentials and before any user code; by the end
 *                                                            the process has one thread
 *   on shm and ofi into the sandbox                          after connecting, since the client's socket is in another network
 *   crash notes                                              before user code, which could crash
 *   device files hidden, system calls filtered               when no later step needs them
 *   user's library; LOADED                                   the first user code is the library's constructor
 *   monitor thread; serve                                    messages of the executor are handled from here on; one brings the
 *                                                            client's connection on tcp
 *
 * A pooled worker first takes the steps that need no client: device, sandbox, memory and queue pair for a channel of the usual
 * sizes, hiding device files, the filter without the rules against connecting; PREPARED. With the lease it is pinned, connects
 * and continues as above, and sealing adds the remaining rules. Its memory stays on its first NUMA node.
 *
 * On shm a worker takes the steps from the memory limit to LOADED after its message to the client's socket, while it waits for the client's answer. After the
 * answer only memory is left to map.
 *
 * The zygote's heap and libraries are inherited copy-on-write, its descriptors are closed.
 */
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "bundle.h"
#include "crash.h"
#include "dp_serve.h"
#include "inspect.h"
#include "limit.h"
#include "listen.h"
#include "load.h"
#include "make_seed.h"
#include "pages.h"
#include "page.h"
#include "seed/resume.h"
#include "seed/seed.h"
#include "startup/startup.h"

/* Descriptors of a worker while it starts. Code, names and page are closed before it serves. */
enum {
    FD_LOG_OUT = 1,
    FD_LOG_ERR = 2,
    FD_SOCK = 3,
    FD_CODE = 4,
    FD_NAMES = 5,
    FD_PAGE = 6,
    FD_CTL = 7, /* to the sandbox's guard */
    FD_GUARD = 8,
    FD_PAGES = 9, /* userfaultfd of a pooled worker */
    FD_FREE = DP_INHERIT_FREE,
};

#define LOCKED_MOST (8u << 20) /* bytes that a function may lock: the kernel's default for every user */

typedef struct worker {
    uint32_t id;
    const dp_msg_spawn *m;
    dp_dev *dev;
    dp_server *server;
    dp_worker_page *page;
    const dp_sandbox *sandbox;
    dp_sandbox_fds guard; /* none where the sandbox has none */
    uint64_t memory;     /* private writable bytes of a pooled worker before its lease */
    uint64_t began;      /* time of the first instruction, or of the lease */
    uint64_t sandbox_ns; /* duration of the sandbox's steps since then */
    uint64_t code_ns;    /* duration of loading the library */
    bool told;           /* LOADED was sent */
    bool early;          /* prepared before its lease */
    bool inside;         /* enters the sandbox before it opens its device */
    int pages;           /* userfaultfd, -1: none */
    int seed;            /* file of the seed from which the worker starts, -1: none */
} worker;

_Noreturn static void leave(int code) {
    /* Destructors of user code could hang or crash, so only buffered output is written. The kernel frees memory, keys and
     * queue pairs. */
    fflush(stdout);
    fflush(stderr);
    _exit(code);
}

_Noreturn static void fail(const worker *w, int sock, int status, const char *text) {
    dp_msg_send_failure(sock, DP_MSG_FAILED, w->id, status, text);
    leave(DP_EXIT_FAILED);
}

/* ---- steps ---- */

/* Batch systems send SIGTERM to every process of a job. The executor handles it and lets calls finish, so a worker ignores it,
 * unless a function sends it to its own process. This is a handler, because programs that functions start would inherit
 * SIG_IGN. */
static void ignore_sigterm(int sig, siginfo_t *info, void *context) {
    (void)context;
    if (info->si_pid != getpid())
        return;
    signal(sig, SIG_DFL);
    raise(sig); /* when this returns */
}

static void take_name(const worker *w) {
    char name[16] = "rfaas-pooled";
    if (w->m->n_functions)
        snprintf(name, sizeof name, "rfaas-w%u", w->id);
    prctl(PR_SET_NAME, name);
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Makes the kernel kill this process when its parent ends, and exits if the executor has already ended. In a process namespace
 * the parent's id is not visible, so the socket shows it: it closes before the executor's children get their signal. */
static void tie(int sock, pid_t parent, bool sandboxed) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct pollfd p = {.fd = sock};
    bool gone = sandboxed ? poll(&p, 1, 0) == 1 && p.revents & (POLLHUP | POLLERR) : getppid() != parent;
    if (gone)
        _exit(DP_EXIT_ORPHAN);
}

static void detach(const worker *w, const dp_worker_fds *fds, pid_t parent) {
    int sock = fds->sock;
    tie(sock, parent, fds->sandbox.guard >= 0);
    if (w->sandbox->idle)
        setpgid(0, 0); /* stay in the zygote's session, which has the smallest weight */
    else
        setsid();
    dp_inherit_signals();
    struct sigaction term = {.sa_sigaction = ignore_sigterm, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGTERM, &term, NULL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    take_name(w);
}

static void close_from(int first) {
#ifdef SYS_close_range
    if (syscall(SYS_close_range, first, ~0u, 0) == 0)
        return;
#endif
    for (long fd = sysconf(_SC_OPEN_MAX) - 1; fd >= first; fd--)
        close((int)fd);
}

/* Moves the given descriptors to the numbers of the enumeration above, and closes all others. */
static void own_descriptors(worker *w, const dp_worker_fds *fds) {
    int null = dp_inherit_null();
    if (null < 0)
        fail(w, fds->sock, DP_FATAL, "open /dev/null");
    const struct {
        int from, to, flags;
    } moves[] = {
        {null, 0, 0},
        {fds->log, FD_LOG_OUT, 0},
        {fds->log, FD_LOG_ERR, 0},
        {fds->sock, FD_SOCK, O_CLOEXEC},
        {fds->code < 0 ? null : fds->code, FD_CODE, O_CLOEXEC}, /* reserved for the lease's */
        {fds->names < 0 ? null : fds->names, FD_NAMES, O_CLOEXEC},
        {fds->page, FD_PAGE, O_CLOEXEC},
        {fds->sandbox.ctl < 0 ? null : fds->sandbox.ctl, FD_CTL, O_CLOEXEC},
        {fds->sandbox.guard < 0 ? null : fds->sandbox.guard, FD_GUARD, O_CLOEXEC},
        {w->pages < 0 ? null : w->pages, FD_PAGES, O_CLOEXEC},
    };
    enum { N = sizeof moves / sizeof *moves };
    /* Sources below FD_FREE are copied above all targets first, so that no target overwrites a source. */
    int high[N];
    for (int i = 0; i < N; i++) {
        high[i] = moves[i].from < FD_FREE ? fcntl(moves[i].from, F_DUPFD_CLOEXEC, FD_FREE) : moves[i].from;
        if (high[i] < 0)
            fail(w, fds->sock, DP_FATAL, "no descriptors left for a worker");
    }
    for (int i = 0; i < N; i++)
        if (dup3(high[i], moves[i].to, moves[i].flags) < 0)
            fail(w, high[3], DP_FATAL, "place a worker's descriptors");
    close_from(FD_FREE);
    if (w->pages < 0)
        close(FD_PAGES);
    else
        w->pages = FD_PAGES;
    if (fds->sandbox.guard >= 0) {
        w->guard = (dp_sandbox_fds){.ctl = FD_CTL, .guard = FD_GUARD, .stem = -1};
    } else {
        close(FD_CTL);
        close(FD_GUARD);
    }
}

static void map_page(worker *w) {
    struct stat sb;
    if (fstat(FD_PAGE, &sb) || sb.st_size != DP_PAGE_SIZE)
        fail(w, FD_SOCK, DP_INVALID, "the worker's page is not a file of 4096 bytes");
    void *page = mmap(NULL, DP_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, FD_PAGE, 0);
    if (page == MAP_FAILED)
        fail(w, FD_SOCK, DP_FATAL, "map the worker's page");
    close(FD_PAGE);
    w->page = page;
    w->page->begun = 1;
}

static void must(const worker *w, int st, const dp_error *err) {
    if (st != DP_OK)
        fail(w, FD_SOCK, st, err->msg);
}

static void pin_worker(const worker *w) {
    dp_error err = {0};
    must(w, dp_worker_pin(w->m->cpus, &err), &err);
}

/* Sets the options of an ofi device from "PROVIDER,DEVICE", which it copies to `text`. */
static void choose_ofi(const worker *w, char text[sizeof w->m->device], dp_dev_options *opts) {
    dp_error err = {0};
    memcpy(text, w->m->device, sizeof w->m->device);
    char *comma = strchr(text, ',');
    if (comma)
        *comma = 0;
    if (!comma || !*text)
        must(w, dp_fail(&err, DP_INVALID, 0, "ofi device \"%s\", want PROVIDER,DEVICE", w->m->device), &err);
    if (w->sandbox->wanted && strcmp(text, "tcp"))
        must(w, dp_fail(&err, DP_UNSUPPORTED, 0, "ofi: a worker in a sandbox can use libfabric's provider tcp only, not %s", text), &err);
    opts->advertise = opts->device = NULL;
    dp_ofi_choose(opts, text, comma + 1);
    /* Debian's other providers take 0.3 s to initialise, and psm sleeps. */
    setenv("FI_PROVIDER", strcmp(text, "tcp") ? text : "tcp,ofi_rxm", 0);
    setenv("FI_OFI_RXM_MSG_RX_SIZE", "16", 0); /* 50 MiB less of buffers for messages, of which rfaas has few */
}

static void open_device(worker *w) {
    const dp_msg_spawn *m = w->m;
    dp_error err = {0};
    static const char *const names[] = {[DP_PROVIDER_SHM] = "shm", [DP_PROVIDER_VERBS] = "verbs", [DP_PROVIDER_TCP] = "tcp",
                                        [DP_PROVIDER_OFI] = "ofi"};
    char ofi[sizeof m->device];
    dp_dev_options opts = {
        .device = m->device,
        .advertise = m->device,
        .handed = m->provider == DP_PROVIDER_TCP,
        .encrypt = m->encrypt,
        .port = m->port,
        .gid_index = m->gid_index,
        .pkey_index = (int)m->pkey_index,
        .traffic_class = (int)m->traffic_class,
        .service_level = (int)m->service_level,
        .mtu = (int)m->mtu,
        .active_side_only = m->provider == DP_PROVIDER_SHM || m->provider == DP_PROVIDER_OFI,
    };
    if (m->provider == DP_PROVIDER_OFI)
        choose_ofi(w, ofi, &opts);
    int st = dp_dev_open(names[m->provider], &opts, &w->dev, &err);
    if (st != DP_OK)
        fail(w, FD_SOCK, st, err.msg);
}

static void seal(worker *w, bool early);

/* Bytes that a seed maps in addition to what user code may allocate. */
static uint64_t seed_memory(uint32_t units) { return units ? units * DP_HEAP_UNIT + DP_HEAP_LINKED : 0; }

/* Makes a seed instead of serving a lease. The library has the same path as in the workers that start from it, so that the dynamic linker
 * allocates the same memory. */
_Noreturn static void make_seed(worker *w, const dp_msg_seed *m, int fds[DP_SEED_FDS]) {
    dp_error err = {0};
    if (dup3(fds[0], FD_CODE, O_CLOEXEC) < 0 || dup3(fds[1], FD_NAMES, O_CLOEXEC) < 0)
        fail(w, FD_SOCK, DP_FATAL, "place a seed's descriptors");
    close(fds[0]);
    close(fds[1]);
    fds[0] = FD_CODE;
    fds[1] = FD_NAMES;
    prctl(PR_SET_NAME, "rfaas-seed");
    must(w, dp_worker_limit_memory(w->memory + seed_memory(m->seed_units), m->memory_limit, &err), &err);
    w->page->phase = DP_PHASE_LOADING;
    seal(w, true);
    dp_seed_make(FD_SOCK, w->id, m, fds);
}

/* Waits for a prepared worker's lease. Does not return if the worker gets a library to read instead. */
static void wait_for_lease(worker *w, dp_msg_task *task) {
    dp_msg_send(FD_SOCK, DP_MSG_STARTED, w->id, NULL, 0, -1);
    dp_msg_send(FD_SOCK, DP_MSG_PREPARED, w->id, NULL, 0, -1);
    dp_error err = {0};
    int fds[DP_TASK_FDS_MAX];
    int st = dp_msg_recv_task(FD_SOCK, task, fds, &err);
    if (st == DP_CANCELLED)
        leave(DP_EXIT_STOPPED);
    if (st == DP_OK && task->type == DP_MSG_SEED)
        make_seed(w, &task->seed, fds);
    if (st == DP_OK && task->type != DP_MSG_SPAWN)
        dp_worker_inspect(FD_SOCK, w->id, task, fds, w->memory);
    const dp_msg_spawn *lease = &task->lease;
    if (st == DP_OK && (lease->provider != w->m->provider || lease->encrypt != w->m->encrypt || strcmp(lease->device, w->m->device)))
        st = dp_fail(&err, DP_INVALID, 0, "prepared for provider %u, device \"%s\", encryption %u, not %u, \"%s\", %u", w->m->provider,
                     w->m->device, w->m->encrypt, lease->provider, lease->device, lease->encrypt);
    must(w, st, &err);
    w->m = lease;
    w->began = now_ns();
    w->sandbox_ns = 0;
    w->page->phase = DP_PHASE_LEASED;
    take_name(w);
    if (dup3(fds[0], FD_CODE, O_CLOEXEC) < 0 || dup3(fds[1], FD_NAMES, O_CLOEXEC) < 0)
        fail(w, FD_SOCK, DP_FATAL, "place a lease's descriptors");
    close(fds[0]);
    close(fds[1]);
    w->seed = fds[2];
}

static void limit_memory(const worker *w) {
    dp_error err = {0};
    uint64_t has = w->memory;
    /* The limit does not include the channel's memory. */
    if (w->m->memory_limit && !(has && w->server && dp_server_made_ahead(w->server)))
        must(w, dp_worker_memory(&has, &err), &err);
    must(w, dp_worker_limit_memory(has + seed_memory(w->m->seed_units), w->m->memory_limit, &err), &err);
}

static dp_server_config server_config(const dp_msg_spawn *m) {
    return (dp_server_config){(dp_wait_mode)m->wait_mode, m->max_depth, m->max_eager, m->max_bulk};
}

static void connect_client(worker *w) {
    const dp_msg_spawn *m = w->m;
    dp_server_config cfg = server_config(m);
    dp_error err = {0};
    must(w, dp_server_connect(w->dev, &cfg, m->blob, m->blob_len, &w->server, &err), &err);
    dp_server_share_stats(w->server, &w->page->stats);
    dp_server_share_knock(w->server, &w->page->knock);
}

/* On verbs, making the pages of the channel's memory present takes longest. If the zygote has not prepared them, or has them on
 * another NUMA node, a second thread makes them while this one opens the device, provided that the lease has two CPUs. */
static void open_and_connect(worker *w, dp_ahead *memory) {
    dp_cpus own;
    dp_server_config cfg = server_config(w->m);
    if (memory && !dp_ahead_near(memory)) {
        dp_ahead_end(memory);
        memory = NULL;
    }
    if (!memory && w->m->provider == DP_PROVIDER_VERBS)
        memory = dp_ahead_map(DP_SERVER_REGIONS, dp_server_region_for(&cfg, w->m->blob, w->m->blob_len));
    dp_cpus_get(&own);
    if (memory && dp_cpus_count(&own) > 1)
        dp_ahead_start(memory, &own);
    open_device(w);
    dp_ahead_lend(memory, w->dev);
    connect_client(w);
    dp_ahead_lend(NULL, w->dev);
    dp_ahead_end(memory);
}

/* A worker that differs from the seed's process goes on without the seed, and its client makes the init call. */
static bool go_on_unseeded(worker *w, int status, const dp_error *err) {
    if (status == DP_UNSUPPORTED)
        dp_msg_send_failure(FD_SOCK, DP_MSG_UNSEEDED, w->id, status, err->msg);
    else
        must(w, status, err);
    return status != DP_OK;
}

/* Asks the executor to fill the seed's memory on demand, and waits until it does. */
static int begin_pages(void *arg, dp_error *err) {
    const worker *w = arg;
    dp_packet p;
    int e = dp_msg_send(FD_SOCK, DP_MSG_LAID, w->id, NULL, 0, -1);
    if (e)
        return dp_fail(err, DP_FATAL, e, "seed: reach the executor");
    int got = dp_packet_recv(FD_SOCK, &p);
    if (got <= 0)
        leave(DP_EXIT_STOPPED);
    dp_packet_close(&p);
    return p.len >= sizeof p.head && p.head.type == DP_MSG_PAGED ? DP_OK : dp_fail(err, DP_PROTOCOL, 0, "seed: another message instead of PAGED");
}

/* Loads the library's functions, from the worker's seed if it has one. The memory of a seed counts besides the limit: it is mapped as a whole. */
static int load_seeded(worker *w, dp_function **table, char *text, size_t room) {
    static dp_seed seed;
    dp_error err = {0};
    dp_seed_free_keys();
    if (w->seed >= 0 && go_on_unseeded(w, dp_seed_begin(&seed, w->seed, (uint64_t)w->m->seed_units * DP_HEAP_UNIT, &err), &err)) {
        dp_seed_unseeded(&seed);
        close(w->seed);
        w->seed = -1;
    }
    int st = dp_worker_load(FD_CODE, FD_NAMES, w->m->n_functions, table, text, room);
    if (st || w->seed < 0)
        return st;
    dp_seed_loaded(&seed);
    if (w->m->seed_paged) {
        seed.laid = begin_pages;
        seed.laid_arg = w;
    }
    uint64_t began = now_ns();
    bool unseeded = go_on_unseeded(w, dp_seed_apply(&seed, &err), &err);
    w->page->overlay_ns = now_ns() - began; /* not in LOADED: after a handover, the executor and its workers have different versions */
    close(w->seed);
    if (unseeded)
        dp_seed_unseeded(&seed);
    dp_resume_run(unseeded ? 0 : w->m->seed_child);
    return DP_OK;
}

static void load_functions(worker *w) {
    static char text[DP_MSG_MAX];
    dp_function *table = NULL;
    uint64_t began = now_ns();
    w->page->phase = DP_PHASE_LOADING;
    int st = load_seeded(w, &table, text, sizeof text);
    if (st != DP_OK)
        fail(w, FD_SOCK, st, text);
    close(FD_CODE);
    close(FD_NAMES);
    dp_server_set_functions(w->server, table, w->m->n_functions);
    w->code_ns = now_ns() - began;
    w->page->phase = DP_PHASE_LOADED;
}

/* ---- sandbox ---- */

static void limit(const worker *w, int resource, uint64_t most, const char *what) {
    dp_error err;
    int e = dp_worker_limit(resource, most);
    if (e)
        must(w, dp_fail(&err, DP_FATAL, e, "sandbox: limit %s to %llu", what, (unsigned long long)most), &err);
}

static void take_identity(worker *w) {
    dp_error err = {0};
    uint64_t began = now_ns();
    must(w, dp_sandbox_present(&w->guard, &err), &err);
    must(w, dp_sandbox_identity(w->sandbox, w->m->uid, w->m->gid, &err), &err);
    if (w->m->uid) {
        if (w->m->processes)
            limit(w, RLIMIT_NPROC, w->m->processes, "processes");
        tie(FD_SOCK, 0, true); /* the change of the user has undone it */
    }
    w->sandbox_ns += now_ns() - began;
}

static void enter_sandbox(worker *w, bool connects) {
    dp_error err = {0};
    uint64_t began = now_ns();
    must(w, dp_sandbox_enter(w->sandbox, &w->guard, connects, &err), &err);
    if (w->sandbox->wanted) {
        tie(FD_SOCK, 0, true);
        if (w->sandbox->files)
            limit(w, RLIMIT_NOFILE, w->sandbox->files, "open files");
        limit(w, RLIMIT_NICE, 0, "the priority");
    }
    w->sandbox_ns += now_ns() - began;
}

/* The last request to the guard. The guard continues by itself when its socket closes. */
static void leave_guard(worker *w) {
    dp_error err = {0};
    if (w->m->provider == DP_PROVIDER_VERBS)
        must(w, dp_sandbox_hide(w->sandbox, &w->guard, &err), &err);
    if (w->guard.guard >= 0) {
        close(FD_CTL);
        close(FD_GUARD);
        w->guard = DP_SANDBOX_NONE;
    }
}

/* The last step of the sandbox before user code. */
static void seal(worker *w, bool early) {
    if (!w->sandbox->wanted)
        return;
    dp_error err = {0};
    uint64_t began = now_ns();
    if (!early)
        leave_guard(w);
    limit(w, RLIMIT_MEMLOCK, LOCKED_MOST, "locked memory"); /* after all registrations with the device */
    if (w->m->provider == DP_PROVIDER_OFI)
        must(w, dp_sandbox_seal_sockets(w->sandbox, &err), &err);
    else
        must(w, dp_sandbox_seal(w->sandbox, early, early && w->m->provider == DP_PROVIDER_SHM, &err), &err);
    w->sandbox_ns += now_ns() - began;
}

/* The steps between connecting and serving. On shm the worker takes them after it has sent its descriptors to the client, while it waits for the answer. All
 * memory of its own exists by then. */
static void close_up(void *arg) {
    worker *w = arg;
    limit_memory(w);
    if (!w->early) {
        if (!w->inside)
            enter_sandbox(w, false);
        dp_crash_note(w->page);
    }
    seal(w, w->early);
    load_functions(w);
}

static void loaded(void *arg) {
    worker *w = arg;
    dp_error err = {0};
    w->told = true;
    struct {
        uint64_t times[3];
        uint8_t blob[DP_CHANNEL_BLOB_MAX];
    } body;
    uint32_t len = sizeof body.blob;
    must(w, dp_server_blob(w->server, body.blob, &len, &err), &err);
    body.times[0] = now_ns() - w->began;
    body.times[1] = w->sandbox_ns;
    body.times[2] = w->code_ns;
    dp_msg_send(FD_SOCK, DP_MSG_LOADED, w->id, &body, (uint32_t)sizeof body.times + len, -1);
}

/* A worker seals itself and loads the library while it waits for its client's answer, which takes a wake-up. After the answer only memory is left to
 * map, and the executor can already tell the client. Only shm waits. */
static void connect_meanwhile(worker *w) {
    w->dev->meanwhile = close_up;
    w->dev->met = loaded;
    w->dev->meanwhile_arg = w;
    connect_client(w);
    w->dev->met = NULL;
    if (w->dev->meanwhile) { /* not called: the client had already answered, or the provider is not shm */
        w->dev->meanwhile = NULL;
        close_up(w);
    }
    if (!w->told)
        loaded(w);
}

/* Gives the userfaultfd away before user code can run. */
static void give_pages(worker *w) {
    dp_error err = {0};
    if (w->pages < 0)
        return;
    must(w, dp_sandbox_hold(&w->guard, w->pages, &err), &err);
    dp_msg_send(FD_SOCK, DP_MSG_PAGES, w->id, NULL, 0, w->pages);
    close(w->pages);
    w->pages = -1;
}

/* All steps that are possible ahead of a lease. */
static void prepare(worker *w) {
    const dp_msg_spawn *m = w->m;
    dp_channel_config sizes = {m->max_depth, m->max_eager, m->max_bulk};
    dp_error err = {0};
    bool shm = m->provider == DP_PROVIDER_SHM; /* whose device has a socket of the network namespace in which it was opened */
    open_device(w);
    if (shm)
        enter_sandbox(w, true);
    if (sizes.depth)
        must(w, dp_server_prepare(w->dev, &sizes, &w->server, &err), &err);
    dp_crash_note(w->page);
    dp_worker_touch();
    must(w, dp_worker_memory(&w->memory, &err), &err);
    if (!w->sandbox->wanted)
        return;
    give_pages(w);
    leave_guard(w);
    must(w, dp_sandbox_filter_early(w->sandbox, &err), &err);
}

static int exit_code(int status) {
    switch (status) {
    case DP_OK: return DP_EXIT_STOPPED;
    case DP_PEER_GONE:
    case DP_CONNECTION: return DP_EXIT_CLIENT_GONE;
    case DP_PROTOCOL: return DP_EXIT_PROTOCOL;
    default: return DP_EXIT_FABRIC;
    }
}

_Noreturn void dp_worker_live(uint32_t id, const dp_msg_spawn *m, const dp_worker_fds *fds, pid_t parent,
                              const dp_sandbox *sandbox, dp_ahead *memory) {
    worker w = {.id = id, .m = m, .sandbox = sandbox, .guard = DP_SANDBOX_NONE, .began = now_ns(), .pages = -1, .seed = -1};
    if (sandbox->pages && !m->n_functions)
        w.pages = dp_pages_open(sandbox->pages);
    detach(&w, fds, parent);
    own_descriptors(&w, fds);
    map_page(&w);
    dp_worker_yield_to_others(sandbox->idle);
    take_identity(&w);
    dp_bundle_use(sandbox, m->bundle); /* pooled workers get none */
    /* sandbox.h explains the order. */
    w.inside = m->provider != DP_PROVIDER_SHM && m->provider != DP_PROVIDER_OFI;
    w.early = !m->n_functions;
    if (w.inside)
        enter_sandbox(&w, false);
    dp_msg_task task;
    if (w.early) {
        prepare(&w);
        wait_for_lease(&w, &task);
    }
    pin_worker(&w);
    if (w.early || m->provider == DP_PROVIDER_SHM) {
        if (!w.early)
            open_device(&w);
        connect_meanwhile(&w);
    } else {
        open_and_connect(&w, memory);
        close_up(&w);
        loaded(&w);
    }
    static dp_listener listener;
    listener = (dp_listener){.id = id, .sock = FD_SOCK, .dev = w.dev, .server = w.server, .page = w.page};
    dp_error err;
    must(&w, dp_listener_start(&listener, &err), &err); /* the executor sends nothing before LOADED */
    errno = 0;         /* the report of a death has the value that the function leaves (crash.c) */
    leave(exit_code(dp_server_run(w.server)));
}
