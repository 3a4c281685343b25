/* A reader of untrusted ELF files: which functions a library exports, and which function is at an offset.
 *
 * For executors it runs in a sealed process (worker/inspect.c). The client uses it for libraries that it loads itself. It makes no system
 * calls. It reads a file that is mapped as a whole, checks every offset against the file's size before it follows it, decompresses
 * nothing, and allocates nothing. Its time is bounded by the table sizes below, and in a sealed process by the limit on processor time. */
#ifndef RFAAS_DP_ELF_H
#define RFAAS_DP_ELF_H

#include <elf.h>
#include <stddef.h>
#include <stdint.h>

#include "dp_status.h"

#if defined(__x86_64__)
#define DP_ELF_MACHINE EM_X86_64
#elif defined(__aarch64__)
#define DP_ELF_MACHINE EM_AARCH64
#elif defined(__powerpc64__)
#define DP_ELF_MACHINE EM_PPC64
#elif defined(__riscv)
#define DP_ELF_MACHINE EM_RISCV
#else
#error "name this architecture's ELF machine"
#endif

#define DP_ELF_TABLE_MAX (64u << 20)  /* bytes of one table of symbols or strings */
#define DP_ELF_NAME_MAX 1024          /* bytes of an exported function's name; functions with longer names are left out */
#define DP_ELF_NAMES_MAX (2u << 20)   /* bytes of all names, each with its NUL: they travel in one message */
#define DP_ELF_FUNCTIONS_MAX 65536    /* a request's function index has 16 bits */
#define DP_ELF_SYMBOL_MAX 255         /* bytes of the name of a function in a backtrace */
#define DP_ELF_OFFSETS_MAX 128        /* offsets in one request; a backtrace has 64 */
#define DP_ELF_LINE_MAX (DP_ELF_SYMBOL_MAX + 20) /* bytes of a line of dp_elf_symbols: name, "+0x", 16 digits, line feed */

/* Working memory of dp_elf_functions. The caller allocates it and sets it to zero. */
typedef struct dp_elf_work {
    struct {
        uint32_t off, len, hash; /* of the name in the string table */
    } names[DP_ELF_FUNCTIONS_MAX];
    uint32_t slots[4 * DP_ELF_FUNCTIONS_MAX]; /* hash table: index in names plus one, 0: free */
    uint32_t n;
    uint32_t bytes; /* of all names, each with its NUL */
} dp_elf_work;

/* dp_elf_functions checks that a file is a shared library that this node can load, and writes the names of its
 * functions to `out`, sorted by bytes, each with its NUL. `out` must have DP_ELF_NAMES_MAX bytes. glibc is the
 * version of the node's C library, like "2.36"; NULL: unknown. It returns DP_OK, or DP_BAD_LIBRARY with the reason
 * in err. It does not check what only the dynamic linker can find out. */
int dp_elf_functions(const void *file, uint64_t size, const char *glibc, dp_elf_work *work, char *out, uint32_t *count,
                     uint32_t *bytes, dp_error *err);

/* dp_elf_symbols finds the functions at n offsets from the library's beginning in its symbol tables. Static
 * functions are in .symtab only. It writes one line for each offset, "name+0x1f", or an empty one if the function is
 * unknown, and returns the number of bytes written. `out` must have n * DP_ELF_LINE_MAX bytes. */
uint32_t dp_elf_symbols(const void *file, uint64_t size, const uint64_t *offsets, uint32_t n, char *out);

#endif
