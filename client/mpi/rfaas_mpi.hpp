/* rfaas_mpi.hpp: rfaas_mpi.h for C++17. Include it after <mpi.h>, or it includes it.
 *
 *     rfaas::library library;
 *     rfaas::mpi::connection c = rfaas::mpi::open(MPI_COMM_WORLD, rfaas::lease_options("libprices.so"));
 *     c.lease.invoke(c.lease.function("price"), in, out); */
#ifndef RFAAS_MPI_HPP
#define RFAAS_MPI_HPP

#include <rfaas.hpp>
#include <rfaas_mpi.h>

namespace rfaas {
namespace mpi {

/* What each rank gets. The lease is released before the session is closed. */
struct connection {
    rfaas::session session;
    rfaas::lease lease;
};

/* Opens a session and a lease on every rank of comm, or throws the same error on every rank. Collective: see
 * rfaas_mpi_lease_open(3). */
inline connection open(MPI_Comm comm, const lease_options &options, const session_options &where = {}) {
    rfaas_session *session = nullptr;
    rfaas_lease *lease = nullptr;
    char why[RFAAS_MPI_ERROR_MAX] = "";
    rfaas_lease_options o = options.plain();
    int status = rfaas_mpi_lease_open(comm, &where, &o, &session, &lease, why);
    if (status != RFAAS_OK)
        raise(status, false, why);
    return connection{rfaas::session::adopt(session), rfaas::lease::adopt(lease)};
}

/* Opens a lease on every rank of comm, in the session that each rank has opened, for example to publish tables. */
inline rfaas::lease open(MPI_Comm comm, const rfaas::session &session, const lease_options &options) {
    rfaas_lease *lease = nullptr;
    char why[RFAAS_MPI_ERROR_MAX] = "";
    rfaas_lease_options o = options.plain();
    int status = rfaas_mpi_lease_open_in(comm, session.get(), &o, &lease, why);
    if (status != RFAAS_OK)
        raise(status, false, why);
    return rfaas::lease::adopt(lease);
}

} // namespace mpi
} // namespace rfaas

#endif
