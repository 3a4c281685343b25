/* C: tables, static data, strings of libc, a static and a dynamic thread-local variable, a late large allocation. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static double *table;
static char *name;
static int calls, in_data = 42;
static __thread int per_thread = 5;
static struct node {
    struct node *next;
    int v;
} *list;
static void (*choose)(char *, size_t);
static void odd(char *p, size_t n) { snprintf(p, n, "odd"); }
static void even(char *p, size_t n) { snprintf(p, n, "even"); }
/* More than mimalloc's segments. Later allocations of the same size must be other memory, and new. */
#define BIG (48u << 20)
static unsigned char *big;
static void *mmap_and_back(void) {
    void *p = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(p, 1 << 16);
    return malloc(10);
}
extern void *rfaas_state(size_t size, int *fresh);
static int built;
__attribute__((constructor)) static void construct(void) { name = malloc(100); built = 1; }

uint32_t setup(void *in, uint32_t size, void *out) {
    (void)in, (void)size, (void)out;
    table = malloc(1000000 * sizeof *table);
    for (int i = 0; i < 1000000; i++)
        table[i] = i * 0.5;
    strcpy(name, "constructed");
    char *copy = strdup("duplicated");
    strcat(name, copy);
    free(copy);
    for (int i = 0; i < 1000; i++) {
        struct node *n = malloc(sizeof *n);
        *n = (struct node){list, i};
        list = n;
    }
    big = malloc(BIG);
    memset(big, 1, BIG);
    free(mmap_and_back());
    in_data = 43;
    per_thread = 6;
    choose = time(NULL) ? odd : even;
    *(int *)rfaas_state(sizeof(int), NULL) = 50;
    srand(7), rand();
    srand48(9), drand48();
    lcong48((unsigned short[7]){1, 2, 3, 0xe66d, 0xdeec, 6, 7}); /* another multiplier */
    return 0;
}

uint32_t query(void *in, uint32_t size, void *out) {
    (void)in, (void)size;
    long sum = 0;
    for (struct node *n = list; n; n = n->next)
        sum += n->v;
    void *more = malloc(100000);
    unsigned char *fresh = calloc(BIG, 1);
    for (uint32_t i = 0; i < BIG; i += 4096)
        sum += big[i] + 2 * fresh[i];
    memset(fresh, 3, BIG);
    for (uint32_t i = 0; i < BIG; i += 4096)
        sum += big[i];
    free(fresh);
    char text[16];
    choose(text, sizeof text);
    unsigned short own[3] = {4, 5, 6};
    long of_own = nrand48(own) ^ seed48(own)[1];
    int n = snprintf(out, 4096, "%d %s %.1f %ld %d %d %d %s %d %ld %.6f %d", ++calls, name, table[999999], sum, in_data++, per_thread++, built, text, rand(), of_own, drand48(),
                     (*(int *)rfaas_state(sizeof(int), NULL))++);
    free(more);
    list = realloc(list, sizeof *list + 64);
    return (uint32_t)n;
}
