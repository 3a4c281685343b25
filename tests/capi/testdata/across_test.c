/* Workers on several executors as one call. The second argument: how many executors there are, of two cores each. */
#define CHECK_ARGUMENT executors_there
static const char *executors_there;
#include "check.h"

enum { ROOM = 8 };

void everything(void) {
    size_t executors = strtoull(executors_there, NULL, 10), n = 77;
    rfaas_lease *l[ROOM] = {0};
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    o.library = library;
    o.bulk = RFAAS_NO_BULK;
    o.workers = (uint32_t)(2 * executors - 1);
    o.flags = RFAAS_LEASE_FAILOVER;
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    FAILS(rfaas_lease_open_across(session, &o, 0, l, &n), RFAAS_INVALID, "capacity is 0");
    o.executor = "a:1";
    FAILS(rfaas_lease_open_across(session, &o, ROOM, l, &n), RFAAS_INVALID, "executor a:1");
    o.executor = NULL;
    o.workers = 70000;
    FAILS(rfaas_lease_open_across(session, &o, ROOM, l, &n), RFAAS_INVALID, "70000");
    o.workers = (uint32_t)(2 * executors + 1);
    FAILS(rfaas_lease_open_across(session, &o, ROOM, l, &n), RFAAS_BUSY, "there is room for");
    o.workers--;
    FAILS(rfaas_lease_open_across(session, &o, executors - 1, l, &n), RFAAS_BUSY, "room for 2 leases");
    CHECK(n == 77);

    /* All cores, twice: what failed above holds none, nor does what was released. What an executor says of its cores is
     * on the board a moment later. Then with RFAAS_LEASE_REUSE, until all leases have the cached workers of the leases before. On a busy machine a
     * worker may take too long to come to rest, and is not cached. */
    size_t cached = 0;
    for (int time = 0; time < 20 && cached < 2 * executors; time++) {
        int status;
        cached = 0;
        double end = now() + 20;
        if (time == 2)
            o.flags |= RFAAS_LEASE_REUSE;
        while ((status = rfaas_lease_open_across(session, &o, ROOM, l, &n)) == RFAAS_BUSY && now() < end)
            usleep(5000);
        OK(status);
        if (status)
            break;
        CHECK(n == executors);
        rfaas_request r[2 * ROOM];
        uint64_t in[2 * ROOM], out[2 * ROOM] = {0};
        size_t calls = 0, at;
        for (size_t i = 0; i < n; i++) {
            rfaas_lease_details d = {.struct_size = sizeof d};
            OK(rfaas_lease_info(l[i], &d));
            CHECK(d.workers == 2);
            for (int w = 0; w < 2; w++, calls++) {
                rfaas_worker_start from = {.struct_size = sizeof from};
                OK(rfaas_worker_origin(l[i], (uint32_t)w, &from));
                cached += from.start == RFAAS_START_CACHED;
                CHECK(from.start != RFAAS_START_CACHED || time > 2);
                rfaas_call_options c = RFAAS_CALL_OPTIONS_INIT;
                c.worker = w;
                in[calls] = 100 + calls;
                OK(rfaas_iinvoke(l[i], find(l[i], "echo"), &in[calls], 8, &out[calls], 8, &c, &r[calls]));
            }
        }
        OK(rfaas_waitany(calls, r, &at, NULL));
        CHECK(at < calls);
        OK(rfaas_waitall(calls, r, NULL, NULL));
        CHECK(!memcmp(in, out, calls * 8));
        for (size_t i = 0; i < n; i++)
            OK(rfaas_lease_release(l[i]));
    }
    CHECK(cached == 2 * executors);
    OK(rfaas_finalize());
}
