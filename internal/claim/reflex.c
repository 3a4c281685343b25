/* The thread that sees claims, and the executor's own record of the lines. */
#include "reflex.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define PAGE_SIZE 4096    /* of a worker's page (worker/page.h) */
#define STACK (64u << 10) /* of the thread */
/* A client can ring without claiming. After VAIN such rings in a row, the thread sleeps for VAIN_NS before it looks again. */
#define VAIN 16
#define VAIN_NS 1000000
/* Go code learns of a claim after NOTIFY_AFTER_NS, when the first call has probably returned. Until then its bookkeeping could take the processor that
 * the worker or the client runs on. */
#define NOTIFY_AFTER_NS 1000000

typedef struct slot {
    uint64_t claimant; /* the only one that can claim the line, by a wish; 0: by the word */
    uint32_t state; /* DP_CLAIM_NONE: free; AWAKE, COOLING, ARMED; CLAIMED: not collected yet */
    uint32_t n;
    uint64_t sequence; /* of the present or the last use */
    int64_t at;        /* CLOCK_MONOTONIC ns at which the claim was seen */
    reflex_worker *workers;
} slot;

typedef struct cell {
    uint64_t id; /* of the claimant */
    uint64_t seen; /* its last wish */
    dp_claim_cell *at;
} cell;

struct reflex {
    dp_claim_region *region;
    int event;
    bool ending;
    uint32_t used; /* lines below it may be armed */
    uint64_t claims; /* seen by any thread; under mu */
    pthread_t thread;
    pthread_mutex_t mu;
    slot slots[DP_CLAIM_LINES];
    cell cells[REFLEX_CELLS]; /* the first n_cells; under mu */
    uint32_t n_cells;
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void reflex_free_workers(reflex_worker *workers, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        close(workers[i].freezer);
        munmap(workers[i].page, PAGE_SIZE);
    }
    free(workers);
}

/* Thaws and wakes a worker. A worker that is dead, or dies now, does not matter: its connection tells the client. */
static void resume(const reflex_worker *w) {
    __atomic_fetch_add(&w->knock->claimed, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&w->knock->rung, 1, __ATOMIC_SEQ_CST); /* the thaw restarts the worker's wait, which now ends at once */
    ssize_t thawed = w->old ? pwrite(w->freezer, "THAWED", 6, 0) : pwrite(w->freezer, "0", 1, 0);
    (void)thawed;
    dp_claim_ring(&w->knock->rung, 1); /* after the thaw: a wake-up before it may be lost */
}

/* Gives the workers of a line to the client that has claimed them. Under mu. */
static void give(reflex *r, slot *s) {
    s->at = now_ns();
    for (uint32_t i = 0; i < s->n && s->state == DP_CLAIM_ARMED; i++)
        resume(&s->workers[i]);
    s->state = DP_CLAIM_CLAIMED;
    r->claims++;
}

/* Checks whether a client has changed the word of a line to a claim. If so, resumes the workers that are frozen, and returns true. Under mu. */
static bool look(reflex *r, uint32_t line) {
    slot *s = &r->slots[line];
    if (s->claimant || (s->state != DP_CLAIM_ARMED && s->state != DP_CLAIM_AWAKE) ||
        __atomic_load_n(&r->region->line[line].word, __ATOMIC_ACQUIRE) != dp_claim_word(DP_CLAIM_CLAIMED, s->sequence))
        return false;
    give(r, s);
    return true;
}

/* Answers a claimant's wish, if it has a new one. Returns true if it claims a line, and then has resumed the workers. A wish is answered once, and the answer
 * holds for good: the claimant does not get the line later. Under mu. */
static bool answer(reflex *r, cell *c) {
    uint64_t wish = __atomic_load_n(&c->at->wish, __ATOMIC_ACQUIRE);
    if (wish == c->seen)
        return false;
    c->seen = wish;
    uint32_t line = (uint32_t)(wish & 0xff);
    slot *s = line < DP_CLAIM_LINES ? &r->slots[line] : NULL;
    bool won = s && wish == dp_claim_wish(line, s->sequence) && s->claimant == c->id && s->state == DP_CLAIM_ARMED;
    __atomic_store_n(&c->at->answer, wish | (won ? DP_CLAIM_WON : DP_CLAIM_LOST), __ATOMIC_RELEASE);
    if (won)
        give(r, s);
    return won;
}

static void notify(const reflex *r) {
    uint64_t one = 1;
    ssize_t told = write(r->event, &one, sizeof one); /* never blocks: the counter does not overflow */
    (void)told;
}

static void *watch(void *arg) {
    reflex *r = arg;
    int64_t unreported = 0; /* time of the first claim that Go code does not know; 0: none */
    uint64_t claims = 0;
    for (uint32_t vain = 0;;) {
        uint32_t bell = __atomic_load_n(&r->region->bell, __ATOMIC_ACQUIRE);
        bool claimed = false, since; /* this thread has seen a claim; some thread has, since the last look */
        pthread_mutex_lock(&r->mu);
        bool ending = r->ending;
        for (uint32_t i = 0; i < r->used && !ending; i++)
            claimed |= look(r, i);
        for (uint32_t i = 0; i < r->n_cells && !ending; i++)
            claimed |= answer(r, &r->cells[i]);
        since = r->claims != claims;
        claims = r->claims;
        pthread_mutex_unlock(&r->mu);
        if (ending)
            return NULL;
        if (unreported && now_ns() - unreported >= NOTIFY_AFTER_NS) {
            notify(r);
            unreported = 0;
        } else if (claimed && !unreported) {
            unreported = now_ns();
        }
        vain = since ? 0 : vain + 1;
        if (vain > VAIN)
            nanosleep(&(struct timespec){.tv_nsec = VAIN_NS}, NULL);
        syscall(SYS_futex, &r->region->bell, FUTEX_WAIT, bell, unreported ? &(struct timespec){.tv_nsec = NOTIFY_AFTER_NS} : NULL, NULL, 0);
    }
}

reflex *reflex_new(int fd, int event) {
    void *map = mmap(NULL, sizeof(dp_claim_region), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    reflex *r = map == MAP_FAILED ? NULL : calloc(1, sizeof *r);
    if (!r) {
        if (map != MAP_FAILED)
            munmap(map, sizeof(dp_claim_region));
        return NULL;
    }
    r->region = map;
    r->event = event;
    r->region->magic = DP_CLAIM_MAGIC;
    r->region->lines = DP_CLAIM_LINES;
    pthread_mutex_init(&r->mu, NULL);
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, STACK);
    sigset_t all, old; /* signals are for threads of Go */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int e = pthread_create(&r->thread, &attr, watch, r);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (!e)
        return r;
    munmap(map, sizeof(dp_claim_region));
    free(r);
    errno = e;
    return NULL;
}

void reflex_free(reflex *r) {
    pthread_mutex_lock(&r->mu);
    r->ending = true;
    pthread_mutex_unlock(&r->mu);
    dp_claim_ring(&r->region->bell, 1);
    pthread_join(r->thread, NULL);
    for (uint32_t i = 0; i < r->used; i++)
        if (r->slots[i].state != DP_CLAIM_NONE) {
            __atomic_store_n(&r->region->line[i].word, dp_claim_word(DP_CLAIM_CLOSED, r->slots[i].sequence), __ATOMIC_RELEASE);
            reflex_free_workers(r->slots[i].workers, r->slots[i].n);
        }
    munmap(r->region, sizeof(dp_claim_region));
    free(r);
}

uint32_t *reflex_bell(reflex *r) { return &r->region->bell; }

bool reflex_join(reflex *r, uint64_t id, dp_claim_cell *at) {
    pthread_mutex_lock(&r->mu);
    bool room = r->n_cells < REFLEX_CELLS;
    if (room)
        r->cells[r->n_cells++] = (cell){.id = id, .at = at};
    pthread_mutex_unlock(&r->mu);
    return room;
}

void reflex_leave(reflex *r, uint64_t id) {
    pthread_mutex_lock(&r->mu);
    for (uint32_t i = 0; i < r->n_cells; i++)
        if (r->cells[i].id == id) {
            r->cells[i] = r->cells[--r->n_cells];
            break;
        }
    pthread_mutex_unlock(&r->mu);
}

int reflex_arm(reflex *r, uint64_t lease_id, int64_t client_ns, uint64_t claimant, uint32_t state, reflex_worker *workers, uint32_t n, uint64_t *sequence) {
    pthread_mutex_lock(&r->mu);
    int line = 0;
    while (line < DP_CLAIM_LINES && r->slots[line].state != DP_CLAIM_NONE)
        line++;
    if (line == DP_CLAIM_LINES || r->ending) {
        pthread_mutex_unlock(&r->mu);
        return -1;
    }
    slot *s = &r->slots[line];
    dp_claim_line *l = &r->region->line[line];
    *s = (slot){.claimant = claimant, .state = state, .n = n, .sequence = s->sequence + 1, .workers = workers};
    if ((uint32_t)line >= r->used)
        r->used = (uint32_t)line + 1;
    l->lease_id = lease_id;
    l->client_ns = client_ns;
    __atomic_store_n(&l->word, dp_claim_word(claimant ? DP_CLAIM_NONE : state, s->sequence), __ATOMIC_RELEASE);
    *sequence = s->sequence;
    pthread_mutex_unlock(&r->mu);
    return line;
}

/* Changes a line from its present state to another, unless a client has claimed it. A word that is neither the present state nor a claim comes from
 * a client that violates the protocol, and is overwritten. Under mu. */
static bool change(reflex *r, uint32_t line, uint32_t to) {
    slot *s = &r->slots[line];
    dp_claim_line *l = &r->region->line[line];
    uint64_t now = dp_claim_word(s->state, s->sequence);
    if (!s->claimant && !__atomic_compare_exchange_n(&l->word, &now, dp_claim_word(to, s->sequence), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        if (look(r, line)) {
            notify(r);
            return false;
        }
        __atomic_store_n(&l->word, dp_claim_word(to, s->sequence), __ATOMIC_RELEASE);
    }
    s->state = to;
    return true;
}

/* Returns a line's state; DP_CLAIM_NONE if it has another sequence number. Under mu. */
static uint32_t state_of(const reflex *r, uint32_t line, uint64_t sequence) {
    return r->slots[line].sequence == sequence ? r->slots[line].state : DP_CLAIM_NONE;
}

int reflex_revoke(reflex *r, uint32_t line, uint64_t sequence) {
    pthread_mutex_lock(&r->mu);
    slot *s = &r->slots[line];
    uint32_t state = state_of(r, line, sequence);
    bool is = state != DP_CLAIM_NONE && state != DP_CLAIM_CLAIMED && change(r, line, DP_CLAIM_CLOSED);
    if (is) {
        s->state = DP_CLAIM_NONE;
        reflex_free_workers(s->workers, s->n);
    }
    pthread_mutex_unlock(&r->mu);
    return is;
}

int reflex_cool(reflex *r, uint32_t line, uint64_t sequence) {
    pthread_mutex_lock(&r->mu);
    bool is = state_of(r, line, sequence) == DP_CLAIM_AWAKE && change(r, line, DP_CLAIM_COOLING);
    pthread_mutex_unlock(&r->mu);
    return is;
}

void reflex_cooled(reflex *r, uint32_t line, uint64_t sequence) {
    pthread_mutex_lock(&r->mu);
    if (state_of(r, line, sequence) == DP_CLAIM_COOLING)
        change(r, line, DP_CLAIM_ARMED);
    pthread_mutex_unlock(&r->mu);
}

uint32_t reflex_collect(reflex *r, reflex_claim *out, uint32_t most) {
    uint32_t n = 0;
    pthread_mutex_lock(&r->mu);
    for (uint32_t i = 0; i < r->used && n < most; i++) {
        slot *s = &r->slots[i];
        look(r, i); /* the thread may be slower than a message about the claim */
        if (s->state != DP_CLAIM_CLAIMED)
            continue;
        out[n++] = (reflex_claim){i, now_ns() - s->at};
        s->state = DP_CLAIM_NONE;
        reflex_free_workers(s->workers, s->n);
    }
    pthread_mutex_unlock(&r->mu);
    return n;
}
