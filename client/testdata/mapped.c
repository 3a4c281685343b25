/* A setup function that prepares a tree, and functions of another library that read it from a seed which their program has published as the table "tree". */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "rfaas_function.h"

typedef struct node {
    uint64_t key;
    struct node *left, *right;
} node;

typedef struct tree {
    node *top;
    uint64_t nodes;
    uint64_t *zeros; /* memory that is allocated and not written */
    unsigned char *bytes;
    uint64_t size;
} tree;

enum { ZEROS = 1 << 17 };

#ifdef MAKES
static tree of_the_library;

static node *grow(uint64_t from, uint64_t to) {
    if (from == to)
        return NULL;
    node *n = malloc(sizeof *n);
    n->key = (from + to) / 2;
    n->left = grow(from, n->key);
    n->right = grow(n->key + 1, to);
    return n;
}

/* The payload is how many nodes the tree has, and how many MB of other bytes. */
uint32_t prepare(void *args, uint32_t size, void *res) {
    uint64_t want[2];
    (void)size, (void)res;
    memcpy(want, args, sizeof want);
    tree *t = malloc(sizeof *t);
    *t = (tree){grow(0, want[0]), want[0], calloc(ZEROS, sizeof *t->zeros), NULL, want[1] * 1000000};
    if (t->size && (t->bytes = malloc(t->size)))
        memset(t->bytes, 7, t->size);
    rfaas_set_root(t, sizeof *t);
    return 0;
}

uint32_t prepare_nothing(void *args, uint32_t size, void *res) { return (void)args, (void)size, (void)res, 0; }

uint32_t prepare_static(void *args, uint32_t size, void *res) {
    (void)args, (void)size, (void)res;
    of_the_library.nodes = 1;
    rfaas_set_root(&of_the_library, sizeof of_the_library);
    return 0;
}
#else
static uint64_t sum(const node *n) { return n ? n->key + sum(n->left) + sum(n->right) : 0; }

static const tree *get(void) {
    size_t size;
    const tree *t = rfaas_table("tree", &size);
    if (t && size != sizeof *t)
        rfaas_fail("the root has %zu bytes, want %zu", size, sizeof *t);
    return t;
}

/* Returns the sum of the tree's keys, how many nodes it says that it has, and the sum of the zeros and the other bytes. */
uint32_t walk(void *args, uint32_t size, void *res) {
    const tree *t = get();
    (void)args, (void)size;
    if (!t)
        return rfaas_fail("no table");
    uint64_t out[3] = {sum(t->top), t->nodes, 0};
    for (int i = 0; i < ZEROS; i++)
        out[2] += t->zeros[i];
    for (uint64_t i = 0; i < t->size; i += 4096)
        out[2] += t->bytes[i];
    memcpy(res, out, sizeof out);
    return sizeof out;
}

/* Returns the errno with which the tree cannot be made writable. */
uint32_t unprotect(void *args, uint32_t size, void *res) {
    uint32_t e = mprotect((void *)((uintptr_t)get()->top & ~4095ul), 4096, PROT_READ | PROT_WRITE) ? (uint32_t)errno : 0;
    (void)args, (void)size;
    memcpy(res, &e, sizeof e);
    return sizeof e;
}

/* Writes to the tree, which ends the worker. */
uint32_t scribble(void *args, uint32_t size, void *res) {
    (void)args, (void)size, (void)res;
    get()->top->key = 1;
    return 0;
}

/* The same bytes as a payload. Returns the sum of the first byte of each page. */
uint32_t payload(void *args, uint32_t size, void *res) {
    uint64_t out = 0;
    for (uint32_t i = 0; i < size; i += 4096)
        out += ((const unsigned char *)args)[i];
    memcpy(res, &out, sizeof out);
    return sizeof out;
}
#endif

#ifdef TAKES
/* Takes the address of seeds. */
__attribute__((constructor)) static void take(void) {
    if (mmap((void *)0x600000000000, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED)
        _exit(1);
}
#endif
