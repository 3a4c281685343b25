/* The report when user code ends the process: the signal, the address, and the functions on the stack. The executor reads it
 * from the worker's page after the worker's death.
 *
 * The handlers run in a process whose heap, stack and locks may be in any state. So they use only system calls, the page,
 * backtrace() and dladdr(). The last two are not guaranteed to be safe in a handler. They allocate nothing once the unwinder
 * is loaded, but a thread that crashed or waits inside the dynamic linker may hold its lock, and a broken stack may mislead
 * them. So the handler first writes what the kernel reported, and an alarm ends a handler that hangs. Then only the
 * backtrace is missing. */
#include "crash.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define FRAMES_MAX 64
#define PATIENCE_S 1             /* for a backtrace */
#define STACK_SLACK (64u << 10)  /* a fault this near to the stack pointer is a stack overflow */
#define SIGNAL_STACK (64u << 10) /* the unwinder needs about 8 KiB, the kernel up to 11 for the registers */

static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGXCPU};

static dp_worker_page *page_of_this_process;
static uintptr_t stack_top; /* of the serving thread: an address in its outermost frame */
static uint32_t dying;      /* atomic: a thread is writing the page */
static _Alignas(64) uint8_t signal_stack[SIGNAL_STACK];

/* ---- text ---- */

static void put_text(dp_worker_death *d, const char *s) {
    while (*s && d->text_len < sizeof d->text)
        d->text[d->text_len++] = *s++;
}

static void put_number(dp_worker_death *d, uint64_t v, unsigned base) {
    char digits[20];
    int n = 0;
    do
        digits[n++] = "0123456789abcdef"[v % base];
    while (v /= base);
    while (n && d->text_len < sizeof d->text)
        d->text[d->text_len++] = digits[--n];
}

static void put_hex(dp_worker_death *d, uint64_t v) {
    put_text(d, "0x");
    put_number(d, v, 16);
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* ---- frames ---- */

typedef struct frame {
    uintptr_t pc;
    bool exact; /* pc is the address of the instruction, not the return address of a call */
} frame;

/* The code was loaded by this name: see dp_worker_load. */
static bool is_user_library(const char *path) { return !strncmp(path, "/proc/self/fd/", 14); }

static bool is_worker_program(const Dl_info *info) {
    Dl_info own;
    return dladdr(signals, &own) && own.dli_fbase == info->dli_fbase;
}

/* Writes the line of a frame. Returns false if only the worker's own frames follow. */
static bool put_frame(dp_worker_death *d, const frame *f) {
    Dl_info info;
    if (!dladdr((void *)(f->pc - !f->exact), &info) || !info.dli_fname) {
        put_hex(d, f->pc);
        put_text(d, "\n");
        return true;
    }
    bool user = is_user_library(info.dli_fname);
    if (!user && is_worker_program(&info)) {
        if (!info.dli_sname || !strcmp(info.dli_sname, "dp_server_run") || !strcmp(info.dli_sname, "dp_worker_load"))
            return info.dli_sname == NULL;
    }
    put_text(d, info.dli_sname ? info.dli_sname : user ? "library" : base_name(info.dli_fname));
    put_text(d, "+");
    put_hex(d, f->pc - (uintptr_t)(info.dli_sname ? info.dli_saddr : info.dli_fbase));
    if (!user && info.dli_sname) {
        put_text(d, " (");
        put_text(d, base_name(info.dli_fname));
        put_text(d, ")");
    }
    put_text(d, "\n");
    return true;
}

typedef struct registers {
    uintptr_t pc, sp;
    const uintptr_t *return_address; /* if the last instruction was a call */
} registers;

/* The stack of this thread from where it was interrupted, or, without that, from the caller's caller. */
static void trace(dp_worker_death *d, const registers *at) {
    void *stack[FRAMES_MAX];
    int n = backtrace(stack, FRAMES_MAX), i = 2;
    frame f;
    if (at) {
        Dl_info info;
        f = (frame){at->pc, true};
        for (i = 0; i < n && (uintptr_t)stack[i] != at->pc;)
            i++;
        i++;
        if (at->return_address && !dladdr((void *)at->pc, &info)) {
            /* After a jump to an invalid address no unwinder continues, but a call has left its return address. */
            put_hex(d, at->pc);
            put_text(d, "\n");
            f = (frame){*at->return_address, false};
        }
        if (!put_frame(d, &f))
            return;
    }
    for (int repeated = 0; i < n; i++) {
        bool same = i > 0 && i + 1 < n && stack[i] == stack[i - 1] && stack[i] == stack[i + 1];
        repeated = same ? repeated + 1 : 0;
        f = (frame){(uintptr_t)stack[i], false};
        if (!same && !put_frame(d, &f))
            return;
        if (repeated == 1)
            put_text(d, "...\n");
    }
}

/* ---- noting ---- */

/* The first dying thread writes the record. Any other waits for the end of the process. */
static dp_worker_death *begin(void) {
    if (__atomic_exchange_n(&dying, 1, __ATOMIC_ACQ_REL))
        return NULL;
    dp_worker_death *d = &page_of_this_process->death;
    d->text_len = 0;
    return d;
}

static void note(dp_worker_death *d, uint32_t state) { __atomic_store_n(&d->state, state, __ATOMIC_RELEASE); }

static registers interrupted(const ucontext_t *u) {
#if defined(__x86_64__)
    uintptr_t sp = (uintptr_t)u->uc_mcontext.gregs[REG_RSP];
    return (registers){(uintptr_t)u->uc_mcontext.gregs[REG_RIP], sp, (const uintptr_t *)sp};
#elif defined(__aarch64__)
    return (registers){u->uc_mcontext.pc, u->uc_mcontext.sp, (const uintptr_t *)&u->uc_mcontext.regs[30]};
#else
    (void)u;
    return (registers){0, 0, NULL};
#endif
}

/* Near the stack pointer, or where the serving thread's stack should have grown to. */
static bool is_stack_overflow(const siginfo_t *si, uintptr_t sp) {
    uintptr_t at = (uintptr_t)si->si_addr;
    if (si->si_signo != SIGSEGV || si->si_code <= 0 || !sp)
        return false;
    return (at >= sp - STACK_SLACK && at < sp + STACK_SLACK) ||
           (si->si_code == SEGV_MAPERR && at >= sp && at < stack_top);
}

static void bound_what_follows(void) {
    struct sigaction dfl = {.sa_handler = SIG_DFL};
    sigset_t set;
    sigaction(SIGALRM, &dfl, NULL);
    sigemptyset(&set);
    sigaddset(&set, SIGALRM);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    alarm(PATIENCE_S);
}

/* The signal's default action has been restored (SA_RESETHAND): it ends the process when this returns. */
static void on_signal(int sig, siginfo_t *si, void *context) {
    int e = errno;
    bound_what_follows();
    dp_worker_death *d = begin();
    if (!d)
        for (;;)
            pause();
    registers r = interrupted(context);
    d->signal = sig;
    d->code = si->si_code;
    d->sys_errno = e;
    d->address = si->si_code > 0 ? (uint64_t)(uintptr_t)si->si_addr : 0;
    d->sender = si->si_code > 0 ? 0 : (uint32_t)si->si_pid;
    d->flags = is_stack_overflow(si, r.sp) ? DP_DEATH_STACK_OVERFLOW : 0;
    if (si->si_code <= 0 && si->si_pid == getpid())
        d->flags |= DP_DEATH_BY_ITSELF;
    note(d, DP_DEATH_NOTED);
    trace(d, &r);
    note(d, DP_DEATH_TRACED);
    if (si->si_code <= 0) /* sent by a process: returning does not raise it again */
        syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), sig);
    alarm(0);
}

static void on_end(int status, void *unused) {
    (void)unused;
    int e = errno;
    dp_worker_death *d = begin();
    if (!d)
        return;
    d->signal = 0;
    d->code = status;
    d->sys_errno = e;
    d->address = 0;
    d->sender = 0;
    d->flags = 0;
    note(d, DP_DEATH_NOTED);
    trace(d, NULL);
    note(d, DP_DEATH_TRACED);
}

void dp_crash_prepare(void) {
    void *here;
    backtrace(&here, 1);
}

void dp_crash_note(dp_worker_page *page) {
    page_of_this_process = page;
    stack_top = (uintptr_t)__builtin_frame_address(0);
    /* What a function does after its own stack is used up must happen on another one. Threads that it starts have none:
     * an overflow of theirs is a plain SIGSEGV. */
    stack_t own = {.ss_sp = signal_stack, .ss_size = sizeof signal_stack};
    sigaltstack(&own, NULL);
    struct sigaction act = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK | (int)SA_RESETHAND};
    sigfillset(&act.sa_mask);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaction(signals[i], &act, NULL);
    on_exit(on_end, NULL);
}
