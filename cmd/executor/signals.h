#ifndef EXECUTOR_SIGNALS_H
#define EXECUTOR_SIGNALS_H

#include <signal.h>

/* Read end of a pipe that does not block: a byte for each SIGTERM, SIGINT or SIGUSR2 that has come. */
extern int executor_signals;

/* Like execve, but returns the error number. When this program ends, each SIGTERM, SIGINT or SIGUSR2 that it has not read is in the pipe, or pending
 * for the new program. After a failure this program can go on. */
int executor_replace(const char *path, char *const argv[], char *const envp[]);

/* ---- between signals.c and replace.c ---- */

#define EXECUTOR_STOP SIGPWR /* stops a thread; nothing else uses it */

void executor_on_stop(int sig);

/* Adds the signals that are written to the pipe. */
void executor_signals_add(sigset_t *set);

#endif
