/* A worker's limits: processors, memory, and its effect on other processes of the node. */
#include "limit.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "message.h"

static void write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t n = write(fd, text, strlen(text));
    (void)n; /* best effort */
    close(fd);
}

int dp_worker_limit(int resource, uint64_t most) {
    struct rlimit now;
    if (getrlimit((__rlimit_resource_t)resource, &now))
        return errno;
    if (most > now.rlim_max)
        most = now.rlim_max;
    now.rlim_cur = now.rlim_max = most;
    return setrlimit((__rlimit_resource_t)resource, &now) ? errno : 0;
}

void dp_worker_yield_to_others(bool idle) {
    /* A worker is a guest on the node: the kernel should kill it first when memory runs out. */
    write_file("/proc/self/oom_score_adj", "1000");
    /* A core dump of a large process takes seconds in which its client would wait, and fills the node's disk. */
    dp_worker_limit(RLIMIT_CORE, 0);
    if (!idle)
        return;
    /* A waking thread of another program takes the CPU from a thread of SCHED_IDLE at once. The nice value makes the kernel count the
     * time of workers as "nice", so that the executor can tell it from that of other programs (internal/executor/yield.go). */
    struct sched_param none = {0};
    sched_setscheduler(0, SCHED_IDLE, &none);
    setpriority(PRIO_PROCESS, 0, 19);
}

int dp_worker_yield_session(void) {
    if (getsid(0) != getpid())
        return 0; /* this process does not lead its session */
    int fd = open("/proc/self/autogroup", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? 0 : errno;
    int e = 0;
    const struct timespec pause = {0, 20000000};
    for (int i = 0; i < 100; i++) {
        e = write(fd, "19", 2) == 2 ? 0 : errno;
        if (e != EAGAIN)
            break;
        nanosleep(&pause, NULL); /* another process has just set a weight */
    }
    close(fd);
    return e;
}

int dp_worker_pin(const uint8_t *cpus, dp_error *err) {
    int wanted = 0;
    for (int i = 0; i < DP_CPUS_MAX; i++)
        wanted += cpus[i / 8] >> (i % 8) & 1;
    if (!wanted)
        return DP_OK;
    /* The set is larger than DP_CPUS_MAX, because sched_getaffinity fails if the kernel has more CPUs than fit. */
    union {
        unsigned char bytes[8192 / 8];
        unsigned long words[8192 / 8 / sizeof(unsigned long)];
    } set, got;
    memset(&set, 0, sizeof set);
    memset(&got, 0, sizeof got);
    memcpy(set.bytes, cpus, DP_CPUS_MAX / 8);
    /* The executor has already bound a pooled worker. */
    if (syscall(SYS_sched_getaffinity, 0, sizeof got, &got) > 0 && !memcmp(&got, &set, sizeof set))
        return DP_OK;
    long set_failed = syscall(SYS_sched_setaffinity, 0, sizeof set, &set);
    int e = set_failed ? errno : 0;
    syscall(SYS_sched_getaffinity, 0, sizeof got, &got);
    /* The kernel silently ignores CPUs that do not exist or are outside of the cpuset, unless none is left. Find the
     * first such CPU. If the whole call failed, try each CPU alone. */
    for (int i = 0; i < DP_CPUS_MAX; i++) {
        int bit = 1 << (i % 8);
        if (!(cpus[i / 8] & bit) || (!set_failed && got.bytes[i / 8] & bit))
            continue;
        if (set_failed) {
            memset(&set, 0, sizeof set);
            set.bytes[i / 8] = (unsigned char)bit;
            if (syscall(SYS_sched_setaffinity, 0, sizeof set, &set) == 0)
                continue;
            e = errno;
        }
        return dp_fail(err, DP_INVALID, e, "pin worker: CPU %d does not exist, or this executor may not use it", i);
    }
    return set_failed ? dp_fail(err, DP_FATAL, e, "pin worker to %d CPUs", wanted) : DP_OK;
}

/* Until each worker has a memory cgroup, the limit is on private writable memory (RLIMIT_DATA): an allocation beyond it
 * fails. It does not count shared mappings nor what children of the function use. RLIMIT_AS would count what the
 * fabric maps too, and address space that sanitizers and runtimes only reserve. */
int dp_worker_memory(uint64_t *bytes, dp_error *err) {
    unsigned long long pages = 0;
    char text[256] = "";
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    if (got <= 0 || sscanf(text, "%*u %*u %*u %*u %*u %llu", &pages) != 1)
        return dp_fail(err, DP_FATAL, 0, "memory limit: cannot read /proc/self/statm");
    *bytes = pages * (unsigned long long)sysconf(_SC_PAGESIZE);
    return DP_OK;
}

int dp_worker_limit_memory(uint64_t has, uint64_t bytes, dp_error *err) {
    if (!bytes)
        return DP_OK;
    struct rlimit data;
    getrlimit(RLIMIT_DATA, &data);
    rlim_t limit = has + bytes;
    if (limit < has || limit > data.rlim_max)
        limit = data.rlim_max;
    data.rlim_cur = data.rlim_max = limit;
    if (setrlimit(RLIMIT_DATA, &data))
        return dp_fail(err, DP_FATAL, errno, "memory limit of %llu bytes", (unsigned long long)bytes);
    return DP_OK;
}
