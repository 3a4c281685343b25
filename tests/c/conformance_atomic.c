/* Atomics: fetch-and-add and compare-and-swap. */
#include "ends.h"

#define PEER(d, off) (d)->peer.regions[0].addr + (off), (d)->peer.regions[0].rkey
#define UNTOUCHED 0xEEEEEEEEEEEEEEEEull

static uint64_t word_at(end *e, uint64_t off) { return __atomic_load_n((uint64_t *)(end_bytes(e) + off), __ATOMIC_ACQUIRE); }

typedef struct atomic {
    dp_op op;
    uint64_t operand, desired; /* added; or expected, and what the word becomes */
    uint64_t old, now;         /* the word before and afterwards */
} atomic;

/* Executes an atomic. Returns the old value, and checks that nothing is written beside it. */
static uint64_t execute(duo *d, uint64_t off, const atomic *a) {
    end *e = &d->e;
    uint64_t *old = (uint64_t *)(local_bytes(e) + 64);
    old[-1] = old[0] = old[1] = UNTOUCHED;
    dp_sge s = local_sge(e, 64, 8);
    if (a->op == DP_OP_FETCH_ADD)
        CHECK_OK(dp_post_fetch_add(e->qp, &s, PEER(d, off), a->operand, 61, DP_SIGNALED));
    else
        CHECK_OK(dp_post_compare_swap(e->qp, &s, PEER(d, off), a->operand, a->desired, 61, DP_SIGNALED));
    end_sent(e, 61, a->op);
    CHECK_EQ(old[-1], UNTOUCHED);
    CHECK_EQ(old[1], UNTOUCHED);
    return old[0];
}

static uint64_t fetch_add(duo *d, uint64_t off, uint64_t add) {
    return execute(d, off, &(atomic){.op = DP_OP_FETCH_ADD, .operand = add});
}

static uint64_t compare_swap(duo *d, uint64_t off, uint64_t expected, uint64_t desired) {
    return execute(d, off, &(atomic){.op = DP_OP_COMPARE_SWAP, .operand = expected, .desired = desired});
}

/* ---- results ---- */

#define A DP_OP_FETCH_ADD
#define S DP_OP_COMPARE_SWAP
static const atomic atomics[] = {
    {A, 5, 0, 0, 5},
    {A, 0, 0, 5, 5},
    {A, UINT64_MAX, 0, 5, 4}, /* minus one */
    {A, 0x8000000000000000ull, 0, 4, 0x8000000000000004ull},
    {A, 0x8000000000000000ull, 0, 0x8000000000000004ull, 4}, /* wraps */
    {A, 0xFFFFFFFFull << 32, 0, 4, 0xFFFFFFFF00000004ull},
    {A, 0xFFFFFFFCull, 0, 0xFFFFFFFF00000004ull, 0}, /* carries into the upper half, and wraps */
    {S, 0, 7, 0, 7},
    {S, 0, 8, 7, 7},          /* another value is there */
    {S, 7, 7, 7, 7},
    {S, 7 | 1ull << 32, 9, 7, 7}, /* the upper half counts */
    {S, 7, 5ull << 32 | 7, 7, 5ull << 32 | 7},
    {S, 7, 9, 5ull << 32 | 7, 5ull << 32 | 7},
    {S, 5ull << 32 | 6, 9, 5ull << 32 | 7, 5ull << 32 | 7}, /* and the lower one */
    {S, 5ull << 32 | 7, UINT64_MAX, 5ull << 32 | 7, UINT64_MAX},
    {A, 2, 0, UINT64_MAX, 1},
    {S, 1, 0, 1, 0}, /* the next word starts with 0 */
};
#undef A
#undef S
enum { ATOMICS = sizeof atomics / sizeof *atomics };
static const uint64_t offsets[] = {0, 32760, 65528}; /* the last word too */
enum { OFFSETS = sizeof offsets / sizeof *offsets };

static void results_left(duo *d) {
    for (int k = 0; k < OFFSETS; k++)
        for (int i = 0; i < ATOMICS; i++) {
            t_note("step %d at %llu", i, (unsigned long long)offsets[k]);
            CHECK_EQ(execute(d, offsets[k], &atomics[i]), atomics[i].old);
            t_sync(d->sock);
            t_sync(d->sock);
        }
}

static void results_right(duo *d) {
    for (int k = 0; k < OFFSETS; k++)
        for (int i = 0; i < ATOMICS; i++) {
            uint64_t off = offsets[k];
            t_note("step %d at %llu", i, (unsigned long long)off);
            t_sync(d->sock);
            CHECK_EQ(word_at(&d->e, off), atomics[i].now);
            if (off)
                CHECK_EQ(word_at(&d->e, off - 8), 0);
            if (off < 65528)
                CHECK_EQ(word_at(&d->e, off + 8), 0);
            t_sync(d->sock);
        }
}
DUO_CASE(results_left, results_right, "atomic/results", NULL)

/* Atomics take effect in the order of their posts, also among writes and reads. A completion is returned for signalled ones only. */
static void order_left(duo *d) {
    end *e = &d->e;
    uint64_t *word = (uint64_t *)local_bytes(e);
    for (uint64_t i = 1; i < (uint64_t)t_pick(2000, 100); i++) {
        word[0] = i;
        memset(word + 8, 0xEE, 4 * 8);
        dp_sge from = local_sge(e, 0, 8), in[4];
        for (uint64_t k = 0; k < 4; k++)
            in[k] = local_sge(e, 64 + 8 * k, 8);
        end_write(e, &from, 1, PEER(d, 0), 1, 0);
        CHECK_OK(dp_post_compare_swap(e->qp, &in[0], PEER(d, 0), i, i + 1000, 2, 0));
        CHECK_OK(dp_post_fetch_add(e->qp, &in[1], PEER(d, 0), 1, 3, 0));
        CHECK_OK(dp_post_compare_swap(e->qp, &in[2], PEER(d, 0), i + 1000, 5, 4, 0)); /* too late */
        CHECK_OK(dp_post_read(e->qp, &in[3], PEER(d, 0), 5, DP_SIGNALED));
        end_sent(e, 5, DP_OP_READ);
        CHECK_EQ(word[8], i);
        CHECK_EQ(word[9], i + 1000);
        CHECK_EQ(word[10], i + 1001);
        CHECK_EQ(word[11], i + 1001);
    }
    end_quiet(e, 2);
}
static void idle(duo *d) { (void)d; }
DUO_CASE(order_left, idle, "atomic/order", NULL)

/* ---- contention: several queue pairs, from threads or processes, at the same words ---- */

enum { CONTENDERS = 3 };

typedef struct contest {
    void (*contend)(duo *d, int index);
    void (*judge)(end *hub);
} contest;

typedef struct contender {
    const contest *of;
    int index;
} contender;

static void contend(int sock, void *arg) {
    const contender *c = arg;
    duo d = {.sock = sock};
    t_name(c->index == 0 ? "contender 0" : c->index == 1 ? "contender 1" : "contender 2");
    end_open(&d.e, NULL, NULL);
    duo_connect(&d);
    t_sync(sock); /* all start together */
    c->of->contend(&d, c->index);
    t_sync(sock);
    t_sync(sock);
    end_close(&d.e);
}

static void hold(const contest *of, bool process) {
    t_peer p[CONTENDERS];
    contender c[CONTENDERS];
    for (int i = 0; i < CONTENDERS; i++) {
        c[i] = (contender){of, i};
        t_peer_start(&p[i], process, contend, &c[i]);
    }
    end hub;
    end_open(&hub, NULL, NULL);
    dp_cq *cq = NULL;
    dp_qp *qp[CONTENDERS];
    dp_error err = {0};
    CHECK_OK_ERR(dp_cq_create(hub.dev, 64, &cq, &err), err);
    end_attend(cq);
    for (int i = 0; i < CONTENDERS; i++) {
        dp_qp_attr attr = {.max_send = 4, .max_recv = 4, .expose = {hub.mem}, .n_expose = 1};
        CHECK_OK_ERR(dp_qp_create(hub.dom, cq, &attr, &qp[i], &err), err);
        card mine, theirs;
        end_card(&hub, &mine); /* for the regions */
        mine.blob_len = sizeof mine.blob;
        CHECK_OK_ERR(dp_qp_export(qp[i], mine.blob, &mine.blob_len, &err), err);
        t_send(p[i].sock, &mine, sizeof mine);
        t_recv(p[i].sock, &theirs, sizeof theirs);
        CHECK_OK_ERR(dp_qp_connect(qp[i], theirs.blob, theirs.blob_len, &err), err);
        t_sync(p[i].sock);
    }
    for (int round = 0; round < 2; round++) /* start and end */
        for (int i = 0; i < CONTENDERS; i++)
            t_sync(p[i].sock);
    of->judge(&hub);
    for (int i = 0; i < CONTENDERS; i++)
        t_sync(p[i].sock);
    for (int i = 0; i < CONTENDERS; i++) {
        t_peer_join(&p[i]);
        dp_qp_destroy(qp[i]);
    }
    end_unattend(cq);
    dp_cq_destroy(cq);
    end_close(&hub);
}

/* Sums are exact. */
static void add_up(duo *d, int index) {
    uint64_t last = 0;
    for (long i = 0, n = t_pick(200000, 400); i < n; i++) {
        uint64_t old = fetch_add(d, 0, (uint64_t)index + 1);
        CHECKF(i == 0 || old > last, "the sum went from %llu to %llu", (unsigned long long)last, (unsigned long long)old);
        last = old;
    }
}
static void judge_sum(end *hub) {
    CHECK_EQ(word_at(hub, 0), (uint64_t)t_pick(200000, 400) * (1 + 2 + 3));
}
static const contest sums = {add_up, judge_sum};
T_CASE(contention_threads, "atomic/contention@two-devices", .seconds = 20, .verbs_seconds = 60) { hold(&sums, false); }
T_CASE(contention_processes, "atomic/contention@processes", .seconds = 20, .verbs_seconds = 60) { hold(&sums, true); }

/* Counting by compare-and-swap loses nothing, even if a peer uses fetch-and-add on the same word. */
static void count_up(duo *d, int index) {
    for (long i = 0, n = t_pick(50000, 150); i < n; i++) {
        if (index == 0) {
            fetch_add(d, 8, 1);
            continue;
        }
        uint64_t seen = 0, old;
        while ((old = compare_swap(d, 8, seen, seen + 1)) != seen) {
            CHECKF(old > seen, "the count went from %llu to %llu", (unsigned long long)seen, (unsigned long long)old);
            seen = old;
        }
    }
}
static void judge_count(end *hub) {
    CHECK_EQ(word_at(hub, 8), (uint64_t)t_pick(50000, 150) * CONTENDERS);
}
static const contest counts = {count_up, judge_count};
T_CASE(counter_threads, "atomic/compare-swap-counter@two-devices", .seconds = 20, .verbs_seconds = 60) { hold(&counts, false); }
T_CASE(counter_processes, "atomic/compare-swap-counter@processes", .seconds = 20, .verbs_seconds = 60) { hold(&counts, true); }

/* Exactly one contender claims each word, and all contenders see the same winner. They write the winners that they saw behind the words. */
enum { CLAIMS = 4096, SEEN = 8 * CLAIMS };

static void claim(duo *d, int index) {
    unsigned char *winners = local_bytes(&d->e) + 4096;
    uint64_t own = (uint64_t)index + 1;
    for (long i = 0, n = t_pick(CLAIMS, 200); i < n; i++) {
        uint64_t old = compare_swap(d, 8 * (uint64_t)i, 0, own);
        CHECKF(old <= CONTENDERS, "word %ld held %llu", i, (unsigned long long)old);
        CHECK(old != own);
        winners[i] = (unsigned char)(old ? old : own);
    }
    dp_sge s = local_sge(&d->e, 4096, CLAIMS);
    end_write(&d->e, &s, 1, PEER(d, SEEN + (uint64_t)index * CLAIMS), 1, DP_SIGNALED);
    end_sent(&d->e, 1, DP_OP_WRITE);
}

static void judge_claims(end *hub) {
    for (int c = 0; c < CONTENDERS; c++)
        for (long i = 0, n = t_pick(CLAIMS, 200); i < n; i++) {
            t_note("word %ld as contender %d sees it", i, c);
            CHECK_EQ(end_bytes(hub)[SEEN + c * CLAIMS + i], word_at(hub, 8 * (uint64_t)i));
        }
}
static const contest claims = {claim, judge_claims};
T_CASE(claims_threads, "atomic/one-winner@two-devices", .seconds = 20, .verbs_seconds = 60) { hold(&claims, false); }
T_CASE(claims_processes, "atomic/one-winner@processes", .seconds = 20, .verbs_seconds = 60) { hold(&claims, true); }

/* ---- a reset while atomics are in flight ---- */

/* Each atomic takes effect once or not at all. Completions and old values that have not come when the queue pair is reset never come.
 * The new connection works. */
enum { IN_FLIGHT = 8 };

static void reset_left(duo *d) {
    end *e = &d->e;
    for (int round = 0; round < t_pick(50, 5); round++) {
        uint64_t now[IN_FLIGHT], *old = (uint64_t *)local_bytes(e), kept[IN_FLIGHT];
        t_note("round %d", round);
        memset(old, 0xEE, sizeof kept);
        for (uint64_t k = 0; k < IN_FLIGHT; k++) {
            dp_sge s = local_sge(e, 8 * k, 8);
            CHECK_OK(dp_post_compare_swap(e->qp, &s, PEER(d, 8 * k), 0, k + 1, 0xDEAD, DP_SIGNALED));
        }
        end_reset(e);
        memcpy(kept, old, sizeof kept);
        t_sync(d->sock);
        t_recv(d->sock, now, sizeof now); /* after the other side's reset */
        duo_connect(d);
        for (uint64_t k = 0; k < IN_FLIGHT; k++) {
            CHECKF(now[k] == 0 || now[k] == k + 1, "word %llu is %llu", (unsigned long long)k, (unsigned long long)now[k]);
            CHECK(kept[k] == UNTOUCHED || (kept[k] == 0 && now[k] == k + 1));
            dp_sge s = local_sge(e, 256, 8);
            CHECK_OK(dp_post_compare_swap(e->qp, &s, PEER(d, 8 * k), now[k], 0, k, DP_SIGNALED));
            end_sent(e, k, DP_OP_COMPARE_SWAP); /* and not 0xDEAD */
            CHECK_EQ(old[32], now[k]);
        }
        CHECK(!memcmp(kept, old, sizeof kept));
    }
}

static void reset_right(duo *d) {
    end *e = &d->e;
    for (int round = 0; round < t_pick(50, 5); round++) {
        t_note("round %d", round);
        t_sync(d->sock);
        end_reset(e);
        t_send(d->sock, end_bytes(e), IN_FLIGHT * 8);
        duo_connect(d);
    }
}
DUO_CASE(reset_left, reset_right, "atomic/reset-in-flight", NULL)
