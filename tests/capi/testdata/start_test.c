/* Opens a session, and looks at what else of it there is. Prints the status and a text. Arguments: the executor's address, and
 *   stdio   first closes standard input, output and error; then fails if one of them is a file of the library's
 *   fork    forks while the agent's socket is being made, as another thread may; the child lives until this process is killed */
#include <errno.h>
#include <fcntl.h>
#include <rfaas.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <signal.h>
#include <unistd.h>

static int forks;

int listen(int fd, int n) {
    long status = syscall(SYS_listen, fd, n);
    int parent[2];
    if (forks && !pipe(parent) && !fork()) {
        char c;
        close(parent[1]);
        while (read(parent[0], &c, 1) < 0 && errno == EINTR)
            ;
        _exit(0);
    }
    return (int)status;
}

int main(int argc, char **argv) {
    rfaas_session *session;
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    if (argc != 3)
        return 2;
    int closes = !strcmp(argv[2], "stdio"), out = fcntl(1, F_DUPFD_CLOEXEC, 10), taken = 0;
    forks = !strcmp(argv[2], "fork");
    for (int i = 0; closes && i < 3; i++)
        close(i);
    if (rfaas_init(NULL))
        return 2;
    o.executor = argv[1];
    o.timeout_ns = 2000000000;
    int status = rfaas_session_open(&o, &session);
    for (int i = 0; closes && i < 3; i++)
        taken += fcntl(i, F_GETFD) >= 0;
    dprintf(out, "%d %d %s\n", status, taken, status ? rfaas_last_error() : "");
    if (forks)
        pause();
    return 0;
}
