/* Events that the program takes, renewal, and the end of a lease on a draining node. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"

int rfaas_lease_renew(rfaas_lease *l, int64_t duration_ns) {
    static const char op[] = "renew";
    int status = rfaas_api_enter(l, op);
    if (status)
        return status;
    if (duration_ns < 0)
        return leave(l, rfaas_api_fail(RFAAS_INVALID, 0, "%s: duration_ns %lld is negative", op, (long long)duration_ns));
    if (!l->grant->ep)
        return leave(l, RFAAS_OK); /* it has no end */
    rfaas_agent_renewal req = {.key = rfaas_api_grant_key(l), .duration_ns = duration_ns};
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1};
    rfaas_reply reply;
    status = rfaas_agent_ask(op, RFAAS_AGENT_RENEW, &parts, l->session->timeout_ns, sizeof(rfaas_agent_until), &reply);
    if (!status) {
        pthread_mutex_lock(&l->mu);
        l->grant->until_ns = ((rfaas_agent_until *)reply.data)->until_ns;
        pthread_mutex_unlock(&l->mu);
        free(reply.data);
    }
    return leave(l, status);
}

int rfaas_lease_event(rfaas_lease *l, rfaas_event *event) {
    static const char op[] = "lease event";
    if (!usable(l))
        return rfaas_api_bad_lease(l, op);
    if (!event)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: event is NULL", op);
    if (event->struct_size < offsetof(rfaas_event, worker) || event->struct_size > 1 << 16)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: event.struct_size is %u, want sizeof(rfaas_event)", op,
                              event->struct_size);
    rfaas_event e = {.struct_size = event->struct_size};
    rfaas_agent_look();
    rfaas_api_look_for_workers(l);
    pthread_mutex_lock(&l->mu);
    if (l->news_count) {
        const rfaas_news *n = &l->news[l->news_first];
        e.kind = n->kind;
        e.worker = n->worker;
        e.lost = l->news_lost;
        int64_t left = n->at ? n->at - dp_now_ns() : 0;
        e.left_ns = left > 0 ? left : 0;
        memcpy(e.text, n->text, sizeof e.text);
        l->news_first = (l->news_first + 1) % RFAAS_NEWS_KEPT;
        l->news_count--;
        l->news_lost = 0;
    }
    pthread_mutex_unlock(&l->mu);
    memcpy(event, &e, event->struct_size < sizeof e ? event->struct_size : sizeof e);
    return RFAAS_OK;
}

void rfaas_api_keep_news(rfaas_lease *l, const rfaas_agent_event *e) {
    if (l->news_count == RFAAS_NEWS_KEPT) {
        l->news_first = (l->news_first + 1) % RFAAS_NEWS_KEPT;
        l->news_count--;
        l->news_lost++;
    }
    rfaas_news *n = &l->news[(l->news_first + l->news_count++) % RFAAS_NEWS_KEPT];
    *n = (rfaas_news){.kind = e->kind, .worker = e->worker < rfaas_api_workers(l) ? e->worker : 0, .at = e->in_ns > 0 ? dp_now_ns() + e->in_ns : 0};
    snprintf(n->text, sizeof n->text, "%.*s", (int)sizeof n->text - 1, e->text);
}

void rfaas_api_finish(rfaas_lease *l) {
    uint32_t soon = RFAAS_AGENT_DRAIN_SOON;
    if (!__atomic_compare_exchange_n(&l->line->draining, &soon, RFAAS_AGENT_DRAIN_TOLD, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        return;
    pthread_mutex_lock(&l->mu); /* the lease may be moving */
    rfaas_agent_lease_name req = {.key = l->grant ? l->grant->key : 0};
    pthread_mutex_unlock(&l->mu);
    rfaas_agent_tell(RFAAS_AGENT_FINISH, &req, sizeof req); /* if it fails, the executor ends the lease by itself */
}

#define REASON_NS 200000000ll

void rfaas_api_await_reason(rfaas_lease *l) {
    int64_t until = dp_now_ns() + REASON_NS;
    for (bool known = false; !known && dp_now_ns() < until;) {
        pthread_mutex_lock(&l->mu);
        known = l->draining_reason[0] || l->grant->ended;
        pthread_mutex_unlock(&l->mu);
        if (!known)
            rfaas_agent_wait(until);
    }
}
