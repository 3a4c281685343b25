/* Prints "STATE ADDRESS" for each change of an executor. Polls until the first change, then uses a callback, until one executor has left after
 * another one was silent. */
#include "check.h"

static const char *const states[] = {"?", "open", "draining", "silent", "left"};
static char silent[256];

static int say(const rfaas_change *c, void *arg) {
    CHECK(arg == silent && c->state >= 1 && c->state <= 4 && c->node[0]);
    printf("%s %s\n", states[c->state <= 4 ? c->state : 0], c->executor);
    fflush(stdout);
    if (c->state == RFAAS_EXECUTOR_SILENT && !silent[0])
        strcpy(silent, c->executor);
    return c->state == RFAAS_EXECUTOR_LEFT && silent[0] && strcmp(c->executor, silent) ? 42 : 0;
}

void everything(void) {
    rfaas_change c[2];
    size_t n = 99;
    double end = now() + 30;
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    FAILS(rfaas_session_changes(NULL, c, 2, &n), RFAAS_INVALID, "session is NULL");
    FAILS(rfaas_session_changes(session, NULL, 2, &n), RFAAS_INVALID, "changes is NULL");
    FAILS(rfaas_session_changes(session, c, 0, &n), RFAAS_INVALID, "capacity is 0");
    FAILS(rfaas_session_changes(session, c, 2, NULL), RFAAS_INVALID, "count is NULL");
    FAILS(rfaas_session_watch(session, NULL, NULL, 0), RFAAS_INVALID, "function is NULL");
    FAILS(rfaas_session_watch(session, say, NULL, -1), RFAAS_INVALID, "timeout_ns is negative");
    do {
        OK(rfaas_session_changes(session, c, 1, &n));
        CHECK(n <= 1);
    } while ((n == 0 || c[0].state != RFAAS_EXECUTOR_OPEN) && now() < end); /* one on a slow machine may be silent for a moment */
    CHECK(n == 1 && c[0].state == RFAAS_EXECUTOR_OPEN);
    say(&c[0], silent);
    double began = now();
    CHECK(rfaas_session_watch(session, say, silent, 30000000) == RFAAS_DEADLINE && now() - began > 0.029);
    CHECK(rfaas_session_watch(session, say, silent, INT64_MAX) == 42); /* the program is killed if it goes on */
    OK(rfaas_session_close(session));
    FAILS(rfaas_session_changes(session, c, 2, &n), RFAAS_INVALID, "closed");
    OK(rfaas_finalize());
}
