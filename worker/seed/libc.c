/* Functions of libc whose state would not travel. Random numbers: all workers of a seed would begin with those of a fresh process. While a heap is
 * open, user code gets the same generators with their state in the arena. As in libc, random and rand share one state. */
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

#include "heap.h"

#define LIBC(name) \
    static __typeof__(name) *libc; \
    if (!libc) \
    *(void **)&libc = dlsym(RTLD_NEXT, #name)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The caller holds the lock. */
static struct random_data *state(void) {
    dp_heap_kept *k = dp_heap_kept_at();
    if (!k->seeded) {
        k->seeded = 1;
        initstate_r(1, k->random_state, sizeof k->random_state, &k->random);
    }
    return &k->random;
}

void srandom(unsigned seed) {
    LIBC(srandom);
    if (!dp_heap_inside()) {
        libc(seed);
        return;
    }
    pthread_mutex_lock(&lock);
    srandom_r(seed, state());
    pthread_mutex_unlock(&lock);
}

long random(void) {
    LIBC(random);
    int32_t v = 0;
    if (!dp_heap_inside())
        return libc();
    pthread_mutex_lock(&lock);
    random_r(state(), &v);
    pthread_mutex_unlock(&lock);
    return v;
}

void srand(unsigned seed) { srandom(seed); }

int rand(void) { return (int)random(); }

static char *memory_of_random(void) {
    dp_heap_kept *k = dp_heap_kept_at();
    return k->random_memory ? k->random_memory : k->random_state;
}

/* setstate and initstate give libc memory of user code. The generator's position is in that memory, but libc's pointer to it does not
 * travel. */
char *initstate(unsigned seed, char *memory, size_t size) {
    LIBC(initstate);
    if (!dp_heap_inside())
        return libc(seed, memory, size);
    pthread_mutex_lock(&lock);
    char *before = memory_of_random();
    if (initstate_r(seed, memory, size, state()))
        before = NULL;
    else
        dp_heap_kept_at()->random_memory = memory;
    pthread_mutex_unlock(&lock);
    return before;
}

char *setstate(char *memory) {
    LIBC(setstate);
    if (!dp_heap_inside())
        return libc(memory);
    pthread_mutex_lock(&lock);
    char *before = memory_of_random();
    if (setstate_r(memory, state()))
        before = NULL;
    else
        dp_heap_kept_at()->random_memory = memory;
    pthread_mutex_unlock(&lock);
    return before;
}

#define DRAND48(type, name, call) \
    type name(void) { \
        LIBC(name); \
        type v = 0; \
        if (!dp_heap_inside()) \
            return libc(); \
        pthread_mutex_lock(&lock); \
        call(&dp_heap_kept_at()->drand48, &v); \
        pthread_mutex_unlock(&lock); \
        return v; \
    }
DRAND48(double, drand48, drand48_r)
DRAND48(long, lrand48, lrand48_r)
DRAND48(long, mrand48, mrand48_r)

/* These use the caller's numbers, and the multiplier that lcong48 has set. */
#define RAND48(type, name, call) \
    type name(unsigned short numbers[3]) { \
        LIBC(name); \
        type v = 0; \
        if (!dp_heap_inside()) \
            return libc(numbers); \
        pthread_mutex_lock(&lock); \
        call(numbers, &dp_heap_kept_at()->drand48, &v); \
        pthread_mutex_unlock(&lock); \
        return v; \
    }
RAND48(double, erand48, erand48_r)
RAND48(long, nrand48, nrand48_r)
RAND48(long, jrand48, jrand48_r)

unsigned short *seed48(unsigned short numbers[3]) {
    LIBC(seed48);
    if (!dp_heap_inside())
        return libc(numbers);
    pthread_mutex_lock(&lock);
    struct drand48_data *d = &dp_heap_kept_at()->drand48;
    seed48_r(numbers, d);
    pthread_mutex_unlock(&lock);
    return d->__old_x;
}

void lcong48(unsigned short numbers[7]) {
    LIBC(lcong48);
    if (!dp_heap_inside()) {
        libc(numbers);
        return;
    }
    pthread_mutex_lock(&lock);
    lcong48_r(numbers, &dp_heap_kept_at()->drand48);
    pthread_mutex_unlock(&lock);
}

/* Thread-specific keys that user code makes get the same numbers in workers that start from a seed, and their destructors. */
int pthread_key_create(pthread_key_t *key, void (*destructor)(void *)) {
    LIBC(pthread_key_create);
    int e = libc(key, destructor);
    if (!e && dp_heap_inside() && *key < DP_HEAP_KEYS)
        dp_heap_kept_at()->destructors[*key] = destructor;
    return e;
}

void srand48(long seed) {
    LIBC(srand48);
    if (!dp_heap_inside()) {
        libc(seed);
        return;
    }
    pthread_mutex_lock(&lock);
    srand48_r(seed, &dp_heap_kept_at()->drand48);
    pthread_mutex_unlock(&lock);
}
#endif
