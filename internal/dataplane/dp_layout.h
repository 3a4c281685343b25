/* What both ends of a channel share: the layout of a side's memory and the blob that describes it. */
#ifndef RFAAS_DP_LAYOUT_H
#define RFAAS_DP_LAYOUT_H

#include "dp_fabric.h"
#include "dp_mailbox.h"
#include "dp_wire.h"

/* A side's region: `depth` slots, the bulk area, the mailbox. */
typedef struct dp_layout {
    uint32_t depth;
    uint32_t eager;  /* payload bytes per slot */
    uint32_t stride; /* bytes per slot */
    uint64_t bulk;
    uint64_t bulk_at; /* offset of the bulk area */
    uint64_t mailbox_at; /* offset of the mailbox */
    uint64_t size; /* with the small mailbox: what each side has at least */
} dp_layout;

/* The side that a blob describes, checked. */
typedef struct dp_side {
    dp_layout layout;
    uint32_t generation;
    uint64_t addr; /* of its region */
    uint32_t rkey;
    uint8_t qp_blob[DP_BLOB_MAX];
    uint32_t qp_len;
    bool brokered; /* DP_ROLE_BROKER */
} dp_side;

static inline void dp_layout_set(dp_layout *l, uint32_t depth, uint32_t eager, uint64_t bulk) {
    l->depth = depth;
    l->eager = eager;
    l->stride = DP_SLOT_ROOM + eager;
    l->bulk = bulk;
    l->bulk_at = (uint64_t)depth * l->stride;
    l->mailbox_at = (l->bulk_at + bulk + DP_MAILBOX_ALIGN - 1) & ~(uint64_t)(DP_MAILBOX_ALIGN - 1);
    l->size = l->mailbox_at + sizeof(dp_mailbox);
}

/* Returns the size of the region of a worker of this version: with the large mailbox, and with larger payloads in the slots. */
static inline uint64_t dp_layout_large(const dp_layout *l) { return l->mailbox_at + DP_MAILBOX_SLOTS_SIZE; }

/* Offset, in the client's region, of the word that announces a result in a slot. */
static inline uint64_t dp_layout_reply(const dp_layout *l) { return l->mailbox_at + DP_MAILBOX_REPLY_AT; }

/* Offset of a slot's payload. */
static inline uint64_t dp_slot_payload(const dp_layout *l, uint32_t slot) {
    return (uint64_t)slot * l->stride + DP_SLOT_ROOM;
}
static inline uint64_t dp_bulk_at(const dp_layout *l, uint32_t units) {
    return l->bulk_at + (uint64_t)units * DP_BULK_UNIT;
}

/* Allocates a side's region of `size` bytes, its slots and mailbox prefaulted. The bulk area's pages come with the first large payloads, as
 * far as the provider lets them: most leases have none, and 2 MiB of pages take longer than all else in a lease's start. */
int dp_layout_alloc(dp_domain *d, const dp_layout *l, uint64_t size, uint32_t access, dp_mem **out, dp_error *err);

/* Writes this side's blob. */
int dp_side_encode(dp_qp *qp, const dp_layout *l, uint8_t role, uint32_t generation, const dp_mem *m, void *blob,
                   uint32_t *len, dp_error *err);
/* Reads and checks the other side's blob: every field, the checksum, the provider. */
int dp_side_decode(const void *blob, uint32_t len, uint8_t role, dp_provider_id provider, dp_side *out, dp_error *err);

#endif
