/* main() of rfaas-bench-peer, which `rfaas bench` starts. The Makefile builds it from internal/dataplane and benchmarks/raw. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include "../bench.h"
#include "broker.h"
#include "fork.h"

static const char usage[] =
    "rfaas-bench-peer is the server that `rfaas bench` measures. Only `rfaas bench` starts it.\n"
    "\n"
    "usage: rfaas-bench-peer        with a seqpacket socket as descriptor 3, shared memory as 4, eventfds as 5 and 6\n"
    "       rfaas-bench-peer --here DEVICE PORT GID_INDEX PKEY_INDEX TRAFFIC_CLASS SERVICE_LEVEL MTU CPU\n"
    "                               with such a socket as descriptor 3, for a client on another machine\n"
    "       rfaas-bench-peer --broker PROVIDER CALLS\n"
    "                               measures virtual queue pairs, on verbs or tcp\n"
    "       rfaas-bench-peer --fork\n"
    "                               measures fork and exit of this process\n"
    "       rfaas-bench-peer --help\n";

/* The numbers after DEVICE. */
enum { PORT, GID_INDEX, PKEY_INDEX, TRAFFIC_CLASS, SERVICE_LEVEL, MTU, CPU, NUMBERS };

int main(int argc, char **argv) {
    int number[NUMBERS] = {0};
    bool here = argc == 3 + NUMBERS && !strcmp(argv[1], "--here");
    for (int i = 0; here && i < NUMBERS; i++) {
        char *end;
        number[i] = (int)strtol(argv[3 + i], &end, 10);
        here = *argv[3 + i] && !*end;
    }
    int calls = argc == 4 && !strcmp(argv[1], "--broker") ? atoi(argv[3]) : 0;
    if (calls >= 10)
        return bench_broker(argv[2], calls);
    if (argc == 2 && !strcmp(argv[1], "--fork"))
        return bench_fork();
    if (argc > 1 && !here) {
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
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a floor's loop does not notice that its client is gone */
    const dp_bench_fds fds = {DP_BENCH_FD_SOCKET, here ? -1 : DP_BENCH_FD_MEMORY, DP_BENCH_FD_PING, DP_BENCH_FD_PONG};
    const dp_bench_here mine = {
        .device = {.device = here ? argv[2] : "", .port = number[PORT], .gid_index = number[GID_INDEX],
                   .pkey_index = number[PKEY_INDEX], .traffic_class = number[TRAFFIC_CLASS],
                   .service_level = number[SERVICE_LEVEL], .mtu = number[MTU]},
        .cpu = number[CPU]};
    dp_error err = {0};
    if (dp_bench_serve(&fds, here ? &mine : NULL, &err)) {
        fprintf(stderr, "rfaas-bench-peer: %s\n", err.msg);
        return 1;
    }
    return 0;
}
