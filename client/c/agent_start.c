/* Finding the agent's socket, and starting an agent where none listens.
 *
 *   connect ──▶ an agent listens: check its owner
 *      └─ none ──▶ lock ──▶ connect again ──▶ bind, listen, start the agent with the socket as descriptor 3 ──▶ unlock ──▶ connect
 *
 * The socket listens before the agent runs, so of many processes that start at once one starts an agent and all connect.
 *
 * A program that has more rights than the user who runs it (set-user-ID) follows no variable of that user's, nor does its agent. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"
#include "agent_job.h"
#include "dp_fabric.h"
#include "rfaas.h"

#define BACKLOG 4096
#define PAUSE_NS 1000000 /* between two attempts while another process starts the agent or its backlog is full */

typedef struct reach {
    int64_t until;
    int status;
    char *text;
    struct sockaddr_un at;
} reach;

static int failed(reach *r, int status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int failed(reach *r, int status, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(r->text, RFAAS_AGENT_TEXT, fmt, args);
    va_end(args);
    r->status = status;
    return -1;
}

/* What to do about an error of a file in the directory of the socket. */
static const char *remedy(int error) {
    return error == ENOSPC || error == EDQUOT ? "make room there, or set RFAAS_AGENT_SOCKET to a path in another directory"
                                              : "set RFAAS_AGENT_SOCKET to a path in another directory";
}

static bool pause_until(int64_t until) {
    if (dp_now_ns() >= until)
        return false;
    nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    return true;
}

/* ---- where the socket is ---- */

/* Makes the directory if it does not exist. Returns 0, or -1 with the reason why it cannot be used. */
static int private_directory(const char *path, char *why, size_t room) {
    struct stat st;
    if (mkdir(path, 0700) && errno != EEXIST) {
        snprintf(why, room, "cannot make the directory %s: %s", path, strerror(errno));
        return -1;
    }
    if (lstat(path, &st)) {
        snprintf(why, room, "%s: %s", path, strerror(errno));
        return -1;
    }
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || st.st_mode & 077) {
        snprintf(why, room, "%s must be a directory of user %u with mode 0700; it is %s of user %u with mode %04o", path, geteuid(),
                 S_ISDIR(st.st_mode) ? "one" : "something else", st.st_uid, st.st_mode & 07777);
        return -1;
    }
    if (access(path, W_OK)) {
        snprintf(why, room, "cannot write to %s: %s", path, strerror(errno));
        return -1;
    }
    return 0;
}

/* Whoever can write to the directory of RFAAS_AGENT_SOCKET could replace the lock, the log and the socket of an agent there. */
static int check_directory(reach *r) {
    char dir[sizeof r->at.sun_path];
    struct stat st;
    strcpy(dir, r->at.sun_path);
    char *slash = strrchr(dir, '/');
    if (slash)
        slash[slash == dir] = 0;
    if (stat(slash ? dir : ".", &st))
        return failed(r, RFAAS_UNSUPPORTED, "cannot start an agent: the directory of RFAAS_AGENT_SOCKET, %s: %s", slash ? dir : ".", strerror(errno));
    if (st.st_uid == geteuid() && !(st.st_mode & 022))
        return 0;
    return failed(r, RFAAS_UNSUPPORTED, "cannot start an agent: others can write to %s, the directory of RFAAS_AGENT_SOCKET (user %u, mode %04o): "
                  "set it to a path in a directory that only you can write to", slash ? dir : ".", st.st_uid, st.st_mode & 07777);
}

static int set_path(reach *r, const char *path) {
    if (strlen(path) >= sizeof r->at.sun_path)
        return failed(r, RFAAS_INVALID, "the path of the agent's socket has %zu bytes, at most %zu are possible: %s; set RFAAS_AGENT_SOCKET "
                      "to a shorter one", strlen(path), sizeof r->at.sun_path - 1, path);
    r->at.sun_family = AF_UNIX;
    strcpy(r->at.sun_path, path);
    return 0;
}

/* The agent reaches what its network namespace reaches, so processes of another namespace have another agent, even where both see the
 * same directory. Each batch job has its own agent, which ends with the job. */
static void socket_name(char *out, size_t room) {
    struct stat net = {0};
    char job[RFAAS_AGENT_JOB];
    for (size_t i = 0; i < RFAAS_AGENT_BATCHES; i++) {
        const rfaas_agent_batch *b = &rfaas_agent_batches[i];
        if (rfaas_agent_job_of(b, getenv(b->id), b->index ? getenv(b->index) : NULL, b->mark ? getenv(b->mark) : NULL, job))
            break;
    }
    stat("/proc/self/ns/net", &net); /* without /proc: 0 */
    snprintf(out, room, "agent-%llu%s%s.sock", (unsigned long long)net.st_ino, *job ? "-" : "", job);
}

static int find_path(reach *r) {
    const char *given = secure_getenv("RFAAS_AGENT_SOCKET"), *runtime = secure_getenv("XDG_RUNTIME_DIR");
    if (given && *given)
        return set_path(r, given);
    char name[96], dir[256], path[400], why[2][400] = {"", ""};
    socket_name(name, sizeof name);
    for (int i = 0; i < 2; i++) {
        if (i == 0 && (!runtime || *runtime != '/'))
            continue;
        if (i == 0 && strlen(runtime) + sizeof "/rfaas/" + strlen(name) > sizeof r->at.sun_path) {
            snprintf(why[i], sizeof why[i], "XDG_RUNTIME_DIR is too long for a socket");
            continue;
        }
        if (i == 0)
            snprintf(dir, sizeof dir, "%s/rfaas", runtime);
        else
            snprintf(dir, sizeof dir, "/tmp/rfaas-%u", geteuid());
        if (!private_directory(dir, why[i], sizeof why[i])) {
            snprintf(path, sizeof path, "%s/%s", dir, name);
            return set_path(r, path);
        }
    }
    return failed(r, RFAAS_UNSUPPORTED, "no directory for the agent's socket: %s%s%s; set RFAAS_AGENT_SOCKET to a path in a directory that you "
                  "can write to", why[0], *why[0] ? "; " : "", why[1]);
}

/* ---- connecting ---- */

/* Returns the descriptor; -1 if no process listens; -2 after an error. */
static int connect_once(reach *r) {
    for (;;) {
        int fd = rfaas_agent_above_stdio(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (fd < 0) {
            failed(r, RFAAS_FATAL, "cannot make a socket: %s", strerror(errno));
            return -2;
        }
        if (!connect(fd, (struct sockaddr *)&r->at, sizeof r->at))
            return fd;
        int why = errno;
        close(fd);
        if (why == ENOENT || why == ECONNREFUSED)
            return -1;
        if (why != EAGAIN && why != EINTR) {
            failed(r, RFAAS_UNSUPPORTED, "cannot connect to the agent's socket %s: %s", r->at.sun_path, strerror(why));
            return -2;
        }
        if (!pause_until(r->until)) {
            failed(r, RFAAS_PEER_GONE, "the agent at %s takes no more connections; check whether it is stopped with `rfaas agent status`", r->at.sun_path);
            return -2;
        }
    }
}

/* The agent of another user, even of root, would refuse this process. */
static int check_owner(reach *r, int fd) {
    struct ucred peer = {0};
    socklen_t len = sizeof peer;
    if (!getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) && peer.uid == geteuid())
        return fd;
    close(fd);
    return failed(r, RFAAS_INVALID, "the socket %s belongs to an agent of user %u, and this process runs as user %u: each user needs an agent of its "
                  "own; set RFAAS_AGENT_SOCKET to another path, or unset it, or remove the socket", r->at.sun_path, peer.uid, geteuid());
}

/* ---- starting ---- */

/* Finds the agent that was installed with this library. */
static int find_program(reach *r, char *out, size_t room) {
    const char *given = secure_getenv("RFAAS_AGENT");
    if (given && *given) {
        snprintf(out, room, "%s", given);
        if (!access(out, X_OK))
            return 0;
        return failed(r, RFAAS_UNSUPPORTED, "RFAAS_AGENT is %s: %s", given, strerror(errno));
    }
    static const char *const places[] = {"../libexec/rfaas-agent", "../../libexec/rfaas-agent", "../libexec/rfaas/rfaas-agent"};
    Dl_info us;
    char dir[4096] = "";
    if (dladdr((const void *)rfaas_init, &us) && us.dli_fname) {
        char *real = realpath(strchr(us.dli_fname, '/') ? us.dli_fname : "/proc/self/exe", NULL);
        char *slash = real ? strrchr(real, '/') : NULL;
        if (slash)
            snprintf(dir, sizeof dir, "%.*s", (int)(slash - real), real);
        free(real);
    }
    for (size_t i = 0; *dir && i < sizeof places / sizeof *places; i++) {
        if ((size_t)snprintf(out, room, "%s/%s", dir, places[i]) < room && !access(out, X_OK))
            return 0;
    }
    static const char *const fixed[] = {"/usr/local/libexec/rfaas-agent", "/usr/libexec/rfaas-agent", "/opt/rfaas/libexec/rfaas-agent"};
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
        snprintf(out, room, "%s", fixed[i]);
        if (!access(out, X_OK))
            return 0;
    }
    return failed(r, RFAAS_UNSUPPORTED, "no agent runs, and the program rfaas-agent is not in ../libexec of %s nor in /usr/local/libexec: "
                  "install it, or set RFAAS_AGENT to its path", *dir ? dir : "the library");
}

/* Descriptors that must be closed after use. While one is open, another process can neither start an agent nor find out that there is none.
 * Used by one thread at a time. */
static struct {
    int lock, listening, log;
} starting = {-1, -1, -1};

static void close_starting(int *fd) {
    int was = *fd;
    *fd = -1; /* before close: a child of fork must not close another file that gets this number */
    if (was >= 0)
        close(was);
}

void rfaas_agent_reach_forked(void) {
    close_starting(&starting.log);
    close_starting(&starting.listening);
    close_starting(&starting.lock);
}

typedef struct start {
    const char *program;
    char **environment;
    int why;
} start;

/* Runs in a process that has the caller's memory and ends at once. So the agent is not a child of the program, and the program gets no
 * SIGCHLD. */
static int spawn_agent(void *arg) {
    start *s = arg;
    rfaas_agent_prepare();
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attr);
    posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&files, starting.log, 2);
    posix_spawn_file_actions_adddup2(&files, starting.listening, 3); /* also clears close-on-exec */
    posix_spawn_file_actions_addclosefrom_np(&files, 4);       /* an open pipe of the program would make mpirun wait for the agent */
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &all);
    char *const argv[] = {(char *)s->program, "--listening", "3", NULL};
    pid_t pid;
    s->why = posix_spawn(&pid, s->program, &files, &attr, argv, s->environment);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&files);
    return 0;
}

static int open_log(reach *r) {
    char path[sizeof r->at.sun_path + 8];
    snprintf(path, sizeof path, "%s.log", r->at.sun_path);
    starting.log = rfaas_agent_above_stdio(open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
    return starting.log < 0 ? failed(r, RFAAS_UNSUPPORTED, "cannot open the agent's log %s: %s; %s", path, strerror(errno), remedy(errno)) : 0;
}

/* Starts the agent with the descriptors in `starting`. */
static int start_agent(reach *r, const char *program) {
    enum { STACK = 128 << 10 };
    char *stack = malloc(STACK), **environment = rfaas_agent_inherited();
    if (!stack || !environment) {
        free(stack);
        free(environment);
        return failed(r, RFAAS_FATAL, "out of memory");
    }
    start s = {.program = program, .environment = environment};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* no signal handler may run in the process that shares the memory */
    pid_t pid = clone(spawn_agent, stack + STACK, CLONE_VM | CLONE_VFORK, &s);
    int why = pid < 0 ? errno : 0;
    while (pid > 0 && waitpid(pid, NULL, __WALL) < 0 && errno == EINTR)
        ;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    free(stack);
    free(environment);
    if (!why)
        why = s.why;
    return why ? failed(r, RFAAS_UNSUPPORTED, "cannot start the agent %s: %s", program, strerror(why)) : 0;
}

/* The caller has the lock, and nobody listens. */
static int listen_and_start(reach *r) {
    char program[4200];
    const char *never = secure_getenv("RFAAS_AGENT_START");
    if (never && !strcmp(never, "never"))
        return failed(r, RFAAS_UNSUPPORTED, "no agent listens at %s, and RFAAS_AGENT_START is never: start the service, or unset it",
                      r->at.sun_path);
    if (find_program(r, program, sizeof program))
        return -1;
    char why[RFAAS_AGENT_TEXT];
    if (!rfaas_agent_can_start(why, sizeof why))
        return failed(r, RFAAS_UNSUPPORTED, "%s", why);
    struct stat st;
    if (!lstat(r->at.sun_path, &st) && !S_ISSOCK(st.st_mode))
        return failed(r, RFAAS_INVALID, "%s is not a socket: set RFAAS_AGENT_SOCKET to another path, or remove it", r->at.sun_path);
    int fd = starting.listening = rfaas_agent_above_stdio(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (fd < 0)
        return failed(r, RFAAS_FATAL, "cannot make a socket: %s", strerror(errno));
    if (unlink(r->at.sun_path) && errno != ENOENT) { /* a stale one */
        failed(r, RFAAS_UNSUPPORTED, "cannot remove the stale socket %s: %s", r->at.sun_path, strerror(errno));
        close_starting(&starting.listening);
        return -1;
    }
    /* Before bind, so that other users can never connect, even if the directory lets them. */
    fchmod(fd, 0600);
    if (bind(fd, (struct sockaddr *)&r->at, sizeof r->at) || listen(fd, BACKLOG)) {
        failed(r, RFAAS_UNSUPPORTED, "cannot listen at the agent's socket %s: %s; %s", r->at.sun_path, strerror(errno), remedy(errno));
        close_starting(&starting.listening);
        return -1;
    }
    int failure = open_log(r) ? -1 : start_agent(r, program);
    if (failure)
        unlink(r->at.sun_path);
    close_starting(&starting.log);
    close_starting(&starting.listening);
    return failure;
}

/* Takes the lock that a process holds while it starts an agent, and an agent while it ends. */
static int take_lock(reach *r) {
    char path[sizeof r->at.sun_path + 8];
    snprintf(path, sizeof path, "%s.lock", r->at.sun_path);
    int fd = starting.lock = rfaas_agent_above_stdio(open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (fd < 0)
        return failed(r, RFAAS_UNSUPPORTED, "cannot open the lock file %s: %s; %s", path, strerror(errno), remedy(errno));
    while (flock(fd, LOCK_EX | LOCK_NB)) {
        if ((errno != EWOULDBLOCK && errno != EINTR) || !pause_until(r->until)) {
            failed(r, RFAAS_PEER_GONE, "the lock file %s has been held by another process for too long: %s", path, strerror(errno));
            close_starting(&starting.lock);
            return -1;
        }
    }
    return 0;
}

int rfaas_agent_reach(int64_t until, int *status, char text[RFAAS_AGENT_TEXT]) {
    reach r = {.until = until, .text = text};
    int fd = find_path(&r) ? -2 : connect_once(&r);
    if (fd == -1) {
        if (check_directory(&r) || take_lock(&r)) {
            fd = -2;
        } else {
            fd = connect_once(&r); /* another process may have started one meanwhile */
            if (fd == -1 && (fd = listen_and_start(&r)) == 0)
                fd = connect_once(&r);
            else if (fd == -1)
                fd = -2;
            close_starting(&starting.lock);
        }
    }
    if (fd == -1)
        failed(&r, RFAAS_PEER_GONE, "the agent at %s ended as soon as it was started: see %s.log", r.at.sun_path, r.at.sun_path);
    if (fd >= 0)
        fd = check_owner(&r, fd);
    *status = r.status;
    return fd < 0 ? -1 : fd;
}
