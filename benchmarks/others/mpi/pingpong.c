/* Ping-pong of MPI_Send and MPI_Recv between two ranks, for `rfaas bench others`.
 *
 * usage: pingpong ROUNDS CPU0,CPU1 SIZE...
 * Prints a line for each size: the size, then the nanoseconds of each round trip. A fifth as many untimed ones come first.
 */
#include <mpi.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set)) {
        perror("pingpong: pin");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/* Copies, like the server of rfaas-bench. */
static void serve(int rounds, int size, char *in, char *out) {
    for (int i = 0; i < rounds; i++) {
        MPI_Recv(in, size, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        memcpy(out, in, (size_t)size);
        MPI_Send(out, size, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
    }
}

static void measure(int warm, int rounds, int size, char *in, char *out, int64_t *ns) {
    int64_t last = now_ns();
    for (int i = -warm; i < rounds; i++) {
        out[0] = (char)i;
        MPI_Send(out, size, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(in, size, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        int64_t now = now_ns();
        if (i >= 0)
            ns[i] = now - last;
        last = now;
    }
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int rounds = argc > 3 ? atoi(argv[1]) : 0, cpu[2];
    if (ranks != 2 || rounds < 1 || sscanf(argv[2], "%d,%d", &cpu[0], &cpu[1]) != 2) {
        fprintf(stderr, "usage: mpirun -n 2 pingpong ROUNDS CPU0,CPU1 SIZE...\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    pin(cpu[rank]);
    int64_t *ns = calloc((size_t)rounds, sizeof *ns);
    for (int a = 3; ns && a < argc; a++) {
        int size = atoi(argv[a]), n = size > 65536 ? rounds / 10 + 1 : rounds;
        char *in = malloc((size_t)size + 1), *out = malloc((size_t)size + 1);
        if (size < 1 || !in || !out)
            MPI_Abort(MPI_COMM_WORLD, 1);
        memset(in, 0, (size_t)size);
        memset(out, 1, (size_t)size);
        MPI_Barrier(MPI_COMM_WORLD);
        if (rank) {
            serve(n / 5 + n, size, in, out);
        } else {
            measure(n / 5, n, size, in, out, ns);
            printf("%d", size);
            for (int i = 0; i < n; i++)
                printf(" %lld", (long long)ns[i]);
            printf("\n");
        }
        free(in);
        free(out);
    }
    free(ns);
    MPI_Finalize();
    return 0;
}
