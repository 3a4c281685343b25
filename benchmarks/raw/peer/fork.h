/* Measures the floor of a worker's start. */
#ifndef BENCH_FORK_H
#define BENCH_FORK_H

/* bench_fork prints a line with two medians: the times from fork() until the child has written a word to shared memory, and until the child, which then exits, is
 * reaped. The parent has about as many pages as a zygote, and polls for the word. Returns an exit status. Errors go to standard error. */
int bench_fork(void);

#endif
