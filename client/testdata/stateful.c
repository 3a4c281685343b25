/* Functions that keep state in their worker: the rows of a matrix, made by an init call, and state of every kind that a process has. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "rfaas_function.h"

/* ---- a solver that keeps its matrix here ---- */

typedef struct row {
    uint32_t column[5], n;
    double value[5];
} row;

static row *rows;
static uint32_t n_rows, side;
static int64_t inits;

/* Makes the rows of a five-point stencil on a square grid. The payload is the side of the grid. */
uint32_t make_rows(void *args, uint32_t size, void *res) {
    if (size != sizeof side)
        return rfaas_fail_code(7, "%u bytes of arguments, want %zu", size, sizeof side);
    memcpy(&side, args, sizeof side);
    n_rows = side * side;
    free(rows);
    rows = calloc(n_rows, sizeof *rows);
    for (uint32_t i = 0; i < n_rows; i++) {
        row *r = &rows[i];
        const int at[4][2] = {{0, -1}, {-1, 0}, {1, 0}, {0, 1}};
        r->column[r->n] = i;
        r->value[r->n++] = 4 + 1.0 / (1 + i % 7);
        for (int k = 0; k < 4; k++) {
            int x = (int)(i % side) + at[k][0], y = (int)(i / side) + at[k][1];
            if (x < 0 || y < 0 || x >= (int)side || y >= (int)side)
                continue;
            r->column[r->n] = (uint32_t)y * side + (uint32_t)x;
            r->value[r->n++] = -1;
        }
    }
    inits++;
    memcpy(res, &inits, sizeof inits); /* ignored */
    return sizeof inits;
}

static __attribute__((destructor)) void free_rows(void) { free(rows); }

/* Multiplies rows first to last - 1 with a vector. The payload is first, last, and the vector. */
uint32_t multiply(void *args, uint32_t size, void *res) {
    const uint32_t *range = args;
    const double *x = (const double *)(range + 2);
    double *y = res;
    if (!rows)
        return rfaas_fail_code(8, "no rows in this worker");
    if (size != sizeof *range * 2 + n_rows * sizeof *x || range[0] > range[1] || range[1] > n_rows)
        return rfaas_fail_code(9, "%u bytes for rows %u to %u of %u", size, range[0], range[1], n_rows);
    for (uint32_t i = range[0]; i < range[1]; i++) {
        double sum = 0;
        for (uint32_t k = 0; k < rows[i].n; k++)
            sum += rows[i].value[k] * x[rows[i].column[k]];
        *y++ = sum;
    }
    return (range[1] - range[0]) * sizeof *y;
}

/* Returns how often the init call was executed in this worker. */
uint32_t init_count(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    memcpy(res, &inits, sizeof inits);
    return sizeof inits;
}

/* Ends the worker. */
uint32_t die(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    (void)res;
    raise(SIGKILL);
    return 0;
}

/* ---- init calls that do not work ---- */

uint32_t init_fails(void *args, uint32_t size, void *res) {
    (void)res;
    return rfaas_fail_code(-42, "no matrix of the name %.*s", (int)size, (const char *)args);
}

uint32_t init_crashes(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    (void)res;
    abort();
}

uint32_t init_hangs(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    (void)res;
    for (;;)
        pause();
}

/* Sleeps for so many milliseconds. */
uint32_t init_sleeps(void *args, uint32_t size, void *res) {
    uint32_t ms;
    (void)res;
    if (size != sizeof ms)
        return rfaas_fail("payload of %u bytes", size);
    memcpy(&ms, args, sizeof ms);
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
    return 0;
}

/* Works until a time, and fails later: the payload is CLOCK_REALTIME ns. */
uint32_t init_until(void *args, uint32_t size, void *res) {
    int64_t until;
    struct timespec now;
    (void)res;
    memcpy(&until, args, sizeof until);
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec > until ? rfaas_fail_code(3, "too late, %u bytes", size) : 0;
}

/* Accepts everything, and returns more than any capacity. */
uint32_t init_returns_much(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    (void)res;
    inits++;
    return 1 << 30;
}

/* ---- state of every kind ---- */

static int64_t zeroed, valued = 17;
static int64_t *heap;
static __thread int64_t local;

typedef struct sight {
    int64_t zeroed, valued, heap, local, state, environment, key;
} sight;

static pthread_key_t key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static void make_key(void) { pthread_key_create(&key, NULL); }

/* Returns the state that it finds, and leaves the payload in its place: static variables, memory that a static variable points to,
 * thread-local variables, rfaas_state, the environment. */
uint32_t leave_state(void *args, uint32_t size, void *res) {
    int64_t mark;
    int64_t *state = rfaas_state(sizeof *state, NULL);
    const char *set = getenv("RFAAS_TEST_LEFT");
    char text[32];
    if (size != sizeof mark || !state)
        return rfaas_fail("%u bytes of arguments", size);
    memcpy(&mark, args, sizeof mark);
    pthread_once(&key_once, make_key);
    sight s = {zeroed, valued, heap ? *heap : 0, local, *state, set ? atoll(set) : 0, (int64_t)(intptr_t)pthread_getspecific(key)};
    memcpy(res, &s, sizeof s);
    if (!heap)
        heap = malloc(sizeof *heap);
    zeroed = valued = *heap = local = *state = mark;
    snprintf(text, sizeof text, "%lld", (long long)mark);
    setenv("RFAAS_TEST_LEFT", text, 1);
    pthread_setspecific(key, (void *)(intptr_t)mark);
    return sizeof s;
}
