/* libibverbs, loaded when it is needed. No program links it: on shm neither it nor its dependencies enter the process.
 *
 * Functions that libibverbs exports are called as dpv_ibv.create_qp(...). Inline functions of <infiniband/verbs.h> that
 * only go through the context (ibv_post_send, ibv_post_recv, ibv_poll_cq, ibv_req_notify_cq) are called by their own
 * names. Inline functions and macros that call exported functions (ibv_query_port, ibv_query_gid_ex, ibv_reg_mr) do not
 * link: their counterparts are here.
 */
#ifndef RFAAS_DP_VERBS_LOAD_H
#define RFAAS_DP_VERBS_LOAD_H

#include <infiniband/verbs.h>
#include <stdbool.h>

#include "dp_fabric.h"

#define DPV_IBV_LIBRARY "libibverbs.so.1"

/* X(member, function, version). The version is the one that the linker binds: most functions also have one of 1.0,
 * whose structures differ. The newest, 1.11, came with rdma-core 32. */
#define DPV_IBV_FUNCTIONS(X)                                              \
    X(get_device_list, ibv_get_device_list, "IBVERBS_1.1")                \
    X(free_device_list, ibv_free_device_list, "IBVERBS_1.1")              \
    X(open_device, ibv_open_device, "IBVERBS_1.1")                        \
    X(close_device, ibv_close_device, "IBVERBS_1.1")                      \
    X(query_device, ibv_query_device, "IBVERBS_1.1")                      \
    X(query_port_compat, ibv_query_port, "IBVERBS_1.1")                   \
    X(query_gid_entry, _ibv_query_gid_ex, "IBVERBS_1.11")                 \
    X(query_gid_entries, _ibv_query_gid_table, "IBVERBS_1.11")            \
    X(query_pkey, ibv_query_pkey, "IBVERBS_1.1")                          \
    X(get_async_event, ibv_get_async_event, "IBVERBS_1.1")                \
    X(ack_async_event, ibv_ack_async_event, "IBVERBS_1.1")                \
    X(alloc_pd, ibv_alloc_pd, "IBVERBS_1.1")                              \
    X(dealloc_pd, ibv_dealloc_pd, "IBVERBS_1.1")                          \
    X(reg_mr_iova2, ibv_reg_mr_iova2, "IBVERBS_1.8")                      \
    X(dereg_mr, ibv_dereg_mr, "IBVERBS_1.1")                              \
    X(create_comp_channel, ibv_create_comp_channel, "IBVERBS_1.0")        \
    X(destroy_comp_channel, ibv_destroy_comp_channel, "IBVERBS_1.0")      \
    X(create_cq, ibv_create_cq, "IBVERBS_1.1")                            \
    X(destroy_cq, ibv_destroy_cq, "IBVERBS_1.1")                          \
    X(get_cq_event, ibv_get_cq_event, "IBVERBS_1.1")                      \
    X(ack_cq_events, ibv_ack_cq_events, "IBVERBS_1.1")                    \
    X(create_qp, ibv_create_qp, "IBVERBS_1.1")                            \
    X(modify_qp, ibv_modify_qp, "IBVERBS_1.1")                            \
    X(query_qp, ibv_query_qp, "IBVERBS_1.1")                              \
    X(destroy_qp, ibv_destroy_qp, "IBVERBS_1.1")

typedef struct dpv_ibv_functions {
#define DPV_IBV_MEMBER(member, function, version) __typeof__(function) *member;
    DPV_IBV_FUNCTIONS(DPV_IBV_MEMBER)
#undef DPV_IBV_MEMBER
} dpv_ibv_functions;

/* Filled by the first dp_verbs_load that succeeds, and constant from then on. Valid while a device is open. */
extern dpv_ibv_functions dpv_ibv;

/* Loads the library of the given name and fills out. Leaves out as it is when it fails. */
int dpv_ibv_load_from(const char *library, dpv_ibv_functions *out, dp_error *err);
/* Loads the providers of libibverbs that the devices in the directory `classes` (/sys/class/infiniband) may need. They are in the directory
 * libibverbs beside the library. Does nothing if RDMAV_DRIVERS or IBV_DRIVERS is set. */
void dpv_load_providers(const char *library, const char *classes);
/* Reports whether a device with this name and kernel driver ("": it has none) may need the provider. */
bool dpv_provider_matches(const char *provider, const char *device, const char *driver);

/* ___ibv_query_port of verbs.h. */
static inline int dpv_ibv_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *out) {
    struct verbs_context *v = verbs_get_ctx_op(ctx, query_port);
    if (v)
        return v->query_port(ctx, port, out, sizeof *out);
    *out = (struct ibv_port_attr){0};
    return dpv_ibv.query_port_compat(ctx, port, (struct _compat_ibv_port_attr *)out);
}

static inline int dpv_ibv_query_gid_ex(struct ibv_context *ctx, uint32_t port, uint32_t index, struct ibv_gid_entry *out) {
    return dpv_ibv.query_gid_entry(ctx, port, index, out, 0, sizeof *out);
}

static inline ssize_t dpv_ibv_query_gid_table(struct ibv_context *ctx, struct ibv_gid_entry *out, size_t room) {
    return dpv_ibv.query_gid_entries(ctx, out, room, 0, sizeof *out);
}

/* ibv_reg_mr with access flags that are not constant. */
static inline struct ibv_mr *dpv_ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t size, unsigned access) {
    return dpv_ibv.reg_mr_iova2(pd, addr, size, (uintptr_t)addr, access);
}

#endif
