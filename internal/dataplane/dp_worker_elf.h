/* A reader of ELF files that anybody may have made: which functions a library exports, and what is at an offset.
 *
 * It runs in a sealed process (dp_worker_inspect.c) and makes no system call. It reads a file that is mapped as a whole, checks every offset
 * against the file's size before it follows it, inflates nothing, and allocates nothing. Its time is bounded by the sizes of the
 * tables below, and by the limit on processor time of the process that it runs in. */
#ifndef RFAAS_DP_WORKER_ELF_H
#define RFAAS_DP_WORKER_ELF_H

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
#define DP_ELF_NAME_MAX 1024          /* bytes of an exported function's name; longer ones are left out */
#define DP_ELF_NAMES_MAX (2u << 20)   /* bytes of all of them, each with its NUL: they travel in one message */
#define DP_ELF_FUNCTIONS_MAX 65536    /* a request's function index has 16 bits */
#define DP_ELF_SYMBOL_MAX 255         /* bytes of the name of a function in a backtrace */
#define DP_ELF_OFFSETS_MAX 128        /* places that are named at once; a backtrace has 64 */
#define DP_ELF_LINE_MAX (DP_ELF_SYMBOL_MAX + 20) /* bytes of a line of dp_elf_symbols: name, "+0x", 16 digits, line feed */

/* Memory that dp_elf_functions works in; zero at first. The caller allocates it. */
typedef struct dp_elf_work {
    struct {
        uint32_t off, len, hash; /* of the name in the table of strings */
    } names[DP_ELF_FUNCTIONS_MAX];
    uint32_t slots[4 * DP_ELF_FUNCTIONS_MAX]; /* a hash table: one more than an index of names, 0: free */
    uint32_t n;
    uint32_t bytes; /* of all names, each with its NUL */
} dp_elf_work;

/* dp_elf_functions checks that a file is a shared library that this node can load, and writes the names of its functions into `out`, sorted by
 * bytes, each ended by a NUL. `out` has room for DP_ELF_NAMES_MAX bytes. glibc is the version of the node's C library, "2.36"; NULL: it
 * is unknown. DP_OK, or DP_BAD_LIBRARY with the reason in err. What only the dynamic linker can find out is not checked. */
int dp_elf_functions(const void *file, uint64_t size, const char *glibc, dp_elf_work *work, char *out, uint32_t *count,
                     uint32_t *bytes, dp_error *err);

/* dp_elf_symbols names the places at n offsets from the library's beginning by the functions in its symbol tables, of which static
 * functions are in .symtab alone. It writes one line for each offset, "name+0x1f", or an empty one where nothing is known, and returns
 * how many bytes that are. `out` has room for n * DP_ELF_LINE_MAX bytes. */
uint32_t dp_elf_symbols(const void *file, uint64_t size, const uint64_t *offsets, uint32_t n, char *out);

#endif
