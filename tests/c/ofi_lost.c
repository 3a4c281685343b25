/* libfabric's tcp reconnects without an error, and then the writes that were on their way are lost. The queue pair must end, and no write
 * that was posted later may arrive. */
#include "dp_ofi.h"

#ifdef DP_HAVE_LIBFABRIC
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ends.h"

static bool connected(int fd) {
    int protocol = 0;
    socklen_t len = sizeof protocol;
    struct sockaddr_storage peer;
    socklen_t peer_len = sizeof peer;
    return !getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &len) && protocol == IPPROTO_TCP && !getpeername(fd, (void *)&peer, &peer_len);
}

/* Discards the bytes that have arrived on this process's TCP connections, and shuts the connections down. Returns how many bytes it discarded. */
static size_t cut_connections(void) {
    enum { FDS = 256 };
    char bytes[4096];
    size_t taken = 0;
    ssize_t n;
    bool cut[FDS];
    for (int fd = 0; fd < FDS; fd++)
        for (cut[fd] = connected(fd); cut[fd] && (n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT)) > 0;)
            taken += (size_t)n;
    for (int fd = 0; fd < FDS; fd++)
        if (cut[fd])
            CHECK(!shutdown(fd, SHUT_RDWR));
    return taken;
}

static void write_8(end *from, end *to, uint32_t imm) {
    dp_sge sge = local_sge(from, 0, 8);
    end_write_imm(from, &sge, 1, to->mem->base, to->mem->rkey, imm, imm, 0);
}

/* Polls for ms milliseconds. A post may fail, and none may complete. */
static void look_at(end *e, int ms) {
    dp_wc wc;
    int64_t until = dp_now_ns() + ms * 1000000ll;
    do
        CHECK(dp_cq_poll(e->cq, &wc, 1) == 0 || wc.status != DP_OK);
    while (dp_now_ns() < until);
}

T_CASE(ofi_lost, "write/lost-on-ofi", .providers = T_OFI) {
    end a, b;
    end_open(&a, &(end_opts){0}, NULL);
    end_open(&b, &(end_opts){0}, NULL);
    ends_connect_and_write(&a, &b);
    for (uint32_t i = 0; i < (1u << OFI_NUMBER_BITS) + 2; i++) { /* the numbers wrap */
        write_8(&a, &b, i);
        CHECK_EQ(end_imm(&b).imm, i);
    }
    for (uint32_t imm = 1; imm <= 3; imm++)
        write_8(&a, &b, imm);
    CHECKF(cut_connections() > 3 * 8, "nothing was on its way");
    look_at(&a, 20); /* libfabric notices that the connection has ended */
    end_quiet(&b, 20);
    dp_sge sge = local_sge(&a, 0, 8);
    int st = dp_post_write_imm(a.qp, &sge, 1, b.mem->base, b.mem->rkey, 4, 4, 0);
    CHECK(st == DP_OK || st == DP_CONNECTION);
    for (int64_t until = dp_now_ns() + poll_ns(); a.qp->state != DP_QP_ERROR; look_at(&a, 0)) {
        dp_wc wc;
        CHECKF(dp_now_ns() < until, "the loss goes unnoticed");
        CHECKF(!end_poll(&b, &wc, 0), "immediate value %u arrives, 1 to 3 are lost", wc.imm);
    }
    end_close(&b);
    end_close(&a);
}
#endif
