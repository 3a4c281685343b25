#include "foreign.h"

#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "heap.h"
#include "modules.h"

typedef struct span {
    uintptr_t from, to;
} span;

typedef struct spans {
    int n;
    span list[DP_MODULES_MAX + 2];
} spans;

static void add_span(spans *s, uintptr_t from, uintptr_t to) {
    if (s->n < (int)(sizeof s->list / sizeof *s->list))
        s->list[s->n++] = (span){from, to};
}

static int add_library(struct dl_phdr_info *i, size_t size, void *arg) {
    uintptr_t from = UINTPTR_MAX, to = 0;
    (void)size;
    for (int k = 0; k < i->dlpi_phnum; k++) {
        const ElfW(Phdr) *h = &i->dlpi_phdr[k];
        uintptr_t at = i->dlpi_addr + h->p_vaddr;
        if (h->p_type == PT_LOAD) {
            from = at < from ? at : from;
            to = at + h->p_memsz > to ? at + h->p_memsz : to;
        }
    }
    if (from < to)
        add_span(arg, from & ~(uintptr_t)4095, (to + 4095) & ~(uintptr_t)4095);
    return 0;
}

static void add_range(dp_foreign *f, const char *what, uintptr_t from, uintptr_t to) {
    if (from >= to || f->n == DP_FOREIGN_RANGES)
        return;
    f->list[f->n++] = (dp_foreign_range){what, from, to};
    for (uintptr_t top = from >> 32; top <= (to - 1) >> 32; top++) {
        bool known = false;
        for (int i = 0; i < f->n_tops; i++)
            known |= f->tops[i] == top;
        if (!known && f->n_tops == DP_FOREIGN_TOPS)
            return;
        if (!known)
            f->tops[f->n_tops++] = (uint32_t)top;
    }
}

/* Adds the parts of [from, to) that none of the spans from index `first` on covers. */
static void add_outside(dp_foreign *f, const char *what, uintptr_t from, uintptr_t to, const spans *s, int first) {
    for (int i = first; i < s->n; i++)
        if (from < s->list[i].to && s->list[i].from < to) {
            if (from < s->list[i].from)
                add_outside(f, what, from, s->list[i].from, s, i + 1);
            from = s->list[i].to;
        }
    add_range(f, what, from, to);
}

void dp_foreign_find(dp_foreign *f, const void *payload, uint64_t size) {
    enum { BELOW = 64 << 10, ABOVE = 8 << 10 }; /* thread-local data of libraries, and the thread's descriptor in libc */
    spans stays = {0};
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    uintptr_t thread = (uintptr_t)__builtin_thread_pointer();
    add_span(&stays, DP_HEAP_AT - DP_HEAP_LINKED, DP_HEAP_AT + DP_HEAP_MOST);
    add_span(&stays, thread - BELOW, thread + ABOVE);
    dl_iterate_phdr(add_library, &stays);
    f->n = f->n_tops = 0;
    add_range(f, "the payload of the init call", (uintptr_t)payload, (uintptr_t)payload + size);
    for (int others = 0; maps && others < 2; others++, rewind(maps)) /* the heap and the stack first, because the list is short */
        while (fgets(line, sizeof line, maps)) {
            char *rest;
            uintptr_t from = strtoull(line, &rest, 16), to = *rest ? strtoull(rest + 1, &rest, 16) : 0;
            const char *what = strstr(line, "[heap]") ? "memory from before the library was loaded" : strstr(line, "[stack]") ? "the stack" : NULL;
            if (strncmp(rest, " rw", 3) || (what == NULL) != others)
                continue;
            add_outside(f, what ? what : "memory mapped outside the seed", from, to, &stays, 0);
        }
    if (maps)
        fclose(maps);
}

static const char *points_to(const dp_foreign *f, uintptr_t word) {
    for (int i = 0; i < f->n; i++)
        if (word - f->list[i].from < f->list[i].to - f->list[i].from)
            return f->list[i].what;
    return NULL;
}

typedef uint32_t four __attribute__((vector_size(16), may_alias));
typedef uint64_t two __attribute__((vector_size(16), may_alias));

/* Reports whether the upper half of one of 8 words is one of n values. */
static inline bool any_top(const two *words, const four *top, int n) {
    const two upper = {~0ull << 32, ~0ull << 32};
    four a = (four)(words[0] >> 32 | (words[1] & upper)), b = (four)(words[2] >> 32 | (words[3] & upper)), same = {0};
    for (int i = 0; i < n; i++)
        same |= (four)(a == top[i]) | (four)(b == top[i]);
    two all = (two)same;
    return all[0] | all[1];
}

/* First compares the upper halves of 8 words with those of all foreign addresses. This takes little more time than reading the memory: 7 ms for 100 MB. Comparing each word with
 * the ranges would take twice as long. */
const uintptr_t *dp_foreign_next(const dp_foreign *f, const uintptr_t *from, const uintptr_t *end, uint64_t *looks, const char **what) {
    enum { FEW = 4, WORDS = 8 };
    four top[DP_FOREIGN_TOPS];
    for (int i = 0; i < DP_FOREIGN_TOPS; i++) {
        uint32_t t = f->tops[i < f->n_tops ? i : 0];
        top[i] = (four){t, t, t, t};
    }
    for (const uintptr_t *at = (const uintptr_t *)((uintptr_t)from & ~(WORDS * sizeof *at - 1)); at < end && f->n_tops; at += WORDS) {
        const two *words = (const two *)at;
        if (__builtin_expect(!(f->n_tops <= FEW ? any_top(words, top, FEW) : any_top(words, top, DP_FOREIGN_TOPS)), 1))
            continue;
        for (int i = at < from ? (int)(from - at) : 0; i < WORDS; i++) {
            if (!*looks)
                return NULL;
            --*looks;
            if ((*what = points_to(f, at[i])))
                return at + i;
        }
    }
    return NULL;
}
