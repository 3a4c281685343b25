/* Channel memory that the zygote prepares for the next worker. */
#include "spare.h"

#include <poll.h>

#include "dp_serve.h"

enum {
    QUIET_MS = 40,        /* by then a start has had its first call */
    SPARE_MOST = 4 << 20, /* bytes of one region: no lease pays for it */
};

static void drop(dp_spare *s) {
    dp_ahead_end(s->memory);
    s->memory = NULL;
    s->given = false;
}

void dp_spare_fill(dp_spare *s, int sock) {
    struct pollfd p = {.fd = sock, .events = POLLIN};
    if ((!s->size && !s->given) || (s->memory && !s->given && !dp_ahead_left(s->memory)) || poll(&p, 1, QUIET_MS))
        return;
    if (s->given)
        drop(s);
    if (!s->memory && s->size) {
        s->memory = dp_ahead_map(DP_SERVER_REGIONS, s->size);
        if (!s->memory || !dp_ahead_pass(s->memory, false)) {
            drop(s);
            s->size = 0;
        }
    }
    while (s->memory && poll(&p, 1, 0) == 0 && dp_ahead_fill(s->memory))
        ;
}

dp_ahead *dp_spare_take(dp_spare *s, const dp_channel_config *sizes) {
    if (s->given) /* it belongs to the worker before */
        drop(s);
    if (!sizes)
        return NULL;
    uint64_t size = dp_server_region(sizes);
    if (s->memory && size == s->size && dp_ahead_pass(s->memory, true)) {
        s->given = true;
        return s->memory;
    }
    drop(s);
    s->size = size <= SPARE_MOST ? size : 0;
    return NULL;
}
