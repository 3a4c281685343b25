/* Named seeds: the memory of a setup function, which an executor keeps under a name, and from which workers of later leases start.
 *
 *   rfaas_seed_create ──▶ agent ──▶ executor of the lease: executes the function in a process of its own, publishes its memory
 *   rfaas_seed_open   ──▶ agent ──▶ executor that the name ends with: describes it
 *   rfaas_lease_open with `seed`: asks that executor first. The setup function takes the place of the init call, so that workers which cannot start from the
 *   seed make the call themselves (init.c)
 *
 * The agent renews created seeds. When an agent ends, the library asks the next one to renew them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"

#define SEED_MAGIC 0x44454553u

struct rfaas_seed {
    uint32_t magic;
    bool created; /* by this program: releasing the handle withdraws the seed */
    rfaas_session *session; /* NULL: closed */
    rfaas_seed *next;       /* of the session. Under its mutex */
    rfaas_agent_seed about;
    char *function;
    void *payload;
};

static void destroy(rfaas_seed *d) {
    free(d->function);
    free(d->payload);
    free(d);
}

/* ---- the agent's replies ---- */

/* Makes a handle of a reply. NULL: the error is set. */
static rfaas_seed *take_reply(rfaas_session *s, const char *op, const rfaas_reply *r) {
    rfaas_seed *d = calloc(1, sizeof *d);
    if (!d) {
        rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op);
        return NULL;
    }
    memcpy(&d->about, r->data, sizeof d->about);
    rfaas_agent_seed *a = &d->about;
    a->name[sizeof a->name - 1] = a->executor[sizeof a->executor - 1] = a->node[sizeof a->node - 1] = 0;
    const uint8_t *behind = r->data + sizeof *a;
    if (a->payload > RFAAS_AGENT_SEED_MAX || (uint64_t)r->size != sizeof *a + (uint64_t)a->function + a->payload) {
        rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s: malformed reply of the agent: %u bytes, but the function's name has %u bytes and the payload %u", op, r->size, a->function, a->payload);
        destroy(d);
        return NULL;
    }
    d->session = s;
    d->function = strndup((const char *)behind, a->function);
    d->payload = malloc(a->payload ? a->payload : 1);
    if (!d->function || !d->payload) {
        destroy(d);
        rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op);
        return NULL;
    }
    memcpy(d->payload, behind + a->function, a->payload);
    return d;
}

static int put_name(const char *op, const rfaas_session *s, const char *name, rfaas_agent_seed_name *req) {
    *req = (rfaas_agent_seed_name){.session = s->open.session};
    if (!name || !*name)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: name is empty", op);
    if (strlen(name) >= sizeof req->name)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: a name of %zu bytes, want at most %zu: %.80s", op, strlen(name), sizeof req->name - 1, name);
    strcpy(req->name, name);
    return RFAAS_OK;
}

/* Asks the agent about a seed. With `found`, the reply describes the seed. */
static int ask(rfaas_session *s, const char *op, uint32_t what, const char *name, rfaas_seed **found) {
    rfaas_agent_seed_name req;
    rfaas_reply r;
    int status = put_name(op, s, name, &req);
    if (status)
        return status;
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1};
    if ((status = rfaas_agent_ask(op, what, &parts, s->timeout_ns, found ? sizeof(rfaas_agent_seed) : 0, &r)))
        return status;
    if (found)
        *found = take_reply(s, op, &r);
    free(r.data);
    return found && !*found ? rfaas_api_last_status() : RFAAS_OK;
}

/* ---- the list of a session ---- */

static void add(rfaas_session *s, rfaas_seed *d) {
    d->magic = SEED_MAGIC;
    pthread_mutex_lock(&s->mu);
    d->next = s->seeds;
    s->seeds = d;
    pthread_mutex_unlock(&s->mu);
}

static void take_off(rfaas_seed *d) {
    pthread_mutex_lock(&d->session->mu);
    for (rfaas_seed **p = &d->session->seeds; *p; p = &(*p)->next)
        if (*p == d) {
            *p = d->next;
            break;
        }
    pthread_mutex_unlock(&d->session->mu);
}

void rfaas_api_seeds_close(rfaas_session *s) {
    pthread_mutex_lock(&s->mu);
    rfaas_seed *d = s->seeds;
    s->seeds = NULL;
    pthread_mutex_unlock(&s->mu);
    for (; d; d = d->next)
        d->session = NULL;
}

enum { KEPT_MOST = 1024 }; /* the agent keeps no more for a session */

void rfaas_api_seeds_keep(rfaas_session *s) {
    char (*names)[RFAAS_AGENT_SEED_NAME] = NULL;
    uint32_t n = 0;
    pthread_mutex_lock(&s->mu);
    for (const rfaas_seed *d = s->seeds; d; d = d->next)
        n += d->created;
    n = n < KEPT_MOST ? n : KEPT_MOST;
    if (n)
        names = calloc(n, sizeof *names);
    n = names ? n : 0;
    uint32_t i = 0;
    for (const rfaas_seed *d = s->seeds; d && i < n; d = d->next)
        if (d->created)
            memcpy(names[i++], d->about.name, sizeof *names);
    pthread_mutex_unlock(&s->mu);
    for (i = 0; i < n; i++)
        ask(s, "keep a seed", RFAAS_AGENT_SEED_KEEP, names[i], NULL); /* after an error nobody renews the seed, and it ends when its time is over */
    free(names);
}

/* ---- leases ---- */

int rfaas_api_seed_use(rfaas_lease *l, rfaas_lease_options *o, rfaas_seed **found) {
    rfaas_session *s = l->session;
    rfaas_agent_seed_name name;
    *found = NULL;
    if (!o->seed || !*o->seed)
        return RFAAS_OK;
    int status = put_name("lease: seed", s, o->seed, &name);
    if (status)
        return status;
    pthread_mutex_lock(&s->mu);
    const rfaas_seed *d = s->seeds;
    while (d && strcmp(d->about.name, o->seed))
        d = d->next;
    rfaas_seed *copy = d ? calloc(1, sizeof *copy) : NULL;
    if (copy) {
        *copy = *d;
        copy->function = strdup(d->function);
        copy->payload = malloc(d->about.payload ? d->about.payload : 1);
        if (copy->payload)
            memcpy(copy->payload, d->payload, d->about.payload);
    }
    pthread_mutex_unlock(&s->mu);
    if (copy && (!copy->function || !copy->payload)) {
        destroy(copy);
        copy = NULL;
    }
    if (d && !copy)
        return rfaas_api_fail(RFAAS_FATAL, 0, "lease: out of memory for seed %s", o->seed);
    if (!copy && (status = ask(s, "lease: seed", RFAAS_AGENT_SEED_FIND, o->seed, &copy)))
        return status;
    o->init_function = copy->function;
    o->init_payload = copy->about.payload ? copy->payload : NULL;
    o->init_size = copy->about.payload;
    if (!o->memory)
        o->memory = copy->about.memory;
    memcpy(l->seed_name, copy->about.name, sizeof l->seed_name);
    memcpy(l->seed_at, copy->about.executor, sizeof l->seed_at);
    *found = copy;
    return rfaas_api_init_check(o);
}

void rfaas_api_seed_used(rfaas_seed *found) {
    if (found)
        destroy(found);
}

/* ---- the API ---- */

static int check_seed(const rfaas_seed *d, const char *op) {
    int status = rfaas_api_down(op);
    if (status)
        return status;
    if (!d || d->magic != SEED_MAGIC)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s", op, d ? "the seed was released" : "seed is NULL");
    return d->session ? rfaas_api_bad_session(d->session, op) : rfaas_api_fail(RFAAS_INVALID, 0, "%s: the session of the seed is closed", op);
}

static int check_create(const rfaas_lease *l, const char *setup, const void *in, size_t size, const rfaas_seed_options *o, rfaas_seed **seed) {
    static const char op[] = "create a seed";
    rfaas_function f;
    if (!seed || !setup)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s is NULL", op, seed ? "setup" : "seed");
    if (!in && size)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: in is NULL with size %zu", op, size);
    if (size > RFAAS_AGENT_SEED_MAX)
        return rfaas_api_fail(RFAAS_TOO_LARGE, 0, "%s: payload of %zu bytes for %s: a seed takes at most %u; let the function read a file of the bundle", op, size, setup,
                              RFAAS_AGENT_SEED_MAX);
    if (o->ttl_ns < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: ttl_ns %lld is negative", op, (long long)o->ttl_ns);
    if (!o->name || !*o->name || strlen(o->name) >= sizeof((rfaas_agent_seed_create *)0)->name)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: options.name is \"%.80s\", want 1 to %zu characters", op, o->name ? o->name : "",
                              sizeof((rfaas_agent_seed_create *)0)->name - 1);
    return rfaas_lease_function(l, setup, &f);
}

int rfaas_seed_create(rfaas_lease *l, const char *setup, const void *in, size_t size, const rfaas_seed_options *options, rfaas_seed **seed) {
    static const char op[] = "create a seed";
    rfaas_seed_options o = RFAAS_SEED_OPTIONS_INIT;
    int status = usable(l) ? RFAAS_OK : rfaas_api_bad_lease(l, op);
    if (status)
        return status;
    if (!options || options->struct_size < offsetof(rfaas_seed_options, ttl_ns) || options->struct_size > 4096)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %s", op, options ? "options.struct_size is wrong; start from RFAAS_SEED_OPTIONS_INIT" : "options is NULL");
    memcpy(&o, options, options->struct_size < sizeof o ? options->struct_size : sizeof o);
    if ((status = check_create(l, setup, in, size, &o, seed)))
        return status;
    pthread_mutex_lock(&l->mu); /* another thread may be moving the lease, or releasing it */
    rfaas_session *s = l->session;
    uint64_t key = l->grant && l->grant->ep ? l->grant->key : 0;
    int64_t limit = s ? rfaas_api_init_patience(l) : 0;
    pthread_mutex_unlock(&l->mu);
    if (!key)
        return rfaas_api_fail(RFAAS_UNSUPPORTED, 0, "%s: the lease has no workers; its calls run in this process", op);
    rfaas_agent_seed_create req = {.key = key, .limit_ns = limit, .ttl_ns = o.ttl_ns, .function = (uint32_t)strlen(setup), .payload = (uint32_t)size};
    strcpy(req.name, o.name);
    char *tail = malloc(req.function + size + 1);
    if (!tail)
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op);
    memcpy(tail, setup, req.function);
    if (size)
        memcpy(tail + req.function, in, size);
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .tail = tail, .tail_size = req.function + size, .fd = -1};
    rfaas_reply r;
    status = rfaas_agent_ask(op, RFAAS_AGENT_SEED_CREATE, &parts, s->timeout_ns + limit, sizeof(rfaas_agent_seed), &r);
    free(tail);
    if (status)
        return status;
    rfaas_seed *d = take_reply(s, op, &r);
    free(r.data);
    if (!d)
        return rfaas_api_last_status();
    d->created = true;
    add(s, d);
    *seed = d;
    return RFAAS_OK;
}

int rfaas_seed_open(rfaas_session *s, const char *name, rfaas_seed **seed) {
    static const char op[] = "open a seed";
    rfaas_seed *d;
    int status = rfaas_api_bad_session(s, op);
    if (!status && !seed)
        status = rfaas_api_fail(RFAAS_INVALID, 0, "%s: seed is NULL", op);
    if (status || (status = ask(s, op, RFAAS_AGENT_SEED_FIND, name, &d)))
        return status;
    add(s, d);
    *seed = d;
    return RFAAS_OK;
}

const char *rfaas_seed_name(const rfaas_seed *d) { return check_seed(d, "seed name") ? NULL : d->about.name; }

int rfaas_seed_info(const rfaas_seed *d, rfaas_seed_details *details) {
    static const char op[] = "seed info";
    rfaas_seed *now;
    int status = check_seed(d, op);
    if (status)
        return status;
    if (!details)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: details is NULL", op);
    if (details->struct_size < offsetof(rfaas_seed_details, bytes) || details->struct_size > 1 << 16)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: details.struct_size is %u, want sizeof(rfaas_seed_details)", op, details->struct_size);
    if ((status = ask(d->session, op, RFAAS_AGENT_SEED_FIND, d->about.name, &now)))
        return status;
    const rfaas_agent_seed *a = &now->about;
    rfaas_seed_details i = {.struct_size = details->struct_size, .version = a->version, .bytes = a->bytes, .memory = a->memory, .children = a->children, .left_ns = a->left_ns,
                            .load_ns = a->load_ns, .setup_ns = a->setup_ns, .capture_ns = a->capture_ns};
    memcpy(i.executor, a->executor, sizeof i.executor);
    memcpy(i.node, a->node, sizeof i.node);
    snprintf(i.setup, sizeof i.setup, "%s", now->function);
    size_t behind = strlen(a->node) + 1;
    snprintf(i.warning, sizeof i.warning, "%.*s", (int)(sizeof a->node - behind), a->node + behind);
    destroy(now);
    memcpy(details, &i, details->struct_size < sizeof i ? details->struct_size : sizeof i);
    return RFAAS_OK;
}

int rfaas_seed_release(rfaas_seed *d) {
    static const char op[] = "release a seed";
    int status = d && d->magic == SEED_MAGIC && !d->session ? RFAAS_OK : check_seed(d, op);
    if (status)
        return status;
    if (d->session)
        take_off(d);
    if (d->session && d->created)
        status = ask(d->session, op, RFAAS_AGENT_SEED_RELEASE, d->about.name, NULL);
    d->magic = 0;
    destroy(d);
    return RFAAS_CLASS(status) == RFAAS_CLASS_LEASE ? RFAAS_OK : status; /* it has ended already */
}
