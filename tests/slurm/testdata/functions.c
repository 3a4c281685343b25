/* Functions of the callers, which run while a job takes the node. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

/* args: u64 ms, u64 tag. Sleeps and returns the tag. */
uint32_t nap(void *args, uint32_t size, void *res) {
    (void)size;
    uint64_t in[2];
    memcpy(in, args, sizeof in);
    struct timespec left = {.tv_sec = (time_t)(in[0] / 1000), .tv_nsec = (long)(in[0] % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0) {
    }
    memcpy(res, &in[1], sizeof in[1]);
    return sizeof in[1];
}

/* args: text without a zero. Leaves an orphan process in a new session, with the text in its arguments. */
uint32_t desert(void *args, uint32_t size, void *res) {
    (void)res;
    char mark[128];
    snprintf(mark, sizeof mark, "%.*s", (int)size, (char *)args);
    if (fork() == 0) {
        setsid();
        if (fork() == 0)
            execl("/bin/sh", "sh", "-c", "while :; do sleep 1; done", mark, (char *)NULL);
        _exit(0);
    }
    return 0;
}
