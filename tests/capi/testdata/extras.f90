! Functions that use each procedure of the module rfaas_function, for TestFortranFunctions.

! In: a table's name. Out: integers of 64 bits: capacity, cores, calls so far on this worker, the table's bytes, their sum.
function look(args, size, res) bind(c) result(bytes)
   use :: rfaas_function
   implicit none
   type(c_ptr), value :: args, res
   integer(c_int32_t), value :: size
   integer(c_int32_t) :: bytes
   integer(c_int64_t), pointer :: out(:), calls
   character(kind=c_char), pointer :: name(:)
   integer(c_int8_t), pointer :: values(:)
   character(len=32) :: text
   integer(c_size_t) :: n
   integer :: i
   logical :: fresh
   type(c_ptr) :: table
   bytes = 40
   if (rfaas_result_capacity() < 40) return
   call c_f_pointer(res, out, [5])
   call c_f_pointer(rfaas_state(8_c_size_t, fresh), calls)
   if (fresh .and. calls /= 0) then
      bytes = rfaas_fail('the state is not zeroed')
      return
   end if
   if (c_associated(rfaas_state(16_c_size_t))) then
      bytes = rfaas_fail('the state has grown')
      return
   end if
   calls = calls + 1
   call c_f_pointer(args, name, [size])
   text = ''
   do i = 1, min(size, 32)
      text(i:i) = name(i)
   end do
   table = rfaas_table(text, n)
   out = [rfaas_result_capacity(), int(rfaas_worker_cores(), c_int64_t), calls, int(n, c_int64_t), 0_c_int64_t]
   if (.not. c_associated(table)) return
   call c_f_pointer(table, values, [n])
   out(5) = sum(int(values, c_int64_t))
end function

! Fails with the input as message. Blanks at its end and what printf would replace must not matter.
function complain(args, size, res) bind(c) result(bytes)
   use rfaas_function, only: c_ptr, c_int32_t, c_char, c_f_pointer, rfaas_fail
   implicit none
   type(c_ptr), value :: args, res
   integer(c_int32_t), value :: size
   integer(c_int32_t) :: bytes
   character(kind=c_char), pointer :: text(:)
   character(len=600) :: message
   integer :: i
   call c_f_pointer(args, text, [size])
   message = ''
   do i = 1, min(size, 600)
      message(i:i) = text(i)
   end do
   bytes = rfaas_fail(message)
end function

! Fails with a code.
function refuse(args, size, res) bind(c) result(bytes)
   use rfaas_function
   implicit none
   type(c_ptr), value :: args, res
   integer(c_int32_t), value :: size
   integer(c_int32_t) :: bytes
   bytes = rfaas_fail_code(-17_c_int32_t, 'not today')
end function

function unsigned(args, size, res) bind(c) result(bytes)
   use rfaas_function
   implicit none
   type(c_ptr), value :: args, res
   integer(c_int32_t), value :: size
   integer(c_int32_t) :: bytes
   bytes = 0
   if (rfaas_unsigned(-1_c_int32_t) /= 4294967295_c_int64_t .or. rfaas_unsigned(7_c_int32_t) /= 7) bytes = rfaas_fail('wrong')
end function

! Setup function: names ten squares for functions that map the seed.
function plant(args, size, res) bind(c) result(bytes)
   use rfaas_function
   implicit none
   type(c_ptr), value :: args, res
   integer(c_int32_t), value :: size
   integer(c_int32_t) :: bytes
   integer(c_int8_t), allocatable, target, save :: squares(:)
   integer :: i
   squares = [(int(i*i, c_int8_t), i=0, 9)]
   call rfaas_set_root(c_loc(squares), 10_c_size_t)
   bytes = 0
end function
