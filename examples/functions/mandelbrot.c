/* Rows of the Mandelbrot set by OpenMP, on all cores of the worker (cores_per_worker). */
#include <omp.h>
#include <stddef.h>
#include <string.h>

#include "rfaas_function.h"

#include "mandelbrot.h"

/* Input: struct mandelbrot_rows. Result: {u64 number of threads that worked, u16 counts, row by row}. */
__attribute__((visibility("default"))) uint32_t mandelbrot(void *args, uint32_t size, void *res) {
    mandelbrot_rows m;
    if (size != sizeof m)
        return rfaas_fail("the payload has %u bytes, want the %zu of struct mandelbrot_rows", size, sizeof m);
    memcpy(&m, args, sizeof m);
    if (m.width < 1 || m.width > MANDELBROT_SIDE_MAX || m.height < 1 || m.height > MANDELBROT_SIDE_MAX || m.first < 0 || m.stride < 1 ||
        m.limit < 0 || m.limit > UINT16_MAX)
        return rfaas_fail("%lld x %lld points, every %lld-th row from %lld on, %lld steps: out of range", (long long)m.width,
                          (long long)m.height, (long long)m.stride, (long long)m.first, (long long)m.limit);
    int64_t rows = mandelbrot_count(&m);
    uint64_t bytes = 8 + 2 * (uint64_t)(rows * m.width);
    if (bytes > rfaas_result_capacity())
        return rfaas_fail("the result has %llu bytes, which is more than the capacity of %u", (unsigned long long)bytes, rfaas_result_capacity());
    uint16_t *counts = (uint16_t *)((char *)res + 8);
    uint64_t threads = 0;
#pragma omp parallel num_threads(rfaas_worker_cores())
    {
#pragma omp single
        threads = (uint64_t)omp_get_num_threads();
#pragma omp for schedule(dynamic)
        for (int64_t k = 0; k < rows; k++)
            mandelbrot_row(&m, m.first + k * m.stride, counts + k * m.width);
    }
    memcpy(res, &threads, sizeof threads);
    return (uint32_t)bytes;
}
