/* A client that agent_test.go leads by lines on standard input. It answers each with a line:
 *   init | session | open | renew | release | close | finalize   "STATUS MILLISECONDS TEXT"
 *   open N        opens a lease with N workers or more (workers_min)
 *   calls N       N calls, each checked: "STATUS MILLISECONDS LONGEST_MICROSECONDS MEDIAN_MICROSECONDS TEXT"; the median is that of the first 500
 *   until         calls until the next line comes, as calls; after the first one it prints the line "calling"
 *   who           how each worker started and its process: "STATUS MILLISECONDS START:PID START:PID ..."
 *   own           queue pairs that the lease has made in this process, and whether libibverbs is loaded: "STATUS MILLISECONDS QUEUE_PAIRS:0|1"
 *   spread N      starts a call of N ms on each worker, prints the line "calling", and waits for all: "STATUS MILLISECONDS STATUS STATUS ..."
 *   threads N     as spread, with a thread for each worker, and calls that are repeated
 *   resume PID    makes a call that may be repeated, and continues the stopped agent PID once the library has asked it twice for a new worker
 *   fork          a child of this process opens and uses a lease of its own
 *   flood         threads fill the socket of a stopped agent, and this process forks meanwhile: "STATUS MILLISECONDS TEXT", STATUS 1 if fork() waits
 *   strand        threads fill the socket of a stopped agent for longer than a release may take, and this process releases its lease
 *   join          waits for these threads
 *   fill LIMIT    starts calls until RFAAS_BUSY and gives them up: by a deadline, or with LIMIT "cancel" by cancelling them
 *   again         starts a call, again and again while that is RFAAS_BUSY, for 20 s at most, and waits for it: "STATUS MILLISECONDS TEXT"
 *   table | drop  publishes and withdraws a table (table.c)
 *   look          a call that checks the table
 *   self          "THREADS HANDLERS RSS_KIB" of this process
 * Arguments: the library of functions, the workers of a lease, RFAAS_LEASE_* flags. Control operations take 2 s at most, or CONTROL_SECONDS of the environment. */
#include <dirent.h>
#include <linux/sockios.h>
#include <poll.h>
#include <pthread.h>
#include <rfaas.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static rfaas_session *session;
static rfaas_lease *lease;
static rfaas_function echo;
static uint64_t sequence;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int open_session(void) {
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    const char *seconds = getenv("CONTROL_SECONDS");
    o.timeout_ns = (seconds ? atoi(seconds) : 2) * 1000000000ll;
    return rfaas_session_open(&o, &session);
}

static int open_lease(char **argv, int least) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    o.library = argv[1];
    o.workers = (uint32_t)atoi(argv[2]);
    o.flags = (uint32_t)atoi(argv[3]);
    o.workers_min = (uint32_t)least;
    o.bulk = RFAAS_NO_BULK;
    int status = rfaas_lease_open(session, &o, &lease);
    return status ? status : rfaas_lease_function(lease, "echo", &echo);
}

static int one_call(void) {
    uint64_t in[2] = {++sequence, ~sequence}, out[2] = {0, 0};
    size_t n = 0;
    int status = rfaas_invoke(lease, echo, in, sizeof in, out, sizeof out, &n, NULL);
    if (!status && (n != sizeof in || memcmp(in, out, sizeof in)))
        status = 1; /* a wrong result */
    return status;
}

enum { SEVENS = (1 << 20) + 1 };

static int publish(void) {
    static char bytes[SEVENS];
    const rfaas_piece parts[] = {RFAAS_PIECE(bytes, 1000), {bytes + 1000, 1, SEVENS - 1000, 1}};
    memset(bytes, 7, sizeof bytes);
    int status = rfaas_table_put(session, "sevens", parts, 2);
    memset(bytes, 0, sizeof bytes);
    return status;
}

static int look(void) {
    uint64_t out[2] = {0, 0};
    rfaas_function f;
    int status = rfaas_lease_function(lease, "sevens", &f);
    status = status ? status : rfaas_invoke(lease, f, NULL, 0, out, sizeof out, NULL, NULL);
    return status ? status : out[0] != SEVENS || out[1] != SEVENS;
}

enum { FILL = 1024 };

/* Occupies every slot of the lease by calls that the program has given up. */
static int fill(const char *how) {
    static uint64_t in = 1, out[FILL][2];
    static rfaas_request request[FILL];
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    bool cancels = !strcmp(how, "cancel");
    int n = 0, status = 0;
    if (!cancels)
        o.timeout_ns = 20000000;
    while (n < FILL && !(status = rfaas_iinvoke(lease, echo, &in, sizeof in, out[n], sizeof out[n], &o, &request[n])))
        n++;
    if (status != RFAAS_BUSY)
        return status ? status : 1;
    for (int i = 0; i < n; i++) {
        status = cancels ? rfaas_cancel(&request[i]) : rfaas_wait(&request[i], NULL);
        if (status != (cancels ? RFAAS_OK : RFAAS_DEADLINE))
            return status ? status : 1;
    }
    return rfaas_iinvoke(lease, echo, &in, sizeof in, out[0], sizeof out[0], NULL, &request[0]) == RFAAS_BUSY ? 0 : 1;
}

static int again(void) {
    uint64_t in[2] = {++sequence, ~sequence}, out[2] = {0, 0};
    size_t n = 0;
    rfaas_request request;
    int status;
    for (double end = now() + 20; (status = rfaas_iinvoke(lease, echo, in, sizeof in, out, sizeof out, NULL, &request)) == RFAAS_BUSY && now() < end;)
        usleep(500);
    if (!status)
        status = rfaas_wait(&request, &n);
    return status ? status : n != sizeof in || memcmp(in, out, sizeof in);
}

enum { TIMES = 500 };
static double times[TIMES];

static int compare(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static int a_line_waits(void) {
    struct pollfd p = {.events = POLLIN};
    return poll(&p, 1, 0) > 0;
}

static int who(char *text, size_t room) {
    int n = rfaas_lease_workers(lease), status = n < 0 ? n : 0;
    text[0] = 0;
    for (int i = 0; i < n && !status; i++) {
        rfaas_worker_start s = {.struct_size = sizeof s};
        status = rfaas_worker_origin(lease, i, &s);
        snprintf(text + strlen(text), room - strlen(text), "%s%u:%d", i ? " " : "", s.start, s.pid);
    }
    return status;
}

static int own(char *text, size_t room) {
    char line[512];
    int loaded = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    while (f && fgets(line, sizeof line, f))
        loaded |= strstr(line, "libibverbs") != NULL;
    if (f)
        fclose(f);
    rfaas_statistics s = {.struct_size = sizeof s};
    int status = rfaas_lease_statistics(lease, &s);
    snprintf(text, room, "%llu:%d", (unsigned long long)s.queue_pairs, loaded);
    return status;
}

enum { SPREAD = 8 };
static rfaas_function pause_of_worker;
static uint64_t pause_ns;
static int statuses[SPREAD];

static rfaas_call_options on_worker(int i) {
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    o.worker = i;
    return o;
}

static void *pause_on(void *arg) {
    int i = (int)(intptr_t)arg;
    uint64_t out;
    rfaas_call_options o = on_worker(i);
    o.repeats = 2;
    statuses[i] = rfaas_invoke(lease, pause_of_worker, &pause_ns, sizeof pause_ns, &out, sizeof out, NULL, &o);
    if (statuses[i])
        fprintf(stderr, "worker %d: %s\n", i, rfaas_last_error());
    return NULL;
}

static int spread(long ms, bool threads, char *text, size_t room) {
    pthread_t thread[SPREAD];
    rfaas_request request[SPREAD] = {0};
    static uint64_t out[SPREAD];
    int n = rfaas_lease_workers(lease), status = rfaas_lease_function(lease, "sleep_ns", &pause_of_worker);
    pause_ns = (uint64_t)ms * 1000000;
    for (int i = 0; i < n && i < SPREAD && !status; i++) {
        rfaas_call_options o = on_worker(i);
        if (threads)
            status = pthread_create(&thread[i], NULL, pause_on, (void *)(intptr_t)i);
        else
            status = statuses[i] = rfaas_iinvoke(lease, pause_of_worker, &pause_ns, sizeof pause_ns, &out[i], sizeof *out, &o, &request[i]);
    }
    puts("calling");
    for (int i = 0; i < n && i < SPREAD && !status; i++) {
        if (threads)
            pthread_join(thread[i], NULL);
        else
            statuses[i] = rfaas_wait(&request[i], NULL);
        if (statuses[i] && !threads)
            fprintf(stderr, "worker %d: %s\n", i, rfaas_last_error());
        snprintf(text + strlen(text), room - strlen(text), "%s%d", i ? " " : "", statuses[i]);
    }
    return status;
}

/* Returns the descriptor of this process's connection to its agent, or -1. */
static int agent_socket(void) {
    const char *path = getenv("RFAAS_AGENT_SOCKET");
    for (int fd = 3; fd < 256; fd++) {
        struct sockaddr_un to = {0};
        socklen_t size = sizeof to;
        if (!getpeername(fd, (struct sockaddr *)&to, &size) && to.sun_family == AF_UNIX && path && !strcmp(to.sun_path, path))
            return fd;
    }
    return -1;
}

/* Returns the memory of the messages that the agent has not read, in bytes, or -1. */
static int unread(int fd) {
    int bytes = 0;
    return ioctl(fd, SIOCOUTQ, &bytes) ? -1 : bytes;
}

enum { REQUEST_LEAST = 1024 }; /* bytes. A request for a new worker takes at least this, because it has the offer of a channel; other messages take less */

static int agent_fd, unread_before; /* the socket to the agent, and what the agent had not read before the call */
static int resumed; /* atomic: the agent was continued, or the call has ended */

static void *resume_agent(void *agent) {
    int before = unread_before, asked = 0;
    while (asked < 2 && !__atomic_load_n(&resumed, __ATOMIC_ACQUIRE)) {
        int bytes = unread(agent_fd);
        asked += bytes >= before + REQUEST_LEAST;
        before = bytes;
        sched_yield();
    }
    kill((pid_t)(intptr_t)agent, SIGCONT);
    return NULL;
}

/* Makes a call while the agent is stopped and the worker is dead. */
static int resume(pid_t agent) {
    uint64_t in[2] = {++sequence, ~sequence}, out[2] = {0, 0};
    size_t n = 0;
    pthread_t thread;
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    o.repeats = 1;
    agent_fd = agent_socket();
    unread_before = unread(agent_fd);
    if (pthread_create(&thread, NULL, resume_agent, (void *)(intptr_t)agent))
        return 1;
    int status = rfaas_invoke(lease, echo, in, sizeof in, out, sizeof out, &n, &o);
    __atomic_store_n(&resumed, 1, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    return status ? status : n != sizeof in || memcmp(in, out, sizeof in);
}

/* Returns the child's status, or 1. */
static int forked(char **argv) {
    fflush(stdout);
    pid_t pid = fork();
    if (!pid) {
        int status = rfaas_init(NULL);
        status = status ? status : open_session();
        status = status ? status : open_lease(argv, 0);
        status = status ? status : one_call();
        _exit(status ? 1 : rfaas_finalize() != 0);
    }
    int ended = 0;
    return waitpid(pid, &ended, 0) == pid && !ended ? 0 : 1;
}

enum { FLOOD = 16 };
static pthread_t threads[FLOOD];
static int64_t patience_ns; /* of the threads */
static int ended;           /* atomic: one of the threads has its answer */

static void *ask(void *unused) {
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    rfaas_session *s;
    o.timeout_ns = patience_ns;
    if (!rfaas_session_open(&o, &s))
        rfaas_session_close(s);
    __atomic_store_n(&ended, 1, __ATOMIC_RELEASE);
    return unused;
}

/* The smallest buffer takes a few messages only, so most of the threads wait for room. */
static void fill_socket(int64_t ns) {
    int least = 1, type;
    socklen_t size = sizeof type;
    for (int fd = 3; fd < 1024; fd++)
        if (!getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &type, &size) && type == AF_UNIX)
            setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &least, sizeof least);
    patience_ns = ns;
    ended = 0;
    for (int i = 0; i < FLOOD; i++)
        if (pthread_create(&threads[i], NULL, ask, NULL))
            abort();
}

static int join(void) {
    for (int i = 0; i < FLOOD; i++)
        pthread_join(threads[i], NULL);
    return 0;
}

/* Once a thread waits in poll() for room, and others for that thread. */
static void await_full(void) {
    while (!__atomic_load_n(&ended, __ATOMIC_ACQUIRE)) {
        char wanted[32], path[64], got[32];
        DIR *d = opendir("/proc/self/task");
        snprintf(wanted, sizeof wanted, "%d ", SYS_poll);
        for (struct dirent *e; d && (e = readdir(d));) {
            snprintf(path, sizeof path, "/proc/self/task/%.16s/syscall", e->d_name);
            FILE *f = fopen(path, "r");
            bool polls = f && fgets(got, sizeof got, f) && !strncmp(got, wanted, strlen(wanted));
            if (f)
                fclose(f);
            if (polls) {
                closedir(d);
                return;
            }
        }
        closedir(d);
    }
}

static int strand(void) {
    fill_socket(20000000000);
    await_full();
    rfaas_lease_release(lease); /* fails */
    return 0;
}

static int flood(void) {
    fill_socket(2000000000);
    int forks = 0;
    for (int status; !__atomic_load_n(&ended, __ATOMIC_ACQUIRE); forks++) {
        pid_t pid = fork();
        if (!pid)
            _exit(0);
        if (waitpid(pid, &status, 0) != pid || status)
            abort();
    }
    join();
    return forks < 100; /* a few may come before the buffer is full */
}

static long field(const char *file, const char *name, int base) {
    char line[512];
    long value = -1;
    FILE *f = fopen(file, "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, name, strlen(name)))
            value = strtol(line + strlen(name), NULL, base);
    if (f)
        fclose(f);
    return value;
}

int main(int argc, char **argv) {
    char line[128], workers[1024];
    if (argc != 4)
        return 2;
    setvbuf(stdin, NULL, _IONBF, 0);
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = workers[0] = 0;
        double start = now(), longest = 0;
        int status = 0, called = 0, calling = 0;
        if (!strcmp(line, "init"))
            status = rfaas_init(NULL);
        else if (!strcmp(line, "session"))
            status = open_session();
        else if (!strcmp(line, "open"))
            status = open_lease(argv, 0);
        else if (!strncmp(line, "open ", 5))
            status = open_lease(argv, atoi(line + 5));
        else if (!strcmp(line, "renew"))
            status = rfaas_lease_renew(lease, 0);
        else if (!strcmp(line, "release"))
            status = rfaas_lease_release(lease);
        else if (!strcmp(line, "close"))
            status = rfaas_session_close(session);
        else if (!strcmp(line, "finalize")) {
            status = rfaas_finalize();
            for (int i = 0; i < 1024; i++) /* addresses that the library has freed must not be used again by chance */
                mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        } else if (!strcmp(line, "table"))
            status = publish();
        else if (!strcmp(line, "drop"))
            status = rfaas_table_drop(session, "sevens");
        else if (!strcmp(line, "look"))
            status = look();
        else if (!strncmp(line, "resume ", 7))
            status = resume((pid_t)atoi(line + 7));
        else if (!strcmp(line, "fork"))
            status = forked(argv);
        else if (!strcmp(line, "flood"))
            status = flood();
        else if (!strcmp(line, "strand"))
            status = strand();
        else if (!strcmp(line, "join"))
            status = join();
        else if (!strncmp(line, "fill ", 5))
            status = fill(line + 5);
        else if (!strcmp(line, "again"))
            status = again();
        else if (!strcmp(line, "who"))
            status = who(workers, sizeof workers);
        else if (!strncmp(line, "spread ", 7) || !strncmp(line, "threads ", 8)) {
            status = spread(atol(strchr(line, ' ')), line[0] == 't', workers, sizeof workers);
        } else if (!strcmp(line, "own"))
            status = own(workers, sizeof workers);
        else if (!strcmp(line, "self")) {
            printf("%ld %lx %ld\n", field("/proc/self/status", "Threads:", 10), field("/proc/self/status", "SigCgt:", 16),
                   field("/proc/self/status", "VmRSS:", 10));
            continue;
        } else if (!strncmp(line, "calls ", 6) || !strcmp(line, "until")) {
            long n = line[0] == 'c' ? atol(line + 6) : -1;
            for (; n != 0 && !status && (n > 0 || !a_line_waits()); n -= n > 0) {
                double from = now(), took;
                status = one_call();
                took = now() - from;
                longest = took > longest ? took : longest;
                if (called < TIMES)
                    times[called++] = took;
                if (line[0] == 'u' && !calling++)
                    puts("calling");
            }
        } else {
            return 2;
        }
        printf("%d %.3f ", status, (now() - start) * 1e3);
        if (called) {
            qsort(times, (size_t)called, sizeof *times, compare);
            printf("%.1f %.1f ", longest * 1e6, times[called / 2] * 1e6);
        }
        char *text = strdup(!status ? workers : status < 0 ? rfaas_last_error() : status ? "wrong result" : "");
        for (char *p = text; (p = strchr(p, '\n')); *p = ' ')
            ;
        printf("%s\n", text);
        free(text);
    }
    return 0;
}
