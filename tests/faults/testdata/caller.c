/* A client process of the fault tests. It calls `work` all the time, checks the content of every result and the name of every
 * error, and takes a new lease when the old one is lost. caller_test.go does the same in Go.
 *
 *     caller storm|steady LIBRARY SEED MAX_BYTES PAUSE_US WAIT_MODE TIMEOUT_MS
 *
 * storm: calls of all kinds (synchronous, with deadline, requests in flight, cancelled ones, registered payloads) with
 * payloads up to MAX_BYTES. steady: one small call after the other, of PAUSE_US each. The address comes from the
 * environment, as for any client. On SIGTERM it releases everything, reports and ends. Lines on standard output:
 *
 *     ready                               the first lease, a call in it and its release succeeded
 *     ok CALLS CALL_NS CONTROL_NS         right results so far; the longest wait in a call, and in a control operation
 *     err STATUS STARTED WAIT_NS TEXT     a call ended with a connection or lease error, or a control operation with any
 *     wrong TEXT                          something that must never happen
 *     end JSON                            the report
 */
#include <dirent.h>
#include <inttypes.h>
#include <rfaas.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "work.h"

#define FLIGHTS 8
#define TIRED 3 /* connection errors in a row before a new lease is taken */
#define STATUSES 8
#define PATIENCE 1000 /* number of polls of a call after which the caller sleeps between polls: see caller_test.go */

typedef struct flight {
    rfaas_request request;
    uint8_t *in, *out;
    size_t size, want;
    uint64_t hash;
} flight;

typedef struct tally {
    int status;
    uint64_t count;
} tally;

static volatile sig_atomic_t stopping;
static const char *library;
static bool steady;
static size_t max_bytes;
static uint32_t pause_us, wait_mode;
static int64_t timeout_ns;
static uint64_t rng, tag;
static flight flights[FLIGHTS];

static uint64_t calls, right, wrongs;
static int64_t longest_call, longest_control, said_at;
#define SLOW_NS 1000000000 /* a longer wait is printed */
static char longest_call_op[64], longest_control_op[64];
static tally errors[32];
static int errors_used;

static void on_term(int sig) {
    (void)sig;
    stopping = 1;
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static uint64_t any(uint64_t below) { return work_mix(rng += 0x9e3779b97f4a7c15u) % below; }

static void progress(bool always) {
    int64_t t = now();
    if (!always && t - said_at < 20000000)
        return;
    said_at = t;
    printf("ok %" PRIu64 " %" PRId64 " %" PRId64 "\n", right, longest_call, longest_control);
}

#define WRONG(...) (wrongs++, printf("wrong " __VA_ARGS__), putchar('\n'))

/* ---- results and errors ---- */

static void took(int64_t began, const char *op, int64_t *longest, char *longest_op) {
    int64_t ns = now() - began;
    if (ns > *longest) {
        *longest = ns;
        snprintf(longest_op, 64, "%s", op);
        progress(true);
        if (ns > SLOW_NS)
            printf("slow %" PRId64 " %s\n", ns, op);
    }
}

static void count(int status) {
    int i = 0;
    while (i < errors_used && errors[i].status != status)
        i++;
    if (i == errors_used && errors_used < (int)(sizeof errors / sizeof *errors))
        errors[errors_used++].status = status;
    errors[i].count++;
}

/* Whether a caller may get an error while other processes die: it has a name, a text, and a class that says what to do. */
static void check_error(const char *op, int64_t began, int status, bool always_say) {
    count(status);
    const char *text = rfaas_last_error();
    int class = RFAAS_CLASS(status);
    bool known = class == RFAAS_CLASS_BUSY || class == RFAAS_CLASS_CONNECTION || class == RFAAS_CLASS_LEASE ||
                 status == RFAAS_DEADLINE || status == RFAAS_CANCELLED;
    if (!known || !text[0] || !rfaas_strerror(status)[0])
        WRONG("%s ended with %d: \"%s\"", op, status, text);
    else if (always_say || (class != RFAAS_CLASS_FUNCTION && class != RFAAS_CLASS_BUSY))
        printf("err %d %d %" PRId64 " %s\n", status, rfaas_started(), now() - began, text);
}

/* The end of a call. */
static int judge(const char *op, int64_t began, int status, const flight *f, size_t size) {
    took(began, op, &longest_call, longest_call_op);
    calls++;
    if (status != RFAAS_OK) {
        check_error(op, began, status, false);
        return status;
    }
    if (size != f->want || !work_is(f->out, size, f->hash)) {
        WRONG("%s of %zu bytes: the result of %zu bytes is not the %zu bytes of hash %" PRIx64, op, f->size, size, f->want,
              f->hash);
        return status;
    }
    right++;
    progress(false);
    return status;
}

/* ---- calls ---- */

static size_t any_size(void) {
    static const size_t sizes[] = {0, 1, 8, 24, 40, 64, 200, 240, 256, 300, 1000, 4080, 4096, 16368, 16384, 16385};
    size_t n = any(8) ? sizes[any(sizeof sizes / sizeof *sizes)] : any(max_bytes);
    return n < max_bytes ? n : max_bytes;
}

/* Writes a unique payload for the next call to `in`. */
static void prepare(flight *f, uint8_t *in) {
    work_head h = {.tag = ++tag, .want = (uint32_t)any_size(), .pause_us = any(32) ? 0 : (uint32_t)any(2000)};
    f->size = steady ? sizeof h + 8 : sizeof h + any_size();
    if (steady)
        h.want = 64, h.pause_us = pause_us;
    f->want = h.want;
    memcpy(in, &h, sizeof h);
    work_fill(in + sizeof h, f->size - sizeof h, h.tag);
    f->hash = work_hash(in, f->size);
}

static int call_and_wait(rfaas_lease *l, rfaas_function fn, int64_t deadline_ns) {
    flight *f = &flights[0];
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    size_t n = 0;
    prepare(f, f->in);
    o.timeout_ns = deadline_ns;
    int64_t began = now();
    int status = rfaas_invoke(l, fn, f->in, f->size, f->out, f->want, &n, &o);
    return judge(deadline_ns ? "invoke with deadline" : "invoke", began, status, f, n);
}

/* Makes several calls that are in flight together, and waits for, tests or cancels them in random order. Returns the worst outcome. */
static int call_many(rfaas_lease *l, rfaas_function fn, uint8_t *registered) {
    uint64_t started = 0, want = 1 + any(FLIGHTS);
    int worst = RFAAS_OK;
    for (; started < want; started++) {
        flight *f = &flights[started];
        bool in_registered = registered && any(4) == 0;
        rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
        if (!in_registered && any(4) == 0)
            o.timeout_ns = 1 + (int64_t)any(3000000);
        uint8_t *in = in_registered ? registered + started * (sizeof(work_head) + max_bytes) : f->in;
        prepare(f, in);
        int64_t began = now();
        int status = rfaas_iinvoke(l, fn, in, f->size, f->out, f->want, &o, &f->request);
        took(began, "iinvoke", &longest_call, longest_call_op);
        if (status != RFAAS_OK) {
            check_error("iinvoke", began, status, false);
            worst = status;
            break;
        }
        if (!in_registered)
            memset(in, 0xa5, f->size); /* it may be reused */
    }
    for (uint64_t left = started; left; left--) {
        uint64_t k = any(left);
        flight f = flights[k];
        size_t n = 0;
        int done = 0, status = RFAAS_OK;
        int64_t began = now();
        switch (any(6)) {
        case 0:
            status = rfaas_cancel(&f.request);
            took(began, "cancel", &longest_call, longest_call_op);
            if (status != RFAAS_OK)
                WRONG("cancel: %s", rfaas_last_error());
            count(RFAAS_CANCELLED);
            break;
        case 1:
        case 2:
            for (int looks = 1; !done; looks++) {
                status = rfaas_test(&f.request, &done, &n);
                if (!done && looks > PATIENCE)
                    usleep(100);
            }
            status = judge("test", began, status, &f, n);
            break;
        default:
            status = rfaas_wait(&f.request, &n);
            status = judge("wait", began, status, &f, n);
        }
        if (status != RFAAS_OK && RFAAS_CLASS(status) != RFAAS_CLASS_FUNCTION)
            worst = status;
        flights[k] = flights[left - 1];
        flights[left - 1] = f; /* keeps its buffers */
    }
    return worst;
}

/* ---- leases ---- */

static int control(const char *op, int64_t began, int status) {
    took(began, op, &longest_control, longest_control_op);
    if (status != RFAAS_OK)
        check_error(op, began, status, steady);
    return status;
}

/* Calls until the lease is lost, or for a number of calls. */
static void use(rfaas_lease *l, uint64_t most) {
    rfaas_function fn;
    void *registered = NULL;
    int bad = 0;
    int64_t busy_since = 0;
    if (rfaas_lease_function(l, "work", &fn) != RFAAS_OK) {
        WRONG("find function: %s", rfaas_last_error());
        return;
    }
    if (!steady && rfaas_alloc(l, FLIGHTS * (sizeof(work_head) + max_bytes), &registered) != RFAAS_OK)
        WRONG("alloc: %s", rfaas_last_error());
    for (uint64_t n = 0; n < most && bad < TIRED && !stopping; n++) {
        uint64_t kind = steady ? 0 : any(10);
        int status = kind < 5    ? call_and_wait(l, fn, 0)
                     : kind == 5 ? call_and_wait(l, fn, 1 + (int64_t)any(3000000))
                                 : call_many(l, fn, registered);
        switch (RFAAS_CLASS(status)) {
        case RFAAS_CLASS_BUSY: /* the worker has not answered the calls that were given up */
            if (!busy_since)
                busy_since = now();
            took(busy_since, "no free slot", &longest_call, longest_call_op);
            usleep(500);
            break;
        case RFAAS_CLASS_CONNECTION:
            bad++;
            break;
        case RFAAS_CLASS_LEASE:
            bad = TIRED;
            break;
        default:
            bad = 0;
            busy_since = 0;
        }
    }
}

/* One session with one lease. */
static bool cycle(uint64_t most) {
    rfaas_session *s = NULL;
    rfaas_lease *l = NULL;
    rfaas_session_options so = RFAAS_SESSION_OPTIONS_INIT;
    rfaas_lease_options lo = RFAAS_LEASE_OPTIONS_INIT;
    so.timeout_ns = timeout_ns;
    lo.library = library;
    lo.depth = FLIGHTS;
    lo.wait_mode = wait_mode;
    lo.bulk = 4 * (max_bytes + sizeof(work_head));
    int64_t began = now();
    if (control("open session", began, rfaas_session_open(&so, &s)) != RFAAS_OK)
        return false;
    began = now();
    bool leased = control("lease", began, rfaas_lease_open(s, &lo, &l)) == RFAAS_OK;
    uint64_t before = right;
    if (leased) {
        use(l, most);
        began = now();
        control("release", began, rfaas_lease_release(l));
    }
    began = now();
    control("close session", began, rfaas_session_close(s));
    return leased && right > before;
}

/* ---- what is left ---- */

static int open_files(void) {
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n - 3; /* ., .. and this one */
}

static int shared_mappings(void) {
    int n = 0;
    char line[512];
    FILE *f = fopen("/proc/self/maps", "r");
    while (f && fgets(line, sizeof line, f))
        n += strstr(line, "memfd:") || strstr(line, "uverbs");
    if (f)
        fclose(f);
    return n;
}

int main(int argc, char **argv) {
    if (argc != 8)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    steady = !strcmp(argv[1], "steady");
    library = argv[2];
    rng = strtoull(argv[3], NULL, 10);
    tag = rng << 32;
    max_bytes = strtoull(argv[4], NULL, 10);
    pause_us = (uint32_t)strtoul(argv[5], NULL, 10);
    wait_mode = (uint32_t)strtoul(argv[6], NULL, 10);
    timeout_ns = strtoll(argv[7], NULL, 10) * 1000000;
    for (int i = 0; i < FLIGHTS; i++) {
        flights[i].in = malloc(sizeof(work_head) + max_bytes);
        flights[i].out = malloc(max_bytes + 1);
        if (!flights[i].in || !flights[i].out)
            return 1;
    }
    if (rfaas_init(NULL) != RFAAS_OK) {
        fprintf(stderr, "%s\n", rfaas_last_error());
        return 1;
    }
    signal(SIGTERM, on_term);
    while (!stopping && !cycle(20))
        usleep(20000);
    int files = open_files(), mappings = shared_mappings();
    printf("ready\n");
    while (!stopping)
        if (!cycle(UINT64_MAX))
            usleep(20000);
    int files_after = open_files(), mappings_after = shared_mappings();
    for (int i = 0; i < 500 && (files_after > files || mappings_after > mappings); i++) {
        usleep(10000); /* connections close in threads of the library */
        files_after = open_files(), mappings_after = shared_mappings();
    }
    progress(true);
    printf("end {\"calls\":%" PRIu64 ",\"right\":%" PRIu64 ",\"wrong\":%" PRIu64 ",\"call_ns\":%" PRId64 ",\"call_op\":\"%s\""
           ",\"control_ns\":%" PRId64 ",\"control_op\":\"%s\",\"files\":[%d,%d],\"mappings\":[%d,%d],\"errors\":{",
           calls, right, wrongs, longest_call, longest_call_op, longest_control, longest_control_op, files, files_after,
           mappings, mappings_after);
    for (int i = 0; i < errors_used; i++)
        printf("%s\"%d\":%" PRIu64, i ? "," : "", errors[i].status, errors[i].count);
    printf("}}\n");
    if (rfaas_finalize() != RFAAS_OK)
        fprintf(stderr, "finalize: %s\n", rfaas_last_error());
    return wrongs ? 1 : 0;
}
