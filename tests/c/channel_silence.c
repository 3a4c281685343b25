/* A peer that dies silently behind a network, with the time-outs of users: calls and servers end within seconds in each wait mode.
 * On shm the death is reported at once. Also a peer that lives and does not answer, which is reported. */
#include <stdlib.h>
#include <unistd.h>

#include "ends.h"
#include "served.h"

#define MS 1000000ll

/* verbs: a second of silence, the next probe and seven times 268 ms are 3.1 s; doubled for a busy machine. */
static int64_t bound(void) { return (int64_t)((t_is_verbs() ? 6000 : 1000) * MS * t_time_scale()); }

static void server_of(int sock, void *arg) {
    (void)arg;
    dp_error err;
    dp_dev *dev;
    dp_server *s;
    uint32_t len;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    t_name("server");
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &(dp_dev_options){.gid_index = -1, .active_side_only = 1}, &dev, &err), err);
    CHECK_OK_ERR(dp_server_create(dev, &(dp_server_config){.mode = DP_WAIT_WARM}, blob, len, &s, &err), err);
    dp_server_set_functions(s, served_functions, FN_COUNT);
    len = sizeof blob;
    CHECK_OK_ERR(dp_server_blob(s, blob, &len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    int st = dp_server_run(s);
    t_send(sock, &st, sizeof st);
    dp_server_destroy(s);
    dp_dev_close(dev);
}

static void connect_channel(dp_channel *ch, int sock) {
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    CHECK_OK_ERR(dp_channel_offer(ch, blob, &len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_channel_connect(ch, blob, len, &err), err);
}

/* ---- the worker's node dies ---- */

enum { SPINNING, BLOCKED, LOOKING, ANY, ABANDONED, WAYS };
static const char *const way_names[] = {"spinning", "blocked", "looking now and then", "waiting for any call",
                                        "finding no free slot"};

typedef struct waiting {
    int way;
    t_peer worker;
    dp_endpoint *ep;
    dp_channel *ch;
    pthread_t thread;
    int64_t took_ns;
    int64_t *killed_ns;
    pthread_barrier_t *ready;
} waiting;

static void *wait_for_nobody(void *arg) {
    waiting *w = arg;
    uint32_t ms = 60000, slot, other, size;
    dp_started started;
    t_name(way_names[w->way]);
    CHECK_OK(dp_channel_call(w->ch, FN_ECHO, &ms, 4, NULL, &ms, 4, &size, 0, &started));
    CHECK_OK(dp_channel_submit(w->ch, FN_SLOW, &ms, 4, NULL, 4, &slot));
    t_sleep_ms(50); /* lets the request be delivered, because the loss of an undelivered one would be noticed */
    pthread_barrier_wait(w->ready); /* now they are killed */
    pthread_barrier_wait(w->ready);
    int64_t until = *w->killed_ns + 3 * bound();
    switch (w->way) {
    case LOOKING:
        while (dp_channel_test(w->ch, slot) == 0 && dp_now_ns() < until)
            usleep(1000);
        break;
    case ANY:
        CHECK_OK(dp_endpoint_wait_any(w->ep, until)); /* the first call */
        CHECK_OK(dp_endpoint_wait_any(w->ep, until));
        break;
    case ABANDONED:
        dp_channel_abandon(w->ch, slot);
        while (dp_channel_submit(w->ch, FN_ECHO, &ms, 4, NULL, 4, &other) == DP_BUSY && dp_now_ns() < until)
            usleep(1000);
        break;
    default: CHECK_OK(dp_channel_wait(w->ch, slot, until));
    }
    w->took_ns = dp_now_ns() - *w->killed_ns;
    CHECK_STATUS(dp_channel_status(w->ch), DP_PEER_GONE);
    if (w->way != ABANDONED) {
        CHECK_STATUS(dp_channel_finish(w->ch, slot, NULL, &size, &started), DP_PEER_GONE);
        CHECK_EQ(started, DP_MAYBE_EXECUTED);
    }
    return NULL;
}

/* Not on ofi: DP_CAP_SILENT_DEATH. */
T_CASE(silent_workers, "channel/silent-worker", .seconds = 30, .verbs_seconds = 60, .providers = T_SHM | T_VERBS | T_TCP) {
    waiting w[WAYS];
    dp_dev *dev;
    dp_error err;
    pthread_barrier_t ready;
    int64_t killed;
    for (int i = 0; i < WAYS; i++)
        t_peer_start(&w[i].worker, true, server_of, NULL);
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev, &err), err);
    pthread_barrier_init(&ready, NULL, WAYS + 1);
    for (int i = 0; i < WAYS; i++) {
        dp_wait_mode mode = i == BLOCKED ? DP_WAIT_WARM : i == SPINNING ? DP_WAIT_HOT : DP_WAIT_ADAPTIVE;
        w[i].way = i;
        w[i].killed_ns = &killed;
        w[i].ready = &ready;
        CHECK_OK_ERR(dp_endpoint_create(dev, 1, 1, mode, &w[i].ep, &err), err);
        CHECK_OK_ERR(dp_channel_create(w[i].ep, &(dp_channel_config){1, 64, 0}, &w[i].ch, &err), err);
        connect_channel(w[i].ch, w[i].worker.sock);
        CHECK_EQ(pthread_create(&w[i].thread, NULL, wait_for_nobody, &w[i]), 0);
    }
    pthread_barrier_wait(&ready);
    killed = dp_now_ns();
    for (int i = 0; i < WAYS; i++)
        t_peer_kill(&w[i].worker);
    pthread_barrier_wait(&ready);
    for (int i = 0; i < WAYS; i++) {
        pthread_join(w[i].thread, NULL);
        printf("    a client %s: peer gone after %.2f s\n", way_names[i], (double)w[i].took_ns / 1e9);
        CHECKF(w[i].took_ns < bound(), "%s: noticed after %lld ms", way_names[i], (long long)(w[i].took_ns / MS));
        dp_channel_destroy(w[i].ch);
        dp_endpoint_destroy(w[i].ep);
    }
    pthread_barrier_destroy(&ready);
    dp_dev_close(dev);
}

/* ---- the client's node dies ---- */

static void client_of(int sock, void *arg) {
    (void)arg;
    dp_error err;
    dp_dev *dev;
    dp_endpoint *ep;
    dp_channel *ch;
    uint32_t v = 7, size;
    dp_started started;
    t_name("client");
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev, &err), err);
    CHECK_OK_ERR(dp_endpoint_create(dev, 1, 4, DP_WAIT_WARM, &ep, &err), err);
    CHECK_OK_ERR(dp_channel_create(ep, &(dp_channel_config){4, 64, 0}, &ch, &err), err);
    connect_channel(ch, sock);
    CHECK_OK(dp_channel_call(ch, FN_ECHO, &v, 4, NULL, &v, 4, &size, 0, &started));
    t_sync(sock);
    pause();
}

typedef struct serving {
    dp_wait_mode mode;
    t_peer client, server;
    int ended;
    int64_t ended_ns;
} serving;

static void serve(int sock, void *arg) {
    serving *v = arg;
    t_name(v->mode == DP_WAIT_HOT ? "hot server" : "warm server");
    dp_error err;
    dp_dev *dev;
    dp_server *s;
    uint32_t len;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    t_recv(v->client.sock, &len, sizeof len);
    t_recv(v->client.sock, blob, len);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &(dp_dev_options){.gid_index = -1, .active_side_only = 1}, &dev, &err), err);
    CHECK_OK_ERR(dp_server_create(dev, &(dp_server_config){.mode = v->mode}, blob, len, &s, &err), err);
    dp_server_set_functions(s, served_functions, FN_COUNT);
    len = sizeof blob;
    CHECK_OK_ERR(dp_server_blob(s, blob, &len, &err), err);
    t_send(v->client.sock, &len, sizeof len);
    t_send(v->client.sock, blob, len);
    t_sync(sock);
    v->ended = dp_server_run(s);
    v->ended_ns = dp_now_ns();
    dp_server_destroy(s);
    dp_dev_close(dev);
}

/* Not on ofi: DP_CAP_SILENT_DEATH. */
T_CASE(silent_client, "channel/silent-client", .seconds = 30, .verbs_seconds = 60, .providers = T_SHM | T_VERBS | T_TCP) {
    serving v[2] = {{.mode = DP_WAIT_HOT}, {.mode = DP_WAIT_WARM}};
    for (int i = 0; i < 2; i++)
        t_peer_start(&v[i].client, true, client_of, NULL);
    for (int i = 0; i < 2; i++)
        t_peer_start(&v[i].server, false, serve, &v[i]);
    for (int i = 0; i < 2; i++) {
        t_sync(v[i].server.sock);
        t_sync(v[i].client.sock);
    }
    int64_t killed = dp_now_ns();
    for (int i = 0; i < 2; i++)
        t_peer_kill(&v[i].client);
    for (int i = 0; i < 2; i++) {
        t_peer_join(&v[i].server);
        int64_t took = v[i].ended_ns - killed;
        CHECK_STATUS(v[i].ended, DP_PEER_GONE);
        printf("    a %s server: client gone after %.2f s\n", i ? "blocked" : "spinning", (double)took / 1e9);
        CHECKF(took < bound(), "noticed after %lld ms", (long long)(took / MS));
    }
}

/* ---- the worker lives and does not answer ---- */

typedef struct told {
    const dp_channel *ch;
    uint32_t times;
    dp_silence last;
} told;

static void tell(void *arg, const dp_channel *ch, dp_silence silence) {
    told *t = arg;
    t->ch = ch;
    t->times++;
    t->last = silence;
}

static void check_told(const told *t, const served *s, int64_t began) {
    dp_silence is = t->last;
    CHECK_EQ(t->ch == s->ch, true);
    CHECKF(is.since >= began && is.at <= dp_now_ns() && is.at - is.since >= 2000 * MS, "silent for %lld ms, told after %lld",
           (long long)((is.at - is.since) / MS), (long long)((dp_now_ns() - began) / MS));
}

T_CASE(unanswered, "channel/unanswered", .seconds = 60) {
    served s;
    told t = {0};
    uint32_t ms = 6000, slot, size;
    dp_started started;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 1, 64, 0);
    dp_endpoint_on_silence(s.ep, tell, &t);
    served_echo(&s, 32, 1);
    CHECK_EQ(t.times, 0);

    /* Somebody waits. */
    int64_t began = dp_now_ns();
    CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, &ms, 4, NULL, 4, &slot));
    while (!t.times)
        CHECK_STATUS(dp_channel_wait(s.ch, slot, dp_now_ns() + 100 * MS), DP_DEADLINE);
    check_told(&t, &s, began);

    /* All slots are abandoned and no thread waits. A submit that returns busy also checks for silence. */
    dp_channel_abandon(s.ch, slot);
    uint32_t times = t.times;
    while (t.times == times) {
        usleep(50000);
        CHECK_STATUS(dp_channel_submit(s.ch, FN_ECHO, &ms, 4, NULL, 4, &slot), DP_BUSY);
    }
    check_told(&t, &s, began);

    /* The function was only long. Its answer ends the silence, and a later silence is reported again. */
    while (dp_channel_submit(s.ch, FN_ECHO, &ms, 4, NULL, 4, &slot) == DP_BUSY)
        usleep(50000);
    CHECK_OK(dp_channel_wait(s.ch, slot, 0));
    CHECK_OK(dp_channel_finish(s.ch, slot, NULL, &size, &started));
    times = t.times;
    ms = 300;
    CHECK_OK(dp_channel_call(s.ch, FN_SLOW, &ms, 4, NULL, &ms, 4, &size, 0, &started));
    CHECK_EQ(t.times, times);
    served_close(&s);
}
