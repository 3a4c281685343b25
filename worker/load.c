/* Checking and loading the user's library.
 *
 * The file is checked here before the dynamic linker sees it: the linker says "cannot open shared object file" for a
 * library of another architecture, and dies of SIGBUS on a truncated one. */
#include "load.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bundle.h"
#include "dp_elf.h"
#include "message.h"
#include "seed/heap.h"

#ifndef F_GET_SEALS
#define F_GET_SEALS 1034
#define F_SEAL_SEAL 1
#define F_SEAL_SHRINK 2
#define F_SEAL_GROW 4
#define F_SEAL_WRITE 8
#endif

#define PROGRAM_HEADERS_MAX 512

typedef struct reason {
    char *text;
    size_t room;
} reason;

__attribute__((format(printf, 3, 4))) static int refuse_library(reason *r, int status, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(r->text, r->room, fmt, ap);
    va_end(ap);
    return status;
}

/* ---- the file ---- */

static const char *library_machine_name(unsigned machine) {
    switch (machine) {
    case EM_386: return "i386";
    case EM_X86_64: return "x86_64";
    case EM_ARM: return "arm";
    case EM_AARCH64: return "aarch64";
    case EM_PPC64: return "ppc64";
    case EM_S390: return "s390";
    case EM_RISCV: return "riscv";
    default: return "unknown machine";
    }
}

static int check_sealed(int fd, reason *r) {
    const int needed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return refuse_library(r, DP_INVALID, "code is not in a memfd: %s", strerror(errno));
    if ((seals & needed) != needed)
        return refuse_library(r, DP_INVALID, "code memfd has seals %#x, all of %#x are needed", (unsigned)seals,
                              (unsigned)needed);
    return DP_OK;
}

static int check_library_ident(const unsigned char *ident, ssize_t n, reason *r) {
    if (n < EI_NIDENT || memcmp(ident, ELFMAG, SELFMAG))
        return refuse_library(r, DP_BAD_LIBRARY, "not an ELF file (%zd bytes read, beginning %02x %02x %02x %02x)", n,
                              n > 0 ? ident[0] : 0u, n > 1 ? ident[1] : 0u, n > 2 ? ident[2] : 0u, n > 3 ? ident[3] : 0u);
    if (ident[EI_CLASS] != ELFCLASS64)
        return refuse_library(r, DP_BAD_LIBRARY, "not a 64-bit library (ELF class %u)", ident[EI_CLASS]);
    if (ident[EI_DATA] != ELFDATA2LSB)
        return refuse_library(r, DP_BAD_LIBRARY, "not a little-endian library (ELF data %u)", ident[EI_DATA]);
    return DP_OK;
}

static int check_header(const Elf64_Ehdr *h, reason *r) {
    if (h->e_machine != DP_ELF_MACHINE)
        return refuse_library(r, DP_BAD_LIBRARY, "built for %s (ELF machine %u), this node is %s", library_machine_name(h->e_machine),
                              h->e_machine, library_machine_name(DP_ELF_MACHINE));
    if (h->e_type != ET_DYN)
        return refuse_library(r, DP_BAD_LIBRARY, "not a shared library but %s (ELF type %u; link with -shared -fPIC)",
                              h->e_type == ET_REL    ? "an object file"
                              : h->e_type == ET_EXEC ? "a program"
                                                     : "something else",
                              h->e_type);
    if (h->e_phentsize != sizeof(Elf64_Phdr) || h->e_phnum == 0 || h->e_phnum > PROGRAM_HEADERS_MAX)
        return refuse_library(r, DP_BAD_LIBRARY, "damaged ELF header: %u program headers of %u bytes", h->e_phnum,
                              h->e_phentsize);
    return DP_OK;
}

static int check_elf(int fd, reason *r) {
    struct stat sb;
    Elf64_Ehdr h;
    if (fstat(fd, &sb))
        return refuse_library(r, DP_FATAL, "fstat of the code: %s", strerror(errno));
    uint64_t size = (uint64_t)sb.st_size;
    memset(&h, 0, sizeof h);
    ssize_t n = pread(fd, &h, sizeof h, 0);
    if (n < 0)
        return refuse_library(r, DP_FATAL, "read the code: %s", strerror(errno));
    int st = check_library_ident(h.e_ident, n, r);
    if (st == DP_OK && n < (ssize_t)sizeof h)
        st = refuse_library(r, DP_BAD_LIBRARY, "truncated: the file ends in its ELF header");
    if (st == DP_OK)
        st = check_header(&h, r);
    for (unsigned i = 0; st == DP_OK && i < h.e_phnum; i++) {
        Elf64_Phdr ph;
        uint64_t at = h.e_phoff + (uint64_t)i * sizeof ph;
        if (at < h.e_phoff || at > size || size - at < sizeof ph ||
            pread(fd, &ph, sizeof ph, (off_t)at) != (ssize_t)sizeof ph)
            return refuse_library(r, DP_BAD_LIBRARY, "truncated: program header %u lies beyond the %llu bytes of the file", i,
                                  (unsigned long long)size);
        if (ph.p_type == PT_LOAD && (ph.p_offset > size || size - ph.p_offset < ph.p_filesz))
            return refuse_library(r, DP_BAD_LIBRARY, "truncated: segment %u needs %llu bytes at %llu, the file has %llu", i,
                                  (unsigned long long)ph.p_filesz, (unsigned long long)ph.p_offset, (unsigned long long)size);
    }
    return st;
}

/* ---- loading ---- */

/* Returns the linker's message without the library's path, which is that of a memfd. */
static int refuse_dlerror(reason *r, const char *path) {
    static const char subject[] = "the library";
    const char *e = dlerror();
    if (!e)
        e = "the dynamic linker gave no reason";
    size_t at = 0, path_len = strlen(path);
    while (*e && at + sizeof subject < r->room) {
        if (!strncmp(e, path, path_len)) {
            memcpy(r->text + at, subject, sizeof subject - 1);
            at += sizeof subject - 1;
            e += path_len;
        } else {
            r->text[at++] = *e++;
        }
    }
    r->text[at] = 0;
    return DP_BAD_LIBRARY;
}

/* Only functions that the library itself defines: dlsym would also find "abort" in its libc. */
static int check_symbol(void *library, const char *name, uint32_t index, void *at, reason *r) {
    struct link_map *own = NULL, *of = NULL;
    const Elf64_Sym *symbol = NULL;
    Dl_info info;
    if (dlinfo(library, RTLD_DI_LINKMAP, &own) || !dladdr1(at, &info, (void **)&of, RTLD_DL_LINKMAP) || of != own)
        return refuse_library(r, DP_BAD_LIBRARY, "function %u \"%s\" is not defined by the library itself but by %s", index,
                              name, of && of->l_name && *of->l_name ? of->l_name : "another one");
    if (dladdr1(at, &info, (void **)&symbol, RTLD_DL_SYMENT) && symbol && info.dli_saddr == at) {
        unsigned type = ELF64_ST_TYPE(symbol->st_info);
        if (type == STT_OBJECT || type == STT_TLS || type == STT_COMMON)
            return refuse_library(r, DP_BAD_LIBRARY, "function %u \"%s\" is a variable", index, name);
    }
    return DP_OK;
}

static int find_functions(void *library, const char *names, size_t len, uint32_t n, dp_function *table, reason *r) {
    const char *name = names, *end = names + len;
    for (uint32_t i = 0; i < n; i++) {
        size_t left = (size_t)(end - name);
        size_t name_len = strnlen(name, left);
        if (name_len == 0 || name_len == left)
            return refuse_library(r, DP_INVALID, "function %u of %u has no name", i, n);
        void *at = dlsym(library, name);
        if (!at)
            return refuse_library(r, DP_BAD_LIBRARY,
                                  "function %u \"%s\" is not among the library's symbols (in C++ it needs extern \"C\")", i,
                                  name);
        int st = check_symbol(library, name, i, at, r);
        if (st != DP_OK)
            return st;
        /* POSIX lets a data pointer from dlsym become a function; ISO C only through memory. */
        memcpy(&table[i], &at, sizeof at);
        name += name_len + 1;
    }
    if (name != end)
        return refuse_library(r, DP_INVALID, "more than %u function names", n);
    return DP_OK;
}

static int read_names(int fd, char **names, size_t *len, reason *r) {
    struct stat sb;
    if (fstat(fd, &sb))
        return refuse_library(r, DP_FATAL, "fstat of the function names: %s", strerror(errno));
    if (sb.st_size < 1 || sb.st_size > DP_NAMES_MAX)
        return refuse_library(r, DP_INVALID, "function names of %lld bytes, not in 1..%u", (long long)sb.st_size, DP_NAMES_MAX);
    *len = (size_t)sb.st_size;
    *names = malloc(*len);
    if (!*names)
        return refuse_library(r, DP_FATAL, "no memory for %zu bytes of function names", *len);
    ssize_t n = pread(fd, *names, *len, 0);
    if (n != (ssize_t)*len) {
        free(*names);
        return refuse_library(r, DP_FATAL, "read the function names: %zd of %zu bytes", n, *len);
    }
    return DP_OK;
}

int dp_worker_load(int code, int names, uint32_t n, dp_function **table, char *text, size_t room) {
    reason r = {text, room};
    int st = check_sealed(code, &r);
    if (st == DP_OK)
        st = check_elf(code, &r);
    if (st != DP_OK)
        return st;
    char *list = NULL;
    size_t len = 0;
    st = read_names(names, &list, &len, &r);
    if (st != DP_OK)
        return st;
    dp_function *t = calloc(n, sizeof *t);
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", code);
    int outside = dp_heap_outside;
    dp_heap_outside = 0; /* constructors of user code run */
    st = dp_bundle_load(text, room);
    void *library = t && st == DP_OK ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    dp_heap_outside = outside;
    if (!t)
        st = refuse_library(&r, DP_FATAL, "no memory for a table of %u functions", n);
    else if (st != DP_OK)
        ; /* text says why */
    else if (!library)
        st = refuse_dlerror(&r, path);
    else
        st = find_functions(library, list, len, n, t, &r);
    free(list);
    if (st == DP_OK)
        *table = t;
    else
        free(t);
    return st;
}
