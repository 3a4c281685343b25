"""Python functions as the library of a lease."""
from __future__ import annotations

import builtins
import re
from typing import Any, Callable

from . import _pickles
from ._dispatch import said
from ._futures import BrokenExecutor, PythonVersionError
from ._generated import Error, FunctionError

FUNCTIONS_MAX = 64  # that worker.c exports
CODE = 0x50797468  # of rfaas_fail_code, for exceptions


class python:
    """Python functions of raw buffers, in place of the path of a library: rfaas.lease(rfaas.python(scale)).

    A worker calls function(arguments, result). `arguments` is a memoryview of the bytes that the client passes. The function writes its result to the memoryview
    `result`, and returns the number of bytes, or None: all of `result`. Nothing is pickled. A function must not keep a view of either.

    initializer, initargs, modules: as for rfaas.Executor.
    """

    def __init__(self, *functions: Callable[[memoryview, memoryview], int | None], initializer: Callable[..., Any] | None = None,
                 initargs: tuple[Any, ...] = (), modules: Any = ()) -> None:
        if not 0 < len(functions) <= FUNCTIONS_MAX:
            raise ValueError(f"rfaas.python has {len(functions)} functions, want 1 to {FUNCTIONS_MAX}")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer is {initializer!r}, which is not callable")
        codes = [_pickles.Code(f) for f in functions]
        self.names = [getattr(f, "__name__", "") for f in functions]
        for i, name in enumerate(self.names):
            if not name:
                raise TypeError(f"{functions[i]!r} has no __name__ by which a lease can find it")
            if name in self.names[:i]:
                raise ValueError(f"two functions of rfaas.python have the name {name}")
        bundled = _pickles.bundle(modules)
        self._options = {"library": _pickles.WORKER_LIBRARY, "init_function": "start",
                         "init_payload": _pickles.start_payload(initializer, tuple(initargs), bundled, [code.data for code in codes])}
        if bundled:
            self._options["bundle"] = bundled

    def __repr__(self) -> str:
        return f"rfaas.python({', '.join(self.names)})"

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the options of a lease of these functions."""
        for name in "init_function", "init_payload", "bundle", "local", "reuse":
            if name in given:
                raise TypeError(f"a lease of rfaas.python sets the option {name} itself, or cannot use it")
        return given | self._options

    def open(self, open_lease: Callable[[], Any]) -> Any:
        """Opens a lease, or a list of leases, and gives the functions their names."""
        try:
            opened = open_lease()
        except FunctionError as e:
            raise start_error(e) from None
        for lease in opened if isinstance(opened, list) else [opened]:
            for i, name in enumerate(self.names):
                lease._name(name, f"python_{i:02o}")  # what worker.c exports
        return opened


def start_error(e: FunctionError) -> Error:
    """Returns the error of a lease in whose workers Python has not started. Codes as in worker.c."""
    if e.code == 1:
        return PythonVersionError(said(e), -300, False, e.code)
    return BrokenExecutor(said(e), -600, False, e.code) if e.code else e


def exception_of(text: str, error: Error) -> Exception | None:
    """Returns the built-in exception that a function of rfaas.python has raised, whose cause is the error of the call. None: it is of another kind."""
    found = re.search(r"\braised (\w+): (.*)", text, re.DOTALL)
    kind = getattr(builtins, found[1], None) if found else None
    if not found or not isinstance(kind, type) or not issubclass(kind, Exception):
        return None
    try:
        e = kind(found[2])
    except TypeError:  # such as UnicodeDecodeError, which needs more than a text
        return None
    e.__cause__ = error
    return e
