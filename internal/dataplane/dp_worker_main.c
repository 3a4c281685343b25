//go:build ignore

/* rfaas-worker, started by the executor. Compiled by the Makefile together with the other C files of this folder,
 * with -rdynamic so that user libraries find rfaas_function.h's functions in it. */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "dp_worker.h"

#ifndef RFAAS_VERSION
#define RFAAS_VERSION "devel"
#endif

#define ZYGOTE_FD 3

static const char usage[] =
    "rfaas-worker runs user functions. It is started by the rfaas executor, not by people.\n"
    "\n"
    "usage: rfaas-worker zygote     serve spawn messages on descriptor 3, a seqpacket socket\n"
    "       rfaas-worker --version\n"
    "       rfaas-worker --help\n";

static int run_zygote(void) {
    int type = 0;
    socklen_t len = sizeof type;
    if (getsockopt(ZYGOTE_FD, SOL_SOCKET, SO_TYPE, &type, &len) || type != SOCK_SEQPACKET) {
        fprintf(stderr, "rfaas-worker: descriptor %d is not a seqpacket socket\n%s", ZYGOTE_FD, usage);
        return DP_EXIT_USAGE;
    }
    return dp_zygote_run(ZYGOTE_FD);
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "zygote"))
        return run_zygote();
    if (argc == 2 && !strcmp(argv[1], "--version")) {
        printf("rfaas-worker %s, wire version %d\n", RFAAS_VERSION, DP_WIRE_VERSION);
        return 0;
    }
    if (argc == 2 && !strcmp(argv[1], "--help")) {
        fputs(usage, stdout);
        return 0;
    }
    if (argc > 1)
        fprintf(stderr, "rfaas-worker: unknown arguments from \"%s\" on\n", argv[1]);
    fputs(usage, stderr);
    return DP_EXIT_USAGE;
}
