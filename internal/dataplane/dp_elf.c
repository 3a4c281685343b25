/* The reader of ELF files of dp_elf.h. No loop follows a chain in the file without a limit, and no name is
 * copied unless it is part of the answer: a hostile library may share one long string among all symbols, or let its
 * tables overlap. */
#include "dp_elf.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define SECTIONS_MAX 0xff00u     /* SHN_LORESERVE: the limit without extended numbering */
#define STEPS_MAX (1u << 16)     /* entries of the table of needed versions */
#define SYMBOLS_MAX (1u << 20)   /* entries of a table in which offsets are looked up */

typedef struct elf_file {
    const uint8_t *at;
    uint64_t size;
    uint64_t sections; /* offset */
    uint32_t n_sections;
    uint16_t type, machine;
} elf_file;

typedef struct bytes {
    const uint8_t *at;
    uint64_t len;
} bytes;

/* The file's structures may be unaligned. */
static uint16_t file_get16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static uint32_t file_get32(const uint8_t *p) { return file_get16(p) | (uint32_t)file_get16(p + 2) << 16; }
static uint64_t file_get64(const uint8_t *p) { return file_get32(p) | (uint64_t)file_get32(p + 4) << 32; }

#define bad(err, ...) dp_fail(err, DP_BAD_LIBRARY, 0, __VA_ARGS__)

/* ---- the file ---- */

static const char *machine_name(unsigned machine) {
    switch (machine) {
    case EM_386: return "EM_386";
    case EM_X86_64: return "EM_X86_64";
    case EM_ARM: return "EM_ARM";
    case EM_AARCH64: return "EM_AARCH64";
    case EM_PPC: return "EM_PPC";
    case EM_PPC64: return "EM_PPC64";
    case EM_S390: return "EM_S390";
    case EM_RISCV: return "EM_RISCV";
    case EM_CUDA: return "EM_CUDA";
    default: return "another machine";
    }
}

static const char *type_name(unsigned type) {
    switch (type) {
    case ET_NONE: return "ET_NONE";
    case ET_REL: return "ET_REL";
    case ET_EXEC: return "ET_EXEC";
    case ET_DYN: return "ET_DYN";
    case ET_CORE: return "ET_CORE";
    default: return "unknown";
    }
}

static int check_ident(const uint8_t *head, uint64_t n, dp_error *err) {
    static const char *const classes[] = {"ELFCLASSNONE", "ELFCLASS32", "ELFCLASS64"};
    static const char *const orders[] = {"ELFDATANONE", "ELFDATA2LSB", "ELFDATA2MSB"};
    if (n < SELFMAG || memcmp(head, ELFMAG, SELFMAG)) {
        char begins[3 * SELFMAG + 1] = "";
        for (unsigned i = 0; i < SELFMAG && i < n; i++)
            snprintf(begins + 3 * i, sizeof begins - 3 * i, " %02x", head[i]);
        return bad(err, "not an ELF file: it begins with the bytes%s", begins);
    }
    if (n <= EI_DATA)
        return DP_OK;
    unsigned class = head[EI_CLASS], order = head[EI_DATA];
    if (class != ELFCLASS64 || order != ELFDATA2LSB)
        return bad(err, "ELF class %s, %s; this node needs 64 bits, little endian", class < 3 ? classes[class] : "unknown",
                   order < 3 ? orders[order] : "unknown");
    return DP_OK;
}

static int open_file(elf_file *f, const void *file, uint64_t size, dp_error *err) {
    const uint8_t *head = file;
    int st = check_ident(head, size, err);
    if (st != DP_OK)
        return st;
    if (size < sizeof(Elf64_Ehdr))
        return bad(err, "malformed ELF file: it ends in its header");
    unsigned entry = file_get16(head + offsetof(Elf64_Ehdr, e_shentsize));
    *f = (elf_file){.at = head,
                    .size = size,
                    .type = file_get16(head + offsetof(Elf64_Ehdr, e_type)),
                    .machine = file_get16(head + offsetof(Elf64_Ehdr, e_machine)),
                    .sections = file_get64(head + offsetof(Elf64_Ehdr, e_shoff)),
                    .n_sections = file_get16(head + offsetof(Elf64_Ehdr, e_shnum))};
    if (!f->n_sections || f->n_sections >= SECTIONS_MAX || entry != sizeof(Elf64_Shdr))
        return bad(err, "malformed ELF file: %u sections of %u bytes", f->n_sections, entry);
    uint64_t table = f->n_sections * sizeof(Elf64_Shdr);
    if (f->sections > size || size - f->sections < table)
        return bad(err, "malformed ELF file: it ends before %llu bytes at %llu", (unsigned long long)table,
                   (unsigned long long)f->sections);
    return DP_OK;
}

static const uint8_t *section_header(const elf_file *f, uint32_t i) { return f->at + f->sections + i * sizeof(Elf64_Shdr); }
static uint32_t section_type(const uint8_t *h) { return file_get32(h + offsetof(Elf64_Shdr, sh_type)); }

/* Returns the header of the first section of a type, NULL if there is none. */
static const uint8_t *find_section(const elf_file *f, uint32_t type) {
    for (uint32_t i = 0; i < f->n_sections; i++)
        if (section_type(section_header(f, i)) == type)
            return section_header(f, i);
    return NULL;
}

static int section_bytes(const elf_file *f, const uint8_t *h, bytes *out, dp_error *err) {
    uint64_t off = file_get64(h + offsetof(Elf64_Shdr, sh_offset)), n = file_get64(h + offsetof(Elf64_Shdr, sh_size));
    if (file_get64(h + offsetof(Elf64_Shdr, sh_flags)) & SHF_COMPRESSED)
        return bad(err, "malformed ELF file: a table is compressed");
    if (n > DP_ELF_TABLE_MAX)
        return bad(err, "malformed ELF file: a table of %llu bytes, at most %u are read", (unsigned long long)n, DP_ELF_TABLE_MAX);
    if (off > f->size || f->size - off < n)
        return bad(err, "malformed ELF file: it ends before %llu bytes at %llu", (unsigned long long)n, (unsigned long long)off);
    *out = (bytes){f->at + off, n};
    return DP_OK;
}

/* Sets *out to the string table that belongs to a section. */
static int section_strings(const elf_file *f, const uint8_t *h, bytes *out, dp_error *err) {
    uint32_t link = file_get32(h + offsetof(Elf64_Shdr, sh_link));
    if (link >= f->n_sections || section_type(section_header(f, link)) != SHT_STRTAB)
        return bad(err, "malformed ELF file: section %u is not a string table", link);
    return section_bytes(f, section_header(f, link), out, err);
}

/* Returns the length of the string at off; 0 if it has no end or is longer than most. */
static uint32_t name_length(const bytes *strings, uint32_t off, uint32_t most) {
    if (off >= strings->len)
        return 0;
    uint64_t left = strings->len - off;
    const uint8_t *from = strings->at + off, *end = memchr(from, 0, left < most + 1u ? left : most + 1u);
    return end ? (uint32_t)(end - from) : 0;
}

/* ---- names ---- */

/* Returns the length of the UTF-8 character at s, 0 if it is invalid. */
static uint32_t utf8_length(const uint8_t *s, uint32_t left) {
    static const struct {
        uint8_t first, last, low, high; /* first byte, bounds of the second */
        uint8_t len;
    } forms[] = {{0x00, 0x7f, 0, 0, 1},       {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3}, {0xe1, 0xec, 0x80, 0xbf, 3},
                 {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3}, {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4},
                 {0xf4, 0xf4, 0x80, 0x8f, 4}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (s[0] < forms[i].first || s[0] > forms[i].last)
            continue;
        uint32_t n = forms[i].len;
        if (n > left || (n > 1 && (s[1] < forms[i].low || s[1] > forms[i].high)))
            return 0;
        for (uint32_t k = 2; k < n; k++)
            if (s[k] < 0x80 || s[k] > 0xbf)
                return 0;
        return n;
    }
    return 0;
}

static bool is_utf8(const uint8_t *s, uint32_t len) {
    for (uint32_t i = 0; i < len;) {
        uint32_t n = utf8_length(s + i, len - i);
        if (!n)
            return false;
        i += n;
    }
    return true;
}

static uint32_t hash_of(const uint8_t *s, uint32_t len) {
    uint32_t h = 2166136261u; /* FNV-1a. Names made to collide only slow down their own upload. */
    for (uint32_t i = 0; i < len; i++)
        h = (h ^ s[i]) * 16777619u;
    return h ^ h >> 15;
}

/* Returns the slot of a name. It is free if the name is not in the table yet. */
static uint32_t *slot_of(dp_elf_work *w, const bytes *strings, uint32_t off, uint32_t len, uint32_t hash) {
    const uint32_t mask = sizeof w->slots / sizeof *w->slots - 1;
    for (uint32_t i = hash & mask;; i = (i + 1) & mask) {
        uint32_t *slot = &w->slots[i];
        if (!*slot)
            return slot;
        uint32_t k = *slot - 1;
        if (w->names[k].hash == hash && w->names[k].len == len && !memcmp(strings->at + w->names[k].off, strings->at + off, len))
            return slot;
    }
}

static int add_name(dp_elf_work *w, const bytes *strings, uint32_t off, uint32_t len, dp_error *err) {
    const uint8_t *name = strings->at + off;
    if ((len >= 2 && !memcmp(name, "_Z", 2)) || (len == 5 && (!memcmp(name, "_init", 5) || !memcmp(name, "_fini", 5))))
        return DP_OK;
    uint32_t hash = hash_of(name, len);
    uint32_t *slot = slot_of(w, strings, off, len, hash);
    if (*slot || !is_utf8(name, len))
        return DP_OK;
    if (w->n == DP_ELF_FUNCTIONS_MAX)
        return bad(err, "it exports more than %d functions, which is how many can be called", DP_ELF_FUNCTIONS_MAX);
    w->bytes += len + 1;
    if (w->bytes > DP_ELF_NAMES_MAX)
        return bad(err, "the names of its functions take more than %u bytes", DP_ELF_NAMES_MAX);
    w->names[w->n].off = off;
    w->names[w->n].len = len;
    w->names[w->n].hash = hash;
    *slot = ++w->n;
    return DP_OK;
}

/* Reports whether a symbol is a function that is global, has default visibility and is defined in the file. */
static bool is_exported_function(const uint8_t *symbol) {
    uint8_t info = symbol[offsetof(Elf64_Sym, st_info)];
    return ELF64_ST_BIND(info) == STB_GLOBAL && ELF64_ST_TYPE(info) == STT_FUNC &&
           ELF64_ST_VISIBILITY(symbol[offsetof(Elf64_Sym, st_other)]) == STV_DEFAULT &&
           file_get16(symbol + offsetof(Elf64_Sym, st_shndx)) != SHN_UNDEF;
}

static int collect_names(const elf_file *f, dp_elf_work *w, bytes *strings, dp_error *err) {
    const uint8_t *section = find_section(f, SHT_DYNSYM);
    if (!section)
        return bad(err, "no dynamic symbols");
    bytes table;
    int st = section_bytes(f, section, &table, err);
    if (st == DP_OK)
        st = section_strings(f, section, strings, err);
    for (uint64_t at = 0; st == DP_OK && table.len - at >= sizeof(Elf64_Sym); at += sizeof(Elf64_Sym)) {
        const uint8_t *symbol = table.at + at;
        if (!is_exported_function(symbol))
            continue;
        uint32_t off = file_get32(symbol + offsetof(Elf64_Sym, st_name)), len = name_length(strings, off, DP_ELF_NAME_MAX);
        if (len)
            st = add_name(w, strings, off, len, err);
    }
    if (st == DP_OK && table.len % sizeof(Elf64_Sym))
        return bad(err, "malformed ELF file: its symbol table has %u extra bytes", (unsigned)(table.len % sizeof(Elf64_Sym)));
    return st;
}

static bool less(const dp_elf_work *w, const bytes *strings, uint32_t a, uint32_t b) {
    uint32_t n = w->names[a].len < w->names[b].len ? w->names[a].len : w->names[b].len;
    int order = memcmp(strings->at + w->names[a].off, strings->at + w->names[b].off, n);
    return order ? order < 0 : w->names[a].len < w->names[b].len;
}

static void swap_names(dp_elf_work *w, uint32_t a, uint32_t b) {
    __typeof__(w->names[0]) t = w->names[a];
    w->names[a] = w->names[b];
    w->names[b] = t;
}

static void sift_down(dp_elf_work *w, const bytes *strings, uint32_t root, uint32_t n) {
    for (uint32_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && less(w, strings, child, child + 1))
            child++;
        if (!less(w, strings, root, child))
            return;
        swap_names(w, root, child);
    }
}

/* A heap sort, because qsort() may allocate memory and make system calls. */
static void sort_names(dp_elf_work *w, const bytes *strings) {
    for (uint32_t i = w->n / 2; i-- > 0;)
        sift_down(w, strings, i, w->n);
    for (uint32_t n = w->n; n-- > 1;) {
        swap_names(w, 0, n);
        sift_down(w, strings, 0, n);
    }
}

/* ---- what the library needs ---- */

/* Sets *value to the value of a tag of the dynamic section, 0 if the tag is missing. */
static int dynamic_value(const elf_file *f, uint64_t tag, uint64_t *value, dp_error *err) {
    *value = 0;
    const uint8_t *section = find_section(f, SHT_DYNAMIC);
    bytes table;
    int st = section ? section_bytes(f, section, &table, err) : DP_OK;
    if (!section || st != DP_OK)
        return st;
    for (uint64_t at = 0; table.len - at >= sizeof(Elf64_Dyn); at += sizeof(Elf64_Dyn)) {
        if (file_get64(table.at + at) != tag)
            continue;
        *value = file_get64(table.at + at + offsetof(Elf64_Dyn, d_un));
        break;
    }
    return DP_OK;
}

typedef struct version {
    uint64_t major, minor;
} version;

static bool parse_number(const char **s, const char *end, uint64_t *out) {
    const char *from = *s;
    for (*out = 0; *s < end && **s >= '0' && **s <= '9' && *s - from < 18; ++*s)
        *out = *out * 10 + (uint64_t)(**s - '0');
    return *s > from;
}

/* Parses "2.36", and "2.2.5" as 2.2. */
static bool parse_version(const char *s, const char *end, version *out) {
    if (!parse_number(&s, end, &out->major) || s == end || *s++ != '.' || !parse_number(&s, end, &out->minor))
        return false;
    return s == end || *s == '.';
}

/* Parses "GLIBC_2.36". Names like GLIBC_PRIVATE or GLIBC_ABI_DT_RELR are not versions. */
static bool parse_glibc(const bytes *strings, uint32_t off, version *out) {
    static const char prefix[] = "GLIBC_";
    uint32_t len = name_length(strings, off, DP_ELF_NAME_MAX);
    const char *name = (const char *)strings->at + off;
    return len >= sizeof prefix && !memcmp(name, prefix, sizeof prefix - 1) && parse_version(name + sizeof prefix - 1, name + len, out);
}

/* Copies bytes of the file as printable text. */
static void printable(char *out, size_t room, const uint8_t *s, uint32_t len) {
    size_t n = 0;
    for (; n < len && n + 1 < room; n++)
        out[n] = s[n] >= ' ' && s[n] < 0x7f ? (char)s[n] : ' ';
    out[n] = 0;
}

typedef struct needs {
    bytes table, strings;
    version node;
} needs;

static int need_at(const needs *d, uint64_t off, const uint8_t **out, dp_error *err) {
    if (off > d->table.len || d->table.len - off < sizeof(Elf64_Verneed))
        return bad(err, "malformed ELF file: its needed versions continue at byte %llu of %llu", (unsigned long long)off,
                   (unsigned long long)d->table.len);
    *out = d->table.at + off;
    return DP_OK;
}

static int check_needed(const needs *d, const uint8_t *need, const uint8_t *aux, dp_error *err) {
    version v;
    if (!parse_glibc(&d->strings, file_get32(aux + offsetof(Elf64_Vernaux, vna_name)), &v) || v.major < d->node.major ||
        (v.major == d->node.major && v.minor <= d->node.minor))
        return DP_OK;
    char library[64];
    uint32_t file = file_get32(need + offsetof(Elf64_Verneed, vn_file)), len = name_length(&d->strings, file, DP_ELF_NAME_MAX);
    printable(library, sizeof library, d->strings.at + (len ? file : 0), len);
    return bad(err, "needs GLIBC_%llu.%llu of \"%s\", but this node has glibc %llu.%llu: build it on a system that is as old as the node",
               (unsigned long long)v.major, (unsigned long long)v.minor, library, (unsigned long long)d->node.major,
               (unsigned long long)d->node.minor);
}

/* Checks the needed versions of one library. Both tables are chains; *steps bounds the entries that are followed in
 * both together. */
static int walk_need(const needs *d, const uint8_t *need, uint64_t off, uint32_t *steps, dp_error *err) {
    uint32_t left = file_get16(need + offsetof(Elf64_Verneed, vn_cnt));
    uint64_t at = off + file_get32(need + offsetof(Elf64_Verneed, vn_aux));
    while (left-- > 0) {
        const uint8_t *aux = NULL;
        if (++*steps > STEPS_MAX)
            return bad(err, "malformed ELF file: more than %u needed versions", STEPS_MAX);
        int st = need_at(d, at, &aux, err);
        if (st == DP_OK)
            st = check_needed(d, need, aux, err);
        if (st != DP_OK)
            return st;
        uint32_t next = file_get32(aux + offsetof(Elf64_Vernaux, vna_next));
        if (!next)
            break;
        at += next;
    }
    return DP_OK;
}

static int check_glibc(const elf_file *f, const char *glibc, dp_error *err) {
    needs d;
    const uint8_t *section = find_section(f, SHT_GNU_verneed);
    if (!section || !glibc || !parse_version(glibc, glibc + strlen(glibc), &d.node))
        return DP_OK;
    int st = section_bytes(f, section, &d.table, err);
    if (st == DP_OK)
        st = section_strings(f, section, &d.strings, err);
    uint32_t steps = 0;
    for (uint64_t off = 0; st == DP_OK;) {
        const uint8_t *need = NULL;
        if (++steps > STEPS_MAX)
            return bad(err, "malformed ELF file: more than %u needed versions", STEPS_MAX);
        st = need_at(&d, off, &need, err);
        if (st == DP_OK)
            st = walk_need(&d, need, off, &steps, err);
        uint32_t next = st == DP_OK ? file_get32(need + offsetof(Elf64_Verneed, vn_next)) : 0;
        if (!next)
            break;
        off += next;
    }
    return st;
}

/* ---- the two questions ---- */

static int check_kind(const elf_file *f, dp_error *err) {
    if (f->machine != DP_ELF_MACHINE)
        return bad(err, "built for %s (ELF machine %u), this node is %s", machine_name(f->machine), f->machine, machine_name(DP_ELF_MACHINE));
    if (f->type != ET_DYN)
        return bad(err, "ELF type %s (%u), not a shared library (link with -shared)", type_name(f->type), f->type);
    uint64_t flags;
    int st = dynamic_value(f, DT_FLAGS_1, &flags, err);
    if (st == DP_OK && flags & DF_1_PIE)
        return bad(err, "a position-independent program, not a shared library (link with -shared)");
    return st;
}

int dp_elf_functions(const void *file, uint64_t size, const char *glibc, dp_elf_work *work, char *out, uint32_t *count,
                     uint32_t *n_bytes, dp_error *err) {
    elf_file f;
    bytes strings = {0};
    int st = open_file(&f, file, size, err);
    if (st == DP_OK)
        st = check_kind(&f, err);
    if (st == DP_OK)
        st = check_glibc(&f, glibc, err);
    if (st == DP_OK)
        st = collect_names(&f, work, &strings, err);
    if (st != DP_OK)
        return st;
    if (!work->n)
        return bad(err, "it exports no functions (C linkage and default visibility are needed)");
    sort_names(work, &strings);
    for (uint32_t i = 0; i < work->n; i++) {
        memcpy(out, strings.at + work->names[i].off, work->names[i].len);
        out[work->names[i].len] = 0;
        out += work->names[i].len + 1;
    }
    *count = work->n;
    *n_bytes = work->bytes;
    return DP_OK;
}

typedef struct place {
    const uint8_t *name; /* NULL: unknown */
    uint32_t len;
    uint64_t beyond; /* offset from the beginning of the function */
} place;

/* Names the offsets that have no name yet, by the first function in a symbol table that contains them. */
static void look_up(const elf_file *f, uint32_t type, const uint64_t *offsets, place *places, uint32_t n) {
    const uint8_t *section = find_section(f, type);
    bytes table, strings;
    dp_error why;
    if (!section || section_bytes(f, section, &table, &why) != DP_OK || section_strings(f, section, &strings, &why) != DP_OK)
        return;
    uint64_t entries = table.len / sizeof(Elf64_Sym);
    for (uint64_t i = 0; i < entries && i < SYMBOLS_MAX; i++) {
        const uint8_t *symbol = table.at + i * sizeof(Elf64_Sym);
        if (ELF64_ST_TYPE(symbol[offsetof(Elf64_Sym, st_info)]) != STT_FUNC)
            continue;
        uint64_t at = file_get64(symbol + offsetof(Elf64_Sym, st_value)), len = file_get64(symbol + offsetof(Elf64_Sym, st_size));
        uint32_t name = file_get32(symbol + offsetof(Elf64_Sym, st_name)), name_len = 0;
        for (uint32_t k = 0; k < n; k++) {
            if (places[k].name || offsets[k] < at || offsets[k] - at >= len)
                continue;
            if (!name_len && !(name_len = name_length(&strings, name, DP_ELF_SYMBOL_MAX)))
                break;
            places[k] = (place){strings.at + name, name_len, offsets[k] - at};
        }
    }
}

uint32_t dp_elf_symbols(const void *file, uint64_t size, const uint64_t *offsets, uint32_t n, char *out) {
    elf_file f;
    dp_error why;
    place places[DP_ELF_OFFSETS_MAX] = {{0}};
    if (n > DP_ELF_OFFSETS_MAX)
        n = DP_ELF_OFFSETS_MAX;
    if (open_file(&f, file, size, &why) == DP_OK) {
        look_up(&f, SHT_SYMTAB, offsets, places, n);
        look_up(&f, SHT_DYNSYM, offsets, places, n);
    }
    char *end = out;
    for (uint32_t k = 0; k < n; k++) {
        if (places[k].name) {
            printable(end, DP_ELF_LINE_MAX, places[k].name, places[k].len);
            end += strlen(end);
            end += snprintf(end, 20, "+0x%llx", (unsigned long long)places[k].beyond);
        }
        *end++ = '\n';
    }
    return (uint32_t)(end - out);
}
