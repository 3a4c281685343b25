/* Ending living workers: rfaas_worker_replace, and calls with RFAAS_CALL_KILL. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"

#define PAUSE_NS 1000000 /* between two looks at a replacement; other threads have the worker's unit meanwhile */

void rfaas_api_discard(rfaas_lease *l, uint32_t worker, const char *why) {
    rfaas_worker *w = &l->workers[worker];
    pthread_mutex_lock(&l->mu);
    snprintf(w->reason, sizeof w->reason, "worker %u was replaced: %s", worker, why);
    free(w->details);
    w->details = NULL;
    w->death_status = DP_WORKER_DIED;
    w->dead_pid = w->pid;
    pthread_mutex_unlock(&l->mu);
    w->kill = true;
    dp_channel_fail(w->ch, DP_WORKER_DIED);
}

int rfaas_api_kill_late(rfaas_lease *l, rfaas_function fn, uint32_t worker, int status, bool result_in_place) {
    char why[256], *text = strdup(rfaas_last_error());
    snprintf(why, sizeof why, "the time limit of \"%.128s\" passed (RFAAS_CALL_KILL)", function_name(l, fn));
    rfaas_api_discard(l, worker, why);
    int st = result_in_place ? rfaas_api_end_worker(l, worker) : rfaas_api_begin_repair(l, worker); /* after an error the next call tries again */
    const char *end = result_in_place && l->workers[worker].kill ? "; the executor has not confirmed the end of the worker, which may still write to the result in place"
                      : !st || st == RFAAS_BUSY ? "; the worker is killed and replaced" : "; the next call replaces the worker";
    status = rfaas_api_fail(status, RFAAS_MAYBE_EXECUTED, "%s%s", text ? text : rfaas_strerror(status), end);
    free(text);
    return status;
}

static bool there(const rfaas_lease *l, uint32_t w) { return !l->workers[w].broken && !dp_channel_status(l->workers[w].ch); }

/* Replaces a worker of a shared lease. Threads that wait for calls on it put its unit down for this. */
static int replace_shared(rfaas_lease *l, uint32_t w, const char *why, const char *op) {
    int64_t start = dp_now_ns(), until = start + l->session->timeout_ns;
    for (bool first = true;; first = false) {
        uint32_t unit;
        int status = dp_turns_take(l->turns, DP_TURN_BRIEF, unit_of(w), false, until, &unit);
        if (status)
            return rfaas_api_fail(status, 0, status == RFAAS_DEADLINE ? "%s %u: other threads used the worker until the session's time-out; try again"
                                                                      : "%s %u: the lease was released by another thread", op, w);
        bool initialising = first && l->workers[w].initialising;
        if (first)
            rfaas_api_discard(l, w, why);
        status = there(l, w) ? RFAAS_OK : rfaas_api_begin_repair(l, w);
        if (status && initialising) /* that was the end of its init call */
            status = rfaas_api_begin_repair(l, w);
        dp_turns_put_down(l->turns, unit);
        if (status != RFAAS_BUSY)
            return status;
        int64_t now = dp_now_ns();
        if (now >= until)
            return rfaas_api_fail(RFAAS_DEADLINE, 0, "%s %u: no new worker within %lld ms; the replacement continues", op, w,
                                  (long long)(now - start) / 1000000);
        rfaas_agent_wait(now + PAUSE_NS);
    }
}

int rfaas_worker_replace(rfaas_lease *l, int worker) {
    static const char op[] = "replace worker", why[] = "the program asked for it (rfaas_worker_replace)";
    int status = rfaas_api_enter(l, op);
    if (status)
        return status;
    if (worker < 0 || (uint32_t)worker >= l->n_workers)
        return leave(l, rfaas_api_no_worker(l, op, worker));
    if (!l->grant->ep)
        return leave(l, rfaas_api_fail(RFAAS_UNSUPPORTED, 0, "%s: the lease has no workers; its calls run in this process", op));
    if (draining(l))
        return leave(l, rfaas_api_fail(RFAAS_LEASE_ENDED, 0, "%s: executor %s is draining: it starts no workers", op, l->grant->executor));
    if (shared(l))
        return leave(l, replace_shared(l, (uint32_t)worker, why, op));
    bool initialising = l->workers[worker].initialising;
    rfaas_api_discard(l, (uint32_t)worker, why);
    status = rfaas_api_repair(l, (uint32_t)worker, 0);
    if (status && initialising) /* that was the end of its init call */
        status = rfaas_api_repair(l, (uint32_t)worker, 0);
    return leave(l, status);
}
