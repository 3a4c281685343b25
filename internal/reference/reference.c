#include "reference.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
  BUFFER_WORDS = REFERENCE_BUFFER / 8,
  LINE_WORDS = 8,               /* of a cache line */
  STEPS = 50000,             /* of a loop in registers */
  ROUNDS = 2,
  STACK = 64 << 10,
};
static const uint64_t asleep_ns = 1000000;    /* so that a worker gets the CPU before the work begins */
static const uint64_t gather_ns = 3000000;    /* until all other CPUs must be occupied */
static const uint64_t occupied_ns = 10000000; /* the longest that a CPU is occupied */

enum { PHASE_BEFORE, PHASE_ALONE, PHASE_AFTER };

struct reference {
  pthread_t work, *occupants;
  int cpu, n;
  bool alone_first;
  uint64_t *buffer;
  atomic_int phase, running, interrupted;
  pthread_mutex_t lock;
  pthread_cond_t begun;
  _Atomic uint64_t cost;
  reference_times times;
};

typedef struct {
  reference *r;
  int cpu;
} occupant;

static uint64_t reference_clock(clockid_t id) {
  struct timespec t;
  clock_gettime(id, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* reference_waited says how long the calling thread has waited for a CPU while it could run, in ns. Returns false if the kernel does not report it. */
static bool reference_waited(uint64_t *ns) {
  char path[64];
  snprintf(path, sizeof path, "/proc/self/task/%ld/schedstat", syscall(SYS_gettid));
  FILE *f = fopen(path, "re");
  if (!f) return false;
  bool known = fscanf(f, "%*u %" SCNu64, ns) == 1;
  fclose(f);
  return known;
}

/* reference_switches returns how often another thread has taken the CPU from the calling thread. */
static long reference_switches(void) {
  struct rusage u;
  return getrusage(RUSAGE_THREAD, &u) ? -1 : u.ru_nivcsw;
}

static int reference_pin(int cpu) {
  size_t size = CPU_ALLOC_SIZE(cpu + 1);
  cpu_set_t *set = CPU_ALLOC(cpu + 1);
  if (!set) return ENOMEM;
  CPU_ZERO_S(size, set);
  CPU_SET_S(cpu, size, set);
  int e = sched_setaffinity(0, size, set) ? errno : 0;
  CPU_FREE(set);
  return e;
}

/* reference_work alternates between a loop in registers and a pass over memory. */
static void reference_work(uint64_t *buffer) {
  uint64_t x = 1, sum = 0;
  for (int round = 0; round < ROUNDS; round++) {
    for (int i = 0; i < STEPS; i++) {
      x ^= x << 13;
      x ^= x >> 7;
      x ^= x << 17;
    }
    for (int i = 0; i < BUFFER_WORDS; i += LINE_WORDS) sum += buffer[i];
  }
  *(volatile uint64_t *)buffer = sum + x;
}

/* reference_timed does the work twice, and returns the time of the second run. The first one fills the caches. */
static uint64_t reference_timed(reference *r) {
  reference_work(r->buffer);
  long switches = reference_switches();
  uint64_t began = reference_clock(CLOCK_THREAD_CPUTIME_ID);
  reference_work(r->buffer);
  uint64_t took = reference_clock(CLOCK_THREAD_CPUTIME_ID) - began;
  if (reference_switches() != switches) atomic_store(&r->interrupted, 1); /* the caches contain data of another program */
  return took;
}

static void reference_sleep(void) {
  struct timespec t = {.tv_nsec = (long)asleep_ns};
  nanosleep(&t, NULL);
}

static void reference_enter(reference *r, int phase) {
  pthread_mutex_lock(&r->lock);
  atomic_store(&r->phase, phase);
  pthread_cond_broadcast(&r->begun);
  pthread_mutex_unlock(&r->lock);
}

static void reference_beside(reference *r) {
  uint64_t before, after;
  bool known = reference_waited(&before);
  reference_sleep();
  r->times.waited = known && reference_waited(&after);
  if (r->times.waited) r->times.wait = after - before;
  r->times.beside = reference_timed(r);
}

static void reference_alone(reference *r) {
  reference_sleep();
  reference_enter(r, PHASE_ALONE);
  uint64_t latest = reference_clock(CLOCK_MONOTONIC) + gather_ns;
  while (atomic_load(&r->running) < r->n)
    if (reference_clock(CLOCK_MONOTONIC) > latest) {
      atomic_store(&r->interrupted, 1);
      break;
    }
  if (!atomic_load(&r->interrupted)) r->times.alone = reference_timed(r);
  reference_enter(r, PHASE_AFTER);
}

static void *reference_work_thread(void *arg) {
  reference *r = arg;
  if (reference_pin(r->cpu)) {
    atomic_store(&r->interrupted, 1);
    reference_enter(r, PHASE_AFTER);
    return NULL;
  }
  if (r->alone_first) reference_alone(r);
  reference_beside(r);
  if (!r->alone_first) reference_alone(r);
  atomic_fetch_add(&r->cost, reference_clock(CLOCK_THREAD_CPUTIME_ID));
  return NULL;
}

/* reference_occupy runs on a CPU during PHASE_ALONE, so that no worker can run there, since workers have idle priority. */
static void *reference_occupy(void *arg) {
  occupant o = *(occupant *)arg;
  reference *r = o.r;
  free(arg);
  if (reference_pin(o.cpu)) {
    atomic_store(&r->interrupted, 1);
    atomic_fetch_add(&r->running, 1);
    return NULL;
  }
  pthread_mutex_lock(&r->lock);
  while (atomic_load(&r->phase) == PHASE_BEFORE) pthread_cond_wait(&r->begun, &r->lock);
  pthread_mutex_unlock(&r->lock);
  uint64_t latest = reference_clock(CLOCK_MONOTONIC) + occupied_ns;
  long switches = reference_switches();
  atomic_fetch_add(&r->running, 1);
  while (atomic_load_explicit(&r->phase, memory_order_acquire) == PHASE_ALONE) {
    for (int i = 0; i < 64; i++) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      __asm__ volatile("yield");
#endif
    }
    if (reference_clock(CLOCK_MONOTONIC) > latest) break;
  }
  if (reference_clock(CLOCK_MONOTONIC) > latest || reference_switches() != switches) atomic_store(&r->interrupted, 1);
  atomic_fetch_add(&r->cost, reference_clock(CLOCK_THREAD_CPUTIME_ID));
  return NULL;
}

static void reference_free(reference *r) {
  pthread_mutex_destroy(&r->lock);
  pthread_cond_destroy(&r->begun);
  free(r->occupants);
  free(r);
}

int reference_start(reference **result, void *buffer, int cpu, const int *others, int n, bool alone_first) {
  reference *r = calloc(1, sizeof *r);
  pthread_attr_t attr;
  if (!r) return ENOMEM;
  pthread_mutex_init(&r->lock, NULL);
  pthread_cond_init(&r->begun, NULL);
  r->cpu = cpu, r->alone_first = alone_first;
  r->buffer = buffer;
  r->occupants = calloc((size_t)n + 1, sizeof *r->occupants);
  int e = r->occupants ? pthread_attr_init(&attr) : ENOMEM;
  if (e) {
    reference_free(r);
    return e;
  }
  pthread_attr_setstacksize(&attr, STACK);
  sigset_t all, old; /* signals are for the threads of Go */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  for (int i = 0; i < n && !e; i++) {
    occupant *o = malloc(sizeof *o);
    if (!o) {
      e = ENOMEM;
      break;
    }
    *o = (occupant){.r = r, .cpu = others[i]};
    e = pthread_create(&r->occupants[i], &attr, reference_occupy, o);
    if (e) free(o);
    else r->n++;
  }
  if (!e) e = pthread_create(&r->work, &attr, reference_work_thread, r);
  pthread_attr_destroy(&attr);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (e) {
    reference_enter(r, PHASE_AFTER);
    for (int i = 0; i < r->n; i++) pthread_join(r->occupants[i], NULL);
    reference_free(r);
    return e;
  }
  *result = r;
  return 0;
}

reference_times reference_finish(reference *r) {
  pthread_join(r->work, NULL);
  for (int i = 0; i < r->n; i++) pthread_join(r->occupants[i], NULL);
  reference_times t = r->times;
  t.cost = atomic_load(&r->cost);
  t.complete = !atomic_load(&r->interrupted) && t.beside && t.alone;
  reference_free(r);
  return t;
}
