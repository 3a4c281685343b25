!> rfaas_mpi.h for Fortran: leases for all ranks of a communicator.
!>
!>     use mpi_f08
!>     use rfaas
!>     use rfaas_mpi
!>     call rfaas_init()
!>     call rfaas_mpi_lease_open(MPI_COMM_WORLD, 'libprices.so', session, lease, workers=4)
!>
!> librfaas.so does not depend on MPI, so a program compiles this file with its own MPI, and rfaas_mpi_fortran.c too. Both are in
!> PREFIX/share/rfaas:
!>
!>     F="$(pkg-config --cflags --libs rfaas-fortran)"
!>     mpicc -c $F rfaas_mpi_fortran.c && mpifort -c $F rfaas_mpi.f90 && mpifort prog.f90 *.o $F
module rfaas_mpi
   use, intrinsic :: iso_c_binding
   use, intrinsic :: iso_fortran_env, only: error_unit
   use mpi_f08, only: MPI_Comm, MPI_Abort
   use rfaas_options
   use rfaas_c, only: rfaas_session_options_c, rfaas_lease_options_c
   use rfaas, only: rfaas_session, rfaas_lease, RFAAS_OK, RFAAS_MPI_ERROR_MAX
   implicit none
   private
   public :: rfaas_mpi_lease_open, rfaas_mpi_lease_open_in, RFAAS_MPI_ERROR_MAX

   !> Opens a session and a lease on every rank of a communicator of mpi_f08, or of an older module of MPI.
   interface rfaas_mpi_lease_open
      module procedure open_f08
      module procedure open_integer
   end interface

   interface
      integer(c_int) function open_c(comm, session_options, options, session, lease, why) &
         bind(c, name='rfaas_mpi_lease_open_fortran')
         import
         integer(c_int), value :: comm
         type(rfaas_session_options_c), intent(in) :: session_options
         type(rfaas_lease_options_c), intent(in) :: options
         type(c_ptr), intent(inout) :: session, lease
         character(kind=c_char), intent(inout) :: why(*)
      end function

      integer(c_int) function open_in_c(comm, session, options, lease, why) bind(c, name='rfaas_mpi_lease_open_in_fortran')
         import
         integer(c_int), value :: comm
         type(c_ptr), value :: session
         type(rfaas_lease_options_c), intent(in) :: options
         type(c_ptr), intent(inout) :: lease
         character(kind=c_char), intent(inout) :: why(*)
      end function
   end interface

   !> Opens a lease on every rank of a communicator, in the session that each rank has opened, for example to publish tables.
   interface rfaas_mpi_lease_open_in
      module procedure open_in_f08
      module procedure open_in_integer
   end interface

contains

   !> Collective: see rfaas_mpi_lease_open(3). The arguments are those of rfaas_session_open and rfaas_lease_open. `executor` is the
   !> session's. `why` becomes the text of the error, which is the same on all ranks. Without ierror, an error prints that text and
   !> aborts the program.
   subroutine open_f08(comm, library, session, lease, workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, &
                       duration, call_limit, manager, executor, provider, tenant, timeout, ierror, renew, failover, local, &
                       allow_plaintext, why, library_data, library_size, device, cached_leases, port, gid_index, pkey_index, &
                       traffic_class, service_level, mtu, data_encryption, wait, init, reuse)
      type(MPI_Comm), intent(in) :: comm
      character(len=*), intent(in) :: library
      type(rfaas_session), intent(inout) :: session
      type(rfaas_lease), intent(inout) :: lease
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory
      real(c_double), intent(in), optional :: duration, call_limit, timeout
      character(len=*), intent(in), optional :: manager, executor, provider, tenant, device
      integer, intent(out), optional :: ierror
      logical, intent(in), optional :: renew, failover, local, allow_plaintext
      character(len=*), intent(out), optional :: why
      type(c_ptr), intent(in), optional :: library_data
      integer(c_size_t), intent(in), optional :: library_size
      type(rfaas_init_call), intent(in), optional :: init
      logical, intent(in), optional :: reuse
      real(c_double), intent(in), optional :: wait
      integer, intent(in), optional :: cached_leases, port, gid_index, pkey_index, traffic_class, service_level, mtu
      integer(c_int32_t), intent(in), optional :: data_encryption !< RFAAS_DATA_ENCRYPTION_*
      type(session_arguments), target :: where
      type(lease_arguments), target :: what
      character(kind=c_char) :: text(RFAAS_MPI_ERROR_MAX)
      integer(c_int) :: status
      call set_session(where, manager, executor, provider, tenant, device, timeout, cached_leases, port, gid_index, pkey_index, &
                       traffic_class, service_level, mtu, allow_plaintext, data_encryption=data_encryption, local=local)
      call set_lease(what, library, workers=workers, cores_per_worker=cores_per_worker, depth=depth, eager=eager, &
                     wait_mode=wait_mode, bulk=bulk, memory=memory, duration=duration, call_limit=call_limit, renew=renew, &
                     failover=failover, local=local, library_data=library_data, library_size=library_size, wait=wait, &
                     init=init, reuse=reuse)
      text = c_null_char
      status = open_c(int(comm%mpi_val, c_int), where%options, what%options, session%handle, lease%handle, text)
      if (present(why)) why = text_in(text)
      if (present(ierror)) then
         ierror = int(status)
      else if (status /= RFAAS_OK) then
         write (error_unit, '(2a)') 'rfaas: ', text_in(text)
         call MPI_Abort(comm, 1)
      end if
   end subroutine

   !> Collective: see rfaas_mpi_lease_open_in(3). `why` and ierror are as above.
   subroutine open_in_f08(comm, session, library, lease, workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, &
                          duration, call_limit, ierror, renew, failover, local, why, library_data, library_size, wait, &
                          init, reuse)
      type(MPI_Comm), intent(in) :: comm
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: library
      type(rfaas_lease), intent(inout) :: lease
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory
      real(c_double), intent(in), optional :: duration, call_limit
      integer, intent(out), optional :: ierror
      logical, intent(in), optional :: renew, failover, local
      character(len=*), intent(out), optional :: why
      type(c_ptr), intent(in), optional :: library_data
      integer(c_size_t), intent(in), optional :: library_size
      type(rfaas_init_call), intent(in), optional :: init
      logical, intent(in), optional :: reuse
      real(c_double), intent(in), optional :: wait
      type(lease_arguments), target :: what
      character(kind=c_char) :: text(RFAAS_MPI_ERROR_MAX)
      integer(c_int) :: status
      call set_lease(what, library, workers=workers, cores_per_worker=cores_per_worker, depth=depth, eager=eager, &
                     wait_mode=wait_mode, bulk=bulk, memory=memory, duration=duration, call_limit=call_limit, renew=renew, &
                     failover=failover, local=local, library_data=library_data, library_size=library_size, wait=wait, &
                     init=init, reuse=reuse)
      text = c_null_char
      status = open_in_c(int(comm%mpi_val, c_int), session%handle, what%options, lease%handle, text)
      if (present(why)) why = text_in(text)
      if (present(ierror)) then
         ierror = int(status)
      else if (status /= RFAAS_OK) then
         write (error_unit, '(2a)') 'rfaas: ', text_in(text)
         call MPI_Abort(comm, 1)
      end if
   end subroutine

   subroutine open_in_integer(comm, session, library, lease, workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, &
                              duration, call_limit, ierror, renew, failover, local, why, library_data, library_size, wait, &
                              init, reuse)
      integer, intent(in) :: comm
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: library
      type(rfaas_lease), intent(inout) :: lease
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory
      real(c_double), intent(in), optional :: duration, call_limit
      integer, intent(out), optional :: ierror
      logical, intent(in), optional :: renew, failover, local
      character(len=*), intent(out), optional :: why
      type(c_ptr), intent(in), optional :: library_data
      integer(c_size_t), intent(in), optional :: library_size
      type(rfaas_init_call), intent(in), optional :: init
      logical, intent(in), optional :: reuse
      real(c_double), intent(in), optional :: wait
      call open_in_f08(MPI_Comm(comm), session, library, lease, workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, &
                       duration, call_limit, ierror, renew, failover, local, why, library_data, library_size, wait, &
                       init, reuse)
   end subroutine

   subroutine open_integer(comm, library, session, lease, workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, &
                           duration, call_limit, manager, executor, provider, tenant, timeout, ierror, renew, failover, &
                           local, allow_plaintext, why, library_data, library_size, device, cached_leases, port, gid_index, &
                           pkey_index, traffic_class, service_level, mtu, data_encryption, wait, init, reuse)
      integer, intent(in) :: comm
      character(len=*), intent(in) :: library
      type(rfaas_session), intent(inout) :: session
      type(rfaas_lease), intent(inout) :: lease
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory
      real(c_double), intent(in), optional :: duration, call_limit, timeout
      character(len=*), intent(in), optional :: manager, executor, provider, tenant, device
      integer, intent(out), optional :: ierror
      logical, intent(in), optional :: renew, failover, local, allow_plaintext
      character(len=*), intent(out), optional :: why
      type(c_ptr), intent(in), optional :: library_data
      integer(c_size_t), intent(in), optional :: library_size
      type(rfaas_init_call), intent(in), optional :: init
      logical, intent(in), optional :: reuse
      real(c_double), intent(in), optional :: wait
      integer, intent(in), optional :: cached_leases, port, gid_index, pkey_index, traffic_class, service_level, mtu
      integer(c_int32_t), intent(in), optional :: data_encryption !< RFAAS_DATA_ENCRYPTION_*
      call open_f08(MPI_Comm(comm), library, session, lease, workers, cores_per_worker, depth, eager, wait_mode, bulk, &
                    memory, duration, call_limit, manager, executor, provider, tenant, timeout, ierror, renew, failover, &
                    local, allow_plaintext, why, library_data, library_size, device, cached_leases, port, gid_index, &
                    pkey_index, traffic_class, service_level, mtu, data_encryption, wait, init, reuse)
   end subroutine
end module
