!> The Fortran module with a resource manager and two executors of two cores: places, leases at them, leases across them, what
!> happens to executors. The argument is the path of build/functions/echo.so. Exit status 0: all good.
module heard
   use rfaas
   implicit none
   character(len=256) :: open(2) = ''
   integer :: n = 0
contains
   logical function hear(change)
      type(rfaas_change), intent(in) :: change
      if (change%state == RFAAS_EXECUTOR_OPEN .and. .not. any(open == change%executor)) then
         n = n + 1
         open(min(n, 2)) = change%executor
      end if
      hear = n == 2
   end function
   logical function deaf(change)
      type(rfaas_change), intent(in) :: change
      deaf = change%state < 0
   end function
end module

program places_test
   use heard
   use, intrinsic :: iso_c_binding, only: c_double
   use, intrinsic :: iso_fortran_env, only: error_unit
   implicit none
   integer :: failures = 0, ierror, count, i, w1, w2
   type(rfaas_session) :: session
   type(rfaas_lease) :: lease, leases(4)
   type(rfaas_place) :: places(2)
   type(rfaas_change) :: changes(8)
   type(rfaas_lease_details) :: details
   character(len=1024) :: library

   call get_command_argument(1, library)
   call rfaas_init()
   call rfaas_session_open(session)
   call rfaas_session_watch(session, hear, 20.0_c_double)
   call check(n == 2 .and. open(1) /= open(2), 'two executors')
   call rfaas_session_watch(session, deaf, 0.02_c_double, ierror)
   call check(ierror == RFAAS_DEADLINE, 'nothing more')
   call rfaas_session_changes(session, changes, count)
   call check(count >= 0, 'changes')

   do i = 1, 4000 ! what was released is on the board a moment later
      call rfaas_places(session, library, places, workers=2, ierror=ierror)
      if (ierror /= RFAAS_BUSY) exit
      call rfaas_session_watch(session, deaf, 0.005_c_double, w1)
   end do
   call check(ierror == RFAAS_OK .and. places(1)%executor /= places(2)%executor, 'places')
   do i = 1, 2
      call rfaas_lease_open_at(session, library, places(i), lease, workers=2, ierror=ierror)
      call check(ierror == RFAAS_OK, 'lease at a place')
      call rfaas_lease_info(lease, details)
      call check(details%executor == places(i)%executor, 'there')
      call use_it(lease)
      call rfaas_lease_release(lease)
   end do
   do i = 1, 4000
      call rfaas_lease_open_across(session, library, leases, count, workers=4, ierror=ierror)
      if (ierror /= RFAAS_BUSY) exit
      call rfaas_session_watch(session, deaf, 0.005_c_double, w1)
   end do
   call check(ierror == RFAAS_OK .and. count == 2, 'across')
   call rfaas_lease_workers(leases(1), w1)
   call rfaas_lease_workers(leases(2), w2)
   call check(w1 + w2 == 4, 'workers')
   do i = 1, count
      call use_it(leases(i))
   end do
   call rfaas_lease_open_across(session, library, leases(3:), count, workers=5, ierror=ierror)
   call check(ierror == RFAAS_BUSY .and. count == 0, 'five workers on four cores')
   call rfaas_finalize()
   if (failures > 0) error stop 1

contains

   subroutine use_it(lease)
      type(rfaas_lease), intent(in) :: lease
      integer(rfaas_function) :: echo
      integer(c_int64_t) :: in(2), out(2)
      in = [3, 4]
      out = 0
      call rfaas_lease_function(lease, 'echo', echo)
      call rfaas_invoke(lease, echo, in, 16_c_size_t, out, 16_c_size_t)
      call check(all(in == out), 'echo')
   end subroutine

   subroutine check(good, what)
      logical, intent(in) :: good
      character(len=*), intent(in) :: what
      if (.not. good) then
         write (error_unit, '(4a)') 'places_test: ', what, ': ', rfaas_last_error()
         failures = failures + 1
      end if
   end subroutine
end program
