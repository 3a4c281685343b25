/* What the Fortran module rfaas_mpi calls: functions of rfaas_mpi.h with a communicator of Fortran. Compile it with the
 * same MPI as the module:
 *
 *     F="$(pkg-config --cflags --libs rfaas-fortran)"
 *     mpicc -c $F rfaas_mpi_fortran.c && mpifort -c $F rfaas_mpi.f90 && mpifort prog.f90 *.o $F */
#include <rfaas_mpi.h>

int rfaas_mpi_lease_open_fortran(int comm, const rfaas_session_options *session_options,
                                 const rfaas_lease_options *options, rfaas_session **session, rfaas_lease **lease,
                                 char *why);

int rfaas_mpi_lease_open_fortran(int comm, const rfaas_session_options *session_options,
                                 const rfaas_lease_options *options, rfaas_session **session, rfaas_lease **lease,
                                 char *why) {
    return rfaas_mpi_lease_open(MPI_Comm_f2c((MPI_Fint)comm), session_options, options, session, lease, why);
}

int rfaas_mpi_lease_open_in_fortran(int comm, rfaas_session *session, const rfaas_lease_options *options, rfaas_lease **lease, char *why);

int rfaas_mpi_lease_open_in_fortran(int comm, rfaas_session *session, const rfaas_lease_options *options, rfaas_lease **lease, char *why) {
    return rfaas_mpi_lease_open_in(MPI_Comm_f2c((MPI_Fint)comm), session, options, lease, why);
}
