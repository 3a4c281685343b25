/* The address blob of a verbs queue pair. 44 bytes, little endian; the GID in network order as verbs has it.
 *
 *    0        4     6 7 8        12       16                              32
 *   +--------+-----+-+-+--------+--------+-------------------------------+
 *   | magic  | ver |P|L| qpn    | psn    | GID                           |
 *   +--------+-----+-+-+--------+--------+-------------------------------+
 *   +-----+-+-+-+-+-----+--------+
 *   | lid |M|F|T|A| pkey| crc32c |
 *   +-----+-+-+-+-+-----+--------+
 *    32    34    36 37 38    40      44
 *
 *   P provider (2)                          L link layer: 1 InfiniBand, 2 Ethernet
 *   M path MTU: 1..5 for 256..4096 bytes    F flags: bit 0, route by GID; others zero
 *   T GID type: 0 InfiniBand, 1 RoCE v1, 2 RoCE v2
 *   A reads and atomics that the sender serves at once, 1..255
 *
 * The CRC covers bytes 0..39. It guards against damage, not malice: a peer that can connect at all can
 * already send whatever it likes.
 */
#include "dp_verbs.h"
#include "dp_wire.h"

#include <string.h>

enum {
    OFF_MAGIC = 0,
    OFF_VERSION = 4,
    OFF_PROVIDER = 6,
    OFF_LINK = 7,
    OFF_QPN = 8,
    OFF_PSN = 12,
    OFF_GID = 16,
    OFF_LID = 32,
    OFF_MTU = 34,
    OFF_FLAGS = 35,
    OFF_GID_TYPE = 36,
    OFF_RD_ATOMIC = 37,
    OFF_PKEY = 38,
    OFF_CRC = 40,
    BLOB_SIZE = 44,

    BLOB_VERSION = 1,
    BLOB_FLAG_GRH = 1,
};
static const char blob_magic[4] = {'R', 'F', 'Q', 'P'};

_Static_assert(BLOB_SIZE <= DP_BLOB_MAX, "blob fits its room");
_Static_assert(IBV_LINK_LAYER_INFINIBAND == 1 && IBV_LINK_LAYER_ETHERNET == 2,
               "link layers travel as verbs numbers them");
_Static_assert(IBV_MTU_256 == 1 && IBV_MTU_4096 == 5, "MTUs travel as verbs numbers them");
_Static_assert(IBV_GID_TYPE_IB == 0 && IBV_GID_TYPE_ROCE_V1 == 1 && IBV_GID_TYPE_ROCE_V2 == 2,
               "GID types travel as verbs numbers them");

static void put16(uint8_t *p, uint16_t v) {
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

static void put32(uint8_t *p, uint32_t v) {
    put16(p, (uint16_t)v);
    put16(p + 2, (uint16_t)(v >> 16));
}

static uint16_t get16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

static uint32_t get32(const uint8_t *p) { return get16(p) | (uint32_t)get16(p + 2) << 16; }

uint32_t dpv_blob_encode(const dpv_blob *b, void *out) {
    uint8_t *p = out;
    memcpy(p + OFF_MAGIC, blob_magic, sizeof blob_magic);
    put16(p + OFF_VERSION, BLOB_VERSION);
    p[OFF_PROVIDER] = DP_PROVIDER_VERBS;
    p[OFF_LINK] = b->link_layer;
    put32(p + OFF_QPN, b->qpn);
    put32(p + OFF_PSN, b->psn);
    memcpy(p + OFF_GID, b->gid.raw, 16);
    put16(p + OFF_LID, b->lid);
    p[OFF_MTU] = b->mtu;
    p[OFF_FLAGS] = b->grh ? BLOB_FLAG_GRH : 0;
    p[OFF_GID_TYPE] = b->gid_type;
    p[OFF_RD_ATOMIC] = b->rd_atomic;
    put16(p + OFF_PKEY, b->pkey);
    put32(p + OFF_CRC, dp_crc32c(p, OFF_CRC));
    return BLOB_SIZE;
}

static bool gid_is_unicast(const union ibv_gid *gid) {
    static const union ibv_gid zero;
    return memcmp(gid, &zero, sizeof zero) != 0 && gid->raw[0] != 0xff;
}

/* The address must suit the link layer: a GID where packets are routed by GID, a LID on InfiniBand. */
static int check_address(const dpv_blob *b, dp_error *err) {
    if (b->link_layer == IBV_LINK_LAYER_ETHERNET && (!b->grh || b->gid_type == IBV_GID_TYPE_IB))
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: Ethernet without a RoCE GID (GRH %d, GID type %u)",
                       b->grh, b->gid_type);
    if (b->link_layer == IBV_LINK_LAYER_INFINIBAND && b->gid_type != IBV_GID_TYPE_IB)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: InfiniBand with GID type %u", b->gid_type);
    if (b->grh && !gid_is_unicast(&b->gid))
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: GID is zero or multicast (%02x%02x...)",
                       b->gid.raw[0], b->gid.raw[1]);
    /* 0xc000 upwards are multicast and permissive. Routed packets may leave the LID to the router. */
    if (b->link_layer == IBV_LINK_LAYER_INFINIBAND && (b->lid >= 0xc000 || (b->lid == 0 && !b->grh)))
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: LID %#x is not a unicast LID", b->lid);
    return DP_OK;
}

int dpv_blob_decode(const void *in, uint32_t len, dpv_blob *out, dp_error *err) {
    const uint8_t *p = in;
    if (!p || len != BLOB_SIZE)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: %u bytes, a verbs blob has %d", len, BLOB_SIZE);
    if (memcmp(p + OFF_MAGIC, blob_magic, sizeof blob_magic))
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: magic %02x%02x%02x%02x, not \"RFQP\"", p[0], p[1],
                       p[2], p[3]);
    if (get16(p + OFF_VERSION) != BLOB_VERSION)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: version %u, this program knows %d",
                       get16(p + OFF_VERSION), BLOB_VERSION);
    if (p[OFF_PROVIDER] != DP_PROVIDER_VERBS)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: provider %u, not verbs (%d)", p[OFF_PROVIDER],
                       DP_PROVIDER_VERBS);
    uint32_t crc = dp_crc32c(p, OFF_CRC);
    if (get32(p + OFF_CRC) != crc)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: checksum %#x, computed %#x", get32(p + OFF_CRC),
                       crc);

    dpv_blob b = {
        .qpn = get32(p + OFF_QPN),
        .psn = get32(p + OFF_PSN),
        .lid = get16(p + OFF_LID),
        .pkey = get16(p + OFF_PKEY),
        .link_layer = p[OFF_LINK],
        .mtu = p[OFF_MTU],
        .gid_type = p[OFF_GID_TYPE],
        .rd_atomic = p[OFF_RD_ATOMIC],
        .grh = p[OFF_FLAGS] & BLOB_FLAG_GRH,
    };
    memcpy(b.gid.raw, p + OFF_GID, 16);

    if (b.link_layer != IBV_LINK_LAYER_INFINIBAND && b.link_layer != IBV_LINK_LAYER_ETHERNET)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: link layer %u unknown", b.link_layer);
    /* Queue pairs 0 and 1 belong to the subnet manager and the communication manager. */
    if (b.qpn < 2 || b.qpn > 0xffffff)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: queue pair number %#x not in 2..0xffffff", b.qpn);
    if (b.psn > 0xffffff)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: packet sequence number %#x above 24 bits", b.psn);
    if (b.mtu < IBV_MTU_256 || b.mtu > IBV_MTU_4096)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: MTU code %u not in 1..5", b.mtu);
    if (p[OFF_FLAGS] & ~BLOB_FLAG_GRH)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: unknown flags %#x", p[OFF_FLAGS]);
    if (b.gid_type > IBV_GID_TYPE_ROCE_V2)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: GID type %u unknown", b.gid_type);
    if (b.rd_atomic < 1)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: peer serves no reads or atomics");
    int st = check_address(&b, err);
    if (st == DP_OK)
        *out = b;
    return st;
}
