package mpi

// #include "binding.h"
import "C"

import "reflect"

// Number is what elements of messages may be.
type Number interface {
	~int8 | ~int16 | ~int32 | ~int64 | ~int | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~uint | ~float32 | ~float64 | ~complex64 | ~complex128
}

// kinds are MPI's types for those of Go.
var kinds = map[reflect.Kind]C.int{
	reflect.Int8: C.T_INT8, reflect.Int16: C.T_INT16, reflect.Int32: C.T_INT32, reflect.Int64: C.T_INT64, reflect.Int: intKind(C.T_INT32, C.T_INT64),
	reflect.Uint8: C.T_UINT8, reflect.Uint16: C.T_UINT16, reflect.Uint32: C.T_UINT32, reflect.Uint64: C.T_UINT64, reflect.Uint: intKind(C.T_UINT32, C.T_UINT64),
	reflect.Float32: C.T_FLOAT32, reflect.Float64: C.T_FLOAT64, reflect.Complex64: C.T_COMPLEX64, reflect.Complex128: C.T_COMPLEX128,
}

func intKind(of32, of64 C.int) C.int {
	if ^uint(0)>>32 == 0 {
		return of32
	}
	return of64
}

func datatype[T Number]() C.MPI_Datatype { return C.datatype(kinds[reflect.TypeFor[T]().Kind()]) }

// Op combines elements of several ranks.
type Op int

// Operations. Logical and bitwise ones are for integers, OpMax and OpMin not for complex numbers: MPI refuses others.
const (
	OpSum  Op = C.O_SUM
	OpMax  Op = C.O_MAX
	OpMin  Op = C.O_MIN
	OpProd Op = C.O_PROD
	OpLAND Op = C.O_LAND // logical and: 0 is false
	OpLOR  Op = C.O_LOR
	OpBAND Op = C.O_BAND
	OpBOR  Op = C.O_BOR
	OpBXOR Op = C.O_BXOR
)

func (o Op) check(op string) error {
	if o < OpSum || o > OpBXOR {
		return fail(op, "operation %d is not one of OpSum to OpBXOR", int(o))
	}
	return nil
}
