/* A small test harness for the C core: registered cases, each in a forked child that may not hang.
 *
 *   T_CASE(write_imm_bits, "write/imm-bits", .seconds = 5) {
 *       CHECK_EQ(1 + 1, 2);
 *   }
 *
 * main is in runner.c. A file of cases only includes this header and is linked in.
 *
 *   dp_test [--list] [--provider shm|verbs|tcp|ofi] [--encrypt] [--case GLOB]... [--repeat N] [--verbose] [GLOB]...
 *
 * What the harness does for every case:
 *   - forks a child that leads its own process group; all processes of the group die with it;
 *   - keeps its output and prints it only if the case fails (--verbose: at once);
 *   - sees from the parent (pidfd and poll, no SIGALRM) that the case hangs: no thread has passed a CHECK for some seconds, or the
 *     case goes on after ten times as long. The failure names the case, the last CHECK that each of its threads and processes
 *     passed, and their stacks;
 *   - compares open descriptors, shared mappings, threads and objects of the fabric before and after the case, in the child and in
 *     every peer process; finds processes and files in /dev/shm that are left behind.
 *
 * A failed CHECK in any thread prints its place and reason, and ends the process at once: a case does not go on after its
 * first failure. Environment:
 *   RFAAS_REQUIRE_VERBS=1     --provider verbs without a device is a failure, not a skip
 *   RFAAS_TEST_TIMEOUT_SCALE  multiplies all times after which something hangs (default 1; sanitizers: 4)
 *   RFAAS_TEST_SEED           seed of t_random (default: the clock; printed with a failure)
 *
 * Exit status: 0 when nothing failed, 1 on failure (also: no case matches), 2 on bad usage.
 */
#ifndef RFAAS_CTEST_HARNESS_H
#define RFAAS_CTEST_HARNESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

#include "dp_fabric.h"

#if defined(__SANITIZE_ADDRESS__)
#define T_ASAN 1
#else
#define T_ASAN 0
#endif
#if defined(__SANITIZE_THREAD__)
#define T_TSAN 1
#else
#define T_TSAN 0
#endif

/* ---- cases ---- */

/* Which providers a case runs on; 0 means all. */
enum { T_SHM = 1, T_VERBS = 2, T_TCP = 4, T_ENCRYPT = 8 /* for a case of T_TCP alone: runs with --encrypt too */, T_OFI = 16 };

typedef struct t_case {
    const char *name; /* "subject/what" or "subject/what@variant" */
    void (*run)(const struct t_case *);
    const void *arg;   /* for cases made from a table */
    int variant;       /* same */
    int seconds;       /* the longest time without a check, on shm, tcp and ofi; 0: 10, on tcp and ofi 20 */
    int verbs_seconds; /* the same on verbs; 0: 30 */
    unsigned providers;
    struct t_case *next;
} t_case;

void t_register(t_case *c);

#define T_CASE(fn, case_name, ...)                                                                                     \
    static void fn(const t_case *);                                                                                    \
    static t_case fn##_case = {.name = case_name, .run = fn, __VA_ARGS__};                                             \
    __attribute__((constructor)) static void fn##_register(void) { t_register(&fn##_case); }                           \
    static void fn(__attribute__((unused)) const t_case *self)

/* The provider that --provider selected. */
const char *t_provider(void);
bool t_is_shm(void);
bool t_is_verbs(void);
bool t_is_tcp(void);
bool t_is_ofi(void);
/* dp_dev_open, which with --encrypt adds DP_ENCRYPT_REQUIRE to the options of tcp devices that do not set `encrypt`, and puts these devices on
 * one of two nodes, if there are two (nodes.h). */
int t_dev_open(const char *provider, const dp_dev_options *opts, dp_dev **out, dp_error *err);
#define dp_dev_open t_dev_open
/* Chooses one of two counts or sizes by provider (verbs runs in an emulated machine). With a sanitizer, which finds its errors in fewer repetitions,
 * it is a quarter of the value for shm. On tcp, where each message costs system calls, it is 1/32. It is at least the value for verbs. */
static inline long t_pick(long shm, long verbs) {
    if (t_is_verbs())
        return verbs;
    if (t_is_shm() && (shm <= verbs || !(T_ASAN || T_TSAN)))
        return shm;
    long n = t_is_shm() ? shm / 4 : shm / 32;
    return n > verbs ? n : verbs;
}
/* Multiplier of deadlines, for time-outs inside cases. */
double t_time_scale(void);

/* Ends the case as skipped, with a reason. Only the case's own process may call it. */
void t_skip(const char *fmt, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* ---- checks, for any thread and any process of the case ---- */

/* Describes the current step. Printed if this thread fails or hangs. */
void t_note(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Names this thread or process in reports. */
void t_name(const char *name);
void t_at(const char *file, int line);
void t_fail_at(const char *file, int line, const char *fmt, ...) __attribute__((noreturn, format(printf, 3, 4)));
#define T_FAIL(...) t_fail_at(__FILE__, __LINE__, __VA_ARGS__)

#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        t_at(__FILE__, __LINE__);                                                                                      \
        if (!(cond))                                                                                                   \
            T_FAIL("CHECK(%s)", #cond);                                                                                \
    } while (0)

/* CHECK with a message. */
#define CHECKF(cond, ...)                                                                                              \
    do {                                                                                                               \
        t_at(__FILE__, __LINE__);                                                                                      \
        if (!(cond))                                                                                                   \
            T_FAIL(__VA_ARGS__);                                                                                       \
    } while (0)

#define T_COMPARE(a, op, b)                                                                                            \
    do {                                                                                                               \
        t_at(__FILE__, __LINE__);                                                                                      \
        __typeof__((a) + 0) t_a_ = (a);                                                                                \
        __typeof__((b) + 0) t_b_ = (b);                                                                                \
        if (!(t_a_ op(__typeof__(t_a_)) t_b_))                                                                         \
            T_FAIL("CHECK(%s %s %s): %lld (%#llx) against %lld (%#llx)", #a, #op, #b, (long long)t_a_,                 \
                   (unsigned long long)t_a_, (long long)t_b_, (unsigned long long)t_b_);                               \
    } while (0)
/* Integers; b is converted to a's type. */
#define CHECK_EQ(a, b) T_COMPARE(a, ==, b)
#define CHECK_NE(a, b) T_COMPARE(a, !=, b)
#define CHECK_LE(a, b) T_COMPARE(a, <=, b)
#define CHECK_GE(a, b) T_COMPARE(a, >=, b)
#define CHECK_LT(a, b) T_COMPARE(a, <, b)

/* A dp_status, printed by name. */
#define CHECK_STATUS(expr, want)                                                                                       \
    do {                                                                                                               \
        t_at(__FILE__, __LINE__);                                                                                      \
        int t_s_ = (expr), t_w_ = (want);                                                                              \
        if (t_s_ != t_w_)                                                                                              \
            T_FAIL("%s: %d (%s), wanted %d (%s)", #expr, t_s_, dp_status_text(t_s_), t_w_, dp_status_text(t_w_));      \
    } while (0)
#define CHECK_OK(expr) CHECK_STATUS(expr, DP_OK)
/* A call that leaves a dp_error in `err`: prints its message. */
#define CHECK_OK_ERR(expr, err)                                                                                        \
    do {                                                                                                               \
        t_at(__FILE__, __LINE__);                                                                                      \
        int t_s_ = (expr);                                                                                             \
        if (t_s_ != DP_OK)                                                                                             \
            T_FAIL("%s: %d (%s): %s", #expr, t_s_, dp_status_text(t_s_), (err).msg);                                   \
    } while (0)
/* A call that must fail with this status and a text in `err`. */
#define CHECK_REFUSED(expr, want, err)                                                                                 \
    do {                                                                                                               \
        memset(&(err), 0, sizeof(err));                                                                                \
        CHECK_STATUS(expr, want);                                                                                      \
        CHECKF((err).status == (want), "%s: err.status is %d, the return value %d", #expr, (err).status, (want));      \
        CHECKF((err).msg[0] != 0, "%s: no message", #expr);                                                            \
    } while (0)
/* Every one of n bytes has this value. */
void t_check_bytes(const char *file, int line, const void *p, int value, size_t n, const char *what);
#define CHECK_BYTES(p, value, n) t_check_bytes(__FILE__, __LINE__, p, value, n, #p)
void t_check_same(const char *file, int line, const void *got, const void *want, size_t n, const char *what);
#define CHECK_SAME(got, want, n) t_check_same(__FILE__, __LINE__, got, want, n, #got)

/* ---- randomness, time ---- */

uint64_t t_random(void); /* per thread; seeded from RFAAS_TEST_SEED */
void t_sleep_ms(int ms); /* only to provoke an order of events, never to wait for readiness */

/* ---- peers: a second thread or process of the case, joined by a socketpair ---- */

typedef struct t_peer {
    int sock; /* this side's end; the peer has the other one */
    bool process;
    pid_t pid;
    pthread_t thread;
    struct t_peer *next;
} t_peer;

/* Starts fn(sock, arg) in a thread, or in a forked process, which must be forked before any device is opened. A peer process
 * is checked for leaks when fn returns, and dies with the case. A process gets a copy of arg. */
void t_peer_start(t_peer *p, bool process, void (*fn)(int sock, void *arg), void *arg);
/* Waits for the peer's end. A peer process that failed fails the case. Closes the socket. */
void t_peer_join(t_peer *p);
/* Sends SIGKILL to a peer process and reaps it. Closes the socket. */
void t_peer_kill(t_peer *p);

/* Called repeatedly while this thread waits in t_recv or t_sync, unless NULL. See ends.h. */
extern __thread void (*t_idle)(void);

/* Send and receive whole messages over a socketpair. If the other side has ended, the case fails. */
void t_send(int sock, const void *msg, size_t len);
void t_recv(int sock, void *msg, size_t len);
/* Both sides call it. Neither returns before the other has called it. */
void t_sync(int sock);

/* ---- leaks ---- */

typedef struct t_usage {
    uint64_t fds[16]; /* bit set of descriptors below 1024 */
    int n_fds;
    int shared_maps; /* shared mappings: memfds, devices */
    int maps;        /* all mappings, for loops only, because the allocator's vary */
    int threads;
    dp_live live;    /* objects of the fabric */
} t_usage;

void t_usage_now(t_usage *u);
/* Fails if there are more descriptors, shared mappings, threads or objects of the fabric than before. */
void t_usage_check(const t_usage *before);

#endif
