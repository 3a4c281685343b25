!> rfaas.h for Fortran: functions on leased cores of other nodes, in the manner of mpi_f08.
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
!> Every procedure has the optional argument ierror: RFAAS_OK or one of the negative RFAAS_* codes. Without it
!> an error prints rfaas_last_error() and stops the program (error stop), as in MPI. What a procedure does, who owns
!> memory and until when, is what rfaas.h says of the function of the same name.
!>
!> Buffers are arrays of any type and rank, with their size in bytes: c_sizeof(a), or storage_size(a)/8*size(a) where a
!> compiler holds to the letter of the standard and takes no allocatable array in c_sizeof. They must be contiguous. The arrays of rfaas_iinvoke must have the asynchronous (or target) attribute in the caller, as those of
!> MPI_Irecv: the result is written when the request ends.
!>
!> Needs Fortran 2008 with TS 29113 (assumed type), as mpi_f08 does.
module rfaas
   use, intrinsic :: iso_c_binding
   use, intrinsic :: iso_fortran_env, only: error_unit
   implicit none
   private

   integer, parameter, public :: rfaas_function = c_int32_t !< kind of a function's number

   integer, parameter, public :: RFAAS_OK = 0, RFAAS_BUSY = -100, RFAAS_INVALID = -200, RFAAS_TOO_LARGE = -201, &
      RFAAS_NO_FUNCTION = -202, RFAAS_BAD_BLOB = -203, RFAAS_BAD_LIBRARY = -204, RFAAS_BAD_REQUEST = -205, &
      RFAAS_WRONG_THREAD = -206, RFAAS_UNSUPPORTED = -300, RFAAS_NO_DEVICE = -301, RFAAS_FUNCTION_FAILED = -400, &
      RFAAS_RESULT_TOO_LARGE = -401, RFAAS_DEADLINE = -402, RFAAS_CANCELLED = -403, RFAAS_CONNECTION = -500, &
      RFAAS_PEER_GONE = -501, RFAAS_WORKER_DIED = -502, RFAAS_PROTOCOL = -503, RFAAS_TIME_LIMIT = -504, &
      RFAAS_MEMORY_LIMIT = -505, RFAAS_LEASE_ENDED = -600, RFAAS_FATAL = -700, RFAAS_CREDENTIAL = -800
   integer, parameter, public :: RFAAS_CLASS_BUSY = 1, RFAAS_CLASS_INVALID = 2, RFAAS_CLASS_UNSUPPORTED = 3, &
      RFAAS_CLASS_FUNCTION = 4, RFAAS_CLASS_CONNECTION = 5, RFAAS_CLASS_LEASE = 6, RFAAS_CLASS_FATAL = 7, &
      RFAAS_CLASS_CREDENTIAL = 8
   integer, parameter, public :: RFAAS_NOT_STARTED = 0, RFAAS_MAYBE_EXECUTED = 1
   integer, parameter, public :: RFAAS_WAIT_ADAPTIVE = 0, RFAAS_WAIT_HOT = 1, RFAAS_WAIT_WARM = 2
   integer, parameter, public :: RFAAS_ANY_WORKER = -1
   integer, parameter, public :: RFAAS_UNDEFINED = 0 !< index of rfaas_waitany when there are only null requests
   integer, parameter, public :: RFAAS_EVENT_NONE = 0, RFAAS_EVENT_WORKER_DIED = 1, RFAAS_EVENT_ENDED = 2, &
      RFAAS_EVENT_DRAINING = 3, RFAAS_EVENT_EXPIRING = 4
   integer, parameter, public :: RFAAS_EXECUTOR_OPEN = 1, RFAAS_EXECUTOR_DRAINING = 2, RFAAS_EXECUTOR_SILENT = 3, &
      RFAAS_EXECUTOR_LEFT = 4

   type, public :: rfaas_session
      type(c_ptr) :: handle = c_null_ptr
   end type
   type, public :: rfaas_lease
      type(c_ptr) :: handle = c_null_ptr
   end type
   !> A call in flight; a new one is the null request.
   type, bind(c), public :: rfaas_request
      integer(c_int64_t) :: handle = 0
   end type

   !> What has happened to an executor: RFAAS_EXECUTOR_*, its address, its host name.
   type, public :: rfaas_change
      integer :: state = 0
      character(len=256) :: executor = '', node = ''
   end type
   !> An executor's address.
   type, public :: rfaas_place
      character(len=128) :: executor = ''
   end type
   !> An event of a lease: RFAAS_EVENT_*; worker from 0; events before it that nobody took; seconds that are left; why.
   type, public :: rfaas_event
      integer :: kind = RFAAS_EVENT_NONE, worker = 0, lost = 0
      real(c_double) :: left = 0
      character(len=256) :: text = ''
   end type
   !> What a lease is.
   type, public :: rfaas_lease_details
      integer :: workers = 0, depth = 0, eager = 0, functions = 0, replaced = 0
      integer(c_int64_t) :: bulk = 0, lease_id = 0
      character(len=256) :: node = '', executor = ''
      character(len=16) :: provider = ''
   end type
   !> What a worker does and has printed (output_size bytes of output).
   type, public :: rfaas_worker_details
      integer :: pid = 0, output_size = 0
      integer(c_int64_t) :: calls = 0, failed = 0, refused = 0, bytes_in = 0, bytes_out = 0
      character(len=128) :: running = ''
      character(len=4100) :: output = ''
   end type
   !> What a lease has done, as rfaas.h says. struct_size is set by rfaas_lease_statistics.
   type, bind(c), public :: rfaas_statistics
      integer(c_int32_t) :: struct_size = 0, replaced = 0
      integer(c_int64_t) :: calls = 0, replies = 0, abandoned = 0, late = 0, busy = 0, bytes_in = 0, bytes_out = 0, blocked = 0, &
         repeated = 0, moved = 0, local = 0, cold = 0, warm = 0, cached = 0, queue_pairs = 0, open_ns = 0, kept = 0
   end type

   abstract interface
      !> Is told of a change; .true. ends rfaas_session_watch.
      logical function rfaas_change_function(change)
         import; type(rfaas_change), intent(in) :: change
      end function
   end interface
   public :: rfaas_change_function

   public :: rfaas_init, rfaas_finalize, rfaas_version, rfaas_class, rfaas_strerror, rfaas_last_error, rfaas_started
   public :: rfaas_session_open, rfaas_session_close, rfaas_session_changes, rfaas_session_watch, rfaas_lease_open, &
      rfaas_lease_open_at, rfaas_lease_open_across, rfaas_places, rfaas_lease_release, rfaas_lease_workers, rfaas_lease_function, &
      rfaas_lease_renew, rfaas_lease_event, rfaas_lease_info, rfaas_worker_info, rfaas_lease_statistics
   public :: rfaas_alloc, rfaas_free, rfaas_register, rfaas_unregister
   public :: rfaas_invoke, rfaas_iinvoke, rfaas_wait, rfaas_test, rfaas_cancel, rfaas_waitall, rfaas_waitany, rfaas_map
   public :: c_sizeof, c_size_t, c_int64_t, c_ptr, c_null_ptr, c_f_pointer

   ! The structures of rfaas.h, version 0.3. The library takes shorter ones than its own.
   type, bind(c) :: session_options
      integer(c_int32_t) :: struct_size = 0, port = 0
      type(c_ptr) :: manager = c_null_ptr, executor = c_null_ptr, provider = c_null_ptr, tenant = c_null_ptr, &
         device = c_null_ptr
      integer(c_int32_t) :: gid_index = -1, pkey_index = 0, traffic_class = 0, service_level = 0, mtu = 0, flags = 0
      integer(c_int64_t) :: timeout_ns = 0
      integer(c_int32_t) :: keep_leases = 0, reserved = 0
   end type
   type, bind(c) :: raw_change
      integer(c_int32_t) :: state = 0, reserved = 0
      character(kind=c_char) :: executor(256) = c_null_char, node(256) = c_null_char
   end type
   type, bind(c) :: raw_place
      character(kind=c_char) :: executor(128) = c_null_char
   end type
   type, bind(c) :: raw_event
      integer(c_int32_t) :: struct_size = 0, kind = 0, worker = 0, lost = 0
      integer(c_int64_t) :: left_ns = 0
      character(kind=c_char) :: text(256) = c_null_char
   end type
   type, bind(c) :: raw_lease
      integer(c_int32_t) :: struct_size = 0, workers = 0, depth = 0, eager = 0
      integer(c_int64_t) :: bulk = 0, lease_id = 0
      integer(c_int32_t) :: functions = 0, replaced = 0
      character(kind=c_char) :: node(64) = c_null_char, executor(128) = c_null_char, provider(16) = c_null_char, &
         node_name(256) = c_null_char, executor_address(256) = c_null_char
   end type
   type, bind(c) :: raw_worker
      integer(c_int32_t) :: struct_size = 0, pid = 0
      integer(c_int64_t) :: calls = 0, failed = 0, refused = 0, bytes_in = 0, bytes_out = 0
      character(kind=c_char) :: running(128) = c_null_char
      integer(c_int32_t) :: output_size = 0
      character(kind=c_char) :: output(4100) = c_null_char
   end type
   !> Whom rfaas_session_watch tells.
   type :: watcher
      procedure(rfaas_change_function), pointer, nopass :: f => null()
   end type
   type, bind(c) :: lease_options
      integer(c_int32_t) :: struct_size = 0, workers = 0, cores_per_worker = 0, depth = 0, eager = 0, wait_mode = 0
      integer(c_int64_t) :: bulk = 0, memory = 0, duration_ns = 0
      type(c_ptr) :: library = c_null_ptr, library_data = c_null_ptr
      integer(c_size_t) :: library_size = 0
      type(c_ptr) :: executor = c_null_ptr
      integer(c_int64_t) :: call_limit_ns = 0
      integer(c_int32_t) :: flags = 0, reserved = 0
   end type
   type, bind(c) :: call_options
      integer(c_int32_t) :: struct_size = 0, worker = RFAAS_ANY_WORKER
      integer(c_int64_t) :: timeout_ns = 0
      integer(c_int32_t) :: repeats = 0, reserved = 0
      integer(c_int64_t) :: attempt_ns = 0
   end type
   type, bind(c) :: map_options
      integer(c_int32_t) :: struct_size = 0, flags = 0
      integer(c_size_t) :: chunk = 0
      integer(c_int64_t) :: timeout_ns = 0
      integer(c_int32_t) :: repeats = 0, reserved = 0
   end type
   integer(c_int32_t), parameter :: lease_renew = 1, lease_failover = 2, lease_local = 4

   interface
      integer(c_int) function c_init(options) bind(c, name='rfaas_init')
         import; type(c_ptr), value :: options
      end function
      integer(c_int) function c_finalize() bind(c, name='rfaas_finalize')
         import
      end function
      integer(c_int) function c_version() bind(c, name='rfaas_version')
         import
      end function
      type(c_ptr) function c_strerror(status) bind(c, name='rfaas_strerror')
         import; integer(c_int), value :: status
      end function
      type(c_ptr) function c_last_error() bind(c, name='rfaas_last_error')
         import
      end function
      integer(c_int) function c_started() bind(c, name='rfaas_started')
         import
      end function
      integer(c_size_t) function c_strlen(s) bind(c, name='strlen')
         import; type(c_ptr), value :: s
      end function
      integer(c_int) function c_session_open(options, session) bind(c, name='rfaas_session_open')
         import; type(session_options), intent(in) :: options; type(c_ptr), intent(inout) :: session
      end function
      integer(c_int) function c_session_close(session) bind(c, name='rfaas_session_close')
         import; type(c_ptr), value :: session
      end function
      integer(c_int) function c_lease_open(session, options, lease) bind(c, name='rfaas_lease_open')
         import; type(c_ptr), value :: session; type(lease_options), intent(in) :: options
         type(c_ptr), intent(inout) :: lease
      end function
      integer(c_int) function c_lease_open_at(session, options, place, lease) bind(c, name='rfaas_lease_open_at')
         import; type(c_ptr), value :: session; type(lease_options), intent(in) :: options
         type(raw_place), intent(in) :: place; type(c_ptr), intent(inout) :: lease
      end function
      integer(c_int) function c_lease_open_across(session, options, capacity, leases, n) bind(c, name='rfaas_lease_open_across')
         import; type(c_ptr), value :: session; type(lease_options), intent(in) :: options
         integer(c_size_t), value :: capacity; type(c_ptr), intent(inout) :: leases(*); integer(c_size_t), intent(inout) :: n
      end function
      integer(c_int) function c_places(session, options, n, places) bind(c, name='rfaas_places')
         import; type(c_ptr), value :: session; type(lease_options), intent(in) :: options
         integer(c_size_t), value :: n; type(raw_place), intent(inout) :: places(*)
      end function
      integer(c_int) function c_session_changes(session, changes, capacity, n) bind(c, name='rfaas_session_changes')
         import; type(c_ptr), value :: session; type(raw_change), intent(inout) :: changes(*)
         integer(c_size_t), value :: capacity; integer(c_size_t), intent(inout) :: n
      end function
      integer(c_int) function c_session_watch(session, f, arg, timeout_ns) bind(c, name='rfaas_session_watch')
         import; type(c_ptr), value :: session, arg; type(c_funptr), value :: f; integer(c_int64_t), value :: timeout_ns
      end function
      integer(c_int) function c_lease_renew(lease, duration_ns) bind(c, name='rfaas_lease_renew')
         import; type(c_ptr), value :: lease; integer(c_int64_t), value :: duration_ns
      end function
      integer(c_int) function c_lease_event(lease, event) bind(c, name='rfaas_lease_event')
         import; type(c_ptr), value :: lease; type(raw_event), intent(inout) :: event
      end function
      integer(c_int) function c_lease_info(lease, details) bind(c, name='rfaas_lease_info')
         import; type(c_ptr), value :: lease; type(raw_lease), intent(inout) :: details
      end function
      integer(c_int) function c_worker_info(lease, worker, details) bind(c, name='rfaas_worker_info')
         import; type(c_ptr), value :: lease; integer(c_int), value :: worker; type(raw_worker), intent(inout) :: details
      end function
      integer(c_int) function c_lease_statistics(lease, stats) bind(c, name='rfaas_lease_statistics')
         import; type(c_ptr), value :: lease; type(rfaas_statistics), intent(inout) :: stats
      end function
      integer(c_int) function c_lease_release(lease) bind(c, name='rfaas_lease_release')
         import; type(c_ptr), value :: lease
      end function
      integer(c_int) function c_lease_workers(lease) bind(c, name='rfaas_lease_workers')
         import; type(c_ptr), value :: lease
      end function
      integer(c_int) function c_lease_function(lease, name, f) bind(c, name='rfaas_lease_function')
         import; type(c_ptr), value :: lease; character(kind=c_char), intent(in) :: name(*)
         integer(c_int32_t), intent(inout) :: f
      end function
      integer(c_int) function c_alloc(lease, size, buffer) bind(c, name='rfaas_alloc')
         import; type(c_ptr), value :: lease; integer(c_size_t), value :: size; type(c_ptr), intent(inout) :: buffer
      end function
      integer(c_int) function c_free(lease, buffer) bind(c, name='rfaas_free')
         import; type(c_ptr), value :: lease, buffer
      end function
      integer(c_int) function c_register(lease, buffer, size) bind(c, name='rfaas_register')
         import; type(c_ptr), value :: lease; type(*), dimension(*), asynchronous :: buffer
         integer(c_size_t), value :: size
      end function
      integer(c_int) function c_unregister(lease, buffer) bind(c, name='rfaas_unregister')
         import; type(c_ptr), value :: lease; type(*), dimension(*), asynchronous :: buffer
      end function
      integer(c_int) function c_invoke(lease, f, in, in_size, out, capacity, out_size, options) &
         bind(c, name='rfaas_invoke')
         import; type(c_ptr), value :: lease; integer(c_int32_t), value :: f
         type(*), dimension(*), intent(in) :: in; type(*), dimension(*) :: out
         integer(c_size_t), value :: in_size, capacity; integer(c_size_t), intent(inout) :: out_size
         type(call_options), intent(in) :: options
      end function
      integer(c_int) function c_iinvoke(lease, f, in, in_size, out, capacity, options, request) &
         bind(c, name='rfaas_iinvoke')
         import; type(c_ptr), value :: lease; integer(c_int32_t), value :: f
         type(*), dimension(*), intent(in), asynchronous :: in; type(*), dimension(*), asynchronous :: out
         integer(c_size_t), value :: in_size, capacity; type(call_options), intent(in) :: options
         type(rfaas_request), intent(inout) :: request
      end function
      integer(c_int) function c_wait(request, out_size) bind(c, name='rfaas_wait')
         import; type(rfaas_request), intent(inout) :: request; integer(c_size_t), intent(inout) :: out_size
      end function
      integer(c_int) function c_test(request, done, out_size) bind(c, name='rfaas_test')
         import; type(rfaas_request), intent(inout) :: request; integer(c_int), intent(inout) :: done
         integer(c_size_t), intent(inout) :: out_size
      end function
      integer(c_int) function c_cancel(request) bind(c, name='rfaas_cancel')
         import; type(rfaas_request), intent(inout) :: request
      end function
      integer(c_int) function c_waitall(n, requests, sizes, statuses) bind(c, name='rfaas_waitall')
         import; integer(c_size_t), value :: n; type(rfaas_request), intent(inout) :: requests(*)
         type(c_ptr), value :: sizes, statuses
      end function
      integer(c_int) function c_waitany(n, requests, index, out_size) bind(c, name='rfaas_waitany')
         import; integer(c_size_t), value :: n; type(rfaas_request), intent(inout) :: requests(*)
         integer(c_size_t), intent(inout) :: index, out_size
      end function
      integer(c_int) function c_map(lease, f, in, in_item, out, out_item, n, options) bind(c, name='rfaas_map')
         import; type(c_ptr), value :: lease; integer(c_int32_t), value :: f
         type(*), dimension(*), intent(in) :: in; type(*), dimension(*) :: out
         integer(c_size_t), value :: in_item, out_item, n; type(map_options), intent(in) :: options
      end function
   end interface

contains

   ! ---- errors ----

   !> The class of a status: what to do next.
   pure integer function rfaas_class(status)
      integer, intent(in) :: status
      rfaas_class = merge(0, -status/100, status >= 0)
   end function

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

   function rfaas_strerror(status) result(text)
      integer, intent(in) :: status
      character(len=:), allocatable :: text
      text = text_at(c_strerror(int(status, c_int)))
   end function

   function rfaas_last_error() result(text)
      character(len=:), allocatable :: text
      text = text_at(c_last_error())
   end function

   integer function rfaas_started()
      rfaas_started = int(c_started())
   end function

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
      call finish(c_init(c_null_ptr), ierror)
   end subroutine

   subroutine rfaas_finalize(ierror)
      integer, intent(out), optional :: ierror
      call finish(c_finalize(), ierror)
   end subroutine

   integer function rfaas_version()
      rfaas_version = int(c_version())
   end function

   !> Addresses that are not given come from the environment; timeout in seconds. keep_leases: released leases that stay
   !> connected, negative: none.
   subroutine rfaas_session_open(session, manager, executor, provider, tenant, device, timeout, ierror, keep_leases)
      type(rfaas_session), intent(inout) :: session
      character(len=*), intent(in), optional :: manager, executor, provider, tenant, device
      real(c_double), intent(in), optional :: timeout
      integer, intent(out), optional :: ierror
      integer, intent(in), optional :: keep_leases
      type(session_options) :: o
      character(len=:, kind=c_char), allocatable, target :: m, e, p, t, d
      o%struct_size = int(c_sizeof(o), c_int32_t)
      o%manager = string(manager, m)
      o%executor = string(executor, e)
      o%provider = string(provider, p)
      o%tenant = string(tenant, t)
      o%device = string(device, d)
      if (present(timeout)) o%timeout_ns = nanoseconds(timeout)
      if (present(keep_leases)) o%keep_leases = keep_leases
      call finish(c_session_open(o, session%handle), ierror)
   end subroutine

   subroutine rfaas_session_close(session, ierror)
      type(rfaas_session), intent(inout) :: session
      integer, intent(out), optional :: ierror
      integer(c_int) :: status
      status = c_session_close(session%handle)
      session%handle = c_null_ptr
      call finish(status, ierror)
   end subroutine

   !> What has happened to executors since the last call: count changes, at most size(changes).
   subroutine rfaas_session_changes(session, changes, count, ierror)
      type(rfaas_session), intent(in) :: session
      type(rfaas_change), intent(inout) :: changes(:)
      integer, intent(out) :: count
      integer, intent(out), optional :: ierror
      type(raw_change), allocatable :: raw(:)
      integer(c_size_t) :: n
      integer(c_int) :: status
      integer :: i
      allocate (raw(size(changes)))
      n = 0
      status = c_session_changes(session%handle, raw, size(changes, kind=c_size_t), n)
      count = int(n)
      do i = 1, count
         changes(i) = change_of(raw(i))
      end do
      call finish(status, ierror)
   end subroutine

   !> Tells f of every change until it returns .true., or for so many seconds: RFAAS_DEADLINE. 0 or none: for ever.
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
      status = c_session_watch(session%handle, c_funloc(tell), c_loc(w), ns)
      call finish(min(status, 0_c_int), ierror)
   end subroutine

   integer(c_int) function tell(raw, arg) bind(c)
      type(raw_change), intent(in) :: raw
      type(c_ptr), value :: arg
      type(watcher), pointer :: w
      call c_f_pointer(arg, w)
      tell = merge(1_c_int, 0_c_int, w%f(change_of(raw)))
   end function

   function change_of(raw) result(change)
      type(raw_change), intent(in) :: raw
      type(rfaas_change) :: change
      change%state = int(raw%state)
      change%executor = text_in(raw%executor)
      change%node = text_in(raw%node)
   end function

   !> What is not given has the default of rfaas.h. duration and call_limit in seconds, eager, bulk and memory in bytes.
   !> renew, failover and local set the RFAAS_LEASE_ flags of these names.
   subroutine rfaas_lease_open(session, library, lease, workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, &
                               duration, call_limit, executor, ierror, renew, failover, local)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: library
      type(rfaas_lease), intent(inout) :: lease
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory
      real(c_double), intent(in), optional :: duration, call_limit
      character(len=*), intent(in), optional :: executor
      integer, intent(out), optional :: ierror
      logical, intent(in), optional :: renew, failover, local
      character(len=:, kind=c_char), allocatable, target :: l, e
      type(lease_options) :: o
      o = lease_of(workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, duration, call_limit, renew, failover, local)
      o%library = string(library, l)
      o%executor = string(executor, e)
      call finish(c_lease_open(session%handle, o, lease%handle), ierror)
   end subroutine

   !> rfaas_lease_open at this executor and no other.
   subroutine rfaas_lease_open_at(session, library, place, lease, workers, cores_per_worker, depth, eager, wait_mode, bulk, &
                                  memory, duration, call_limit, ierror, renew, failover, local)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: library
      type(rfaas_place), intent(in) :: place
      type(rfaas_lease), intent(inout) :: lease
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory
      real(c_double), intent(in), optional :: duration, call_limit
      integer, intent(out), optional :: ierror
      logical, intent(in), optional :: renew, failover, local
      character(len=:, kind=c_char), allocatable, target :: l
      type(lease_options) :: o
      type(raw_place) :: raw
      integer :: i
      o = lease_of(workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, duration, call_limit, renew, failover, local)
      o%library = string(library, l)
      do i = 1, min(len_trim(place%executor), size(raw%executor) - 1)
         raw%executor(i) = place%executor(i:i)
      end do
      call finish(c_lease_open_at(session%handle, o, raw, lease%handle), ierror)
   end subroutine

   !> So many workers wherever they fit: leases(1:count), each at one executor.
   subroutine rfaas_lease_open_across(session, library, leases, count, workers, cores_per_worker, depth, eager, wait_mode, bulk, &
                                      memory, duration, call_limit, ierror, renew, failover, local)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: library
      type(rfaas_lease), intent(inout) :: leases(:)
      integer, intent(out) :: count
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory
      real(c_double), intent(in), optional :: duration, call_limit
      integer, intent(out), optional :: ierror
      logical, intent(in), optional :: renew, failover, local
      character(len=:, kind=c_char), allocatable, target :: l
      type(lease_options) :: o
      type(c_ptr), allocatable :: handles(:)
      integer(c_size_t) :: n
      integer(c_int) :: status
      allocate (handles(size(leases)))
      o = lease_of(workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, duration, call_limit, renew, failover, local)
      o%library = string(library, l)
      n = 0
      status = c_lease_open_across(session%handle, o, size(leases, kind=c_size_t), handles, n)
      count = merge(int(n), 0, status >= 0)
      leases(:count)%handle = handles(:count)
      call finish(status, ierror)
   end subroutine

   !> Executors with room for size(places) leases like this one, one for each.
   subroutine rfaas_places(session, library, places, workers, cores_per_worker, memory, duration, executor, ierror)
      type(rfaas_session), intent(in) :: session
      character(len=*), intent(in) :: library
      type(rfaas_place), intent(inout) :: places(:)
      integer, intent(in), optional :: workers, cores_per_worker
      integer(c_int64_t), intent(in), optional :: memory
      real(c_double), intent(in), optional :: duration
      character(len=*), intent(in), optional :: executor
      integer, intent(out), optional :: ierror
      character(len=:, kind=c_char), allocatable, target :: l, e
      type(lease_options) :: o
      type(raw_place), allocatable :: raw(:)
      integer(c_int) :: status
      integer :: i
      allocate (raw(size(places)))
      o = lease_of(workers, cores_per_worker, memory=memory, duration=duration)
      o%library = string(library, l)
      o%executor = string(executor, e)
      status = c_places(session%handle, o, size(places, kind=c_size_t), raw)
      do i = 1, merge(size(places), 0, status >= 0)
         places(i)%executor = text_in(raw(i)%executor)
      end do
      call finish(status, ierror)
   end subroutine

   !> The options of a lease but for its strings.
   function lease_of(workers, cores_per_worker, depth, eager, wait_mode, bulk, memory, duration, call_limit, renew, failover, &
                     local) result(o)
      integer, intent(in), optional :: workers, cores_per_worker, depth, eager, wait_mode
      integer(c_int64_t), intent(in), optional :: bulk, memory
      real(c_double), intent(in), optional :: duration, call_limit
      logical, intent(in), optional :: renew, failover, local
      type(lease_options) :: o
      o%struct_size = int(c_sizeof(o), c_int32_t)
      if (present(workers)) o%workers = workers
      if (present(cores_per_worker)) o%cores_per_worker = cores_per_worker
      if (present(depth)) o%depth = depth
      if (present(eager)) o%eager = eager
      if (present(wait_mode)) o%wait_mode = wait_mode
      if (present(bulk)) o%bulk = bulk
      if (present(memory)) o%memory = memory
      if (present(duration)) o%duration_ns = nanoseconds(duration)
      if (present(call_limit)) o%call_limit_ns = nanoseconds(call_limit)
      if (given(renew)) o%flags = ior(o%flags, lease_renew)
      if (given(failover)) o%flags = ior(o%flags, lease_failover)
      if (given(local)) o%flags = ior(o%flags, lease_local)
   end function

   !> Makes the lease last at least so many seconds from now; 0 or none: as long as it was leased for.
   subroutine rfaas_lease_renew(lease, duration, ierror)
      type(rfaas_lease), intent(in) :: lease
      real(c_double), intent(in), optional :: duration
      integer, intent(out), optional :: ierror
      integer(c_int64_t) :: ns
      ns = 0
      if (present(duration)) ns = nanoseconds(duration)
      call finish(c_lease_renew(lease%handle, ns), ierror)
   end subroutine

   !> The oldest event that was not taken; RFAAS_EVENT_NONE: there is none.
   subroutine rfaas_lease_event(lease, event, ierror)
      type(rfaas_lease), intent(in) :: lease
      type(rfaas_event), intent(out) :: event
      integer, intent(out), optional :: ierror
      type(raw_event) :: raw
      integer(c_int) :: status
      raw%struct_size = int(c_sizeof(raw), c_int32_t)
      status = c_lease_event(lease%handle, raw)
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
      type(raw_lease) :: raw
      integer(c_int) :: status
      raw%struct_size = int(c_sizeof(raw), c_int32_t)
      status = c_lease_info(lease%handle, raw)
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
      call finish(status, ierror)
   end subroutine

   !> What a worker, from 0, does and has printed.
   subroutine rfaas_worker_info(lease, worker, details, ierror)
      type(rfaas_lease), intent(in) :: lease
      integer, intent(in) :: worker
      type(rfaas_worker_details), intent(out) :: details
      integer, intent(out), optional :: ierror
      type(raw_worker) :: raw
      integer(c_int) :: status
      integer :: i
      raw%struct_size = int(c_sizeof(raw), c_int32_t)
      status = c_worker_info(lease%handle, int(worker, c_int), raw)
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

   subroutine rfaas_lease_statistics(lease, stats, ierror)
      type(rfaas_lease), intent(in) :: lease
      type(rfaas_statistics), intent(out) :: stats
      integer, intent(out), optional :: ierror
      stats%struct_size = int(c_sizeof(stats), c_int32_t)
      call finish(c_lease_statistics(lease%handle, stats), ierror)
   end subroutine

   subroutine rfaas_lease_release(lease, ierror)
      type(rfaas_lease), intent(inout) :: lease
      integer, intent(out), optional :: ierror
      integer(c_int) :: status
      status = c_lease_release(lease%handle)
      lease%handle = c_null_ptr
      call finish(status, ierror)
   end subroutine

   subroutine rfaas_lease_workers(lease, workers, ierror)
      type(rfaas_lease), intent(in) :: lease
      integer, intent(out) :: workers
      integer, intent(out), optional :: ierror
      workers = int(c_lease_workers(lease%handle))
      call finish(min(int(workers, c_int), 0_c_int), ierror)
   end subroutine

   subroutine rfaas_lease_function(lease, name, f, ierror)
      type(rfaas_lease), intent(in) :: lease
      character(len=*), intent(in) :: name
      integer(rfaas_function), intent(inout) :: f
      integer, intent(out), optional :: ierror
      call finish(c_lease_function(lease%handle, trim(name)//c_null_char, f), ierror)
   end subroutine

   ! ---- buffers ----

   !> Registered memory of so many bytes; use it by c_f_pointer.
   subroutine rfaas_alloc(lease, bytes, buffer, ierror)
      type(rfaas_lease), intent(in) :: lease
      integer(c_size_t), intent(in) :: bytes
      type(c_ptr), intent(inout) :: buffer
      integer, intent(out), optional :: ierror
      call finish(c_alloc(lease%handle, bytes, buffer), ierror)
   end subroutine

   subroutine rfaas_free(lease, buffer, ierror)
      type(rfaas_lease), intent(in) :: lease
      type(c_ptr), intent(in) :: buffer
      integer, intent(out), optional :: ierror
      call finish(c_free(lease%handle, buffer), ierror)
   end subroutine

   subroutine rfaas_register(lease, buffer, bytes, ierror)
      type(rfaas_lease), intent(in) :: lease
      type(*), dimension(*), asynchronous :: buffer
      integer(c_size_t), intent(in) :: bytes
      integer, intent(out), optional :: ierror
      call finish(c_register(lease%handle, buffer, bytes), ierror)
   end subroutine

   subroutine rfaas_unregister(lease, buffer, ierror)
      type(rfaas_lease), intent(in) :: lease
      type(*), dimension(*), asynchronous :: buffer
      integer, intent(out), optional :: ierror
      call finish(c_unregister(lease%handle, buffer), ierror)
   end subroutine

   ! ---- calls ----

   !> in_size and capacity in bytes; out_size becomes the bytes of the result. worker from 0; timeout in seconds. repeats: the
   !> function is idempotent and is called again so many times when a call is lost or takes longer than `attempt` seconds.
   subroutine rfaas_invoke(lease, f, in, in_size, out, capacity, out_size, worker, timeout, ierror, repeats, attempt)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function), intent(in) :: f
      type(*), dimension(*), intent(in) :: in
      type(*), dimension(*) :: out
      integer(c_size_t), intent(in) :: in_size, capacity
      integer(c_size_t), intent(inout), optional :: out_size
      integer, intent(in), optional :: worker, repeats
      real(c_double), intent(in), optional :: timeout, attempt
      integer, intent(out), optional :: ierror
      integer(c_size_t) :: got
      integer(c_int) :: status
      got = 0
      status = c_invoke(lease%handle, f, in, in_size, out, capacity, got, options_of(worker, timeout, repeats, attempt))
      if (present(out_size)) out_size = got
      call finish(status, ierror)
   end subroutine

   !> With repeats `in` must stay unchanged until the request ends.
   subroutine rfaas_iinvoke(lease, f, in, in_size, out, capacity, request, worker, timeout, ierror, repeats, attempt)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function), intent(in) :: f
      type(*), dimension(*), intent(in), asynchronous :: in
      type(*), dimension(*), asynchronous :: out
      integer(c_size_t), intent(in) :: in_size, capacity
      type(rfaas_request), intent(inout) :: request
      integer, intent(in), optional :: worker, repeats
      real(c_double), intent(in), optional :: timeout, attempt
      integer, intent(out), optional :: ierror
      call finish(c_iinvoke(lease%handle, f, in, in_size, out, capacity, options_of(worker, timeout, repeats, attempt), &
                            request), ierror)
   end subroutine

   subroutine rfaas_wait(request, out_size, ierror)
      type(rfaas_request), intent(inout) :: request
      integer(c_size_t), intent(inout), optional :: out_size
      integer, intent(out), optional :: ierror
      integer(c_size_t) :: got
      integer(c_int) :: status
      got = 0
      status = c_wait(request, got)
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
      status = c_test(request, done, got)
      flag = done /= 0
      if (present(out_size)) out_size = got
      call finish(status, ierror)
   end subroutine

   subroutine rfaas_cancel(request, ierror)
      type(rfaas_request), intent(inout) :: request
      integer, intent(out), optional :: ierror
      call finish(c_cancel(request), ierror)
   end subroutine

   !> out_sizes and statuses, which have room for all, become what each request came to; ierror is the first error's status.
   subroutine rfaas_waitall(requests, ierror, out_sizes, statuses)
      type(rfaas_request), intent(inout) :: requests(:)
      integer, intent(out), optional :: ierror
      integer(c_size_t), intent(inout), optional :: out_sizes(:)
      integer, intent(inout), optional :: statuses(:)
      integer(c_size_t), target :: sizes(max(size(requests), 1))
      integer(c_int), target :: each(max(size(requests), 1))
      integer(c_int) :: status
      integer :: n
      n = size(requests)
      sizes = 0
      each = RFAAS_OK
      status = c_waitall(int(n, c_size_t), requests, c_loc(sizes), c_loc(each))
      if (present(out_sizes)) out_sizes(:n) = sizes(:n)
      if (present(statuses)) statuses(:n) = int(each(:n))
      call finish(status, ierror)
   end subroutine

   !> index counts from 1; RFAAS_UNDEFINED (0) when there are only null requests.
   subroutine rfaas_waitany(requests, index, out_size, ierror)
      type(rfaas_request), intent(inout) :: requests(:)
      integer, intent(out) :: index
      integer(c_size_t), intent(inout), optional :: out_size
      integer, intent(out), optional :: ierror
      integer(c_size_t) :: at, got
      integer(c_int) :: status
      at = -1
      got = 0
      status = c_waitany(size(requests, kind=c_size_t), requests, at, got)
      index = int(at + 1) ! SIZE_MAX is -1 here
      if (present(out_size)) out_size = got
      call finish(status, ierror)
   end subroutine

   !> in_item and out_item: bytes of one element; n elements.
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
      type(map_options) :: o
      o%struct_size = int(c_sizeof(o), c_int32_t)
      if (present(chunk)) o%chunk = chunk
      if (present(timeout)) o%timeout_ns = nanoseconds(timeout)
      if (present(repeats)) o%repeats = repeats
      call finish(c_map(lease%handle, f, in, in_item, out, out_item, n, o), ierror)
   end subroutine

   ! ---- helpers ----

   pure logical function given(flag)
      logical, intent(in), optional :: flag
      given = .false.
      if (present(flag)) given = flag
   end function

   function options_of(worker, timeout, repeats, attempt) result(o)
      integer, intent(in), optional :: worker, repeats
      real(c_double), intent(in), optional :: timeout, attempt
      type(call_options) :: o
      o%struct_size = int(c_sizeof(o), c_int32_t)
      if (present(worker)) o%worker = worker
      if (present(timeout)) o%timeout_ns = nanoseconds(timeout)
      if (present(repeats)) o%repeats = repeats
      if (present(attempt)) o%attempt_ns = nanoseconds(attempt)
   end function

   !> Too long for a counter is as good as no limit.
   pure integer(c_int64_t) function nanoseconds(seconds)
      real(c_double), intent(in) :: seconds
      nanoseconds = 0
      if (abs(seconds) < 9.0e9_c_double) nanoseconds = int(seconds*1.0e9_c_double, c_int64_t)
   end function

   !> A C string; NULL when it is not given. The copy lives in `copy`.
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
end module
