/* Attacks that use processors and memory. */
#include "attack.h"

/* ---- processors ---- */

static struct {
    double until;
    pthread_barrier_t *begin;
    unsigned char cpus[1024];
} crowd;

static void *spins(void *unused) {
    (void)unused;
    unsigned char all[128];
    memset(all, 0xff, sizeof all);
    while (seconds(CLOCK_MONOTONIC) < crowd.until) {
        syscall(SYS_sched_setaffinity, 0, sizeof all, all);
        unsigned cpu = (unsigned)sched_getcpu();
        if (cpu < sizeof crowd.cpus)
            crowd.cpus[cpu] = 1;
        burn(CLOCK_THREAD_CPUTIME_ID, 0.002);
    }
    return NULL;
}

/* As many threads as it may have, on all processors that it can get. arg: threads and ms. Returns "CPU ms, wall ms, processors". */
ATTACK(spreads) {
    int wanted = 0, ms = 0, n = 0;
    if (sscanf(arg, "%d %d", &wanted, &ms) != 2 || wanted > 1000)
        return;
    static pthread_t threads[1000];
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 64 << 10);
    memset(crowd.cpus, 0, sizeof crowd.cpus);
    double wall = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    crowd.until = wall + ms / 1e3;
    while (n < wanted && !pthread_create(&threads[n], &small, spins, NULL))
        n++;
    spins(NULL);
    while (n-- > 0)
        pthread_join(threads[n], NULL);
    int processors = 0;
    for (size_t i = 0; i < sizeof crowd.cpus; i++)
        processors += crowd.cpus[i];
    say(t, "%.0f %.0f %d", (seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu) * 1e3, (seconds(CLOCK_MONOTONIC) - wall) * 1e3, processors);
}

static void *spins_on(void *unused) {
    (void)unused;
    double began = seconds(CLOCK_MONOTONIC); /* it ends by itself */
    while (seconds(CLOCK_MONOTONIC) < began + 20) {
    }
    return NULL;
}

static void does_nothing(int sig) { (void)sig; }

/* Has the kernel continue this process every 10 ms, and a thread spin. */
ATTACK(wakes_itself) {
    (void)arg;
    timer_t timer;
    struct sigevent to = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGCONT};
    struct itimerspec often = {{0, 10000000}, {0, 10000000}};
    pthread_t thread;
    signal(SIGCONT, does_nothing);
    if (timer_create(CLOCK_MONOTONIC, &to, &timer) || timer_settime(timer, 0, &often, NULL))
        return; /* refused */
    if (pthread_create(&thread, NULL, spins_on, NULL))
        say(t, "no thread; ");
    else
        pthread_detach(thread);
}

/* Uses processor time in a grandchild that has no parent, and waits for it. arg: ms. */
ATTACK(burns_in_child) {
    int over[2];
    char c;
    if (pipe(over)) {
        say(t, "pipe: %s; ", strerror(errno));
        return;
    }
    pid_t child = fork();
    if (child == 0) {
        setsid();
        if (fork())
            _exit(0);
        burn(CLOCK_PROCESS_CPUTIME_ID, atoi(arg) / 1e3);
        _exit(write(over[1], "x", 1) != 1);
    }
    close(over[1]);
    waitpid(child, NULL, 0);
    if (child < 0 || read(over[0], &c, 1) != 1)
        say(t, "no child: %s; ", strerror(errno));
    close(over[0]);
}

/* ---- memory ---- */

static int touch(size_t bytes) {
    char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return -1;
    for (size_t i = 0; i < bytes; i += 4096)
        ((volatile char *)p)[i] = 1;
    return 0;
}

/* Private memory. arg: MiB. */
ATTACK(eats_memory) {
    if (!touch((size_t)atoi(arg) << 20))
        say(t, "%s MiB; ", arg);
}

/* The same in children, which are alive at the same time: it ends when the first of them dies. arg: children and MiB of each. */
ATTACK(eats_in_children) {
    int children = 0, mib = 0, ready[2], held = 0;
    if (sscanf(arg, "%d %d", &children, &mib) != 2 || pipe(ready))
        return;
    pid_t pids[64];
    for (int i = 0; i < children && i < 64; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            if (touch((size_t)mib << 20) || write(ready[1], "x", 1) != 1)
                _exit(1);
            for (;;)
                pause();
        }
    }
    close(ready[1]);
    for (struct pollfd in = {ready[0], POLLIN, 0}; held < children && waitpid(-1, NULL, WNOHANG) == 0;) {
        char c;
        if (poll(&in, 1, 10) > 0 && read(ready[0], &c, 1) == 1)
            held++;
    }
    for (int i = 0; i < children && i < 64; i++)
        if (pids[i] > 0) {
            kill(pids[i], SIGKILL);
            waitpid(pids[i], NULL, 0);
        }
    if (held == children)
        say(t, "%d children with %d MiB each; ", held, mib);
}

/* Touches every page of shared memory that it can write, the channel among it. Returns MiB. */
ATTACK(touches_channel) {
    (void)arg;
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    size_t touched = 0;
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        char rights[8] = "";
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) != 3 || strncmp(rights, "rw-s", 4))
            continue;
        for (volatile char *p = (volatile char *)from; p < (volatile char *)to; p += 4096) /* NOLINT */
            *p = *p;
        touched += to - from;
    }
    if (maps)
        fclose(maps);
    say(t, "%zu", touched >> 20);
}
