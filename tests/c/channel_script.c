/* The channel on devices that misbehave by script (fault.h). Each call must end with its right result or a named error in bounded
 * time, memory that was handed back must not be written, no slot may be lost, and a reset must restore the channel. */
#include <stdlib.h>

#include "dp_channel_impl.h"
#include "ends.h"
#include "fault.h"
#include "served.h"

#define MS 1000000ll

enum { DEPTH = 8, EAGER = 512, BULK = 32 << 10, BIGGEST = 6000, BUFFERS = 3 * DEPTH };

typedef struct script {
    const char *text;
    bool server; /* whether the server's device has the faults; its script restarts with each server */
    dp_wait_mode mode;
} script;

static const script scripts[] = {
    {"post:5=busy,post:7+4=busy", false, DP_WAIT_ADAPTIVE},
    {"post:7=fail", false, DP_WAIT_ADAPTIVE},
    {"post:3+11=fail", false, DP_WAIT_WARM},
    {"post-recv:9=busy", false, DP_WAIT_ADAPTIVE}, /* the first eight receives are posted by the channel */
    {"post-recv:12+20=fail", false, DP_WAIT_ADAPTIVE},
    {"recv:4=drop", false, DP_WAIT_ADAPTIVE},
    {"recv:3+9=drop", false, DP_WAIT_WARM},
    {"recv:2+2=drop", false, DP_WAIT_ADAPTIVE},
    {"recv:4=dup", false, DP_WAIT_ADAPTIVE},
    {"recv:2+3=dup", false, DP_WAIT_HOT},
    {"recv:5=delay(50)", false, DP_WAIT_ADAPTIVE},
    {"recv:1+2=delay(5)", false, DP_WAIT_WARM},
    {"recv:6+30=error", false, DP_WAIT_HOT},
    {"recv:6+30=gone", false, DP_WAIT_WARM},
    {"recv:5+17=drop,recv:8+13=dup,recv:9+5=delay(9),post:11+23=busy,qp:200+150=break", false, DP_WAIT_ADAPTIVE},
    {"qp:30=break", false, DP_WAIT_HOT},
    {"qp:30+60=break", false, DP_WAIT_WARM},
    {"poll:40=fail", false, DP_WAIT_ADAPTIVE},
    {"poll:60+300=fail", false, DP_WAIT_WARM},
    {"arm:3=fail", false, DP_WAIT_WARM},
    {"arm:1+1=fail", false, DP_WAIT_WARM},
    {"wait:1+2=early", false, DP_WAIT_WARM},
    {"wait:3+5=fail", false, DP_WAIT_WARM},
    {"rkey-ptr:1+1=fail", false, DP_WAIT_ADAPTIVE}, /* no mailbox */
    {"rkey-ptr:1+1=fail,recv:3+7=drop,recv:4+7=dup", false, DP_WAIT_ADAPTIVE},
    {"connect:1=fail,post:20=fail,connect:3=fail", false, DP_WAIT_ADAPTIVE},
    {"post:20=fail,reset:1=fail,reset:3=fail", false, DP_WAIT_ADAPTIVE},
    {"post:5=busy,post:7+4=busy", true, DP_WAIT_ADAPTIVE},
    {"post:7=fail", true, DP_WAIT_ADAPTIVE},
    {"post-recv:11=busy", true, DP_WAIT_ADAPTIVE},
    {"post-recv:12=fail", true, DP_WAIT_WARM},
    {"recv:4=drop", true, DP_WAIT_ADAPTIVE},
    {"recv:3+9=drop", true, DP_WAIT_WARM},
    {"recv:4=dup", true, DP_WAIT_ADAPTIVE},
    {"recv:12=dup,recv:9=drop,recv:10=drop", true, DP_WAIT_ADAPTIVE}, /* two are dropped to make room for the receive that is reposted twice */
    {"recv:5=delay(50)", true, DP_WAIT_ADAPTIVE},
    {"recv:1+2=delay(5)", true, DP_WAIT_WARM},
    {"recv:16=error", true, DP_WAIT_HOT},
    {"recv:16=gone", true, DP_WAIT_WARM},
    {"qp:60=break", true, DP_WAIT_HOT},
    {"qp:61=break", true, DP_WAIT_WARM},
    {"poll:400=fail", true, DP_WAIT_ADAPTIVE},
    {"arm:1+1=fail", true, DP_WAIT_WARM},
    {"wait:1+2=early", true, DP_WAIT_WARM},
    {"wait:9=fail", true, DP_WAIT_WARM},
};

/* ---- the worker ---- */

typedef struct worker {
    t_peer peer;
    bool running;
    const char *script; /* or NULL */
    dp_wait_mode mode;
    pthread_mutex_t lock;
    dp_server *server; /* NULL if it has ended; needs the lock */
    int ended;
    fault *device;   /* NULL if it has none; needs the lock */
    uint32_t faults; /* of earlier devices */
} worker;

static void work(int sock, void *arg) {
    worker *w = arg;
    dp_error err = {0};
    dp_dev *dev;
    fault *f = NULL;
    dp_dev_options o = quick_options();
    o.active_side_only = 1;
    uint32_t len;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    t_name("worker");
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &dev, &err), err);
    if (w->script)
        CHECK_OK_ERR(fault_wrap(dev, w->script, &f, &err), err);
    pthread_mutex_lock(&w->lock);
    w->device = f;
    pthread_mutex_unlock(&w->lock);
    dp_server *s = NULL;
    int st = dp_server_create(dev, &(dp_server_config){.mode = w->mode}, blob, len, &s, &err);
    len = sizeof blob;
    if (st == DP_OK) {
        dp_server_set_functions(s, served_functions, FN_COUNT);
        st = dp_server_blob(s, blob, &len, &err);
    }
    w->server = s;
    CHECKF(st == DP_OK || err.msg[0], "no message with %s", dp_status_text(st));
    t_send(sock, &st, sizeof st);
    if (st == DP_OK) {
        t_send(sock, &len, sizeof len);
        t_send(sock, blob, len);
        w->ended = dp_server_run(s);
        pthread_mutex_lock(&w->lock);
        w->server = NULL;
        pthread_mutex_unlock(&w->lock);
        dp_server_destroy(s);
    }
    pthread_mutex_lock(&w->lock);
    w->faults += f ? fault_count(f) : 0;
    w->device = NULL;
    pthread_mutex_unlock(&w->lock);
    dp_dev_close(dev);
}

/* ---- the client ---- */

typedef struct pending {
    bool used;
    uint32_t slot, function, size, capacity, seed;
    uint8_t *out;
} pending;

typedef struct run {
    served s;
    worker w;
    pending calls[DEPTH];
    uint8_t *buffers[BUFFERS]; /* of callers; buffers without a call are filled with HANDED_BACK */
    uint32_t next_buffer;
    uint32_t made, ok, function_errors, deadlines, abandoned, failed, busy, connects;
    uint32_t ends; /* error classes with which servers ended, as bits */
    int64_t longest_ns, until;
} run;

enum { HANDED_BACK = 0xB7 };

static void in_time(const run *r) { CHECKF(dp_now_ns() < r->until, "no progress"); }

static void stop_worker(run *r) {
    if (!r->w.running)
        return;
    pthread_mutex_lock(&r->w.lock);
    if (r->w.server)
        dp_server_stop(r->w.server);
    pthread_mutex_unlock(&r->w.lock);
    t_peer_join(&r->w.peer);
    r->w.running = false;
    r->ends |= 1u << dp_status_class(r->w.ended);
}

/* Returns 0, or the status of the failed connection. */
static int try_connect(run *r) {
    dp_error err = {0};
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    int st;
    stop_worker(r);
    if (r->connects++) {
        st = dp_channel_reset(r->s.ch, &err);
        CHECKF(st == DP_OK || err.msg[0], "no message with %s", dp_status_text(st));
        if (st)
            return st;
        CHECK_EQ(dp_channel_free_slots(r->s.ch), DEPTH);
    }
    t_peer_start(&r->w.peer, false, work, &r->w);
    CHECK_OK_ERR(dp_channel_offer(r->s.ch, blob, &len, &err), err);
    t_send(r->w.peer.sock, &len, sizeof len);
    t_send(r->w.peer.sock, blob, len);
    t_recv(r->w.peer.sock, &st, sizeof st);
    if (st) {
        t_peer_join(&r->w.peer);
        return st;
    }
    r->w.running = true;
    t_recv(r->w.peer.sock, &len, sizeof len);
    t_recv(r->w.peer.sock, blob, len);
    st = dp_channel_connect(r->s.ch, blob, len, &err);
    CHECKF(st == DP_OK || err.msg[0], "no message with %s", dp_status_text(st));
    return st;
}

static void connect_again(run *r) {
    while (try_connect(r))
        in_time(r);
}

/* Checks that every slot is in one list, and that the counters are the lengths of the lists. */
static void check_slots(const run *r) {
    const dp_channel *ch = r->s.ch;
    uint32_t n[SLOT_FENCED + 1] = {0}, used = 0;
    for (uint32_t i = 0; i < DEPTH; i++)
        n[ch->slots[i].state]++;
    for (int i = 0; i < DEPTH; i++)
        used += r->calls[i].used;
    CHECK_EQ(ch->n_free, n[SLOT_FREE]);
    CHECK_EQ(ch->n_busy, n[SLOT_BUSY]);
    CHECK_EQ(ch->n_done, n[SLOT_DONE]);
    CHECK_EQ(ch->n_abandoned, n[SLOT_ABANDONED]);
    CHECK_EQ(n[SLOT_BUSY] + n[SLOT_DONE], used);
    CHECK(!n[SLOT_FENCED] || ch->failed);
}

static void over(run *r, pending *p) {
    (void)r;
    memset(p->out, HANDED_BACK, BIGGEST);
    p->used = false;
}

static bool is_connection_error(int st) { return dp_status_class(st) == 5 || dp_status_class(st) == 7; }

/* A slow function's payload is its time, one to three milliseconds. */
static void fill_payload(const pending *p, uint8_t *in) {
    uint32_t ms = 1 + p->seed % 3;
    if (p->function == FN_SLOW)
        memcpy(in, &ms, sizeof ms);
    else
        fill_pattern(in, p->size, p->seed);
}

static void finish(run *r, pending *p) {
    uint32_t size = 0, len;
    dp_started started = (dp_started)-1;
    int st = dp_channel_finish(r->s.ch, p->slot, p->out, &size, &started);
    int want = p->function == FN_FAIL ? DP_FUNCTION_FAILED : p->function == FN_TOO_LARGE ? DP_RESULT_TOO_LARGE : DP_OK;
    CHECK_EQ(started, DP_MAYBE_EXECUTED);
    if (is_connection_error(st)) {
        r->failed++;
        over(r, p);
        return;
    }
    CHECK_STATUS(st, want);
    if (st == DP_OK) {
        CHECK_EQ(size, p->size);
        uint8_t sent[BIGGEST];
        fill_payload(p, sent);
        CHECK_SAME(p->out, sent, size);
        CHECK_BYTES(p->out + size, HANDED_BACK, BIGGEST - size);
        r->ok++;
    } else {
        if (st == DP_FUNCTION_FAILED) {
            const char *text = dp_channel_message(r->s.ch, &len);
            CHECK_EQ(len, p->size < DP_FAILURE_TEXT ? p->size : DP_FAILURE_TEXT);
            CHECK_PATTERN(text, len, p->seed);
        } else {
            CHECK_EQ(size, p->capacity + 1);
        }
        CHECK_BYTES(p->out, HANDED_BACK, BIGGEST);
        r->function_errors++;
    }
    over(r, p);
}

static int submit(run *r, pending *p) {
    static const uint32_t functions[] = {FN_ECHO, FN_ECHO, FN_ECHO, FN_ECHO, FN_ECHO, FN_SLOW, FN_FAIL, FN_TOO_LARGE};
    uint8_t in[BIGGEST];
    p->function = functions[t_random() % 8];
    uint32_t limit = p->function == FN_FAIL ? EAGER : t_random() % 3 ? 24 : t_random() % 2 ? EAGER : BIGGEST;
    p->size = p->function == FN_SLOW ? 4 : (uint32_t)(t_random() % (limit + 1));
    p->capacity = p->function == FN_TOO_LARGE ? limit - 1 : p->size;
    p->seed = (uint32_t)t_random();
    fill_payload(p, in);
    bool chain = p->function != FN_FAIL && t_random() % 4 == 0; /* FN_ECHO passes the payload on */
    int st = dp_channel_submit(r->s.ch, chain ? DP_CHAIN(FN_ECHO, p->function) : p->function, in, p->size, NULL, p->capacity, &p->slot);
    if (st)
        return st;
    r->made++;
    p->used = true;
    p->out = r->buffers[r->next_buffer++ % BUFFERS]; /* it was handed back long ago */
    CHECK_BYTES(p->out, HANDED_BACK, BIGGEST);
    return DP_OK;
}

/* Continues or ends a call in a random way. */
static void attend(run *r, pending *p) {
    int64_t start = dp_now_ns(), deadline = start + t_pick(10, 30) * MS;
    int how = (int)(t_random() % 8), st;
    if (how == 0) {
        dp_channel_abandon(r->s.ch, p->slot);
        r->abandoned++;
        over(r, p);
        return;
    }
    if (how == 1) {
        for (int i = 0; i < 100; i++)
            if (dp_channel_test(r->s.ch, p->slot) == 1) {
                finish(r, p);
                return;
            }
        return;
    }
    if (how == 2) {
        st = dp_endpoint_wait_any(r->s.ep, deadline);
        CHECKF(st == DP_OK || st == DP_DEADLINE, "wait_any: %s", dp_status_text(st));
    }
    st = dp_channel_wait(r->s.ch, p->slot, deadline);
    int64_t took = dp_now_ns() - start;
    r->longest_ns = took > r->longest_ns ? took : r->longest_ns;
    if (st == DP_OK) {
        finish(r, p);
        return;
    }
    CHECK_STATUS(st, DP_DEADLINE);
    dp_channel_abandon(r->s.ch, p->slot);
    r->deadlines++;
    over(r, p);
}

/* After the channel failed, all its calls have ended. */
static void end_all(run *r) {
    for (int i = 0; i < DEPTH; i++)
        if (r->calls[i].used) {
            CHECK_OK(dp_channel_wait(r->s.ch, r->calls[i].slot, dp_now_ns() + poll_ns()));
            finish(r, &r->calls[i]);
        }
}

static void storm(run *r, uint32_t calls) {
    int64_t stuck = 0;
    for (;;) {
        in_time(r);
        check_slots(r);
        if (dp_channel_status(r->s.ch)) {
            end_all(r);
            check_slots(r);
            connect_again(r);
            stuck = 0;
        }
        pending *p = &r->calls[t_random() % DEPTH];
        if (p->used) {
            attend(r, p);
            continue;
        }
        bool any = false;
        for (int i = 0; i < DEPTH; i++)
            any |= r->calls[i].used;
        if (r->made >= calls) {
            if (!any)
                return;
            continue;
        }
        int st = submit(r, p);
        CHECKF(st == DP_OK || st == DP_BUSY || is_connection_error(st), "submit: %s", dp_status_text(st));
        if (st != DP_BUSY || any) {
            stuck = 0;
            continue;
        }
        /* Abandoned calls whose replies may never arrive hold all slots or the bulk area. The user must reset the channel. */
        r->busy++;
        int64_t now = dp_now_ns();
        stuck = stuck ? stuck : now;
        if (now - stuck > 15 * MS)
            dp_channel_fail(r->s.ch, DP_CONNECTION);
    }
}

/* The number of faults of the workers' devices. */
static uint32_t worker_faults(run *r) {
    pthread_mutex_lock(&r->w.lock);
    uint32_t n = r->w.faults + (r->w.device ? fault_count(r->w.device) : 0);
    pthread_mutex_unlock(&r->w.lock);
    return n;
}

static void run_script(const t_case *c) {
    const script *sc = c->arg;
    dp_error err;
    fault *f;
    run *r = calloc(1, sizeof *r);
    CHECK(r);
    pthread_mutex_init(&r->w.lock, NULL);
    r->w.mode = r->s.mode = sc->mode;
    r->w.script = sc->server ? sc->text : NULL;
    for (int i = 0; i < BUFFERS; i++) {
        r->buffers[i] = malloc(BIGGEST);
        CHECK(r->buffers[i]);
        memset(r->buffers[i], HANDED_BACK, BIGGEST);
    }
    dp_dev_options o = quick_options();
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &r->s.dev, &err), err);
    CHECK_OK_ERR(fault_wrap(r->s.dev, sc->server ? "" : sc->text, &f, &err), err);
    CHECK_OK_ERR(dp_endpoint_create(r->s.dev, 1, DEPTH, sc->mode, &r->s.ep, &err), err);
    CHECK_OK_ERR(dp_channel_create(r->s.ep, &(dp_channel_config){DEPTH, EAGER, BULK}, &r->s.ch, &err), err);
    r->until = dp_now_ns() + (int64_t)((c->seconds - 3) * 1000 * MS * t_time_scale());
    connect_again(r);
    /* A worker that gives up after a number of polls may do so several times before a slow client has an answer. */
    /* The number of a client's polls depends on how many replies each poll finds, so the fault may come late. */
    for (int i = 0; r->ok == 0 || (i < 8 && !sc->server && fault_count(f) == 0); i++)
        storm(r, r->made + (uint32_t)t_pick(300, 60)); /* fails when the case's time is over */
    /* A worker that always finds a request never waits. Give it pauses until the fault happens. */
    while (sc->server && worker_faults(r) == 0) {
        in_time(r);
        t_sleep_ms(3);
        storm(r, r->made + 1);
    }
    CHECK_GE(r->ok, 1);
    printf("    %s: %u good, %u failed by the function, %u past the deadline, %u abandoned, %u ended with the channel, "
           "%u times busy, %u connects, longest wait %.0f ms\n",
           c->name, r->ok, r->function_errors, r->deadlines, r->abandoned, r->failed, r->busy, r->connects,
           (double)r->longest_ns / 1e6);
    /* When the device works again, so does the channel. */
    fault_stop(f);
    r->w.script = NULL;
    dp_channel_fail(r->s.ch, DP_CONNECTION);
    end_all(r);
    dp_endpoint_wait_any(r->s.ep, dp_now_ns());
    connect_again(r);
    for (uint32_t i = 0; i < 30; i++)
        served_echo(&r->s, (i * 211) % BIGGEST, i);
    CHECK_EQ(dp_channel_free_slots(r->s.ch), DEPTH);
    check_slots(r);
    stop_worker(r);
    CHECKF(sc->server || fault_count(f) > 0, "no fault happened");
    CHECKF(r->longest_ns < (int64_t)(2500 * MS * t_time_scale()), "a wait of 30 ms took %.0f ms",
           (double)r->longest_ns / 1e6);
    served_close_client(&r->s);
    for (int i = 0; i < BUFFERS; i++) {
        CHECK_BYTES(r->buffers[i], HANDED_BACK, BIGGEST);
        free(r->buffers[i]);
    }
    free(r);
}

enum { SCRIPTS = sizeof scripts / sizeof *scripts };
static t_case script_cases[SCRIPTS];
static char script_names[SCRIPTS][120];

__attribute__((constructor)) static void register_scripts(void) {
    for (int i = 0; i < SCRIPTS; i++) {
        snprintf(script_names[i], sizeof script_names[i], "script/%s/%s", scripts[i].server ? "server" : "client",
                 scripts[i].text);
        script_cases[i] = (t_case){.name = script_names[i], .run = run_script, .arg = &scripts[i], .seconds = 15};
        t_register(&script_cases[i]);
    }
}

/* ---- one by one ---- */

/* A submit finds a free slot, and at the same time that the channel has failed. A call in that slot would never end. */
T_CASE(last_slot, "script/slot-freed-while-the-channel-fails") {
    static const uint8_t in[400];
    run r = {.w.lock = PTHREAD_MUTEX_INITIALIZER, .until = dp_now_ns() + poll_ns()};
    dp_dev_options o = quick_options();
    dp_error err;
    uint32_t call;
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &r.s.dev, &err), err);
    CHECK_OK_ERR(fault_wrap(r.s.dev, "recv:1=dup", NULL, &err), err);
    CHECK_OK_ERR(dp_endpoint_create(r.s.dev, 1, 1, DP_WAIT_ADAPTIVE, &r.s.ep, &err), err);
    CHECK_OK_ERR(dp_channel_create(r.s.ep, &(dp_channel_config){1, 512, 0}, &r.s.ch, &err), err);
    connect_again(&r);
    CHECK_OK(dp_channel_submit(r.s.ch, FN_ECHO, in, sizeof in, NULL, 8, &call));
    dp_channel_abandon(r.s.ch, call);
    int st;
    while ((st = dp_channel_submit(r.s.ch, FN_ECHO, in, sizeof in, NULL, 8, &call)) == DP_BUSY)
        in_time(&r);
    CHECK_STATUS(st, DP_CONNECTION);
    CHECK_STATUS(dp_channel_status(r.s.ch), DP_CONNECTION);
    stop_worker(&r);
    served_close_client(&r.s);
}

/* ---- the script language ---- */

T_CASE(bad_scripts, "script/bad-scripts") {
    static const char *const bad[] = {"post", "post:", "post:1", "post:1=", "post:0=busy", "post:1=drop", "recv:1=busy",
                                      "recv:1=delay", "recv:1=delay()", "recv:1=delay(0)", "recv:1=delay(3", "post:1=busy,",
                                      "post:1=busy;", ",", "post:1+=busy", "post:-1=busy", "post:1=busy(3)", "pots:1=busy",
                                      "post:99999999999=busy", "qp:1=fail", " post:1=busy"};
    dp_error err;
    dp_dev *dev;
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev, &err), err);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        t_note("%s", bad[i]);
        CHECK_REFUSED(fault_wrap(dev, bad[i], NULL, &err), DP_INVALID, err);
    }
    char many[200] = "arm:1=fail";
    for (int i = 0; i < 16; i++)
        strcat(many, ",arm:1=fail");
    CHECK_REFUSED(fault_wrap(dev, many, NULL, &err), DP_INVALID, err);
    dp_dev_close(dev);
}

/* ---- set-ups that fail half-way ---- */

/* If an object cannot be made, there is a named error, nothing is left behind, and the next attempt can succeed. */
T_CASE(setup, "script/set-up", .seconds = 20) {
    dp_error err;
    uint32_t server_steps = 0, client_steps = 0;
    for (uint32_t n = 1, good = 0; !good; n++) {
        char text[32];
        dp_dev *dev;
        dp_endpoint *ep;
        dp_channel *ch = NULL;
        snprintf(text, sizeof text, "make:%u=fail", n);
        t_note("client, %s", text);
        CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev, &err), err);
        CHECK_OK_ERR(fault_wrap(dev, text, NULL, &err), err);
        int st = dp_endpoint_create(dev, 1, 4, DP_WAIT_ADAPTIVE, &ep, &err);
        if (!st) {
            st = dp_channel_create(ep, &(dp_channel_config){4, 64, 4096}, &ch, &err);
            good = !st;
            if (good)
                dp_channel_destroy(ch);
            dp_endpoint_destroy(ep);
        }
        CHECK(good || strstr(err.msg, "fault script"));
        CHECK_STATUS(st, good ? DP_OK : DP_FATAL);
        client_steps = n;
        dp_dev_close(dev);
    }
    run r = {.w.lock = PTHREAD_MUTEX_INITIALIZER, .until = dp_now_ns() + (int64_t)(15000 * MS * t_time_scale())};
    dp_dev_options o = quick_options();
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &r.s.dev, &err), err);
    CHECK_OK_ERR(dp_endpoint_create(r.s.dev, 1, DEPTH, DP_WAIT_ADAPTIVE, &r.s.ep, &err), err);
    CHECK_OK_ERR(dp_channel_create(r.s.ep, &(dp_channel_config){DEPTH, EAGER, BULK}, &r.s.ch, &err), err);
    for (bool good = false; !good;) {
        char text[32];
        snprintf(text, sizeof text, "make:%u=fail", ++server_steps);
        t_note("server, %s", text);
        r.w.script = text;
        int st = try_connect(&r);
        good = st == DP_OK;
        CHECK_STATUS(st, good ? DP_OK : DP_FATAL);
    }
    served_echo(&r.s, 100, 1);
    static const char *const others[] = {"connect:1=fail", "post-recv:3=fail"};
    for (int i = 0; i < 2; i++) {
        r.w.script = others[i];
        CHECK_STATUS(try_connect(&r), DP_CONNECTION);
    }
    r.w.script = NULL;
    CHECK_OK(try_connect(&r));
    served_echo(&r.s, 100, 1);
    stop_worker(&r);
    served_close_client(&r.s);
    printf("    %u steps of a client, %u of a server\n", client_steps - 1, server_steps - 1);
    CHECK_GE(client_steps, 5);
    CHECK_GE(server_steps, 5);
}
