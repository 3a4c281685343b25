/* Describes arrays of Fortran by pieces. ISO_Fortran_binding.h belongs to the Fortran compiler, so compile this file with the C compiler of
 * the same vendor and version. */
#include <ISO_Fortran_binding.h>
#include <rfaas.h>

size_t rfaas_fortran_pieces(const CFI_cdesc_t *array, rfaas_piece pieces[], size_t room);

/* The leading dimensions without gaps are one element, the next dimension has the stride, and each index of the others is a piece.
 * Stores the first `room` pieces and returns how many there are. */
size_t rfaas_fortran_pieces(const CFI_cdesc_t *array, rfaas_piece pieces[], size_t room) {
    int rank = array->rank, d = 0, next;
    rfaas_piece p = RFAAS_PIECE(array->base_addr, array->elem_len);
    CFI_index_t at[CFI_MAX_RANK] = {0};
    for (int i = 0; i < rank; i++) {
        if (array->dim[i].extent == 0)
            return 0;
        if (array->dim[i].extent < 0) /* assumed-size: the call refuses it, as bytes at NULL */
            p.base = NULL, rank = 0;
    }
    for (; d < rank && (array->dim[d].extent == 1 || array->dim[d].sm == (CFI_index_t)p.size); d++)
        p.size *= (size_t)array->dim[d].extent;
    if (d < rank) {
        p.count = (size_t)array->dim[d].extent;
        p.stride = array->dim[d++].sm;
    }
    for (size_t n = 0;; n++) {
        if (n < room) {
            pieces[n] = p;
            for (int i = d; i < rank; i++)
                pieces[n].base = (char *)pieces[n].base + at[i] * array->dim[i].sm;
        }
        for (next = d; next < rank && ++at[next] == array->dim[next].extent; next++)
            at[next] = 0;
        if (next == rank)
            return n + 1;
    }
}
