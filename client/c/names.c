/* Errors for unknown names of functions, with the name that the program may have meant. */
#include <ctype.h>
#include <stdio.h>
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

/* Returns the function whose name differs least from this one; NULL: none is near. */
static const char *nearest(const rfaas_lease *l, const char *name) {
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

int rfaas_api_no_function(const rfaas_lease *l, const char *op, const char *name) {
    char list[512];
    size_t at = 0;
    list[0] = 0;
    for (uint32_t i = 0; i < l->n_functions && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%s", i ? ", " : "", l->functions[i]);
    const char *near = nearest(l, name);
    return rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "%s: \"%.128s\" is not in the library, which has %u: %s%s%s%s%s", op, name,
                          l->n_functions, list, at >= sizeof list ? " ..." : "", near ? "; did you mean \"" : "", near ? near : "",
                          near ? "\"?" : "");
}
