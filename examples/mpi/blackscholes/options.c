#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "example.h"

/* Half a unit of the last printed digit, and a little more for prices at the limit. */
static double half_unit(const char *printed) {
    const char *point = strchr(printed, '.');
    return 0.501 * pow(10, point ? -(double)strlen(point + 1) : 0);
}

/* Parses a line into e; false if it is malformed. */
static bool parse(const char *line, entry *e) {
    char type, price[64], rest;
    bs_option *o = &e->option;
    if (sscanf(line, "%lf %lf %lf %lf %lf %lf %c %63s %c", &o->spot, &o->strike, &o->rate, &o->dividend, &o->volatility,
               &o->years, &type, price, &rest) != 8 ||
        (type != 'C' && type != 'P') || isnan(bs_price(o)))
        return false;
    o->put = type == 'P';
    e->reference = NAN;
    if (strcmp(price, "-") == 0)
        return true;
    char *end;
    e->reference = strtod(price, &end);
    e->tolerance = half_unit(price);
    return end != price && !*end;
}

entry *options_read(const char *path, int *n, char *error, size_t room) {
    FILE *f = fopen(path, "r");
    if (!f) {
        snprintf(error, room, "%s: %s", path, strerror(errno));
        return NULL;
    }
    entry *entries = NULL;
    int count = 0, cap = 0;
    char line[512];
    for (int number = 1; fgets(line, sizeof line, f); number++) {
        if (line[0] == '#' || line[strspn(line, " \t\r\n")] == 0)
            continue;
        if (count == cap) {
            cap = cap ? 2 * cap : 1024;
            entry *more = realloc(entries, (size_t)cap * sizeof *more);
            if (!more) {
                snprintf(error, room, "%s: out of memory", path);
                goto fail;
            }
            entries = more;
        }
        memset(&entries[count], 0, sizeof *entries);
        if (!parse(line, &entries[count])) {
            line[strcspn(line, "\r\n")] = 0;
            snprintf(error, room, "%s:%d: not an option: %s", path, number, line);
            goto fail;
        }
        count++;
    }
    if (ferror(f) || count == 0) {
        snprintf(error, room, "%s: %s", path, ferror(f) ? strerror(errno) : "no options in it");
        goto fail;
    }
    fclose(f);
    *n = count;
    return entries;
fail:
    fclose(f);
    free(entries);
    return NULL;
}
