/* Functions for the tests; by index as in testNames. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "rfaas_function.h"

uint32_t echo(void *args, uint32_t size, void *res) {
    memcpy(res, args, size);
    return size;
}

uint32_t crash(void *args, uint32_t size, void *res) {
    (void)args, (void)size, (void)res;
    printf("about to crash\n");
    *(volatile int *)8 = 1;
    return 0;
}

uint32_t aborts(void *args, uint32_t size, void *res) {
    (void)args, (void)size, (void)res;
    abort();
}

uint32_t exits(void *args, uint32_t size, void *res) {
    (void)size, (void)res;
    exit(*(unsigned char *)args);
}

uint32_t hangs(void *args, uint32_t size, void *res) {
    (void)args, (void)size, (void)res;
    for (;;)
        pause();
}

/* Prints 1 MiB and a last line. */
uint32_t chatty(void *args, uint32_t size, void *res) {
    (void)args, (void)size, (void)res;
    for (int i = 0; i < 1 << 14; i++)
        printf("%063d\n", i);
    printf("last line\n");
    return 0;
}

/* Leaves a process behind that holds standard output; returns its pid. */
uint32_t forks(void *args, uint32_t size, void *res) {
    (void)args, (void)size;
    pid_t pid = fork();
    if (pid == 0)
        for (;;)
            pause();
    memcpy(res, &pid, sizeof pid);
    return sizeof pid;
}

/* args: u64 bytes to allocate and touch. */
uint32_t allocates(void *args, uint32_t size, void *res) {
    uint64_t n;
    (void)size, (void)res;
    memcpy(&n, args, sizeof n);
    char *p = malloc(n);
    if (!p)
        return rfaas_fail("no %llu bytes", (unsigned long long)n);
    for (uint64_t i = 0; i < n; i += 4096)
        p[i] = 1;
    free(p);
    return 0;
}

/* u32: capacity, cores, fresh, counter kept in the state, 1 if more state is refused. */
uint32_t extras(void *args, uint32_t size, void *res) {
    (void)args, (void)size;
    int fresh = -1, again = -1;
    uint32_t *count = rfaas_state(64, &fresh);
    if (!count)
        return rfaas_fail("no state");
    ++*count;
    uint32_t out[5] = {rfaas_result_capacity(), rfaas_worker_cores(), (uint32_t)fresh, *count,
                       rfaas_state(65, &again) == NULL && again == 0};
    memcpy(res, out, sizeof out);
    return sizeof out;
}

static void *tid_of_thread(void *arg) {
    pthread_mutex_t m;
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_settype(&a, PTHREAD_MUTEX_ERRORCHECK);
    pthread_mutex_init(&m, &a);
    pthread_mutex_lock(&m);
    *(int *)arg = m.__data.__owner;
    pthread_mutex_unlock(&m);
    return NULL;
}

/* i32: what the C library takes for the thread's id, what the kernel says; pid; the same of a priority-inheritance mutex,
 * whose owner the kernel checks. */
uint32_t thread_id(void *args, uint32_t size, void *res) {
    (void)args, (void)size;
    int out[4] = {0, (int)syscall(SYS_gettid), getpid(), 0};
    tid_of_thread(&out[0]);
    pthread_mutex_t m;
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_setprotocol(&a, PTHREAD_PRIO_INHERIT);
    pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&m, &a);
    if (pthread_mutex_lock(&m) == 0)
        out[3] = m.__data.__lock & 0x3fffffff;
    pthread_mutex_unlock(&m);
    memcpy(res, out, sizeof out);
    return sizeof out;
}

static void *noop(void *arg) { return arg; }

/* Starts and joins threads; raises a handled signal. 1 if all went well. */
static volatile sig_atomic_t caught;
static void on_signal(int sig) { caught = sig; }
uint32_t threads(void *args, uint32_t size, void *res) {
    (void)args, (void)size;
    uint32_t ok = 1;
    for (int i = 0; i < 8; i++) {
        pthread_t t;
        if (pthread_create(&t, NULL, noop, NULL) || pthread_join(t, NULL))
            ok = 0;
    }
    signal(SIGUSR1, on_signal);
    raise(SIGUSR1);
    if (caught != SIGUSR1)
        ok = 0;
    if (system("exit 7") != 7 << 8)
        ok = 0;
    memcpy(res, &ok, sizeof ok);
    return sizeof ok;
}

uint32_t fails(void *args, uint32_t size, void *res) {
    (void)res;
    return rfaas_fail("no such option: %.*s", (int)size, (char *)args);
}

/* CPUs the process may run on, as a mask of the first 64; session; parent; open descriptors; PDEATHSIG. */
uint32_t surroundings(void *args, uint32_t size, void *res) {
    (void)args, (void)size;
    uint64_t mask[1024 / 64] = {0};
    syscall(SYS_sched_getaffinity, 0, sizeof mask, mask);
    int64_t open_fds = 0;
    for (int fd = 0; fd < 1024; fd++)
        open_fds += lseek(fd, 0, SEEK_CUR) >= 0 || syscall(SYS_fcntl, fd, 1 /* F_GETFD */) >= 0;
    sigset_t blocked;
    sigprocmask(SIG_SETMASK, NULL, &blocked);
    int64_t any_blocked = 0;
    for (int sig = 1; sig < 32; sig++)
        any_blocked += sigismember(&blocked, sig);
    int64_t out[5] = {(int64_t)mask[0], getsid(0), getppid(), open_fds, any_blocked};
    memcpy(res, out, sizeof out);
    return sizeof out;
}

/* The errno of setsid() in a child, which leads no process group. */
uint32_t new_session(void *args, uint32_t size, void *res) {
    (void)args, (void)size;
    pid_t child = fork();
    if (child == 0)
        _exit(setsid() < 0 ? errno : 0);
    int status = 0;
    *(uint8_t *)res = waitpid(child, &status, 0) == child && WIFEXITED(status) ? (uint8_t)WEXITSTATUS(status) : UINT8_MAX;
    return 1;
}

static void *spin(void *arg) {
    for (volatile uint64_t *n = arg;; ++*n)
        continue;
    return NULL;
}

/* Arranges that the process runs on when it is stopped: a thread that spins, another process that does, and timers in both that send
 * SIGCONT every 10 ms. args: u8, whether there is to be another process. */
uint32_t runs_on(void *args, uint32_t size, void *res) {
    (void)size, (void)res;
    static volatile uint64_t count;
    pid_t child = *(unsigned char *)args ? fork() : -1;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGCONT};
    struct itimerspec often = {{0, 10000000}, {0, 10000000}};
    timer_t timer;
    pthread_t thread;
    signal(SIGCONT, on_signal);
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) || timer_settime(timer, 0, &often, NULL))
        return rfaas_fail("no timer");
    if (child == 0)
        spin((void *)&count);
    if (pthread_create(&thread, NULL, spin, (void *)&count))
        return rfaas_fail("no thread");
    return 0;
}

static uint64_t ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static volatile uint64_t used_cpus, take_until;
static void *take(void *arg) {
    setpriority(PRIO_PROCESS, 0, 19); /* so that the thread which ends this gets its turn among 512 */
    cpu_set_t all;
    memset(&all, 0xff, sizeof all);
    sched_setaffinity(0, sizeof all, &all);
    while (ns(CLOCK_MONOTONIC) < take_until)
        __atomic_fetch_or(&used_cpus, 1ull << (sched_getcpu() & 63), __ATOMIC_RELAXED);
    return arg;
}

/* args: u32 threads, which spin for 300 ms, each after it has asked for all CPUs. Returns the errno of that, 0 for none, the CPUs on
 * which they ran as a mask, and the process' CPU time and the time that passed, in ns. */
uint32_t takes_cpus(void *args, uint32_t size, void *res) {
    (void)size;
    uint32_t n, started = 0;
    memcpy(&n, args, sizeof n);
    pthread_t thread;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 64 << 10);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    cpu_set_t all;
    memset(&all, 0xff, sizeof all);
    uint64_t out[4] = {sched_setaffinity(0, sizeof all, &all) ? (uint64_t)errno : 0, 0, 0, 0};
    used_cpus = 0;
    uint64_t cpu = ns(CLOCK_PROCESS_CPUTIME_ID), wall = ns(CLOCK_MONOTONIC);
    take_until = wall + 300000000;
    while (started < n && !pthread_create(&thread, &attr, take, NULL))
        started++;
    if (started < n)
        return rfaas_fail("only %u threads", started);
    while (ns(CLOCK_MONOTONIC) < take_until)
        sched_yield();
    out[1] = used_cpus;
    out[2] = ns(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    out[3] = ns(CLOCK_MONOTONIC) - wall;
    memcpy(res, out, sizeof out);
    return sizeof out;
}

/* The shared mappings of the process, as /proc/self/maps shows them. */
uint32_t mappings(void *args, uint32_t size, void *res) {
    (void)args, (void)size;
    char line[512], *to = res;
    uint32_t n = 0, room = rfaas_result_capacity();
    FILE *f = fopen("/proc/self/maps", "r");
    if (!f)
        return rfaas_fail("cannot read /proc/self/maps");
    while (fgets(line, sizeof line, f)) {
        uint32_t len = (uint32_t)strlen(line);
        char *flags = strchr(line, ' ');
        if (flags && flags[4] == 's' && n + len <= room) {
            memcpy(to + n, line, len);
            n += len;
        }
    }
    fclose(f);
    return n;
}
