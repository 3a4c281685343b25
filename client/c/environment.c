/* The variables of this process that are passed to the agent: with a hello, and when the agent is started. */
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

#include "agent.h"

char **rfaas_agent_environment(void) {
    static char *none[] = {NULL};
    return environ && !getauxval(AT_SECURE) ? environ : none;
}

static bool begins_with(const char *variable, const char *const names[]) {
    for (; *names; names++)
        if (!strncmp(variable, *names, strlen(*names)))
            return true;
    return false;
}

/* The variables that the control plane reads. */
static bool of_interest(const char *variable) {
    static const char *const names[] = {"RFAAS_", "HOME=", "XDG_RUNTIME_DIR=", "USER=", "LOGNAME=", "LD_LIBRARY_PATH=", NULL};
    return begins_with(variable, names);
}

char *rfaas_agent_hello_environment(size_t *size) {
    char **variables = rfaas_agent_environment();
    *size = 0;
    for (char **v = variables; *v; v++)
        if (of_interest(*v))
            *size += strlen(*v) + 1;
    char *all = malloc(*size + 1), *at = all;
    for (char **v = variables; all && *v; v++)
        if (of_interest(*v))
            at = stpcpy(at, *v) + 1;
    return all;
}

/* Variables of the loader, of malloc and of the Go runtime. LD_LIBRARY_PATH stays, because the agent may need it to find libibverbs. */
static bool changes_a_runtime(const char *variable) {
    static const char *const names[] = {"LD_", "MALLOC_", "GLIBC_TUNABLES=", "GOGC=", "GOMEMLIMIT=", "GOMAXPROCS=", "GODEBUG=", "GOTRACEBACK=", NULL};
    return begins_with(variable, names) && strncmp(variable, "LD_LIBRARY_PATH=", sizeof "LD_LIBRARY_PATH=" - 1);
}

char **rfaas_agent_inherited(void) {
    char **own = rfaas_agent_environment();
    size_t n = 0, kept = 0;
    while (own[n])
        n++;
    char **all = malloc((n + 1) * sizeof *all);
    for (size_t i = 0; all && i < n && own[i]; i++)
        if (!changes_a_runtime(own[i]))
            all[kept++] = own[i];
    if (all)
        all[kept] = NULL;
    return all;
}
