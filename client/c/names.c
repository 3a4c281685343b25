/* A name that a program may have meant. */
#include <ctype.h>
#include <string.h>

#include "client.h"

#define NAME_MOST 128 /* longer names are not compared */

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* The Levenshtein distance, without regard to case. */
static uint32_t edits(const char *a, const char *b) {
    uint32_t row[NAME_MOST + 1], n = (uint32_t)strlen(b);
    for (uint32_t j = 0; j <= n; j++)
        row[j] = j;
    for (uint32_t i = 0; a[i]; i++) {
        uint32_t diagonal = row[0];
        row[0] = i + 1;
        for (uint32_t j = 0; j < n; j++) {
            uint32_t cost = diagonal + (tolower((unsigned char)a[i]) != tolower((unsigned char)b[j]));
            diagonal = row[j + 1];
            row[j + 1] = least(cost, least(row[j] + 1, row[j + 1] + 1));
        }
    }
    return row[n];
}

const char *rfaas_api_nearest(const rfaas_lease *l, const char *name) {
    const char *best = NULL;
    size_t length = strlen(name);
    uint32_t distance = length / 3 > 2 ? (uint32_t)length / 3 : 2; /* the most */
    for (uint32_t i = 0; i < l->n_functions && length <= NAME_MOST; i++) {
        uint32_t d = strlen(l->functions[i]) <= NAME_MOST ? edits(name, l->functions[i]) : UINT32_MAX;
        if (d <= distance && (!best || d < distance)) {
            best = l->functions[i];
            distance = d;
        }
    }
    return best;
}
