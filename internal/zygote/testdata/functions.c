/* Functions for the tests; by index as in testNames. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
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
