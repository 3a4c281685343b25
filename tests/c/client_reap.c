/* The C library on a device whose driver takes long to destroy a queue pair. The device is shm, with
 * its destroy function replaced. */
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "dp_channel_impl.h"
#include "dp_raw_impl.h"
#include "fake_agent.h"

static const dp_ops *real;
static dp_ops slow;
static int32_t hangs, entered, finished; /* atomic: whether destructions hang; how many began and ended */
static int32_t signals_open;            /* a destruction ran in a thread that does not block signals */
static int32_t here;                    /* destructions by the releasing thread */
static pthread_t releaser;

static int32_t get(const int32_t *n) { return __atomic_load_n(n, __ATOMIC_ACQUIRE); }

static void destroy_slowly(dp_qp *qp) {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    if (!sigismember(&mask, SIGTERM) || !sigismember(&mask, SIGPROF))
        __atomic_store_n(&signals_open, 1, __ATOMIC_RELEASE);
    if (pthread_equal(pthread_self(), releaser))
        __atomic_add_fetch(&here, 1, __ATOMIC_ACQ_REL);
    __atomic_add_fetch(&entered, 1, __ATOMIC_ACQ_REL);
    while (get(&hangs))
        sched_yield();
    real->qp_destroy(qp);
    __atomic_add_fetch(&finished, 1, __ATOMIC_ACQ_REL);
}

static int threads(void) {
    char line[200];
    int n = -1;
    FILE *f = fopen("/proc/self/status", "re");
    CHECK(f);
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "Threads: %d", &n) == 1)
            break;
    fclose(f);
    return n;
}

static void call(rfaas_lease *lease) {
    rfaas_function echo;
    uint64_t in = 7, out = 0;
    CHECK_EQ(rfaas_lease_function(lease, "echo", &echo), RFAAS_OK);
    CHECKF(rfaas_invoke(lease, echo, &in, sizeof in, &out, sizeof out, NULL, NULL) == RFAAS_OK, "%s", rfaas_last_error());
    CHECK_EQ(out, in);
}

/* Opens a lease on the slow device. `first` gets another lease with normal queue pairs. */
static rfaas_lease *slow_lease(rfaas_session *session, const rfaas_lease_options *lo, rfaas_lease **first) {
    rfaas_lease *lease;
    CHECKF(rfaas_lease_open(session, lo, first) == RFAAS_OK, "lease: %s", rfaas_last_error());
    dp_dev *dev = dp_endpoint_domain((*first)->grant->ep)->dev;
    releaser = pthread_self();
    real = dev->ops;
    slow = *real;
    slow.destroys_slowly = true;
    slow.qp_destroy = destroy_slowly;
    dev->ops = &slow;
    CHECKF(rfaas_lease_open(session, lo, &lease) == RFAAS_OK, "lease: %s", rfaas_last_error());
    CHECK(lease->grant->ep && dp_endpoint_domain(lease->grant->ep)->dev == dev);
    for (uint32_t i = 0; i < WORKERS; i++) /* shm's queue pairs keep the operations that they were made with */
        lease->workers[i].ch->qp->ops = &slow;
    call(lease);
    dp_channel_fail(lease->workers[0].ch, DP_PEER_GONE); /* so that the lease is not cached */
    return lease;
}

static void all_gone(void) {
    dp_live live = {.queue_pairs = 1};
    for (int i = 0; i < 20000; i++) {
        dp_live_now(&live);
        if (!live.devices && !live.domains && !live.regions && !live.queues && !live.queue_pairs)
            return;
        t_sleep_ms(1);
    }
    CHECKF(false, "left: %d devices, %d domains, %d regions, %d queues, %d queue pairs", live.devices, live.domains, live.regions,
           live.queues, live.queue_pairs);
}


/* A quick destruction leaves no thread. */
T_CASE(reap_quick, "reap/quick", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *first;
    rfaas_session *session = fake_session(&lo);
    rfaas_lease *lease = slow_lease(session, &lo, &first);
    int before = threads();
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK_EQ(get(&finished), WORKERS);
    CHECK_EQ(get(&here), 0);
    CHECK(threads() <= before); /* the workers' threads may have ended */
    CHECK(!get(&signals_open));
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    fake_leave();
}

/* A destruction that hangs does not delay the release, other leases, or the end of the session or the library. */
T_CASE(reap_hangs, "reap/hangs", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *first;
    rfaas_session *session = fake_session(&lo);
    rfaas_lease *lease = slow_lease(session, &lo, &first);
    hangs = 1;
    CHECK_EQ(rfaas_lease_release(lease), RFAAS_OK);
    CHECK(get(&entered) == 1 && !get(&finished));
    CHECK(!get(&signals_open));
    call(first);
    pid_t child = fork(); /* the child has no such thread, and can use the library */
    CHECK(child >= 0);
    if (!child) {
        alarm(20);
        _exit(rfaas_init(NULL) == RFAAS_OK && rfaas_finalize() == RFAAS_OK ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECKF(WIFEXITED(status) && !WEXITSTATUS(status), "the child's status is %#x", status);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    CHECK(get(&entered) == 1 && !get(&finished));
    fake_leave();
    int before = threads();
    CHECK_EQ(rfaas_init(NULL), RFAAS_OK); /* again, while the thread still runs */
    __atomic_store_n(&hangs, 0, __ATOMIC_RELEASE);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    all_gone();
    for (int i = 0; i < 20000 && threads() >= before; i++)
        t_sleep_ms(1);
    CHECK_EQ(threads(), before - 1);
    CHECK_EQ(get(&finished), WORKERS);
}

/* The same for a connection that is no channel's, such as that of a claimant. */
T_CASE(reap_connection, "reap/connection", .providers = T_SHM) {
    rfaas_lease_options lo;
    rfaas_lease *first;
    rfaas_session *session = fake_session(&lo);
    rfaas_lease *lease = slow_lease(session, &lo, &first);
    dp_dev *dev = dp_endpoint_domain(first->grant->ep)->dev;
    dp_domain *domain;
    dp_raw *conn;
    dp_error err;
    CHECK_EQ(dp_domain_create(dev, &domain, &err), DP_OK);
    CHECK_EQ(dp_raw_create(domain, NULL, 0, &conn, &err), DP_OK);
    conn->qp->ops = &slow;
    hangs = 1;
    rfaas_api_reap_connection(dev, conn, domain);
    CHECK(get(&entered) == 1 && !get(&finished) && !get(&here));
    CHECK(!get(&signals_open));
    call(lease);
    CHECK_EQ(rfaas_session_close(session), RFAAS_OK);
    CHECK_EQ(rfaas_finalize(), RFAAS_OK);
    CHECK(!get(&finished));
    fake_leave();
    __atomic_store_n(&hangs, 0, __ATOMIC_RELEASE);
    all_gone();
}

/* The process ends while a destruction hangs. */
T_CASE(reap_exit, "reap/exit", .providers = T_SHM) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        alarm(20);
        rfaas_lease_options lo;
        rfaas_lease *first;
        rfaas_lease *lease = slow_lease(fake_session(&lo), &lo, &first);
        hangs = 1;
        if (rfaas_lease_release(lease) != RFAAS_OK || get(&entered) != 1)
            _exit(2);
        if (rfaas_finalize() != RFAAS_OK)
            _exit(3);
        fake_leave();
        exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECKF(WIFEXITED(status) && !WEXITSTATUS(status), "the child's status is %#x", status);
}
