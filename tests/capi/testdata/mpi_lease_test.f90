!> The module rfaas_mpi: leases for all ranks at once. Needs a resource manager with executors that lend as many cores as there are
!> ranks. The argument is the path of build/functions/echo.so. Rank 0 prints the executor of each rank.
include 'rfaas_mpi.f90'

program mpi_lease_test
   use, intrinsic :: iso_c_binding
   use, intrinsic :: iso_fortran_env, only: error_unit
   use mpi_f08
   use rfaas
   use rfaas_mpi
   implicit none
   integer :: failures = 0, rank, ranks, ierror, i, round, total
   type(rfaas_session) :: session, other_session
   type(rfaas_lease) :: lease, other
   type(rfaas_lease_details) :: details
   integer(rfaas_function) :: echo
   integer(c_int64_t) :: in(1), out(1)
   character(len=1024) :: library
   character(len=RFAAS_MPI_ERROR_MAX) :: why
   character(len=256), allocatable :: all_at(:)
   double precision :: over
   logical :: moves, late

   call MPI_Init()
   call MPI_Comm_rank(MPI_COMM_WORLD, rank)
   call MPI_Comm_size(MPI_COMM_WORLD, ranks)
   allocate (all_at(ranks))
   call get_command_argument(1, library)
   call rfaas_mpi_lease_open(MPI_COMM_WORLD, library, session, lease, ierror=ierror, why=why)
   call fails(RFAAS_INVALID, 'not initialised', 'open before init')
   call rfaas_init()
   do round = 1, 2
      moves = round == 2
      over = MPI_Wtime() + 20
      do ! what was released a moment ago may not be on the board yet
         call rfaas_mpi_lease_open(MPI_COMM_WORLD, library, session, lease, ierror=ierror, failover=moves, why=why, &
                                   data_encryption=RFAAS_DATA_ENCRYPTION_REQUIRE)
         if (ierror /= RFAAS_BUSY) exit
         late = MPI_Wtime() > over
         call MPI_Bcast(late, 1, MPI_LOGICAL, 0, MPI_COMM_WORLD)
         if (late) exit
      end do
      call check(ierror == RFAAS_OK, 'open')
      if (ierror /= RFAAS_OK) exit
      call rfaas_lease_function(lease, 'echo', echo)
      do i = 1, 100
         in = rank*1000 + i
         out = -1
         call rfaas_invoke(lease, echo, in, 8_c_size_t, out, 8_c_size_t)
         call check(all(in == out), 'echo')
      end do
      call rfaas_lease_info(lease, details)
      call MPI_Gather(details%executor, 256, MPI_CHARACTER, all_at, 256, MPI_CHARACTER, 0, MPI_COMM_WORLD)
      if (rank == 0) then
         do i = 1, ranks
            print '(a,i0,2a)', 'rank ', i - 1, ' on ', trim(all_at(i))
         end do
      end if

      call rfaas_mpi_lease_open(MPI_COMM_WORLD, library, other_session, other, ierror=ierror, failover=moves, why=why)
      call fails(RFAAS_BUSY, 'room', 'as many again')
      call rfaas_mpi_lease_open(MPI_COMM_WORLD, library, other_session, other, ierror=ierror, why=why, data_encryption=9)
      call fails(RFAAS_INVALID, 'data_encryption 9', 'unknown encryption')
      call rfaas_mpi_lease_open(MPI_COMM_WORLD%mpi_val, library, other_session, other, ierror=ierror, why=why, data_encryption=8)
      call fails(RFAAS_INVALID, 'data_encryption 8', 'unknown encryption, communicator as an integer')
      call check(.not. c_associated(other%handle), 'no lease after an error')
      ! The communicator as the older modules have it.
      call rfaas_mpi_lease_open(MPI_COMM_WORLD%mpi_val, library, other_session, other, ierror=ierror, failover=moves, local=.true.)
      call check(ierror == RFAAS_OK, 'local')
      if (ierror == RFAAS_OK) then
         call rfaas_lease_info(other, details)
         call check(details%provider == 'local', 'local provider')
         call rfaas_session_close(other_session)
      end if
      ! In the sessions that are open.
      call rfaas_mpi_lease_open_in(MPI_COMM_WORLD, session, library, other, ierror=ierror, failover=moves, why=why)
      call fails(RFAAS_BUSY, 'room', 'as many again in the session')
      call rfaas_mpi_lease_open_in(MPI_COMM_WORLD%mpi_val, session, library, other, ierror=ierror, failover=moves, local=.true.)
      call check(ierror == RFAAS_OK, 'local in the session')
      if (ierror == RFAAS_OK) then
         call rfaas_lease_info(other, details)
         call check(details%provider == 'local', 'local provider in the session')
         call rfaas_lease_release(other)
      end if
      ! A mistake of one rank is an error of all.
      call rfaas_mpi_lease_open(MPI_COMM_WORLD, merge('/nothing.so', library(:11), rank == 1)//library(12:), other_session, other, &
                                ierror=ierror, local=.true., why=why)
      call fails(RFAAS_BAD_LIBRARY, 'nothing.so', 'one library is missing')
      call rfaas_session_close(session)
   end do
   call rfaas_finalize()
   call MPI_Allreduce(failures, total, 1, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD)
   call MPI_Finalize()
   if (total > 0) error stop 1

contains

   !> The last call must have failed so, with the same text on every rank.
   subroutine fails(status, word, what)
      integer, intent(in) :: status
      character(len=*), intent(in) :: word, what
      character(len=RFAAS_MPI_ERROR_MAX) :: first
      first = why
      call MPI_Bcast(first, RFAAS_MPI_ERROR_MAX, MPI_CHARACTER, 0, MPI_COMM_WORLD)
      call check(ierror == status .and. index(why, word) > 0 .and. first == why, what)
   end subroutine

   subroutine check(good, what)
      logical, intent(in) :: good
      character(len=*), intent(in) :: what
      if (.not. good) then
         write (error_unit, '(a,i0,6a)') 'mpi_lease_test: rank ', rank, ': ', what, ': ', trim(why), '; ', rfaas_last_error()
         failures = failures + 1
      end if
   end subroutine
end program
