/* Measures the floor of a worker's start. */
#ifndef BENCH_FORK_H
#define BENCH_FORK_H

/* bench_fork prints a line with two medians: the time from fork() to a word that the child has written to shared memory, and until the child, which then exits, is
 * reaped. This process has about as many pages as a zygote, and polls for the word. Returns an exit status. The error is on standard error. */
int bench_fork(void);

#endif
