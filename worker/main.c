/* main() of rfaas-worker. The executor's spawner starts it. The Makefile links it with -rdynamic, so that user libraries find
 * the functions of rfaas_function.h in it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "limit.h"
#include "message.h"
#include "runtime.h"
#include "seed/layout.h"
#include "zygote.h"

#ifndef RFAAS_VERSION
#define RFAAS_VERSION "devel"
#endif

#define ZYGOTE_FD 3
#define PAGES_FD 4

static const char usage[] =
    "rfaas-worker runs user functions. The rfaas executor starts it; do not start it by hand.\n"
    "\n"
    "usage: rfaas-worker zygote [--bundles=PATH] [--idle] [--sandbox [--fixed-cpus] [--files=N] [--pages] [--path=PATH]...]\n"
    "                           [--runtime=NAME --python=PATH [--preload=MODULE]... [--module-path=PATH]...]\n"
    "                               serve spawn messages on descriptor 3, a seqpacket socket. With --sandbox, confine\n"
    "                               workers as far as this node supports it: they have at most N open files, and see\n"
    "                               these paths besides the system's. With --fixed-cpus they cannot change their CPUs.\n"
    "                               Bundles of leases are directories in PATH. With --runtime, workers have this Python\n"
    "                               interpreter, which has imported the modules. With --idle, workers never delay other programs.\n"
    "                               With --pages, descriptor 4 is /dev/userfaultfd: memory of workers can be filled on demand\n"
    "       rfaas-worker --version\n"
    "       rfaas-worker --help\n";

/* NULL, or the argument that makes no sense. */
static const char *zygote_arguments(char **argv, dp_sandbox *s, dp_runtime *r) {
    for (; *argv; argv++) {
        if (!strcmp(*argv, "--sandbox"))
            s->wanted = true;
        else if (s->wanted && !strncmp(*argv, "--without=", 10))
            s->without = (uint32_t)strtoul(*argv + 10, NULL, 10);
        else if (s->wanted && !strcmp(*argv, "--fixed-cpus"))
            s->fixed_cpus = true;
        else if (s->wanted && !strcmp(*argv, "--pages"))
            s->pages = PAGES_FD;
        else if (s->wanted && !strncmp(*argv, "--files=", 8))
            s->files = (uint32_t)strtoul(*argv + 8, NULL, 10);
        else if (!strcmp(*argv, "--idle"))
            s->idle = true;
        else if (!strncmp(*argv, "--bundles=/", 11))
            s->bundles = *argv + 10;
        else if (s->wanted && !strncmp(*argv, "--path=/", 8) && s->n_paths < DP_SANDBOX_PATHS_MAX)
            s->paths[s->n_paths++] = *argv + 7;
        else if (!dp_runtime_argument(r, *argv))
            return *argv;
    }
    return NULL;
}

static int run_zygote(dp_sandbox *sandbox, dp_runtime *runtime) {
    int type = 0;
    socklen_t len = sizeof type;
    if (getsockopt(ZYGOTE_FD, SOL_SOCKET, SO_TYPE, &type, &len) || type != SOCK_SEQPACKET) {
        fprintf(stderr, "rfaas-worker: descriptor %d is not a seqpacket socket\n%s", ZYGOTE_FD, usage);
        return DP_EXIT_USAGE;
    }
    int e = sandbox->idle ? dp_worker_yield_session() : 0;
    if (e)
        fprintf(stderr, "rfaas-worker: /proc/self/autogroup: %s; workers may delay other programs\n", strerror(e));
    return dp_zygote_run(ZYGOTE_FD, sandbox, runtime, RFAAS_VERSION);
}

int main(int argc, char **argv) {
    if (argc >= 2 && !strcmp(argv[1], "zygote")) {
        dp_layout_enter(argv);
        static dp_sandbox sandbox;
        static dp_runtime runtime;
        const char *bad = zygote_arguments(argv + 2, &sandbox, &runtime);
        if (!bad)
            return run_zygote(&sandbox, &runtime);
        fprintf(stderr, "rfaas-worker: unknown or superfluous argument \"%s\"\n%s", bad, usage);
        return DP_EXIT_USAGE;
    }
    if (argc == 2 && !strcmp(argv[1], "--version")) {
        printf("rfaas-worker %s, wire version %d\n", RFAAS_VERSION, DP_WIRE_VERSION);
        return 0;
    }
    if (argc == 2 && !strcmp(argv[1], "--help")) {
        fputs(usage, stdout);
        return 0;
    }
    if (argc > 1)
        fprintf(stderr, "rfaas-worker: unknown arguments, starting with \"%s\"\n", argv[1]);
    fputs(usage, stderr);
    return DP_EXIT_USAGE;
}
