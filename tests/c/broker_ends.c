/* Deaths and stops of workers and brokers. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "brokered.h"
#include "ends.h"

/* The worker of a brokered channel is killed: the call fails, and the channel is connected to a new worker on a private queue pair. The broker
 * has ended the old one. */
T_CASE(broker_worker_killed, "broker/worker-killed", .providers = BROKERED, .seconds = 40, .verbs_seconds = 60) {
    house h;
    packed p;
    client c;
    house_open(&h, 2);
    brokered_channel(&h, 0, 4, &p);
    brokered_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
    brokered_call(&c, 10);
    t_peer_kill(&h.workers[0]);
    CHECK_EQ(dp_status_class(brokered_failed_call(&c)), 5);
    h.workers[0] = h.workers[1];
    h.n = 1;
    brokered_replace(&h, &c, 0);
    brokered_stream(&c, 4, 50);
    brokered_await(&h, 0);
    brokered_close(&c);
    house_close(&h);
}

/* Opens one endpoint with two channels. */
static void pair_open(house *h, client c[2]) {
    dp_error err;
    dp_endpoint *ep = NULL;
    for (int i = 0; i < 2; i++) {
        packed p;
        brokered_channel(h, i, 4, &p);
        int page = dup(p.fds[0]);
        if (!ep)
            CHECK_OK_ERR(dp_endpoint_unpack(h->virtual, 2, 4, DP_WAIT_ADAPTIVE, &page, &ep, &err), err);
        if (page >= 0)
            close(page);
        c[i] = (client){.ep = ep, .seed = 1};
        CHECK_OK_ERR(dp_channel_unpack(ep, &p.ch, p.fds, &c[i].ch, &err), err);
    }
}

static void pair_close(client c[2]) {
    uint32_t size;
    dp_started started;
    for (int i = 0; i < 2; i++) {
        if (t_is_verbs())
            CHECK_OK(dp_channel_call(c[i].ch, 1, NULL, 0, NULL, NULL, 0, &size, 0, &started));
        dp_channel_destroy(c[i].ch);
    }
    dp_endpoint_destroy(c[0].ep);
}

/* One of two workers is killed while both have calls in flight. The other one's call ends as usual, through the broker, while the dead one's
 * channel has a private queue pair already. Then the other one moves with an own preparation. */
T_CASE(broker_one_killed, "broker/one-of-two-killed", .providers = BROKERED, .seconds = 40, .verbs_seconds = 60) {
    house h;
    client c[2];
    dp_promotion *p;
    dp_error err;
    house_open(&h, 3);
    pair_open(&h, c);
    brokered_call(&c[0], 10);
    t_peer_kill(&h.workers[0]);
    uint32_t other = brokered_submit(&c[1], 20, 5);
    CHECK_EQ(dp_status_class(brokered_failed_call(&c[0])), 5);
    brokered_replace(&h, &c[0], 2);
    brokered_call(&c[0], 10);
    CHECK(dp_channel_brokered(c[1].ch) && dp_endpoint_brokered(c[1].ep));
    brokered_finish(&c[1], other, 20, 5);
    for (int i = 0; i < 10; i++) { /* waits on both kinds of queue */
        uint32_t at = brokered_submit(&c[i % 2], 30, (uint32_t)i);
        while (!dp_channel_test(c[i % 2].ch, at))
            CHECK_OK(dp_endpoint_wait_any(c[0].ep, dp_now_ns() + 20000000000ll));
        brokered_finish(&c[i % 2], at, 30, (uint32_t)i);
    }
    CHECK_OK_ERR(dp_promotion_prepare(c[0].ep, h.own, &p, &err), err);
    CHECK(!dp_promotion_possible(p, c[0].ch));
    CHECK(!dp_promotion_complete(p));
    brokered_move(p, c[1].ch);
    CHECK(dp_promotion_complete(p));
    dp_promotion_free(p);
    CHECK(!dp_endpoint_brokered(c[0].ep));
    brokered_stream(&c[0], 4, 50);
    brokered_stream(&c[1], 4, 50);
    brokered_await(&h, 0);
    pair_close(c);
    h.workers[0] = h.workers[2];
    h.n = 2;
    house_close(&h);
}

/* The broker ends: the client's call fails at once. Its channel moves to a private queue pair, and a new worker connects to that. */
T_CASE(broker_ends, "broker/broker-ends", .providers = BROKERED, .seconds = 40, .verbs_seconds = 60) {
    house h;
    packed p;
    client c;
    house_open(&h, 2);
    brokered_channel(&h, 0, 4, &p);
    brokered_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
    brokered_call(&c, 10);
    dp_broker_stop(h.broker);
    h.broker = NULL;
    CHECK_STATUS(brokered_failed_call(&c), DP_PEER_GONE);
    brokered_replace(&h, &c, 1);
    brokered_stream(&c, 4, 50);
    brokered_close(&c);
    house_close(&h);
}

/* The broker in a process of its own, which can be stopped. It makes a channel to the worker for each byte that it receives. */
static void agent_main(int sock, void *arg) {
    house h = *(house *)arg; /* its workers */
    dp_error err;
    dp_dev_options o = quick_options();
    char byte;
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &h.dev, &err), err);
    CHECK_OK_ERR(dp_broker_start(h.dev, &h.broker, &err), err);
    while (recv(sock, &byte, 1, MSG_WAITALL) == 1 && byte) {
        packed p;
        char control[CMSG_SPACE(DP_VQP_FDS * sizeof(int))] = {0};
        struct iovec v = {&p.ch, sizeof p.ch};
        struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        brokered_channel(&h, 0, 8, &p);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        *c = (struct cmsghdr){CMSG_LEN(DP_VQP_FDS * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(c), p.fds, DP_VQP_FDS * sizeof(int));
        CHECK_EQ(sendmsg(sock, &m, 0), sizeof p.ch);
        for (int i = 0; i < DP_VQP_FDS; i++)
            close(p.fds[i]);
    }
    dp_broker_stop(h.broker);
    dp_dev_close(h.dev);
}

static void agent_channel(t_peer *agent, packed *p) {
    char control[CMSG_SPACE(DP_VQP_FDS * sizeof(int))], byte = 1;
    struct iovec v = {&p->ch, sizeof p->ch};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    t_send(agent->sock, &byte, 1);
    CHECK_EQ(recvmsg(agent->sock, &m, MSG_WAITALL | MSG_CMSG_CLOEXEC), sizeof p->ch);
    CHECK(CMSG_FIRSTHDR(&m) && CMSG_FIRSTHDR(&m)->cmsg_len == CMSG_LEN(DP_VQP_FDS * sizeof(int)));
    memcpy(p->fds, CMSG_DATA(CMSG_FIRSTHDR(&m)), DP_VQP_FDS * sizeof(int));
}

static void stop(t_peer *agent) {
    int status;
    CHECK(!kill(agent->pid, SIGSTOP));
    CHECK(waitpid(agent->pid, &status, WUNTRACED) == agent->pid && WIFSTOPPED(status));
}

static void go_on(t_peer *agent) { CHECK(!kill(agent->pid, SIGCONT)); }

/* Waits for a call that the broker does not finish. It has no deadline. */
static void expect_given_up(client *c, uint32_t at, dp_started want) {
    uint32_t size;
    dp_started started;
    CHECK_STATUS(dp_channel_wait(c->ch, at, 0), DP_OK);
    CHECK_STATUS(dp_channel_finish(c->ch, at, NULL, &size, &started), DP_PEER_GONE);
    CHECK_EQ(started, want);
    CHECK(dp_channel_given_up(c->ch));
}

/* Waits until a broker that goes on has ended the channel, and the worker's server with it. Then the worker serves the client directly, and has
 * executed `executed` calls before. */
static void expect_count(house *h, client *c, uint64_t executed) {
    brokered_replace(h, c, 0);
    c->calls = executed;
    brokered_stream(c, 4, 20);
}

/* The agent is stopped while a client calls. The call that the agent has not claimed was not started and is never executed, also if the agent goes
 * on. The call whose reply the agent does not deliver may have been executed. Both end without a deadline. A short stop ends no call. */
T_CASE(broker_stopped, "broker/agent-stopped", .providers = BROKERED, .seconds = 40, .verbs_seconds = 60) {
    static const dp_wait_mode modes[] = {DP_WAIT_HOT, DP_WAIT_WARM};
    dp_error err;
    dp_dev_options o = quick_options();
    the_gate = mmap(NULL, sizeof *the_gate, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(the_gate != MAP_FAILED);
    for (int claimed = 0; claimed < 2; claimed++) {
        house h = {.n = 1};
        t_peer agent;
        packed p;
        client c;
        *the_gate = (gate){0};
        t_peer_start(&h.workers[0], true, brokered_worker, NULL);
        house of_agent = h;
        CHECK_GE(of_agent.workers[0].sock = dup(h.workers[0].sock), 0); /* a new peer process closes the sockets of the others */
        t_peer_start(&agent, true, agent_main, &of_agent);
        close(of_agent.workers[0].sock);
        CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &h.own, &err), err);
        agent_channel(&agent, &p);
        dp_provider_id of = !strcmp(t_provider(), "tcp") ? DP_PROVIDER_TCP : DP_PROVIDER_VERBS;
        CHECK_OK_ERR(dp_vqp_open(of, &h.virtual, &err), err);
        brokered_open(&h, &p, &c, modes[claimed]);
        brokered_stream(&c, 4, 20);
        for (int i = 0; i < 5; i++) { /* short stops */
            stop(&agent);
            uint32_t at = brokered_submit(&c, 100, (uint32_t)i);
            go_on(&agent);
            brokered_finish(&c, at, 100, (uint32_t)i);
        }
        uint64_t executed = c.calls;
        uint32_t at[3];
        if (claimed) {
            CHECK_OK(dp_channel_submit(c.ch, 2, NULL, 0, NULL, 0, &at[0]));
            while (!__atomic_load_n(&the_gate->runs, __ATOMIC_ACQUIRE))
                dp_cpu_pause();
            stop(&agent);
            __atomic_store_n(&the_gate->open, 1, __ATOMIC_RELEASE);
            at[1] = brokered_submit(&c, 30, 1);
        } else {
            stop(&agent);
            at[0] = brokered_submit(&c, 5000, 1); /* two requests: its bytes, and its header */
            at[1] = brokered_submit(&c, 30, 1);
        }
        expect_given_up(&c, at[0], claimed ? DP_MAYBE_EXECUTED : DP_NOT_STARTED);
        expect_given_up(&c, at[1], DP_NOT_STARTED);
        CHECK_STATUS(dp_channel_submit(c.ch, 0, NULL, 0, NULL, 64, &at[2]), DP_PEER_GONE);
        go_on(&agent);
        expect_count(&h, &c, executed);
        brokered_close(&c);
        char none = 0;
        t_send(agent.sock, &none, 1);
        t_peer_join(&agent);
        dp_dev_close(h.virtual);
        dp_dev_close(h.own);
        uint32_t last = 0;
        if (t_is_verbs()) {
            t_peer_kill(&h.workers[0]);
        } else {
            t_send(h.workers[0].sock, &last, sizeof last);
            t_peer_join(&h.workers[0]);
        }
    }
    munmap(the_gate, sizeof *the_gate);
}
