/* Loading libfabric: the errors when it is missing, and its effects on the process. Bad options, forged blobs and keys. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "dp_wire.h"
#include "ends.h"

T_CASE(ofi_missing, "load/no-libfabric", .providers = T_OFI) {
    dp_error err = {0};
    dp_dev *dev = NULL;
    CHECK_EQ(setenv("RFAAS_LIBFABRIC", "libfabric-that-is-not-there.so.1", 1), 0);
    CHECK_REFUSED(dp_dev_open("ofi", NULL, &dev, &err), DP_UNSUPPORTED, err);
    CHECKF(strstr(err.msg, "libfabric-that-is-not-there.so.1") && strstr(err.msg, "install libfabric1"), "message: %s", err.msg);
    CHECK_EQ(setenv("RFAAS_LIBFABRIC", "libpthread.so.0", 1), 0);
    CHECK_REFUSED(dp_dev_open("ofi", NULL, &dev, &err), DP_UNSUPPORTED, err);
    CHECKF(strstr(err.msg, "libpthread.so.0 is older"), "message: %s", err.msg);
    unsetenv("RFAAS_LIBFABRIC");
    CHECK_OK_ERR(dp_dev_open("ofi", NULL, &dev, &err), err);
    dp_dev_close(dev);
}

T_CASE(ofi_bad_options, "device/bad-ofi-options", .providers = T_OFI) {
    dp_error err = {0};
    dp_dev *dev = NULL;
    CHECK_REFUSED(dp_dev_open("ofi", &(dp_dev_options){.ofi_provider = "sockets"}, &dev, &err), DP_INVALID, err);
    CHECKF(strstr(err.msg, "sockets") && strstr(err.msg, "cxi"), "message: %s", err.msg);
    CHECK_REFUSED(dp_dev_open("ofi", &(dp_dev_options){.keepalive_ms = -1}, &dev, &err), DP_INVALID, err);
    CHECK_REFUSED(dp_dev_open("ofi", &(dp_dev_options){.device = "no-such-domain"}, &dev, &err), DP_NO_DEVICE, err);
    CHECKF(strstr(err.msg, "no-such-domain"), "message: %s", err.msg);
    dp_dev_options o = {.ofi_provider = "cxi"};
    if (dp_dev_open("ofi", &o, &dev, &err) == DP_OK) /* this machine has a Slingshot adapter */
        dp_dev_close(dev);
    else
        CHECKF(err.status == DP_NO_DEVICE && strstr(err.msg, "cxi"), "message: %s", err.msg);
}

/* All of libfabric's providers are initialised: psm and psm2 install handlers. The harness looks for threads. */
T_CASE(ofi_handlers, "load/signal-handlers-stay", .providers = T_OFI) {
    struct sigaction before[NSIG], after;
    dp_error err = {0};
    dp_dev *dev = NULL;
    unsetenv("FI_PROVIDER");
    for (int s = 1; s < NSIG; s++)
        sigaction(s, NULL, &before[s]);
    CHECK_OK_ERR(dp_dev_open("ofi", NULL, &dev, &err), err);
    for (int s = 1; s < NSIG; s++)
        if (!sigaction(s, NULL, &after))
            CHECKF(after.sa_sigaction == before[s].sa_sigaction, "another handler for signal %d", s);
    dp_dev_close(dev);
}

T_CASE(ofi_encryption, "device/ofi-does-not-encrypt", .providers = T_OFI) {
    dp_error err = {0};
    dp_dev *dev = NULL;
    unsetenv("RFAAS_OFI_PROVIDER");
    CHECK_REFUSED(dp_dev_open("ofi", &(dp_dev_options){.encrypt = DP_ENCRYPT_REQUIRE}, &dev, &err), DP_UNSUPPORTED, err);
    CHECKF(strstr(err.msg, "does not encrypt") && strstr(err.msg, "use provider tcp"), "message: %s", err.msg);
    CHECK_REFUSED(dp_dev_open("ofi", &(dp_dev_options){.encrypt = DP_ENCRYPT_ON, .address = "192.0.2.1"}, &dev, &err), DP_UNSUPPORTED, err);
    CHECK_REFUSED(dp_dev_open("ofi", &(dp_dev_options){.encrypt = DP_ENCRYPT_ON, .ofi_provider = "cxi"}, &dev, &err), DP_UNSUPPORTED, err);
    CHECK_REFUSED(dp_dev_open("ofi", &(dp_dev_options){.address = "localhost"}, &dev, &err), DP_INVALID, err);
    CHECKF(strstr(err.msg, "localhost"), "message: %s", err.msg);
    CHECK_OK_ERR(dp_dev_open("ofi", &(dp_dev_options){.encrypt = DP_ENCRYPT_ON, .address = "127.0.0.1"}, &dev, &err), err);
    dp_dev_close(dev);
}

/* Offsets in the blob: docs/PROTOCOL.md. */
enum { AT_VERSION = 4, AT_KIND = 7, AT_CRC = 8, AT_ADDRESS_LEN = 12, AT_REGIONS = 13, AT_FLAGS = 14, AT_ADDRESS = 16, AT_REGION = 64 };

static void seal(uint8_t *blob, uint32_t len) {
    memset(blob + AT_CRC, 0, 4);
    uint32_t crc = dp_crc32c(blob, len);
    memcpy(blob + AT_CRC, &crc, sizeof crc);
}

/* Blobs whose checksum is right and whose contents are not. */
T_CASE(ofi_forged, "connect/forged-ofi-blob", .providers = T_OFI) {
    static const struct {
        const char *what;
        int at, n;
        uint8_t bytes[8];
    } changes[] = {
        {"version", AT_VERSION, 1, {9}},
        {"libfabric provider", AT_KIND, 1, {77}},
        {"flags", AT_FLAGS, 1, {0x80}},
        {"no address", AT_ADDRESS_LEN, 1, {0}},
        {"address of 49 bytes", AT_ADDRESS_LEN, 1, {49}},
        {"half an address", AT_ADDRESS_LEN, 1, {8}},
        {"unix socket", AT_ADDRESS, 2, {1, 0}},
        {"IPv6 address of the size of IPv4", AT_ADDRESS, 2, {10, 0}},
        {"port 0", AT_ADDRESS + 2, 2, {0, 0}},
        {"host 0.0.0.0", AT_ADDRESS + 4, 4, {0}},
        {"255 regions", AT_REGIONS, 1, {255}},
        {"no region", AT_REGIONS, 1, {0}},
        {"unknown right", AT_REGION + 4, 1, {0x80}},
        {"region of 2^63 bytes", AT_REGION + 31, 1, {0x80}},
        {"region past the end of memory", AT_REGION + 16, 8, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}},
    };
    end e, peer;
    end_open(&e, &(end_opts){0}, NULL);
    end_open(&peer, &(end_opts){0}, NULL);
    card good;
    end_card(&peer, &good);
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        dp_error err = {0};
        card c = good;
        memcpy(c.blob + changes[i].at, changes[i].bytes, (size_t)changes[i].n);
        seal(c.blob, c.blob_len);
        int st = dp_qp_connect(e.qp, c.blob, c.blob_len, &err);
        CHECKF(st == DP_BAD_BLOB && err.msg[0], "%s: %d, %s", changes[i].what, st, err.msg);
    }
    end_close(&peer);
    end_close(&e);
}

/* A peer that knows the address but not the key of a region cannot write to it. */
T_CASE(ofi_forged_key, "access/forged-ofi-key", .providers = T_OFI) {
    end e, peer;
    end_open(&e, &(end_opts){0}, NULL);
    end_open(&peer, &(end_opts){0}, NULL);
    card to, from;
    end_card(&peer, &to);
    end_card(&e, &from);
    to.blob[AT_REGION + 8] ^= 1;
    seal(to.blob, to.blob_len);
    dp_error err = {0};
    CHECK_OK_ERR(dp_qp_connect(peer.qp, from.blob, from.blob_len, &err), err);
    CHECK_OK_ERR(dp_qp_connect(e.qp, to.blob, to.blob_len, &err), err);
    end_attend(peer.cq);
    memset(end_bytes(&peer), 0x5a, 64);
    memset(local_bytes(&e), 0xa5, 64);
    dp_sge sge = local_sge(&e, 0, 64);
    dp_wc wc;
    if (dp_post_write(e.qp, &sge, 1, to.regions[0].addr, to.regions[0].rkey, 1, DP_SIGNALED) == DP_OK)
        end_poll_lost(&e, &wc); /* libfabric 1.17 may report success, or nothing */
    for (int i = 0; i < 64; i++)
        CHECK_EQ(end_bytes(&peer)[i], 0x5a);
    end_unattend(peer.cq);
    end_close(&peer);
    end_close(&e);
}

/* libfabric tries to connect for ever; the queue pair gives up. */
T_CASE(ofi_unreachable, "connect/ofi-unreachable-peer", .providers = T_OFI) {
    dp_error err = {0};
    dp_dev *dev = NULL;
    CHECK_OK_ERR(dp_dev_open("ofi", &(dp_dev_options){.keepalive_ms = 20}, &dev, &err), err);
    end e, peer;
    end_open(&peer, &(end_opts){0}, NULL);
    end_open(&e, &(end_opts){0}, dev);
    card to;
    end_card(&peer, &to);
    end_close(&peer);
    CHECK_OK_ERR(dp_qp_connect(e.qp, to.blob, to.blob_len, &err), err);
    int64_t until = dp_now_ns() + poll_ns();
    while (!dp_qp_probe(e.qp))
        CHECKF(dp_now_ns() < until, "a peer that cannot be reached is not reported");
    end_close(&e);
    dp_dev_close(dev);
}
