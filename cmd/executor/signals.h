#ifndef EXECUTOR_SIGNALS_H
#define EXECUTOR_SIGNALS_H

#include <signal.h>

/* Read end of a pipe that does not block: a byte for each SIGTERM, SIGINT or SIGUSR2 that has come. */
extern int executor_signals;

#endif
