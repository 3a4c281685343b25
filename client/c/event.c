/* What a program is told of its lease, renewal, and leaving a node that drains. */
#include <linux/membarrier.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "call.h"

int rfaas_lease_renew(rfaas_lease *l, int64_t duration_ns) {
    static const char op[] = "renew";
    int status = rfaas_api_enter(l, op);
    if (status)
        return status;
    if (duration_ns < 0)
        return leave(l, rfaas_api_fail(RFAAS_INVALID, 0, "%s: duration_ns %lld is negative", op, (long long)duration_ns));
    if (!l->home->ep)
        return leave(l, RFAAS_OK); /* it has no end */
    rfaas_msg req = {0};
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, l->home->key);
    rfaas_msg_u64(&req, RFAAS_TAG_DURATION_NS, (uint64_t)duration_ns);
    return leave(l, rfaas_api_ask(op, RFAAS_OP_RENEW, &req, NULL));
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

void rfaas_api_keep_news(rfaas_lease *l, const rfaas_msg *m, uint32_t kind, uint32_t worker) {
    if (l->news_count == RFAAS_NEWS_KEPT) {
        l->news_first = (l->news_first + 1) % RFAAS_NEWS_KEPT;
        l->news_count--;
        l->news_lost++;
    }
    rfaas_news *n = &l->news[(l->news_first + l->news_count++) % RFAAS_NEWS_KEPT];
    int64_t in = (int64_t)rfaas_msg_get_u64(m, RFAAS_TAG_IN_NS, 0);
    *n = (rfaas_news){.kind = kind, .worker = worker, .at = in ? dp_now_ns() + in : 0};
    rfaas_msg_get_str(m, RFAAS_TAG_TEXT, n->text, sizeof n->text);
}

void rfaas_api_finish(rfaas_lease *l) {
    uint32_t soon = LEAVING_SOON;
    rfaas_msg req = {0};
    pthread_mutex_lock(&l->mu); /* the home that leaves is the one that is told of, also if the lease moves meanwhile */
    bool mine = __atomic_compare_exchange_n(&l->leaving, &soon, LEAVING_TOLD, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    uint64_t key = l->home ? l->home->key : 0;
    pthread_mutex_unlock(&l->mu);
    if (!mine)
        return;
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, key);
    rfaas_api_ask("finish", RFAAS_OP_FINISH, &req, NULL); /* if it fails, the executor ends the lease by itself */
}

void rfaas_api_begin_leaving(rfaas_lease *l) {
    syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0);
    if (!__atomic_load_n(&l->busy, __ATOMIC_SEQ_CST))
        rfaas_api_finish(l);
}
