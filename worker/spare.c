/* Memory for the next worker's channel, which the zygote has ready: on devices that pin memory its pages are what takes longest in a
 * cold start, and they depend on nothing but their number. */
#include "spare.h"

#include <poll.h>

#include "dp_serve.h"

enum {
    QUIET_MS = 40,        /* a start is over by then, its first call too */
    SPARE_MOST = 4 << 20, /* of one region: nobody has leased it */
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

dp_ahead *dp_spare_take(dp_spare *s, const dp_msg_spawn *m) {
    if (s->given) /* that worker's alone */
        drop(s);
    if (m->provider != DP_PROVIDER_VERBS || !m->n_functions)
        return NULL;
    /* The sizes come from the executor. Wrong sizes only cost time, because the worker compares them. */
    uint64_t size = dp_server_region(&(dp_channel_config){m->channel_depth, m->channel_eager, m->channel_bulk});
    if (s->memory && size == s->size && dp_ahead_pass(s->memory, true)) {
        s->given = true;
        return s->memory;
    }
    drop(s);
    s->size = size <= SPARE_MOST ? size : 0;
    return NULL;
}
