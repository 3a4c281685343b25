/* Tables: read-only data that the workers of later leases map. The library copies a table into a sealed memory file, and passes its
 * descriptor to the agent, which lets executors read it. The library keeps the descriptor for another agent, and for calls in this process. A table can also
 * be a seed: then the library passes only its name, and executors copy the seed from each other. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "call.h"

struct rfaas_table {
    rfaas_table *next;
    rfaas_agent_table message;
    char seed[RFAAS_AGENT_SEED_NAME]; /* full name of the seed; "": the table is not a seed */
    int fd;         /* opened for reading; -1: the table is a seed */
    const void *at; /* for calls in this process; NULL: not mapped yet */
};

/* ---- the copy ---- */

#define BLOCK 4096u           /* blocks of zeros are not stored */
#define STAGE (1u << 20)      /* bytes that are gathered before they are stored */

/* Stores the consecutive bytes of a file. */
typedef struct writer {
    int fd;
    uint64_t at; /* bytes that are stored */
    uint8_t *stage;
    size_t staged;
} writer;

static bool zero(const uint8_t *b, size_t n) { return !b[0] && !memcmp(b, b + 1, n - 1); }

static bool store(writer *w, const uint8_t *from, size_t len) {
    for (size_t n; len; from += n, len -= n, w->at += n) {
        size_t first = len < BLOCK ? len : BLOCK;
        bool hole = zero(from, first);
        for (n = first; n < len && n < STAGE; n += len - n < BLOCK ? len - n : BLOCK)
            if (zero(from + n, len - n < BLOCK ? len - n : BLOCK) != hole)
                break;
        for (size_t done = 0; !hole && done < n;) {
            ssize_t k = pwrite(w->fd, from + done, n - done, (off_t)(w->at + done));
            if (k < 0 && errno != EINTR)
                return false;
            done += k > 0 ? (size_t)k : 0;
        }
    }
    return true;
}

static bool flush(writer *w) {
    bool good = store(w, w->stage, w->staged);
    w->staged = 0;
    return good;
}

static bool append(writer *w, const uint8_t *from, size_t len) {
    while (len) {
        if (!w->staged && len >= STAGE)
            return store(w, from, len);
        size_t n = len < STAGE - w->staged ? len : STAGE - w->staged;
        memcpy(w->stage + w->staged, from, n);
        w->staged += n;
        from += n;
        len -= n;
        if (w->staged == STAGE && !flush(w))
            return false;
    }
    return true;
}

static bool copy(writer *w, const dp_pieces *p) {
    for (size_t i = 0; i < p->n; i++)
        for (size_t k = 0; k < p->at[i].count; k++)
            if (!append(w, (const uint8_t *)p->at[i].base + (ptrdiff_t)k * p->at[i].stride, p->at[i].size))
                return false;
    return flush(w);
}

/* Returns a sealed file with the bytes of the pieces, opened for reading, or -1 with errno set. */
static int make_file(const dp_pieces *p, uint64_t size) {
    char path[32];
    int reading = -1;
    writer w = {.fd = memfd_create("rfaas-table", MFD_CLOEXEC | MFD_ALLOW_SEALING), .stage = malloc(STAGE)};
    if (w.fd >= 0 && w.stage && !ftruncate(w.fd, (off_t)size) && copy(&w, p) &&
        !fcntl(w.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", w.fd);
        reading = rfaas_agent_above_stdio(open(path, O_RDONLY | O_CLOEXEC));
    }
    int e = w.stage ? errno : ENOMEM;
    free(w.stage);
    if (w.fd >= 0)
        close(w.fd);
    errno = e;
    return reading;
}

/* ---- tables of a session ---- */

static int64_t transfer_ns(uint64_t size) { return (int64_t)((double)size / RFAAS_AGENT_TABLE_RATE * 1e9); }

int64_t rfaas_api_tables_ns(rfaas_session *s) {
    uint64_t size = 0;
    pthread_mutex_lock(&s->mu);
    for (const rfaas_table *t = s->tables; t; t = t->next)
        size += t->message.size;
    pthread_mutex_unlock(&s->mu);
    return transfer_ns(size);
}

/* Returns where the pointer to a table is, or to NULL. Under the session's mutex. */
static rfaas_table **find(rfaas_session *s, const char *name) {
    rfaas_table **p = &s->tables;
    while (*p && strcmp((*p)->message.name, name))
        p = &(*p)->next;
    return p;
}

static void destroy(rfaas_table *t) {
    if (t->at)
        munmap((void *)t->at, t->message.size);
    if (t->fd >= 0)
        close(t->fd);
    free(t);
}

/* Notes that new leases have other tables than earlier ones. */
static void changed(rfaas_session *s) { __atomic_add_fetch(&s->tables_changed, 1, __ATOMIC_ACQ_REL); }

/* Takes a table off the list. NULL: it is not there. */
static rfaas_table *remove_table(rfaas_session *s, const char *name) {
    changed(s);
    pthread_mutex_lock(&s->mu);
    rfaas_table **p = find(s, name), *t = *p;
    if (t)
        *p = t->next;
    pthread_mutex_unlock(&s->mu);
    return t;
}

static int publish_seed(rfaas_session *s, const char *op, const rfaas_table *t) {
    rfaas_agent_table_seed m = {.session = t->message.session};
    memcpy(m.name, t->message.name, sizeof m.name);
    memcpy(m.seed, t->seed, sizeof m.seed);
    rfaas_request_parts parts = {.body = &m, .body_size = sizeof m, .fd = -1};
    return rfaas_agent_ask(op, RFAAS_AGENT_TABLE_SEED, &parts, s->timeout_ns, 0, NULL);
}

static int publish(rfaas_session *s, const char *op, const rfaas_table *t) {
    if (*t->seed)
        return publish_seed(s, op, t);
    rfaas_request_parts parts = {.body = &t->message, .body_size = sizeof t->message, .fd = t->fd};
    rfaas_reply reply;
    int status = rfaas_agent_ask(op, RFAAS_AGENT_TABLE, &parts, s->timeout_ns + transfer_ns(t->message.size), 0, &reply);
    if (!status)
        free(reply.data);
    return status && rfaas_api_without_agent(s, status, &reply) ? RFAAS_OK : status;
}

void rfaas_api_tables_publish(rfaas_session *s) {
    /* A thread that drops a table meanwhile may close a descriptor, so copies are passed. */
    rfaas_table copies[RFAAS_AGENT_TABLES];
    uint32_t n = 0;
    pthread_mutex_lock(&s->mu);
    for (const rfaas_table *t = s->tables; t && n < RFAAS_AGENT_TABLES; t = t->next) {
        copies[n] = *t;
        copies[n++].fd = *t->seed ? -1 : fcntl(t->fd, F_DUPFD_CLOEXEC, 3);
    }
    pthread_mutex_unlock(&s->mu);
    for (uint32_t i = 0; i < n; i++) {
        if (copies[i].fd < 0 && !*copies[i].seed)
            continue; /* leases that need the table report that it is missing */
        publish(s, "publish a table", &copies[i]);
        if (copies[i].fd >= 0)
            close(copies[i].fd);
    }
}

void rfaas_api_tables_free(rfaas_session *s) {
    pthread_mutex_lock(&s->mu);
    rfaas_table *t = s->tables;
    s->tables = NULL;
    pthread_mutex_unlock(&s->mu);
    while (t) {
        rfaas_table *next = t->next;
        destroy(t);
        t = next;
    }
}

void rfaas_api_tables_forget(rfaas_session *s) {
    for (const rfaas_table *t = s->tables; t; t = t->next)
        if (t->fd >= 0)
            close(t->fd);
    s->tables = NULL;
}

static int check_name(const char *op, const char *name) {
    if (!name || !*name)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: name is empty", op);
    if (strlen(name) >= RFAAS_AGENT_TABLE_NAME)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: name of %zu bytes, want at most %d: %.80s", op, strlen(name), RFAAS_AGENT_TABLE_NAME - 1, name);
    return RFAAS_OK;
}

static int check_parts(const char *op, const char *name, const dp_pieces *p, uint64_t address, size_t *size) {
    size_t bad, page = (size_t)sysconf(_SC_PAGESIZE);
    if (!p->at && p->n)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s \"%s\": parts is NULL with count %zu", op, name, p->n);
    switch (dp_pieces_size(p, size, &bad)) {
    case DP_PIECES_NULL:
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s \"%s\": base of parts[%zu] is NULL with %zu elements of %zu bytes", op, name, bad, p->at[bad].count, p->at[bad].size);
    case DP_PIECES_STRIDE:
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s \"%s\": stride of parts[%zu] is %td, less than its element size %zu", op, name, bad, p->at[bad].stride, p->at[bad].size);
    default: break;
    }
    if (*size == 0 || *size > PTRDIFF_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s \"%s\": the parts have %zu bytes, want 1 to %td", op, name, *size, PTRDIFF_MAX);
    if (address % page)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s \"%s\": address %#llx is not a multiple of the page size, %zu", op, name, (unsigned long long)address, page);
    return RFAAS_OK;
}

/* Adds a table to the list. Returns false if its name is taken, or there are too many. */
static bool add(rfaas_session *s, rfaas_table *t, uint32_t *n) {
    pthread_mutex_lock(&s->mu);
    *n = 0;
    for (const rfaas_table *x = s->tables; x; x = x->next)
        ++*n;
    rfaas_table **p = find(s, t->message.name);
    bool room = !*p && *n < RFAAS_AGENT_TABLES;
    if (room)
        *p = t;
    pthread_mutex_unlock(&s->mu);
    return room;
}

/* Adds the table to the session and publishes it. Owns the table from now on, and frees it on failure. */
static int add_and_publish(rfaas_session *s, const char *op, rfaas_table *t) {
    uint32_t n;
    char name[RFAAS_AGENT_TABLE_NAME];
    memcpy(name, t->message.name, sizeof name);
    if (!add(s, t, &n)) {
        destroy(t);
        if (n == RFAAS_AGENT_TABLES)
            return rfaas_api_fail(RFAAS_INVALID, 0, "%s \"%s\": the session already has %u tables, the maximum; drop one first", op, name, n);
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: the session has a table \"%s\" already; drop it first, or choose another name", op, name);
    }
    int status = publish(s, op, t);
    if (status && (t = remove_table(s, name)))
        destroy(t);
    changed(s); /* a lease that was opened meanwhile may have the table or not */
    return status;
}

int rfaas_table_put(rfaas_session *s, const char *name, const rfaas_piece *parts, size_t count) { return rfaas_table_put_at(s, name, parts, count, 0); }

int rfaas_table_put_at(rfaas_session *s, const char *name, const rfaas_piece *parts, size_t count, uint64_t address) {
    static const char op[] = "publish a table";
    dp_pieces p = {(const dp_piece *)parts, count};
    size_t size;
    int status = rfaas_api_bad_session(s, op);
    if (status || (status = check_name(op, name)) || (status = check_parts(op, name, &p, address, &size)))
        return status;
    rfaas_table *t = calloc(1, sizeof *t);
    if (!t)
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s \"%s\": out of memory", op, name);
    t->message = (rfaas_agent_table){.session = s->open.session, .size = size, .address = address};
    strcpy(t->message.name, name);
    if ((t->fd = make_file(&p, size)) < 0) {
        int e = errno;
        free(t);
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s \"%s\": no memory for a copy of %zu bytes: %s", op, name, size, strerror(e));
    }
    return add_and_publish(s, op, t);
}

int rfaas_table_put_seed(rfaas_session *s, const char *name, const char *seed) {
    static const char op[] = "publish a seed as a table";
    int status = rfaas_api_bad_session(s, op);
    if (status || (status = check_name(op, name)))
        return status;
    if (!seed || !*seed || strlen(seed) >= RFAAS_AGENT_SEED_NAME)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s \"%s\": the seed's name is \"%.80s\", want a full name of at most %d bytes, as rfaas_seed_name returns it", op, name,
                              seed ? seed : "", RFAAS_AGENT_SEED_NAME - 1);
    rfaas_table *t = calloc(1, sizeof *t);
    if (!t)
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s \"%s\": out of memory", op, name);
    t->message.session = s->open.session;
    t->fd = -1;
    strcpy(t->message.name, name);
    strcpy(t->seed, seed);
    return add_and_publish(s, op, t);
}

int rfaas_table_drop(rfaas_session *s, const char *name) {
    static const char op[] = "drop a table";
    int status = rfaas_api_bad_session(s, op);
    if (status || (status = check_name(op, name)))
        return status;
    pthread_mutex_lock(&rfaas_api_mu);
    uint32_t leases = s->opening;
    pthread_mutex_unlock(&rfaas_api_mu);
    if (leases)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %u leases of the session may use \"%s\"; release them first", op, leases, name);
    rfaas_table *t = remove_table(s, name);
    if (!t)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: the session has no table \"%s\"", op, name);
    rfaas_request_parts parts = {.body = &t->message, .body_size = sizeof t->message, .fd = -1};
    if (!(s->open.flags & RFAAS_SESSION_LOCAL) || rfaas_agent_connected())
        status = rfaas_agent_ask(op, RFAAS_AGENT_TABLE_DROP, &parts, s->timeout_ns, 0, NULL);
    destroy(t);
    return status;
}

/* ---- calls in this process ---- */

static __thread rfaas_session *running; /* whose function this thread runs */

rfaas_session *rfaas_api_tables_of(rfaas_session *s) {
    rfaas_session *before = running;
    running = s;
    return before;
}

static const void *map_here(rfaas_table *t) {
    if (*t->seed)
        return NULL;
    void *want = (void *)(uintptr_t)t->message.address; /* NOLINT(performance-no-int-to-ptr): the program chose it */
    void *at = mmap(want, t->message.size, PROT_READ, MAP_SHARED | (want ? MAP_FIXED_NOREPLACE : 0), t->fd, 0);
    if (at != MAP_FAILED && want && at != want) {
        munmap(at, t->message.size);
        at = MAP_FAILED;
    }
    return at == MAP_FAILED ? NULL : at;
}

const void *rfaas_api_table_here(const char *name, size_t *size) {
    rfaas_session *s = running;
    const void *at = NULL;
    size_t n = 0;
    if (s) {
        pthread_mutex_lock(&s->mu);
        rfaas_table *t = *find(s, name);
        if (t && !t->at)
            t->at = map_here(t);
        at = t ? t->at : NULL;
        n = at ? t->message.size : 0;
        pthread_mutex_unlock(&s->mu);
    }
    if (size)
        *size = n;
    return at;
}
