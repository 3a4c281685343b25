/* Clients with workers of earlier versions. */
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
