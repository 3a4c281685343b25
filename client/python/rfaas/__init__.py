"""rfaas: call functions of C libraries, and Python functions, on leased cores of other nodes.

    import numpy as np
    import rfaas

    with rfaas.lease("libprices.so", workers=4) as lease:     # address from RFAAS_MANAGER or RFAAS_EXECUTOR
        price = lease["price"]
        y = price(x)                    # a new array like x, with the function's result
        price(x, out=y)                 # the same without a new array
        requests = [price.submit(part) for part in parts]
        results = [request.result() for request in requests]
        y = price.map(x)                # all items of x, on all workers

Arguments are numpy arrays, bytes, bytearray, array.array, memoryview or any other buffer. numpy is not required. rfaas.Executor executes Python
functions. docs/python.md describes this module. rfaas.h describes the options of sessions, leases and calls, with times in nanoseconds instead of
seconds.
"""
from __future__ import annotations

import atexit as _atexit
import concurrent.futures as _concurrent
import os as _os
import threading as _threading
import time as _time
from collections.abc import Callable as _Callable, Iterable as _Iterable, Iterator as _Iterator
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

from . import _communicator, _compile, _library, _loop, _numba, _python, _rfaas
from ._compile import compile
from ._executor import Executor, finish_all as _finish_all
from ._futures import BrokenExecutor, Future, PythonVersionError, RemoteTraceback
from ._function import dtype_of as _dtype_of, new_result as _new_result, part_of as _part_of
from ._generated import *  # noqa: F403
from ._generated import Change, Event, EventKind, ExecutorState, LeaseDetails, SeedDetails, Start, Statistics, WorkerDetails, WorkerStart, error as _error
from ._numba import njit
from ._python import python
from ._rfaas import Function, Request

if _TYPE_CHECKING:
    from typing import Unpack

    from ._generated import LeaseOptions, SessionOptions
    from ._rfaas import Buffer



def _error_or_own(status: int, text: str, started: bool = True, code: int = 0) -> Exception:
    """The exception for a status, or the one that a function of njit or rfaas.python has raised."""
    e = _error(status, text, started, code)
    return (code == _numba.CODE and _numba.exception_of(text, e)) or (code == _python.CODE and _python.exception_of(text, e)) or e


_rfaas.hooks(_threading.main_thread().ident, _error_or_own, _library.load, _new_result, _part_of, _dtype_of, _loop.await_request)
_atexit.register(_rfaas.finish)
_atexit.register(_finish_all)  # before finish
_os.register_at_fork(after_in_child=_rfaas.after_fork)


class Session(_rfaas.Session):
    """A session with a resource manager or an executor.

    Options are the fields of SessionOptions, such as manager="host:port" or provider="tcp". Options that are missing come from
    the environment. Leaving a `with` block closes the session and releases its leases.
    """

    def __new__(cls, **options: Unpack[SessionOptions]) -> Session:
        return super().__new__(cls, options)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<rfaas.Session, {'closed' if self.closed else 'open'}>"

    def lease(self, library: str | _os.PathLike[str] | bytes | python, **options: Unpack[LeaseOptions]) -> Lease:
        """Leases workers. See Lease."""
        return Lease(library, session=self, **options)

    def places(self, count: int, library: str | _os.PathLike[str] | bytes | python, **options: Unpack[LeaseOptions]) -> list[str]:
        """Returns an executor with room for each of `count` leases, on as few executors as possible. Nothing is reserved."""
        return self._places(count, _lease_options(library, options))

    def put_table(self, name: str, *parts: Buffer, address: int = 0) -> None:
        """Publishes a table: read-only data that the functions of leases opened from now on find by rfaas_table(name).

        parts: arrays or other buffers, which functions see one after the other. They are copied.
        address: where all workers map the table, so that it can contain pointers into itself. 0: anywhere.
        """
        self._put_table(name, address, *parts)

    def put_table_seed(self, name: str, seed: Seed | str) -> None:
        """Publishes the memory of a seed as a table. Functions of any library get the bytes that its setup function has passed to rfaas_set_root.

        The memory is read-only, and has the same address as in the seed. seed: the seed or its full name. A session can have one such table.
        """
        self._put_table_seed(name, seed if isinstance(seed, str) else seed.name)

    def open_seed(self, name: str) -> Seed:
        """Opens a seed that this or another program has created. name: its full name (Seed.name)."""
        return Seed._open(self, name)

    def changes(self) -> list[Change]:
        """Returns the changes of executors since the last call."""
        return [Change(**{**c, "state": ExecutorState(c["state"])}) for c in self._changes()]


class Lease(_rfaas.Lease):
    """A number of workers on one executor, which have loaded a library of functions.

    library: the path of a shared library on this machine, or its contents as bytes, or functions of rfaas.python.
    session: the default is one session of this process, whose options come from the environment.
    comm: a communicator of mpi4py. All of its ranks open a lease, or none. Rank 0 chooses the executors.
    options: fields of LeaseOptions, such as workers=4, wait=60, failover=True. Times are in seconds. bundle may be a list of paths.

    lease["name"] is a function of the library. Any number of threads may use one lease. Their calls run in parallel on its workers.
    Leaving a `with` block releases the lease.
    """

    _watch: _loop.Watch | None = None

    def __new__(cls, library: str | _os.PathLike[str] | bytes | python, *, session: Session | None = None, comm: _Any = None,
                **options: Unpack[LeaseOptions]) -> Lease:
        with _communicator.joined(comm):
            given = _lease_options(library, options)
        open_lease = super().__new__

        def open_at(*place: str) -> Lease:
            return open_lease(cls, session or default_session(), given, *place)

        def open_() -> Lease:
            return open_at() if comm is None else _communicator.open_together(comm, lambda count: (session or default_session())._places(count, given), open_at)

        return _named(library, open_)

    @classmethod
    def across(cls, library: str | _os.PathLike[str] | bytes | python, *, session: Session | None = None, **options: Unpack[LeaseOptions]) -> list[Lease]:
        """Leases workers=n on as few executors as possible. Each executor's part is a lease of its own. Opens all of them or none."""
        given = _lease_options(library, options)

        def open_all() -> list[Lease]:
            return cls._across(session or default_session(), given)

        return _named(library, open_all)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        if self.released:
            return "<rfaas.Lease, released>"
        d = self.info()
        return f"<rfaas.Lease of {d.workers} workers on {d.node_name or 'this process'} ({d.provider})>"

    def _repr_html_(self) -> str:
        import html

        rows = () if self.released else vars(self.info()).items()
        cells = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in rows if v not in ("", 0))
        return f"<table><caption>{html.escape(repr(self))}</caption>{cells}</table>"

    def info(self) -> LeaseDetails:
        """Describes the lease."""
        return LeaseDetails(**self._info())

    def statistics(self) -> Statistics:
        """Returns the statistics of the lease since it was opened."""
        return Statistics(**self._statistics())

    def events(self) -> _Iterator[Event]:
        """Takes the events that have happened since the last call, such as the death of a worker. Does not block."""
        while (e := self._event())["kind"] != EventKind.NONE:
            yield Event(**{**e, "kind": EventKind(e["kind"])})

    def worker_origin(self, worker: int) -> WorkerStart:
        """Returns how a worker came to the lease."""
        d = self._worker_origin(worker)
        return WorkerStart(**{**d, "start": Start(d["start"])})

    def worker_info(self, worker: int) -> WorkerDetails:
        """Describes a worker and returns what it has printed."""
        return WorkerDetails(**self._worker_info(worker))

    def create_seed(self, function: str, payload: Buffer | None = None, *, name: str, ttl: float = 0) -> Seed:
        """Executes a function of the library once, and keeps its memory for workers of later leases, whose option `seed` names it.

        ttl: seconds for which the executor keeps the seed if nobody renews it. 0: as long as its longest lease.
        """
        return Seed._create(self, function, payload, name, ttl)


class Seed(_rfaas.Seed):
    """The memory that a setup function has prepared, from which workers start. Lease.create_seed makes one, Session.open_seed opens one."""

    def __repr__(self) -> str:
        try:
            return f"<rfaas.Seed {self.name}>"
        except (Error, ValueError) as e:
            return f"<rfaas.Seed: {e}>"

    def info(self) -> SeedDetails:
        """Describes the seed."""
        return SeedDetails(**self._info())


def _named(library: _Any, open_lease: _Callable[[], _Any]) -> _Any:
    """Opens a lease, or a list of leases, which know the functions of the library if these are in Python."""
    if isinstance(library, python):
        return library.open(open_lease)
    opened = open_lease()
    if isinstance(library, _compile.CompiledLibrary):
        for lease in opened if isinstance(opened, list) else [opened]:
            library.name_in(lease)
    return opened


def _lease_options(library: str | _os.PathLike[str] | bytes | python, options: _Any) -> dict[str, _Any]:
    given = dict(options)
    if isinstance(library, python):
        given = library.options(given)
        library = given["library"]
    given["library_data" if isinstance(library, (bytes, bytearray, memoryview)) else "library"] = library
    if isinstance(given.get("seed"), Seed):
        given["seed"] = given["seed"].name
    bundle = given.get("bundle")
    if bundle is not None and not isinstance(bundle, (str, _os.PathLike)):
        given["bundle"] = ":".join(_os.fspath(path) for path in bundle)
    return given


lease = Lease

_sessions: dict[int, Session] = {}  # by process
_sessions_lock = _threading.RLock()  # a signal handler may fork while a session is opened
_os.register_at_fork(before=_sessions_lock.acquire, after_in_parent=_sessions_lock.release, after_in_child=_sessions_lock.release)


def default_session() -> Session:
    """Returns the session of leases that name no session. Each process has its own, including a child of fork()."""
    with _sessions_lock:
        session = _sessions.get(_os.getpid())
        if session is None or session.closed:
            session = Session()
            _sessions.clear()
            _sessions[_os.getpid()] = session
        return session


def as_completed(requests: _Iterable[_Any], timeout: float | None = None) -> _Iterator[_Any]:
    """Yields requests, or futures of an Executor, in the order in which they end. Raises TimeoutError if some have not ended after `timeout` seconds."""
    left = list(requests)
    if left and isinstance(left[0], _concurrent.Future):
        for future in left:
            if isinstance(future, Future):
                future.hurry()
        yield from _concurrent.as_completed(left, timeout)
        return
    end = None if timeout is None else _time.monotonic() + timeout
    while left:
        index = _rfaas.wait_any(left, None if end is None else max(0.0, end - _time.monotonic()))
        if index is None:
            raise TimeoutError(f"{len(left)} calls have not ended yet")
        yield left.pop(index)


def library_version() -> tuple[int, int]:
    """Returns the version of librfaas.so. Loads the library if it is not loaded yet."""
    return _rfaas.version()
