"""rfaas.Executor: Python functions on leased workers, with the interface of concurrent.futures."""
from __future__ import annotations

import collections
import concurrent.futures as cf
import itertools
import time
import weakref
from typing import Any, Callable, Iterable, Iterator

from . import _communicator, _maps, _pickles
from ._dispatch import ROOM, Dispatcher
from ._frames import CALL, CHUNK, STARRED
from ._futures import Future
from ._generated import BusyError, FunctionError, InvalidError
from ._python import start_error

CHUNKS = 16  # calls that a map makes for each worker

_open: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def finish_all() -> None:
    """Waits at the end of the program until all submitted calls have been executed, as the executors of concurrent.futures do."""
    for dispatcher in list(_open):
        dispatcher.close(True, False)


def _largest(options: dict[str, Any]) -> int:
    """Returns the largest size of a result, as rfaas_lease_options describes bulk_max."""
    if options.get("bulk_max") or not options.get("bulk"):
        return int(options.get("bulk_max") or 1 << 30)
    return max(min(int(options["bulk"]), 1 << 32), int(options["eager"]))


class Executor(cf.Executor):
    """Executes Python functions on leased workers, with the interface of concurrent.futures.Executor.

    max_workers: the number of workers.
    initializer, initargs: a function that each worker executes first, including one that replaces a dead worker, and its arguments.
    modules: modules that workers can import besides those of their node, as names, or as paths of files and directories. With a virtual
        environment, workers can import its packages.
    runtime: name of a runtime of the executors (their setting `runtimes`): an interpreter that has imported the administrator's modules. Workers start
        with it in a fraction of the time.
    session: the default is one session of this process, whose options come from the environment.
    across: leases workers on several executors, if no executor has enough.
    comm: a communicator of mpi4py. All of its ranks open an executor, or none. Rank 0 chooses where.
    options: fields of LeaseOptions, such as memory=4 << 30, call_limit=60 or wait=10. Times are in seconds.

    Raises PythonVersionError if a node does not have the Python version of this interpreter, and BrokenExecutor if the initializer fails.
    """

    def __init__(self, max_workers: int = 1, initializer: Callable[..., Any] | None = None, initargs: tuple[Any, ...] = (), *, modules: Any = (), runtime: str = "",
                 session: Any = None, across: bool = False, comm: Any = None, **options: Any) -> None:
        from . import Lease

        with _communicator.joined(comm):
            options = self._lease_options(max_workers, initializer, initargs, modules, runtime, options)
            if comm is not None:
                if across:
                    raise TypeError("across and comm exclude each other")
                options["comm"] = comm
        try:
            opened = (Lease.across if across else Lease)(_pickles.WORKER_LIBRARY, session=session, **options)
        except FunctionError as e:
            raise start_error(e) from None
        except (InvalidError, BusyError) as e:
            if across or max_workers == 1 or "cores" not in e.text:
                raise
            raise type(e)(f"{e.text}; across=True leases workers on several executors", e.status, e.started, e.code) from None
        self._max_workers = max_workers
        self._dispatcher = Dispatcher(opened if across else [opened], _largest(options))
        _open.add(self._dispatcher)
        self._finalizer = weakref.finalize(self, self._dispatcher.close, False, False)
        self._finalizer.atexit = False

    @staticmethod
    def _lease_options(max_workers: int, initializer: Callable[..., Any] | None, initargs: tuple[Any, ...], modules: Any, runtime: str,
                       options: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(max_workers, int) or max_workers < 1:
            raise ValueError(f"max_workers must be greater than 0, not {max_workers!r}")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer is {initializer!r}, which is not callable")
        for name in "depth", "workers", "workers_min", "library", "init_function", "init_payload", "bundle", "local", "reuse":
            if name in options:
                raise TypeError(f"Executor sets the option {name} itself, or cannot use it")
        bundled = _pickles.bundle(modules)
        options = {"eager": ROOM, **options, "depth": 1, "workers": max_workers, "init_function": "start",
                   "init_payload": _pickles.start_payload(initializer, tuple(initargs), bundled)}
        if bundled:
            options["bundle"] = bundled
        if runtime:
            options["runtime"] = runtime
        return options

    @property
    def leases(self) -> list[Any]:
        """The leases of the workers."""
        return self._dispatcher.leases

    def __repr__(self) -> str:
        d = self._dispatcher
        return f"<rfaas.Executor, {'shut down' if d.closed else f'{len(d.all)} workers, {len(d.busy)} busy, {len(d.pending)} calls wait'}>"

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Starts fn(*args, **kwargs) on a worker. Returns its future."""
        return self._dispatcher.submit(fn, CALL, (args, kwargs))

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int | None = None,
            buffersize: int | None = None, unordered: bool = False) -> Iterator[Any]:
        """Returns an iterator over the results of fn, as the built-in map does.

        One call gets `chunksize` items. The default makes about 16 calls for each worker, or calls of one item with `buffersize`.
        buffersize: the largest number of submitted items whose results were not taken yet. Without it, map submits all items at once.
        unordered: yields the results of each chunk when the chunk ends.
        timeout: seconds after this call. The iterator raises TimeoutError if it has no result by then.
        """
        return self._map(fn, CHUNK, iterables, timeout, chunksize, buffersize, unordered)

    def starmap(self, fn: Callable[..., Any], iterable: Iterable[Iterable[Any]], *, timeout: float | None = None, chunksize: int | None = None,
                buffersize: int | None = None, unordered: bool = False) -> Iterator[Any]:
        """Returns an iterator over fn(*arguments) for all items `arguments`. The options are those of map."""
        return self._map(fn, STARRED, (iterable,), timeout, chunksize, buffersize, unordered)

    def _map(self, fn: Callable[..., Any], operation: int, iterables: tuple[Iterable[Any], ...], timeout: float | None, chunksize: int | None,
             buffersize: int | None, unordered: bool) -> Iterator[Any]:
        for name, value in ("chunksize", chunksize), ("buffersize", buffersize):
            if value is not None and not isinstance(value, int):
                raise TypeError(f"{name} must be an integer or None, not {value!r}")
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        begin = time.monotonic()
        columns, count = _maps.columns_of(iterables, chunksize is None and buffersize is None)
        if chunksize is None:
            chunksize = max(1, -(-count // (CHUNKS * self._max_workers))) if buffersize is None and count else 1
        chunks = (self._dispatcher.submit(fn, operation, (chunk[0] if operation == STARRED else chunk, None))
                  for chunk in _maps.chunks_of(columns, count, chunksize))
        futures: collections.deque[Future] = collections.deque()
        try:
            for future in itertools.islice(chunks, None if buffersize is None else -(-buffersize // chunksize)):
                futures.append(future)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return _maps.results(_maps.as_they_end(futures, chunks, timeout, begin) if unordered else _maps.in_order(futures, chunks), timeout, begin)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accepts no more calls, and releases the workers when all calls have ended. With `wait`, waits until then.

        cancel_futures: cancels the calls that have not started.
        """
        self._dispatcher.close(wait, cancel_futures)
