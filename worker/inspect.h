/* Reading a library for the executor without running it. */
#ifndef RFAAS_WORKER_INSPECT_H
#define RFAAS_WORKER_INSPECT_H

#include <stdint.h>

#include "message.h"

/* dp_worker_inspect carries out an INSPECT or SYMBOLS and ends the process. memory is the process's private writable
 * memory in bytes. It runs no code of the library: it limits the process, gives up all system calls except those
 * that send the answer, and only then reads the file. */
_Noreturn void dp_worker_inspect(int sock, uint32_t id, const dp_msg_task *task, const int *fds, uint64_t memory);

#endif
