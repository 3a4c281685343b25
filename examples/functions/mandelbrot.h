/* Rows of the Mandelbrot set. The function on workers and programs that compute locally use the same code. It uses whole numbers, so
 * results are equal everywhere. */
#ifndef MANDELBROT_H
#define MANDELBROT_H

#include <stdint.h>

/* Every stride-th row of an image of width x height points, from row `first` on. */
typedef struct mandelbrot_rows {
    int64_t width, height, first, stride;
    int64_t limit; /* steps, at most 65535 */
} mandelbrot_rows;

#define MANDELBROT_SIDE_MAX 16384

static inline int64_t mandelbrot_count(const mandelbrot_rows *m) {
    return m->first < m->height ? (m->height - m->first + m->stride - 1) / m->stride : 0;
}

/* Counts the steps after which each point of a row leaves the circle. Fixed point with 28 fractional bits. */
static inline void mandelbrot_row(const mandelbrot_rows *m, int64_t row, uint16_t *counts) {
    const int64_t one = (int64_t)1 << 28;
    int64_t ci = (2 * row - m->height) * (5 * one / 4) / m->height; /* -1.25 .. 1.25 */
    for (int64_t i = 0; i < m->width; i++) {
        int64_t cr = i * (3 * one) / m->width - 9 * one / 4, zr = 0, zi = 0, n = 0; /* -2.25 .. 0.75 */
        for (; n < m->limit; n++) {
            int64_t rr = zr * zr / one, ii = zi * zi / one;
            if (rr + ii > 4 * one)
                break;
            zi = 2 * zr * zi / one + ci;
            zr = rr - ii + cr;
        }
        counts[i] = (uint16_t)n;
    }
}

#endif
