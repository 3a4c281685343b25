#include "layout.h"

#include "place.h"

#if defined __x86_64__ && !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* From dp_place_base() on. */
#define PROGRAM (1ul << 40)
#define LIBRARIES (PROGRAM + (64ul << 30)) /* libraries, thread-local memory, and what they map while they start */
#define LIBRARIES_SIZE (4ul << 30)
#define LINKER (LIBRARIES + (64ul << 30))
#define NOTE (LINKER + (64ul << 30))
#define IMAGE_MOST (1ul << 30)

/* libc stores function pointers encrypted by this word, also in memory that a seed keeps. The word is as public as the addresses above. */
#define POINTER_GUARD 0x5db1f2c37a9604e5ul

#define PAGE 4096ul
#define UP(x) (((x) + PAGE - 1) & ~(PAGE - 1))
#define DOWN(x) ((x) & ~(PAGE - 1))

enum { HEADERS_MAX = 64, MAPS_MAX = 128 << 10 };

/* What dp_layout_end frees. */
typedef struct note {
    int n;
    dp_range list[2 * DP_RANGES_MAX];
} note;

typedef struct image {
    uint64_t at, size; /* of its memory */
    uint64_t entry, headers, n_headers;
    char interpreter[256];
} image;

static bool read_at(int fd, void *to, size_t size, uint64_t at) { return pread(fd, to, size, (off_t)at) == (ssize_t)size; }

static int protection(uint32_t flags) {
    return (flags & PF_R ? PROT_READ : 0) | (flags & PF_W ? PROT_WRITE : 0) | (flags & PF_X ? PROT_EXEC : 0);
}

static bool map_segment(int fd, uint64_t base, const Elf64_Phdr *h) {
    uint64_t at = base + h->p_vaddr, from = DOWN(at), file_end = at + h->p_filesz, end = UP(at + h->p_memsz);
    int prot = protection(h->p_flags);
    void *to = (void *)from;
    if (file_end > from && mmap(to, file_end - from, prot, MAP_PRIVATE | MAP_FIXED, fd, (off_t)DOWN(h->p_offset)) != to)
        return false;
    if (h->p_memsz > h->p_filesz && UP(file_end) > file_end)
        memset((void *)file_end, 0, (UP(file_end) < end ? UP(file_end) : end) - file_end);
    to = (void *)UP(file_end);
    return end <= UP(file_end) || mmap(to, end - UP(file_end), prot, MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, -1, 0) == to;
}

/* Maps a position-independent file. On failure, what is mapped at m->at has m->size bytes. */
static bool map_image(const char *path, uint64_t at, image *m) {
    Elf64_Ehdr e;
    Elf64_Phdr h[HEADERS_MAX];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool good = fd >= 0 && read_at(fd, &e, sizeof e, 0) && !memcmp(e.e_ident, ELFMAG, SELFMAG) && e.e_type == ET_DYN && e.e_phentsize == sizeof *h &&
                e.e_phnum <= HEADERS_MAX && read_at(fd, h, e.e_phnum * sizeof *h, e.e_phoff);
    uint64_t size = 0;
    for (int i = 0; good && i < e.e_phnum; i++) {
        if (h[i].p_type == PT_LOAD && UP(h[i].p_vaddr + h[i].p_memsz) > size)
            size = UP(h[i].p_vaddr + h[i].p_memsz);
        if (h[i].p_type == PT_INTERP)
            good = h[i].p_filesz < sizeof m->interpreter && read_at(fd, m->interpreter, h[i].p_filesz, h[i].p_offset);
    }
    good = good && size && size < IMAGE_MOST && mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == (void *)at;
    if (good) {
        m->at = at;
        m->size = size;
        m->entry = at + e.e_entry;
        m->headers = at + e.e_phoff;
        m->n_headers = e.e_phnum;
    }
    for (int i = 0; good && i < e.e_phnum; i++)
        good = h[i].p_type != PT_LOAD || map_segment(fd, at, &h[i]);
    if (fd >= 0)
        close(fd);
    return good;
}

/* Notes the memory of the first start, which dp_layout_end frees: all but what belongs to the kernel, the stack, and the heap. */
static bool note_first(const char *maps, note *n) {
    dp_range r;
    const char *name;
    while ((maps = dp_place_next(maps, &r, &name))) {
        if (!strncmp(name, "[stack]", 7) || !strncmp(name, "[heap]", 6) || !strncmp(name, "[v", 2) || !strncmp(name, "[uprobes]", 9))
            continue;
        if (n->n == DP_RANGES_MAX)
            return false;
        n->list[n->n++] = r;
    }
    return true;
}

static bool is_next(dp_range hole) {
    void *p = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return false;
    munmap(p, PAGE);
    return (uintptr_t)p - hole.from < hole.to - hole.from;
}

/* The kernel writes to this area of the first libc, whose memory is freed later. */
static bool forget_sequences(void) {
    enum { UNREGISTER = 1 };
    const ptrdiff_t *offset = dlsym(RTLD_DEFAULT, "__rseq_offset");
    const unsigned *size = dlsym(RTLD_DEFAULT, "__rseq_size");
    if (!offset || !size || !*size)
        return true;
    void *area = (char *)__builtin_thread_pointer() + *offset;
    for (unsigned n = 32; n <= 256; n += 32)
        if (!syscall(SYS_rseq, area, n, UNREGISTER, 0x53053053))
            return true;
    return false;
}

/* Names the second start to the dynamic linker. */
static void correct(Elf64_auxv_t *v, const image *program, const image *linker) {
    Elf64_auxv_t *first = v;
    for (; v->a_type != AT_NULL; v++)
        switch (v->a_type) {
        case AT_PHDR: v->a_un.a_val = program->headers; break;
        case AT_PHNUM: v->a_un.a_val = program->n_headers; break;
        case AT_ENTRY: v->a_un.a_val = program->entry; break;
        case AT_BASE: v->a_un.a_val = linker->at; break;
        case AT_RANDOM: memcpy((char *)v->a_un.a_val + 8, &(uint64_t){POINTER_GUARD}, 8); break; /* NOLINT: the kernel stores an address */
        default: break;
        }
    prctl(PR_SET_MM, PR_SET_MM_AUXV, first, (size_t)((char *)(v + 1) - (char *)first), 0); /* for debuggers. Needs a privilege */
}

_Noreturn static void jump(void *stack, uint64_t entry) {
    __asm__ volatile("mov %0, %%rsp\n xor %%edx, %%edx\n xor %%ebp, %%ebp\n jmp *%1" : : "r"(stack), "r"(entry) : "memory");
    __builtin_unreachable();
}

/* Returns the base if the program lies at its fixed address, else 0. */
static uintptr_t entered(void) {
    uintptr_t self = (uintptr_t)&dp_layout_enter, base = self / PROGRAM * PROGRAM - PROGRAM;
    return dp_place_is_base(base) && self - base - PROGRAM < IMAGE_MOST ? base : 0;
}

static Elf64_auxv_t *auxiliary(char **argv) {
    char **p = argv;
    while (*p)
        p++;
    for (p++; *p;) /* the environment */
        p++;
    return (Elf64_auxv_t *)(p + 1);
}

void dp_layout_enter(char **argv) {
    static char maps[MAPS_MAX];
    static image program, linker;
    uintptr_t base = entered() ? 0 : dp_place_base();
    dp_range hole = {base + LIBRARIES, base + LIBRARIES + LIBRARIES_SIZE};
    note *n = (note *)(base + NOTE); /* NOLINT: a fixed address */
    if (!base || dp_place_maps(maps, sizeof maps) < 0 ||
        mmap(n, sizeof *n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != n)
        return;
    bool good = note_first(maps, n) && map_image("/proc/self/exe", base + PROGRAM, &program) && map_image(program.interpreter, base + LINKER, &linker) &&
                dp_place_maps(maps, sizeof maps) > 0;
    int first = n->n, more = good ? dp_place_fill(maps, hole, n->list + first) : 0;
    if (good && more >= 0 && is_next(hole) && forget_sequences()) {
        n->n += more;
        correct(auxiliary(argv), &program, &linker);
        jump(argv - 1, linker.entry);
    }
    dp_place_free(n->list + first, more > 0 ? more : 0);
    if (program.size)
        munmap((void *)program.at, program.size);
    if (linker.size)
        munmap((void *)linker.at, linker.size);
    munmap(n, sizeof *n);
}

void dp_layout_end(void) {
    uintptr_t base = entered();
    note *n = (note *)(base + NOTE); /* NOLINT: left there by dp_layout_enter */
    if (!base)
        return;
    dp_place_free(n->list, n->n);
    munmap(n, sizeof *n);
}
#else
void dp_layout_enter(char **argv) { (void)argv; }

void dp_layout_end(void) {}
#endif
