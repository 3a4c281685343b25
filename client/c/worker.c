/* Workers that die and leases that end: events of the control part, what they mean for calls, new workers in place of dead
 * ones. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client.h"

/* How long an error waits for the event that tells how its worker died. */
#define EXPLAIN_NS 900000000ll

/* The lines below an error's first: what was on the stack of a dead worker and what it had printed. NULL: none. */
static char *death_details(const rfaas_msg *m) {
    static const struct {
        uint16_t tag;
        const char *title;
    } parts[] = {{RFAAS_TAG_BACKTRACE, "on the stack"}, {RFAAS_TAG_OUTPUT, "its last output"}};
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (!f)
        return NULL;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        uint32_t len = 0;
        const char *from = (const char *)rfaas_msg_find(m, parts[i].tag, 0, &len);
        while (len && (from[len - 1] == '\n' || !from[len - 1]))
            len--;
        if (len)
            fprintf(f, "\n%s:\n    ", parts[i].title);
        for (uint32_t k = 0; k < len; k++) {
            if (from[k] == '\n')
                fputs("\n    ", f);
            else
                fputc(from[k] ? from[k] : '?', f);
        }
    }
    if (fclose(f)) {
        free(text);
        return NULL;
    }
    return text;
}

static void note_death(rfaas_worker *w, const rfaas_msg *m, int status) {
    rfaas_msg_get_str(m, RFAAS_TAG_TEXT, w->reason, sizeof w->reason);
    free(w->details);
    w->details = death_details(m);
    w->death_status = dp_status_class(status) == RFAAS_CLASS_CONNECTION ? status : DP_WORKER_DIED;
    /* A report about one that was replaced already, because its connection told earlier, must not end its
     * successor; one about a successor that is still being connected is kept. */
    w->dead_pid = rfaas_msg_get_u64(m, RFAAS_TAG_PID, 0);
    if (w->pid && w->dead_pid == w->pid)
        dp_channel_fail(w->ch, w->death_status);
}

void rfaas_control_event(const void *data, uint64_t len) {
    rfaas_msg m = {.data = (uint8_t *)data, .len = len};
    if (!rfaas_msg_check(&m))
        return;
    uint64_t key = rfaas_msg_get_u64(&m, RFAAS_TAG_KEY, 0), kept = rfaas_msg_get_u64(&m, RFAAS_TAG_KEPT, 0);
    if (kept && rfaas_msg_get_u64(&m, RFAAS_TAG_EVENT, 0) == RFAAS_NEWS_DROPPED)
        rfaas_api_drop_kept(kept);
    rfaas_lease *l = key ? rfaas_api_lease_at(key & (RFAAS_LEASES_MAX - 1)) : NULL;
    if (!l)
        return;
    int status = (int)(int64_t)rfaas_msg_get_u64(&m, RFAAS_TAG_STATUS, 0);
    uint64_t worker = rfaas_msg_get_u64(&m, RFAAS_TAG_WORKER, UINT64_MAX);
    bool drains = false;
    pthread_mutex_lock(&l->mu);
    rfaas_home *h = l->home;
    uint32_t kind = (uint32_t)rfaas_msg_get_u64(&m, RFAAS_TAG_EVENT, 0);
    if (l->next && l->next->key == key) {
        /* The lease is not there yet. What leaves before that is not taken at all. */
        h = l->next;
        if (kind == RFAAS_NEWS_DRAINING)
            kind = RFAAS_NEWS_ENDED;
    }
    if (h && h->key == key) {
        switch (kind) {
        case RFAAS_NEWS_WORKER_DIED:
            if (worker < h->n_workers)
                note_death(&h->workers[worker], &m, status);
            break;
        case RFAAS_NEWS_ENDED:
            h->ended = status < 0 ? status : DP_LEASE_ENDED;
            rfaas_msg_get_str(&m, RFAAS_TAG_TEXT, h->ended_reason, sizeof h->ended_reason);
            for (uint32_t i = 0; i < h->n_workers; i++)
                if (h->workers[i].ch)
                    dp_channel_fail(h->workers[i].ch, h->ended);
            rfaas_api_seek(l);
            break;
        case RFAAS_NEWS_DRAINING:
            if (!l->leaving) {
                rfaas_msg_get_str(&m, RFAAS_TAG_TEXT, l->leaving_reason, sizeof l->leaving_reason);
                __atomic_store_n(&l->leaving, LEAVING_SOON, __ATOMIC_RELEASE);
                drains = true;
                rfaas_api_seek(l);
            }
            break;
        }
        if (h == l->home && kind >= RFAAS_NEWS_WORKER_DIED && kind <= RFAAS_NEWS_EXPIRING)
            rfaas_api_keep_news(l, &m, kind, worker < h->n_workers ? (uint32_t)worker : 0);
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->mu);
    if (drains)
        rfaas_api_begin_leaving(l);
}

void rfaas_api_silent(void *arg, const dp_channel *ch, dp_silence silence) {
    const rfaas_home *h = arg;
    uint32_t i = 0;
    while (i < h->n_workers && h->workers[i].ch != ch)
        i++;
    rfaas_msg req = {0};
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, h->key);
    rfaas_msg_u64(&req, RFAAS_TAG_WORKER, i);
    rfaas_msg_u64(&req, RFAAS_TAG_COUNT, (uint64_t)silence.since);
    rfaas_msg_u64(&req, RFAAS_TAG_COUNT, (uint64_t)silence.at);
    rfaas_api_ask("silent worker", RFAAS_OP_SILENT, &req, NULL); /* if it fails: again, soon */
}

int rfaas_api_explain(rfaas_lease *l, const char *op, rfaas_function fn, uint32_t worker, int status, int started) {
    const char *name = fn < l->n_functions ? l->functions[fn] : "?";
    const char *note = started == RFAAS_MAYBE_EXECUTED ? "" : " (not started)";
    if (status == RFAAS_FUNCTION_FAILED)
        return status; /* the text is the function's own */
    if (dp_status_class(status) != RFAAS_CLASS_CONNECTION && dp_status_class(status) != RFAAS_CLASS_LEASE)
        return rfaas_api_fail(status, started, "%s %s on worker %u: %s%s", op, name, worker, rfaas_strerror(status), note);
    char why[sizeof ((rfaas_worker *)0)->reason], *details = NULL;
    rfaas_worker *w = &l->workers[worker];
    int64_t until = dp_now_ns() + EXPLAIN_NS;
    struct timespec ts = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    pthread_mutex_lock(&l->mu);
    while (!l->home->ended && w->pid && w->dead_pid != w->pid && w->silent_pid != w->pid && started == RFAAS_MAYBE_EXECUTED)
        if (pthread_cond_timedwait(&l->changed, &l->mu, &ts))
            w->silent_pid = w->pid; /* once is enough */
    bool died = w->pid && w->dead_pid == w->pid;
    int ended = l->home->ended;
    snprintf(why, sizeof why, "%s", ended ? l->home->ended_reason : w->reason);
    int death = w->death_status;
    if (died && !ended && w->details)
        details = strdup(w->details);
    pthread_mutex_unlock(&l->mu);
    if (ended)
        return rfaas_api_fail(ended, started, "%s %s: the lease on %s ended: %s%s", op, name, l->home->executor, why, note);
    if (!died)
        return rfaas_api_fail(status, started, "%s %s on worker %u: %s%s", op, name, worker, rfaas_strerror(status), note);
    rfaas_api_fail(death, started, "%s %s: %s: %s%s%s", op, name, rfaas_strerror(death), why, note, details ? details : "");
    free(details);
    return death;
}

/* Ends what was on the old worker's channel and makes it one that can be offered. */
static int begin(rfaas_lease *l, rfaas_worker *w, uint32_t i, const char *op) {
    dp_error err = {0};
    rfaas_api_settle(l, i);
    pthread_mutex_lock(&l->mu);
    int ended = l->home->ended;
    char why[sizeof l->home->ended_reason];
    memcpy(why, l->home->ended_reason, sizeof why);
    w->pid = 0;
    pthread_mutex_unlock(&l->mu);
    w->broken = true;
    if (ended)
        return rfaas_api_fail(ended, 0, "%s %u: the lease on %s ended: %s", op, i, l->home->executor, why);
    if (dp_channel_reset(w->ch, &err))
        return rfaas_api_fail_dp(op, &err);
    return RFAAS_OK;
}

/* Asks for a new worker and waits for at most so long. RFAAS_BUSY: it is not there yet. */
static int repair(rfaas_lease *l, uint32_t i, int64_t patience) {
    static const char op[] = "replace worker";
    rfaas_worker *w = &l->workers[i];
    int status = w->replacing && !dp_channel_broken(w->ch) ? RFAAS_OK : begin(l, w, i, op);
    if (status)
        return status;
    rfaas_msg req = {0}, reply;
    rfaas_msg_u64(&req, RFAAS_TAG_KEY, l->home->key);
    rfaas_msg_u64(&req, RFAAS_TAG_WORKER, i);
    rfaas_msg_u64(&req, RFAAS_TAG_TIMEOUT_NS, patience > 0 ? (uint64_t)patience : 0);
    status = rfaas_api_offer(w, &req);
    if (status)
        rfaas_msg_free(&req);
    else
        status = rfaas_api_ask(op, RFAAS_OP_REPLACE, &req, &reply);
    uint32_t len;
    w->replacing = !status && !rfaas_msg_find(&reply, RFAAS_TAG_BLOB, 0, &len);
    if (w->replacing) {
        rfaas_msg_free(&reply);
        dp_channel_hold(w->ch);
        return RFAAS_BUSY;
    }
    if (!status) {
        status = rfaas_api_connect_worker(l, l->home, i, &reply, 0);
        rfaas_msg_free(&reply);
    }
    if (status) {
        dp_channel_fail(w->ch, DP_PEER_GONE); /* so that the next use tries again */
        return status;
    }
    w->broken = false;
    l->replaced++;
    return RFAAS_OK;
}

int rfaas_api_begin_repair(rfaas_lease *l, uint32_t worker) { return repair(l, worker, 0); }

int rfaas_api_repair(rfaas_lease *l, uint32_t worker, int64_t deadline) {
    int64_t start = dp_now_ns(), patience = l->session->timeout_ns;
    if (deadline && deadline - start < patience)
        patience = deadline - start;
    int status = repair(l, worker, patience);
    if (status != RFAAS_BUSY || !l->workers[worker].replacing)
        return status;
    return rfaas_api_fail(RFAAS_DEADLINE, 0, "replace worker %u: not done within %lld ms, and goes on", worker,
                          (long long)(dp_now_ns() - start) / 1000000);
}
