#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "example.h"

static const char help[] =
    "usage: mpirun -n RANKS blackscholes [flags]\n"
    "\n"
    "Prices European options, part of them on leased cores of other processes, and checks every price.\n"
    "\n"
    "  --options FILE       option file (default: this example's options.txt)\n"
    "  --library FILE       library of functions (default: build/functions/blackscholes.so)\n"
    "  --n N                options to price on all ranks together; the file is repeated (default 4000000)\n"
    "  --workers N          workers that each rank leases (default 1)\n"
    "  --remote-share X     share of each rank's options that workers price, 0 to 1 (default: as many as they can)\n"
    "  --batch N            options per call (default 256)\n"
    "  --samples N          latency calls per size and rank, 0 for none (default 5000)\n"
    "  --executor ADDRESS   executor to use (default: $RFAAS_EXECUTOR)\n"
    "  --manager ADDRESS    resource manager to ask (default: $RFAAS_MANAGER)\n"
    "  --provider NAME      auto, shm or verbs (default: $RFAAS_PROVIDER, else auto)\n"
    "  --json               print one JSON object instead of text\n"
    "  --help               print this text\n"
    "\n"
    "Exit status: 0 all prices are right, 1 a price is wrong or something failed, 2 wrong usage.\n";

/* Makes path relative to the directory of this program. */
static void beside_program(char *out, size_t room, const char *relative) {
    char self[2048];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0)
        n = 0;
    self[n] = 0;
    char *slash = strrchr(self, '/');
    if (slash)
        *slash = 0;
    snprintf(out, room, "%s/%s", slash ? self : ".", relative);
}

static bool number(const char *flag, const char *text, double lo, double hi, double *out, bool talk) {
    char *end;
    *out = strtod(text, &end);
    if (end != text && !*end && *out >= lo && *out <= hi)
        return true;
    if (talk)
        fprintf(stderr, "blackscholes: --%s %s: want a number from %g to %g\n", flag, text, lo, hi);
    return false;
}

int arguments_parse(arguments *a, int argc, char **argv, bool talk) {
    static const struct option flags[] = {
        {"options", required_argument, 0, 'o'},  {"library", required_argument, 0, 'l'},
        {"n", required_argument, 0, 'n'},        {"workers", required_argument, 0, 'w'},
        {"remote-share", required_argument, 0, 'r'}, {"batch", required_argument, 0, 'b'},
        {"samples", required_argument, 0, 's'},  {"executor", required_argument, 0, 'e'},
        {"manager", required_argument, 0, 'm'},  {"provider", required_argument, 0, 'p'},
        {"json", no_argument, 0, 'j'},           {"help", no_argument, 0, 'h'},
        {0, 0, 0, 0},
    };
    *a = (arguments){.n = 4000000, .share = -1, .workers = 1, .batch = 256, .samples = 5000};
    beside_program(a->options, sizeof a->options, "../../examples/mpi/blackscholes/options.txt");
    beside_program(a->library, sizeof a->library, "../functions/blackscholes.so");
    opterr = talk;
    bool good = true;
    double v = 0;
    for (int c; (c = getopt_long(argc, argv, "h", flags, NULL)) != -1;) {
        switch (c) {
        case 'o':
            snprintf(a->options, sizeof a->options, "%s", optarg);
            break;
        case 'l':
            snprintf(a->library, sizeof a->library, "%s", optarg);
            break;
        case 'n':
            good &= number("n", optarg, 1, 1e9, &v, talk);
            a->n = (long)v;
            break;
        case 'w':
            good &= number("workers", optarg, 1, 1024, &v, talk);
            a->workers = (int)v;
            break;
        case 'r':
            good &= number("remote-share", optarg, 0, 1, &a->share, talk);
            break;
        case 'b':
            good &= number("batch", optarg, 1, 16384, &v, talk);
            a->batch = (int)v;
            break;
        case 's':
            good &= number("samples", optarg, 0, 1e7, &v, talk);
            a->samples = (int)v;
            break;
        case 'e':
            a->executor = optarg;
            break;
        case 'm':
            a->manager = optarg;
            break;
        case 'p':
            a->provider = optarg;
            break;
        case 'j':
            a->json = true;
            break;
        case 'h':
            if (talk)
                fputs(help, stdout);
            return 1;
        default:
            good = false;
        }
    }
    if (optind < argc) {
        if (talk)
            fprintf(stderr, "blackscholes: unexpected argument %s\n", argv[optind]);
        good = false;
    }
    if (!good && talk)
        fputs("blackscholes: see --help\n", stderr);
    return good ? 0 : 2;
}
