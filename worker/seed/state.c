#include "state.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <locale.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* Entries of a directory of /proc/self, -1 if it cannot be read. */
static int entries(const char *path) {
    DIR *d = opendir(path);
    int n = 0;
    if (!d)
        return -1;
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static uint64_t sum(uint64_t h, const char *text) {
    for (; *text; text++)
        h = (h ^ (uint8_t)*text) * 0x100000001b3ull;
    return (h ^ 0xff) * 0x100000001b3ull;
}

static uint64_t environment_sum(void) {
    uint64_t h = 0xcbf29ce484222325ull;
    for (char **v = environ; v && *v; v++)
        h = sum(h, *v);
    return h;
}

static uint64_t directory_sum(void) {
    struct stat sb;
    return stat(".", &sb) ? 0 : (uint64_t)sb.st_ino ^ (uint64_t)sb.st_dev << 32;
}

/* Timers of timer_create, each of which has a line "ID: number". */
static int timers(void) {
    FILE *f = fopen("/proc/self/timers", "re");
    char line[256];
    int n = f ? 0 : -1;
    while (f && fgets(line, sizeof line, f))
        n += !strncmp(line, "ID:", 3);
    if (f)
        fclose(f);
    return n;
}

static mode_t current_umask(void) {
    mode_t m = umask(077);
    umask(m);
    return m;
}

static uint32_t floating_mode(void) {
#if defined __x86_64__
    return __builtin_ia32_stmxcsr() & ~0x3fu; /* without the flags of exceptions that have happened */
#elif defined __aarch64__
    return (uint32_t)__builtin_aarch64_get_fpcr();
#else
    return 0;
#endif
}

void dp_state_note(dp_seed_before *was) {
    memset(was, 0, sizeof *was);
    was->threads = entries("/proc/self/task");
    was->descriptors = entries("/proc/self/fd");
    for (int s = 1; s < _NSIG; s++)
        sigaction(s, NULL, &was->actions[s]);
    sigprocmask(SIG_SETMASK, NULL, &was->mask);
    was->floating = floating_mode();
    was->umask = current_umask();
    was->environment = environment_sum();
    was->directory = directory_sum();
    snprintf(was->locale, sizeof was->locale, "%s", setlocale(LC_ALL, NULL));
    was->own_locale = uselocale((locale_t)0);
    was->timers = timers();
    sched_getaffinity(0, sizeof was->cpus, &was->cpus); /* fails, and leaves zeros, where the kernel knows more CPUs */
}

static bool forked;
static void note_fork(void) { forked = true; }

void dp_state_loaded(dp_seed_before *was) {
    was->floating = floating_mode();
    pthread_atfork(NULL, note_fork, NULL);
    dp_heap_watch_maps(true);
}

static bool is_own(const dp_modules *m, const void *code) {
    Dl_info info;
    if (!code || !dladdr(code, &info))
        return true; /* not known */
    for (uint32_t i = 0; i < m->n; i++)
        if (m->list[i].own == DP_MODULE_OWN && m->list[i].base == (uintptr_t)info.dli_fbase)
            return true;
    return false;
}

/* Reports whether the libraries of user code have mapped memory. Those that stay apart may do so. */
static bool has_mapped(const dp_modules *m) {
    const dp_heap_map *map;
    for (uint32_t i = 0; (map = dp_heap_left_map(i)); i++)
        if (is_own(m, map->caller))
            return true;
    return false;
}

static int refuse(dp_error *err, const char *what, const char *remedy) {
    return dp_fail(err, DP_UNSUPPORTED, 0, "seed: the init call %s, which a seed cannot keep: %s", what, remedy);
}

/* The kernel knows _NSIG - 1 signals. libc fills the rest of a mask with anything. */
static bool same_action(const struct sigaction *a, const struct sigaction *b) {
    return a->sa_handler == b->sa_handler && a->sa_flags == b->sa_flags && !memcmp(&a->sa_mask, &b->sa_mask, (_NSIG - 1) / 8);
}

/* Reports whether an object was built by Go. */
static int built_by_go(struct dl_phdr_info *i, size_t size, void *unused) {
    (void)size, (void)unused;
    for (int k = 0; k < i->dlpi_phnum; k++) {
        const ElfW(Phdr) *h = &i->dlpi_phdr[k];
        const uint8_t *at = (const void *)(uintptr_t)(i->dlpi_addr + h->p_vaddr), *end = at + h->p_memsz;
        for (const ElfW(Nhdr) *note; h->p_type == PT_NOTE && at + sizeof *note + 4 <= end; at += sizeof *note + ((note->n_namesz + 3u) & ~3u) + ((note->n_descsz + 3u) & ~3u)) {
            note = (const void *)at;
            if (note->n_namesz == 4 && !memcmp(note + 1, "Go", 3))
                return 1;
        }
    }
    return 0;
}

int dp_state_library(const dp_seed_before *was, dp_error *err) {
    int now = entries("/proc/self/task");
    if (now <= was->threads)
        return DP_OK;
    return dp_fail(err, DP_UNSUPPORTED, 0, "seed: the library started %d threads when it was loaded%s, and a seed cannot keep them: use the init call without RFAAS_LEASE_SEED", now - was->threads,
                   dl_iterate_phdr(built_by_go, NULL) ? ", which belong to the runtime of Go" : "");
}

int dp_state_compare(const dp_seed_before *was, const dp_modules *m, dp_error *err) {
    dp_seed_before is;
    char text[64];
    if (forked)
        return refuse(err, "has forked", "use posix_spawn, or fork in the call that needs it");
    if (has_mapped(m))
        return refuse(err, "has left memory mapped", "use malloc, unmap it in the init call, or map it in the call that needs it");
    dp_state_note(&is);
    if (is.threads < 0 || is.descriptors < 0)
        return dp_fail(err, DP_UNSUPPORTED, 0, "seed: /proc/self cannot be read, so it is not known what the init call has left open");
    if (is.threads != was->threads) {
        snprintf(text, sizeof text, "has left %d threads", is.threads - was->threads);
        return refuse(err, text, "end them in the init call, and start them in the call that needs them");
    }
    if (is.descriptors != was->descriptors) {
        snprintf(text, sizeof text, "has left %d files open", is.descriptors - was->descriptors);
        return refuse(err, text, "close them in the init call, and open them in the call that needs them");
    }
    for (int s = 1; s < _NSIG; s++)
        if (!same_action(&is.actions[s], &was->actions[s])) {
            snprintf(text, sizeof text, "has set a handler for signal %d", s);
            return refuse(err, text, "set it in the call that needs it");
        }
    if (memcmp(&is.mask, &was->mask, sizeof is.mask))
        return refuse(err, "has changed the signal mask", "set it back");
    if (is.umask != was->umask)
        return refuse(err, "has changed the file mode mask", "set it back");
    if (is.environment != was->environment)
        return refuse(err, "has changed the environment", "set variables in the call that needs them");
    if (is.directory != was->directory)
        return refuse(err, "has changed the working directory", "change back, or use absolute paths");
    if (strcmp(is.locale, was->locale) || is.own_locale != was->own_locale)
        return refuse(err, "has changed the locale", "set it back, and set it in the calls that need it");
    if (is.floating != was->floating)
        return refuse(err, "has changed the rounding or the exceptions of floating point", "set it back, and set it in the calls that need it");
    if (memcmp(&is.cpus, &was->cpus, sizeof is.cpus))
        return refuse(err, "has changed the CPUs on which it may run", "set them back, and set them in the call that needs it");
    if (is.timers != was->timers)
        return refuse(err, "has left a timer", "delete it, and make it in the call that needs it");
    siginfo_t child;
    if (!waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT) || errno != ECHILD)
        return refuse(err, "has left child processes", "wait for them in the init call");
    for (int i = ITIMER_REAL; i <= ITIMER_PROF; i++) {
        struct itimerval t;
        if (!getitimer(i, &t) && (t.it_value.tv_sec || t.it_value.tv_usec))
            return refuse(err, "has left a timer running", "stop it, and start it in the call that needs it");
    }
    return DP_OK;
}

/* ---- pointers ---- */

int dp_state_scan(const dp_foreign *f, const dp_modules *m, dp_error *err) {
    uint64_t looks = UINT64_MAX;
    for (uint32_t i = 0; i < m->n; i++) {
        const dp_module *own = &m->list[i];
        const uintptr_t *data = (const uintptr_t *)(uintptr_t)own->data, *end = data + own->data_size / sizeof *data;
        const char *what;
        const uintptr_t *word = own->own == DP_MODULE_OWN ? dp_foreign_next(f, data, end, &looks, &what) : NULL;
        if (!word)
            continue;
        Dl_info info;
        bool named = dladdr(word, &info) && info.dli_sname;
        return dp_fail(err, DP_UNSUPPORTED, 0, "seed: static data of %.60s (%.60s) points to %s, which a seed cannot keep: make a copy in the init call", own->name,
                       named ? info.dli_sname : "a static variable", what);
    }
    return DP_OK;
}

/* Skips pages without memory: reading a hole of a memory file would allocate a page there, which would stay. */
static uint64_t scan_heap(const dp_foreign *f, uintptr_t from, uintptr_t end, uint64_t found, uint64_t *looks, const uintptr_t **first, const char **what) {
    enum { PAGE = 4096, PAGES = 1024 };
    unsigned char has[PAGES];
    for (; from < end; from += PAGE * PAGES) {
        uintptr_t n = (end - from) / PAGE < PAGES ? (end - from) / PAGE : PAGES;
        if (mincore((void *)from, n * PAGE, has))
            return found;
        for (uintptr_t i = 0, k; i < n; i = k + 1) {
            for (k = i; k < n && has[k] & 1; k++)
                ;
            const uintptr_t *word = (const uintptr_t *)(from + i * PAGE), *limit = (const uintptr_t *)(from + k * PAGE);
            for (const char *of; (word = dp_foreign_next(f, word, limit, looks, &of)); word++)
                if (!found++) {
                    *first = word;
                    *what = of;
                }
        }
    }
    return found;
}

void dp_state_scan_heap(const dp_foreign *f, const dp_seed_extent *list, uint32_t n, char *text, size_t room) {
    enum { LOOKS = 4 << 20 };
    uint64_t found = 0, looks = LOOKS;
    const uintptr_t *first = NULL;
    const char *what = NULL;
    for (uint32_t i = 0; i < n && looks; i++)
        found = scan_heap(f, DP_HEAP_AT + list[i].from, DP_HEAP_AT + list[i].to, found, &looks, &first, &what);
    *text = 0;
    if (found)
        snprintf(text, room, "words of the heap that look like pointers to memory outside the seed: %llu, the first at %p to %s. Copy the data, or use rfaas_on_resume",
                 (unsigned long long)found, (const void *)first, what);
}
