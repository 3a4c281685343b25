/* Memory of this process that does not travel with a seed, and pointers to it. Libraries are not part of it, because they lie at the same addresses in all workers of a seed. */
#ifndef RFAAS_SEED_FOREIGN_H
#define RFAAS_SEED_FOREIGN_H

#include <stdint.h>

#define DP_FOREIGN_RANGES 120
#define DP_FOREIGN_TOPS 6

typedef struct dp_foreign_range {
    const char *what;
    uintptr_t from, to;
} dp_foreign_range;

typedef struct dp_foreign {
    int n, n_tops;
    dp_foreign_range list[DP_FOREIGN_RANGES];
    uint32_t tops[DP_FOREIGN_TOPS]; /* the upper halves of all addresses in the list */
} dp_foreign;

/* dp_foreign_find lists this memory. `payload` is that of the setup function, which does not travel either. */
void dp_foreign_find(dp_foreign *f, const void *payload, uint64_t size);

/* dp_foreign_next returns the first word in [from, end) that points to such memory, and sets *what to a description of that memory. NULL: there is
 * none. A number that looks like such a pointer counts as one. `end` is a multiple of 64. The bytes between the multiple of 64 before `from` and `from`
 * must be readable. *looks is the number of words that the function may still compare with the list. It returns NULL when *looks is 0. */
const uintptr_t *dp_foreign_next(const dp_foreign *f, const uintptr_t *from, const uintptr_t *end, uint64_t *looks, const char **what);

#endif
