/* OpenMP: parallel loops in setup and in queries, threadprivate data, a lock. */
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 200000 };
static double *table;
static int counter = 3, calls;
static omp_lock_t lock;
#pragma omp threadprivate(counter)

uint32_t setup(void *in, uint32_t size, void *out) {
    (void)in, (void)size, (void)out;
    table = malloc(N * sizeof *table);
    omp_init_lock(&lock);
#pragma omp parallel for num_threads(2)
    for (int i = 0; i < N; i++)
        table[i] = i;
    counter = 4;
    omp_pause_resource_all(omp_pause_hard);
    return 0;
}

uint32_t query(void *in, uint32_t size, void *out) {
    (void)in, (void)size;
    double sum = 0;
#pragma omp parallel for num_threads(2) reduction(+ : sum)
    for (int i = 0; i < N; i++)
        sum += table[i];
    omp_set_lock(&lock);
    int n = snprintf(out, 4096, "%d %.0f %d", ++calls, sum, counter++);
    omp_unset_lock(&lock);
    return (uint32_t)n;
}
