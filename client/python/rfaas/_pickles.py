"""What rfaas.Executor and rfaas.python pickle: arguments, with their buffers outside of the pickle, functions by value, and the code with which a worker starts."""
from __future__ import annotations

import functools
import importlib.util
import marshal
import os
import pickle
import sys
import sysconfig
import types
from hashlib import blake2b
from pathlib import Path
from typing import Any, Callable

HERE = Path(__file__).resolve().parent
WORKER_LIBRARY = str(HERE / "_worker.abi3.so")


@functools.cache
def cloudpickle() -> Any:
    """Returns the module cloudpickle, or None if it is not installed."""
    try:
        import cloudpickle
    except ImportError:
        return None
    return cloudpickle


def by_value(value: Any, callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Pickles a value. With cloudpickle, lambdas and the functions and classes of __main__ are pickled with their code."""
    module = cloudpickle()
    if module is None:
        return pickle.dumps(value, 5, buffer_callback=callback)
    return module.dumps(value, 5, buffer_callback=callback)


def name_of(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def arguments(fn: Any, value: tuple[Any, Any]) -> tuple[bytes, list[memoryview]]:
    """Pickles arguments. Does not copy the memory of arrays and other buffers. Raises PicklingError, which names the argument that cannot be pickled."""
    buffers: list[memoryview] = []
    try:
        data = pickle.dumps(value, 5, buffer_callback=lambda b: buffers.append(b.raw()))
        module = cloudpickle()
        if module is None or (b"__main__" not in data and not module.list_registry_pickle_by_value()):
            return data, buffers
    except Exception:
        pass
    buffers = []
    try:
        return by_value(value, lambda b: buffers.append(b.raw())), buffers
    except Exception as e:
        raise pickle.PicklingError(f"{_culprit(value)} of {name_of(fn)} cannot be pickled: {type(e).__name__}: {e}{_advice()}") from e


def _culprit(value: tuple[Any, Any]) -> str:
    positional, named = value
    for name, x in [*((f"argument {i + 1}", x) for i, x in enumerate(positional)), *((f"argument {k!r}", x) for k, x in (named or {}).items())]:
        try:
            by_value(x)
        except Exception:
            return name
    return "an argument"


def _advice() -> str:
    return "" if cloudpickle() else "; install cloudpickle, which can pickle lambdas, nested functions and definitions in __main__"


class Code:
    """A pickled function."""

    __slots__ = "digest", "data", "name"

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = name_of(fn)
        if not callable(fn):
            raise TypeError(f"{fn!r} is not callable")
        try:
            self.data = by_value(fn)
        except Exception as e:
            raise pickle.PicklingError(f"{self.name} cannot be pickled: {type(e).__name__}: {e}{_advice()}") from e
        if cloudpickle() is None and b"__main__" in self.data:
            raise pickle.PicklingError(f"{self.name} is defined in __main__{_advice()}")
        self.digest = blake2b(self.data, digest_size=16).digest()


# Types of functions whose pickles are kept. A bound method or a partial object may have a different pickle the next time.
FIXED = types.FunctionType, types.BuiltinFunctionType, type


# ---- the start of a worker ----


@functools.cache
def _remote() -> tuple[str, bytes]:
    """Returns a hash of the source that runs in workers, and the compiled code. Runtimes execute the same source (worker/runtime.c)."""
    source = b"".join((HERE / name).read_bytes() for name in ("_frames.py", "_remote.py"))
    return importlib.util.source_hash(source).hex(), marshal.dumps(compile(source, "rfaas/_remote.py", "exec", dont_inherit=True))


@functools.cache
def _cloudpickle_code() -> bytes:
    modules = {} if cloudpickle() is None else {name: module.__spec__ for name, module in sys.modules.items() if name.partition(".")[0] == "cloudpickle" and module}
    return marshal.dumps({name: marshal.dumps(spec.loader.get_code(name)) for name, spec in modules.items()})  # type: ignore[union-attr]


def _libraries() -> list[str]:
    """Returns where libpython may be: beside this interpreter, or where the system's loader finds it."""
    name, directory = sysconfig.get_config_var("INSTSONAME") or "", sysconfig.get_config_var("LIBDIR")
    if ".so" not in name:
        name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    return [*(os.path.join(d, name) for d in dict.fromkeys((os.path.join(sys.base_prefix, "lib"), directory)) if d), name]


def bundle(modules: Any) -> list[str]:
    """Returns the paths of modules, which are given as names, such as "numpy", or as paths."""
    paths = []
    for module in [modules] if isinstance(modules, (str, os.PathLike)) else modules:
        text = os.fspath(module)
        if os.path.exists(text) and (os.sep in text or text.endswith(".py") or os.path.isfile(os.path.join(text, "pyvenv.cfg"))):
            paths.append(os.path.abspath(text))
            continue
        try:
            spec = importlib.util.find_spec(text)
        except (ImportError, ValueError):
            spec = None
        where = spec and (list(spec.submodule_search_locations or ())[:1] or [spec.origin])
        if not where or not where[0] or not os.path.exists(where[0]):
            raise ModuleNotFoundError(f"modules names {text!r}, which is neither a module that this Python finds nor the path of a file or directory", name=text)
        paths.append(where[0])
    return paths


def start_payload(initializer: Any, initargs: tuple[Any, ...], bundled: list[str], functions: list[bytes] | None = None) -> bytes:
    """Returns the payload of the init call `start` in worker.c. functions: those of rfaas.python, pickled."""
    environments = [os.path.basename(path) for path in bundled if os.path.isfile(os.path.join(path, "pyvenv.cfg"))]
    programs = [*(f":{name}/bin/python3" for name in environments), sys.executable, getattr(sys, "_base_executable", "")]
    source_hash, code = _remote()
    strings = [f"{sys.version_info.major}.{sys.version_info.minor}.", "\n".join(_libraries()), "\n".join(dict.fromkeys(p for p in programs if p)),
               os.path.basename(bundled[0]) if bundled else "", source_hash, str(len(code))]
    options = {"version": getattr(cloudpickle(), "__version__", ""), "initializer": b"", "functions": functions or []}
    if initializer is not None:
        Code(initializer)  # raises an error with its name if it cannot be pickled
        arguments(initializer, (initargs, {}))
        options["initializer"] = by_value((initializer, initargs))
    marshalled = marshal.dumps(options)
    return b"".join([*(os.fsencode(s) + b"\0" for s in strings), code, len(marshalled).to_bytes(8, "little"), marshalled, _cloudpickle_code()])
