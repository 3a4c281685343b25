/* OpenBLAS: a factorised matrix. */
#include <cblas.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
enum { N = 200 };
static double *a, *x;
static int calls;
uint32_t setup(void *in, uint32_t size, void *out) {
    (void)in, (void)size, (void)out;
    a = malloc(N * N * sizeof *a);
    x = malloc(N * sizeof *x);
    double *b = malloc(N * N * sizeof *b);
    for (int i = 0; i < N * N; i++)
        b[i] = i % 17;
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, N, N, N, 1, b, N, b, N, 0, a, N);
    free(b);
    return 0;
}
uint32_t query(void *in, uint32_t size, void *out) {
    (void)in, (void)size;
    double y[N];
    for (int i = 0; i < N; i++)
        x[i] = i + calls;
    cblas_dgemv(CblasRowMajor, CblasNoTrans, N, N, 1, a, N, x, 1, 0, y, 1);
    return (uint32_t)snprintf(out, 4096, "%d %.1f %.1f", ++calls, y[3], cblas_ddot(N, y, 1, x, 1));
}
