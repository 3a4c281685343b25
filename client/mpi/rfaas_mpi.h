/* rfaas_mpi.h: leases for all ranks of an MPI communicator in one call. It is a header of its own because rfaas.h and
 * librfaas.so do not depend on MPI. Include it after <mpi.h>, or it includes it. For C and C++ and any MPI.
 *
 *     rfaas_session *s;  rfaas_lease *l;  char why[RFAAS_MPI_ERROR_MAX];
 *     if (rfaas_mpi_lease_open(MPI_COMM_WORLD, NULL, &options, &s, &l, why))
 *         fprintf(stderr, "%s\n", why), MPI_Abort(MPI_COMM_WORLD, 1);
 *
 * If a thousand ranks looked for executors at the same moment, all of them would ask the resource manager, find the
 * same free cores and compete for them. Therefore only rank 0 looks, and sends each rank the executor that it chose
 * for it. The other ranks open a session with that executor and do not contact the manager, unless the lease has
 * RFAAS_LEASE_FAILOVER. A rank whose executor has meanwhile leased its cores to another client looks for itself. */
#ifndef RFAAS_MPI_H
#define RFAAS_MPI_H

#include <mpi.h>
#include <rfaas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Copies the text of the last error of this thread. */
static inline int rfaas_mpi_keep(int status, char why[RFAAS_MPI_ERROR_MAX]) {
    if (status != RFAAS_OK)
        snprintf(why, RFAAS_MPI_ERROR_MAX, "%s", rfaas_last_error());
    return status;
}

static inline int rfaas_mpi_failed(const char *what, char why[RFAAS_MPI_ERROR_MAX]) {
    snprintf(why, RFAAS_MPI_ERROR_MAX, "%s", what);
    return RFAAS_FATAL;
}

/* Returns the same on every rank: RFAAS_OK if all ranks have it, else the most serious status with its text. */
static inline int rfaas_mpi_agree(MPI_Comm comm, int rank, int status, char why[RFAAS_MPI_ERROR_MAX]) {
    int mine[2], worst[2];
    mine[0] = status;
    mine[1] = rank;
    if (MPI_Allreduce(mine, worst, 1, MPI_2INT, MPI_MINLOC, comm) != MPI_SUCCESS)
        return rfaas_mpi_failed("lease for a communicator: MPI_Allreduce failed", why);
    if (worst[0] == RFAAS_OK)
        return RFAAS_OK;
    if (MPI_Bcast(why, RFAAS_MPI_ERROR_MAX, MPI_CHAR, worst[1], comm) != MPI_SUCCESS)
        return rfaas_mpi_failed("lease for a communicator: MPI_Bcast failed", why);
    return worst[0];
}

/* Opens a rank's session and lease, at the executor that was chosen for it if that still has room. */
static inline int rfaas_mpi_take(const rfaas_session_options *session_options, const rfaas_lease_options *options,
                                 const rfaas_place *place, rfaas_session **session, rfaas_lease **lease) {
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    rfaas_lease_details d;
    int status, own;
    memset(&d, 0, sizeof d);
    d.struct_size = sizeof d;
    if (session_options)
        memcpy(&o, session_options, session_options->struct_size < sizeof o ? session_options->struct_size : sizeof o);
    o.struct_size = sizeof o;
    own = !*session && !(options->flags & RFAAS_LEASE_FAILOVER) && place->executor[0];
    if (own) {
        o.manager = NULL;
        o.executor = place->executor;
    }
    status = *session ? RFAAS_OK : rfaas_session_open(own ? &o : session_options, session);
    if (status == RFAAS_OK && place->executor[0])
        status = rfaas_lease_open_at(*session, options, place, lease);
    else if (status == RFAAS_OK)
        status = rfaas_lease_open(*session, options, lease);
    if (status == RFAAS_OK && place->executor[0] && rfaas_lease_info(*lease, &d) == RFAAS_OK && !strcmp(d.provider, "local")) {
        rfaas_lease_release(*lease); /* other executors may have room */
        *lease = NULL;
        status = RFAAS_BUSY;
    }
    if (!place->executor[0] || (RFAAS_CLASS(status) != RFAAS_CLASS_BUSY && RFAAS_CLASS(status) != RFAAS_CLASS_CONNECTION))
        return status;
    if (own) {
        if (*session)
            rfaas_session_close(*session);
        *session = NULL;
        if ((status = rfaas_session_open(session_options, session)) != RFAAS_OK)
            return status;
    }
    return rfaas_lease_open(*session, options, lease);
}

/* begin of what is generated from client/api/rfaas.yaml by internal/apigen (make api): do not edit */
/* rfaas_mpi_lease_open opens a session and a lease on every rank of a communicator, or on none.
 *
 *   session_options: NULL means that everything comes from the environment.
 *   options: options->workers workers for each rank.
 *   session: NULL after an error.
 *   lease: NULL after an error.
 *   why: room for RFAAS_MPI_ERROR_MAX bytes, or NULL; the text of the error.
 *
 * Collective over comm. Every rank must have called rfaas_init. Each rank passes its own options. They
 * should be the same on all ranks, apart from pointers; those of rank 0 decide where the leases are
 * opened. Ranks with neighbouring numbers share an executor. Each rank closes its session with
 * rfaas_session_close, which releases the lease.
 *
 * Returns the same on every rank: RFAAS_OK, or the most serious error of any rank. Nothing stays
 * leased after an error. Two threads must not call this function on the same communicator at the same
 * time. Other errors are those of rfaas_session_open and rfaas_lease_open.
 *
 * Errors:
 *   RFAAS_BUSY: there is no room for all ranks now. With RFAAS_LEASE_LOCAL this is no error: each
 *     rank takes what it finds or computes locally.
 *   RFAAS_FATAL: MPI failed. */
static inline int rfaas_mpi_lease_open(MPI_Comm comm, const rfaas_session_options *session_options,
                                       const rfaas_lease_options *options, rfaas_session **session,
                                       rfaas_lease **lease, char *why);
/* rfaas_mpi_lease_open_in opens a lease on every rank of a communicator, in sessions that are open, or
 * on none.
 *
 *   session: of this rank; all ranks name the same resource manager or executor.
 *   options: options->workers workers for each rank.
 *   lease: NULL after an error.
 *   why: room for RFAAS_MPI_ERROR_MAX bytes, or NULL; the text of the error.
 *
 * Works like rfaas_mpi_lease_open, in a session that each rank has opened, for example to publish
 * tables by rfaas_table_put before the lease is opened. The sessions stay open, also after an error.
 *
 * Errors:
 *   RFAAS_BUSY: there is no room for all ranks now. With RFAAS_LEASE_LOCAL this is no error: each
 *     rank takes what it finds or computes locally.
 *   RFAAS_FATAL: MPI failed. */
static inline int rfaas_mpi_lease_open_in(MPI_Comm comm, rfaas_session *session, const rfaas_lease_options *options,
                                          rfaas_lease **lease, char *why);
/* end of what is generated */

/* Opens the leases, and the sessions too unless `given`: then each rank has opened its own. */
static inline int rfaas_mpi_open(MPI_Comm comm, const rfaas_session_options *session_options, const rfaas_lease_options *options,
                                 rfaas_session **session, int given, rfaas_lease **lease, char *why) {
    char text[RFAAS_MPI_ERROR_MAX] = "";
    rfaas_place place, *places = NULL;
    int rank, ranks, status = RFAAS_OK;
    memset(&place, 0, sizeof place);
    if (session && !given)
        *session = NULL;
    if (lease)
        *lease = NULL;
    if (MPI_Comm_rank(comm, &rank) != MPI_SUCCESS || MPI_Comm_size(comm, &ranks) != MPI_SUCCESS) {
        status = rfaas_mpi_failed("lease for a communicator: MPI_Comm_rank failed", text);
        goto end;
    }
    if (!session || (given && !*session) || !lease || !options) {
        snprintf(text, sizeof text, "lease for a communicator: %s is NULL on rank %d",
                 !session || (given && !*session) ? "session" : !lease ? "lease" : "options", rank);
        status = RFAAS_INVALID;
    }
    if ((status = rfaas_mpi_agree(comm, rank, status, text)) != RFAAS_OK)
        goto end;
    if (rank == 0) {
        places = (rfaas_place *)calloc((size_t)ranks, sizeof *places);
        status = !places ? rfaas_mpi_failed("lease for a communicator: out of memory", text)
                 : given ? RFAAS_OK
                         : rfaas_mpi_keep(rfaas_session_open(session_options, session), text);
        if (status == RFAAS_OK)
            status = rfaas_mpi_keep(rfaas_places(*session, options, (size_t)ranks, places), text);
        if (status != RFAAS_OK && *session && options->flags & RFAAS_LEASE_LOCAL)
            status = RFAAS_OK; /* no place: each rank looks for itself */
    }
    if ((status = rfaas_mpi_agree(comm, rank, status, text)) != RFAAS_OK)
        goto end;
    if (MPI_Scatter(places, (int)sizeof place, MPI_BYTE, &place, (int)sizeof place, MPI_BYTE, 0, comm) != MPI_SUCCESS)
        status = rfaas_mpi_failed("lease for a communicator: MPI_Scatter failed", text);
    else if ((status = rfaas_mpi_take(session_options, options, &place, session, lease)) != RFAAS_OK)
        snprintf(text, sizeof text, "rank %d: %s", rank, rfaas_last_error());
    status = rfaas_mpi_agree(comm, rank, status, text);
end:
    free(places);
    if (status != RFAAS_OK && lease && *lease && given)
        rfaas_lease_release(*lease);
    if (status != RFAAS_OK && session && *session && !given) {
        rfaas_session_close(*session);
        *session = NULL;
    }
    if (status != RFAAS_OK && lease)
        *lease = NULL;
    if (why && status != RFAAS_OK)
        memcpy(why, text, sizeof text);
    return status;
}

static inline int rfaas_mpi_lease_open(MPI_Comm comm, const rfaas_session_options *session_options,
                                       const rfaas_lease_options *options, rfaas_session **session, rfaas_lease **lease,
                                       char *why) {
    return rfaas_mpi_open(comm, session_options, options, session, 0, lease, why);
}

static inline int rfaas_mpi_lease_open_in(MPI_Comm comm, rfaas_session *session, const rfaas_lease_options *options,
                                          rfaas_lease **lease, char *why) {
    return rfaas_mpi_open(comm, NULL, options, &session, 1, lease, why);
}

#ifdef __cplusplus
}
#endif

#endif
