! Fortran: module arrays, saved variables, allocatables, formatted output, random numbers.
module state
  implicit none
  real(8), allocatable :: table(:)
  integer, save :: calls = 0
  character(len=40) :: label = 'none'
end module

integer(c_int32_t) function setup(in, size, out) bind(c, name='setup')
  use iso_c_binding
  use state
  type(c_ptr), value :: in, out
  integer(c_int32_t), value :: size
  integer :: i
  integer, allocatable :: seeds(:)
  allocate (table(100000))
  do i = 1, 100000
    table(i) = sqrt(real(i, 8))
  end do
  call random_seed(size=i)
  allocate (seeds(i))
  seeds = 12345
  call random_seed(put=seeds)
  write (label, '(a,f8.3)') 'sum ', sum(table(1:100))
  setup = 0
end function

integer(c_int32_t) function query(in, size, out) bind(c, name='query')
  use iso_c_binding
  use state
  type(c_ptr), value :: in, out
  integer(c_int32_t), value :: size
  character(kind=c_char), pointer :: text(:)
  character(len=200) :: line
  real(8) :: r
  integer :: i
  calls = calls + 1
  call random_number(r)
  write (line, '(i4,1x,a,1x,f12.6,1x,f12.9)') calls, trim(label), table(99999), r
  call c_f_pointer(out, text, [201])
  do i = 1, len_trim(line)
    text(i) = line(i:i)
  end do
  text(len_trim(line) + 1) = c_null_char
  query = len_trim(line)
end function
