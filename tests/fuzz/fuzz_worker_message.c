/* Messages from the executor to the zygote: a packet as it comes from the socket. Byte 0: how many descriptors come with
 * it: 0 as many as with a SPAWN, otherwise the byte minus one. Byte 1: 1 makes the body as long as a SPAWN's. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "worker/message.h"

#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int pair[2] = {-1, -1};
    input in = {data, size};
    int n = take8(&in) % (DP_PACKET_FDS_MAX + 5);
    n = n ? n - 1 : DP_SPAWN_FDS;
    uint8_t bytes[2 * DP_MSG_MAX] = {0};
    size_t len = 0;
    dp_msg_head spawn_head;
    bool mend = take8(&in) == 1;
    if (pair[0] < 0) {
        MUST(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    }
    int lowest = dup(0); /* libFuzzer has open files too */
    close(lowest);
    int fds[DP_PACKET_FDS_MAX + 4] = {0};
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(sizeof fds)];
    } control;
    memset(&control, 0, sizeof control);
    len = in.left < sizeof bytes ? in.left : sizeof bytes;
    memcpy(bytes, in.at, len);
    if (mend && len >= sizeof spawn_head) {
        len = sizeof spawn_head + sizeof(dp_msg_spawn);
        memcpy(&spawn_head, bytes, sizeof spawn_head);
        spawn_head.len = sizeof(dp_msg_spawn);
        memcpy(bytes, &spawn_head, sizeof spawn_head);
    }
    struct iovec iov = {bytes, len};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n) {
        m.msg_control = control.buf;
        m.msg_controllen = CMSG_SPACE((size_t)n * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN((size_t)n * sizeof(int));
        memcpy(CMSG_DATA(c), fds, (size_t)n * sizeof(int));
    }
    if (len == 0 || sendmsg(pair[0], &m, MSG_NOSIGNAL) < 0)
        return 0;
    dp_packet *p = malloc(sizeof *p);
    dp_error err = {0};
    MUST(dp_packet_recv(pair[1], p) == 1);
    dp_msg_spawn s;
    int st = dp_packet_spawn(p, &s, &err);
    if (st == DP_OK) {
        MUST(strnlen(s.device, sizeof s.device) < sizeof s.device);
        MUST(s.max_depth <= DP_DEPTH_MAX);
    }
    if (st == DP_OK && p->head.type == DP_MSG_SPAWN) {
        MUST(s.n_functions >= 1 && s.n_functions <= DP_FUNCTIONS_MAX && s.blob_len >= 1 && s.blob_len <= sizeof s.blob);
        MUST(s.wait_mode <= DP_WAIT_WARM && s.max_bulk <= DP_BULK_MAX);
    }
    MUST(st == DP_OK || (err.status == st && err.msg[0]));
    dp_msg_task task;
    st = dp_packet_task(p, &task, &err); /* the same bytes at a prepared worker */
    MUST(st == DP_OK || (err.status == st && err.msg[0]));
    if (st == DP_OK && task.type != DP_MSG_SPAWN)
        MUST(task.inspect.n_offsets <= DP_ELF_OFFSETS_MAX && task.inspect.cpu_seconds && (task.type == DP_MSG_SYMBOLS) == (task.inspect.n_offsets > 0));
    dp_packet_close(p);
    free(p);
    int free_fd = dup(0);
    MUST(free_fd == lowest);
    close(free_fd);
    return 0;
}
