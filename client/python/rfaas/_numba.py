"""Functions that numba compiles, for workers that have neither numba nor Python.

numba gives the text of its LLVM code for a C callback (cfunc.inspect_llvm). llvmlite compiles it for a processor that all nodes have, and rfaas-cc links it
with a small C file, which takes the place of numba's runtime. These are public interfaces. numba's own compiler of libraries (pycc) makes modules of
Python, and its compiled code is for the processor of the client.
"""
from __future__ import annotations

import io
import pickle
import re
from typing import Any, Callable

from ._generated import Error

CODE = 0x6E756D62  # of rfaas_fail_code, for exceptions
ROOM = 239  # bytes of a pickle that fit into the text of an error as hexadecimal digits
# How numba's pickles of exceptions begin: module and name of the class, and often a text, which may be cut off.
CUT = re.compile(rb"\x80\x04\x95.{8}\x8c.(\w+)\x94\x8c.(\w+)\x94\x93\x94(?:\x8c.|X.{4})(.*)", re.DOTALL)

# What code of numba needs: memory for arrays, and functions by which a callback reports an exception. Its message is numba's pickle of the exception.
RUNTIME = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <rfaas_function.h>
#define HIDDEN __attribute__((visibility("hidden")))
typedef struct MemInfo { size_t references; void (*destructor)(void *, size_t, void *); void *info, *data; size_t size; void *external; } MemInfo;
HIDDEN void *NRT_Allocate(size_t n) { return malloc(n); }
HIDDEN void *NRT_Reallocate(void *p, size_t n) { return realloc(p, n); }
HIDDEN void NRT_Free(void *p) { free(p); }
HIDDEN MemInfo *NRT_MemInfo_alloc_safe_aligned(size_t n, unsigned align) {
    MemInfo *m = malloc(sizeof *m + n + 2 * align);
    if (m)
        *m = (MemInfo){ 1, 0, 0, (void *)(((uintptr_t)(m + 1) + align - 1) / align * align), n, 0 };
    return m;
}
HIDDEN MemInfo *NRT_MemInfo_alloc_aligned(size_t n, unsigned align) { return NRT_MemInfo_alloc_safe_aligned(n, align); }
/* Memory that grows, of lists. The information marks it as a block of its own. */
HIDDEN MemInfo *NRT_MemInfo_new_varsize_dtor(size_t n, void (*destructor)(void *, size_t, void *)) {
    MemInfo *m = malloc(sizeof *m);
    if (m)
        *m = (MemInfo){ 1, destructor, (void *)1, malloc(n), n, 0 };
    return m;
}
HIDDEN MemInfo *NRT_MemInfo_new_varsize(size_t n) { return NRT_MemInfo_new_varsize_dtor(n, NULL); }
HIDDEN void *NRT_MemInfo_varsize_alloc(MemInfo *m, size_t n) { m->size = n; return m->data = malloc(n); }
HIDDEN void *NRT_MemInfo_varsize_realloc(MemInfo *m, size_t n) { m->size = n; return m->data = realloc(m->data, n); }
HIDDEN void NRT_MemInfo_varsize_free(MemInfo *m, void *p) {
    free(p);
    if (p == m->data)
        m->data = NULL;
}
HIDDEN void NRT_MemInfo_call_dtor(MemInfo *m) {
    if (m->destructor)
        m->destructor(m->data, m->size, NULL);
    if (m->info)
        free(m->data);
    free(m);
}
static char raised[2 * %d + 2];
HIDDEN void numba_gil_ensure(void *state) { (void)state; }
HIDDEN void numba_gil_release(void *state) { (void)state; }
HIDDEN void *numba_unpickle(const char *data, int n, const char *hash) {
    static const char digits[] = "0123456789abcdef";
    int i = 0;
    (void)hash;
    for (; i < n && 2 * i + 2 < (int)sizeof raised; i++)
        raised[2 * i] = digits[(unsigned char)data[i] >> 4], raised[2 * i + 1] = digits[data[i] & 15];
    raised[2 * i] = 0;
    return raised;
}
HIDDEN int numba_do_raise(void *e) { (void)e; return 0; }
HIDDEN void *PyExc_SystemError, *PyExc_StopIteration, *PyExc_MemoryError;
HIDDEN void PyErr_SetNone(void *e) { (void)e; }
HIDDEN void PyErr_SetString(void *e, const char *text) { (void)e; strncpy(raised, text, sizeof raised - 1); }
HIDDEN void PyErr_Clear(void) {}
HIDDEN void *PyUnicode_FromString(const char *s) { return (void *)s; }
HIDDEN void Py_DecRef(void *o) { (void)o; }
HIDDEN void PyErr_WriteUnraisable(void *o) { (void)o; rfaas_fail_code(%d, "numba:%%s", raised); }
HIDDEN void Py_FatalError(const char *text) { rfaas_fail("%%s", text); abort(); }
""" % (ROOM, CODE)

WRAPPER = """
uint32_t native_{name}(void *, uint32_t, void *) __asm__("{native}");
uint32_t {name}(void *args, uint32_t size, void *res) {{
    if (size % {size_in})
        return rfaas_fail("{name}: the payload has %u bytes, which is not a multiple of {size_in}", size);
    if (size / {size_in} > rfaas_result_capacity() / {size_out})
        return size / {size_in} * {size_out};
    return native_{name}(args, size, res);
}}
"""


class NumbaFunction:
    """A function of rfaas.njit, for rfaas.compile."""

    def __init__(self, f: Callable[..., Any], signature: str) -> None:
        import numba

        arguments, result = numba.core.sigutils.normalize_signature(signature)
        if len(arguments) != 1 or result is None:
            raise TypeError(f"the signature of {f.__name__} is {signature!r}, want a result and one argument, such as 'float64(float64)' or 'float64[:](float64[:])'")
        arrays = isinstance(arguments[0], numba.types.Array)
        if arrays != isinstance(result, numba.types.Array):
            raise TypeError(f"the signature of {f.__name__} is {signature!r}, want an array as the argument and the result, or a number as both")
        self.name, self.function = f.__name__, numba.njit(f, error_model="numpy")
        self.types = [t.dtype if arrays else t for t in (arguments[0], result)]
        self.sizes = [t.bitwidth // 8 for t in self.types]
        self.dtypes = tuple(numba.np.numpy_support.as_dtype(t) for t in self.types)
        self.callback = self._callback(numba, arrays)

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function in this process."""
        return self.function(*arguments)

    def _callback(self, numba: Any, arrays: bool) -> Any:
        inner, (of, returned), (size_in, size_out) = self.function, self.types, self.sizes
        signature = numba.types.uint32(numba.types.CPointer(of), numba.types.uint32, numba.types.CPointer(returned))
        carray = numba.carray
        if arrays:
            def callback(args, size, res):
                n = size // size_in
                inner(carray(args, n), carray(res, n))
                return n * size_out
        else:
            def callback(args, size, res):
                n = size // size_in
                x, y = carray(args, n), carray(res, n)
                for i in range(n):
                    y[i] = inner(x[i])
                return n * size_out
        return numba.cfunc(signature, nopython=True, error_model="numpy")(callback)

    def object_code(self, cpu: str) -> bytes:
        import llvmlite.binding as llvm

        llvm.initialize()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, opt=3, reloc="pic", codemodel="default")
        module = llvm.parse_assembly(self.callback.inspect_llvm())
        for symbol in [*module.functions, *module.global_variables]:
            if symbol.name == self.callback.native_name:
                symbol.visibility = "hidden"
            elif not symbol.is_declaration:
                symbol.linkage = "internal"  # several functions of one library have some of them in common
        return machine.emit_object(module)


def njit(signature: str) -> Callable[[Callable[..., Any]], NumbaFunction]:
    """A decorator that compiles a function of numbers or arrays by numba, for workers that have neither numba nor Python.

        @rfaas.njit("float64(float64)")          # a call applies it to each element of the array
        def price(x):
            return x * x

        @rfaas.njit("float64[:](float64[:])")    # x is the argument. The result is y, which has as many elements
        def sums(x, y):
            y[:] = np.cumsum(x)

        with rfaas.lease(rfaas.compile([price, sums])) as lease:
            lease["price"].map(x)

    Arguments of another dtype are refused. An exception of the function is raised again by the call.
    """
    return lambda f: NumbaFunction(f, signature)


def source_of(functions: Any) -> tuple[str, list[bytes]]:
    """The C source and the object files of a library."""
    import platform

    for f in functions:
        if not isinstance(f, NumbaFunction):
            raise TypeError(f"{f!r} is neither the text of functions nor a function of rfaas.njit")
    cpu = "x86-64-v2" if platform.machine() == "x86_64" else "generic"  # that of rfaas-cc
    wrappers = [WRAPPER.format(name=f.name, native=f.callback.native_name, size_in=f.sizes[0], size_out=f.sizes[1]) for f in functions]
    return RUNTIME + "".join(wrappers), [f.object_code(cpu) for f in functions]


class _Exceptions(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """A worker wrote the pickle, so it may name nothing but Python's own exceptions. The unpickler in C would take as much memory as the pickle says."""

    def find_class(self, module: str, name: str) -> Any:
        import builtins

        found = getattr(builtins, name, None) if module in ("builtins", "exceptions") else None
        if not (isinstance(found, type) and issubclass(found, Exception)):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return found


def exception_of(text: str, error: Error) -> Exception | None:
    """Returns the exception that a numba function raised, from the text of the call's error, or None if it cannot be read. The text of its cause says where it was raised."""
    try:
        call, _, digits = text.rpartition("numba:")
        pickled = bytes.fromhex(digits.split()[0])
        try:
            kind, arguments, *place = _Exceptions(io.BytesIO(pickled)).load()
        except Exception:
            cut = CUT.match(pickled) if len(pickled) == ROOM else None
            if not cut:
                raise
            kind, *place = _Exceptions(io.BytesIO()).find_class(cut[1].decode(), cut[2].decode()), None
            arguments = (cut[3].decode(errors="ignore") + "...",)
        e = kind(*(arguments or ()))
        if not isinstance(e, Exception):
            return None
        where = f"line {place[0][2]} of {place[0][1]}, in {place[0][0]}, raised " if place and place[0] else ""
        e.__cause__ = type(error)(f"{call}{where}{kind.__name__}: {e}", error.status, error.started, error.code)
        return e
    except Exception:
        return None
