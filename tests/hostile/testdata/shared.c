/* Attacks through what a worker shares with its executor and its client. */
#include "attack.h"

/* The page that the worker shares with the executor (worker/page.h); NULL if it is not in sight. */
static void *shared_page(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    void *page = NULL;
    while (maps && !page && fgets(line, sizeof line, maps)) {
        unsigned long from;
        char rights[8] = "";
        if (sscanf(line, "%lx-%*x %7s", &from, rights) == 2 && rights[1] == 'w' && strstr(line, "rfaas-page"))
            page = (void *)from; /* NOLINT */
    }
    if (maps)
        fclose(maps);
    return page;
}

/* Writes lines of a log into its report of death and to its output, and ends. arg: a line. */
ATTACK(forges_death) {
    char *page = shared_page();
    char said[512];
    const struct {
        uint32_t state;
        int32_t signal, code, sys_errno;
        uint64_t address;
        uint32_t sender, flags, text_len, pad;
    } death = {0x44454145, 11, 1, 0, 8, 0, 0, 400, 0};
    (void)t;
    memset(said, 0, sizeof said);
    snprintf(said, sizeof said, "crash+0x1\n%.100s\n\r%.100s\033[2J\033]0;x\007\n", arg, arg);
    printf("%s", said);
    fflush(stdout);
    if (page) {
        memcpy(page + 256 + sizeof death, said, 400);
        memcpy(page + 256, &death, sizeof death);
    }
    kill(getpid(), SIGKILL);
}

/* Writes into the page that a new call has just begun, again and again, and does not return. */
ATTACK(forges_page) {
    (void)arg;
    volatile uint64_t *page = shared_page();
    if (!page) {
        say(t, "no page in sight; ");
        return;
    }
    double end = seconds(CLOCK_MONOTONIC) + 60;
    for (uint64_t call = page[0] >> 16; seconds(CLOCK_MONOTONIC) < end; call++) {
        page[1] = call; /* calls that are over */
        page[0] = (call + 1) << 16 | (page[0] & 0xffff);
    }
    say(t, "a call of 60 s; ");
}

/* Prints for a while. arg: ms. Returns MiB. */
ATTACK(prints) {
    static char block[1 << 16];
    memset(block, 'x', sizeof block);
    double end = seconds(CLOCK_MONOTONIC) + atoi(arg) / 1e3;
    unsigned long long n = 0;
    int flags = fcntl(1, F_GETFL);
    fcntl(1, F_SETFL, flags | O_NONBLOCK);
    while (seconds(CLOCK_MONOTONIC) < end) {
        ssize_t did = write(1, block, sizeof block);
        if (did > 0)
            n += (unsigned long long)did;
    }
    fcntl(1, F_SETFL, flags);
    say(t, "%llu", n >> 20);
}

ATTACK(closes_all) {
    (void)arg;
    (void)t;
    syscall(SYS_close_range, 0, ~0u, 0);
}

/* Fills all shared memory with garbage, its queues among it. */
ATTACK(overwrites_queues) {
    (void)arg;
    (void)t;
    int fd = open("/proc/self/maps", O_RDONLY);
    static char all[1 << 16];
    ssize_t n, have = 0;
    while ((n = read(fd, all + have, sizeof all - 1 - (size_t)have)) > 0)
        have += n;
    close(fd);
    for (char *save, *line = strtok_r(all, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        unsigned long from, to;
        char rights[8] = "";
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) == 3 && !strncmp(rights, "rw-s", 4))
            memset((void *)from, 0xa5, to - from); /* NOLINT */
    }
}

/* Returns its argument. */
ATTACK(answers) { say(t, "%s", arg); }
