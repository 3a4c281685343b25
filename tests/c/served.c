#include "served.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dp_channel_impl.h"
#include "ends.h"

static uint32_t f_echo(void *args, uint32_t n, void *res) {
    memcpy(res, args, n);
    return n;
}

static uint32_t f_empty(void *args, uint32_t n, void *res) {
    (void)args;
    (void)res;
    return n;
}

static uint32_t f_too_large(void *args, uint32_t n, void *res) {
    (void)args;
    (void)n;
    uint32_t size = dp_current_invocation()->capacity + 1;
    memset(res, 0xEE, size);
    return size;
}

static uint32_t f_fail(void *args, uint32_t n, void *res) {
    (void)res;
    dp_invocation *inv = dp_current_invocation();
    inv->failed = 1;
    inv->code = 0;
    inv->message_len = n < DP_FAILURE_TEXT ? n : DP_FAILURE_TEXT;
    memcpy(inv->message, args, inv->message_len);
    return 0;
}

static uint32_t f_slow(void *args, uint32_t n, void *res) {
    uint32_t ms;
    memcpy(&ms, args, sizeof ms);
    usleep(ms * 1000);
    memcpy(res, args, n);
    return n;
}

static uint32_t f_crash(void *args, uint32_t n, void *res) {
    (void)args;
    (void)n;
    (void)res;
    raise(SIGSEGV);
    return 0;
}

static uint32_t f_fill(void *args, uint32_t n, void *res) {
    uint32_t size;
    (void)n;
    memcpy(&size, args, sizeof size);
    fill_pattern(res, size, size);
    return size;
}

static __thread dp_server *this_server;

static uint32_t f_finish(void *args, uint32_t n, void *res) {
    dp_server_finish(this_server);
    return f_echo(args, n, res);
}

static uint32_t f_pace(void *args, uint32_t n, void *res) {
    uint32_t paced = 0;
    (void)n;
    for (int fd = 3; fd < 64; fd++) {
        struct sockaddr_storage peer;
        socklen_t len = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &len) || (peer.ss_family != AF_INET && peer.ss_family != AF_INET6))
            continue;
        paced += setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, args, sizeof(uint32_t)) == 0;
    }
    memcpy(res, &paced, sizeof paced);
    return sizeof paced;
}

static uint32_t f_overrun(void *args, uint32_t n, void *res) {
    uint32_t sizes[2];
    (void)n;
    memcpy(sizes, args, sizeof sizes);
    dp_current_invocation()->code = 7; /* ignored: the failure of an overrun has no code */
    memset(res, 0xEE, sizes[0]);
    return sizes[1];
}

static uint32_t f_scribble(void *args, uint32_t n, void *res) {
    (void)res;
    memset(args, 0xEE, n);
    return 0;
}

static uint32_t f_length(void *args, uint32_t n, void *res) {
    (void)args;
    memcpy(res, &n, sizeof n);
    return sizeof n;
}

static uint32_t f_files(void *args, uint32_t n, void *res) {
    struct rlimit files;
    uint32_t most;
    (void)n;
    (void)res;
    memcpy(&most, args, sizeof most);
    CHECK(!getrlimit(RLIMIT_NOFILE, &files));
    files.rlim_cur = most;
    CHECK(!setrlimit(RLIMIT_NOFILE, &files));
    return 0;
}

const dp_function served_functions[FN_COUNT] = {f_echo, f_empty,  f_too_large, f_fail,    f_slow,     f_crash,
                                                f_fill, f_finish, f_pace,      f_overrun, f_scribble, f_length, f_files};

static void server_main(int sock, void *arg) {
    dp_wait_mode mode = *(dp_wait_mode *)arg;
    dp_error err;
    dp_dev *dev;
    dp_server *s;
    dp_dev_options o = quick_options();
    o.active_side_only = 1;
    uint32_t len;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    t_name("server");
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &dev, &err), err);
    CHECK_OK_ERR(dp_server_create(dev, &(dp_server_config){.mode = mode}, blob, len, &s, &err), err);
    dp_server_set_functions(s, served_functions, FN_COUNT);
    len = sizeof blob;
    CHECK_OK_ERR(dp_server_blob(s, blob, &len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    this_server = s;
    int st = dp_server_run(s);
    CHECKF(st == DP_OK || dp_status_class(st) == 5, "the server ended with %s", dp_status_text(st));
    dp_server_destroy(s);
    dp_dev_close(dev);
}

void served_again(served *s, bool process) {
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    if (!process) /* a forked one was started before any device was opened */
        t_peer_start(&s->peer, false, server_main, &s->mode);
    CHECK_OK_ERR(dp_channel_offer(s->ch, blob, &len, &err), err);
    t_send(s->peer.sock, &len, sizeof len);
    t_send(s->peer.sock, blob, len);
    t_recv(s->peer.sock, &len, sizeof len);
    t_recv(s->peer.sock, blob, len);
    CHECK_OK_ERR(dp_channel_connect(s->ch, blob, len, &err), err);
}

void served_open(served *s, bool process, dp_wait_mode mode, uint32_t depth, uint32_t eager, uint64_t bulk) {
    dp_error err;
    dp_dev_options o = quick_options();
    o.packable = 1;
    s->mode = mode;
    if (process)
        t_peer_start(&s->peer, true, server_main, &s->mode);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &s->dev, &err), err);
    CHECK_OK_ERR(dp_endpoint_create(s->dev, 1, depth, mode, &s->ep, &err), err);
    CHECK_OK_ERR(dp_channel_create(s->ep, &(dp_channel_config){depth, eager, bulk}, &s->ch, &err), err);
    served_again(s, process);
}

void served_close_client(served *s) {
    dp_channel_destroy(s->ch);
    dp_endpoint_destroy(s->ep);
    dp_dev_close(s->dev);
}

void served_close(served *s) {
    served_close_client(s);
    t_peer_join(&s->peer);
}

void served_by_queue_pair(dp_channel *ch) { ch->mailbox = NULL; }

void served_echo(served *s, uint32_t n, uint32_t seed) {
    uint8_t *in = malloc(n + 64), *out = malloc(n + 64);
    uint32_t size = 0;
    dp_started started;
    fill_pattern(in, n, seed);
    memset(out, 0xA5, n + 64);
    CHECK_OK(dp_channel_call(s->ch, FN_ECHO, in, n, NULL, out, n, &size, 0, &started));
    CHECK_EQ(size, n);
    CHECK_PATTERN(out, n, seed);
    CHECK_BYTES(out + n, 0xA5, 64);
    free(in);
    free(out);
}
