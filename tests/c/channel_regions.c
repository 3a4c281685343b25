/* Clients with workers of earlier versions, and with hostile ones, whose regions differ. */
#include "dp_channel_impl.h"
#include "dp_layout.h"
#include "dp_shm.h"
#include "served.h"

/* Workers of earlier versions have smaller regions, and take smaller payloads by the mailbox. */
T_CASE(mailbox_region, "channel/mailbox-by-region-size", .providers = T_SHM) {
    static const struct {
        uint32_t mailbox, most;
    } t[] = {{sizeof(dp_mailbox), DP_MAILBOX_SMALL}, {DP_MAILBOX_LARGE_SIZE, DP_MAILBOX_LARGE}, {DP_MAILBOX_SLOTS_SIZE, 6000 + 16}};
    served s;
    served_open(&s, true, DP_WAIT_HOT, 4, 6000, 1 << 20);
    for (uint32_t i = 0; i < sizeof t / sizeof *t; i++) {
        ((shm_qp *)s.ch->qp)->peer.regions[0].size = s.ch->layout.mailbox_at + t[i].mailbox;
        dp_channel_find_mailbox(s.ch, true);
        CHECK_EQ(s.ch->mailbox_max, t[i].most);
        for (uint32_t n = 64; n <= 8192; n *= 2) {
            served_echo(&s, n - 1, i + n);
            served_echo(&s, n, i + n);
            served_echo(&s, n + 1, i + n);
        }
    }
    served_close(&s);
}

/* A hostile worker's region has the mailbox only, and its channel blob says that the slots are before the region. The client writes nothing there. */
T_CASE(mailbox_without_slots, "channel/mailbox-without-slots", .providers = T_SHM) {
    enum { PAGE = 4096 };
    served s;
    served_open(&s, true, DP_WAIT_HOT, 4, 6000, 1 << 20);
    shm_region *r = &((shm_qp *)s.ch->qp)->peer.regions[0], whole = *r;
    uint64_t before = s.ch->layout.mailbox_at / PAGE * PAGE;
    r->base += before;
    r->map += before;
    r->size -= before;
    dp_channel_find_mailbox(s.ch, true);
    CHECK(s.ch->mailbox);
    CHECK_EQ(s.ch->mailbox_max, DP_MAILBOX_LARGE);
    served_echo(&s, DP_MAILBOX_LARGE, 1); /* by the mailbox */
    uint8_t in[DP_MAILBOX_LARGE + 1] = {0}, out[8];
    uint32_t size;
    dp_started started;
    CHECK_EQ(dp_channel_call(s.ch, FN_ECHO, in, sizeof in, NULL, out, sizeof out, &size, 0, &started), DP_CONNECTION);
    *r = whole;
    served_close(&s);
}
