/* A client with several threads, each with an endpoint. Another thread fails their channels. Written for the thread sanitizer (make test-c-tsan), and
 * run without it too. The servers are threads of this process, so that the sanitizer sees everything. */
#include <stdlib.h>
#include <unistd.h>

#include "dp_channel.h"
#include "ends.h"
#include "served.h"

enum { CLIENTS = 4 };

/* ---- endpoints ---- */

typedef struct caller {
    served s;
    pthread_t thread;
    int rounds;
    uint32_t calls, failures; /* atomic: the breaking thread reads them */
    int32_t done;
} caller;

/* Calls until the channel fails, then connects it again, a number of times. */
static void *call_and_recover(void *arg) {
    caller *c = arg;
    served *s = &c->s;
    char name[24];
    snprintf(name, sizeof name, "caller %p", (void *)c);
    t_name(name);
    for (int round = 0; round < c->rounds; round++) {
        dp_error err;
        served_again(s, false);
        for (;;) {
            uint8_t in[300], out[300];
            uint32_t n = 1 + (uint32_t)(t_random() % sizeof in), size = 0;
            dp_started started;
            fill_pattern(in, n, n);
            memset(out, 0, sizeof out);
            int st = dp_channel_call(s->ch, FN_ECHO, in, n, NULL, out, n, &size, dp_now_ns() + 20000000000, &started);
            if (st) {
                CHECK_STATUS(st, DP_WORKER_DIED);
                break;
            }
            CHECK_EQ(size, n);
            CHECK_PATTERN(out, n, n);
            __atomic_add_fetch(&c->calls, 1, __ATOMIC_RELAXED);
        }
        __atomic_add_fetch(&c->failures, 1, __ATOMIC_RELAXED);
        CHECK_OK_ERR(dp_channel_reset(s->ch, &err), err);
        t_peer_join(&s->peer); /* it noticed that this side left */
    }
    __atomic_store_n(&c->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Threads with an endpoint each on one device, whose channels another thread fails at any moment: while they call, wait,
 * reset or connect. */
static void endpoints(dp_wait_mode mode) {
    caller c[CLIENTS] = {0};
    dp_dev *dev;
    dp_error err;
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev, &err), err);
    for (int i = 0; i < CLIENTS; i++) {
        c[i].rounds = (int)t_pick(20, 3);
        c[i].s.mode = mode;
        CHECK_OK_ERR(dp_endpoint_create(dev, 1, 4, mode, &c[i].s.ep, &err), err);
        CHECK_OK_ERR(dp_channel_create(c[i].s.ep, &(dp_channel_config){4, 1024, 0}, &c[i].s.ch, &err), err);
        CHECK(!pthread_create(&c[i].thread, NULL, call_and_recover, &c[i]));
    }
    for (int left = CLIENTS; left;) {
        left = 0;
        for (int i = 0; i < CLIENTS; i++) {
            if (__atomic_load_n(&c[i].done, __ATOMIC_ACQUIRE))
                continue;
            left++;
            if (__atomic_load_n(&c[i].calls, __ATOMIC_RELAXED) > 3 * __atomic_load_n(&c[i].failures, __ATOMIC_RELAXED))
                dp_channel_fail(c[i].s.ch, DP_WORKER_DIED);
        }
        t_sleep_ms((int)(t_random() % 4));
    }
    for (int i = 0; i < CLIENTS; i++) {
        pthread_join(c[i].thread, NULL);
        CHECK_EQ(c[i].failures, c[i].rounds);
        dp_channel_destroy(c[i].s.ch);
        dp_endpoint_destroy(c[i].s.ep);
    }
    dp_dev_close(dev);
}

T_CASE(endpoints_adaptive, "threads/endpoints-failed-from-outside", .providers = T_SHM, .seconds = 30) {
    endpoints(DP_WAIT_ADAPTIVE);
}
T_CASE(endpoints_warm, "threads/blocked-endpoints-failed-from-outside", .providers = T_SHM, .seconds = 30) {
    endpoints(DP_WAIT_WARM);
}
