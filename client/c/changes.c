/* Changes of executors: rfaas_session_changes and rfaas_session_watch. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client.h"

#define LOOK_NS 5000000    /* how often rfaas_session_watch asks */
#define AWAY_NS 100000000  /* the same while the manager cannot be reached */
#define AT_A_TIME 64

int rfaas_session_changes(rfaas_session *s, rfaas_change changes[], size_t capacity, size_t *count) {
    static const char op[] = "session changes";
    int status = rfaas_api_bad_session(s, op);
    if (status)
        return status;
    if (!changes || !count || !capacity)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s", op,
                              !changes ? "changes is NULL" : !count ? "count is NULL" : "capacity is 0");
    rfaas_agent_session_name req = {.session = s->open.session, .count = capacity};
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1};
    rfaas_reply reply;
    if ((status = rfaas_agent_ask(op, RFAAS_AGENT_CHANGES, &parts, s->timeout_ns, sizeof(rfaas_agent_count), &reply)))
        return status;
    uint64_t n;
    memcpy(&n, reply.data, sizeof n);
    if (n > capacity || reply.size != sizeof(rfaas_agent_count) + n * sizeof(rfaas_agent_change)) {
        free(reply.data);
        return rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s: the agent's reply has %u bytes for %llu changes", op, reply.size, (unsigned long long)n);
    }
    for (uint64_t i = 0; i < n; i++) {
        rfaas_agent_change from;
        memcpy(&from, reply.data + sizeof(rfaas_agent_count) + i * sizeof from, sizeof from);
        rfaas_change *c = &changes[i];
        c->state = from.state;
        c->reserved = 0;
        snprintf(c->executor, sizeof c->executor, "%.*s", (int)sizeof c->executor - 1, from.executor);
        snprintf(c->node, sizeof c->node, "%.*s", (int)sizeof c->node - 1, from.node);
    }
    free(reply.data);
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
    for (int64_t end = dp_now_ns() + (timeout_ns < RFAAS_TIMEOUT_MAX_NS ? timeout_ns : RFAAS_TIMEOUT_MAX_NS);;) {
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
