/* A prepared worker that reads a library instead of running it: which functions it exports, or which functions are at
 * some offsets.
 *
 * A library is arbitrary bytes from a tenant, and the executor may be root. So this separate process reads its ELF
 * tables. It runs in the sandbox of a worker, with limits on memory and processor time, and can make no system calls
 * except to send the answer. The answer is in a memfd of fixed size, which the executor reads after this
 * process is dead. */
#include "inspect.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <gnu/libc-version.h>
#endif

#include "limit.h"
#include "sandbox.h"

/* Returns the version of the node's C library, which workers share with the libraries that they load. NULL: unknown. */
static const char *own_glibc(void) {
#ifdef __GLIBC__
    return gnu_get_libc_version();
#else
    return NULL;
#endif
}

typedef struct inspection {
    int sock;
    uint32_t id;
    const void *file;
    uint64_t size;
    char *out;
    dp_elf_work *work; /* of INSPECT */
} inspection;

_Noreturn static void refuse_reading(const inspection *i, int status, const char *text) {
    dp_msg_send_failure(i->sock, DP_MSG_FAILED, i->id, status, text);
    _exit(DP_EXIT_STOPPED); /* a refusal is a regular answer */
}

static void *map(const inspection *i, int fd, uint64_t needed, int protection, int flags, uint64_t *size) {
    struct stat sb;
    if (fstat(fd, &sb) || (uint64_t)sb.st_size < needed)
        refuse_reading(i, DP_INVALID, "inspect: a descriptor is not a file, or the file is too small");
    *size = (uint64_t)sb.st_size;
    void *at = mmap(NULL, *size, protection, flags, fd, 0);
    if (at == MAP_FAILED) {
        dp_error err;
        dp_fail(&err, DP_FATAL, errno, "inspect: map %llu bytes", (unsigned long long)*size);
        refuse_reading(i, DP_FATAL, err.msg);
    }
    return at;
}

static void limit_reading(const inspection *i, const dp_msg_inspect *m, uint64_t memory) {
    dp_error err = {0};
    if (dp_worker_limit_memory(memory, m->memory_limit, &err) != DP_OK)
        refuse_reading(i, err.status, err.msg);
    struct rlimit cpu = {m->cpu_seconds, m->cpu_seconds};
    if (setrlimit(RLIMIT_CPU, &cpu)) {
        dp_fail(&err, DP_FATAL, errno, "inspect: limit processor time to %u s", m->cpu_seconds);
        refuse_reading(i, DP_FATAL, err.msg);
    }
}

/* The last step before the library's first byte is read. */
static void seal_reader(const inspection *i) {
    int e = dp_sandbox_filter_reader();
    if (!e)
        return;
    dp_error err;
    dp_fail(&err, DP_FATAL, e, "inspect: filter of system calls");
    refuse_reading(i, DP_FATAL, err.msg);
}

_Noreturn void dp_worker_inspect(int sock, uint32_t id, const dp_msg_task *task, const int *fds, uint64_t memory) {
    const dp_msg_inspect *m = &task->inspect;
    inspection i = {.sock = sock, .id = id};
    const char *glibc = own_glibc();
    uint64_t room = 0;
    uint32_t answer[2] = {0, 0};
    limit_reading(&i, m, memory);
    i.file = map(&i, fds[0], 1, PROT_READ, MAP_PRIVATE, &i.size);
    i.out = map(&i, fds[1], m->n_offsets ? (uint64_t)m->n_offsets * DP_ELF_LINE_MAX : DP_ELF_NAMES_MAX, PROT_READ | PROT_WRITE, MAP_SHARED,
                &room);
    i.work = m->n_offsets ? NULL : calloc(1, sizeof *i.work);
    if (!m->n_offsets && !i.work)
        refuse_reading(&i, DP_FATAL, "inspect: no memory for the names of functions");
    seal_reader(&i);
    if (m->n_offsets) {
        answer[0] = m->n_offsets;
        answer[1] = dp_elf_symbols(i.file, i.size, m->offsets, m->n_offsets, i.out);
    } else {
        dp_error err = {0};
        int st = dp_elf_functions(i.file, i.size, glibc, i.work, i.out, &answer[0], &answer[1], &err);
        if (st != DP_OK)
            refuse_reading(&i, st, err.msg);
    }
    dp_msg_send(sock, DP_MSG_INSPECTED, id, answer, sizeof answer, -1);
    _exit(DP_EXIT_STOPPED);
}
