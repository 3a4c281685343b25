!> Test of the Fortran module. Needs what batch_test.c needs. Exit status 0: all good.
program fortran_test
   use rfaas
   use, intrinsic :: iso_c_binding, only: c_double, c_loc, c_signed_char
   use, intrinsic :: iso_fortran_env, only: error_unit
   implicit none
   integer :: failures = 0, ierror, workers, at, i
   type(rfaas_session) :: session
   type(rfaas_lease) :: lease, there
   type(rfaas_request) :: requests(4), one
   type(rfaas_change) :: changes(2)
   type(rfaas_event) :: event
   type(rfaas_lease_details) :: details
   type(rfaas_worker_details) :: worker
   type(rfaas_worker_start) :: origin
   type(rfaas_statistics) :: stats
   integer(rfaas_function) :: printing
   integer(rfaas_function) :: echo, fail, sleep_ns, twice, chain
   real(c_double), target, asynchronous :: in(10, 5), out(10, 5), many(50, 4)
   real(c_double), pointer :: big(:)
   integer(c_int64_t) :: numbers(10001), doubled(10001), ns, total(1)
   integer(c_size_t) :: n, sizes(4)
   integer :: statuses(4)
   type(c_ptr) :: memory
   logical :: flag
   character(len=1024) :: text

   call rfaas_session_open(session, ierror=ierror)
   call fails(RFAAS_INVALID, 'not initialised', 'open before init')
   call rfaas_init()
   call check(rfaas_version() >= 2, 'version')
   call rfaas_session_open(session, executor='127.0.0.1:1', timeout=5.0_c_double, ierror=ierror)
   call fails(RFAAS_PEER_GONE, '127.0.0.1:1', 'nobody there')
   call check(rfaas_class(ierror) == RFAAS_CLASS_CONNECTION .and. rfaas_class(0) == 0, 'class')
   call check(len(rfaas_strerror(RFAAS_BUSY)) > 0, 'strerror')
   call rfaas_session_open(session, executor='127.0.0.1:1', local=.true., ierror=ierror)
   call check(ierror == RFAAS_OK, 'a session without executors')
   call rfaas_session_close(session)
   call rfaas_session_open(session, ierror=ierror)
   call check(ierror == RFAAS_OK, 'open')
   call rfaas_session_changes(session, changes, at, ierror)
   call fails(RFAAS_UNSUPPORTED, 'resource manager', 'changes without a manager')
   call rfaas_lease_open(session, '/nothing.so', lease, ierror=ierror)
   call check(ierror == RFAAS_BAD_LIBRARY, 'no library')
   call tables()
   call get_command_argument(1, text)
   call seeds()
   call rfaas_lease_open(session, text, lease, ierror=ierror, bundle='/none/first:/none/second')
   call check(ierror == RFAAS_INVALID, 'files that do not exist')
   call rfaas_lease_open(session, text, lease, workers=2, depth=4, wait_mode=RFAAS_WAIT_ADAPTIVE, reuse=.true., workers_min=1)
   call rfaas_lease_workers(lease, workers)
   call check(workers == 2, 'workers')
   call rfaas_lease_function(lease, 'ecko', echo, ierror)
   call check(ierror == RFAAS_NO_FUNCTION, 'no function')
   call rfaas_lease_function(lease, 'echo', echo)
   call rfaas_lease_function(lease, 'fail', fail)
   call rfaas_lease_function(lease, 'sleep_ns', sleep_ns)
   call pieces()

   in = reshape([(real(i, c_double), i=1, 50)], [10, 5])
   out = 0
   n = 0
   call rfaas_invoke(lease, echo, in, c_sizeof(in), out, c_sizeof(out), n, worker=1)
   call check(n == c_sizeof(in) .and. all(abs(in - out) <= 0), 'invoke')
   call rfaas_invoke(lease, echo, in(:, 2), 80_c_size_t, out(:, 1), 80_c_size_t)
   call check(all(abs(out(:, 1) - in(:, 2)) <= 0), 'a column')
   call rfaas_invoke(lease, echo, in, c_sizeof(in), out, c_sizeof(out), worker=7, ierror=ierror)
   call fails(RFAAS_INVALID, 'worker 7', 'worker 7')
   call rfaas_invoke(lease, fail, ['n', 'o', ' ', 'g', 'o', 'o', 'd'], 7_c_size_t, out, c_sizeof(out), ierror=ierror)
   call fails(RFAAS_FUNCTION_FAILED, 'no good', 'fail')
   call check(rfaas_started() == RFAAS_MAYBE_EXECUTED, 'started')
   call check(rfaas_function_code() == 0, 'function code')
   ns = 500000000
   call rfaas_invoke(lease, sleep_ns, [ns], 8_c_size_t, out, 8_c_size_t, timeout=0.005_c_double, ierror=ierror)
   call check(ierror == RFAAS_DEADLINE, 'deadline')

   ! Two attempts of 20 ms each, and no more.
   ns = 500000000
   call rfaas_invoke(lease, sleep_ns, [ns], 8_c_size_t, out, 8_c_size_t, repeats=1, attempt=0.02_c_double, ierror=ierror)
   call check(ierror == RFAAS_DEADLINE, 'attempts')

   call rfaas_wait(one, n) ! null
   call check(n == 0, 'null request')
   do i = 1, 4
      call rfaas_iinvoke(lease, echo, in, c_sizeof(in), many(:, i), c_sizeof(many)/4, requests(i))
   end do
   call rfaas_waitany(requests, at, n)
   call check(at >= 1 .and. at <= 4 .and. n == c_sizeof(in), 'waitany')
   call rfaas_waitall(requests)
   do i = 1, 4
      call check(all(abs(many(:, i) - reshape(in, [50])) <= 0), 'waitall')
   end do
   call rfaas_waitany(requests, at)
   call check(at == RFAAS_UNDEFINED, 'waitany of nothing')
   call rfaas_iinvoke(lease, echo, in, c_sizeof(in), many(:, 1), c_sizeof(in), requests(1))
   call rfaas_iinvoke(lease, fail, in, c_sizeof(in), many(:, 2), c_sizeof(in), requests(3))
   call rfaas_waitall(requests, ierror, sizes, statuses)
   call check(ierror == RFAAS_FUNCTION_FAILED, 'waitall with one that fails')
   call check(all(statuses == [RFAAS_OK, RFAAS_OK, RFAAS_FUNCTION_FAILED, RFAAS_OK]), 'statuses of waitall')
   call check(all(sizes == [c_sizeof(in), 0_c_size_t, 0_c_size_t, 0_c_size_t]), 'sizes of waitall')
   call rfaas_iinvoke(lease, echo, in, c_sizeof(in), out, c_sizeof(out), one)
   flag = .false.
   do while (.not. flag)
      call rfaas_test(one, flag, n)
   end do
   call check(n == c_sizeof(in), 'test')
   call rfaas_iinvoke(lease, echo, in, c_sizeof(in), out, c_sizeof(out), one)
   call rfaas_cancel(one)
   call check(one%handle == 0, 'cancel')
   do i = 0, 1 ! answered after the call that was cancelled
      call rfaas_invoke(lease, echo, in, c_sizeof(in), out, c_sizeof(out), worker=i)
   end do

   memory = c_null_ptr
   call rfaas_alloc(lease, 800000_c_size_t, memory)
   call c_f_pointer(memory, big, [100000])
   big = 2.5_c_double
   call rfaas_register(lease, many, c_sizeof(many))
   call rfaas_invoke(lease, echo, big, 800000_c_size_t, many, c_sizeof(many), n, ierror=ierror)
   call check(ierror == RFAAS_RESULT_TOO_LARGE .and. n == 800000, 'result too large')
   call rfaas_kept_result(many, c_sizeof(many), ierror=ierror)
   call fails(RFAAS_INVALID, 'no result is kept', 'no kept result')
   call rfaas_invoke(lease, echo, in, c_sizeof(in), many, 8_c_size_t, n, ierror=ierror, keep=c_sizeof(in))
   call check(ierror == RFAAS_RESULT_TOO_LARGE .and. n == c_sizeof(in), 'a result to keep')
   out = 0
   call rfaas_kept_result(out, c_sizeof(out), n)
   call check(n == c_sizeof(in) .and. all(abs(in - out) <= 0), 'kept result')
   call rfaas_unregister(lease, many)
   call rfaas_invoke(lease, echo, big, 320000_c_size_t, big(50002:), 320000_c_size_t, n, ierror=ierror, in_place=.true.)
   call check(ierror == RFAAS_INVALID, 'a result in place must be aligned')
   big(50001:) = 0
   call rfaas_invoke(lease, echo, big, 320000_c_size_t, big(50001:), 320000_c_size_t, n, in_place=.true.)
   call check(n == 320000 .and. abs(sum(big(50001:)) - 100000) < 1, 'in place')
   call rfaas_free(lease, memory)
   call rfaas_iinvoke(lease, sleep_ns, [100000000_c_int64_t], 8_c_size_t, out, 8_c_size_t, requests(2))
   call rfaas_waitany_for(requests, 0.0_c_double, at)
   call check(at == RFAAS_UNDEFINED, 'waitany_for that looks')
   call rfaas_waitany_for(requests, 30.0_c_double, at, n)
   call check(at == 2 .and. n == 8, 'waitany_for')
   call check(rfaas_call_worker() >= 0, 'worker of a call')
   call rfaas_lease_arm(lease, ierror)
   call fails(RFAAS_INVALID, 'rfaas_lease_descriptor', 'arm without a descriptor')
   call rfaas_lease_descriptor(lease, at)
   call check(at >= 0, 'descriptor')
   call rfaas_lease_arm(lease)

   call rfaas_lease_info(lease, details)
   call check(details%workers == 2 .and. details%depth == 4 .and. len_trim(details%executor) > 3 .and. &
              any(details%provider == ['shm  ', 'verbs', 'tcp  ']) .and. details%local_reason == '', 'info')
   call check(rfaas_lease_status(lease) == RFAAS_OK, 'status')
   call check(rfaas_lease_function_name(lease, echo) == 'echo', 'function name')
   call check(rfaas_lease_function_name(lease, 999) == '', 'no function name')
   call rfaas_worker_origin(lease, 1, origin)
   call check(origin%pid > 1 .and. origin%start /= RFAAS_START_CACHED, 'origin')
   call rfaas_lease_function(lease, 'print', printing)
   call rfaas_invoke(lease, printing, ['h', 'e', 'a', 'r'], 4_c_size_t, out, 0_c_size_t, worker=1)
   call rfaas_worker_info(lease, 1, worker)
   call check(worker%pid > 1 .and. worker%calls > 0 .and. worker%running == '', 'worker info')
   call rfaas_worker_info(lease, 2, worker, ierror)
   call fails(RFAAS_INVALID, 'worker 2', 'worker 2')
   call rfaas_lease_renew(lease, 60.0_c_double)
   call rfaas_lease_renew(lease, -1.0_c_double, ierror)
   call fails(RFAAS_INVALID, 'negative', 'renew backwards')
   call rfaas_lease_renew(lease, 1.0e30_c_double, ierror)
   call check(ierror == RFAAS_INVALID, 'renew for ever')
   call rfaas_lease_function(lease, 'crash', printing)
   call rfaas_invoke(lease, printing, in, 8_c_size_t, out, 8_c_size_t, ierror=ierror)
   call check(ierror == RFAAS_WORKER_DIED, 'crash')
   call rfaas_lease_event(lease, event)
   call check(event%kind == RFAAS_EVENT_WORKER_DIED .and. len_trim(event%text) > 0, 'event of a crash')
   call rfaas_lease_event(lease, event)
   call check(event%kind == RFAAS_EVENT_NONE, 'no event')
   do i = 0, 1
      call rfaas_invoke(lease, echo, in, c_sizeof(in), out, c_sizeof(out), worker=i)
   end do
   call rfaas_lease_statistics(lease, stats)
   call check(stats%replaced == 1 .and. stats%calls > 10 .and. stats%cached == 0 .and. stats%queue_pairs == 2 .and. &
              stats%open_ns > 0, 'statistics')
   call rfaas_worker_replace(lease, 2, ierror)
   call fails(RFAAS_INVALID, 'worker 2', 'replace worker 2')
   call rfaas_worker_replace(lease, 1)
   call rfaas_worker_origin(lease, 1, origin)
   call check(origin%pid > 1 .and. origin%pid /= worker%pid, 'replaced worker')
   call rfaas_cancel(one)
   call rfaas_lease_release(lease)
   call rfaas_session_cached(session, i)
   call check(i == 1, 'cached')
   call rfaas_lease_open(session, text, lease, workers=2, depth=4, wait_mode=RFAAS_WAIT_ADAPTIVE, reuse=.true.)
   call rfaas_lease_statistics(lease, stats)
   call check(stats%cached == 2 .and. stats%queue_pairs == 0 .and. stats%calls == 0, 'cached connections')
   call rfaas_lease_release(lease)
   call init_calls()
   call rfaas_lease_release(lease, ierror)
   call check(ierror == RFAAS_INVALID, 'released twice')

   call from_memory()
   call adoption()
   call get_environment_variable('TEST_LIBRARY', text)
   call rfaas_lease_open(session, text, lease, workers=2)
   call rfaas_lease_function(lease, 'twice', twice)
   numbers = [(int(i, c_int64_t), i=1, 10001)]
   call rfaas_map(lease, twice, numbers, 8_c_size_t, doubled, 8_c_size_t, 10001_c_size_t)
   call check(all(doubled == 2*numbers), 'map')
   call rfaas_lease_chain(lease, twice, twice, chain)
   call rfaas_map(lease, chain, numbers, 8_c_size_t, doubled, 8_c_size_t, 10001_c_size_t)
   call check(all(doubled == 4*numbers), 'map of a chain')
   call rfaas_lease_chain(lease, chain, twice, chain, ierror)
   call fails(RFAAS_INVALID, 'is a chain itself', 'chain of a chain')
   call rfaas_map(lease, twice, numbers, 0_c_size_t, doubled, 8_c_size_t, 5_c_size_t, ierror=ierror)
   call fails(RFAAS_INVALID, 'in_item', 'map of nothing')
   total = 5
   call rfaas_reduce(lease, twice, numbers, 8_c_size_t, total, 8_c_size_t, 10001_c_size_t, RFAAS_SUM, RFAAS_INT64, &
      chunk=100_c_size_t)
   call check(total(1) == 5 + 2*sum(numbers), 'reduce')
   total = 1
   call rfaas_reduce_with(lease, twice, numbers(1:20), 8_c_size_t, 8_c_size_t, 20_c_size_t, in_order, timeout=30.0_c_double)
   call check(total(1) == 21, 'reduce with a function')
   call rfaas_reduce(lease, twice, numbers, 8_c_size_t, total, 8_c_size_t, 5_c_size_t, 9, RFAAS_INT64, ierror=ierror)
   call fails(RFAAS_INVALID, 'operation is 9', 'reduce by nothing')
   ! No core is left: the function runs here.
   call rfaas_lease_open(session, text, there, local=.true., failover=.true., renew=.true.)
   call rfaas_lease_function(there, 'twice', twice)
   doubled = 0
   call rfaas_map(there, twice, numbers, 8_c_size_t, doubled, 8_c_size_t, 10001_c_size_t, repeats=1)
   call check(all(doubled == 2*numbers), 'map in this process')
   call rfaas_session_close(session)
   call rfaas_finalize()
   call rfaas_finalize(ierror)
   call check(ierror == RFAAS_INVALID, 'finalized twice')
   if (failures > 0) error stop 1

contains

   !> Counts results that come in order.
   subroutine in_order(result, size)
      type(c_ptr), intent(in) :: result
      integer(c_size_t), intent(in) :: size
      integer(c_int64_t), pointer :: value
      call c_f_pointer(result, value)
      if (size == 8 .and. value == 2*numbers(total(1))) total = total + 1
   end subroutine

   !> A lease whose library is in memory, in a session with the options of a device, and a payload limit of `eager`.
   !> Every worker keeps what the init call brings. Without it the function fails with a code.
   subroutine init_calls()
      type(rfaas_init_call) :: init
      type(rfaas_lease) :: with, without
      integer(rfaas_function) :: kept
      integer(c_int64_t), target :: number, answer(1)
      integer :: w
      character(len=1024) :: path
      call get_environment_variable('TEST_LIBRARY', path)
      number = 4711
      init = rfaas_init_call('keep', c_loc(number), 8_c_size_t)
      call rfaas_lease_open(session, path, with, workers=2, init=init)
      number = 0 ! the lease has a copy
      call rfaas_lease_function(with, 'what_was_kept', kept)
      do w = 0, 1
         call rfaas_invoke(with, kept, [0_c_int64_t], 8_c_size_t, answer, 8_c_size_t, worker=w)
         call check(answer(1) == 4711, 'init call')
      end do
      call rfaas_lease_release(with)
      call rfaas_lease_open(session, path, without)
      call rfaas_invoke(without, kept, [0_c_int64_t], 8_c_size_t, answer, 8_c_size_t, ierror=ierror)
      call fails(RFAAS_FUNCTION_FAILED, 'nothing was kept, 8 bytes', 'without an init call')
      call check(rfaas_function_code() == -5, 'code of the function')
      call rfaas_lease_release(without)
      init%function = 'keeps'
      call rfaas_lease_open(session, path, without, init=init, ierror=ierror)
      call fails(RFAAS_NO_FUNCTION, '"keeps" is not in the library', 'unknown init function')
   end subroutine

   !> Rows, columns, reversed and three-dimensional sections go, and come back elsewhere.
   subroutine pieces()
      integer(c_int64_t), target, asynchronous :: a(6, 5), b(6, 5), row(5), cube(4, 5, 6), part(2, 2, 3), spare(40)
      integer(c_signed_char), target, asynchronous :: head(3), tail(3)
      type(rfaas_pieces) :: from, to, bad
      type(rfaas_request) :: request
      integer :: i, j, k
      a = reshape([(int(i, c_int64_t), i=1, 30)], [6, 5])
      cube = reshape([(int(i, c_int64_t), i=1, 120)], [4, 5, 6])
      head = [1_c_signed_char, 2_c_signed_char, 3_c_signed_char]
      b = -1
      call rfaas_add_piece(from, head)
      call rfaas_add_piece(from, a(2, :))                ! a row
      call rfaas_add_piece(from, a(6:1:-1, 3))           ! a column, backwards
      call rfaas_add_piece(from, a(1:0, :))              ! nothing
      call rfaas_add_piece(from, cube(1:4:2, 2:5:3, 1:6:2))
      call rfaas_add_piece(from, a(:, 4:5))              ! contiguous
      call rfaas_add_piece(from, a(1, 1))                ! a scalar
      call check(from%count == 1 + 1 + 1 + 6 + 1 + 1, 'pieces')
      call rfaas_add_piece(to, tail)
      call rfaas_add_piece(to, row)
      call rfaas_add_piece(to, b(:, 1))
      call rfaas_add_piece(to, part)
      call rfaas_add_piece(to, b(1:6:2, 2:5))            ! room for 12
      call rfaas_add_piece(to, b(6:6, 5))
      call rfaas_invokev(lease, echo, from, to, out_size=n)
      call check(n == 3 + 8*(5 + 6 + 12 + 12 + 1), 'size of pieces')
      call check(all(tail == head) .and. all(row == a(2, :)) .and. all(b(:, 1) == a(6:1:-1, 3)), 'row and column')
      call check(all(part == cube(1:4:2, 2:5:3, 1:6:2)), 'cube')
      call check(all([b(1:6:2, 2:5)] == [a(:, 4:5)]) .and. b(6, 5) == 1 .and. all(b(2:4:2, 2:5) == -1), 'rest')
      do i = 1, 4 ! the lists may be reused
         row = 0
         call rfaas_iinvokev(lease, echo, from, to, request)
         to%count = 0
         call rfaas_wait(request, n)
         call check(n == 291 .and. all(row == a(2, :)), 'request of pieces')
         call rfaas_add_piece(to, tail)
         call rfaas_add_piece(to, row)
         call rfaas_add_piece(to, spare)
      end do
      call rfaas_invokev(lease, echo, bad, bad, out_size=n)
      call check(n == 0, 'no pieces')
      call assumed(bad, a)
      call rfaas_invokev(lease, echo, bad, to, ierror=ierror)
      call fails(RFAAS_INVALID, 'in[0]', 'assumed size')
      do k = 1, 100 ! many
         do j = 1, 5
            call rfaas_add_piece(bad, a(:, j))
         end do
      end do
      call check(bad%count == 501, 'count of many')
   end subroutine

   subroutine tables() ! the leases below get the first one
      real(c_double), target, asynchronous :: energies(10, 20)
      type(rfaas_pieces) :: parts
      energies = 0.5_c_double
      call rfaas_add_piece(parts, energies(:, 2:20:2))
      call rfaas_table_put(session, 'energies', parts)
      call rfaas_table_put_at(session, 'levels', parts, int(z'300000000000', c_int64_t))
      call rfaas_table_put(session, 'levels', parts, ierror)
      call fails(RFAAS_INVALID, 'has a table "levels" already', 'a name that is taken')
      call rfaas_table_put_at(session, 'odd', parts, 3_c_int64_t, ierror)
      call fails(RFAAS_INVALID, 'address 0x3 is not a multiple of the page size', 'an address')
      call rfaas_table_drop(session, 'levels')
      call rfaas_table_drop(session, 'levels', ierror)
      call fails(RFAAS_INVALID, 'no table "levels"', 'a table that was dropped')
   end subroutine

   subroutine seeds() ! the setup function counts its call
      type(rfaas_session) :: own
      type(rfaas_lease) :: maker, child
      type(rfaas_seed) :: made, opened
      type(rfaas_seed_details) :: details
      type(rfaas_worker_start) :: start
      integer(rfaas_function) :: count
      integer(c_int64_t) :: calls(1)
      call rfaas_session_open(own)
      call rfaas_lease_open(own, text, maker, memory=64_c_int64_t*2**20)
      call rfaas_seed_create(maker, 'ecko', 'counter', made, ierror=ierror)
      call check(ierror == RFAAS_NO_FUNCTION, 'no setup function')
      call rfaas_seed_create(maker, 'count', 'counter', made, calls, c_sizeof(calls), ttl=60.0_c_double)
      call rfaas_seed_open(own, rfaas_seed_name(made), opened)
      call rfaas_seed_info(opened, details)
      call check(details%setup == 'count' .and. details%left > 0 .and. details%left <= 60, 'details of a seed')
      call rfaas_lease_open(own, text, child, seed_name=rfaas_seed_name(opened))
      call rfaas_lease_function(child, 'count', count)
      call rfaas_invoke(child, count, calls, 0_c_size_t, calls, c_sizeof(calls))
      call rfaas_worker_origin(child, 0, start)
      call check(calls(1) == 2 .and. start%start == RFAAS_START_SEEDED, 'a worker of a seed')
      call rfaas_table_put_seed(own, 'counter', rfaas_seed_name(made), ierror)
      call fails(RFAAS_INVALID, 'count must call rfaas_set_root', 'a seed without a root')
      call rfaas_seed_release(opened)
      call rfaas_seed_release(made)
      call rfaas_seed_release(made, ierror)
      call check(ierror == RFAAS_INVALID, 'a seed that was released')
      call rfaas_session_close(own)
   end subroutine

   subroutine assumed(list, array)
      type(rfaas_pieces), intent(inout) :: list
      integer(c_int64_t), target, asynchronous :: array(*)
      call rfaas_add_piece(list, array)
   end subroutine

   subroutine from_memory()
      type(rfaas_session) :: mine
      integer(c_signed_char), allocatable, target :: bytes(:)
      integer :: unit, length
      inquire (file=text, size=length)
      allocate (bytes(length))
      open (newunit=unit, file=text, access='stream', form='unformatted', action='read')
      read (unit) bytes
      close (unit)
      call rfaas_session_open(mine, gid_index=-1, traffic_class=0, service_level=0, pkey_index=0, port=0, mtu=0, cached_leases=-1, &
                              allow_plaintext=.true.)
      call rfaas_lease_open(mine, '', there, library_data=c_loc(bytes), library_size=size(bytes, kind=c_size_t), &
                            eager=4096, bulk=RFAAS_NO_BULK)
      call rfaas_lease_function(there, 'echo', echo)
      out = 0
      call rfaas_invoke(there, echo, in, c_sizeof(in), out, c_sizeof(out))
      call check(all(abs(in - out) <= 0), 'library in memory')
      call rfaas_invoke(there, echo, many, 4097_c_size_t, out, 8_c_size_t, ierror=ierror)
      call fails(RFAAS_TOO_LARGE, '4097', 'no bulk')
      call rfaas_session_close(mine)
   end subroutine

   !> A handle becomes one of another object, as one that C code opened does.
   subroutine adoption()
      type(rfaas_lease) :: adopted
      call rfaas_lease_open(session, text, there)
      adopted%handle = there%handle
      there%handle = c_null_ptr
      call rfaas_lease_function(adopted, 'echo', echo)
      out = 0
      call rfaas_invoke(adopted, echo, in, c_sizeof(in), out, c_sizeof(out))
      call check(all(abs(in - out) <= 0), 'an adopted lease')
      call rfaas_lease_release(adopted)
   end subroutine

   !> The last call must have failed so, with a text that names the word.
   subroutine fails(status, word, what)
      integer, intent(in) :: status
      character(len=*), intent(in) :: word, what
      character(len=:), allocatable :: said
      said = rfaas_last_error()
      call check(ierror == status, what)
      call check(index(said, word) > 0, what)
   end subroutine

   subroutine check(good, what)
      logical, intent(in) :: good
      character(len=*), intent(in) :: what
      if (.not. good) then
         write (error_unit, '(4a)') 'fortran_test: ', what, ': ', rfaas_last_error()
         failures = failures + 1
      end if
   end subroutine
end program
