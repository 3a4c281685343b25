!> What functions that rfaas executes may use, in Fortran. A function of rfaas is a Fortran function with this interface:
!>
!>     function f(args, size, res) bind(c) result(bytes)
!>        use rfaas_function
!>        type(c_ptr), value :: args, res          ! input and place of the result, aligned to 64
!>        integer(c_int32_t), value :: size        ! bytes of the input
!>        integer(c_int32_t) :: bytes              ! bytes of the result
!>        real(c_double), pointer :: x(:), y(:)
!>        if (mod(rfaas_unsigned(size), 8_c_int64_t) /= 0) then
!>           bytes = rfaas_fail('input is not an array of doubles')
!>           return
!>        end if
!>        bytes = size
!>        if (rfaas_unsigned(bytes) > rfaas_result_capacity()) return ! the caller gets RFAAS_RESULT_TOO_LARGE and the size
!>        call c_f_pointer(args, x, [rfaas_unsigned(size)/8])
!>        call c_f_pointer(res, y, [rfaas_unsigned(size)/8])
!>        y = 2*x
!>     end function
!>
!> Compile with rfaas-cc, which compiles this module too. Without it, compile this file with your Fortran compiler and
!> rfaas_function_fortran.c with a C compiler, both with -fPIC, and link the objects into the library.
!> rfaas_function(3) says what each procedure does, also where the library runs in another program.
module rfaas_function
   use, intrinsic :: iso_c_binding
   implicit none
   public
   private :: fail_c, fail_code_c, state_c, table_c, capacity_c

   interface
      integer(c_int32_t) function capacity_c() bind(c, name='rfaas_fortran_result_capacity')
         import
      end function
      integer(c_int32_t) function fail_c(text, length) bind(c, name='rfaas_fortran_fail')
         import
         character(kind=c_char), intent(in) :: text(*)
         integer(c_size_t), value :: length
      end function
      integer(c_int32_t) function fail_code_c(code, text, length) bind(c, name='rfaas_fortran_fail_code')
         import
         integer(c_int32_t), value :: code
         character(kind=c_char), intent(in) :: text(*)
         integer(c_size_t), value :: length
      end function
      type(c_ptr) function state_c(bytes, fresh) bind(c, name='rfaas_fortran_state')
         import
         integer(c_size_t), value :: bytes
         integer(c_int), intent(out) :: fresh
      end function
      type(c_ptr) function table_c(name, bytes) bind(c, name='rfaas_fortran_table')
         import
         character(kind=c_char), intent(in) :: name(*)
         integer(c_size_t), intent(out) :: bytes
      end function
      !> Cores that this worker is pinned to, at least 1.
      integer(c_int32_t) function rfaas_worker_cores() bind(c, name='rfaas_fortran_worker_cores')
         import
      end function
      !> Calls a subroutine, with the interface `subroutine f(arg) bind(c)` and `type(c_ptr), value :: arg`, in each worker that starts from the
      !> seed of this init call: rfaas_on_resume(c_funloc(f), arg). Returns 0, or -1 if 32 subroutines are registered.
      integer(c_int) function rfaas_on_resume(f, arg) bind(c, name='rfaas_fortran_on_resume')
         import
         type(c_funptr), value :: f
         type(c_ptr), value :: arg
      end function
      !> The number of this worker among those of its node that have started from the same seed, from 1 on. 0: it has no seed.
      integer(c_int32_t) function rfaas_child_number() bind(c, name='rfaas_fortran_child_number')
         import
      end function
      !> In a setup function, chooses what functions of other libraries get from rfaas_table if a program publishes this seed as a table:
      !> call rfaas_set_root(c_loc(x), bytes). x must be allocated.
      subroutine rfaas_set_root(root, bytes) bind(c, name='rfaas_fortran_set_root')
         import
         type(c_ptr), value :: root
         integer(c_size_t), value :: bytes
      end subroutine
   end interface

contains

   !> Converts a size in bytes from rfaas, an unsigned integer of 32 bits, which Fortran reads as a signed one.
   pure integer(c_int64_t) function rfaas_unsigned(size)
      integer(c_int32_t), intent(in) :: size
      rfaas_unsigned = iand(int(size, c_int64_t), int(z'FFFFFFFF', c_int64_t))
   end function

   !> Bytes that the caller accepts as result.
   integer(c_int64_t) function rfaas_result_capacity()
      rfaas_result_capacity = rfaas_unsigned(capacity_c())
   end function

   !> Marks this call as failed with a message, without its trailing blanks. Returns 0, the size of the result:
   !>     bytes = rfaas_fail('negative volatility')
   integer(c_int32_t) function rfaas_fail(text)
      character(len=*, kind=c_char), intent(in) :: text
      rfaas_fail = fail_c(text, len_trim(text, kind=c_size_t))
   end function

   !> The same, with a code for the caller.
   integer(c_int32_t) function rfaas_fail_code(code, text)
      integer(c_int32_t), intent(in) :: code
      character(len=*, kind=c_char), intent(in) :: text
      rfaas_fail_code = fail_code_c(code, text, len_trim(text, kind=c_size_t))
   end function

   !> Memory that this worker keeps between calls, zeroed at first. fresh is true if this call made it. Returns c_null_ptr if
   !> bytes is 0 or more than the first call asked for, or if memory is short.
   type(c_ptr) function rfaas_state(bytes, fresh)
      integer(c_size_t), intent(in) :: bytes
      logical, intent(out), optional :: fresh
      integer(c_int) :: made
      rfaas_state = state_c(bytes, made)
      if (present(fresh)) fresh = made /= 0
   end function

   !> The bytes that the caller's program has published under this name, and how many there are. c_null_ptr and 0: no such table.
   type(c_ptr) function rfaas_table(name, bytes)
      character(len=*, kind=c_char), intent(in) :: name
      integer(c_size_t), intent(out) :: bytes
      rfaas_table = table_c(trim(name)//c_null_char, bytes)
   end function
end module
