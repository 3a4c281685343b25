//go:build ignore

/* rfaas-bench-peer, started by `rfaas bench`. Compiled by the Makefile from dp_*.c and this file. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include "dp_bench.h"

static const char usage[] =
    "rfaas-bench-peer is the other side of `rfaas bench`, which starts it. It is not for people.\n"
    "\n"
    "usage: rfaas-bench-peer        with a seqpacket socket as descriptor 3, shared memory as 4, eventfds as 5 and 6\n"
    "       rfaas-bench-peer --help\n";

int main(int argc, char **argv) {
    if (argc > 1) {
        int help = !strcmp(argv[1], "--help");
        fputs(usage, help ? stdout : stderr);
        return help ? 0 : 2;
    }
    int type = 0;
    socklen_t len = sizeof type;
    if (getsockopt(DP_BENCH_FD_SOCKET, SOL_SOCKET, SO_TYPE, &type, &len) || type != SOCK_SEQPACKET) {
        fputs(usage, stderr);
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a floor's loop does not look after its client */
    const dp_bench_fds fds = {DP_BENCH_FD_SOCKET, DP_BENCH_FD_MEMORY, DP_BENCH_FD_PING, DP_BENCH_FD_PONG};
    dp_error err = {0};
    if (dp_bench_serve(&fds, &err)) {
        fprintf(stderr, "rfaas-bench-peer: %s\n", err.msg);
        return 1;
    }
    return 0;
}
