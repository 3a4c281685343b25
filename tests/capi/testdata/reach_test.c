/* Opens a session and prints the status and the error of it. Arguments: the executor's address, and how many processes do so at once
 * (default: this one). With several, only statuses other than 0 are printed. Exit status 0 unless a process ends in another way. */
#include <rfaas.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static int open_session(const char *executor, int quiet) {
    rfaas_session *session = NULL;
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    o.executor = executor;
    int status = rfaas_init(NULL);
    if (!status)
        status = rfaas_session_open(&o, &session);
    if (status || !quiet)
        printf("%d %s\n", status, status ? rfaas_last_error() : "");
    fflush(stdout);
    return rfaas_finalize() ? 1 : 0;
}

/* Forks the processes, which wait until the pipe is closed. */
static int crowd(const char *executor, int n) {
    int gate[2], bad = 0, status;
    if (pipe(gate))
        return 1;
    for (int i = 0; i < n; i++) {
        pid_t pid = fork();
        if (pid < 0) {
            perror("fork");
            return 1;
        }
        if (pid == 0) {
            char c;
            close(gate[1]);
            if (read(gate[0], &c, 1))
                _exit(1);
            close(gate[0]);
            exit(open_session(executor, 1));
        }
    }
    close(gate[0]);
    close(gate[1]);
    while (wait(&status) > 0)
        bad += status != 0;
    return bad != 0;
}

int main(int argc, char **argv) {
    if (argc < 2)
        return 2;
    return argc > 2 ? crowd(argv[1], atoi(argv[2])) : open_session(argv[1], 0);
}
