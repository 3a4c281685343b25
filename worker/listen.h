/* The monitor thread of a serving worker. */
#ifndef RFAAS_WORKER_LISTEN_H
#define RFAAS_WORKER_LISTEN_H

#include "dp_serve.h"
#include "page.h"

typedef struct dp_listener {
    uint32_t id; /* of the worker */
    int sock;    /* to the executor */
    dp_dev *dev;
    dp_server *server;
    dp_worker_page *page;
} dp_listener;

/* dp_listener_start starts the thread, which runs until the process ends. l stays valid for as long. */
int dp_listener_start(dp_listener *l, dp_error *err);

#endif
