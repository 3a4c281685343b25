/* What happens to executors: looked for, or told to a function. */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "client.h"

#define LOOK_NS 5000000    /* how often rfaas_session_watch looks */
#define AWAY_NS 100000000  /* and how often while the manager is away */
#define AT_A_TIME 64

static void copy_field(const rfaas_msg *m, uint16_t tag, uint32_t n, char *out, size_t cap) {
    uint32_t len = 0;
    const uint8_t *b = rfaas_msg_find(m, tag, n, &len);
    if (len > cap - 1)
        len = (uint32_t)(cap - 1);
    if (b && len)
        memcpy(out, b, len);
    out[len] = 0;
}

int rfaas_session_changes(rfaas_session *s, rfaas_change changes[], size_t capacity, size_t *count) {
    static const char op[] = "session changes";
    int status = rfaas_api_bad_session(s, op);
    if (status)
        return status;
    if (!changes || !count || !capacity)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s", op,
                              !changes ? "changes is NULL" : !count ? "count is NULL" : "capacity is 0");
    rfaas_msg req = {0}, reply;
    rfaas_msg_u64(&req, RFAAS_TAG_SESSION, s->id);
    rfaas_msg_u64(&req, RFAAS_TAG_COUNT, capacity);
    if ((status = rfaas_api_ask(op, RFAAS_OP_CHANGES, &req, &reply)))
        return status;
    size_t n = 0;
    uint32_t len;
    for (; n < capacity && rfaas_msg_find(&reply, RFAAS_TAG_EXECUTOR, (uint32_t)n, &len); n++) {
        rfaas_change *c = &changes[n];
        c->state = (uint32_t)rfaas_msg_nth_u64(&reply, RFAAS_TAG_EVENT, (uint32_t)n, 0);
        c->reserved = 0;
        copy_field(&reply, RFAAS_TAG_EXECUTOR, (uint32_t)n, c->executor, sizeof c->executor);
        copy_field(&reply, RFAAS_TAG_NODE, (uint32_t)n, c->node, sizeof c->node);
    }
    rfaas_msg_free(&reply);
    *count = n;
    return RFAAS_OK;
}

static void pause_ns(int64_t ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    while (nanosleep(&t, &t) && errno == EINTR)
        ;
}

int rfaas_session_watch(rfaas_session *s, rfaas_change_fn f, void *arg, int64_t timeout_ns) {
    static const char op[] = "session watch";
    int status = rfaas_api_bad_session(s, op);
    if (status)
        return status;
    if (!f || timeout_ns < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s", op, !f ? "the function is NULL" : "timeout_ns is negative");
    for (int64_t end = dp_now_ns() + timeout_ns;;) {
        rfaas_change changes[AT_A_TIME];
        size_t n = 0;
        status = rfaas_session_changes(s, changes, AT_A_TIME, &n);
        if (status && dp_status_class(status) != RFAAS_CLASS_CONNECTION)
            return status;
        for (size_t i = 0; i < n; i++) {
            int told = f(&changes[i], arg);
            if (told)
                return told;
        }
        if (n == AT_A_TIME)
            continue;
        int64_t pause = status ? AWAY_NS : LOOK_NS, left = end - dp_now_ns();
        if (timeout_ns && left <= 0)
            return rfaas_api_fail(RFAAS_DEADLINE, 0, "%s: %lld ns are over", op, (long long)timeout_ns);
        pause_ns(timeout_ns && left < pause ? left : pause);
    }
}
