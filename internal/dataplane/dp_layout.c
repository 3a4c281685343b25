#include "dp_layout.h"

#include "dp_channel.h"

#include <string.h>
#include <sys/mman.h>

int dp_layout_alloc(dp_domain *d, const dp_layout *l, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    int st = dp_mem_alloc(d, size, access | DP_MEM_LAZY, out, err);
    if (st)
        return st;
    enum { PAGE = 4096 };
    uint8_t *at = (*out)->addr;
    madvise(at, (l->bulk_at + PAGE - 1) & ~(uint64_t)(PAGE - 1), MADV_POPULATE_WRITE);
    uint64_t mailbox = l->mailbox_at & ~(uint64_t)(PAGE - 1);
    madvise(at + mailbox, (size - mailbox + PAGE - 1) & ~(uint64_t)(PAGE - 1), MADV_POPULATE_WRITE);
    return DP_OK;
}

/* Completes the blob *b and writes it to out, where the queue-pair blob already follows it. m: the side's region; NULL: none yet. */
static void write_blob(dp_channel_blob *b, const dp_layout *l, const dp_mem *m, uint8_t *out, uint32_t *len) {
    uint64_t base = m ? m->base : 0;
    b->magic = DP_CHANNEL_MAGIC;
    b->version = DP_WIRE_VERSION;
    b->depth = (uint16_t)l->depth;
    b->eager = l->eager;
    b->slots_rkey = b->bulk_rkey = m ? m->rkey : 0;
    b->slots_addr = base;
    b->bulk = l->bulk;
    b->bulk_addr = base + l->bulk_at;
    memcpy(out, b, sizeof *b);
    *len = (uint32_t)sizeof *b + b->qp_len;
    b->crc = dp_crc32c(out, *len);
    memcpy(out, b, sizeof *b);
}

int dp_side_encode(dp_qp *qp, const dp_layout *l, uint8_t role, uint32_t generation, const dp_mem *m, void *blob,
                   uint32_t *len, dp_error *err) {
    if (*len < DP_CHANNEL_BLOB_MAX)
        return dp_fail(err, DP_INVALID, 0, "export channel: room for %u bytes, %d needed", *len, DP_CHANNEL_BLOB_MAX);
    uint8_t *out = blob;
    uint32_t qp_len = DP_BLOB_MAX;
    _Static_assert(sizeof(dp_channel_blob) + DP_BLOB_MAX <= DP_CHANNEL_BLOB_MAX, "a queue-pair blob fits");
    int st = dp_qp_export(qp, out + sizeof(dp_channel_blob), &qp_len, err);
    if (st)
        return st;
    dp_channel_blob b = {.role = role, .provider = (uint8_t)qp->domain->dev->provider, .generation = generation, .qp_len = (uint16_t)qp_len};
    write_blob(&b, l, m, out, len);
    return DP_OK;
}

void dp_side_encode_sizes(const dp_channel_config *cfg, dp_provider_id provider, void *blob, uint32_t *len) {
    dp_layout l;
    dp_layout_set(&l, cfg->depth, (cfg->eager + 63) & ~63u, (cfg->bulk + 63) & ~63ull);
    dp_channel_blob b = {.role = DP_ROLE_CLIENT, .provider = (uint8_t)provider, .generation = 1};
    write_blob(&b, &l, NULL, blob, len);
}

static const char *provider_name(uint8_t provider) {
    static const char *const names[] = {[DP_PROVIDER_SHM] = "shm", [DP_PROVIDER_VERBS] = "verbs", [DP_PROVIDER_TCP] = "tcp",
                                        [DP_PROVIDER_OFI] = "ofi"};
    return provider >= DP_PROVIDER_SHM && provider <= DP_PROVIDER_OFI ? names[provider] : "unknown";
}

int dp_side_decode(const void *blob, uint32_t len, uint8_t role, dp_provider_id provider, dp_side *out,
                   dp_error *err) {
    dp_channel_blob b;
    if (len < sizeof b || len > DP_CHANNEL_BLOB_MAX)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob of %u bytes, not in %zu..%d", len, sizeof b,
                       DP_CHANNEL_BLOB_MAX);
    memcpy(&b, blob, sizeof b);
    if (b.magic != DP_CHANNEL_MAGIC)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob has magic %#x", b.magic);
    if (b.version != DP_WIRE_VERSION)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob has version %u, this side %d", b.version, DP_WIRE_VERSION);
    uint8_t copy[DP_CHANNEL_BLOB_MAX];
    memcpy(copy, blob, len);
    memset(copy + offsetof(dp_channel_blob, crc), 0, sizeof b.crc);
    uint32_t crc = dp_crc32c(copy, len);
    if (crc != b.crc)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob has checksum %#x, should be %#x", b.crc, crc);
    if (b.provider != provider)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob is of provider %u (%s), this side uses %s", b.provider,
                       provider_name(b.provider), provider_name((uint8_t)provider));
    bool brokered = b.role == DP_ROLE_BROKER && role == DP_ROLE_CLIENT;
    if (b.role != role && !brokered)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob has role %u, expected %u", b.role, role);
    if (b.qp_len > DP_BLOB_MAX || sizeof b + b.qp_len != len)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob of %u bytes holds a queue-pair blob of %u", len, b.qp_len);
    if (b.generation == 0)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob has generation 0");
    if (b.depth == 0 || b.depth > DP_DEPTH_MAX)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob has depth %u, not in 1..%d", b.depth, DP_DEPTH_MAX);
    if (b.eager == 0 || b.eager > DP_EAGER_MAX || b.eager % DP_CACHE_LINE)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob has eager size %u, not a multiple of 64 up to %u", b.eager,
                       DP_EAGER_MAX);
    if (b.bulk > DP_BULK_MAX || b.bulk % DP_BULK_UNIT)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob has bulk size %llu", (unsigned long long)b.bulk);
    dp_layout_set(&out->layout, b.depth, b.eager, b.bulk);
    /* One region with the bulk area behind the slots is all that this version knows. */
    if (b.slots_addr % DP_CACHE_LINE || b.slots_addr > UINT64_MAX - out->layout.size ||
        b.bulk_addr != b.slots_addr + out->layout.bulk_at || b.bulk_rkey != b.slots_rkey)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob has slots at %#llx and bulk at %#llx",
                       (unsigned long long)b.slots_addr, (unsigned long long)b.bulk_addr);
    out->brokered = brokered;
    out->generation = b.generation;
    out->addr = b.slots_addr;
    out->rkey = b.slots_rkey;
    out->qp_len = b.qp_len;
    memcpy(out->qp_blob, (const uint8_t *)blob + sizeof b, b.qp_len);
    return DP_OK;
}
