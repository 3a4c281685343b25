"""Functions of a lease, and the arrays of their results."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _rfaas
from ._generated import Element, InvalidError, Operation

if TYPE_CHECKING:
    from typing import Unpack

    import numpy
    import numpy.typing

    from ._generated import MapOptions
    from ._rfaas import Buffer


def dtype_of(value: Any) -> numpy.dtype:
    import numpy

    return numpy.dtype(value)


def new_result(name: str, dtype: Any, shape: Any) -> numpy.ndarray:
    """An array for a result, if the first argument is not a numpy array."""
    import numpy

    if dtype is None or shape is None:
        raise TypeError(f"{name}: give dtype and shape of the result, because the first argument is not a numpy array")
    return numpy.empty(shape, dtype)


def part_of(name: str, result: Any, size: int) -> Any:
    """The first bytes of an array or another buffer, when a function has returned fewer than it has room for."""
    dtype = getattr(result, "dtype", None)
    if dtype is None:
        return memoryview(result).cast("B")[:size]
    if size % dtype.itemsize:
        raise ValueError(f"{name} returned {size} bytes, which is not a multiple of the {dtype.itemsize} bytes of {dtype}: give dtype and shape")
    return result.reshape(-1)[: size // dtype.itemsize]


def _items(self: _rfaas.Function, x: Any, copy: bool) -> tuple[Any, tuple[int, ...], Any]:
    """The argument of a map as contiguous memory, its shape and its dtype, or None if it is not a numpy array."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        view = memoryview(x)
        if view.format == "O" or not view.c_contiguous:
            raise TypeError(f"{self.name}: {x!r} is not a contiguous buffer of numbers")
        return view, view.shape or (len(view),), None
    import numpy

    if dtype.hasobject:
        raise TypeError(f"{self.name}: the array contains Python objects: convert it, for example by astype(float)")
    if self.takes and self.takes[0] is not None and dtype != self.takes[0]:
        raise TypeError(f"{self.name}: the array has dtype {dtype}, want {self.takes[0]}: convert it by astype")
    if not x.ndim:
        raise ValueError(f"{self.name}: an array without dimensions has no items")
    if not copy and not x.flags.c_contiguous:
        raise ValueError(f"{self.name}: the array is not contiguous, and copy=False refuses it: pass numpy.ascontiguousarray of it")
    return numpy.ascontiguousarray(x), x.shape, dtype


def map(self: _rfaas.Function, x: Buffer, out: Any = None, *, dtype: Any = None, shape: Any = None, copy: bool = True, **options: Unpack[MapOptions]) -> Any:
    """Applies the function to all items of x, which are x[0], x[1] and so on, on all workers of the lease.

    One call of the function gets several consecutive items and returns their results one after the other.

    out: receives the results; one for each item. Without it, a new array with `dtype` and, for one result, `shape` does. They default
        to those of x and its items.
    options: chunk (items of one call), timeout and repeats.

    In the main thread, Ctrl-C is answered about every 0.2 s, or after one item of each worker if that takes longer.
    """
    items, whole, own = _items(self, x, copy)
    dtype = dtype or self.dtype
    if out is None:
        dtype = dtype or own
        if dtype is None:
            raise TypeError(f"{self.name}.map: give out or dtype, because the argument is not a numpy array")
        out = _empty((whole[0], *(whole[1:] if shape is None else _tuple(shape))), dtype)
    elif dtype is not None and getattr(out, "dtype", dtype) != dtype:
        raise TypeError(f"{self.name}.map: out has dtype {out.dtype}, want {dtype}")
    self._map(items, out, whole[0], 0, 0, **options)
    return out


def reduce(self: _rfaas.Function, x: Buffer, operation: str | Operation = "sum", *, initial: Any = None, dtype: Any = None, shape: Any = (), copy: bool = True,
           **options: Unpack[MapOptions]) -> Any:
    """Applies the function to all items of x as map does, and combines the results by "sum", "min" or "max".

    The results are combined in the order of the items, so the same input gives the same bits.

    initial: the value to begin with; the default is the neutral one of the operation.
    dtype, shape: of the result of one item: int32, int64, float32 or float64; a scalar without shape.
    """
    import numpy

    kind = Operation[operation.upper()] if isinstance(operation, str) else Operation(operation)
    items, whole, own = _items(self, x, copy)
    what = numpy.dtype(dtype or self.dtype or own)
    if what.name.upper() not in Element.__members__ or not what.isnative:
        raise InvalidError(f"{self.name}.reduce: results of {what} cannot be combined: want int32, int64, float32 or float64", -200, False)
    if initial is None:
        initial = 0
        if kind != Operation.SUM:
            bounds = numpy.finfo(what) if what.kind == "f" else numpy.iinfo(what)
            largest = numpy.inf if what.kind == "f" else bounds.max
            initial = largest if kind == Operation.MIN else -numpy.inf if what.kind == "f" else bounds.min
    result = _empty(_tuple(shape), what)
    result[...] = initial
    self._map(items, result, whole[0], int(kind), int(Element[what.name.upper()]), **options)
    return result[()]


def _tuple(shape: Any) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _empty(shape: tuple[int, ...], dtype: Any) -> numpy.ndarray:
    import numpy

    array = numpy.empty(shape, dtype)
    if array.dtype.hasobject:
        raise TypeError("a result cannot contain Python objects")
    return array


# The type of the extension gets the methods that are written in Python. A class derived from it would be called more slowly.
_rfaas.Function.map = map  # type: ignore[method-assign]
_rfaas.Function.reduce = reduce  # type: ignore[method-assign]
