/* Payloads that do not fit because the worker reads nothing from its connection. Over tcp, the request then waits in the client. */
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>

#include "ends.h"
#include "served.h"

#define MS 1000000ll

enum {
    LARGE = 48 << 20,   /* more than the queue pair and the sockets on both sides hold together */
    MESSAGE = 1 << 20,  /* goes in one message */
};

static void fill_stopped(served *s, dp_wait_mode mode, uint8_t *in) {
    served_open(s, true, mode, 2, 1024, LARGE);
    served_echo(s, 4096, 1);
    CHECK_EQ(kill(s->peer.pid, SIGSTOP), 0);
    fill_pattern(in, LARGE, 5);
}

static void expect_late(dp_channel *ch, const uint8_t *in, uint32_t size, uint8_t *out) {
    uint32_t got;
    dp_started started = DP_MAYBE_EXECUTED;
    CHECK_STATUS(dp_channel_call(ch, FN_ECHO, in, size, NULL, out, size, &got, dp_now_ns() + 200 * MS, &started), DP_DEADLINE);
    CHECK_EQ(started, DP_NOT_STARTED);
    CHECK_EQ(dp_channel_free_slots(ch), 2);
}

T_CASE(room_deadline, "channel/deadline-without-room", .providers = T_TCP, .seconds = 60) {
    static const dp_wait_mode modes[] = {DP_WAIT_ADAPTIVE, DP_WAIT_HOT, DP_WAIT_WARM};
    uint8_t *in = malloc(LARGE), *out = malloc(LARGE);
    for (int m = 0; m < 3; m++) {
        served s;
        uint32_t size, slot;
        dp_started started;
        t_note("mode %d", modes[m]);
        fill_stopped(&s, modes[m], in);
        expect_late(s.ch, in, LARGE, out);
        /* No call in flight could end and make room, so a later call waits even with its first message. */
        expect_late(s.ch, in, MESSAGE, out);
        CHECK_STATUS(dp_channel_submit_until(s.ch, FN_ECHO, in, MESSAGE, NULL, 64, dp_now_ns() + 10 * MS, &slot), DP_DEADLINE);
        /* The worker has seen only whole messages, none of which was a request. */
        CHECK_EQ(kill(s.peer.pid, SIGCONT), 0);
        CHECK_OK(dp_channel_call(s.ch, FN_ECHO, in, LARGE, NULL, out, LARGE, &size, 0, &started));
        CHECK_EQ(size, LARGE);
        CHECK_SAME(out, in, LARGE);
        served_echo(&s, 100, 2);
        served_close(&s);
    }
    free(in);
    free(out);
}

/* ---- the end of the lease ---- */

typedef struct submission {
    dp_channel *ch;
    const uint8_t *in;
    sem_t waits;
    int status;
} submission;

static void tell_that_it_waits(void *arg, int64_t now, bool probe) {
    submission *b = arg;
    (void)now, (void)probe;
    sem_post(&b->waits);
}

static void *submit_large(void *arg) {
    submission *b = arg;
    uint32_t slot;
    t_name("submit");
    b->status = dp_channel_submit(b->ch, FN_ECHO, b->in, LARGE, NULL, 8, &slot);
    return NULL;
}

T_CASE(room_interrupted, "channel/interrupted-without-room", .providers = T_TCP, .seconds = 60) {
    served s;
    uint8_t *in = malloc(LARGE);
    pthread_t thread;
    fill_stopped(&s, DP_WAIT_ADAPTIVE, in);
    submission b = {.ch = s.ch, .in = in};
    CHECK_EQ(sem_init(&b.waits, 0, 0), 0);
    dp_endpoint_on_idle(s.ep, tell_that_it_waits, &b);
    CHECK_EQ(pthread_create(&thread, NULL, submit_large, &b), 0);
    CHECK_EQ(sem_wait(&b.waits), 0);
    dp_channel_interrupt(s.ch);
    pthread_join(thread, NULL);
    CHECK_STATUS(b.status, DP_LEASE_ENDED);
    CHECK_OK(dp_channel_status(s.ch));
    CHECK_EQ(dp_channel_free_slots(s.ch), 2);
    t_peer_kill(&s.peer);
    served_close_client(&s);
    sem_destroy(&b.waits);
    free(in);
}

/* ---- without a deadline: liveness ---- */

typedef struct watcher {
    dp_channel *ch;
    pid_t pid; /* kill it instead of failing the channel; 0: do not */
    uint32_t looks, probes, silences;
} watcher;

static void end_when_looked(void *arg, int64_t now, bool probe) {
    watcher *w = arg;
    (void)now;
    w->looks++;
    w->probes += probe;
    if (w->probes != 3)
        return;
    if (w->pid)
        CHECK_EQ(kill(w->pid, SIGKILL), 0);
    else
        dp_channel_fail(w->ch, DP_LEASE_ENDED);
}

static void fail_when_silent(void *arg, const dp_channel *ch, dp_silence silence) {
    watcher *w = arg;
    CHECK_EQ(ch == w->ch, true);
    CHECK_GE(silence.at - silence.since, 2000 * MS);
    w->silences++;
    dp_channel_fail(w->ch, DP_WORKER_DIED);
}

T_CASE(room_liveness, "channel/liveness-without-room", .providers = T_TCP, .seconds = 90) {
    served s[3];
    watcher w[3] = {{0}};
    uint8_t *in = malloc(LARGE);
    uint32_t slot;
    for (int i = 0; i < 3; i++) {
        fill_stopped(&s[i], DP_WAIT_ADAPTIVE, in);
        w[i].ch = s[i].ch;
    }
    t_note("the lease ends");
    dp_endpoint_on_idle(s[0].ep, end_when_looked, &w[0]);
    CHECK_STATUS(dp_channel_submit(s[0].ch, FN_ECHO, in, LARGE, NULL, 8, &slot), DP_LEASE_ENDED);
    CHECK_GE(w[0].looks, w[0].probes);
    t_note("the worker ends");
    w[1].pid = s[1].peer.pid;
    dp_endpoint_on_idle(s[1].ep, end_when_looked, &w[1]);
    CHECK_STATUS(dp_channel_submit(s[1].ch, FN_ECHO, in, LARGE, NULL, 8, &slot), DP_PEER_GONE);
    t_note("the worker lives and takes nothing");
    dp_endpoint_on_silence(s[2].ep, fail_when_silent, &w[2]);
    CHECK_STATUS(dp_channel_submit(s[2].ch, FN_ECHO, in, 16 << 20, NULL, 8, &slot), DP_WORKER_DIED);
    CHECK_EQ(w[2].silences, 1);
    for (int i = 0; i < 3; i++) {
        t_peer_kill(&s[i].peer);
        served_close_client(&s[i]);
    }
    free(in);
}
