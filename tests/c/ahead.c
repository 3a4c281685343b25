/* Memory of regions that a second thread prefaults (worker/startup/ahead.h). */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dp_serve.h"
#include "harness.h"
#include "worker/message.h"
#include "worker/startup/startup.h"

#define SIZE ((3ull << 20) + 5000) /* not whole pages, nor whole parts */

static uint64_t page_size(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }
static uint64_t whole(uint64_t size) { return (size + page_size() - 1) & ~(page_size() - 1); }

/* How many pages there have memory. */
static uint64_t resident(const char *at, uint64_t size) {
    uint64_t n = size / page_size(), there = 0;
    unsigned char *in = malloc(n);
    CHECK(in);
    CHECKF(mincore((void *)at, size, in) == 0, "%llu bytes at %p: %s", (unsigned long long)size, (const void *)at, strerror(errno));
    for (uint64_t i = 0; i < n; i++)
        there += in[i] & 1;
    free(in);
    return there;
}

static dp_ahead *mapped(int n) {
    dp_ahead *a = dp_ahead_map(n, SIZE);
    if (!a && madvise(NULL, 0, MADV_POPULATE_WRITE))
        t_skip("needs MADV_POPULATE_WRITE (Linux 5.14)");
    CHECK(a);
    CHECK_EQ(dp_ahead_size(a), whole(SIZE));
    return a;
}

static dp_ahead *begin(int n) {
    dp_cpus cpus;
    dp_cpus_get(&cpus);
    dp_ahead *a = mapped(n);
    dp_ahead_start(a, &cpus);
    return a;
}

/* Memory that is taken is complete when the thread has ended, is zeroed, and has a guard page behind it. Memory that is not taken is freed. */
T_CASE(taken, "ahead/taken-and-left", .providers = T_SHM) {
    uint64_t size = whole(SIZE), page = page_size();
    dp_ahead *a = begin(2);
    CHECK(!dp_ahead_take(a, size + page));
    CHECK(!dp_ahead_take(a, size - page));
    char *one = dp_ahead_take(a, size);
    CHECK(one);
    dp_ahead_end(a);
    CHECK_EQ(resident(one, size), size / page);
    for (uint64_t i = 0; i < size; i++)
        CHECK(!one[i]);
    int ends[2];
    CHECK(pipe(ends) == 0);
    CHECK(write(ends[1], one + size - 1, 1) == 1);
    CHECK(write(ends[1], one + size, 1) == -1 && errno == EFAULT);
    close(ends[0]);
    close(ends[1]);
    CHECK(munmap(one, size + page) == 0); /* the harness checks that the other one is unmapped */

    a = begin(2);
    one = dp_ahead_take(a, size);
    char *two = dp_ahead_take(a, size);
    CHECK(one && two && one != two);
    CHECK(!dp_ahead_take(a, size));
    dp_ahead_end(a);
    CHECK_EQ(resident(one, size) + resident(two, size), 2 * size / page);
    CHECK(munmap(one, size + page) == 0);
    CHECK(munmap(two, size + page) == 0);
}

/* The second thread fills the memory, even if its caller may use only one CPU. */
T_CASE(by_itself, "ahead/fills-by-itself", .providers = T_SHM) {
    dp_cpus all;
    cpu_set_t one;
    dp_cpus_get(&all);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    dp_ahead *a = mapped(1);
    dp_ahead_start(a, &all);
    dp_cpus mine;
    dp_cpus_get(&mine);
    CHECK(!memcmp(&one, &mine, sizeof one));
    while (dp_ahead_left(a)) /* the deadline of the case is the limit */
        sched_yield();
    char *map = dp_ahead_take(a, whole(SIZE));
    CHECK(map);
    dp_ahead_end(a);
    CHECK_EQ(resident(map, whole(SIZE)), whole(SIZE) / page_size());
    CHECK(munmap(map, whole(SIZE) + page_size()) == 0);
}

/* Memory that one process maps and fills is inherited by one other process only. That process fills the rest. */
T_CASE(passed, "ahead/passed-on", .providers = T_SHM) {
    dp_ahead *a = mapped(2);
    uint64_t size = whole(SIZE), page = page_size();
    CHECK(dp_ahead_pass(a, false));
    char *map = dp_ahead_peek(a);
    while (dp_ahead_left(a) > size / 2) /* all of the first, some of the second */
        CHECK(dp_ahead_fill(a));
    pid_t other = fork();
    if (!other)
        _exit(msync(map, size, MS_ASYNC) == 0); /* ENOMEM: nothing there */
    int status;
    CHECK(waitpid(other, &status, 0) == other && WIFEXITED(status));
    CHECKF(WEXITSTATUS(status) == 0, "a process has the memory that it was not for");
    CHECK(dp_ahead_pass(a, true));
    map[7] = 'x';
    other = fork();
    if (!other) {
        char *one = dp_ahead_take(a, size), *two = dp_ahead_take(a, size);
        dp_ahead_end(a);
        bool there = one && two && one[7] == 'x' && resident(one, size) + resident(two, size) == 2 * size / page;
        if (there)
            one[8] = 'y';
        _exit(!there);
    }
    CHECK(waitpid(other, &status, 0) == other && WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK_EQ(map[8], 'y');
    dp_ahead_end(a);
    CHECK(msync(map, size, MS_ASYNC) == -1 && errno == ENOMEM);
}

/* The zygote prepares memory for the sizes that the executor names. It does not read the client's blob. */
T_CASE(from_sizes, "ahead/sizes-not-blob", .providers = T_SHM) {
    dp_spare s = {0};
    dp_channel_config sizes;
    dp_msg_spawn m = {.provider = DP_PROVIDER_VERBS, .n_functions = 1, .blob_len = sizeof m.blob, .channel_depth = 4, .channel_eager = 4096};
    memset(m.blob, 0xff, sizeof m.blob);
    CHECK(dp_msg_pinned_channel(&m, &sizes));
    CHECK(!dp_spare_take(&s, &sizes));
    CHECK_EQ(s.size, dp_server_region(&(dp_channel_config){4, 4096, 0}));
    CHECK(s.size > 4 * 4096);
    uint64_t before = s.size;
    CHECK(!dp_spare_take(&s, NULL)); /* this worker needs no memory, the next one may */
    CHECK_EQ(s.size, before);
    m.n_functions = 0; /* as of a PREPARE */
    CHECK(!dp_msg_pinned_channel(&m, &sizes));
    CHECK(!dp_spare_take(&s, &(dp_channel_config){.depth = 4, .eager = 4096, .bulk = 1ull << 30})); /* more than is made ahead */
    CHECK_EQ(s.size, 0u);
    CHECK(!dp_spare_take(&s, &(dp_channel_config){.eager = 4096})); /* depth 0: unknown */
    CHECK_EQ(s.size, 0u);
}

T_CASE(nothing, "ahead/nothing", .providers = T_SHM) {
    CHECK(!dp_ahead_map(0, SIZE));
    CHECK(!dp_ahead_map(DP_AHEAD_MOST + 1, SIZE));
    CHECK(!dp_ahead_map(1, 0));
    CHECK(!dp_ahead_map(1, UINT64_MAX));
    CHECK(!dp_ahead_map(2, (uint64_t)sysconf(_SC_PHYS_PAGES) * page_size()));
    CHECK(!dp_ahead_take(NULL, SIZE));
    dp_ahead_end(NULL);
}

/* A device makes regions of that size from prepared memory while there is some, and they work like others. */
T_CASE(registered, "ahead/registered", .providers = T_VERBS) {
    dp_error err;
    dp_dev *dev;
    dp_domain *d;
    dp_mem *mem[4];
    CHECK_OK_ERR(dp_dev_open("verbs", NULL, &dev, &err), err);
    CHECK_OK_ERR(dp_domain_create(dev, &d, &err), err);
    dp_ahead *memory = begin(2);
    dp_ahead_lend(memory, dev);
    CHECK_OK_ERR(dp_mem_alloc(d, page_size(), DP_REMOTE_WRITE, &mem[0], &err), err);
    for (int i = 1; i < 4; i++)
        CHECK_OK_ERR(dp_mem_alloc(d, SIZE, DP_REMOTE_WRITE, &mem[i], &err), err);
    CHECK(!dp_ahead_take(memory, whole(SIZE))); /* both are used */
    dp_ahead_lend(NULL, dev);
    dp_ahead_end(memory);
    for (int i = 1; i < 4; i++) {
        CHECK_EQ(mem[i]->size, SIZE);
        CHECK_EQ(resident(mem[i]->addr, whole(SIZE)), whole(SIZE) / page_size());
    }
    for (int i = 0; i < 4; i++)
        dp_mem_free(mem[i]);
    dp_domain_destroy(d);
    dp_dev_close(dev);
}

/* Devices that were listed once are opened without listing again, by name or as the first one. Errors are the same as always. */
T_CASE(preloaded, "device/preloaded", .providers = T_VERBS) {
    CHECK(dp_verbs_preload(NULL) > 0);
    CHECK_EQ(dp_verbs_preload(NULL), dp_verbs_preload(NULL));
    dp_error err;
    dp_dev *dev;
    CHECK_OK_ERR(dp_dev_open("verbs", NULL, &dev, &err), err);
    char name[sizeof dev->name];
    CHECK(sscanf(dev->name, "%63s", name) == 1);
    dp_dev_close(dev);
    CHECK_OK_ERR(dp_dev_open("verbs", &(dp_dev_options){.device = name, .gid_index = -1}, &dev, &err), err);
    dp_dev_close(dev);
    CHECK_STATUS(dp_dev_open("verbs", &(dp_dev_options){.device = "rxe999", .gid_index = -1}, &dev, &err), DP_NO_DEVICE);
    CHECKF(strstr(err.msg, "rxe999") && strstr(err.msg, name), "%s", err.msg);
    CHECK_STATUS(dp_dev_open("verbs", &(dp_dev_options){.device = name, .gid_index = -1, .port = 99}, &dev, &err), DP_NO_DEVICE);
    CHECKF(strstr(err.msg, "no port 99"), "%s", err.msg);
}
