! generated from client/api/rfaas.yaml by internal/apigen (make api): do not edit.
!> rfaas.h as it is: constants, structures, and the functions under their own names with _c behind them. Programs use the module rfaas.
module rfaas_c
   use, intrinsic :: iso_c_binding
   implicit none
   public

   integer, parameter :: RFAAS_VERSION_MAJOR = 0

   integer, parameter :: RFAAS_VERSION_MINOR = 4

   integer, parameter :: RFAAS_OK = 0
   integer, parameter :: RFAAS_BUSY = -100 !< no free slot or core; finish a request and retry
   integer, parameter :: RFAAS_INVALID = -200 !< an argument is wrong; the error text names it
   integer, parameter :: RFAAS_TOO_LARGE = -201 !< the payload or capacity exceeds the lease's limits
   integer, parameter :: RFAAS_NO_FUNCTION = -202 !< the library has no function of this name
   integer, parameter :: RFAAS_BAD_BLOB = -203 !< the peer sent a malformed queue pair address
   integer, parameter :: RFAAS_BAD_LIBRARY = -204 !< the library cannot be read or loaded; the error text says why
   integer, parameter :: RFAAS_BAD_REQUEST = -205 !< the worker refused a malformed request
   integer, parameter :: RFAAS_WRONG_THREAD = -206 !< two threads used an object that only one thread may use
   integer, parameter :: RFAAS_UNSUPPORTED = -300 !< this provider, device or executor does not support the operation
   integer, parameter :: RFAAS_NO_DEVICE = -301 !< no such RDMA device, port or GID
   integer, parameter :: RFAAS_FUNCTION_FAILED = -400 !< the function reported an error (the text), or wrote beyond its capacity
   integer, parameter :: RFAAS_RESULT_TOO_LARGE = -401 !< the result exceeds the capacity that the caller gave
   integer, parameter :: RFAAS_DEADLINE = -402 !< the deadline passed; the function may still be running
   integer, parameter :: RFAAS_CANCELLED = -403 !< the caller cancelled the call with rfaas_cancel
   integer, parameter :: RFAAS_CONNECTION = -500 !< the connection to the worker or to the control port broke
   integer, parameter :: RFAAS_PEER_GONE = -501 !< the other process or node ended, or cannot be reached
   integer, parameter :: RFAAS_WORKER_DIED = -502 !< the worker died; the error text says how. The next call gets a new worker
   integer, parameter :: RFAAS_PROTOCOL = -503 !< the peer broke the protocol or speaks another version
   integer, parameter :: RFAAS_TIME_LIMIT = -504 !< the function exceeded the lease's call_limit_ns and its worker was killed
   integer, parameter :: RFAAS_MEMORY_LIMIT = -505 !< the function exceeded the lease's memory and its worker was killed
   integer, parameter :: RFAAS_LEASE_ENDED = -600 !< the lease was released, revoked, expired or lost its executor; open another
   integer, parameter :: RFAAS_FATAL = -700 !< out of memory, device removed, or refused by the kernel
   integer, parameter :: RFAAS_CREDENTIAL = -800 !< the token or secret is missing, wrong, expired, revoked or not yet valid

   integer, parameter :: RFAAS_CLASS_BUSY = 1 !< retry
   integer, parameter :: RFAAS_CLASS_INVALID = 2 !< fix the call
   integer, parameter :: RFAAS_CLASS_UNSUPPORTED = 3 !< take another path
   integer, parameter :: RFAAS_CLASS_FUNCTION = 4 !< this call failed, the lease is good
   integer, parameter :: RFAAS_CLASS_CONNECTION = 5 !< the worker is lost, the next call gets a new one
   integer, parameter :: RFAAS_CLASS_LEASE = 6 !< open a new lease
   integer, parameter :: RFAAS_CLASS_FATAL = 7 !< stop
   integer, parameter :: RFAAS_CLASS_CREDENTIAL = 8 !< get another token or set the clock, then repeat the call

   integer, parameter :: RFAAS_MPI_ERROR_MAX = 512

   integer, parameter :: RFAAS_NOT_STARTED = 0 !< the function has not run and will not run; repeating the call is safe
   integer, parameter :: RFAAS_MAYBE_EXECUTED = 1 !< the function may have run, may be running, or may run later

   integer(c_int32_t), parameter :: RFAAS_SESSION_ALLOW_PLAINTEXT = 1
   integer(c_int32_t), parameter :: RFAAS_SESSION_LOCAL = 2

   integer, parameter :: RFAAS_DATA_ENCRYPTION_OFF = 1 !< never
   integer, parameter :: RFAAS_DATA_ENCRYPTION_ON = 2
   integer, parameter :: RFAAS_DATA_ENCRYPTION_REQUIRE = 3 !< always encrypts on tcp, also on loopback

   integer, parameter :: RFAAS_EXECUTOR_OPEN = 1 !< the executor leases cores; also: it registered, or it recovered
   integer, parameter :: RFAAS_EXECUTOR_DRAINING = 2 !< the executor grants no more leases
   integer, parameter :: RFAAS_EXECUTOR_SILENT = 3 !< the executor missed several heartbeats
   integer, parameter :: RFAAS_EXECUTOR_LEFT = 4 !< the executor has deregistered

   integer, parameter :: RFAAS_WAIT_ADAPTIVE = 0 !< spin for about as long as a wake-up takes, then block; the default
   integer, parameter :: RFAAS_WAIT_HOT = 1 !< spin: lowest latency, uses one core on each side
   integer, parameter :: RFAAS_WAIT_WARM = 2 !< block at once: uses no core while waiting

   integer, parameter :: RFAAS_LEASES_MAX = 4096

   integer(c_int64_t), parameter :: RFAAS_NO_BULK = -1_c_int64_t

   integer(c_int32_t), parameter :: RFAAS_LEASE_RENEW = 1
   integer(c_int32_t), parameter :: RFAAS_LEASE_FAILOVER = 2
   integer(c_int32_t), parameter :: RFAAS_LEASE_LOCAL = 4
   integer(c_int32_t), parameter :: RFAAS_LEASE_REUSE = 8
   integer(c_int32_t), parameter :: RFAAS_LEASE_SEED = 16
   integer(c_int32_t), parameter :: RFAAS_LEASE_SEED_REQUIRED = 32

   integer, parameter :: RFAAS_EVENT_NONE = 0 !< there is no event
   integer, parameter :: RFAAS_EVENT_WORKER_DIED = 1 !< a worker died; the next call gets a new worker in its place
   integer, parameter :: RFAAS_EVENT_ENDED = 2 !< it has ended; the text begins with released, expired, revoked, drained or lost
   integer, parameter :: RFAAS_EVENT_DRAINING = 3
   integer, parameter :: RFAAS_EVENT_EXPIRING = 4 !< the lease expires soon unless it is renewed
   integer, parameter :: RFAAS_EVENT_MOVED = 5 !< the lease has moved: calls go to another executor; the text is its address
   integer, parameter :: RFAAS_EVENT_LOCAL = 6 !< with RFAAS_LEASE_LOCAL: calls run in this process; the text says why
   integer, parameter :: RFAAS_EVENT_WORKER_ADDED = 7

   integer, parameter :: RFAAS_START_UNKNOWN = 0 !< the executor did not report it, or the worker is this process
   integer, parameter :: RFAAS_START_COLD = 1 !< a new process
   integer, parameter :: RFAAS_START_POOLED = 2
   integer, parameter :: RFAAS_START_CACHED = 3
   integer, parameter :: RFAAS_START_SEEDED = 4 !< a new process with the memory of the lease's seed (RFAAS_LEASE_SEED)

   integer, parameter :: RFAAS_ANY_WORKER = -1

   integer(c_int32_t), parameter :: RFAAS_CALL_KILL = 1
   integer(c_int32_t), parameter :: RFAAS_CALL_IN_PLACE = 2

   integer, parameter :: RFAAS_TABLES_MAX = 64

   integer, parameter :: RFAAS_SUM = 1 !< the sum; integers wrap around
   integer, parameter :: RFAAS_MIN = 2 !< the smaller one. A result that is NaN is ignored
   integer, parameter :: RFAAS_MAX = 3 !< the larger one. A result that is NaN is ignored

   integer, parameter :: RFAAS_INT32 = 1 !< int32_t
   integer, parameter :: RFAAS_INT64 = 2 !< int64_t
   integer, parameter :: RFAAS_FLOAT32 = 3 !< float
   integer, parameter :: RFAAS_FLOAT64 = 4 !< double

   !> A call in flight. A new one is the null request.
   type, bind(c) :: rfaas_request
      integer(c_int64_t) :: handle = 0
   end type

   type, bind(c) :: rfaas_session_options_c
      integer(c_int32_t) :: struct_size = 0
      integer(c_int32_t) :: port = 0
      type(c_ptr) :: manager = c_null_ptr
      type(c_ptr) :: executor = c_null_ptr
      type(c_ptr) :: provider = c_null_ptr
      type(c_ptr) :: tenant = c_null_ptr
      type(c_ptr) :: device = c_null_ptr
      integer(c_int32_t) :: gid_index = -1
      integer(c_int32_t) :: pkey_index = 0
      integer(c_int32_t) :: traffic_class = 0
      integer(c_int32_t) :: service_level = 0
      integer(c_int32_t) :: mtu = 0
      integer(c_int32_t) :: flags = 0
      integer(c_int64_t) :: timeout_ns = 0
      integer(c_int32_t) :: cached_leases = 0
      integer(c_int32_t) :: data_encryption = 0
      type(c_ptr) :: secret_file = c_null_ptr
      type(c_ptr) :: token_file = c_null_ptr
   end type

   type, bind(c) :: rfaas_change_c
      integer(c_int32_t) :: state = 0
      integer(c_int32_t) :: reserved = 0
      character(kind=c_char) :: executor(256) = c_null_char
      character(kind=c_char) :: node(256) = c_null_char
   end type

   type, bind(c) :: rfaas_lease_options_c
      integer(c_int32_t) :: struct_size = 0
      integer(c_int32_t) :: workers = 0
      integer(c_int32_t) :: cores_per_worker = 0
      integer(c_int32_t) :: depth = 0
      integer(c_int32_t) :: eager = 0
      integer(c_int32_t) :: wait_mode = 0
      integer(c_int64_t) :: bulk = 0
      integer(c_int64_t) :: memory = 0
      integer(c_int64_t) :: duration_ns = 0
      type(c_ptr) :: library = c_null_ptr
      type(c_ptr) :: library_data = c_null_ptr
      integer(c_size_t) :: library_size = 0
      type(c_ptr) :: executor = c_null_ptr
      integer(c_int64_t) :: call_limit_ns = 0
      integer(c_int32_t) :: flags = 0
      integer(c_int32_t) :: reserved = 0
      integer(c_int64_t) :: wait_ns = 0
      type(c_ptr) :: bundle = c_null_ptr
      type(c_ptr) :: init_function = c_null_ptr
      type(c_ptr) :: init_payload = c_null_ptr
      integer(c_size_t) :: init_size = 0
      integer(c_int32_t) :: workers_min = 0
      integer(c_int32_t) :: reserved2 = 0
      integer(c_int64_t) :: bulk_max = 0
      type(c_ptr) :: seed = c_null_ptr
      type(c_ptr) :: runtime = c_null_ptr
   end type

   type, bind(c) :: rfaas_place_c
      character(kind=c_char) :: executor(128) = c_null_char
   end type

   type, bind(c) :: rfaas_event_c
      integer(c_int32_t) :: struct_size = 0
      integer(c_int32_t) :: kind = 0
      integer(c_int32_t) :: worker = 0
      integer(c_int32_t) :: lost = 0
      integer(c_int64_t) :: left_ns = 0
      character(kind=c_char) :: text(256) = c_null_char
   end type

   type, bind(c) :: rfaas_lease_details_c
      integer(c_int32_t) :: struct_size = 0
      integer(c_int32_t) :: workers = 0
      integer(c_int32_t) :: depth = 0
      integer(c_int32_t) :: eager = 0
      integer(c_int64_t) :: bulk = 0
      integer(c_int64_t) :: lease_id = 0
      integer(c_int32_t) :: functions = 0
      integer(c_int32_t) :: replaced = 0
      character(kind=c_char) :: node(64) = c_null_char
      character(kind=c_char) :: executor(128) = c_null_char
      character(kind=c_char) :: provider(16) = c_null_char
      character(kind=c_char) :: node_name(256) = c_null_char
      character(kind=c_char) :: executor_address(256) = c_null_char
      integer(c_int64_t) :: left_ns = 0
      character(kind=c_char) :: local_reason(256) = c_null_char
      integer(c_int32_t) :: workers_wanted = 0
   end type

   type, bind(c) :: rfaas_worker_start_c
      integer(c_int32_t) :: struct_size = 0
      integer(c_int32_t) :: start = 0
      integer(c_int32_t) :: pid = 0
      integer(c_int32_t) :: reserved = 0
      integer(c_int64_t) :: fork_ns = 0
      integer(c_int64_t) :: sandbox_ns = 0
      integer(c_int64_t) :: connect_ns = 0
      integer(c_int64_t) :: code_ns = 0
      character(kind=c_char) :: unseeded(160) = c_null_char
   end type

   type, bind(c) :: rfaas_worker_details_c
      integer(c_int32_t) :: struct_size = 0
      integer(c_int32_t) :: pid = 0
      integer(c_int64_t) :: calls = 0
      integer(c_int64_t) :: failed = 0
      integer(c_int64_t) :: refused = 0
      integer(c_int64_t) :: bytes_in = 0
      integer(c_int64_t) :: bytes_out = 0
      character(kind=c_char) :: running(128) = c_null_char
      integer(c_int32_t) :: output_size = 0
      character(kind=c_char) :: output(4100) = c_null_char
   end type

   type, bind(c) :: rfaas_call_options_c
      integer(c_int32_t) :: struct_size = 0
      integer(c_int32_t) :: worker = -1
      integer(c_int64_t) :: timeout_ns = 0
      integer(c_int32_t) :: repeats = 0
      integer(c_int32_t) :: flags = 0
      integer(c_int64_t) :: attempt_ns = 0
      integer(c_int64_t) :: keep = 0
   end type

   type, bind(c) :: rfaas_piece_c
      type(c_ptr) :: base = c_null_ptr
      integer(c_size_t) :: size = 0
      integer(c_size_t) :: count = 0
      integer(c_intptr_t) :: stride = 0
   end type

   type, bind(c) :: rfaas_seed_options_c
      integer(c_int32_t) :: struct_size = 0
      integer(c_int32_t) :: reserved = 0
      type(c_ptr) :: name = c_null_ptr
      integer(c_int64_t) :: ttl_ns = 0
   end type

   type, bind(c) :: rfaas_seed_details_c
      integer(c_int32_t) :: struct_size = 0
      integer(c_int32_t) :: version = 0
      integer(c_int64_t) :: bytes = 0
      integer(c_int64_t) :: memory = 0
      integer(c_int64_t) :: children = 0
      integer(c_int64_t) :: left_ns = 0
      integer(c_int64_t) :: load_ns = 0
      integer(c_int64_t) :: setup_ns = 0
      integer(c_int64_t) :: capture_ns = 0
      character(kind=c_char) :: executor(256) = c_null_char
      character(kind=c_char) :: node(256) = c_null_char
      character(kind=c_char) :: setup(256) = c_null_char
      character(kind=c_char) :: warning(256) = c_null_char
   end type

   type, bind(c) :: rfaas_map_options_c
      integer(c_int32_t) :: struct_size = 0
      integer(c_int32_t) :: flags = 0
      integer(c_size_t) :: chunk = 0
      integer(c_int64_t) :: timeout_ns = 0
      integer(c_int32_t) :: repeats = 0
      integer(c_int32_t) :: reserved = 0
   end type

   type, bind(c) :: rfaas_statistics_c
      integer(c_int32_t) :: struct_size = 0
      integer(c_int32_t) :: replaced = 0
      integer(c_int64_t) :: calls = 0
      integer(c_int64_t) :: replies = 0
      integer(c_int64_t) :: abandoned = 0
      integer(c_int64_t) :: late = 0
      integer(c_int64_t) :: busy = 0
      integer(c_int64_t) :: bytes_in = 0
      integer(c_int64_t) :: bytes_out = 0
      integer(c_int64_t) :: blocked = 0
      integer(c_int64_t) :: repeated = 0
      integer(c_int64_t) :: moved = 0
      integer(c_int64_t) :: local = 0
      integer(c_int64_t) :: cold = 0
      integer(c_int64_t) :: pooled = 0
      integer(c_int64_t) :: cached = 0
      integer(c_int64_t) :: queue_pairs = 0
      integer(c_int64_t) :: open_ns = 0
      integer(c_int64_t) :: cached_leases = 0
      integer(c_int64_t) :: seeded = 0
   end type

   interface
      !> rfaas_strerror returns the short English name of a status.
      type(c_ptr) function rfaas_strerror_c(status) bind(c, name='rfaas_strerror')
         import
         integer(c_int), value :: status
      end function

      !> rfaas_last_error describes the last failed call of this thread.
      type(c_ptr) function rfaas_last_error_c() bind(c, name='rfaas_last_error')
         import
      end function

      !> rfaas_started says whether the function of this thread's last failed call may have run.
      integer(c_int) function rfaas_started_c() bind(c, name='rfaas_started')
         import
      end function

      !> rfaas_function_code returns the code with which the function of this thread's last failed call failed.
      integer(c_int) function rfaas_function_code_c() bind(c, name='rfaas_function_code')
         import
      end function

      !> rfaas_call_worker returns the worker of this thread's last call.
      integer(c_int) function rfaas_call_worker_c() bind(c, name='rfaas_call_worker')
         import
      end function

      !> rfaas_kept_result returns a result that was larger than the capacity of its call.
      integer(c_int) function rfaas_kept_result_c(out, capacity, out_size) bind(c, name='rfaas_kept_result')
         import
         type(*), dimension(*), asynchronous, optional :: out
         integer(c_size_t), value :: capacity
         integer(c_size_t), intent(inout), optional :: out_size
      end function

      !> rfaas_init starts the library.
      integer(c_int) function rfaas_init_c(options) bind(c, name='rfaas_init')
         import
         type(c_ptr), value :: options
      end function

      !> rfaas_finalize undoes one rfaas_init.
      integer(c_int) function rfaas_finalize_c() bind(c, name='rfaas_finalize')
         import
      end function

      !> rfaas_version returns the version of the library at run time.
      integer(c_int) function rfaas_version_c() bind(c, name='rfaas_version')
         import
      end function

      !> rfaas_session_open opens a session with a resource manager or an executor.
      integer(c_int) function rfaas_session_open_c(options, session) bind(c, name='rfaas_session_open')
         import
         type(rfaas_session_options_c), intent(in), optional :: options
         type(c_ptr), intent(inout) :: session
      end function

      !> rfaas_session_close releases the leases of a session and closes it.
      integer(c_int) function rfaas_session_close_c(session) bind(c, name='rfaas_session_close')
         import
         type(c_ptr), value :: session
      end function

      !> rfaas_session_cached returns how many released leases a session caches.
      integer(c_int) function rfaas_session_cached_c(session) bind(c, name='rfaas_session_cached')
         import
         type(c_ptr), value :: session
      end function

      !> rfaas_session_changes returns what has happened to executors since the last call.
      integer(c_int) function rfaas_session_changes_c(session, changes, capacity, count) bind(c, name='rfaas_session_changes')
         import
         type(c_ptr), value :: session
         type(rfaas_change_c), intent(inout) :: changes(*)
         integer(c_size_t), value :: capacity
         integer(c_size_t), intent(inout) :: count
      end function

      !> rfaas_session_watch calls a function with every change of an executor.
      integer(c_int) function rfaas_session_watch_c(session, f, arg, timeout_ns) bind(c, name='rfaas_session_watch')
         import
         type(c_ptr), value :: session
         type(c_funptr), value :: f
         type(c_ptr), value :: arg
         integer(c_int64_t), value :: timeout_ns
      end function

      !> rfaas_lease_open leases workers on one executor.
      integer(c_int) function rfaas_lease_open_c(session, options, lease) bind(c, name='rfaas_lease_open')
         import
         type(c_ptr), value :: session
         type(rfaas_lease_options_c), intent(in) :: options
         type(c_ptr), intent(inout) :: lease
      end function

      !> rfaas_lease_release releases a lease and its workers.
      integer(c_int) function rfaas_lease_release_c(lease) bind(c, name='rfaas_lease_release')
         import
         type(c_ptr), value :: lease
      end function

      !> rfaas_lease_open_across leases workers on as few executors as possible.
      integer(c_int) function rfaas_lease_open_across_c(session, options, capacity, leases, &
         count) bind(c, name='rfaas_lease_open_across')
         import
         type(c_ptr), value :: session
         type(rfaas_lease_options_c), intent(in) :: options
         integer(c_size_t), value :: capacity
         type(c_ptr), intent(inout) :: leases(*)
         integer(c_size_t), intent(inout) :: count
      end function

      !> rfaas_places finds executors with room for leases, without leasing.
      integer(c_int) function rfaas_places_c(session, options, count, places) bind(c, name='rfaas_places')
         import
         type(c_ptr), value :: session
         type(rfaas_lease_options_c), intent(in) :: options
         integer(c_size_t), value :: count
         type(rfaas_place_c), intent(inout) :: places(*)
      end function

      !> rfaas_lease_open_at leases workers on the executor at a place.
      integer(c_int) function rfaas_lease_open_at_c(session, options, place, lease) bind(c, name='rfaas_lease_open_at')
         import
         type(c_ptr), value :: session
         type(rfaas_lease_options_c), intent(in) :: options
         type(rfaas_place_c), intent(in) :: place
         type(c_ptr), intent(inout) :: lease
      end function

      !> rfaas_lease_renew renews a lease.
      integer(c_int) function rfaas_lease_renew_c(lease, duration_ns) bind(c, name='rfaas_lease_renew')
         import
         type(c_ptr), value :: lease
         integer(c_int64_t), value :: duration_ns
      end function

      !> rfaas_lease_event takes the oldest event of a lease.
      integer(c_int) function rfaas_lease_event_c(lease, event) bind(c, name='rfaas_lease_event')
         import
         type(c_ptr), value :: lease
         type(rfaas_event_c), intent(inout) :: event
      end function

      !> rfaas_lease_workers returns the number of workers that a lease has now.
      integer(c_int) function rfaas_lease_workers_c(lease) bind(c, name='rfaas_lease_workers')
         import
         type(c_ptr), value :: lease
      end function

      !> rfaas_lease_info describes a lease.
      integer(c_int) function rfaas_lease_info_c(lease, details) bind(c, name='rfaas_lease_info')
         import
         type(c_ptr), value :: lease
         type(rfaas_lease_details_c), intent(inout) :: details
      end function

      !> rfaas_lease_status says whether a lease has ended.
      integer(c_int) function rfaas_lease_status_c(lease) bind(c, name='rfaas_lease_status')
         import
         type(c_ptr), value :: lease
      end function

      !> rfaas_worker_origin says how a worker came to its lease.
      integer(c_int) function rfaas_worker_origin_c(lease, worker, start) bind(c, name='rfaas_worker_origin')
         import
         type(c_ptr), value :: lease
         integer(c_int), value :: worker
         type(rfaas_worker_start_c), intent(inout) :: start
      end function

      !> rfaas_worker_info describes a worker and returns what it has printed.
      integer(c_int) function rfaas_worker_info_c(lease, worker, details) bind(c, name='rfaas_worker_info')
         import
         type(c_ptr), value :: lease
         integer(c_int), value :: worker
         type(rfaas_worker_details_c), intent(inout) :: details
      end function

      !> rfaas_worker_replace kills a worker and starts a new one in its place.
      integer(c_int) function rfaas_worker_replace_c(lease, worker) bind(c, name='rfaas_worker_replace')
         import
         type(c_ptr), value :: lease
         integer(c_int), value :: worker
      end function

      !> rfaas_lease_function finds a function of the library by name.
      integer(c_int) function rfaas_lease_function_c(lease, name, function) bind(c, name='rfaas_lease_function')
         import
         type(c_ptr), value :: lease
         character(kind=c_char), intent(in) :: name(*)
         integer(c_int32_t), intent(inout) :: function
      end function

      !> rfaas_lease_function_name returns the name of a function.
      type(c_ptr) function rfaas_lease_function_name_c(lease, function) bind(c, name='rfaas_lease_function_name')
         import
         type(c_ptr), value :: lease
         integer(c_int32_t), value :: function
      end function

      !> rfaas_lease_chain makes a function that calls two functions, the second with the result of the first.
      integer(c_int) function rfaas_lease_chain_c(lease, first, second, chain) bind(c, name='rfaas_lease_chain')
         import
         type(c_ptr), value :: lease
         integer(c_int32_t), value :: first
         integer(c_int32_t), value :: second
         integer(c_int32_t), intent(inout) :: chain
      end function

      !> rfaas_alloc allocates registered memory.
      integer(c_int) function rfaas_alloc_c(lease, size, buffer) bind(c, name='rfaas_alloc')
         import
         type(c_ptr), value :: lease
         integer(c_size_t), value :: size
         type(c_ptr), intent(inout) :: buffer
      end function

      !> rfaas_free frees memory of rfaas_alloc.
      integer(c_int) function rfaas_free_c(lease, buffer) bind(c, name='rfaas_free')
         import
         type(c_ptr), value :: lease
         type(c_ptr), value :: buffer
      end function

      !> rfaas_register registers memory of the program.
      integer(c_int) function rfaas_register_c(lease, buffer, size) bind(c, name='rfaas_register')
         import
         type(c_ptr), value :: lease
         type(*), dimension(*), asynchronous :: buffer
         integer(c_size_t), value :: size
      end function

      !> rfaas_unregister undoes rfaas_register.
      integer(c_int) function rfaas_unregister_c(lease, buffer) bind(c, name='rfaas_unregister')
         import
         type(c_ptr), value :: lease
         type(*), dimension(*), asynchronous, optional :: buffer
      end function

      !> rfaas_invoke calls a function and waits for its result.
      integer(c_int) function rfaas_invoke_c(lease, function, in, in_size, out, capacity, out_size, &
         options) bind(c, name='rfaas_invoke')
         import
         type(c_ptr), value :: lease
         integer(c_int32_t), value :: function
         type(*), dimension(*), intent(in), asynchronous, optional :: in
         integer(c_size_t), value :: in_size
         type(*), dimension(*), asynchronous, optional :: out
         integer(c_size_t), value :: capacity
         integer(c_size_t), intent(inout), optional :: out_size
         type(rfaas_call_options_c), intent(in), optional :: options
      end function

      !> rfaas_invokev calls a function with payload and result in several pieces of memory.
      integer(c_int) function rfaas_invokev_c(lease, function, in, in_count, out, out_count, out_size, &
         options) bind(c, name='rfaas_invokev')
         import
         type(c_ptr), value :: lease
         integer(c_int32_t), value :: function
         type(rfaas_piece_c), intent(in), optional :: in(*)
         integer(c_size_t), value :: in_count
         type(rfaas_piece_c), intent(in), optional :: out(*)
         integer(c_size_t), value :: out_count
         integer(c_size_t), intent(inout), optional :: out_size
         type(rfaas_call_options_c), intent(in), optional :: options
      end function

      !> rfaas_iinvoke starts a call and returns at once.
      integer(c_int) function rfaas_iinvoke_c(lease, function, in, in_size, out, capacity, options, &
         request) bind(c, name='rfaas_iinvoke')
         import
         type(c_ptr), value :: lease
         integer(c_int32_t), value :: function
         type(*), dimension(*), intent(in), asynchronous, optional :: in
         integer(c_size_t), value :: in_size
         type(*), dimension(*), asynchronous, optional :: out
         integer(c_size_t), value :: capacity
         type(rfaas_call_options_c), intent(in), optional :: options
         type(rfaas_request), intent(inout) :: request
      end function

      !> rfaas_iinvokev starts a call with payload and result in several pieces of memory.
      integer(c_int) function rfaas_iinvokev_c(lease, function, in, in_count, out, out_count, options, &
         request) bind(c, name='rfaas_iinvokev')
         import
         type(c_ptr), value :: lease
         integer(c_int32_t), value :: function
         type(rfaas_piece_c), intent(in), optional :: in(*)
         integer(c_size_t), value :: in_count
         type(rfaas_piece_c), intent(in), optional :: out(*)
         integer(c_size_t), value :: out_count
         type(rfaas_call_options_c), intent(in), optional :: options
         type(rfaas_request), intent(inout) :: request
      end function

      !> rfaas_wait waits for a request to end.
      integer(c_int) function rfaas_wait_c(request, out_size) bind(c, name='rfaas_wait')
         import
         type(rfaas_request), intent(inout) :: request
         integer(c_size_t), intent(inout), optional :: out_size
      end function

      !> rfaas_test finishes a request if it has ended.
      integer(c_int) function rfaas_test_c(request, done, out_size) bind(c, name='rfaas_test')
         import
         type(rfaas_request), intent(inout) :: request
         integer(c_int), intent(inout) :: done
         integer(c_size_t), intent(inout), optional :: out_size
      end function

      !> rfaas_cancel abandons a request.
      integer(c_int) function rfaas_cancel_c(request) bind(c, name='rfaas_cancel')
         import
         type(rfaas_request), intent(inout) :: request
      end function

      !> rfaas_waitall waits for several requests to end.
      integer(c_int) function rfaas_waitall_c(count, requests, out_sizes, statuses) bind(c, name='rfaas_waitall')
         import
         integer(c_size_t), value :: count
         type(rfaas_request), intent(inout) :: requests(*)
         integer(c_size_t), intent(inout), optional :: out_sizes(*)
         integer(c_int), intent(inout), optional :: statuses(*)
      end function

      !> rfaas_waitany waits for one of several requests to end.
      integer(c_int) function rfaas_waitany_c(count, requests, index, out_size) bind(c, name='rfaas_waitany')
         import
         integer(c_size_t), value :: count
         type(rfaas_request), intent(inout) :: requests(*)
         integer(c_size_t), intent(inout) :: index
         integer(c_size_t), intent(inout), optional :: out_size
      end function

      !> rfaas_waitany_for waits for one of several requests to end, for a limited time.
      integer(c_int) function rfaas_waitany_for_c(count, requests, timeout_ns, index, &
         out_size) bind(c, name='rfaas_waitany_for')
         import
         integer(c_size_t), value :: count
         type(rfaas_request), intent(inout) :: requests(*)
         integer(c_int64_t), value :: timeout_ns
         integer(c_size_t), intent(inout) :: index
         integer(c_size_t), intent(inout), optional :: out_size
      end function

      !> rfaas_lease_descriptor returns a descriptor for poll() that becomes readable when a request of a lease has ended.
      integer(c_int) function rfaas_lease_descriptor_c(lease, fd) bind(c, name='rfaas_lease_descriptor')
         import
         type(c_ptr), value :: lease
         integer(c_int), intent(inout) :: fd
      end function

      !> rfaas_lease_arm makes a lease's descriptor readable at the next end of a request.
      integer(c_int) function rfaas_lease_arm_c(lease) bind(c, name='rfaas_lease_arm')
         import
         type(c_ptr), value :: lease
      end function

      !> rfaas_table_put publishes a table, which functions find by its name.
      integer(c_int) function rfaas_table_put_c(session, name, parts, count) bind(c, name='rfaas_table_put')
         import
         type(c_ptr), value :: session
         character(kind=c_char), intent(in) :: name(*)
         type(rfaas_piece_c), intent(in) :: parts(*)
         integer(c_size_t), value :: count
      end function

      !> rfaas_table_put_at publishes a table that all workers map at the same address.
      integer(c_int) function rfaas_table_put_at_c(session, name, parts, count, address) bind(c, name='rfaas_table_put_at')
         import
         type(c_ptr), value :: session
         character(kind=c_char), intent(in) :: name(*)
         type(rfaas_piece_c), intent(in) :: parts(*)
         integer(c_size_t), value :: count
         integer(c_int64_t), value :: address
      end function

      !> rfaas_table_put_seed publishes the memory of a seed as a table.
      integer(c_int) function rfaas_table_put_seed_c(session, name, seed) bind(c, name='rfaas_table_put_seed')
         import
         type(c_ptr), value :: session
         character(kind=c_char), intent(in) :: name(*)
         character(kind=c_char), intent(in) :: seed(*)
      end function

      !> rfaas_table_drop withdraws a table, and frees this node's copy.
      integer(c_int) function rfaas_table_drop_c(session, name) bind(c, name='rfaas_table_drop')
         import
         type(c_ptr), value :: session
         character(kind=c_char), intent(in) :: name(*)
      end function

      !> rfaas_seed_create executes a setup function once, and keeps its memory for workers of later leases.
      integer(c_int) function rfaas_seed_create_c(lease, setup, in, size, options, seed) bind(c, name='rfaas_seed_create')
         import
         type(c_ptr), value :: lease
         character(kind=c_char), intent(in) :: setup(*)
         type(*), dimension(*), intent(in), asynchronous, optional :: in
         integer(c_size_t), value :: size
         type(rfaas_seed_options_c), intent(in) :: options
         type(c_ptr), intent(inout) :: seed
      end function

      !> rfaas_seed_open opens a seed that this or another program has created.
      integer(c_int) function rfaas_seed_open_c(session, name, seed) bind(c, name='rfaas_seed_open')
         import
         type(c_ptr), value :: session
         character(kind=c_char), intent(in) :: name(*)
         type(c_ptr), intent(inout) :: seed
      end function

      !> rfaas_seed_name returns the full name of a seed.
      type(c_ptr) function rfaas_seed_name_c(seed) bind(c, name='rfaas_seed_name')
         import
         type(c_ptr), value :: seed
      end function

      !> rfaas_seed_info describes a seed.
      integer(c_int) function rfaas_seed_info_c(seed, details) bind(c, name='rfaas_seed_info')
         import
         type(c_ptr), value :: seed
         type(rfaas_seed_details_c), intent(inout) :: details
      end function

      !> rfaas_seed_release withdraws a seed, or frees the handle of an opened one.
      integer(c_int) function rfaas_seed_release_c(seed) bind(c, name='rfaas_seed_release')
         import
         type(c_ptr), value :: seed
      end function

      !> rfaas_map applies a function to every item of an array, on all workers of a lease.
      integer(c_int) function rfaas_map_c(lease, function, in, in_item, out, out_item, count, options) bind(c, name='rfaas_map')
         import
         type(c_ptr), value :: lease
         integer(c_int32_t), value :: function
         type(*), dimension(*), intent(in), asynchronous, optional :: in
         integer(c_size_t), value :: in_item
         type(*), dimension(*), asynchronous, optional :: out
         integer(c_size_t), value :: out_item
         integer(c_size_t), value :: count
         type(rfaas_map_options_c), intent(in), optional :: options
      end function

      !> rfaas_reduce applies a function to every item of an array, on all workers of a lease, and combines the results.
      integer(c_int) function rfaas_reduce_c(lease, function, in, in_item, accumulator, out_item, count, operation, type, &
         options) bind(c, name='rfaas_reduce')
         import
         type(c_ptr), value :: lease
         integer(c_int32_t), value :: function
         type(*), dimension(*), intent(in), asynchronous, optional :: in
         integer(c_size_t), value :: in_item
         type(*), dimension(*), asynchronous, optional :: accumulator
         integer(c_size_t), value :: out_item
         integer(c_size_t), value :: count
         integer(c_int), value :: operation
         integer(c_int), value :: type
         type(rfaas_map_options_c), intent(in), optional :: options
      end function

      !> rfaas_reduce_with works like rfaas_reduce, and combines results by a callback.
      integer(c_int) function rfaas_reduce_with_c(lease, function, in, in_item, accumulator, out_item, count, combine, arg, &
         options) bind(c, name='rfaas_reduce_with')
         import
         type(c_ptr), value :: lease
         integer(c_int32_t), value :: function
         type(*), dimension(*), intent(in), asynchronous, optional :: in
         integer(c_size_t), value :: in_item
         type(*), dimension(*), asynchronous, optional :: accumulator
         integer(c_size_t), value :: out_item
         integer(c_size_t), value :: count
         type(c_funptr), value :: combine
         type(c_ptr), value :: arg
         type(rfaas_map_options_c), intent(in), optional :: options
      end function

      !> rfaas_lease_statistics returns the statistics of a lease since it was opened.
      integer(c_int) function rfaas_lease_statistics_c(lease, stats) bind(c, name='rfaas_lease_statistics')
         import
         type(c_ptr), value :: lease
         type(rfaas_statistics_c), intent(inout) :: stats
      end function
   end interface
end module
