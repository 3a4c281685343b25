/* The reader of ELF files with arbitrary files. Byte 0 is the number of offsets to look up; byte 1 is how many
 * 16-bit words of them become multiples of a page. A file without an ELF header gets one of this machine, so that
 * its tables are reached. */
#include "internal/dataplane/dp_elf.c"

#include "fuzz.h"

static void check_names(const char *out, uint32_t count, uint32_t n_bytes) {
    MUST(count >= 1 && count <= DP_ELF_FUNCTIONS_MAX && n_bytes <= DP_ELF_NAMES_MAX);
    const char *name = out, *end = out + n_bytes, *before = NULL;
    for (uint32_t i = 0; i < count; i++) {
        size_t len = strnlen(name, (size_t)(end - name));
        MUST(len >= 1 && len <= DP_ELF_NAME_MAX && name + len < end);
        MUST(is_utf8((const uint8_t *)name, (uint32_t)len) && strncmp(name, "_Z", 2));
        MUST(!before || strcmp(before, name) < 0);
        before = name;
        name += len + 1;
    }
    MUST(name == end);
}

static void mend_header(uint8_t *file, size_t size) {
    if (size < sizeof(Elf64_Ehdr) || !memcmp(file, ELFMAG, SELFMAG))
        return;
    Elf64_Ehdr h;
    memcpy(&h, file, sizeof h);
    memcpy(h.e_ident, ELFMAG "\2\1\1", SELFMAG + 3);
    h.e_type = ET_DYN;
    h.e_machine = DP_ELF_MACHINE;
    h.e_shentsize = sizeof(Elf64_Shdr);
    h.e_shoff %= size;
    size_t room = (size - h.e_shoff) / sizeof(Elf64_Shdr);
    h.e_shnum = (uint16_t)(room < 16 ? room : h.e_shnum % 16u + 1);
    memcpy(file, &h, sizeof h);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static dp_elf_work *work;
    if (!work)
        work = malloc(sizeof *work);
    MUST(work);
    input in = {data, size};
    uint32_t n = take8(&in) % (DP_ELF_OFFSETS_MAX + 1), pages = take8(&in);
    uint64_t offsets[DP_ELF_OFFSETS_MAX];
    for (uint32_t i = 0; i < n; i++)
        offsets[i] = (uint64_t)take16(&in) << (i < pages ? 12 : 0);
    uint8_t *file = exact_copy(in.at, in.left);
    mend_header(file, in.left);
    char *out = malloc(DP_ELF_NAMES_MAX);
    MUST(out);
    dp_error err = {0};
    uint32_t count = 0, n_bytes = 0;
    memset(work, 0, sizeof *work);
    int st = dp_elf_functions(file, in.left, "2.36", work, out, &count, &n_bytes, &err);
    MUST(st == DP_OK || (st == DP_BAD_LIBRARY && err.msg[0]));
    if (st == DP_OK)
        check_names(out, count, n_bytes);
    free(out);
    out = malloc(n * DP_ELF_LINE_MAX + 1);
    MUST(out);
    uint32_t written = dp_elf_symbols(file, in.left, offsets, n, out), lines = 0;
    MUST(written <= n * DP_ELF_LINE_MAX);
    for (uint32_t i = 0; i < written; i++)
        lines += out[i] == '\n';
    MUST(lines == n);
    free(out);
    free(file);
    return 0;
}
