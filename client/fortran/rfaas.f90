!> The Fortran interface of rfaas: functions on leased cores of other nodes, in the manner of mpi_f08.
!>
!>     use rfaas
!>     type(rfaas_session) :: session
!>     type(rfaas_lease)   :: lease
!>     integer(rfaas_function) :: price
!>     call rfaas_init()
!>     call rfaas_session_open(session)                        ! address from RFAAS_MANAGER or RFAAS_EXECUTOR
!>     call rfaas_lease_open(session, 'libprices.so', lease, workers=4)
!>     call rfaas_lease_function(lease, 'price', price)
!>     call rfaas_invoke(lease, price, in, c_sizeof(in), out, c_sizeof(out))
!>     call rfaas_finalize()
!>
!> Every procedure has the name of a function of rfaas.h and does what that function does: see its manual page, such as
!> rfaas_invoke(3). Every procedure has the optional argument ierror, which becomes RFAAS_OK or a negative status. If ierror is
!> absent, an error prints rfaas_last_error() and stops the program (error stop), as in MPI. Times are in seconds.
!>
!> Buffers are contiguous arrays of any type and rank, with their size in bytes: c_sizeof(a), or storage_size(a)/8*size(a) where
!> a compiler takes no allocatable array in c_sizeof. The arrays of rfaas_iinvoke need the asynchronous (or target) attribute in
!> the caller, as those of MPI_Irecv do: the result is written when the request ends.
!>
!> A handle of C becomes one of Fortran by `lease%handle = pointer`, and the other way round.
!>
!> This file needs rfaas_c.f90, rfaas_pieces.f90 and rfaas_pieces.c, and Fortran 2018 or Fortran 2008 with TS 29113, as mpi_f08 does.

!> Options of C from optional arguments, for the modules rfaas and rfaas_mpi.
module rfaas_options
   use, intrinsic :: iso_c_binding
   use rfaas_c
   implicit none
   private
   public :: session_arguments, lease_arguments, set_session, set_lease, call_options_of, nanoseconds, text_at, text_in

   !> Options of a session with the strings that they point to.
   type :: session_arguments
      type(rfaas_session_options_c) :: options
      character(len=:, kind=c_char), allocatable :: manager, executor, provider, tenant, device, secret_file, token_file
   end type
   !> Options of a lease with the strings that they point to.
   type :: lease_arguments
      type(rfaas_lease_options_c) :: options
      character(len=:, kind=c_char), allocatable :: library, executor, bundle, init_function, seed
   end type

   !> The init call of a lease: a function of the library that each of its workers executes before any other call.
   type, public :: rfaas_init_call
      character(len=:), allocatable :: function
      type(c_ptr) :: payload = c_null_ptr !< c_loc of the payload, which rfaas_lease_open copies
      integer(c_size_t) :: size = 0 !< bytes of the payload
   end type

   interface
      integer(c_size_t) function c_strlen(s) bind(c, name='strlen')
         import
         type(c_ptr), value :: s
      end function
   end interface

contains

   subroutine set_session(a, manager, executor, provider, tenant, device, timeout, cached_leases, port, gid_index, pkey_index, &
                          traffic_class, service_level, mtu, allow_plaintext, secret_file, token_file, data_encryption, local)
      type(session_arguments), intent(inout), target :: a
      character(len=*), intent(in), optional :: manager, executor, provider, tenant, device, secret_file, token_file
      real(c_double), intent(in), optional :: timeout
      integer, intent(in), optional :: cached_leases, port, gid_index, pkey_index, traffic_class, service_level, mtu
      logical, intent(in), optional :: allow_plaintext, local
      integer(c_int32_t), intent(in), optional :: data_encryption
      a%options%struct_size = int(c_sizeof(a%options), c_int32_t)
      a%options%manager = string(manager, a%manager)
      a%options%executor = string(executor, a%executor)
      a%options%provider = string(provider, a%provider)
      a%options%tenant = string(tenant, a%tenant)
      a%options%device = string(device, a%device)
      a%options%secret_file = string(secret_file, a%secret_file)
      a%options%token_file = string(token_file, a%token_file)
      if (present(timeout)) a%options%timeout_ns = nanoseconds(timeout)
      if (present(cached_leases)) a%options%cached_leases = cached_leases
      if (present(port)) a%options%port = port
      if (present(gid_index)) a%options%gid_index = gid_index
      if (present(pkey_index)) a%options%pkey_index = pkey_index
      if (present(traffic_class)) a%options%traffic_class = traffic_class
      if (present(service_level)) a%options%service_level = service_level
      if (present(mtu)) a%options%mtu = mtu
      if (present(data_encryption)) a%options%data_encryption = data_encryption
      if (given(allow_plaintext)) a%options%flags = ior(a%options%flags, RFAAS_SESSION_ALLOW_PLAINTEXT)
      if (given(local)) a%options%flags = ior(a%options%flags, RFAAS_SESSION_LOCAL)
   end subroutine

   subroutine set_lease(a, library, executor, workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, duration, &
                        call_limit, renew, failover, local, library_data, library_size, wait, bundle, init, reuse, workers_min, &
                        bulk_max, seed, seed_name)
      type(lease_arguments), intent(inout), target :: a
      character(len=*), intent(in) :: library
      character(len=*), intent(in), optional :: executor, bundle
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory, bulk_max
      real(c_double), intent(in), optional :: duration, call_limit
      logical, intent(in), optional :: renew, failover, local
      type(c_ptr), intent(in), optional :: library_data
      integer(c_size_t), intent(in), optional :: library_size
      type(rfaas_init_call), intent(in), optional :: init
      logical, intent(in), optional :: reuse, seed
      character(len=*), intent(in), optional :: seed_name
      integer, intent(in), optional :: workers_min
      real(c_double), intent(in), optional :: wait
      a%options%struct_size = int(c_sizeof(a%options), c_int32_t)
      if (.not. present(library_data)) a%options%library = string(library, a%library)
      a%options%executor = string(executor, a%executor)
      if (present(workers)) a%options%workers = workers
      if (present(workers_min)) a%options%workers_min = workers_min
      if (present(cores_per_worker)) a%options%cores_per_worker = cores_per_worker
      if (present(depth)) a%options%depth = depth
      if (present(eager)) a%options%eager = eager
      if (present(wait_mode)) a%options%wait_mode = wait_mode
      if (present(bulk)) a%options%bulk = bulk
      if (present(memory)) a%options%memory = memory
      if (present(bulk_max)) a%options%bulk_max = bulk_max
      if (present(duration)) a%options%duration_ns = nanoseconds(duration)
      if (present(call_limit)) a%options%call_limit_ns = nanoseconds(call_limit)
      if (given(renew)) a%options%flags = ior(a%options%flags, RFAAS_LEASE_RENEW)
      if (given(failover)) a%options%flags = ior(a%options%flags, RFAAS_LEASE_FAILOVER)
      if (given(local)) a%options%flags = ior(a%options%flags, RFAAS_LEASE_LOCAL)
      if (present(library_data)) a%options%library_data = library_data
      if (present(library_size)) a%options%library_size = library_size
      if (given(reuse)) a%options%flags = ior(a%options%flags, RFAAS_LEASE_REUSE)
      if (given(seed)) a%options%flags = ior(a%options%flags, RFAAS_LEASE_SEED)
      if (present(init)) then
         if (allocated(init%function)) a%options%init_function = string(init%function, a%init_function)
         a%options%init_payload = init%payload
         a%options%init_size = init%size
      end if
      if (present(wait)) a%options%wait_ns = nanoseconds(wait)
      a%options%bundle = string(bundle, a%bundle)
      a%options%seed = string(seed_name, a%seed)
   end subroutine

   function call_options_of(worker, timeout, repeats, attempt, kill, in_place, keep) result(o)
      integer, intent(in), optional :: worker, repeats
      real(c_double), intent(in), optional :: timeout, attempt
      logical, intent(in), optional :: kill, in_place
      integer(c_size_t), intent(in), optional :: keep
      type(rfaas_call_options_c) :: o
      o%struct_size = int(c_sizeof(o), c_int32_t)
      if (present(worker)) o%worker = worker
      if (present(timeout)) o%timeout_ns = nanoseconds(timeout)
      if (present(repeats)) o%repeats = repeats
      if (present(attempt)) o%attempt_ns = nanoseconds(attempt)
      if (given(kill)) o%flags = ior(o%flags, RFAAS_CALL_KILL)
      if (given(in_place)) o%flags = ior(o%flags, RFAAS_CALL_IN_PLACE)
      if (present(keep)) o%keep = keep
   end function

   pure logical function given(flag)
      logical, intent(in), optional :: flag
      given = .false.
      if (present(flag)) given = flag
   end function

   !> Seconds as nanoseconds. A time beyond 146 years becomes 146 years, so that the C library can still add it to a clock.
   pure integer(c_int64_t) function nanoseconds(seconds)
      real(c_double), intent(in) :: seconds
      integer(c_int64_t), parameter :: most = 4611686018427387903_c_int64_t
      nanoseconds = sign(most, merge(-1_c_int64_t, 1_c_int64_t, seconds < 0))
      if (abs(seconds) < 4.6e9_c_double) nanoseconds = int(seconds*1.0e9_c_double, c_int64_t)
   end function

   !> A C string, which lives in `copy`; NULL if `given` is absent.
   function string(given, copy) result(p)
      character(len=*), intent(in), optional :: given
      character(len=:, kind=c_char), allocatable, target, intent(inout) :: copy
      type(c_ptr) :: p
      p = c_null_ptr
      if (present(given)) then
         copy = trim(given)//c_null_char
         p = c_loc(copy)
      end if
   end function

   !> The characters of a C string.
   function text_at(p) result(text)
      type(c_ptr), intent(in) :: p
      character(len=:), allocatable :: text
      character(kind=c_char), pointer :: c(:)
      integer :: i, n
      n = int(c_strlen(p))
      call c_f_pointer(p, c, [n])
      allocate (character(len=n) :: text)
      do i = 1, n
         text(i:i) = c(i)
      end do
   end function

   !> The characters up to the first NUL.
   function text_in(c) result(text)
      character(kind=c_char), intent(in) :: c(:)
      character(len=:), allocatable :: text
      integer :: i, n
      do n = 0, size(c) - 1
         if (c(n + 1) == c_null_char) exit
      end do
      allocate (character(len=n) :: text)
      do i = 1, n
         text(i:i) = c(i)
      end do
   end function
end module

module rfaas
   use, intrinsic :: iso_c_binding
   use, intrinsic :: iso_fortran_env, only: error_unit
   use rfaas_c, rfaas_statistics => rfaas_statistics_c, lease_flag_renew => RFAAS_LEASE_RENEW ! Fortran ignores capitals
   use rfaas_options
   use rfaas_piece_lists
   implicit none
   private

   integer, parameter, public :: rfaas_function = c_int32_t !< kind of a function's number

   ! begin of what is generated from client/api/rfaas.yaml by internal/apigen (make api): do not edit
   public :: RFAAS_VERSION_MAJOR, RFAAS_VERSION_MINOR, RFAAS_OK, RFAAS_BUSY, RFAAS_INVALID, RFAAS_TOO_LARGE, RFAAS_NO_FUNCTION, &
      RFAAS_BAD_BLOB, RFAAS_BAD_LIBRARY, RFAAS_BAD_REQUEST, RFAAS_WRONG_THREAD, RFAAS_UNSUPPORTED, RFAAS_NO_DEVICE, &
      RFAAS_FUNCTION_FAILED, RFAAS_RESULT_TOO_LARGE, RFAAS_DEADLINE, RFAAS_CANCELLED, RFAAS_CONNECTION, RFAAS_PEER_GONE, &
      RFAAS_WORKER_DIED, RFAAS_PROTOCOL, RFAAS_TIME_LIMIT, RFAAS_MEMORY_LIMIT, RFAAS_LEASE_ENDED, RFAAS_FATAL, &
      RFAAS_CREDENTIAL, RFAAS_CLASS_BUSY, RFAAS_CLASS_INVALID, RFAAS_CLASS_UNSUPPORTED, RFAAS_CLASS_FUNCTION, &
      RFAAS_CLASS_CONNECTION, RFAAS_CLASS_LEASE, RFAAS_CLASS_FATAL, RFAAS_CLASS_CREDENTIAL, RFAAS_MPI_ERROR_MAX, &
      RFAAS_NOT_STARTED, RFAAS_MAYBE_EXECUTED, RFAAS_SESSION_ALLOW_PLAINTEXT, RFAAS_SESSION_LOCAL, RFAAS_DATA_ENCRYPTION_OFF, &
      RFAAS_DATA_ENCRYPTION_ON, RFAAS_DATA_ENCRYPTION_REQUIRE, RFAAS_EXECUTOR_OPEN, RFAAS_EXECUTOR_DRAINING, &
      RFAAS_EXECUTOR_SILENT, RFAAS_EXECUTOR_LEFT, RFAAS_WAIT_ADAPTIVE, RFAAS_WAIT_HOT, RFAAS_WAIT_WARM, RFAAS_LEASES_MAX, &
      RFAAS_NO_BULK, RFAAS_EVENT_NONE, RFAAS_EVENT_WORKER_DIED, RFAAS_EVENT_ENDED, RFAAS_EVENT_DRAINING, RFAAS_EVENT_EXPIRING, &
      RFAAS_EVENT_MOVED, RFAAS_EVENT_LOCAL, RFAAS_EVENT_WORKER_ADDED, RFAAS_START_UNKNOWN, RFAAS_START_COLD, &
      RFAAS_START_POOLED, RFAAS_START_CACHED, RFAAS_START_SEEDED, RFAAS_ANY_WORKER, RFAAS_TABLES_MAX, RFAAS_SUM, RFAAS_MIN, &
      RFAAS_MAX, RFAAS_INT32, RFAAS_INT64, RFAAS_FLOAT32, RFAAS_FLOAT64
   ! end of what is generated
   integer, parameter, public :: RFAAS_UNDEFINED = 0 !< index of rfaas_waitany if all requests are null

   type, public :: rfaas_session
      type(c_ptr) :: handle = c_null_ptr
   end type
   type, public :: rfaas_lease
      type(c_ptr) :: handle = c_null_ptr
   end type
   !> A call in flight, and the statistics of a lease.
   public :: rfaas_request, rfaas_statistics

   !> A named seed, from which workers of leases start. Times are in seconds.
   type, public :: rfaas_seed
      type(c_ptr) :: handle = c_null_ptr
   end type
   type, public :: rfaas_seed_details
      integer(c_int32_t) :: version = 0
      integer(c_int64_t) :: bytes = 0, memory = 0, children = 0
      real(c_double) :: left = 0, load = 0, setup_time = 0, capture = 0
      character(len=256) :: executor = '', node = '', setup = '' !< setup: name of the setup function
      character(len=256) :: warning = '' !< what may be wrong with the seed, such as pointers that workers cannot use; '': nothing
   end type

   !> A change of an executor's state: RFAAS_EXECUTOR_*, its control address, the host name of its node.
   type, public :: rfaas_change
      integer :: state = 0
      character(len=256) :: executor = '', node = ''
   end type
   !> The control address of an executor.
   type, public :: rfaas_place
      character(len=128) :: executor = ''
   end type
   !> An event of a lease: RFAAS_EVENT_*, the worker from 0, earlier events that were dropped, seconds until the end, the reason.
   type, public :: rfaas_event
      integer :: kind = RFAAS_EVENT_NONE, worker = 0, lost = 0
      real(c_double) :: left = 0
      character(len=256) :: text = ''
   end type
   !> Describes a lease.
   type, public :: rfaas_lease_details
      integer :: workers = 0, depth = 0, eager = 0, functions = 0, replaced = 0
      integer(c_int64_t) :: bulk = 0, lease_id = 0
      character(len=256) :: node = '', executor = ''
      character(len=16) :: provider = ''
      real(c_double) :: left = 0 !< seconds until it expires; 0: never, or it has ended
      character(len=256) :: local_reason = '' !< why calls run in this process; '': they do not
   end type
   !> How a worker came to its lease: RFAAS_START_*, its process on its node, seconds that its start took.
   type, public :: rfaas_worker_start
      integer :: start = RFAAS_START_UNKNOWN, pid = 0
      real(c_double) :: fork = 0, sandbox = 0, connect = 0, code = 0
   end type
   !> Describes a worker. It has printed output(:output_size).
   type, public :: rfaas_worker_details
      integer :: pid = 0, output_size = 0
      integer(c_int64_t) :: calls = 0, failed = 0, refused = 0, bytes_in = 0, bytes_out = 0
      character(len=128) :: running = ''
      character(len=4100) :: output = ''
   end type

   abstract interface
      !> Gets a change. The result .true. ends rfaas_session_watch.
      logical function rfaas_change_function(change)
         import; type(rfaas_change), intent(in) :: change
      end function
      !> Gets the result of one item, `size` bytes at `result`, and combines it with the program's data.
      subroutine rfaas_combine_function(result, size)
         import; type(c_ptr), intent(in) :: result
         integer(c_size_t), intent(in) :: size
      end subroutine
   end interface
   public :: rfaas_change_function, rfaas_combine_function

   public :: rfaas_init, rfaas_finalize, rfaas_version, rfaas_class, rfaas_strerror, rfaas_last_error, rfaas_started, &
      rfaas_function_code, rfaas_call_worker, rfaas_kept_result, rfaas_init_call
   public :: rfaas_session_open, rfaas_session_close, rfaas_session_changes, rfaas_session_watch, rfaas_lease_open, &
      rfaas_lease_open_at, rfaas_lease_open_across, rfaas_places, rfaas_lease_release, rfaas_lease_workers, rfaas_lease_function, &
      rfaas_lease_renew, rfaas_lease_event, rfaas_lease_info, rfaas_worker_info, rfaas_lease_statistics
   public :: rfaas_session_cached, rfaas_lease_status, rfaas_worker_origin, rfaas_worker_replace, rfaas_lease_function_name, &
      rfaas_lease_chain, rfaas_lease_descriptor, rfaas_lease_arm
   public :: rfaas_alloc, rfaas_free, rfaas_register, rfaas_unregister
   public :: rfaas_pieces, rfaas_add_piece, rfaas_invokev, rfaas_iinvokev
   public :: rfaas_table_put, rfaas_table_put_at, rfaas_table_put_seed, rfaas_table_drop
   public :: rfaas_seed_create, rfaas_seed_open, rfaas_seed_name, rfaas_seed_info, rfaas_seed_release
   public :: rfaas_invoke, rfaas_iinvoke, rfaas_wait, rfaas_test, rfaas_cancel, rfaas_waitall, rfaas_waitany, &
      rfaas_waitany_for, rfaas_map, rfaas_reduce, rfaas_reduce_with
   public :: c_sizeof, c_size_t, c_int64_t, c_ptr, c_null_ptr, c_f_pointer

   !> The function that rfaas_session_watch calls.
   type :: watcher
      procedure(rfaas_change_function), pointer, nopass :: f => null()
   end type

   !> The function that rfaas_reduce_with calls.
   type :: combiner
      procedure(rfaas_combine_function), pointer, nopass :: f => null()
   end type

contains

   ! ---- errors ----

   !> The class of a status, RFAAS_CLASS_*.
   pure integer function rfaas_class(status)
      integer, intent(in) :: status
      rfaas_class = merge(0, -status/100, status >= 0)
   end function

   function rfaas_strerror(status) result(text)
      integer, intent(in) :: status
      character(len=:), allocatable :: text
      text = text_at(rfaas_strerror_c(int(status, c_int)))
   end function

   function rfaas_last_error() result(text)
      character(len=:), allocatable :: text
      text = text_at(rfaas_last_error_c())
   end function

   integer function rfaas_started()
      rfaas_started = int(rfaas_started_c())
   end function

   integer function rfaas_function_code()
      rfaas_function_code = int(rfaas_function_code_c())
   end function

   !> The worker of the last call, counted from 0. RFAAS_ANY_WORKER: there was none, or it has run in this process.
   integer function rfaas_call_worker()
      rfaas_call_worker = int(rfaas_call_worker_c())
   end function

   !> Returns the result of the last call that ended with RFAAS_RESULT_TOO_LARGE, if its `keep` was large enough.
   subroutine rfaas_kept_result(out, capacity, out_size, ierror)
      type(*), dimension(*) :: out
      integer(c_size_t), intent(in) :: capacity
      integer(c_size_t), intent(inout), optional :: out_size
      integer, intent(out), optional :: ierror
      integer(c_size_t) :: got
      integer(c_int) :: status
      got = 0
      status = rfaas_kept_result_c(out, capacity, got)
      if (present(out_size)) out_size = got
      call finish(status, ierror)
   end subroutine

   subroutine finish(status, ierror)
      integer(c_int), intent(in) :: status
      integer, intent(out), optional :: ierror
      if (present(ierror)) then
         ierror = int(status)
      else if (status < 0) then
         write (error_unit, '(2a)') 'rfaas: ', rfaas_last_error()
         error stop 1
      end if
   end subroutine

   ! ---- library, sessions, leases ----

   subroutine rfaas_init(ierror)
      integer, intent(out), optional :: ierror
      call finish(rfaas_init_c(c_null_ptr), ierror)
   end subroutine

   subroutine rfaas_finalize(ierror)
      integer, intent(out), optional :: ierror
      call finish(rfaas_finalize_c(), ierror)
   end subroutine

   integer function rfaas_version()
      rfaas_version = int(rfaas_version_c())
   end function

   !> Arguments that are absent have the defaults of rfaas_session_options.
   subroutine rfaas_session_open(session, manager, executor, provider, tenant, device, timeout, ierror, cached_leases, port, &
                                 gid_index, pkey_index, traffic_class, service_level, mtu, allow_plaintext, secret_file, &
                                 token_file, data_encryption, local)
      type(rfaas_session), intent(inout) :: session
      character(len=*), intent(in), optional :: manager, executor, provider, tenant, device, secret_file, token_file
      real(c_double), intent(in), optional :: timeout
      integer, intent(out), optional :: ierror
      integer, intent(in), optional :: cached_leases, port, gid_index, pkey_index, traffic_class, service_level, mtu
      logical, intent(in), optional :: allow_plaintext, local
      integer(c_int32_t), intent(in), optional :: data_encryption !< RFAAS_DATA_ENCRYPTION_*
      type(session_arguments), target :: a
      call set_session(a, manager, executor, provider, tenant, device, timeout, cached_leases, port, gid_index, pkey_index, &
                       traffic_class, service_level, mtu, allow_plaintext, secret_file, token_file, data_encryption, local)
      call finish(rfaas_session_open_c(a%options, session%handle), ierror)
   end subroutine

   !> Returns how many released leases the session caches.
   subroutine rfaas_session_cached(session, cached, ierror)
      type(rfaas_session), intent(in) :: session
      integer, intent(out) :: cached
      integer, intent(out), optional :: ierror
      cached = int(rfaas_session_cached_c(session%handle))
      call finish(min(int(cached, c_int), 0_c_int), ierror)
   end subroutine

   subroutine rfaas_session_close(session, ierror)
      type(rfaas_session), intent(inout) :: session
      integer, intent(out), optional :: ierror
      integer(c_int) :: status
      status = rfaas_session_close_c(session%handle)
      session%handle = c_null_ptr
      call finish(status, ierror)
   end subroutine

   !> Returns what has happened to executors since the last call in changes(1:count).
   subroutine rfaas_session_changes(session, changes, count, ierror)
      type(rfaas_session), intent(in) :: session
      type(rfaas_change), intent(inout) :: changes(:)
      integer, intent(out) :: count
      integer, intent(out), optional :: ierror
      type(rfaas_change_c), allocatable :: raw(:)
      integer(c_size_t) :: n
      integer(c_int) :: status
      integer :: i
      allocate (raw(size(changes)))
      n = 0
      status = rfaas_session_changes_c(session%handle, raw, size(changes, kind=c_size_t), n)
      count = int(n)
      do i = 1, count
         changes(i) = change_of(raw(i))
      end do
      call finish(status, ierror)
   end subroutine

   !> Calls f with every change until it returns .true. After `timeout` seconds ierror is RFAAS_DEADLINE; 0 or absent: no limit.
   subroutine rfaas_session_watch(session, f, timeout, ierror)
      type(rfaas_session), intent(in) :: session
      procedure(rfaas_change_function) :: f
      real(c_double), intent(in), optional :: timeout
      integer, intent(out), optional :: ierror
      type(watcher), target :: w
      integer(c_int64_t) :: ns
      integer(c_int) :: status
      w%f => f
      ns = 0
      if (present(timeout)) ns = nanoseconds(timeout)
      status = rfaas_session_watch_c(session%handle, c_funloc(tell), c_loc(w), ns)
      call finish(min(status, 0_c_int), ierror)
   end subroutine

   integer(c_int) function tell(raw, arg) bind(c)
      type(rfaas_change_c), intent(in) :: raw
      type(c_ptr), value :: arg
      type(watcher), pointer :: w
      call c_f_pointer(arg, w)
      tell = merge(1_c_int, 0_c_int, w%f(change_of(raw)))
   end function

   function change_of(raw) result(change)
      type(rfaas_change_c), intent(in) :: raw
      type(rfaas_change) :: change
      change%state = int(raw%state)
      change%executor = text_in(raw%executor)
      change%node = text_in(raw%node)
   end function

   !> Arguments that are absent have the defaults of rfaas_lease_options. eager, bulk, memory and bulk_max are in bytes. renew, failover, local,
   !> seed_name is the full name of a seed. reuse and seed set the flags RFAAS_LEASE_*. `wait` is wait_ns in seconds, and `init` the init call. With library_data, the address of
   !> the library in memory, `library` is not used. `bundle` has paths of files and directories that travel with the library, separated by colons.
   subroutine rfaas_lease_open(session, library, lease, workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, &
                               duration, call_limit, executor, ierror, renew, failover, local, library_data, library_size, wait, &
                               bundle, init, reuse, workers_min, bulk_max, seed, seed_name)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: library
      type(rfaas_lease), intent(inout) :: lease
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory, bulk_max
      real(c_double), intent(in), optional :: duration, call_limit
      character(len=*), intent(in), optional :: executor
      integer, intent(out), optional :: ierror
      logical, intent(in), optional :: renew, failover, local
      type(c_ptr), intent(in), optional :: library_data
      integer(c_size_t), intent(in), optional :: library_size
      type(rfaas_init_call), intent(in), optional :: init
      logical, intent(in), optional :: reuse, seed
      character(len=*), intent(in), optional :: seed_name
      integer, intent(in), optional :: workers_min
      real(c_double), intent(in), optional :: wait
      character(len=*), intent(in), optional :: bundle
      type(lease_arguments), target :: a
      call set_lease(a, library, executor, workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, duration, &
                     call_limit, renew, failover, local, library_data, library_size, wait, bundle, init, reuse, workers_min, &
                     bulk_max, seed, seed_name)
      call finish(rfaas_lease_open_c(session%handle, a%options, lease%handle), ierror)
   end subroutine

   !> As rfaas_lease_open, at the executor of `place` only.
   subroutine rfaas_lease_open_at(session, library, place, lease, workers, cores_per_worker, depth, eager, wait_mode, bulk, &
                                  memory, duration, call_limit, ierror, renew, failover, local, library_data, library_size, wait, &
                                  bundle, init, reuse, workers_min, bulk_max, seed, seed_name)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: library
      type(rfaas_place), intent(in) :: place
      type(rfaas_lease), intent(inout) :: lease
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory, bulk_max
      real(c_double), intent(in), optional :: duration, call_limit
      integer, intent(out), optional :: ierror
      logical, intent(in), optional :: renew, failover, local
      type(c_ptr), intent(in), optional :: library_data
      integer(c_size_t), intent(in), optional :: library_size
      type(rfaas_init_call), intent(in), optional :: init
      logical, intent(in), optional :: reuse, seed
      character(len=*), intent(in), optional :: seed_name
      integer, intent(in), optional :: workers_min
      real(c_double), intent(in), optional :: wait
      character(len=*), intent(in), optional :: bundle
      type(lease_arguments), target :: a
      type(rfaas_place_c) :: raw
      integer :: i
      call set_lease(a, library, workers=workers, cores_per_worker=cores_per_worker, depth=depth, eager=eager, &
                     wait_mode=wait_mode, bulk=bulk, memory=memory, duration=duration, call_limit=call_limit, renew=renew, &
                     failover=failover, local=local, library_data=library_data, library_size=library_size, wait=wait, &
                     bundle=bundle, init=init, reuse=reuse, workers_min=workers_min, bulk_max=bulk_max, seed=seed, &
                     seed_name=seed_name)
      do i = 1, min(len_trim(place%executor), size(raw%executor) - 1)
         raw%executor(i) = place%executor(i:i)
      end do
      call finish(rfaas_lease_open_at_c(session%handle, a%options, raw, lease%handle), ierror)
   end subroutine

   !> Leases `workers` workers on as few executors as possible. The leases are leases(1:count).
   subroutine rfaas_lease_open_across(session, library, leases, count, workers, cores_per_worker, depth, eager, wait_mode, bulk, &
                                      memory, duration, call_limit, ierror, renew, failover, local, library_data, library_size, &
                                      wait, bundle, init, reuse, bulk_max, seed, seed_name)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: library
      type(rfaas_lease), intent(inout) :: leases(:)
      integer, intent(out) :: count
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory, bulk_max
      real(c_double), intent(in), optional :: duration, call_limit
      integer, intent(out), optional :: ierror
      logical, intent(in), optional :: renew, failover, local
      type(c_ptr), intent(in), optional :: library_data
      integer(c_size_t), intent(in), optional :: library_size
      type(rfaas_init_call), intent(in), optional :: init
      logical, intent(in), optional :: reuse, seed
      character(len=*), intent(in), optional :: seed_name
      real(c_double), intent(in), optional :: wait
      character(len=*), intent(in), optional :: bundle
      type(lease_arguments), target :: a
      type(c_ptr), allocatable :: handles(:)
      integer(c_size_t) :: n
      integer(c_int) :: status
      allocate (handles(size(leases)))
      call set_lease(a, library, workers=workers, cores_per_worker=cores_per_worker, depth=depth, eager=eager, &
                     wait_mode=wait_mode, bulk=bulk, memory=memory, duration=duration, call_limit=call_limit, renew=renew, &
                     failover=failover, local=local, library_data=library_data, library_size=library_size, wait=wait, &
                     bundle=bundle, init=init, reuse=reuse, bulk_max=bulk_max, seed=seed, &
                     seed_name=seed_name)
      n = 0
      status = rfaas_lease_open_across_c(session%handle, a%options, size(leases, kind=c_size_t), handles, n)
      count = merge(int(n), 0, status >= 0)
      leases(:count)%handle = handles(:count)
      call finish(status, ierror)
   end subroutine

   !> Finds an executor for each of size(places) leases with these options, and leases nothing.
   subroutine rfaas_places(session, library, places, workers, cores_per_worker, memory, duration, executor, ierror, wait)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: library
      type(rfaas_place), intent(inout) :: places(:)
      integer, intent(in), optional :: workers, cores_per_worker
      integer(c_int64_t), intent(in), optional :: memory
      real(c_double), intent(in), optional :: duration, wait
      character(len=*), intent(in), optional :: executor
      integer, intent(out), optional :: ierror
      type(lease_arguments), target :: a
      type(rfaas_place_c), allocatable :: raw(:)
      integer(c_int) :: status
      integer :: i
      allocate (raw(size(places)))
      call set_lease(a, library, executor, workers, cores_per_worker, memory=memory, duration=duration, wait=wait)
      status = rfaas_places_c(session%handle, a%options, size(places, kind=c_size_t), raw)
      do i = 1, merge(size(places), 0, status >= 0)
         places(i)%executor = text_in(raw(i)%executor)
      end do
      call finish(status, ierror)
   end subroutine

   !> Renews the lease for at least `duration` seconds from now. 0 or absent: the duration that it was opened with.
   subroutine rfaas_lease_renew(lease, duration, ierror)
      type(rfaas_lease), intent(in) :: lease
      real(c_double), intent(in), optional :: duration
      integer, intent(out), optional :: ierror
      integer(c_int64_t) :: ns
      ns = 0
      if (present(duration)) ns = nanoseconds(duration)
      call finish(rfaas_lease_renew_c(lease%handle, ns), ierror)
   end subroutine

   !> A descriptor for poll(), which becomes readable once after rfaas_lease_arm when a request of the lease has ended that was not waited for, or none
   !> is in flight. The lease owns it.
   subroutine rfaas_lease_descriptor(lease, fd, ierror)
      type(rfaas_lease), intent(in) :: lease
      integer, intent(out) :: fd
      integer, intent(out), optional :: ierror
      integer(c_int) :: number, status
      number = -1
      status = rfaas_lease_descriptor_c(lease%handle, number)
      fd = int(number)
      call finish(status, ierror)
   end subroutine

   subroutine rfaas_lease_arm(lease, ierror)
      type(rfaas_lease), intent(in) :: lease
      integer, intent(out), optional :: ierror
      call finish(rfaas_lease_arm_c(lease%handle), ierror)
   end subroutine

   !> Takes the oldest event of the lease. Its kind is RFAAS_EVENT_NONE if there is no event.
   subroutine rfaas_lease_event(lease, event, ierror)
      type(rfaas_lease), intent(in) :: lease
      type(rfaas_event), intent(out) :: event
      integer, intent(out), optional :: ierror
      type(rfaas_event_c) :: raw
      integer(c_int) :: status
      raw%struct_size = int(c_sizeof(raw), c_int32_t)
      status = rfaas_lease_event_c(lease%handle, raw)
      event%kind = int(raw%kind)
      event%worker = int(raw%worker)
      event%lost = int(raw%lost)
      event%left = real(raw%left_ns, c_double)/1.0e9_c_double
      event%text = text_in(raw%text)
      call finish(status, ierror)
   end subroutine

   subroutine rfaas_lease_info(lease, details, ierror)
      type(rfaas_lease), intent(in) :: lease
      type(rfaas_lease_details), intent(out) :: details
      integer, intent(out), optional :: ierror
      type(rfaas_lease_details_c) :: raw
      integer(c_int) :: status
      raw%struct_size = int(c_sizeof(raw), c_int32_t)
      status = rfaas_lease_info_c(lease%handle, raw)
      details%workers = int(raw%workers)
      details%depth = int(raw%depth)
      details%eager = int(raw%eager)
      details%functions = int(raw%functions)
      details%replaced = int(raw%replaced)
      details%bulk = raw%bulk
      details%lease_id = raw%lease_id
      details%node = text_in(raw%node_name)
      details%executor = text_in(raw%executor_address)
      details%provider = text_in(raw%provider)
      details%left = real(raw%left_ns, c_double)/1.0e9_c_double
      details%local_reason = text_in(raw%local_reason)
      call finish(status, ierror)
   end subroutine

   !> Describes a worker, whose index counts from 0.
   subroutine rfaas_worker_info(lease, worker, details, ierror)
      type(rfaas_lease), intent(in) :: lease
      integer, intent(in) :: worker
      type(rfaas_worker_details), intent(out) :: details
      integer, intent(out), optional :: ierror
      type(rfaas_worker_details_c) :: raw
      integer(c_int) :: status
      integer :: i
      raw%struct_size = int(c_sizeof(raw), c_int32_t)
      status = rfaas_worker_info_c(lease%handle, int(worker, c_int), raw)
      details%pid = int(raw%pid)
      details%calls = raw%calls
      details%failed = raw%failed
      details%refused = raw%refused
      details%bytes_in = raw%bytes_in
      details%bytes_out = raw%bytes_out
      details%running = text_in(raw%running)
      details%output_size = int(raw%output_size)
      do i = 1, min(details%output_size, len(details%output))
         details%output(i:i) = raw%output(i)
      end do
      call finish(status, ierror)
   end subroutine

   !> Kills a worker, whose index counts from 0, and starts a new one in its place.
   subroutine rfaas_worker_replace(lease, worker, ierror)
      type(rfaas_lease), intent(in) :: lease
      integer, intent(in) :: worker
      integer, intent(out), optional :: ierror
      call finish(rfaas_worker_replace_c(lease%handle, int(worker, c_int)), ierror)
   end subroutine

   !> Says how a worker, whose index counts from 0, came to its lease.
   subroutine rfaas_worker_origin(lease, worker, start, ierror)
      type(rfaas_lease), intent(in) :: lease
      integer, intent(in) :: worker
      type(rfaas_worker_start), intent(out) :: start
      integer, intent(out), optional :: ierror
      type(rfaas_worker_start_c) :: raw
      integer(c_int) :: status
      raw%struct_size = int(c_sizeof(raw), c_int32_t)
      status = rfaas_worker_origin_c(lease%handle, int(worker, c_int), raw)
      start%start = int(raw%start)
      start%pid = int(raw%pid)
      start%fork = real(raw%fork_ns, c_double)/1.0e9_c_double
      start%sandbox = real(raw%sandbox_ns, c_double)/1.0e9_c_double
      start%connect = real(raw%connect_ns, c_double)/1.0e9_c_double
      start%code = real(raw%code_ns, c_double)/1.0e9_c_double
      call finish(status, ierror)
   end subroutine

   !> RFAAS_OK while the lease lasts, else why it ended.
   integer function rfaas_lease_status(lease)
      type(rfaas_lease), intent(in) :: lease
      rfaas_lease_status = int(rfaas_lease_status_c(lease%handle))
   end function

   subroutine rfaas_lease_statistics(lease, stats, ierror)
      type(rfaas_lease), intent(in) :: lease
      type(rfaas_statistics), intent(out) :: stats
      integer, intent(out), optional :: ierror
      stats%struct_size = int(c_sizeof(stats), c_int32_t)
      call finish(rfaas_lease_statistics_c(lease%handle, stats), ierror)
   end subroutine

   subroutine rfaas_lease_release(lease, ierror)
      type(rfaas_lease), intent(inout) :: lease
      integer, intent(out), optional :: ierror
      integer(c_int) :: status
      status = rfaas_lease_release_c(lease%handle)
      lease%handle = c_null_ptr
      call finish(status, ierror)
   end subroutine

   subroutine rfaas_lease_workers(lease, workers, ierror)
      type(rfaas_lease), intent(in) :: lease
      integer, intent(out) :: workers
      integer, intent(out), optional :: ierror
      workers = int(rfaas_lease_workers_c(lease%handle))
      call finish(min(int(workers, c_int), 0_c_int), ierror)
   end subroutine

   subroutine rfaas_lease_function(lease, name, f, ierror)
      type(rfaas_lease), intent(in) :: lease
      character(len=*), intent(in) :: name
      integer(rfaas_function), intent(inout) :: f
      integer, intent(out), optional :: ierror
      call finish(rfaas_lease_function_c(lease%handle, trim(name)//c_null_char, f), ierror)
   end subroutine

   !> Returns a function that calls first, and then second with the result of first. Valid until the lease is released.
   subroutine rfaas_lease_chain(lease, first, second, chain, ierror)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function), intent(in) :: first, second
      integer(rfaas_function), intent(inout) :: chain
      integer, intent(out), optional :: ierror
      call finish(rfaas_lease_chain_c(lease%handle, first, second, chain), ierror)
   end subroutine

   !> The name of a function, whose index counts from 0. '' if there is none.
   function rfaas_lease_function_name(lease, f) result(text)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function), intent(in) :: f
      character(len=:), allocatable :: text
      type(c_ptr) :: at
      at = rfaas_lease_function_name_c(lease%handle, f)
      text = ''
      if (c_associated(at)) text = text_at(at)
   end function

   ! ---- buffers ----

   !> Allocates registered memory. c_f_pointer makes an array of it.
   subroutine rfaas_alloc(lease, bytes, buffer, ierror)
      type(rfaas_lease), intent(in) :: lease
      integer(c_size_t), intent(in) :: bytes
      type(c_ptr), intent(inout) :: buffer
      integer, intent(out), optional :: ierror
      call finish(rfaas_alloc_c(lease%handle, bytes, buffer), ierror)
   end subroutine

   subroutine rfaas_free(lease, buffer, ierror)
      type(rfaas_lease), intent(in) :: lease
      type(c_ptr), intent(in) :: buffer
      integer, intent(out), optional :: ierror
      call finish(rfaas_free_c(lease%handle, buffer), ierror)
   end subroutine

   subroutine rfaas_register(lease, buffer, bytes, ierror)
      type(rfaas_lease), intent(in) :: lease
      type(*), dimension(*), asynchronous :: buffer
      integer(c_size_t), intent(in) :: bytes
      integer, intent(out), optional :: ierror
      call finish(rfaas_register_c(lease%handle, buffer, bytes), ierror)
   end subroutine

   subroutine rfaas_unregister(lease, buffer, ierror)
      type(rfaas_lease), intent(in) :: lease
      type(*), dimension(*), asynchronous :: buffer
      integer, intent(out), optional :: ierror
      call finish(rfaas_unregister_c(lease%handle, buffer), ierror)
   end subroutine

   ! ---- calls ----

   !> in_size and capacity are in bytes, and out_size becomes the bytes of the result. worker counts from 0. repeats and attempt are
   !> those of rfaas_call_options: set them only if the function is idempotent. `kill` sets RFAAS_CALL_KILL, and
   !> `in_place` RFAAS_CALL_IN_PLACE. With `keep`, rfaas_kept_result returns a larger result of up to so many bytes.
   subroutine rfaas_invoke(lease, f, in, in_size, out, capacity, out_size, worker, timeout, ierror, repeats, attempt, kill, &
                           in_place, keep)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function), intent(in) :: f
      type(*), dimension(*), intent(in) :: in
      type(*), dimension(*) :: out
      integer(c_size_t), intent(in) :: in_size, capacity
      integer(c_size_t), intent(inout), optional :: out_size
      integer, intent(in), optional :: worker, repeats
      real(c_double), intent(in), optional :: timeout, attempt
      logical, intent(in), optional :: kill, in_place
      integer(c_size_t), intent(in), optional :: keep
      integer, intent(out), optional :: ierror
      integer(c_size_t) :: got
      integer(c_int) :: status
      got = 0
      status = rfaas_invoke_c(lease%handle, f, in, in_size, out, capacity, got, &
                              call_options_of(worker, timeout, repeats, attempt, kill, in_place, keep))
      if (present(out_size)) out_size = got
      call finish(status, ierror)
   end subroutine

   !> Starts a call. With repeats, `in` must not change until the request ends.
   subroutine rfaas_iinvoke(lease, f, in, in_size, out, capacity, request, worker, timeout, ierror, repeats, attempt, kill, &
                            in_place, keep)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function), intent(in) :: f
      type(*), dimension(*), intent(in), asynchronous :: in
      type(*), dimension(*), asynchronous :: out
      integer(c_size_t), intent(in) :: in_size, capacity
      type(rfaas_request), intent(inout) :: request
      integer, intent(in), optional :: worker, repeats
      real(c_double), intent(in), optional :: timeout, attempt
      logical, intent(in), optional :: kill, in_place
      integer(c_size_t), intent(in), optional :: keep
      integer, intent(out), optional :: ierror
      call finish(rfaas_iinvoke_c(lease%handle, f, in, in_size, out, capacity, &
                                  call_options_of(worker, timeout, repeats, attempt, kill, in_place, keep), request), ierror)
   end subroutine

   !> rfaas_invoke with payload and result in several pieces, which are arrays or sections of arrays:
   !>
   !>     type(rfaas_pieces) :: in, out
   !>     call rfaas_add_piece(in, header)
   !>     call rfaas_add_piece(in, a(2, :))                        ! a row: strided, not copied
   !>     call rfaas_add_piece(out, b(1:n:2))
   !>     call rfaas_invokev(lease, f, in, out)
   subroutine rfaas_invokev(lease, f, in, out, out_size, worker, timeout, ierror, repeats, attempt, kill, keep)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function), intent(in) :: f
      type(rfaas_pieces), intent(in) :: in, out
      integer(c_size_t), intent(inout), optional :: out_size
      integer, intent(in), optional :: worker, repeats
      real(c_double), intent(in), optional :: timeout, attempt
      logical, intent(in), optional :: kill
      integer(c_size_t), intent(in), optional :: keep
      integer, intent(out), optional :: ierror
      integer(c_size_t) :: got
      integer(c_int) :: status
      got = 0
      status = rfaas_invokev_c(lease%handle, f, in%pieces, in%count, out%pieces, out%count, got, &
                               call_options_of(worker, timeout, repeats, attempt, kill, keep=keep))
      if (present(out_size)) out_size = got
      call finish(status, ierror)
   end subroutine

   !> Publishes a table: leases that are opened from now on have it, and functions find it by rfaas_table. The pieces are copied:
   !>     call rfaas_add_piece(parts, energies)
   !>     call rfaas_table_put(session, 'cross sections', parts)
   subroutine rfaas_table_put(session, name, parts, ierror)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: name
      type(rfaas_pieces), intent(in) :: parts
      integer, intent(out), optional :: ierror
      call finish(rfaas_table_put_c(session%handle, name//c_null_char, parts%pieces, parts%count), ierror)
   end subroutine

   !> The same. All workers map the table at `address`.
   subroutine rfaas_table_put_at(session, name, parts, address, ierror)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: name
      type(rfaas_pieces), intent(in) :: parts
      integer(c_int64_t), intent(in) :: address
      integer, intent(out), optional :: ierror
      call finish(rfaas_table_put_at_c(session%handle, name//c_null_char, parts%pieces, parts%count, address), ierror)
   end subroutine

   !> Publishes the memory of a seed as a table. Functions of any library get the bytes that its setup function has passed to rfaas_set_root,
   !> read-only and at the same address. `seed` is its full name (rfaas_seed_name).
   subroutine rfaas_table_put_seed(session, name, seed, ierror)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: name, seed
      integer, intent(out), optional :: ierror
      call finish(rfaas_table_put_seed_c(session%handle, name//c_null_char, seed//c_null_char), ierror)
   end subroutine

   subroutine rfaas_table_drop(session, name, ierror)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: name
      integer, intent(out), optional :: ierror
      call finish(rfaas_table_drop_c(session%handle, name//c_null_char), ierror)
   end subroutine

   ! ---- seeds ----

   !> Executes a function of the lease's library once, and keeps its memory under a name. `in` is its payload of `size` bytes. ttl: seconds
   !> for which the executor keeps the seed if nobody renews it.
   subroutine rfaas_seed_create(lease, setup, name, seed, in, size, ttl, ierror)
      type(rfaas_lease), intent(in) :: lease
      character(len=*), intent(in) :: setup, name
      type(rfaas_seed), intent(inout) :: seed
      type(*), dimension(*), intent(in), asynchronous, optional :: in
      integer(c_size_t), intent(in), optional :: size
      real(c_double), intent(in), optional :: ttl
      integer, intent(out), optional :: ierror
      character(kind=c_char, len=:), allocatable, target :: text
      type(rfaas_seed_options_c) :: options
      integer(c_size_t) :: bytes
      options%struct_size = int(c_sizeof(options), c_int32_t)
      text = name//c_null_char
      options%name = c_loc(text)
      if (present(ttl)) options%ttl_ns = nanoseconds(ttl)
      bytes = 0
      if (present(size)) bytes = size
      call finish(rfaas_seed_create_c(lease%handle, setup//c_null_char, in, bytes, options, seed%handle), ierror)
   end subroutine

   !> Opens a seed that this or another program has created, by its full name.
   subroutine rfaas_seed_open(session, name, seed, ierror)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: name
      type(rfaas_seed), intent(inout) :: seed
      integer, intent(out), optional :: ierror
      call finish(rfaas_seed_open_c(session%handle, name//c_null_char, seed%handle), ierror)
   end subroutine

   !> The full name of a seed, for the argument seed_name of leases; '' if the seed is invalid.
   function rfaas_seed_name(seed) result(name)
      type(rfaas_seed), intent(in) :: seed
      character(len=:), allocatable :: name
      type(c_ptr) :: text
      text = rfaas_seed_name_c(seed%handle)
      name = ''
      if (c_associated(text)) name = text_at(text)
   end function

   subroutine rfaas_seed_info(seed, details, ierror)
      type(rfaas_seed), intent(in) :: seed
      type(rfaas_seed_details), intent(out) :: details
      integer, intent(out), optional :: ierror
      type(rfaas_seed_details_c) :: raw
      integer(c_int) :: status
      raw%struct_size = int(c_sizeof(raw), c_int32_t)
      status = rfaas_seed_info_c(seed%handle, raw)
      details%version = raw%version
      details%bytes = raw%bytes
      details%memory = raw%memory
      details%children = raw%children
      details%left = real(raw%left_ns, c_double)/1.0e9_c_double
      details%load = real(raw%load_ns, c_double)/1.0e9_c_double
      details%setup_time = real(raw%setup_ns, c_double)/1.0e9_c_double
      details%capture = real(raw%capture_ns, c_double)/1.0e9_c_double
      details%executor = text_in(raw%executor)
      details%node = text_in(raw%node)
      details%setup = text_in(raw%setup)
      details%warning = text_in(raw%warning)
      call finish(status, ierror)
   end subroutine

   !> Withdraws a seed that this process has created. Of an opened seed it only frees the handle.
   subroutine rfaas_seed_release(seed, ierror)
      type(rfaas_seed), intent(inout) :: seed
      integer, intent(out), optional :: ierror
      integer(c_int) :: status
      status = rfaas_seed_release_c(seed%handle)
      seed%handle = c_null_ptr
      call finish(status, ierror)
   end subroutine

   !> Starts such a call. The lists may be reused at once. With repeats, the arrays of `in` must not change until the request ends.
   subroutine rfaas_iinvokev(lease, f, in, out, request, worker, timeout, ierror, repeats, attempt, kill, keep)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function), intent(in) :: f
      type(rfaas_pieces), intent(in) :: in, out
      type(rfaas_request), intent(inout) :: request
      integer, intent(in), optional :: worker, repeats
      real(c_double), intent(in), optional :: timeout, attempt
      logical, intent(in), optional :: kill
      integer(c_size_t), intent(in), optional :: keep
      integer, intent(out), optional :: ierror
      call finish(rfaas_iinvokev_c(lease%handle, f, in%pieces, in%count, out%pieces, out%count, &
                                   call_options_of(worker, timeout, repeats, attempt, kill, keep=keep), request), ierror)
   end subroutine

   subroutine rfaas_wait(request, out_size, ierror)
      type(rfaas_request), intent(inout) :: request
      integer(c_size_t), intent(inout), optional :: out_size
      integer, intent(out), optional :: ierror
      integer(c_size_t) :: got
      integer(c_int) :: status
      got = 0
      status = rfaas_wait_c(request, got)
      if (present(out_size)) out_size = got
      call finish(status, ierror)
   end subroutine

   subroutine rfaas_test(request, flag, out_size, ierror)
      type(rfaas_request), intent(inout) :: request
      logical, intent(out) :: flag
      integer(c_size_t), intent(inout), optional :: out_size
      integer, intent(out), optional :: ierror
      integer(c_size_t) :: got
      integer(c_int) :: status, done
      got = 0
      done = 0
      status = rfaas_test_c(request, done, got)
      flag = done /= 0
      if (present(out_size)) out_size = got
      call finish(status, ierror)
   end subroutine

   subroutine rfaas_cancel(request, ierror)
      type(rfaas_request), intent(inout) :: request
      integer, intent(out), optional :: ierror
      call finish(rfaas_cancel_c(request), ierror)
   end subroutine

   !> out_sizes and statuses, if present, need an element for each request. ierror is the status of the first request that failed.
   subroutine rfaas_waitall(requests, ierror, out_sizes, statuses)
      type(rfaas_request), intent(inout) :: requests(:)
      integer, intent(out), optional :: ierror
      integer(c_size_t), intent(inout), optional :: out_sizes(:)
      integer, intent(inout), optional :: statuses(:)
      integer(c_size_t) :: sizes(max(size(requests), 1))
      integer(c_int) :: each(max(size(requests), 1))
      integer(c_int) :: status
      integer :: n
      n = size(requests)
      sizes = 0
      each = RFAAS_OK
      status = rfaas_waitall_c(int(n, c_size_t), requests, sizes, each)
      if (present(out_sizes)) out_sizes(:n) = sizes(:n)
      if (present(statuses)) statuses(:n) = int(each(:n))
      call finish(status, ierror)
   end subroutine

   !> index counts from 1. It is RFAAS_UNDEFINED (0) if all requests are null.
   subroutine rfaas_waitany(requests, index, out_size, ierror)
      type(rfaas_request), intent(inout) :: requests(:)
      integer, intent(out) :: index
      integer(c_size_t), intent(inout), optional :: out_size
      integer, intent(out), optional :: ierror
      integer(c_size_t) :: at, got
      integer(c_int) :: status
      at = -1
      got = 0
      status = rfaas_waitany_c(size(requests, kind=c_size_t), requests, at, got)
      index = int(at + 1) ! SIZE_MAX is -1 here
      if (present(out_size)) out_size = got
      call finish(status, ierror)
   end subroutine

   !> rfaas_waitany for `timeout` seconds at most. index is RFAAS_UNDEFINED if no request has ended by then.
   subroutine rfaas_waitany_for(requests, timeout, index, out_size, ierror)
      type(rfaas_request), intent(inout) :: requests(:)
      real(c_double), intent(in) :: timeout
      integer, intent(out) :: index
      integer(c_size_t), intent(inout), optional :: out_size
      integer, intent(out), optional :: ierror
      integer(c_size_t) :: at, got
      integer(c_int) :: status
      at = -1
      got = 0
      status = rfaas_waitany_for_c(size(requests, kind=c_size_t), requests, nanoseconds(timeout), at, got)
      index = int(at + 1) ! SIZE_MAX is -1 here
      if (present(out_size)) out_size = got
      call finish(status, ierror)
   end subroutine

   !> Calls f on n items of in_item bytes. Each has a result of out_item bytes.
   subroutine rfaas_map(lease, f, in, in_item, out, out_item, n, chunk, timeout, ierror, repeats)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function), intent(in) :: f
      type(*), dimension(*), intent(in) :: in
      type(*), dimension(*) :: out
      integer(c_size_t), intent(in) :: in_item, out_item, n
      integer(c_size_t), intent(in), optional :: chunk
      real(c_double), intent(in), optional :: timeout
      integer, intent(out), optional :: ierror
      integer, intent(in), optional :: repeats
      call finish(rfaas_map_c(lease%handle, f, in, in_item, out, out_item, n, map_options(chunk, timeout, repeats)), ierror)
   end subroutine

   !> Calls f on n items of in_item bytes, and combines the results, each of out_item bytes, with the accumulator. `operation` is RFAAS_SUM, RFAAS_MIN
   !> or RFAAS_MAX, and `kind` is RFAAS_INT32, RFAAS_INT64, RFAAS_FLOAT32 or RFAAS_FLOAT64. Results are combined in the order of the items.
   subroutine rfaas_reduce(lease, f, in, in_item, accumulator, out_item, n, operation, kind, chunk, timeout, ierror, repeats)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function), intent(in) :: f
      type(*), dimension(*), intent(in) :: in
      type(*), dimension(*) :: accumulator
      integer(c_size_t), intent(in) :: in_item, out_item, n
      integer, intent(in) :: operation, kind
      integer(c_size_t), intent(in), optional :: chunk
      real(c_double), intent(in), optional :: timeout
      integer, intent(out), optional :: ierror
      integer, intent(in), optional :: repeats
      call finish(rfaas_reduce_c(lease%handle, f, in, in_item, accumulator, out_item, n, operation, kind, &
         map_options(chunk, timeout, repeats)), ierror)
   end subroutine

   !> rfaas_reduce with a function that gets the results one after the other, in the order of the items.
   subroutine rfaas_reduce_with(lease, f, in, in_item, out_item, n, combine, chunk, timeout, ierror, repeats)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function), intent(in) :: f
      type(*), dimension(*), intent(in) :: in
      integer(c_size_t), intent(in) :: in_item, out_item, n
      procedure(rfaas_combine_function) :: combine
      integer(c_size_t), intent(in), optional :: chunk
      real(c_double), intent(in), optional :: timeout
      integer, intent(out), optional :: ierror
      integer, intent(in), optional :: repeats
      type(combiner), target :: c
      integer :: unused(1)
      c%f => combine
      call finish(rfaas_reduce_with_c(lease%handle, f, in, in_item, unused, out_item, n, c_funloc(combine_one), c_loc(c), &
         map_options(chunk, timeout, repeats)), ierror)
   end subroutine

   subroutine combine_one(accumulator, result, size, arg) bind(c)
      type(c_ptr), value :: accumulator, result, arg
      integer(c_size_t), value :: size
      type(combiner), pointer :: c
      if (.not. c_associated(accumulator)) return ! it is not used: the function has the program's variables
      call c_f_pointer(arg, c)
      call c%f(result, size)
   end subroutine

   function map_options(chunk, timeout, repeats) result(o)
      integer(c_size_t), intent(in), optional :: chunk
      real(c_double), intent(in), optional :: timeout
      integer, intent(in), optional :: repeats
      type(rfaas_map_options_c) :: o
      o%struct_size = int(c_sizeof(o), c_int32_t)
      if (present(chunk)) o%chunk = chunk
      if (present(timeout)) o%timeout_ns = nanoseconds(timeout)
      if (present(repeats)) o%repeats = repeats
   end function
end module
