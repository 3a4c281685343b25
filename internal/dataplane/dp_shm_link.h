/* How two processes of a host meet: what dp_shm_link.c, dp_shm_monitor.c and dp_shm_peer.c share.
 *
 *   dp_shm_link.c     blobs; exporting, connecting, forgetting, probing
 *   dp_shm_monitor.c  the listening socket, the sockets to peers, and the thread that looks after them
 *   dp_shm_peer.c     hello messages, and what they hand over, mapped
 */
#ifndef RFAAS_DP_SHM_LINK_H
#define RFAAS_DP_SHM_LINK_H

#include "dp_shm.h"

#include <stddef.h>
#include <sys/un.h>

#define SHM_LINK_VERSION 4
#define SHM_BLOB_MAGIC 0x53514652u  /* "RFQS" */
#define SHM_HELLO_MAGIC 0x48534652u /* "RFSH" */
#define SHM_HELLO_FDS (2 + DP_EXPOSE_MAX)
#define SHM_REGION_MAX (1ull << 40)

typedef struct shm_blob {
    uint32_t magic;
    uint16_t version;
    uint8_t provider;
    uint8_t zero;
    uint64_t netns;
    uint8_t boot_id[16];
    uint8_t name[16];
    uint8_t token[16];
    uint8_t reserved[16];
} shm_blob;
_Static_assert(sizeof(shm_blob) == 80 && offsetof(shm_blob, boot_id) == 16 && offsetof(shm_blob, token) == 48, "shm blob");

typedef struct shm_hello_region {
    uint32_t rkey, access;
    uint64_t base, size;
    uint64_t offset; /* in the descriptor */
} shm_hello_region;

typedef struct shm_hello {
    uint32_t magic;
    uint16_t version;
    uint16_t n_regions;
    int32_t status; /* of an answer: DP_OK, or why there is none */
    uint32_t ring_size;
    uint32_t reached; /* registered for membarrier */
    uint32_t mode_at; /* offset of the queue's mode in the completion-queue page: of a cache line */
    uint8_t to[16];   /* token that it is for */
    uint8_t from[16]; /* token of the sender's queue pair */
    shm_hello_region regions[DP_EXPOSE_MAX];
} shm_hello;

struct shm_link {
    shm_link *next;
    uint64_t id; /* what epoll carries: links may vanish while their event waits */
    int fd;
    shm_qp *qp; /* NULL until hello */
};

static inline bool shm_token_is_zero(const uint8_t token[16]) {
    uint8_t any = 0;
    for (int i = 0; i < 16; i++)
        any |= token[i];
    return !any;
}

/* ---- dp_shm_link.c ---- */

/* Reads a blob and checks every byte of it except the token, which only its owner knows. */
int shm_blob_check(const shm_dev *dev, const void *data, uint32_t len, shm_blob *b, dp_error *err);

/* ---- dp_shm_peer.c ---- */

/* Sends a hello: qp's descriptors with status DP_OK, or a refusal when qp is NULL. 0 or an errno. */
int shm_hello_send(int fd, const shm_dev *dev, const shm_qp *qp, int status, const uint8_t to[16]);
/* Receives one into p. 0, or an errno: EPROTO for one that is malformed, EMFILE when its descriptors found no room.
 * Descriptors that came are in p, which the caller clears, also after an error. */
int shm_hello_recv(int fd, int flags, shm_hello *h, shm_peer *p);
/* Checks a hello that came with n_fds descriptors and copies it into p. 0 or EPROTO. */
int shm_hello_check(const shm_hello *h, int n_fds, shm_peer *p);

/* ---- dp_shm_monitor.c; all under dev->lock ---- */

socklen_t shm_listen_address(const uint8_t name[16], struct sockaddr_un *a);
int shm_listen_start(shm_dev *dev, dp_error *err);
/* Takes over fd; NULL when there is no memory, or no way to watch it. */
shm_link *shm_link_add(shm_dev *dev, int fd, shm_qp *qp);
void shm_link_drop(shm_dev *dev, shm_link *gone);

#endif
