! Evaluates a polynomial at many points. Its coefficients stay in the worker. rfaas-cc -o polynomial.so polynomial.f90

! Input: the coefficients as doubles, that of the highest power first. The worker keeps them.
function polynomial_begin(args, size, res) bind(c) result(bytes)
   use rfaas_function
   implicit none
   type(c_ptr), value :: args, res
   integer(c_int32_t), value :: size
   integer(c_int32_t) :: bytes
   integer, parameter :: most = 64
   real(c_double), pointer :: c(:), kept(:)
   character(len=80) :: text
   type(c_ptr) :: state
   integer :: n
   n = int(rfaas_unsigned(size)/8)
   if (n < 1 .or. n > most .or. 8*n /= size) then
      write (text, '(a,i0,a,i0)') 'input of ', rfaas_unsigned(size), ' bytes: want 1 double or more and at most ', most
      bytes = rfaas_fail(text)
      return
   end if
   state = rfaas_state(int(8*(most + 1), c_size_t))
   if (.not. c_associated(state)) then
      bytes = rfaas_fail('no memory for the coefficients')
      return
   end if
   call c_f_pointer(args, c, [n])
   call c_f_pointer(state, kept, [most + 1])
   kept(1) = n
   kept(2:n + 1) = c
   bytes = 0
end function

! Input: points. Result: the values of the polynomial there.
function polynomial_at(args, size, res) bind(c) result(bytes)
   use rfaas_function
   implicit none
   type(c_ptr), value :: args, res
   integer(c_int32_t), value :: size
   integer(c_int32_t) :: bytes
   integer, parameter :: most = 64
   real(c_double), pointer :: x(:), y(:), kept(:)
   logical :: fresh
   integer :: i
   type(c_ptr) :: state
   state = rfaas_state(int(8*(most + 1), c_size_t), fresh)
   if (fresh .or. .not. c_associated(state)) then
      bytes = rfaas_fail('this worker has no coefficients: call polynomial_begin first')
      return
   end if
   bytes = size
   if (rfaas_unsigned(size) > rfaas_result_capacity()) return ! the caller gets the size that it should offer
   call c_f_pointer(state, kept, [most + 1])
   call c_f_pointer(args, x, [rfaas_unsigned(size)/8])
   call c_f_pointer(res, y, [rfaas_unsigned(size)/8])
   y = 0
   do i = 2, int(kept(1)) + 1
      y = y*x + kept(i)
   end do
end function
