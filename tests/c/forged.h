/* Hand-made sides of a channel, which send any bytes. Channels have 8 slots of 512 bytes and 4096 bytes of bulk. */
#ifndef RFAAS_CTEST_FORGED_H
#define RFAAS_CTEST_FORGED_H

#include "dp_layout.h"
#include "ends.h"
#include "served.h"

typedef struct raw {
    end e;
    dp_layout l;
    dp_side peer;
    uint64_t keys;       /* client: first word of a request with a placed or part flag */
    uint32_t generation; /* 77 for a client, the client's for a worker */
    dp_request told[8];  /* worker: last header by slot */
    bool client_polls;   /* worker: end_attend was called for the client's queue */
} raw;

/* A hand-made client, connected to a server process whose functions all echo. At its end the server sends its status (int). */
void raw_client(raw *r, t_peer *p);
/* A hand-made worker at the other end of `sock`, for a client that served_by opened. */
void raw_worker(raw *r, int sock);
/* Opens a channel to a peer process that runs `worker`, which begins with raw_worker. */
void served_by(served *s, void (*worker)(int sock, void *arg));
/* Waits for that process and closes the client's side. */
void served_by_close(served *s);

/* The mailbox, which has both forms: own memory's (worker), or the peer's (client). shm only. */
dp_mailbox *raw_mailbox(raw *r, bool own);
/* The place of the reply that announces a result in the client's slot: in its own memory, or as the worker reaches it. */
uint64_t *raw_slot_reply(raw *r, bool worker);

/* Client: writes header and `payload` bytes into slot, with that tag. */
void raw_request(raw *r, uint32_t slot, dp_request h, uint32_t payload, uint32_t tag);
/* Client: the same with any immediate. */
void raw_request_as(raw *r, uint32_t at, dp_request h, uint32_t payload, uint32_t imm);
/* Client: `payload` bytes alone. */
void raw_bare(raw *r, uint32_t slot, uint32_t payload, uint32_t tag);
/* Client: the next reply, which must be for slot and, if it names one, this call. A bare reply is returned as a full header. */
dp_reply raw_reply(raw *r, uint32_t slot, uint32_t call_id);

/* Worker: the next request. The header of a bare one is reconstructed. Returns the slot. */
uint32_t raw_take(raw *r, dp_request *q, bool *bare);
/* Worker: writes header and `payload` bytes of value `fill` to slot `at`, with that immediate, and waits until sent. */
void raw_answer(raw *r, uint32_t at, dp_reply h, uint32_t payload, int fill, uint32_t imm);
/* Worker: bytes alone. */
void raw_answer_bare(raw *r, uint32_t at, uint32_t payload, int fill, uint32_t imm);

#endif
