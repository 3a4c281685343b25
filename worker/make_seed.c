#include "make_seed.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bundle.h"
#include "dp_serve.h"
#include "load.h"
#include "seed/seed.h"

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

typedef struct maker {
    int sock;
    uint32_t id;
} maker;

_Noreturn static void leave(void) {
    fflush(stdout);
    fflush(stderr);
    _exit(DP_EXIT_STOPPED);
}

/* A refusal is a regular answer. */
_Noreturn static void refuse(const maker *k, int status, const char *text) {
    dp_msg_send_failure(k->sock, DP_MSG_FAILED, k->id, status, text);
    leave();
}

static void must(const maker *k, int status, const dp_error *err) {
    if (status)
        refuse(k, status, err->msg);
}

/* The payload is private memory of this process, as that of a call is. */
static void *map_payload(const maker *k, int fd, uint32_t size) {
    dp_error err;
    if (!size)
        return NULL;
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    if (at == MAP_FAILED)
        must(k, dp_fail(&err, DP_FATAL, errno, "seed: map a payload of %u bytes", size), &err);
    return at;
}

static bool load_library(void *code) {
    char why[8], path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", *(const int *)code);
    return !dp_bundle_load(why, sizeof why) && dlopen(path, RTLD_LAZY | RTLD_LOCAL);
}

static void run_setup(const maker *k, dp_function setup, void *payload, uint32_t size) {
    static dp_invocation inv;
    enum { CAPACITY = 1 << 20 };
    dp_error err;
    /* The result is ignored. An inaccessible page behind it ends an init call that returns more. */
    char *result = mmap(NULL, CAPACITY + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (result == MAP_FAILED || mprotect(result + CAPACITY, 4096, PROT_NONE))
        must(k, dp_fail(&err, DP_FATAL, errno, "seed: memory for the result of the init call"), &err);
    inv.capacity = CAPACITY;
    dp_heap_outside = 0;
    dp_invoke(setup, payload, size, result, &inv);
    dp_heap_outside = 1;
    if (!inv.failed)
        return;
    char text[DP_MSG_MAX];
    snprintf(text, sizeof text, "seed: the init call has failed: %.*s", (int)inv.message_len, inv.message);
    refuse(k, DP_FUNCTION_FAILED, text);
}

_Noreturn void dp_seed_make(int sock, uint32_t id, const dp_msg_seed *m, const int fds[DP_SEED_FDS]) {
    maker k = {sock, id};
    static dp_seed s;
    static dp_apart apart;
    static char text[DP_MSG_MAX];
    dp_error err = {0};
    dp_function *table = NULL;
    uint64_t at[4] = {now_ns()};
    struct {
        uint64_t times[3];
        char warning[DP_SEED_WARNING];
    } done = {0};
    int code = fds[0];
    void *payload = map_payload(&k, fds[3], m->payload_size);
    must(&k, dp_apart_find(load_library, &code, &apart, &err), &err);
    must(&k, dp_seed_make_begin(&s, fds[2], (uint64_t)m->seed_units * DP_HEAP_UNIT, &apart, &err), &err);
    int st = dp_worker_load(code, fds[1], 1, &table, text, sizeof text);
    if (st)
        refuse(&k, st, text);
    dp_seed_loaded(&s);
    must(&k, dp_seed_check_library(&s, &err), &err);
    at[1] = now_ns();
    s.payload = payload;
    s.payload_size = m->payload_size;
    run_setup(&k, table[0], payload, m->payload_size);
    dp_apart_pause(&s.apart);
    at[2] = now_ns();
    must(&k, dp_seed_capture(&s, &err), &err);
    at[3] = now_ns();
    for (int i = 0; i < 3; i++)
        done.times[i] = at[i + 1] - at[i];
    size_t length = strlen(strcpy(done.warning, s.warning));
    dp_msg_send(sock, DP_MSG_SEEDED, id, &done, sizeof done.times + length, -1);
    leave();
}
