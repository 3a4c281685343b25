/* Waiting for several requests, of any leases. */
#include <string.h>

#include "request.h"

int rfaas_waitall(size_t count, rfaas_request requests[], size_t out_sizes[], int statuses[]) {
    if (UNLIKELY(!requests && count))
        return rfaas_api_fail(RFAAS_INVALID, 0, "waitall: requests is NULL with count %zu", count);
    int first = RFAAS_OK, started = 0;
    int32_t code = 0;
    size_t at = 0;
    char *text = NULL;
    for (size_t i = 0; i < count; i++) {
        size_t size = 0;
        int status = rfaas_wait(&requests[i], &size);
        if (out_sizes)
            out_sizes[i] = size;
        if (statuses)
            statuses[i] = status;
        if (UNLIKELY(status != RFAAS_OK && first == RFAAS_OK)) {
            first = status;
            at = i;
            started = rfaas_started();
            code = rfaas_function_code();
            text = strdup(rfaas_last_error());
        }
    }
    if (UNLIKELY(first != RFAAS_OK)) {
        rfaas_api_fail_code(first, started, code, "waitall: request %zu of %zu: %s", at, count, text ? text : rfaas_strerror(first));
        free(text);
    }
    return first;
}

/* Where this thread's next rfaas_waitany begins its search. */
static _Thread_local size_t any_from;

/* Looks once at all requests. 1: request *index has ended, with *status. 0: none has. Also counts their leases, and finds the earliest
 * deadline. */
static int look_at_all(size_t count, rfaas_request requests[], size_t *index, size_t *out_size, int *status,
                       rfaas_lease **lease, size_t *others, int64_t *deadline) {
    int64_t now = 0;
    *lease = NULL;
    *others = 0;
    *deadline = 0;
    for (size_t k = 0, i = any_from < count ? any_from : 0; k < count; k++, i = i + 1 == count ? 0 : i + 1) {
        if (requests[i] == RFAAS_REQUEST_NULL)
            continue;
        rfaas_lease *l;
        rfaas_request_slot *r;
        if (UNLIKELY(*status = enter_for(requests[i], "waitany", &l, &r))) {
            *index = i;
            return 1;
        }
        int64_t due;
        if (UNLIKELY(shared(l))) {
            bool over;
            *status = rfaas_api_look(l, r, requests[i], "waitany", &over, &due);
            if (*status || over) {
                if (!*status)
                    *status = report(l, r, "waitany", &requests[i], out_size);
                leave(l, 0);
                *index = i;
                any_from = i + 1;
                return 1;
            }
        } else {
            if (r->deadline && !now)
                now = dp_now_ns();
            if (rfaas_api_ended(l, r, now)) {
                *status = report(l, r, "waitany", &requests[i], out_size);
                *index = i;
                leave(l, 0);
                any_from = i + 1;
                return 1;
            }
            due = due_of(l, r);
        }
        if (due && (!*deadline || due < *deadline))
            *deadline = due;
        leave(l, 0);
        if (*lease && *lease != l)
            (*others)++;
        *lease = l;
    }
    return 0;
}

/* How long to wait on one of several leases before looking at the next. */
#define SLICE_MIN_NS 20000
#define SLICE_MAX_NS 1000000

/* until: CLOCK_MONOTONIC ns, 0: for ever. */
static int wait_any(size_t count, rfaas_request requests[], int64_t until, size_t *index, size_t *out_size) {
    if (UNLIKELY(!index || (!requests && count)))
        return rfaas_api_fail(RFAAS_INVALID, 0, "waitany: %s is NULL", index ? "requests" : "index");
    *index = RFAAS_UNDEFINED;
    if (out_size)
        *out_size = 0;
    int64_t slice = SLICE_MIN_NS;
    for (size_t turn = 0;; turn++) {
        rfaas_lease *l;
        size_t others, i = count ? turn % count : 0;
        int64_t deadline;
        int status;
        if (look_at_all(count, requests, index, out_size, &status, &l, &others, &deadline))
            return status;
        if (!l || (until && dp_now_ns() >= until))
            return RFAAS_OK; /* only null requests, or the time is over */
        if (until && (!deadline || until < deadline))
            deadline = until;
        while (requests[i] == RFAAS_REQUEST_NULL)
            i = i + 1 == count ? 0 : i + 1;
        if (UNLIKELY(others || (count > 1 && __atomic_load_n(&l->shared, __ATOMIC_RELAXED)))) {
            /* A thread can sleep on the queue of one lease at a time, and each lease has its own. So it waits for a while on one, then
             * on the next. */
            int64_t soon = dp_now_ns() + slice;
            if (!deadline || soon < deadline)
                deadline = soon;
            slice = slice * 2 < SLICE_MAX_NS ? slice * 2 : SLICE_MAX_NS;
        }
        rfaas_request_slot *r;
        if (UNLIKELY(enter_for(requests[i], "waitany", &l, &r)))
            continue; /* the next look reports the error */
        if (UNLIKELY(shared(l)))
            rfaas_api_wait_a_while(l, r, deadline);
        else if (dp_endpoint_wait_turn(l->grant->ep, deadline) == DP_YIELD)
            rfaas_api_share(l, RFAAS_NO_UNIT, DP_TURN_BRIEF);
        leave(l, 0);
    }
}

int rfaas_waitany(size_t count, rfaas_request requests[], size_t *index, size_t *out_size) {
    return wait_any(count, requests, 0, index, out_size);
}

int rfaas_waitany_for(size_t count, rfaas_request requests[], int64_t timeout_ns, size_t *index, size_t *out_size) {
    int64_t now = dp_now_ns();
    return wait_any(count, requests, timeout_ns < 0 ? now : timeout_ns > INT64_MAX - now ? 0 : now + timeout_ns, index, out_size);
}
