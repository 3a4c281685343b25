/* Lookups of cross sections of nuclides on a grid of energies, as in codes for neutron transport: a search for the energy, then an interpolation.
 * The program and the function of its workers use the same code, so results are equal bit by bit. */
#ifndef CROSSSECTIONS_H
#define CROSSSECTIONS_H

#include <stdint.h>

#define CROSSSECTIONS_NUCLIDES 64

/* A row of the table. Energies ascend. */
typedef struct cross_row {
    double energy;
    double section[CROSSSECTIONS_NUCLIDES];
} cross_row;

/* The payload of a call: some lookups. The result is their sum, a double. */
typedef struct cross_lookups {
    uint64_t first, count;
} cross_lookups;

static inline uint64_t cross_random(uint64_t x) { /* splitmix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Fills a table of n rows, which is the same everywhere. */
static inline void cross_fill(cross_row *row, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        row[i].energy = (double)i + (double)(cross_random(~i) >> 11) * 0x1p-54;
        for (uint64_t k = 0; k < CROSSSECTIONS_NUCLIDES; k++)
            row[i].section[k] = (double)(cross_random(i * CROSSSECTIONS_NUCLIDES + k) >> 40);
    }
}

/* The sum of the lookups first .. first + count - 1 in a table of n rows, at least 2. */
static inline double cross_sum(const cross_row *row, uint64_t n, const cross_lookups *l) {
    double sum = 0;
    for (uint64_t i = l->first; i < l->first + l->count; i++) {
        uint64_t r = cross_random(i), low = 0, high = n - 1;
        double energy = (double)(r >> 11) * 0x1p-53 * row[n - 1].energy;
        while (high - low > 1) {
            uint64_t middle = low + (high - low) / 2;
            if (row[middle].energy <= energy)
                low = middle;
            else
                high = middle;
        }
        double part = (energy - row[low].energy) / (row[high].energy - row[low].energy);
        const double *a = &row[low].section[r % CROSSSECTIONS_NUCLIDES], *b = &row[high].section[r % CROSSSECTIONS_NUCLIDES];
        sum += *a + part * (*b - *a);
    }
    return sum;
}

#endif
