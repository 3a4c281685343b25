/* A client for the tests, driven by lines on stdin; one line on stdout answers each.
 *
 *   offer                         -> <channel> <blob in hex>
 *   connect <channel> <blob>      -> ok
 *   renew <channel>               -> <blob in hex>
 *   resume <channel> <blob>       -> ok
 *   call <channel> <function> <capacity> <payload in hex or ->
 *                                 -> <status> <result size> <result in hex or ->
 *   close <channel>               -> ok
 *
 * Anything that fails is answered by "error <text>". A call waits 5 s at most. Ends with its stdin. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dp_channel.h"

#define CHANNELS 64
#define DATA_MAX 65536

static dp_endpoint *endpoint;
static dp_channel *channels[CHANNELS];

static void hex(const uint8_t *b, size_t n) {
    if (!n)
        printf("-");
    for (size_t i = 0; i < n; i++)
        printf("%02x", b[i]);
    printf("\n");
}

static size_t unhex(const char *s, uint8_t *b, size_t room) {
    size_t n = 0;
    for (unsigned v; n < room && sscanf(s + 2 * n, "%2x", &v) == 1; n++)
        b[n] = (uint8_t)v;
    return n;
}

static void offer(void) {
    dp_channel_config cfg = {.depth = 4, .eager = 4096, .bulk = 1 << 20};
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    int at = 0;
    while (at < CHANNELS && channels[at])
        at++;
    if (at == CHANNELS) {
        printf("error too many channels\n");
        return;
    }
    if (dp_channel_create(endpoint, &cfg, &channels[at], &err) || dp_channel_offer(channels[at], blob, &len, &err)) {
        printf("error %s\n", err.msg);
        return;
    }
    printf("%d ", at);
    hex(blob, len);
}

static void renew(dp_channel *ch) {
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    if (dp_channel_next_generation(ch, &err) || dp_channel_offer(ch, blob, &len, &err))
        printf("error %s\n", err.msg);
    else
        hex(blob, len);
}

static void call(dp_channel *ch, unsigned function, unsigned capacity, const char *payload) {
    static uint8_t in[DATA_MAX];
    size_t n = unhex(payload, in, sizeof in);
    uint32_t slot, size = 0;
    const void *result = NULL;
    dp_started started;
    int st = dp_channel_submit(ch, function, in, (uint32_t)n, NULL, capacity, &slot);
    if (!st)
        st = dp_channel_wait(ch, slot, dp_now_ns() + 5000000000);
    if (st) {
        printf("%d 0 -\n", st);
        return;
    }
    /* Unlike dp_channel_call this shows what a failed function said. */
    st = dp_channel_result(ch, slot, &result, &size, &started);
    bool shown = st == DP_OK || st == DP_FUNCTION_FAILED;
    printf("%d %u ", st, size);
    hex(result, shown ? size : 0);
    dp_channel_finish(ch, slot, NULL, NULL, NULL);
}

int main(void) {
    static char line[2 * DATA_MAX + 256], text[2 * DATA_MAX + 1];
    dp_dev *dev;
    dp_error err;
    unsigned at, function, capacity;
    if (dp_dev_open("shm", NULL, &dev, &err) ||
        dp_endpoint_create(dev, CHANNELS, 4, DP_WAIT_WARM, &endpoint, &err)) {
        printf("error %s\n", err.msg);
        return 1;
    }
    while (fgets(line, sizeof line, stdin)) {
        if (!strcmp(line, "offer\n")) {
            offer();
        } else if (sscanf(line, "connect %u %131072s", &at, text) == 2 && at < CHANNELS && channels[at]) {
            uint8_t blob[DP_CHANNEL_BLOB_MAX];
            int st = dp_channel_connect(channels[at], blob, (uint32_t)unhex(text, blob, sizeof blob), &err);
            printf(st ? "error %s\n" : "ok\n", err.msg);
        } else if (sscanf(line, "call %u %u %u %131072s", &at, &function, &capacity, text) == 4 && at < CHANNELS &&
                   channels[at] && capacity <= DATA_MAX) {
            call(channels[at], function, capacity, text);
        } else if (sscanf(line, "renew %u", &at) == 1 && at < CHANNELS && channels[at]) {
            renew(channels[at]);
        } else if (sscanf(line, "resume %u %131072s", &at, text) == 2 && at < CHANNELS && channels[at]) {
            uint8_t blob[DP_CHANNEL_BLOB_MAX];
            int st = dp_channel_resume(channels[at], blob, (uint32_t)unhex(text, blob, sizeof blob), &err);
            printf(st ? "error %s\n" : "ok\n", err.msg);
        } else if (sscanf(line, "close %u", &at) == 1 && at < CHANNELS && channels[at]) {
            dp_channel_destroy(channels[at]);
            channels[at] = NULL;
            printf("ok\n");
        } else {
            printf("error not understood: %s", line);
        }
        fflush(stdout);
    }
    return 0;
}
