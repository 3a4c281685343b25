#include "modules.h"

#include <elf.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

#include "heap.h"

#define PAGE 4096ull
#define UP(x) (((x) + PAGE - 1) & ~(PAGE - 1))
#define DOWN(x) ((x) & ~(PAGE - 1))

typedef struct lister {
    dp_modules *m;
    uint32_t before;
} lister;

static void take_build(dp_module *m, const ElfW(Phdr) *h, uint64_t at) {
    const uint8_t *p = (const void *)(uintptr_t)at, *end = p + h->p_memsz;
    while (p + sizeof(ElfW(Nhdr)) + 4 <= end) {
        const ElfW(Nhdr) *n = (const void *)p;
        const uint8_t *name = p + sizeof *n, *desc = name + ((n->n_namesz + 3u) & ~3u);
        if (n->n_type == NT_GNU_BUILD_ID && n->n_namesz == 4 && !memcmp(name, "GNU", 4) && n->n_descsz <= sizeof m->build)
            memcpy(m->build, desc, n->n_descsz);
        p = desc + ((n->n_descsz + 3u) & ~3u);
    }
}

/* The first three slots belong to the linker and may lie in the read-only part. */
static void take_slots(dp_module *m, const ElfW(Dyn) *d) {
    uint64_t at = 0, relocations = 0;
    for (; d->d_tag != DT_NULL; d++) {
        if (d->d_tag == DT_PLTGOT)
            at = d->d_un.d_ptr;
        if (d->d_tag == DT_PLTRELSZ)
            relocations = d->d_un.d_val / sizeof(ElfW(Rela));
    }
    if (!at)
        return;
    m->slots = at;
    m->slots_size = (3 + relocations) * sizeof(uintptr_t);
}

static int add(struct dl_phdr_info *i, size_t size, void *arg) {
    lister *l = arg;
    (void)size;
    if (l->m->n == DP_MODULES_MAX) {
        l->m->more++;
        return 0;
    }
    dp_module *m = &l->m->list[l->m->n];
    const char *slash = strrchr(i->dlpi_name, '/');
    memset(m, 0, sizeof *m);
    snprintf(m->name, sizeof m->name, "%s", slash ? slash + 1 : i->dlpi_name);
    m->base = i->dlpi_addr;
    m->own = l->m->n++ >= l->before || !strcmp(m->name, DP_HEAP_LIBRARY) ? DP_MODULE_OWN : DP_MODULE_PROCESS;
    uint64_t read_only = 0, low = 0, high = 0;
    for (int k = 0; k < i->dlpi_phnum; k++) {
        const ElfW(Phdr) *h = &i->dlpi_phdr[k];
        uint64_t at = m->base + h->p_vaddr, end = at + h->p_memsz;
        if (h->p_type == PT_NOTE)
            take_build(m, h, at);
        if (h->p_type == PT_GNU_RELRO)
            read_only = DOWN(end);
        if (h->p_type == PT_DYNAMIC)
            take_slots(m, (const void *)(uintptr_t)at);
        if (h->p_type == PT_LOAD && h->p_flags & PF_W) {
            low = low && low < DOWN(at) ? low : DOWN(at);
            high = high > UP(end) ? high : UP(end);
        }
        if (h->p_type == PT_TLS && m->own == DP_MODULE_OWN) {
            m->tls = (uintptr_t)i->dlpi_tls_data;
            m->tls_size = h->p_memsz;
            m->tls_id = (uint32_t)i->dlpi_tls_modid;
        }
    }
    low = low > read_only ? low : read_only;
    if (m->own == DP_MODULE_OWN && high > low) {
        m->data = low;
        m->data_size = high - low;
    }
    uint64_t slots_end = m->slots + m->slots_size;
    m->slots = m->slots > m->data ? m->slots : m->data;
    m->slots_size = m->data_size && slots_end > m->slots && slots_end <= m->data + m->data_size ? slots_end - m->slots : 0;
    return 0;
}

/* ---- what user code names ---- */

static uint32_t n_program;

static int count(struct dl_phdr_info *i, size_t size, void *n) {
    (void)i, (void)size;
    ++*(uint32_t *)n;
    return 0;
}

void dp_modules_program(void) {
    n_program = 0;
    dl_iterate_phdr(count, &n_program);
}

/* Takes the role of an unrelated object from those that an object names. Returns whether there are any. */
static bool relate(dp_modules *m, const ElfW(Dyn) *dynamic) {
    const char *strings = NULL, *name;
    bool any = false;
    for (const ElfW(Dyn) *d = dynamic; d->d_tag != DT_NULL; d++)
        if (d->d_tag == DT_STRTAB)
            strings = (const char *)(uintptr_t)d->d_un.d_ptr;
    for (const ElfW(Dyn) *d = dynamic; d->d_tag != DT_NULL; d++)
        for (uint32_t i = m->loaded[0]; d->d_tag == DT_NEEDED && strings && i < m->loaded[1]; i++) {
            const char *slash = strrchr(name = strings + d->d_un.d_val, '/');
            if (m->list[i].own == DP_MODULE_UNRELATED && !strncmp(m->list[i].name, slash ? slash + 1 : name, sizeof m->list[i].name - 1)) {
                m->list[i].own = DP_MODULE_PROCESS;
                any = true;
            }
        }
    return any;
}

typedef struct related {
    dp_modules *m;
    uint32_t at;
    bool any;
} related;

static int relate_one(struct dl_phdr_info *i, size_t size, void *arg) {
    related *r = arg;
    (void)size;
    if (r->at == r->m->n)
        return 1;
    if (r->at >= r->m->loaded[0] && r->m->list[r->at].own != DP_MODULE_UNRELATED)
        for (int k = 0; k < i->dlpi_phnum; k++)
            if (i->dlpi_phdr[k].p_type == PT_DYNAMIC)
                r->any |= relate(r->m, (const void *)(i->dlpi_addr + i->dlpi_phdr[k].p_vaddr));
    r->at++;
    return 0;
}

void dp_modules_list(dp_modules *m, uint32_t before) {
    m->n = m->more = 0;
    dl_iterate_phdr(add, &(lister){m, before});
    if (before == UINT32_MAX) {
        m->loaded[0] = n_program < m->n ? n_program : m->n;
        m->loaded[1] = m->n;
    }
    for (uint32_t i = m->loaded[0]; i < m->loaded[1] && i < m->n; i++)
        if (m->list[i].own == DP_MODULE_PROCESS)
            m->list[i].own = DP_MODULE_UNRELATED;
    related r = {.m = m, .any = true};
    while (r.any) {
        r.at = 0;
        r.any = false;
        dl_iterate_phdr(relate_one, &r);
    }
}

void dp_modules_touch_tls(dp_modules *m, uint32_t before) {
    extern void *__tls_get_addr(size_t *);
    dp_modules_list(m, before);
    for (uint32_t i = 0; i < m->n; i++)
        if (m->list[i].own == DP_MODULE_OWN && m->list[i].tls_id && !m->list[i].tls) {
            size_t index[2] = {m->list[i].tls_id, 0};
            __tls_get_addr(index);
        }
    dp_modules_list(m, before);
}
