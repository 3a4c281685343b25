/* Rows of the Mandelbrot set by OpenMP, on as many cores as the worker has (cores_per_worker). */
#include <omp.h>
#include <stddef.h>
#include <string.h>

#include "rfaas_function.h"

#include "mandelbrot.h"

/* struct mandelbrot_rows in; {u64 threads that were at work, u16 counts, row by row} out. */
__attribute__((visibility("default"))) uint32_t mandelbrot(void *args, uint32_t size, void *res) {
    mandelbrot_rows m;
    if (size != sizeof m)
        return rfaas_fail("%u bytes, want the %zu of what rows to compute", size, sizeof m);
    memcpy(&m, args, sizeof m);
    if (m.width < 1 || m.width > MANDELBROT_SIDE_MAX || m.height < 1 || m.height > MANDELBROT_SIDE_MAX || m.first < 0 || m.stride < 1 ||
        m.limit < 0 || m.limit > UINT16_MAX)
        return rfaas_fail("%lld x %lld points, every %lld-th row from %lld on, %lld steps: out of range", (long long)m.width,
                          (long long)m.height, (long long)m.stride, (long long)m.first, (long long)m.limit);
    int64_t rows = mandelbrot_count(&m);
    uint64_t bytes = 8 + 2 * (uint64_t)(rows * m.width);
    if (bytes > rfaas_result_capacity())
        return rfaas_fail("a result of %llu bytes, there is room for %u", (unsigned long long)bytes, rfaas_result_capacity());
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
