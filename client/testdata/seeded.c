/* An init call that prepares a table, and functions that use it. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <unistd.h>

#include "rfaas_function.h"

enum { TABLE = 8 << 20 };
static unsigned char *table;
static unsigned used, token;
static pthread_t thread;
static char *volatile *stale;

static void *wait_for_end(void *unused) {
    for (;;)
        pause();
    return unused;
}

/* The payload is a letter. k: the process that makes a seed ends. t: leaves a thread. f: fails. h: leaves a pointer to the stack on the heap. */
uint32_t prepare(void *args, uint32_t size, void *res) {
    char name[16] = "", way = *(const char *)args;
    (void)size, (void)res;
    prctl(PR_GET_NAME, name);
    if (way == 'k' && !strcmp(name, "rfaas-seed"))
        kill(getpid(), SIGKILL);
    if (way == 't')
        pthread_create(&thread, NULL, wait_for_end, NULL);
    if (way == 'f' || getrandom(&token, sizeof token, 0) != sizeof token)
        return rfaas_fail("on purpose");
    if (way == 'h' && (stale = malloc(sizeof *stale)))
        *stale = name;
    table = malloc(TABLE);
    for (unsigned i = 0; i < TABLE; i++)
        table[i] = (unsigned char)(i * 7);
    return 0;
}

/* Returns the number of calls that this worker has executed since the init call, the sum of the table, and a number that the init call has chosen. */
uint32_t use_table(void *args, uint32_t size, void *res) {
    unsigned out[3] = {++used, 0, token};
    (void)args, (void)size;
    for (unsigned i = 0; table && i < TABLE; i++)
        out[1] += table[i];
    memcpy(res, out, sizeof out);
    return sizeof out;
}

/* Returns the sum of some bytes of the table, and the number that the setup function has chosen. The payload has the first byte, their distance and their number. If it
 * also has a size, the distances are irregular: the squares of 0, 1, 2 and so on, times the distance, modulo the size. */
uint32_t peek(void *args, uint32_t size, void *res) {
    uint32_t ask[4] = {0}, out[2] = {0, token};
    memcpy(ask, args, size < sizeof ask ? size : sizeof ask);
    for (uint64_t i = 0; i < ask[2]; i++)
        out[0] += table[ask[0] + (ask[3] ? i * i * ask[1] % ask[3] : i * ask[1])];
    memcpy(res, out, sizeof out);
    return sizeof out;
}

/* Returns this worker's share of the table's memory in KiB (PSS). */
uint32_t share(void *args, uint32_t size, void *res) {
    char line[512];
    unsigned long from, to;
    unsigned sum = 0, kib;
    int inside = 0;
    FILE *f = fopen("/proc/self/smaps", "r");
    (void)args, (void)size;
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            inside = (unsigned long)table < to && from < (unsigned long)table + TABLE;
        else if (inside && sscanf(line, "Pss: %u", &kib) == 1)
            sum += kib;
    }
    if (f)
        fclose(f);
    memcpy(res, &sum, sizeof sum);
    return sizeof sum;
}

uint32_t end(void *args, uint32_t size, void *res) { return (void)args, (void)size, (void)res, (uint32_t)kill(getpid(), SIGKILL); }

static unsigned resumed, order[2], number;

static void on_resume(void *arg) {
    *(unsigned *)arg = ++resumed;
    number = rfaas_child_number();
}

/* Prepares the table, and registers two functions. */
uint32_t prepare_children(void *args, uint32_t size, void *res) {
    prepare(args, size, res);
    return (uint32_t)(rfaas_on_resume(on_resume, &order[1]) | rfaas_on_resume(on_resume, &order[0]));
}

/* Returns the number of this worker, as in the functions and now, and when each function was called. */
uint32_t child(void *args, uint32_t size, void *res) {
    unsigned out[4] = {number, rfaas_child_number(), order[0], order[1]};
    (void)args, (void)size;
    memcpy(res, out, sizeof out);
    return sizeof out;
}

/* Fills as many MB as the payload says. */
uint32_t prepare_mb(void *args, uint32_t size, void *res) {
    uint32_t mb;
    (void)size, (void)res;
    memcpy(&mb, args, sizeof mb);
    unsigned char *bytes = malloc((size_t)mb * 1000000);
    if (!bytes || getrandom(&token, sizeof token, 0) != sizeof token)
        return rfaas_fail("no memory for %u MB, or no random number", mb);
    for (size_t i = 0; i < (size_t)mb * 1000000; i += 8)
        memcpy(bytes + i, &(uint64_t){i * 0x9e3779b97f4a7c15u}, 8);
    table = bytes;
    return 0;
}

/* Returns this process's share of memory in KiB (PSS), what of it only this process has written, and its share of what it writes together with others: its channel. */
uint32_t memory(void *args, uint32_t size, void *res) {
    char line[512], rights[5];
    unsigned kib, out[3] = {0};
    FILE *f = fopen("/proc/self/smaps", "r");
    (void)args, (void)size;
    while (f && fgets(line, sizeof line, f)) {
        sscanf(line, "%*x-%*x %4s ", rights);
        if (sscanf(line, "Pss: %u", &kib) == 1) {
            out[0] += kib;
            out[2] += rights[3] == 's' ? kib : 0;
        }
        if (sscanf(line, "Private_Dirty: %u", &kib) == 1 && rights[3] == 'p')
            out[1] += kib;
    }
    if (f)
        fclose(f);
    memcpy(res, out, sizeof out);
    return sizeof out;
}
