/* The C library with agents that end, hang, and grant names of the maximum length. */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dp_load.h"
#include "dp_tcp_crypto.h"
#include "fake_agent.h"

/* Names of 255 bytes arrive whole. An rfaas_place is too small for one, and the error says so. */
T_CASE(api_names, "api/long-names", .providers = T_SHM) {
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK);
    rfaas_session *session = NULL;
    CHECK_EQ(rfaas_session_open(NULL, &session), RFAAS_OK);
    rfaas_lease_options lo = RFAAS_LEASE_OPTIONS_INIT;
    lo.library = "/proc/self/exe";
    lo.workers = WORKERS;
    rfaas_lease *leases[1];
    size_t n = 0;
    CHECKF(rfaas_lease_open_across(session, &lo, 1, leases, &n) == RFAAS_OK && n == 1, "across: %s", rfaas_last_error());
    rfaas_lease_details d = {.struct_size = sizeof d};
    CHECK_EQ(rfaas_lease_info(leases[0], &d), RFAAS_OK);
    CHECK(!strcmp(d.node_name, fake_name()) && !strcmp(d.executor_address, fake_name()));
    CHECK(strlen(d.node) == sizeof d.node - 1 && !strncmp(d.node, fake_name(), sizeof d.node - 1));
    CHECK(strlen(d.executor) == sizeof d.executor - 1 && !strncmp(d.executor, fake_name(), sizeof d.executor - 1));
    memset(&d, 7, sizeof d);
    d.struct_size = offsetof(rfaas_lease_details, node_name); /* as in an older program */
    CHECK_EQ(rfaas_lease_info(leases[0], &d), RFAAS_OK);
    CHECK(d.provider[0] == 's' && d.node_name[0] == 7);
    rfaas_place place;
    CHECK_EQ(rfaas_places(session, &lo, 1, &place), RFAAS_UNSUPPORTED);
    CHECK(strstr(rfaas_last_error(), "its address has 255 bytes, a place holds 127"));
    CHECK_EQ(rfaas_lease_release(leases[0]), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* The library does not repeat for ever a request that ends each agent. */
T_CASE(api_agents_end, "api/agents-end-in-an-acquisition", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *lease = NULL;
    rfaas_session *session = fake_session(&lo);
    fake_ends_at = RFAAS_AGENT_ACQUIRE;
    fake_ends = 100;
    CHECK_EQ(rfaas_lease_open(session, &lo, &lease), RFAAS_PEER_GONE);
    CHECKF(fake_ends >= 90, "%u agents have ended", 100 - fake_ends);
    fake_ends = 2;
    CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* If the workers of a lease cannot be reached over tcp, the library goes on to the next executor, for as long as an operation may take.
 * It also does so if the worker's setting of encryption contradicts that of the session, and if the worker's blob is damaged. */
T_CASE(api_unreached, "api/unreached-workers", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *lease = NULL;
    rfaas_session *session = fake_session(&lo);
    rfaas_function f;
    char in[] = "ab", out[sizeof in];
    static const int reasons[] = {DP_UNSUPPORTED, DP_BAD_BLOB, DP_PEER_GONE};
    for (int i = 0; i < 3; i++) {
        if (lease)
            CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
        fake_unreached_as = reasons[i];
        fake_unreached = 3;
        uint32_t granted = fake_granted;
        CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "reason %d: lease: %s", reasons[i], rfaas_last_error());
        CHECK(fake_unreached == 0 && fake_granted == granted + 1);
    }
    CHECK_EQ(rfaas_lease_function(lease, "echo", &f), RFAAS_OK);
    CHECK_EQ(rfaas_invoke(lease, f, in, sizeof in, out, sizeof out, NULL, NULL), RFAAS_OK);
    CHECK(!memcmp(in, out, sizeof in));
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* The next agent does not know the lease from which the search continues, so the search starts again. */
T_CASE(api_unreached_lost, "api/unreached-workers-and-agents-end", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *lease = NULL;
    rfaas_session *session = fake_session(&lo);
    fake_leaves = 2;
    fake_unreached = 5;
    CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s (%u refused)", rfaas_last_error(), fake_refused);
    CHECK(fake_leaves == 0 && fake_unreached == 0 && fake_granted == 1);
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* ---- unusable channels from an agent ---- */

static int hand_kind, hand_fd;

static void hands(uint32_t id) {
    static dp_packed_channel junk[WORKERS];
    for (size_t i = 0; i < sizeof junk; i++)
        ((uint8_t *)junk)[i] = (uint8_t)t_random();
    rfaas_agent_hand h = {.count = WORKERS, .size = sizeof *junk, .fds = 5}, one = h;
    one.count = 1;
    switch (hand_kind) {
    case 0: break;
    case 1: fake_hand(id, &h, junk, sizeof junk, hand_fd, 5); break;
    case 2: fake_hand(id, &h, junk, sizeof junk, hand_fd, 4); break;
    case 3: fake_hand(id, &h, junk, sizeof junk - 1, hand_fd, 5); break;
    case 4: fake_hand(id, &h, NULL, 0, hand_fd, 5); break;
    case 5: fake_hand(id + 1000, &h, junk, sizeof junk, hand_fd, 5); break;
    case 6: fake_hand(id, &one, junk, sizeof *junk, hand_fd, 5); break;
    case 7:
        for (int i = 0; i < 10; i++)
            fake_hand(id, &h, junk, sizeof junk, hand_fd, 5);
        break;
    case 8:
        h.count = 0;
        fake_hand(id, &h, junk, sizeof junk, hand_fd, 5);
        break;
    case 9:
        h.count = UINT32_MAX;
        fake_hand(id, &h, junk, sizeof junk, hand_fd, RFAAS_AGENT_FDS);
        break;
    case 10:
        h.first = 1;
        fake_hand(id, &h, junk, sizeof junk, hand_fd, 5);
        break;
    case 11: /* a description that is well-formed as an agent's message */
        junk[0].version = junk[1].version = DP_PACKED_VERSION;
        junk[0].blob_len = junk[1].blob_len = 80;
        junk[0].cfg = junk[1].cfg = (dp_channel_config){8, 4096, 0};
        junk[0].qp.n_fds = junk[1].qp.n_fds = 2;
        fake_hand(id, &h, junk, sizeof junk, hand_fd, 5);
        break;
    }
}

/* After any bad message, the library makes channels of its own, and keeps no descriptor. */
T_CASE(api_hands, "api/hands-that-cannot-be-used", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_session_options so = RFAAS_SESSION_OPTIONS_INIT;
    rfaas_session *session = fake_session(&lo);
    rfaas_lease *lease = NULL;
    t_usage before;
    so.cached_leases = -1;
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_session_open(&so, &session), RFAAS_OK);
    hand_fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(hand_fd >= 0 && !ftruncate(hand_fd, 4096) && !fcntl(hand_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
    for (hand_kind = -1; hand_kind < 12; hand_kind++) {
        t_note("kind %d", hand_kind);
        pthread_mutex_lock(&fake_mu);
        fake_hands = hand_kind < 0 ? NULL : hands;
        pthread_mutex_unlock(&fake_mu);
        uint64_t in = 7, out = 0;
        size_t n = 0;
        CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
        CHECKF(rfaas_invoke(lease, 0, &in, 8, &out, 8, &n, NULL) == RFAAS_OK && out == 7, "call: %s", rfaas_last_error());
        CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
        if (hand_kind < 0)
            t_usage_now(&before);
        t_usage_check(&before);
    }
    close(hand_fd);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* No lease has ended, and the agent answers. */
static void all_held(rfaas_session *session, rfaas_lease **leases, int n) {
    for (int i = 0; i < n; i++) {
        rfaas_event e = {.struct_size = sizeof e};
        CHECK_EQ(rfaas_session_changes(session, &(rfaas_change){0}, 1, &(size_t){0}), RFAAS_OK);
        CHECK_EQ(rfaas_lease_event(leases[i], &e), RFAAS_OK);
        CHECKF(e.kind == 0, "lease %d: event %u: %s", i, e.kind, e.text);
    }
}

/* The library leaves an agent that takes too long to adopt a lease. No lease ends. */
T_CASE(api_agent_hangs_adopting, "api/agent-hangs-in-an-adoption", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *leases[2];
    rfaas_session *session = fake_session(&lo);
    for (int i = 0; i < 2; i++)
        CHECKF(rfaas_lease_open(session, &lo, &leases[i]) == RFAAS_OK, "lease: %s", rfaas_last_error());
    fake_adopts_ms = 2500;
    fake_hang_up();
    CHECK_EQ(rfaas_session_changes(session, &(rfaas_change){0}, 1, &(size_t){0}), RFAAS_PEER_GONE);
    all_held(session, leases, 2);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(rfaas_lease_release(leases[i]), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* Another lease replaces it. */
static void *end_agent_soon(void *session) {
    t_sleep_ms(200);
    fake_hang_up();
    CHECK_EQ(rfaas_session_changes(session, &(rfaas_change){0}, 1, &(size_t){0}), RFAAS_OK);
    return NULL;
}

/* The agent ends after it has made the next grant of a lease, while calls still run at the old one. The lease must not move to a grant
 * that the next agent does not know. */
T_CASE(api_agent_ends_moving, "threads/agent-ends-while-a-lease-moves", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *lease;
    rfaas_session *session = fake_session(&lo);
    rfaas_function echo, slow;
    rfaas_request r;
    uint64_t in = 7, out[2] = {0};
    session->timeout_ns = 10000000000; /* as usual, not 1 s: how soon the lease moves does not matter here */
    lo.flags = RFAAS_LEASE_FAILOVER;
    CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
    CHECK_EQ(rfaas_lease_function(lease, "echo", &echo), RFAAS_OK);
    CHECK_EQ(rfaas_lease_function(lease, "slow", &slow), RFAAS_OK);
    CHECKF(rfaas_iinvoke(lease, slow, &in, sizeof in, &out[0], sizeof *out, NULL, &r) == RFAAS_OK, "%s", rfaas_last_error());
    pthread_t thread;
    pthread_mutex_lock(&fake_mu);
    lease->line->draining = RFAAS_AGENT_DRAIN_SOON;
    fake_event(&(rfaas_agent_event){.key = lease->grant->key, .kind = RFAAS_EVENT_DRAINING, .text = "drains"});
    pthread_mutex_unlock(&fake_mu);
    CHECK(!pthread_create(&thread, NULL, end_agent_soon, session));
    CHECKF(rfaas_invoke(lease, echo, &in, sizeof in, &out[1], sizeof *out, NULL, NULL) == RFAAS_OK, "%s", rfaas_last_error());
    pthread_join(thread, NULL);
    CHECKF(rfaas_wait(&r, NULL) == RFAAS_OK && out[0] == in, "%s", rfaas_last_error());
    pthread_mutex_lock(&fake_mu);
    fake_lease *l = fake_find(lease->grant->key);
    CHECK(l && l->known);
    pthread_mutex_unlock(&fake_mu);
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* The agent ends, and so does the next one while leases are handed to it. The third one gets them. */
T_CASE(api_agent_ends_adopting, "api/agent-ends-in-an-adoption", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *leases[3];
    rfaas_session *session = fake_session(&lo);
    for (int i = 0; i < 3; i++)
        CHECKF(rfaas_lease_open(session, &lo, &leases[i]) == RFAAS_OK, "lease: %s", rfaas_last_error());
    fake_ends_at = RFAAS_AGENT_ADOPT;
    fake_ends = 1;
    fake_hang_up();
    all_held(session, leases, 3);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(rfaas_lease_release(leases[i]), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* The next agent refuses to adopt a lease, with any status: the lease has ended, and its calls return that. */
T_CASE(api_agent_refuses_adopting, "api/agent-refuses-an-adoption", .providers = T_SHM) {
    static const int statuses[] = {RFAAS_INVALID, RFAAS_BUSY, RFAAS_DEADLINE, RFAAS_FATAL, RFAAS_LEASE_ENDED};
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
        rfaas_lease_options lo;
        rfaas_lease *lease;
        rfaas_function echo;
        uint64_t in = 7, out = 0;
        rfaas_session *session = fake_session(&lo);
        CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
        CHECK_EQ(rfaas_lease_function(lease, "echo", &echo), RFAAS_OK);
        fake_adopt_status = statuses[i];
        fake_hang_up();
        CHECK_EQ(rfaas_session_changes(session, &(rfaas_change){0}, 1, &(size_t){0}), RFAAS_OK);
        int status = rfaas_invoke(lease, echo, &in, sizeof in, &out, sizeof out, NULL, NULL);
        CHECKF(RFAAS_CLASS(status) == RFAAS_CLASS_LEASE, "adoption refused with %d: a call ends with %d: %s", statuses[i], status, rfaas_last_error());
        (void)rfaas_lease_release(lease);
        CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
        CHECK_EQ(rfaas_finalize(), RFAAS_OK);
        fake_leave();
    }
}

/* The agent ends between its grant and the moment in which the library takes it: the next agent grants another lease, since it does not
 * know the first one. */
T_CASE(api_grant_of_another, "api/agent-ends-after-a-grant", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_acquisition a = {0};
    rfaas_lease *lease;
    rfaas_session *session = fake_session(&lo);
    uint32_t before = __atomic_load_n(&fake_granted, __ATOMIC_ACQUIRE), generation = rfaas_agent_generation();
    CHECKF(rfaas_api_lease_begin(session, &lo, NULL, &lease, &a) == RFAAS_OK, "lease: %s", rfaas_last_error());
    for (bool offered = false; __atomic_load_n(&fake_granted, __ATOMIC_ACQUIRE) == before;) {
        rfaas_agent_wait(dp_now_ns() + 20000000);
        if (!offered && __atomic_load_n(&fake_granted, __ATOMIC_ACQUIRE) == before) {
            CHECK(!rfaas_api_acquire_step(&a));
            offered = lease->grant->ep;
        }
    }
    pthread_mutex_lock(&fake_mu); /* the agent has sent the reply */
    pthread_mutex_unlock(&fake_mu);
    rfaas_agent_wait(dp_now_ns() + 1000000); /* and the library has it */
    fake_hang_up();
    while (rfaas_agent_generation() == generation)
        rfaas_agent_wait(dp_now_ns() + 20000000);
    while (!rfaas_api_acquire_step(&a))
        rfaas_agent_wait(a.until);
    CHECKF(rfaas_api_lease_finish(&lease, &a, true) == RFAAS_OK, "lease: %s", rfaas_last_error());
    CHECK_EQ(fake_granted, before + 2);
    all_held(session, &lease, 1);
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* The executor is lost just when the wait for a new worker ends. The call returns that the lease has ended, so that the lease can move, and not that
 * its deadline has passed. */
T_CASE(api_lost_replacing, "api/lost-in-a-replacement", .providers = T_SHM) {
    for (int when = -1; when <= 1; when += 2) {
        rfaas_lease_options lo;
        rfaas_lease *lease;
        uint64_t in = 7, out = 0;
        rfaas_session *session = fake_session(&lo);
        CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
        pthread_mutex_lock(&fake_mu);
        fake_loses = when;
        pthread_mutex_unlock(&fake_mu);
        int status = rfaas_worker_replace(lease, 0);
        CHECKF(status == RFAAS_LEASE_ENDED && strstr(rfaas_last_error(), "lost: executor here"), "event %s the answer: %d %s",
               when < 0 ? "before" : "after", status, rfaas_last_error());
        CHECK(RFAAS_CLASS(rfaas_invoke(lease, 0, &in, sizeof in, &out, sizeof out, NULL, NULL)) == RFAAS_CLASS_LEASE);
        (void)rfaas_lease_release(lease);
        CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
        CHECK_EQ(rfaas_finalize(), RFAAS_OK);
        fake_leave();
    }
}

/* A new worker ends, and then the agent ends before it has answered. The client asks the next agent for a worker with the offer that the first worker
 * has used. The program does not notice this. */
T_CASE(api_offer_used, "api/offer-used-by-an-ended-worker", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *lease;
    uint64_t in = 7, out = 0;
    rfaas_call_options co = RFAAS_CALL_OPTIONS_INIT;
    co.worker = 0;
    rfaas_session *session = fake_session(&lo);
    CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
    pthread_mutex_lock(&fake_mu);
    fake_uses = 1;
    uint32_t before = fake_replaced;
    pthread_mutex_unlock(&fake_mu);
    CHECKF(rfaas_worker_replace(lease, 0) == RFAAS_OK, "replace: %s", rfaas_last_error());
    CHECK_EQ(__atomic_load_n(&fake_replaced, __ATOMIC_ACQUIRE), before + 2);
    CHECKF(rfaas_invoke(lease, 0, &in, sizeof in, &out, sizeof out, NULL, &co) == RFAAS_OK && out == in, "call: %s", rfaas_last_error());
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* The handle of a released lease is not that of one of the next 63 leases, whatever was opened before. A program that uses it after the release
 * gets an error, and no other lease. */
T_CASE(api_handles, "api/released-handles", .providers = T_SHM) {
    enum { AGAIN = 64 };
    rfaas_lease_options lo;
    rfaas_session *session = fake_session(&lo);
    rfaas_lease *first, *next;
    uint64_t in = 7, out = 0;
    CHECK_EQ(rfaas_lease_open(session, &lo, &first), RFAAS_OK);
    for (int before = 0; before < AGAIN - 1; before++) { /* so that the place of `first` is the next one */
        CHECK_EQ(rfaas_lease_open(session, &lo, &next), RFAAS_OK);
        CHECK(next != first);
        CHECK_EQ(rfaas_lease_release(next), RFAAS_OK);
    }
    CHECK_EQ(rfaas_lease_release(first), RFAAS_OK);
    for (int after = 1; after < AGAIN; after++) {
        CHECK_EQ(rfaas_lease_open(session, &lo, &next), RFAAS_OK);
        CHECKF(next != first, "a released handle is that of lease %d after the release", after);
        CHECK_EQ(rfaas_invoke(first, 0, &in, sizeof in, &out, sizeof out, NULL, NULL), RFAAS_INVALID);
        CHECK_EQ(rfaas_lease_release(next), RFAAS_OK);
    }
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* A program gives up calls, and then does nothing but try to free a buffer. It succeeds when the calls have returned. */
T_CASE(api_free_after_cancel, "api/free-after-cancel", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *lease;
    rfaas_session *session = fake_session(&lo);
    CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
    for (int i = 0; i < 100; i++) {
        uint64_t in = 7, out = 0;
        rfaas_request r = RFAAS_REQUEST_NULL;
        void *b = NULL;
        int st;
        CHECK_EQ(rfaas_alloc(lease, 5000, &b), RFAAS_OK);
        CHECKF(rfaas_iinvoke(lease, 0, &in, sizeof in, &out, sizeof out, NULL, &r) == RFAAS_OK, "call: %s", rfaas_last_error());
        CHECK_EQ(rfaas_cancel(&r), RFAAS_OK);
        while ((st = rfaas_free(lease, b)) == RFAAS_BUSY)
            sched_yield();
        CHECK_EQ(st, RFAAS_OK);
    }
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

static void nothing(int signal) { (void)signal; }

/* Signals do not end a connection whose buffer is full, and texts that do not fit into a message give an error. */
T_CASE(api_environment, "api/large-environment", .providers = T_SHM) {
    static char value[2 * RFAAS_AGENT_MESSAGE_MAX];
    rfaas_lease_options lo;
    memset(value, 'v', sizeof value - 1);
    value[900000] = 0;
    setenv("RFAAS_TEST", value, 1);
    fake_reads_ms = 100;
    sigaction(SIGALRM, &(struct sigaction){.sa_handler = nothing}, NULL);
    setitimer(ITIMER_REAL, &(struct itimerval){{0, 5000}, {0, 5000}}, NULL);
    rfaas_session *session = fake_session(&lo);
    setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
    value[900000] = 'v';
    setenv("RFAAS_TEST", value, 1);
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK);
    CHECK_EQ(rfaas_session_open(NULL, &session), RFAAS_INVALID);
    CHECKF(strstr(rfaas_last_error(), "RFAAS_"), "%s", rfaas_last_error());
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    unsetenv("RFAAS_TEST");
    fake_leave();
}

static void *release_soon(void *lease) {
    t_sleep_ms(50);
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    return NULL;
}

/* A lease is released while it is being handed to the next agent. */
T_CASE(api_released_adopting, "threads/released-while-adopted", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *lease;
    rfaas_session *session = fake_session(&lo);
    CHECKF(rfaas_lease_open(session, &lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
    pthread_t thread;
    fake_adopts_ms = 200;
    fake_hang_up();
    CHECK(!pthread_create(&thread, NULL, release_soon, lease));
    CHECK_EQ(rfaas_session_changes(session, &(rfaas_change){0}, 1, &(size_t){0}), RFAAS_OK);
    pthread_join(thread, NULL);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* ---- fork ---- */

enum { LOADING = 1, FORKING, FORKED };
static int32_t loader; /* atomic */
static bool complete;  /* the library is loaded; under the lock */

static void forking(void) { __atomic_store_n(&loader, FORKING, __ATOMIC_RELEASE); }

static void forked(void) { __atomic_store_n(&loader, FORKED, __ATOMIC_RELEASE); }

/* Reports whether the first thread sleeps. */
static bool main_sleeps(void) {
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", getpid());
    FILE *f = fopen(path, "r");
    CHECK(f && fgets(text, sizeof text, f));
    fclose(f);
    return strstr(text, ") S ") != NULL;
}

/* Loads until fork() waits for it, or has not waited. */
static void *load_slowly(void *unused) {
    dp_load_lock();
    __atomic_store_n(&loader, LOADING, __ATOMIC_RELEASE);
    for (int32_t at; (at = __atomic_load_n(&loader, __ATOMIC_ACQUIRE)) != FORKED && !(at == FORKING && main_sleeps());)
        sched_yield();
    complete = true;
    dp_load_unlock();
    /* A sanitizer's allocator is not ready for a fork while another thread allocates or ends. */
    while (__atomic_load_n(&loader, __ATOMIC_ACQUIRE) != FORKED)
        sched_yield();
    return unused;
}

/* A child can load a fabric's library, even if a thread of its parent was loading one at the time of fork(). */
T_CASE(api_fork_loading, "api/fork-while-a-library-is-loaded", .providers = T_SHM) {
    pthread_t thread;
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK);
    CHECK(!pthread_atfork(forking, forked, NULL)); /* called before the library's own handler */
    CHECK(!pthread_create(&thread, NULL, load_slowly, NULL));
    while (__atomic_load_n(&loader, __ATOMIC_ACQUIRE) != LOADING)
        sched_yield();
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        alarm(20);
        _exit(complete && rfaas_init(NULL) == RFAAS_OK && dp_crypto_load(NULL) == DP_OK && rfaas_finalize() == RFAAS_OK ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECKF(WIFEXITED(status) && !WEXITSTATUS(status), "the child's status is %#x", status);
    CHECK(!pthread_join(thread, NULL));
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
}
