/* Resets what an agent must not inherit from the process that starts it, because the agent outlives that process and serves others. */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agent.h"

/* The least hard limits within which the agent runs. As a Go program it reserves address space at its start and for each thread (1.7 GB
 * in a short run), some 100 MB of it writable. */
static const struct {
    int resource;
    const char *what, *option, *unit;
    rlim_t least, scale;
} needs[] = {
    {RLIMIT_AS, "address space", "-v", "KiB", 2ul << 30, 1024},
    {RLIMIT_DATA, "data", "-d", "KiB", 256ul << 20, 1024},
    {RLIMIT_NOFILE, "open files", "-n", "files", 64, 1},
};

bool rfaas_agent_can_start(char *why, size_t room) {
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        struct rlimit l;
        if (getrlimit(needs[i].resource, &l) || l.rlim_max == RLIM_INFINITY || l.rlim_max >= needs[i].least)
            continue;
        snprintf(why, room, "cannot start an agent: the hard limit of this process for %s is %llu %s, want at least %llu: raise it (ulimit %s), or "
                 "start the agent where the limit is higher, with rfaas-agent --socket PATH and set RFAAS_AGENT_SOCKET to PATH", needs[i].what,
                 (unsigned long long)(l.rlim_max / needs[i].scale), needs[i].unit, (unsigned long long)(needs[i].least / needs[i].scale),
                 needs[i].option);
        return false;
    }
    return true;
}

void rfaas_agent_prepare(void) {
    static const int raised[] = {RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_DATA, RLIMIT_AS, RLIMIT_RSS, RLIMIT_NPROC, RLIMIT_NOFILE, RLIMIT_MEMLOCK,
                                 RLIMIT_SIGPENDING};
    enum { STACK = 8 << 20 }; /* the usual limit for a thread */
    struct rlimit l;
    for (size_t i = 0; i < sizeof raised / sizeof *raised; i++) {
        if (getrlimit(raised[i], &l) || l.rlim_cur == l.rlim_max)
            continue;
        l.rlim_cur = l.rlim_max;
        setrlimit(raised[i], &l);
    }
    if (!getrlimit(RLIMIT_STACK, &l) && l.rlim_cur < STACK) {
        l.rlim_cur = l.rlim_max < STACK ? l.rlim_max : STACK;
        setrlimit(RLIMIT_STACK, &l);
    }
    uint8_t cpus[1024]; /* all CPUs; the kernel reduces them to those of the cpuset */
    memset(cpus, 0xff, sizeof cpus);
    sched_setaffinity(0, sizeof cpus, (cpu_set_t *)cpus);
    syscall(SYS_set_mempolicy, 0, NULL, 0);
    if (sched_getscheduler(0) != SCHED_OTHER)
        sched_setscheduler(0, SCHED_OTHER, &(struct sched_param){0});
    setpriority(PRIO_PROCESS, 0, 0); /* fails if the user may not raise the priority */
}
