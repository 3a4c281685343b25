/* The connection to the agent. The library has no thread of its own. A thread that waits for a reply reads the socket for all
 * threads, and a thread that waits for a call looks at the socket from time to time.
 *
 *   send ──▶ ticket ──▶ (a thread reads) ──▶ reply ──▶ take
 *                              └──▶ event ──▶ rfaas_api_take_event, outside the mutex
 *
 * When the agent ends, requests without a reply are marked as lost. The next thread that needs an agent connects to another one, or
 * starts it, and hands sessions and leases over (rfaas_api_reopen). */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent_ticket.h"
#include "client.h"

#define LOOK_TIMEOUT_NS 500000000ll /* to reach or start an agent and get its welcome, in the slow part of a wait */
#define GRACE_NS 1000000000ll          /* added to an operation's time-out, which the agent enforces */
#define QUIET_NS 200000000ll           /* between two attempts to reach an agent from the slow part of a wait */
#define QUIET_TIMES 4 /* the pause is longer by this many times the time of the attempt, because calls wait for it */

rfaas_agent_page *rfaas_agent_shared;
static int page_fd = -1;
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t arrived; /* CLOCK_MONOTONIC; signalled when a ticket is done, or a thread stops reading or reconnecting */
static bool arrived_made;
/* Under mu: */
static int sock = -1;
static bool reading;      /* a thread reads the socket, without mu */
static int sending = -1;  /* a thread sends on this descriptor, without mu, and closes it if it is not `sock` any more */
static bool reopening;     /* a thread connects to an agent */
static pthread_t reopener; /* that thread; only it sends meanwhile */
static int32_t agent_pid;
static uint32_t generation; /* agents that have sent a welcome; written under mu */
static uint32_t connections; /* number of hellos that were sent */
static int64_t retry_at; /* when a thread that waits for a call may try to connect again */
/* Of the thread that reads, without mu: */
static uint8_t *buffer;
static size_t buffered, buffer_size;
static uint32_t events_seen;

/* ---- life ---- */

int rfaas_agent_above_stdio(int fd) {
    if (fd < 0 || fd > 2)
        return fd;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, 3), why = errno;
    close(fd);
    errno = why;
    return high;
}

int rfaas_agent_begin(void) {
    if (!arrived_made) {
        pthread_condattr_t attr;
        pthread_condattr_init(&attr);
        pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        pthread_cond_init(&arrived, &attr);
        pthread_condattr_destroy(&attr);
        arrived_made = true;
    }
    int fd = rfaas_agent_above_stdio(memfd_create("rfaas-agent", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd < 0)
        return errno;
    void *page = MAP_FAILED;
    if (!ftruncate(fd, sizeof(rfaas_agent_page)) && !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        page = mmap(NULL, sizeof(rfaas_agent_page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) {
        int why = errno;
        close(fd);
        return why;
    }
    page_fd = fd;
    rfaas_agent_shared = page;
    return 0;
}

void rfaas_agent_end(void) {
    if (sock >= 0)
        close(sock);
    if (page_fd >= 0)
        close(page_fd);
    sock = page_fd = -1;
    if (rfaas_agent_shared)
        munmap(rfaas_agent_shared, sizeof *rfaas_agent_shared);
    rfaas_agent_shared = NULL;
    rfaas_tickets_forget();
    free(buffer);
    buffer = NULL;
    buffered = buffer_size = 0;
    rfaas_pass_drop();
    rfaas_api_forget_regions();
    retry_at = 0;
}

void rfaas_agent_before_fork(void) { pthread_mutex_lock(&mu); }

void rfaas_agent_after_fork(bool child) {
    if (!child) {
        pthread_mutex_unlock(&mu);
        return;
    }
    pthread_mutex_init(&mu, NULL);
    if (reading)
        buffer = NULL; /* the parent's reader may be enlarging it: it stays */
    if (sending >= 0 && sending != sock)
        close(sending);
    sending = -1;
    arrived_made = reading = reopening = false;
    rfaas_agent_reach_forked();
    rfaas_agent_end();
}

/* ---- waiting ---- */

/* Waits for `arrived`. Returns false after `until`. */
static bool wait_arrived(int64_t until) {
    struct timespec ts = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    return pthread_cond_timedwait(&arrived, &mu, &ts) == 0;
}

/* ---- the end of an agent ---- */

/* Under mu, by the thread that reads or by the one that has sent. While a thread sends, this only shuts the socket down, and that thread
 * closes it. */
static void disconnect(void) {
    if (sock < 0)
        return;
    __atomic_store_n(&rfaas_agent_shared->connection, 0, __ATOMIC_RELEASE);
    if (sock == sending)
        shutdown(sock, SHUT_RDWR); /* that thread stops waiting for room */
    else
        close(sock);
    sock = -1;
    buffered = 0;
    rfaas_pass_drop();
    char text[RFAAS_AGENT_TEXT];
    snprintf(text, sizeof text, "the agent (process %d) has ended", agent_pid);
    rfaas_tickets_lost(text);
    pthread_cond_broadcast(&arrived);
}

/* ---- receiving ---- */

/* Puts a reply into its ticket. */
static void take_reply(const rfaas_agent_header *h, const uint8_t *body, uint32_t size) {
    uint8_t *data = NULL;
    if (h->status == RFAAS_OK && size && !(data = malloc(size)))
        return; /* out of memory: the waiter times out */
    if (data)
        memcpy(data, body, size);
    pthread_mutex_lock(&mu);
    rfaas_ticket_entry *t = rfaas_ticket_find(h->id);
    if (t && !t->done) {
        t->done = true;
        t->reply.generation = generation;
        t->reply.status = h->status;
        t->reply.size = size;
        t->reply.data = data;
        data = NULL;
        if (h->status != RFAAS_OK)
            snprintf(t->reply.text, sizeof t->reply.text, "%.*s", (int)(size < RFAAS_AGENT_TEXT ? size : RFAAS_AGENT_TEXT - 1),
                     (const char *)body);
        pthread_cond_broadcast(&arrived);
    }
    pthread_mutex_unlock(&mu);
    free(data);
}

/* Adds channels to the ticket of the ACQUIRE or RELEASE to which they belong. */
static void take_channels(const rfaas_agent_header *h, const uint8_t *body, uint32_t size) {
    pthread_mutex_lock(&mu);
    rfaas_ticket_entry *t = rfaas_ticket_find(h->id);
    if (t && !t->done && (t->op == RFAAS_AGENT_ACQUIRE || t->op == RFAAS_AGENT_RELEASE))
        rfaas_pass_channels(&t->reply, body, size);
    pthread_mutex_unlock(&mu);
    rfaas_pass_drop_first();
}

static void take_event(const uint8_t *body, uint32_t size) {
    rfaas_agent_event e;
    if (size < sizeof e)
        return;
    memcpy(&e, body, sizeof e);
    e.text[sizeof e.text - 1] = 0;
    if (e.details_size == size - sizeof e)
        rfaas_api_take_event(&e, (const char *)body + sizeof e);
}

/* Handles the complete messages in the buffer. Returns false if one is malformed. */
static bool take_messages(void) {
    size_t at = 0;
    for (rfaas_agent_header h; buffered - at >= sizeof h; at += h.size) {
        memcpy(&h, buffer + at, sizeof h);
        if (h.size < sizeof h || h.size > RFAAS_AGENT_MESSAGE_MAX)
            return false;
        if (buffered - at < h.size)
            break;
        const uint8_t *body = buffer + at + sizeof h;
        uint32_t size = h.size - (uint32_t)sizeof h;
        if (h.id && h.op == RFAAS_AGENT_HAND) {
            take_channels(&h, body, size);
        } else if (h.id) {
            take_reply(&h, body, size);
        } else if (h.op == RFAAS_AGENT_REGION) {
            rfaas_pass_region(body, size);
        } else if (h.op == RFAAS_AGENT_EVENT) {
            take_event(body, size);
            __atomic_store_n(&events_seen, events_seen + 1, __ATOMIC_RELAXED);
        }
    }
    memmove(buffer, buffer + at, buffered - at);
    buffered -= at;
    return true;
}

/* Reads and handles available messages, without waiting. Returns 1 if there were bytes, 0 if there were none, -1 if the connection
 * has to be closed. Without mu. */
static int receive(int fd) {
    if (buffer_size - buffered < 4096) {
        size_t cap = buffer_size ? buffer_size * 2 : 16384;
        uint8_t *more = cap > 4 * RFAAS_AGENT_MESSAGE_MAX ? NULL : realloc(buffer, cap);
        if (!more)
            return -1;
        buffer = more;
        buffer_size = cap;
    }
    ssize_t n = rfaas_pass_receive(fd, buffer + buffered, buffer_size - buffered);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (n <= 0)
        return -1;
    buffered += (size_t)n;
    return take_messages() ? 1 : -1;
}

/* Reads once, and waits for data until `until`. If another thread reads, waits for that thread. Releases mu while it waits. */
static void read_once(int64_t until) {
    if (reading) {
        wait_arrived(until);
        return;
    }
    int fd = sock;
    reading = true;
    pthread_mutex_unlock(&mu);
    int got = receive(fd);
    int64_t left;
    if (got == 0 && (left = until - dp_now_ns()) > 0) {
        bool starved = rfaas_api_starved();
        if (starved && left > RFAAS_STARVED_NS)
            left = RFAAS_STARVED_NS;
        struct timespec ts = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
        struct pollfd p[2] = {{.fd = fd, .events = POLLIN}, {.fd = rfaas_api_attend_fd(), .events = POLLIN}}; /* -1 is ignored */
        int ready = ppoll(p, 2, &ts, NULL);
        if (starved || (ready > 0 && p[1].revents))
            rfaas_api_attend();
        if (ready > 0 && p[0].revents)
            got = receive(fd);
    }
    pthread_mutex_lock(&mu);
    reading = false;
    if (got < 0)
        disconnect();
    pthread_cond_broadcast(&arrived); /* another thread may read now */
}

/* ---- sending ---- */

/* Under mu. */
static void hang_up(void) {
    if (!reading)
        disconnect();
    else if (sock >= 0) {
        __atomic_store_n(&rfaas_agent_shared->connection, 0, __ATOMIC_RELEASE);
        shutdown(sock, SHUT_RDWR); /* the reader closes it */
    }
}

/* Sends a message as soon as no other thread sends. Call it under mu, connected. It releases mu while it waits and sends: the socket of a
 * stopped agent may be full, and calls that look at their tickets must not wait for room in it. If a message cannot be sent in time, the
 * connection ends, so that the agent gives up what its client does not announce on the next one. */
static bool send_message(uint32_t op, rfaas_ticket id, const rfaas_request_parts *p, int64_t until) {
    rfaas_agent_header h = {.size = (uint32_t)(sizeof h + p->body_size + p->tail_size), .op = op, .id = id};
    struct iovec iov[3] = {{&h, sizeof h}, {(void *)p->body, p->body_size}, {(void *)p->tail, p->tail_size}};
    uint32_t connection = connections;
    while (sending >= 0 && connections == connection)
        if (!wait_arrived(until) && dp_now_ns() >= until) {
            if (connections == connection)
                hang_up();
            return false;
        }
    if (sock < 0 || connections != connection)
        return false;
    int fd = sending = sock;
    pthread_mutex_unlock(&mu);
    bool sent = rfaas_pass_send(fd, iov, p->tail_size ? 3 : p->body_size ? 2 : 1, p->fds ? p->fds : &p->fd, p->fds ? p->n_fds : p->fd >= 0, until);
    pthread_mutex_lock(&mu);
    sending = -1;
    if (sock != fd) { /* disconnected meanwhile */
        close(fd);
        sent = false;
    } else if (!sent) {
        hang_up();
    }
    pthread_cond_broadcast(&arrived);
    return sent;
}

/* Sends a request and returns its ticket; 0: not sent. Call it as send_message. */
static rfaas_ticket send_request(uint32_t op, const rfaas_request_parts *p, int64_t until) {
    rfaas_ticket id = rfaas_ticket_new(op);
    if (!id || send_message(op, id, p, until))
        return id;
    rfaas_ticket_drop(id);
    return 0;
}

/* ---- the hello ---- */

/* Sends a hello on fd and waits for the welcome. Under mu. */
static int greet(int fd, int64_t until, char text[RFAAS_AGENT_TEXT]) {
    rfaas_agent_hello hello = {.magic = RFAAS_AGENT_MAGIC, .protocol = RFAAS_AGENT_PROTOCOL};
    size_t size;
    char *env = rfaas_agent_hello_environment(&size);
    if (!env) {
        snprintf(text, RFAAS_AGENT_TEXT, "out of memory");
        close(fd);
        return RFAAS_FATAL;
    }
    if (size > RFAAS_AGENT_MESSAGE_MAX - sizeof(rfaas_agent_header) - sizeof hello) {
        snprintf(text, RFAAS_AGENT_TEXT, "the RFAAS_* variables of this process have %zu bytes, want at most %zu: unset what is not needed", size,
                 RFAAS_AGENT_MESSAGE_MAX - sizeof(rfaas_agent_header) - sizeof hello);
        free(env);
        close(fd);
        return RFAAS_INVALID;
    }
    hello.environment_size = (uint32_t)size;
    snprintf(hello.version, sizeof hello.version, "%s", RFAAS_LIBRARY_VERSION);
    if (!getcwd(hello.directory, sizeof hello.directory))
        hello.directory[0] = 0;
    while (sending >= 0 && dp_now_ns() < until)
        wait_arrived(until); /* a message on the previous connection, which is closed */
    sock = fd;
    buffered = 0;
    agent_pid = 0;
    connections = connections == UINT32_MAX ? 1 : connections + 1;
    hello.connection = connections;
    __atomic_store_n(&rfaas_agent_shared->connection, connections, __ATOMIC_RELEASE);
    __atomic_store_n(&events_seen, __atomic_load_n(&rfaas_agent_shared->events, __ATOMIC_ACQUIRE), __ATOMIC_RELAXED);
    rfaas_request_parts p = {.body = &hello, .body_size = sizeof hello, .tail = env, .tail_size = size, .fd = page_fd};
    rfaas_ticket id = send_request(RFAAS_AGENT_HELLO, &p, until);
    free(env);
    rfaas_reply r = {.status = RFAAS_PEER_GONE, .lost = true};
    bool came = false;
    while (id && !(came = rfaas_ticket_take(id, &r)) && dp_now_ns() < until)
        read_once(until);
    if (came && r.status == RFAAS_OK && r.size >= sizeof(rfaas_agent_welcome)) {
        agent_pid = ((rfaas_agent_welcome *)r.data)->pid;
        __atomic_store_n(&generation, generation + 1, __ATOMIC_RELEASE);
        free(r.data);
        return RFAAS_OK;
    }
    free(r.data);
    int status = came && !r.lost ? r.status : RFAAS_PEER_GONE;
    snprintf(text, RFAAS_AGENT_TEXT, "%s", came ? r.text : "the agent did not answer a hello; check whether it is stopped with `rfaas agent status`");
    if (came && r.status == RFAAS_OK) {
        status = RFAAS_PROTOCOL;
        snprintf(text, RFAAS_AGENT_TEXT, "the agent's welcome has %u bytes", r.size);
    }
    disconnect();
    return status;
}

/* Makes sure that there is a connection to an agent. Releases mu while it waits. */
static int connect_agent(int64_t until, char text[RFAAS_AGENT_TEXT]) {
    int status = RFAAS_OK;
    while (sock < 0 || reopening) {
        if (reopening) {
            if (pthread_equal(reopener, pthread_self())) {
                if (sock >= 0)
                    return RFAAS_OK;
                snprintf(text, RFAAS_AGENT_TEXT, "the agent (process %d) has ended", agent_pid);
                return RFAAS_PEER_GONE; /* the outer call tries again */
            }
            if (!wait_arrived(until) && dp_now_ns() >= until) {
                snprintf(text, RFAAS_AGENT_TEXT, "no connection to the agent in time: another thread is still connecting");
                return RFAAS_PEER_GONE;
            }
            continue;
        }
        reopening = true;
        reopener = pthread_self();
        for (int i = 0; sock < 0; i++) {
            pthread_mutex_unlock(&mu);
            int fd = rfaas_agent_reach(until, &status, text);
            pthread_mutex_lock(&mu);
            if (fd < 0)
                break;
            status = greet(fd, until, text);
            if (status && (status != RFAAS_PEER_GONE || i + 1 >= RFAAS_AGENT_ATTEMPTS || dp_now_ns() >= until))
                break; /* an agent that is about to exit closes the connection (PEER_GONE): start another one */
            if (status)
                continue;
            pthread_mutex_unlock(&mu);
            rfaas_api_reopen();
            pthread_mutex_lock(&mu);
        }
        reopening = false;
        pthread_cond_broadcast(&arrived);
        if (sock < 0) {
            if (!status)
                status = RFAAS_PEER_GONE;
            return status;
        }
    }
    return RFAAS_OK;
}

/* ---- for the library ---- */

rfaas_ticket rfaas_agent_send(const char *what, uint32_t op, const rfaas_request_parts *parts, int64_t until) {
    char text[RFAAS_AGENT_TEXT] = "";
    int status = RFAAS_OK;
    rfaas_ticket id = 0;
    rfaas_api_tell_claims(); /* the request may name one of these leases */
    pthread_mutex_lock(&mu);
    for (int i = 0; i < RFAAS_AGENT_ATTEMPTS && !id && !status; i++) {
        uint32_t connection = 0;
        if (!(status = connect_agent(until, text)) && parts->to && parts->to != generation) {
            status = RFAAS_PEER_GONE;
            snprintf(text, sizeof text, "the agent has ended");
        } else if (!status) {
            connection = connections;
            id = send_request(op, parts, until);
        }
        while (!id && reading && sock >= 0 && connections == connection && dp_now_ns() < until) /* its reader closes it */
            wait_arrived(until);
    }
    pthread_mutex_unlock(&mu);
    if (!id)
        rfaas_api_fail(status ? status : RFAAS_PEER_GONE, 0, "%s: %s", what, *text ? text : "the agent takes no messages; check whether it is stopped with `rfaas agent status`");
    return id;
}

bool rfaas_agent_take(rfaas_ticket id, rfaas_reply *reply) {
    pthread_mutex_lock(&mu);
    bool done = rfaas_ticket_take(id, reply);
    pthread_mutex_unlock(&mu);
    return done;
}

bool rfaas_agent_done(rfaas_ticket id) {
    pthread_mutex_lock(&mu);
    const rfaas_ticket_entry *t = rfaas_ticket_find(id);
    bool done = !t || t->done;
    pthread_mutex_unlock(&mu);
    return done;
}

uint32_t rfaas_agent_generation(void) { return __atomic_load_n(&generation, __ATOMIC_ACQUIRE); }

bool rfaas_agent_connected(void) {
    pthread_mutex_lock(&mu);
    bool connected = sock >= 0;
    pthread_mutex_unlock(&mu);
    return connected;
}

void rfaas_agent_drop(rfaas_ticket id) {
    pthread_mutex_lock(&mu);
    rfaas_ticket_drop(id);
    pthread_mutex_unlock(&mu);
}

bool rfaas_agent_pass(uint32_t op, const rfaas_request_parts *parts) {
    pthread_mutex_lock(&mu);
    bool sent = sock >= 0 && send_message(op, 0, parts, dp_now_ns() + GRACE_NS);
    pthread_mutex_unlock(&mu);
    return sent;
}

bool rfaas_agent_pass_to(uint32_t to, uint32_t op, const rfaas_request_parts *parts) {
    pthread_mutex_lock(&mu);
    bool sent = sock >= 0 && !reopening && generation == to && send_message(op, 0, parts, dp_now_ns() + GRACE_NS);
    pthread_mutex_unlock(&mu);
    return sent;
}

void rfaas_agent_tell(uint32_t op, const void *body, size_t size) {
    rfaas_request_parts p = {.body = body, .body_size = size, .fd = -1};
    rfaas_api_tell_claims();
    rfaas_agent_pass(op, &p);
}

void rfaas_agent_wait(int64_t until) {
    char text[RFAAS_AGENT_TEXT];
    pthread_mutex_lock(&mu);
    if (connect_agent(until, text)) {
        if (dp_now_ns() < until)
            wait_arrived(until < dp_now_ns() + QUIET_NS ? until : dp_now_ns() + QUIET_NS);
    } else {
        read_once(until);
    }
    pthread_mutex_unlock(&mu);
}

void rfaas_agent_look(void) {
    if (pthread_mutex_trylock(&mu))
        return; /* another thread does */
    char text[RFAAS_AGENT_TEXT];
    if (sock >= 0 && !reading && !reopening)
        read_once(0);
    int64_t began;
    if (sock < 0 && !reopening && generation && (began = dp_now_ns()) >= retry_at) {
        retry_at = INT64_MAX; /* other threads that look meanwhile have their calls to make */
        connect_agent(began + LOOK_TIMEOUT_NS, text); /* so that leases are handed over before executors end them */
        int64_t now = dp_now_ns();
        retry_at = now + QUIET_NS + QUIET_TIMES * (now - began);
    }
    pthread_mutex_unlock(&mu);
    rfaas_api_attend();
}

void rfaas_agent_news(void) {
    if (rfaas_agent_shared && __atomic_load_n(&rfaas_agent_shared->events, __ATOMIC_ACQUIRE) != __atomic_load_n(&events_seen, __ATOMIC_RELAXED))
        rfaas_agent_look();
}

/* The agent has not answered in time. If this thread hands over sessions and leases, it does not wait for each of them: it leaves the
 * agent, and tries again later. */
static bool leave_slow(void) {
    pthread_mutex_lock(&mu);
    bool handing = reopening && pthread_equal(reopener, pthread_self());
    if (handing)
        hang_up();
    pthread_mutex_unlock(&mu);
    return handing;
}

int rfaas_agent_ask(const char *what, uint32_t op, const rfaas_request_parts *parts, int64_t timeout_ns, size_t want, rfaas_reply *reply) {
    rfaas_reply own, *r = reply ? reply : &own;
    int64_t until = dp_now_ns() + timeout_ns + GRACE_NS;
    *r = (rfaas_reply){0};
    for (int i = 0; i < RFAAS_AGENT_ATTEMPTS; i++) {
        rfaas_ticket id = rfaas_agent_send(what, op, parts, until);
        if (!id) {
            r->lost = true;
            return rfaas_api_last_status();
        }
        bool came;
        while (!(came = rfaas_agent_take(id, r)) && dp_now_ns() < until) {
            pthread_mutex_lock(&mu);
            const rfaas_ticket_entry *t = rfaas_ticket_find(id);
            if (t && !t->done && sock >= 0)
                read_once(until);
            pthread_mutex_unlock(&mu);
        }
        if (!came) {
            rfaas_agent_drop(id);
            *r = (rfaas_reply){.lost = leave_slow(), .unanswered = true};
            return rfaas_api_fail(RFAAS_PEER_GONE, 0, "%s: the agent (process %d) has not answered for %lld ms; is it stopped? `rfaas agent "
                                  "status` tells", what, agent_pid, (long long)(timeout_ns + GRACE_NS) / 1000000);
        }
        if (!r->lost)
            break;
    }
    int status = r->status;
    if (status)
        rfaas_api_fail(status, 0, "%s", *r->text ? r->text : rfaas_strerror(status));
    else if (r->size < want)
        status = rfaas_api_fail(RFAAS_PROTOCOL, 0, "%s: the agent's reply has %u bytes, want %zu", what, r->size, want);
    if (status || !reply)
        rfaas_reply_free(r);
    return status;
}
