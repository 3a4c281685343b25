/* Runs a fuzz target without libFuzzer: replays a corpus, then mutates it, guided by the coverage that gcc's
 * -fsanitize-coverage=trace-pc,trace-cmp reports. It is small: clang's libFuzzer finds more, but this driver only needs gcc, and makes
 * the same inputs from the same seed.
 *
 *   fuzz_NAME [--seconds S] [--runs N] [--seed N] [--max-len N] [--artifact PREFIX] [--save DIR] FILE|DIR...
 *   fuzz_NAME --unhex DIR FILE|DIR...      writes the corpus as bytes, for libFuzzer
 *
 * Corpus files that end in .hex are hexadecimal text, # begins a comment; all others are bytes. An input that crashes or hangs
 * (20 s) is written to PREFIX-HASH.hex. Exit status: 0 nothing found, 1 found something or no corpus, 2 wrong usage.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "fuzz.h"

enum { MAP = 1 << 16, OPERANDS = 512, CORPUS_MAX = 1 << 14, HANG_SECONDS = 20 };

/* ---- coverage: called from the instrumented code ---- */

static uint8_t seen[MAP];   /* buckets of counts that an input has reached */
static _Alignas(8) uint8_t counts[MAP]; /* of this run */
static uintptr_t previous;
static bool tracing;

static struct operand {
    uint64_t value;
    uint8_t size;
} operands[OPERANDS];
static uint32_t n_operands;

void __sanitizer_cov_trace_pc(void) {
    uintptr_t pc = (uintptr_t)__builtin_return_address(0);
    uint8_t *c = &counts[(pc ^ previous) & (MAP - 1)];
    previous = pc >> 1;
    if (*c != 255)
        (*c)++;
}

static void operand(uint64_t v, uint8_t size) {
    if (tracing && v > 1)
        operands[n_operands++ % OPERANDS] = (struct operand){v, size};
}

#define TRACE_CMP(bits, size)                                                                                          \
    void __sanitizer_cov_trace_cmp##size(uint##bits##_t a, uint##bits##_t b);                                          \
    void __sanitizer_cov_trace_const_cmp##size(uint##bits##_t a, uint##bits##_t b);                                    \
    void __sanitizer_cov_trace_cmp##size(uint##bits##_t a, uint##bits##_t b) {                                         \
        operand(a, size);                                                                                              \
        operand(b, size);                                                                                              \
    }                                                                                                                  \
    void __sanitizer_cov_trace_const_cmp##size(uint##bits##_t a, uint##bits##_t b) {                                   \
        (void)b;                                                                                                       \
        operand(a, size);                                                                                              \
    }
TRACE_CMP(8, 1)
TRACE_CMP(16, 2)
TRACE_CMP(32, 4)
TRACE_CMP(64, 8)
void __sanitizer_cov_trace_cmpf(float a, float b);
void __sanitizer_cov_trace_cmpd(double a, double b);
void __sanitizer_cov_trace_switch(uint64_t v, const uint64_t *cases);
void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_cmpf(float a, float b) { (void)a, (void)b; }
void __sanitizer_cov_trace_cmpd(double a, double b) { (void)a, (void)b; }
void __sanitizer_cov_trace_switch(uint64_t v, const uint64_t *cases) { /* {n, bits, value...} */
    (void)v;
    for (uint64_t i = 0; tracing && i < cases[0] && i < 32; i++)
        operand(cases[2 + i], (uint8_t)(cases[1] / 8));
}

static bool new_coverage(void) {
    bool any = false;
    for (size_t i = 0; i < MAP; i++) {
        uint64_t eight;
        memcpy(&eight, counts + i, i % 8 ? 0 : 8);
        if (i % 8 == 0 && eight == 0) {
            i += 7;
            continue;
        }
        uint8_t n = counts[i];
        if (!n)
            continue;
        uint8_t bucket = n < 4 ? (uint8_t)(1u << (n - 1)) : n < 8 ? 8 : n < 16 ? 16 : n < 32 ? 32 : n < 128 ? 64 : 128;
        if (seen[i] & bucket)
            continue;
        seen[i] |= bucket;
        any = true;
    }
    return any;
}

/* ---- inputs ---- */

typedef struct item {
    uint8_t *data;
    size_t size;
} item;

static item corpus[CORPUS_MAX];
static size_t n_corpus;
static size_t max_len = 4096;
static uint64_t rng = 1;
static const char *artifact = "crash";
static const char *save;
static const char *program = "fuzz";

static item now; /* what is being run */
static volatile uint64_t run_number;

static uint64_t rnd(void) { /* splitmix64 */
    uint64_t z = rng += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static size_t below(size_t n) { return n ? (size_t)(rnd() % n) : 0; }

static uint64_t hash(const item *it) { /* FNV-1a */
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < it->size; i++)
        h = (h ^ it->data[i]) * 0x100000001b3ull;
    return h;
}

/* Async-signal-safe, because signal handlers call it. */
static void write_hex(const char *prefix, const item *it) {
    char path[512], line[3 * 32 + 1];
    static const char digits[] = "0123456789abcdef";
    snprintf(path, sizeof path, "%s-%016llx.hex", prefix, (unsigned long long)hash(it));
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) {
        dprintf(2, "%s: cannot write %s: %s\n", program, path, strerror(errno));
        return;
    }
    for (size_t i = 0; i < it->size;) {
        size_t n = 0;
        for (; i < it->size && n < sizeof line - 1; i++) {
            line[n++] = digits[it->data[i] >> 4];
            line[n++] = digits[it->data[i] & 15];
            line[n++] = i % 32 == 31 || i + 1 == it->size ? '\n' : ' ';
        }
        if (write(fd, line, n) != (ssize_t)n)
            break;
    }
    close(fd);
    dprintf(2, "%s: the input is in %s\n", program, path);
}

static void on_death(void) {
    if (now.data)
        write_hex(artifact, &now);
    now.data = NULL;
}

static void on_abort(int sig) {
    on_death();
    signal(sig, SIG_DFL);
    raise(sig);
}

static void on_tick(int sig) {
    static uint64_t last;
    static int ticks;
    (void)sig;
    ticks = last == run_number ? ticks + 1 : 0;
    last = run_number;
    if (ticks < HANG_SECONDS || !now.data)
        return;
    dprintf(2, "%s: one input takes more than %d s\n", program, HANG_SECONDS);
    __sanitizer_print_stack_trace();
    on_death();
    _exit(1);
}

static bool run(item it) {
    memset(counts, 0, sizeof counts);
    previous = 0;
    now = it;
    run_number++;
    LLVMFuzzerTestOneInput(it.data, it.size);
    now.data = NULL;
    return new_coverage();
}

static void keep(item it) {
    if (n_corpus < CORPUS_MAX)
        corpus[n_corpus++] = it;
    else
        free(it.data);
}

static item unhex(item text) {
    item out = {malloc(text.size / 2 + 1), 0};
    int high = -1;
    bool comment = false;
    for (size_t i = 0; i < text.size; i++) {
        char c = (char)text.data[i];
        int v = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        comment = c == '#' || (comment && c != '\n');
        if (comment || c == ' ' || c == '\n')
            continue;
        if (v < 0) {
            fprintf(stderr, "%s: byte %zu of the text, '%c', is not a lower-case hexadecimal digit\n", program, i, c);
            exit(2);
        }
        if (high >= 0)
            out.data[out.size++] = (uint8_t)(high << 4 | v);
        high = high >= 0 ? -1 : v;
    }
    free(text.data);
    return out;
}

static const char *raw_dir; /* of --unhex */

static void load_file(const char *path) {
    FILE *f = fopen(path, "rbe");
    item it = {malloc(1 << 20), 0};
    if (!f) {
        fprintf(stderr, "%s: %s: %s\n", program, path, strerror(errno));
        exit(2);
    }
    it.size = fread(it.data, 1, 1 << 20, f);
    fclose(f);
    size_t n = strlen(path);
    if (n > 4 && !strcmp(path + n - 4, ".hex"))
        it = unhex(it);
    item exact = {exact_copy(it.data, it.size), it.size};
    free(it.data);
    if (raw_dir) {
        const char *slash = strrchr(path, '/');
        char out[4096];
        snprintf(out, sizeof out, "%s/%s", raw_dir, slash ? slash + 1 : path);
        FILE *g = fopen(out, "wbe");
        if (!g || fwrite(exact.data, 1, exact.size, g) != exact.size || fclose(g)) {
            fprintf(stderr, "%s: %s: %s\n", program, out, strerror(errno));
            exit(2);
        }
    }
    keep(exact);
}

static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }

static void load(const char *path) {
    struct dirent **names;
    int n = scandir(path, &names, NULL, by_name);
    if (n < 0) {
        load_file(path);
        return;
    }
    for (int i = 0; i < n; i++) {
        char file[4096];
        snprintf(file, sizeof file, "%s/%s", path, names[i]->d_name);
        if (names[i]->d_name[0] != '.')
            load_file(file);
        free(names[i]);
    }
    free(names);
}

/* ---- mutation ---- */

static void put(uint8_t *data, size_t size, uint64_t v, size_t width) {
    if (width == 0 || size < width)
        return;
    memcpy(data + below(size - width + 1), &v, width);
}

static size_t insert(uint8_t *data, size_t size, const uint8_t *from, size_t n) {
    if (size + n > max_len)
        return size;
    size_t at = below(size + 1);
    memmove(data + at + n, data + at, size - at);
    memcpy(data + at, from, n);
    return size + n;
}

/* Makes one change. data has room for max_len bytes. Returns the new size. */
static size_t mutate(uint8_t *data, size_t size) {
    static const uint64_t interesting[] = {0, 1, 2, 7, 8, 15, 16, 31, 32, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 1023, 1024,
                                           1025, 4095, 4096, 4097, 32767, 32768, 65535, 65536, 0x7fffffff, 0x80000000,
                                           0xffffffff, 0x100000000, INT64_MAX, (uint64_t)INT64_MIN, UINT64_MAX};
    static const size_t widths[] = {1, 2, 4, 8};
    uint8_t piece[64];
    switch (below(11)) {
    case 0: /* a bit */
        if (size)
            data[below(size)] ^= (uint8_t)(1u << below(8));
        return size;
    case 1: /* a byte */
        if (size)
            data[below(size)] = (uint8_t)rnd();
        return size;
    case 2:
        put(data, size, interesting[below(sizeof interesting / sizeof *interesting)], widths[below(4)]);
        return size;
    case 3: { /* a little more or less */
        size_t w = widths[below(4)];
        uint64_t v = 0;
        if (size < w)
            return size;
        size_t at = below(size - w + 1);
        memcpy(&v, data + at, w);
        v += rnd() % 33 - 16;
        memcpy(data + at, &v, w);
        return size;
    }
    case 4: { /* a value with which the program has compared */
        uint32_t n = n_operands < OPERANDS ? n_operands : OPERANDS;
        struct operand o = operands[below(n ? n : 1)];
        put(data, size, o.value, o.size);
        return size;
    }
    case 5: { /* less */
        size_t n = 1 + below(size < 32 ? size : 32), at = below(size - (n < size ? n : size) + 1);
        if (n > size)
            return size;
        memmove(data + at, data + at + n, size - at - n);
        return size - n;
    }
    case 6: { /* more */
        size_t n = 1 + below(16);
        for (size_t i = 0; i < n; i++)
            piece[i] = (uint8_t)(rnd() & (rnd() & 1 ? 0xff : 0x0f));
        return insert(data, size, piece, n);
    }
    case 7: { /* again */
        size_t n = 1 + below(size < sizeof piece ? size : sizeof piece);
        if (n > size)
            return size;
        memcpy(piece, data + below(size - n + 1), n);
        return insert(data, size, piece, n);
    }
    case 8: { /* elsewhere */
        size_t n = 1 + below(size < sizeof piece ? size : sizeof piece);
        if (n > size)
            return size;
        memcpy(piece, data + below(size - n + 1), n);
        memcpy(data + below(size - n + 1), piece, n);
        return size;
    }
    case 9: { /* the end of another one */
        item other = corpus[below(n_corpus)];
        size_t keep_n = below(size + 1), from = below(other.size + 1), n = other.size - from;
        if (keep_n + n > max_len)
            n = max_len - keep_n;
        if (n)
            memcpy(data + keep_n, other.data + from, n);
        return keep_n + n;
    }
    default: /* a cut */
        return below(size + 1);
    }
}

static double since(const struct timespec *t0) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)(t.tv_sec - t0->tv_sec) + (double)(t.tv_nsec - t0->tv_nsec) / 1e9;
}

static void hunt(double seconds, uint64_t runs, const struct timespec *t0) {
    uint8_t *work = malloc(max_len);
    uint64_t first = run_number;
    while ((!runs || run_number - first < runs) && (run_number % 64 || since(t0) < seconds)) {
        /* New inputs are tried more often. */
        size_t pick = rnd() & 1 ? below(n_corpus) : n_corpus - 1 - below(n_corpus < 16 ? n_corpus : 16);
        size_t size = corpus[pick].size < max_len ? corpus[pick].size : max_len;
        memcpy(work, corpus[pick].data, size);
        for (size_t n = 1 + below(4); n; n--)
            size = mutate(work, size);
        item it = {exact_copy(work, size), size};
        tracing = (rnd() & 15) == 0;
        if (!run(it)) {
            free(it.data);
            continue;
        }
        if (save) {
            char prefix[4096];
            snprintf(prefix, sizeof prefix, "%s/found", save);
            write_hex(prefix, &it);
        }
        keep(it);
    }
    free(work);
}

static int usage(const char *problem, const char *what) {
    fprintf(stderr, "%s: %s%s\nusage: %s [--seconds S] [--runs N] [--seed N] [--max-len N] [--artifact PREFIX] [--save DIR] "
                    "[--unhex DIR] FILE|DIR...\n", program, problem, what, program);
    return 2;
}

int main(int argc, char **argv) {
    double seconds = 0;
    uint64_t runs = 0;
    const char *slash = strrchr(argv[0], '/');
    program = slash ? slash + 1 : argv[0];
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (!strcmp(argv[i], "--seconds") && more)
            seconds = strtod(argv[++i], NULL);
        else if (!strcmp(argv[i], "--runs") && more)
            runs = strtoull(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "--seed") && more)
            rng = strtoull(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "--max-len") && more)
            max_len = strtoull(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "--artifact") && more)
            artifact = argv[++i];
        else if (!strcmp(argv[i], "--save") && more)
            save = argv[++i];
        else if (!strcmp(argv[i], "--unhex") && more)
            raw_dir = argv[++i];
        else if (argv[i][0] == '-')
            return usage("bad option ", argv[i]);
        else
            load(argv[i]);
    }
    if (raw_dir)
        return 0;
    if (n_corpus == 0)
        return usage("no corpus", ""), 1;
    if (max_len == 0)
        return usage("--max-len must be at least 1", "");
    uint64_t seed = rng;
    __sanitizer_set_death_callback(on_death);
    signal(SIGABRT, on_abort);
    signal(SIGALRM, on_tick);
    struct itimerval tick = {{1, 0}, {1, 0}};
    setitimer(ITIMER_REAL, &tick, NULL);
    struct timespec t0;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    size_t given = n_corpus;
    tracing = true;
    for (size_t i = 0; i < given; i++)
        run(corpus[i]);
    if (seconds > 0 || runs)
        hunt(seconds > 0 ? seconds : 1e9, runs, &t0);
    printf("%-22s %3zu given, %8llu runs, %4zu more kept, %.1f s, seed %llu\n", program, given,
           (unsigned long long)run_number, n_corpus - given, since(&t0), (unsigned long long)seed);
    for (size_t i = 0; i < n_corpus; i++)
        free(corpus[i].data);
    return 0;
}
