/* Connecting a queue pair in a process that may no longer call ioctl on its device: a sealed worker.
 *
 * libibverbs sends the commands that change a queue pair's state by ioctl. The kernel also accepts them by write() on the same descriptor, and
 * a sealed worker may call write(), because soft-RoCE posts with it. But the adapters' libraries do not see commands that we send ourselves, and
 * some of them keep the state too: mlx5 refuses sends until its own modify_qp has seen RTS, hns until its own has seen more than RTR (rdma-core
 * at 691953d8, August 2026; mlx4, bnxt_re and rxe do not check). So the queue pair is connected twice:
 *
 *   not sealed yet   library:  RESET ─▶ INIT ─▶ RTR ─▶ RTS, connected to itself. Nothing is posted
 *                    write():  ─▶ RESET ─▶ INIT. The library still assumes RTS. Receives may be posted
 *   sealed           write():  ─▶ RTR ─▶ RTS, connected to the peer
 *
 * The two commands before sealing also show that the kernel accepts write(). */
#include "dp_verbs.h"

#include <errno.h>
#include <rdma/ib_user_verbs.h>
#include <string.h>
#include <unistd.h>

typedef struct modify_command {
    struct ib_uverbs_cmd_hdr head;
    struct ib_uverbs_modify_qp m;
} modify_command;
_Static_assert(sizeof(modify_command) == 120, "command MODIFY_QP");

static void set_path(struct ib_uverbs_qp_dest *d, const struct ibv_ah_attr *a) {
    memcpy(d->dgid, a->grh.dgid.raw, sizeof d->dgid);
    d->dlid = a->dlid;
    d->sgid_index = a->grh.sgid_index;
    d->hop_limit = a->grh.hop_limit;
    d->traffic_class = a->grh.traffic_class;
    d->sl = a->sl;
    d->is_global = a->is_global;
    d->port_num = a->port_num;
}

/* Sends MODIFY_QP by write(). Returns 0 or an errno. The kernel ignores fields that are not in the mask. */
static int command(const dpv_qp *q, const struct ibv_qp_attr *a, int mask) {
    modify_command c = {
        .head = {.command = IB_USER_VERBS_CMD_MODIFY_QP, .in_words = sizeof c / 4},
        .m = {.qp_handle = q->qp->handle,
              .attr_mask = (uint32_t)mask,
              .rq_psn = a->rq_psn,
              .sq_psn = a->sq_psn,
              .dest_qp_num = a->dest_qp_num,
              .qp_access_flags = a->qp_access_flags,
              .pkey_index = a->pkey_index,
              .qp_state = (uint8_t)a->qp_state,
              .path_mtu = (uint8_t)a->path_mtu,
              .max_rd_atomic = a->max_rd_atomic,
              .max_dest_rd_atomic = a->max_dest_rd_atomic,
              .min_rnr_timer = a->min_rnr_timer,
              .port_num = a->port_num,
              .timeout = a->timeout,
              .retry_cnt = a->retry_cnt,
              .rnr_retry = a->rnr_retry},
    };
    set_path(&c.m.dest, &a->ah_attr);
    ssize_t n = write(q->qp->context->cmd_fd, &c, sizeof c);
    return n == sizeof c ? 0 : n < 0 ? errno : EIO;
}

int dpv_modify(const dpv_qp *q, struct ibv_qp_attr *a, int mask) { return q->late ? command(q, a, mask) : dpv_ibv.modify_qp(q->qp, a, mask); }

/* Connects the queue pair to itself, through the adapter's library. */
static int rehearse(dpv_qp *q, dp_error *err) {
    uint8_t blob[DP_BLOB_MAX];
    uint32_t len;
    int st = dpv_qp_export(&q->base, blob, &len, err);
    return st ? st : dpv_qp_connect(&q->base, blob, len, err);
}

int dpv_qp_connect_late(dp_qp *base, dp_error *err) {
    dpv_qp *q = dpv_qp_of(base);
    int st = dpv_qp_reset(base, err);
    if (!st)
        st = rehearse(q, err);
    if (st)
        return st;
    base->state = DP_QP_ERROR; /* unless all of the following succeeds */
    q->late = true;
    int e = dpv_modify(q, &(struct ibv_qp_attr){.qp_state = IBV_QPS_RESET}, IBV_QP_STATE);
    if (e)
        return dp_fail(err, e == EACCES || e == EPERM ? DP_UNSUPPORTED : dpv_status_of(e), e, "MODIFY_QP to RESET by write() on %s",
                       base->domain->dev->name);
    st = dpv_to_init(q, err);
    if (!st)
        base->state = DP_QP_INIT;
    return st;
}
