/* Tables: read-only data of the client, which all workers of a node map. */
#ifndef RFAAS_WORKER_TABLE_H
#define RFAAS_WORKER_TABLE_H

#include "dp_status.h"
#include "message.h"

/* dp_table_map maps a table for rfaas_table. One thread at a time. The caller keeps fd. */
int dp_table_map(const dp_msg_table *t, int fd, dp_error *err);

#endif
