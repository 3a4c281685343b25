!> Heat on a plate by Jacobi's method, in Fortran. The plate's columns are divided among the MPI ranks. Each rank computes the
!> left half of its columns, and a worker keeps and computes the right half. In each step the worker and the rank compute at the
!> same time, and only columns at the borders are transferred: by MPI between ranks, by rfaas to the worker. At the end every
!> temperature is compared with the same steps computed by the rank alone.
!>
!>     mpirun -n 2 build/examples/heat [rows and columns, 128 if not given] [steps, 200]
program heat
   use mpi_f08
   use rfaas
   use, intrinsic :: iso_fortran_env, only: real64, error_unit
   implicit none

   integer :: rank, ranks, n, steps, first, last, lent, step, wrong, all_wrong
   integer(c_int64_t) :: shape_of(2)
   real(real64), allocatable :: whole(:, :), other(:, :), plate(:, :), next(:, :), taken(:, :)
   real(real64), allocatable, target, asynchronous :: beside(:, :), edges(:, :)
   real(real64) :: start, alone, together, slowest(2)
   type(rfaas_session) :: session
   type(rfaas_lease) :: lease
   type(rfaas_request) :: request
   integer(rfaas_function) :: begin_, step_, end_
   integer(c_int64_t), allocatable :: message(:)
   integer :: left, right

   call MPI_Init()
   call MPI_Comm_rank(MPI_COMM_WORLD, rank)
   call MPI_Comm_size(MPI_COMM_WORLD, ranks)
   n = argument(1, 128, 2*ranks, 1000)
   steps = argument(2, 200, 1, 100000)

   ! The plate has n x n cells inside an edge: the upper one hot, the others cold.
   allocate (whole(0:n + 1, 0:n + 1), source=0.0_real64)
   whole(0, :) = 100
   other = whole
   first = n*rank/ranks + 1
   last = n*(rank + 1)/ranks

   call MPI_Barrier(MPI_COMM_WORLD)
   start = MPI_Wtime()
   do step = 1, steps
      call sweep(whole, other)
      call swap(whole, other)
   end do
   alone = (MPI_Wtime() - start)/ranks ! as if the work had been divided without any cost

   ! This rank's columns first..last, with a neighbour on each side. The worker has those from `lent` on.
   lent = (first + last)/2 + 1
   allocate (plate(0:n + 1, first - 1:lent), source=0.0_real64)
   plate(0, :) = 100
   next = plate
   allocate (beside(0:n + 1, 2), edges(0:n + 1, 2), source=0.0_real64)
   beside(0, :) = 100
   edges(0, :) = 100
   allocate (taken(0:n + 1, lent:last), source=0.0_real64)
   taken(0, :) = 100

   call rfaas_init()
   call rfaas_session_open(session)
   call rfaas_lease_open(session, library(), lease, workers=1, bulk=2*bytes(size(taken)) + 65536)
   call rfaas_lease_function(lease, 'heat_begin', begin_)
   call rfaas_lease_function(lease, 'heat_step', step_)
   call rfaas_lease_function(lease, 'heat_end', end_)
   shape_of = [int(n + 2, c_int64_t), int(last - lent + 1, c_int64_t)]
   message = [shape_of, transfer(taken, [0_c_int64_t])]
   call rfaas_invoke(lease, begin_, message, bytes(size(message)), edges, 0_c_size_t)

   left = merge(MPI_PROC_NULL, rank - 1, rank == 0)
   right = merge(MPI_PROC_NULL, rank + 1, rank == ranks - 1)
   call MPI_Barrier(MPI_COMM_WORLD)
   start = MPI_Wtime()
   do step = 1, steps
      ! edges: the worker's first and last column. Left of this rank's columns is the worker of the rank to the left.
      call MPI_Sendrecv(plate(:, first), n + 2, MPI_DOUBLE_PRECISION, left, 1, &
                        beside(:, 2), n + 2, MPI_DOUBLE_PRECISION, right, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE)
      call MPI_Sendrecv(edges(:, 2), n + 2, MPI_DOUBLE_PRECISION, right, 2, &
                        plate(:, first - 1), n + 2, MPI_DOUBLE_PRECISION, left, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE)
      beside(:, 1) = plate(:, lent - 1)
      plate(:, lent) = edges(:, 1)
      call rfaas_iinvoke(lease, step_, beside, bytes(size(beside)), edges, bytes(size(edges)), request)
      call sweep(plate, next)
      call swap(plate, next)
      call rfaas_wait(request)
   end do
   together = MPI_Wtime() - start
   call rfaas_invoke(lease, end_, shape_of, 0_c_size_t, taken, bytes(size(taken)))
   call rfaas_lease_release(lease)
   call rfaas_session_close(session)
   call rfaas_finalize()

   ! The same operations in the same order: equal to the last bit.
   wrong = count(abs(plate(:, first:lent - 1) - whole(:, first:lent - 1)) > 0) + count(abs(taken - whole(:, lent:last)) > 0)
   call MPI_Allreduce(wrong, all_wrong, 1, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD)
   call MPI_Allreduce([alone, together], slowest, 2, MPI_DOUBLE_PRECISION, MPI_MAX, MPI_COMM_WORLD)
   if (rank == 0) then
      print '(a,i0,a,i0,a,i0,a,i0,a,i0,a)', 'heat: ', n, ' x ', n, ' cells, ', steps, ' steps on ', ranks, &
         ' ranks with a worker each: ', all_wrong, ' temperatures wrong'
      print '(a,f0.2,a,f0.2,a,f0.2)', '  alone ', slowest(1)*1e3, ' ms, with workers ', slowest(2)*1e3, &
         ' ms: speed-up ', slowest(1)/slowest(2)
   end if
   call MPI_Finalize()
   if (all_wrong > 0) error stop 1

contains

   !> One step: all cells but the outermost ones.
   subroutine sweep(from, to)
      real(real64), intent(in) :: from(:, :)
      real(real64), intent(inout) :: to(:, :)
      integer :: i, j
      do j = 2, size(from, 2) - 1
         do i = 2, size(from, 1) - 1
            to(i, j) = 0.25_real64*((from(i, j - 1) + from(i, j + 1)) + (from(i - 1, j) + from(i + 1, j)))
         end do
      end do
   end subroutine

   !> Bytes of a number of elements of 8 bytes.
   pure integer(c_size_t) function bytes(elements)
      integer, intent(in) :: elements
      bytes = 8_c_size_t*elements
   end function

   subroutine swap(a, b)
      real(real64), allocatable, intent(inout) :: a(:, :), b(:, :)
      real(real64), allocatable :: t(:, :)
      call move_alloc(a, t)
      call move_alloc(b, a)
      call move_alloc(t, b)
   end subroutine

   integer function argument(i, default, low, high)
      integer, intent(in) :: i, default, low, high
      character(len=32) :: text
      integer :: status
      argument = default
      if (command_argument_count() >= i) then
         call get_command_argument(i, text)
         read (text, *, iostat=status) argument
         if (status /= 0) argument = low - 1
         if (argument < low .or. argument > high) then
            write (error_unit, '(3a,i0,a,i0)') 'heat: argument "', trim(text), '", want ', low, ' to ', high
            call MPI_Abort(MPI_COMM_WORLD, 2)
         end if
      end if
   end function

   !> The path of the library: HEAT_LIBRARY, else ../functions/heat.so beside the program.
   function library() result(path)
      character(len=:), allocatable :: path
      character(len=1024) :: text
      integer :: slash
      call get_environment_variable('HEAT_LIBRARY', text)
      path = trim(text)
      if (path == '') then
         call get_command_argument(0, text)
         slash = index(text, '/', back=.true.)
         path = './'
         if (slash > 0) path = text(:slash)
         path = path//'../functions/heat.so'
      end if
   end function
end program
