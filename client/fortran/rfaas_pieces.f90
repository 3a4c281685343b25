!> Lists of pieces for rfaas_invokev and rfaas_iinvokev. Programs use the module rfaas.
module rfaas_piece_lists
   use, intrinsic :: iso_c_binding
   use rfaas_c
   implicit none
   private
   public :: rfaas_add_piece

   !> Pieces of memory, in order: pieces(:count). count = 0 empties a list.
   type, public :: rfaas_pieces
      type(rfaas_piece_c), allocatable :: pieces(:)
      integer(c_size_t) :: count = 0
   end type

   interface
      !> rfaas_pieces.c: describes an array by pieces, of which the first `room` are stored, and returns how many there are.
      integer(c_size_t) function describe(array, pieces, room) bind(c, name='rfaas_fortran_pieces')
         import
         type(*), dimension(..), asynchronous :: array
         type(rfaas_piece_c), intent(inout) :: pieces(*)
         integer(c_size_t), value :: room
      end function
   end interface

contains

   !> Appends an array of any type and rank, or a section of one, which is not copied: a(:, 2), a(1:n:2), a(n:1:-1, 3:5). The array must
   !> exist until the calls with the list have ended, so do not pass an expression or a section with a vector subscript, which are
   !> temporary copies. The array needs the asynchronous (or target) attribute in the caller.
   subroutine rfaas_add_piece(list, array)
      type(rfaas_pieces), intent(inout) :: list
      type(*), dimension(..), asynchronous :: array
      type(rfaas_piece_c), allocatable :: larger(:)
      integer(c_size_t) :: room, more
      if (.not. allocated(list%pieces)) allocate (list%pieces(8))
      room = size(list%pieces, kind=c_size_t) - list%count
      more = describe(array, list%pieces(list%count + 1:), room)
      if (more > room) then
         allocate (larger(2*(list%count + more)))
         larger(:list%count) = list%pieces(:list%count)
         call move_alloc(larger, list%pieces)
         more = describe(array, list%pieces(list%count + 1:), more)
      end if
      list%count = list%count + more
   end subroutine
end module
