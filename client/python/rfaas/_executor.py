"""rfaas.Executor: Python functions on leased workers, with the interface of concurrent.futures.

A thread that waits for a result looks for replies and starts the next calls itself, because handing them to another thread would take some ten
microseconds. Only one thread at a time does this: the driver. If nobody waits, a background thread becomes the driver after GRACE seconds.
"""
from __future__ import annotations

import collections
import concurrent.futures as cf
import functools
import itertools
import os
import pickle
import queue
import sys
import threading
import time
import weakref
from concurrent.futures._base import CANCELLED, FINISHED, PENDING, RUNNING
from typing import Any, Callable, Iterable, Iterator

from . import _frames, _pickles, _rfaas
from ._frames import CALL, CHUNK, FETCH, MORE, PART, PING, RAISED, REPLY, REQUEST, STARRED, UNKNOWN, VALUE
from ._generated import ConnectionError, Error, FunctionError, InvalidError, LeaseError, UnsupportedError

GRACE = 0.001  # until the background thread does the work of threads that do not wait
LOOK = 0.001  # how long a driver waits before it looks for calls that other threads have started
ROOM = 65536  # bytes for a reply. A larger one is fetched by a second call
CHUNKS = 16  # of a map, for each worker
PING_REQUEST = REQUEST.pack(b"", PING, 0, 0, 0)
FETCH_REQUEST = REQUEST.pack(b"", FETCH, 0, 0, 0)


class PythonVersionError(UnsupportedError):
    """The executor's node has no Python of the client's version."""


class BrokenExecutor(LeaseError, cf.BrokenExecutor):
    """The executor has no workers any more, or the initializer has failed."""


class RemoteTraceback(Exception):
    """The traceback of an exception in a worker. It is the __cause__ of the exception."""

    @property
    def tb(self) -> str:
        return self.args[0]

    def __str__(self) -> str:
        return f'\n"""\n{self.tb}"""'


_forks = 0  # of this process and its ancestors


def _after_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_after_fork)

# ---- futures ----

_conditions = threading.RLock()  # guards the creation of conditions. A garbage collection may re-enter it
_LAZY = vars(cf.Future()).keys() == {"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"}


class Future(cf.Future):
    """The future of a call. Its condition, which takes a microsecond to make, is made when a thread needs it."""

    def __init__(self, dispatcher: Dispatcher, job: tuple[Any, ...]) -> None:
        self._made: threading.Condition | None = None
        if _LAZY:
            self._state, self._result, self._exception, self._waiters, self._done_callbacks = PENDING, None, None, [], []
        else:
            super().__init__()
        self._dispatcher = dispatcher
        self._job = job

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        with _conditions:
            if self._made is None:
                self._made = threading.Condition()
            return self._made

    @_condition.setter
    def _condition(self, condition: threading.Condition) -> None:
        self._made = condition

    def _begin(self) -> bool:
        """Whether the call may start: it has not been cancelled."""
        if self._state == RUNNING:
            return True
        with _conditions:
            if self._made is None:
                self._state = RUNNING
                return True
        return self.set_running_or_notify_cancel()

    def _finish(self, result: Any, exception: BaseException | None = None) -> None:
        with _conditions:
            if self._state == FINISHED:
                return  # Ctrl-C has come between
            self._job = ()
            if self._made is None:  # no thread waits, and there are no callbacks
                self._result, self._exception, self._state = result, exception, FINISHED
                return
        if exception is None:
            self.set_result(result)
        else:
            self.set_exception(exception)

    def result(self, timeout: float | None = None) -> Any:
        if self._state != FINISHED:
            self._dispatcher.drive(self, timeout)
        if self._state == FINISHED and self._exception is None:
            return self._result
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state != FINISHED:
            self._dispatcher.drive(self, timeout)
        return super().exception(0)

    def add_done_callback(self, fn: Callable[[cf.Future], object]) -> None:
        super().add_done_callback(fn)
        self.hurry()

    def hurry(self) -> None:
        """Lets the executor look for replies at once, because this thread will wait in a way of its own."""
        if self._state != FINISHED:
            self._dispatcher.hurry()


# ---- workers ----


class Worker:
    """A worker of a lease, which executes one call at a time. So its death concerns one call."""

    __slots__ = "call", "known", "request", "future", "repeats", "replaced"

    def __init__(self, lease: Any, index: int) -> None:
        self.repeats, self.replaced = 0, False
        self.call = lease.function("call", capacity=ROOM, worker=index)
        self.known: set[bytes] = set()  # digests of functions
        self.request: Any = None
        self.future: Future | None = None

    def start(self, future: Future) -> None:
        operation, code, data, buffers = future._job
        # A worker may have lost the function, and then needs the request again, but buffers may change after the start.
        sent = b"" if not buffers and code.digest in self.known else code.data
        head = REQUEST.pack(code.digest, operation, len(buffers), len(sent), len(data))
        if buffers:
            head += _frames.lengths(buffers)
            self.request = self.call.submit(head, sent, data, *_frames.padded(len(head) + len(sent) + len(data), buffers))
        elif len(data) < 4096:
            self.request = self.call.submit(head + sent + data)
        else:
            self.request = self.call.submit(head, sent, data)
        self.known.add(code.digest)

    def fetch(self, size: int) -> None:
        self.request = self.call.submit(FETCH_REQUEST, out=bytearray(size))


class Dispatcher:
    """The workers of an executor and the calls that wait for them."""

    def __init__(self, leases: list[Any]) -> None:
        self.leases, self.forks = leases, _forks
        self.idle = [Worker(lease, i) for lease in leases for i in range(lease.workers)][::-1]
        self.workers = len(self.idle)
        self.busy: dict[Worker, None] = {}
        self.pending: collections.deque[Future] = collections.deque()
        self.lock = threading.RLock()  # guards the fields above. A signal handler or a finalizer may submit a call
        self.done: collections.deque[tuple[Future, Any]] = collections.deque()  # replies that the driver is to unpickle
        self.failures: collections.deque[tuple[Future, Exception]] = collections.deque()  # outcomes that are set without the lock
        self.driver = threading.Lock()
        self.bell = threading.Event()  # wakes the background thread
        self.attended = self.hurried = self.wanted = self.background = self.closed = False
        self.turns = 0  # of drivers other than the background thread
        self.broken: BrokenExecutor | None = None
        self.code = functools.lru_cache(256)(_pickles.Code)
        self.thread = threading.Thread(target=self.run, name="rfaas.Executor", daemon=True)
        self.thread.start()

    # ---- starting calls ----

    def submit(self, fn: Callable[..., Any], operation: int, arguments: tuple[Any, Any]) -> Future:
        try:
            code = (self.code if type(fn) in _pickles.FIXED else _pickles.Code)(fn)
            future = Future(self, (operation, code, *_pickles.arguments(fn, arguments)))
        except pickle.PicklingError as e:
            future = Future(self, ())
            future._finish(None, e)
        if self.forks != _forks:
            raise InvalidError("the executor belongs to the parent of this process: open another one", -200, False)
        with self.lock:
            if self.closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self.broken:
                raise BrokenExecutor(self.broken.text, self.broken.status, False, self.broken.code)
            if future._state == FINISHED:
                return future
            if self.idle:
                worker = self.idle.pop()
                try:
                    if not self.start(worker, future):
                        self.next(worker)
                except BaseException:
                    self.recover(worker)
                    raise
            else:
                self.queue(future)
        if not self.attended:
            self.bell.set()
        if self.failures:
            self.end_failures()
        return future

    def queue(self, future: Future) -> None:
        operation, code, data, buffers = future._job
        if buffers:  # the program may change them before the call starts
            future._job = operation, code, data, [memoryview(bytes(b)) for b in buffers]
        self.pending.append(future)

    def start(self, worker: Worker, future: Future) -> bool:
        """Starts a call on a worker that is in no list. Returns whether the worker is occupied then. Under the lock."""
        if not future._begin():
            return False
        worker.request, worker.future, worker.repeats = None, future, 0
        try:
            worker.start(future)
        except Error as e:
            return self.failed(worker, e)
        except Exception as e:
            worker.future = None
            self.failures.append((future, e))
            return False
        self.busy[worker] = None
        return True

    def next(self, worker: Worker) -> None:
        """Gives the next call to a worker, or makes it idle. Under the lock."""
        while self.pending:
            if self.start(worker, self.pending.popleft()):
                return
        self.idle.append(worker)
        if self.closed and len(self.idle) >= self.workers:
            self.bell.set()

    # ---- ending calls ----

    def drive(self, future: Future, timeout: float | None) -> bool:
        """Works until the future has ended, or for `timeout` seconds. If another thread does that, waits for it. Returns whether it has a
        result or an exception."""
        end = None if timeout is None else time.monotonic() + timeout
        while future._state in (PENDING, RUNNING):
            if self.become_driver():
                try:
                    while future._state in (PENDING, RUNNING) and self.busy:
                        left = None if end is None else end - time.monotonic()
                        if left is not None and left < 0:
                            return False
                        self.turns += 1
                        self.look(left)
                finally:
                    self.driver.release()
                    if self.busy:
                        self.bell.set()
            else:
                left = None if end is None else end - time.monotonic()
                if left is not None and left < 0:
                    return False
                self.hurried = True  # when the driver leaves
                with future._condition:
                    if future._state in (PENDING, RUNNING):
                        future._condition.wait(left)
        return future._state == FINISHED

    def become_driver(self) -> bool:
        if not self.busy:  # its worker is being replaced
            return False
        if self.driver.acquire(False):
            return True
        if not self.background:
            return False
        self.wanted = True
        return self.driver.acquire(timeout=5 * LOOK)

    def look(self, timeout: float | None) -> None:
        """Waits until a call ends, for a limited time. By the driver."""
        busy = list(self.busy)
        if self.idle and (timeout is None or timeout > LOOK):
            timeout = LOOK
        index = _rfaas.wait_any([worker.request for worker in busy], timeout)
        if index is None:
            return
        try:
            self.ended(busy[index])
        except BaseException:
            self.recover(busy[index])
            raise

    def ended(self, worker: Worker) -> None:
        future = worker.future
        try:
            reply = worker.request.result()
            outcome = REPLY.unpack_from(reply)[0]
            if outcome > PART:
                return self.again(worker, future, outcome, reply)
        except Exception as e:
            error = e if isinstance(e, Error) else FunctionError(f"the worker's reply is malformed: {e}", -400)
            with self.lock:
                del self.busy[worker]
                if not self.failed(worker, error):
                    self.next(worker)
            return self.end_failures()
        with self.lock:
            if future:
                self.done.append((future, reply))
            worker.future = None
            del self.busy[worker]
            self.next(worker)
        self.deliver_all()
        if self.failures:
            self.end_failures()

    def again(self, worker: Worker, future: Future, outcome: int, reply: Any) -> None:
        """The reply had no room, or the worker has lost the function."""
        worker.repeats += 1
        if outcome > MORE or worker.repeats > 2:
            raise ValueError(f"the outcome is {outcome} in reply {worker.repeats}")
        if outcome == MORE:
            worker.fetch(int(bytes(reply[REPLY.size:])))
        else:
            worker.known.clear()
            worker.start(future)

    def recover(self, worker: Worker) -> None:
        """Ctrl-C may interrupt the main thread anywhere. Puts the worker and its call back where they belong."""
        with self.lock:
            if worker not in self.busy and worker not in self.idle and not worker.replaced:
                if worker.future and worker.request:
                    self.busy[worker] = None
                else:
                    if worker.future:
                        self.pending.appendleft(worker.future)
                    self.next(worker)
        self.deliver_all(())
        self.end_failures()

    def deliver_all(self, interrupts: Any = KeyboardInterrupt) -> None:
        """By the driver, or the thread that was it."""
        while self.done:
            future, reply = self.done[0]
            try:
                self.deliver(future, reply)
            except interrupts:
                raise  # recover() delivers it again
            except BaseException as e:  # the reply is malformed, or its value cannot be unpickled here
                future._finish(None, e)
            self.done.popleft()

    def deliver(self, future: Future, reply: Any) -> None:
        outcome, count, size, printed = REPLY.unpack_from(reply)
        view = memoryview(reply)
        buffers: Any = ()
        if count:
            value, output, buffers = _frames.split(view, REPLY.size, count, size, printed)
            if type(reply) is bytes:
                buffers = [bytearray(b) for b in buffers]
        else:
            value, output = view[REPLY.size:REPLY.size + size], view[REPLY.size + size:]
        if printed:
            _print(*pickle.loads(output))
        result = pickle.loads(value, buffers=buffers)
        if outcome == VALUE:
            future._finish(result)
        elif outcome == RAISED:
            future._finish(None, _exception(*result))
        else:
            future._finish(Part(result[0], _exception(*result[1:])))

    def failed(self, worker: Worker, e: Error) -> bool:
        """A call has failed for another reason than an exception of its function. Returns whether the worker is lost. Under the lock."""
        future, worker.future = worker.future, None
        lost = isinstance(e, (ConnectionError, LeaseError))
        if lost and not e.started:
            self.pending.appendleft(future)
        else:
            self.failures.append((future, type(e)(f"{future._job[1].name}: {e.text}", e.status, e.started, e.code)))
        if isinstance(e, LeaseError):
            self.drop_worker(e)
        elif lost:
            self.replace(worker)
        return lost

    def end_failures(self) -> None:
        """Ends futures without the lock, because their callbacks may wait for other threads."""
        while True:
            try:
                future, e = self.failures.popleft()
            except IndexError:
                return
            future._finish(None, e)

    # ---- dead workers ----

    def replace(self, worker: Worker) -> None:
        """Waits for a new worker in another thread, so that the other workers go on."""
        worker.replaced = True
        threading.Thread(target=self.await_replacement, args=(worker,), name="rfaas.Executor replacement", daemon=True).start()

    def await_replacement(self, worker: Worker) -> None:
        error: Error | None = None
        for _ in range(3):
            try:
                worker.call(PING_REQUEST)  # starts a new worker, and waits for it
                error = None
                break
            except ConnectionError as e:
                error = e
            except Error as e:  # such as an initializer that fails
                error = e
                break
        with self.lock:
            worker.replaced = False
            worker.known.clear()
            if error is None:
                self.next(worker)
            else:
                self.drop_worker(error)
        self.end_failures()
        self.bell.set()

    def drop_worker(self, e: Error) -> None:
        """Goes on with one worker less. Without any, the calls that wait for one end. Under the lock."""
        self.workers -= 1
        if self.workers > 0:
            return
        self.broken = BrokenExecutor(f"the executor has no workers any more: {e}", e.status, e.started, e.code)
        while self.pending:
            future = self.pending.popleft()
            if future._begin():
                self.failures.append((future, self.broken))
        self.bell.set()

    # ---- the background thread ----

    def hurry(self) -> None:
        """Makes the background thread the driver at once, because a thread waits for calls in its own way."""
        self.hurried = True
        self.bell.set()

    def over(self) -> bool:
        return self.closed and not self.busy and not self.pending and (len(self.idle) >= self.workers)

    def run(self) -> None:
        while not self.over():
            self.attended = False
            if not self.busy or self.driver.locked():
                self.bell.wait()
            self.bell.clear()
            self.attended = True
            turns = -1
            while not self.hurried and turns != self.turns and self.busy:
                turns = self.turns
                self.bell.wait(GRACE)
                self.bell.clear()
            if self.busy and self.driver.acquire(False):
                self.background = True
                try:
                    while self.busy and not self.wanted:
                        self.look(None)
                finally:
                    self.wanted = self.background = False
                    self.driver.release()
            if not self.busy:
                self.hurried = False
        for lease in self.leases:
            try:
                lease.release()
            except Error:
                pass

    def close(self, wait: bool, cancel: bool) -> None:
        if self.forks != _forks:
            return
        with self.lock:
            self.closed = True
            cancelled = list(self.pending) if cancel else []
            if cancel:
                self.pending.clear()
        for future in cancelled:
            future.cancel()
            future._begin()  # tells the threads that wait for it
        self.hurry()
        if wait and threading.current_thread() is not self.thread:
            self.thread.join()


# ---- results ----


class Part:
    """The results of a chunk up to an exception."""

    def __init__(self, results: list[Any], exception: BaseException) -> None:
        self.results, self.exception = results, exception


def _print(out: str, err: str) -> None:
    """Prints what a function has printed."""
    for file, text in (sys.stdout, out), (sys.stderr, err):
        try:
            if text:
                file.write(text)
        except Exception:
            pass  # it is closed, for example. The result does not depend on that


def _exception(pickled: bytes, trace: str) -> BaseException:
    e = pickle.loads(pickled)
    if not isinstance(e, BaseException):
        raise TypeError(f"the worker's reply has {type(e).__name__} in place of an exception")
    e.__cause__ = RemoteTraceback(trace)
    return e


def _results(futures: Iterator[Future], timeout: float | None, begin: float) -> Iterator[Any]:
    """The items' results. Ends with the exception of the first item that has one."""
    for future in futures:
        chunk = future.result(None if timeout is None else max(0.0, begin + timeout - time.monotonic()))
        results = chunk.results if isinstance(chunk, Part) else chunk
        results.reverse()
        while results:
            yield results.pop()  # so that neither the future nor this generator keeps it
        if isinstance(chunk, Part):
            raise chunk.exception


def _in_order(futures: collections.deque[Future], chunks: Iterator[Future]) -> Iterator[Future]:
    """Submits a chunk for each one that was taken. Cancels the others at its end."""
    try:
        while futures:
            yield futures.popleft()
            futures.extend(itertools.islice(chunks, 1))
    finally:
        for future in futures:
            future.cancel()


def _as_they_end(futures: Iterable[Future], chunks: Iterator[Future], timeout: float | None, begin: float) -> Iterator[Future]:
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    left = set(futures)
    for future in futures:
        future.add_done_callback(ended.put)
    try:
        while left:
            try:
                future = ended.get(timeout=None if timeout is None else max(0.0, begin + timeout - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"{len(left)} chunks have not ended yet") from None
            left.discard(future)
            for another in itertools.islice(chunks, 1):
                left.add(another)
                another.add_done_callback(ended.put)
            yield future
    finally:
        for future in left:
            future.cancel()


def _can_be_sliced(column: Any) -> bool:
    """Whether slices have the same items, and are pickled faster than one item after the other."""
    numpy = sys.modules.get("numpy")
    return type(column) in (list, tuple, range) or (numpy is not None and type(column) is numpy.ndarray and column.ndim > 0)


def _columns(iterables: tuple[Iterable[Any], ...], counted: bool) -> tuple[Any, int | None]:
    """The arguments of a map, and the number of items if all columns can be sliced. With `counted`, they can be sliced afterwards."""
    if counted and not all(map(_can_be_sliced, iterables)):
        iterables = tuple(zip(*zip(*iterables))) if len(iterables) > 1 else (list(iterables[0]),)
    if all(map(_can_be_sliced, iterables)):
        return iterables, min(map(len, iterables), default=0)  # type: ignore[arg-type]
    return iterables, None


def _chunks(columns: Any, count: int | None, size: int) -> Iterator[Any]:
    """Tuples of columns, with so many items each."""
    if count is not None:
        for i in range(0, count, size):
            yield tuple(column[i:min(i + size, count)] for column in columns)
        return
    rows = zip(*columns) if len(columns) > 1 else iter(columns[0])
    while items := list(itertools.islice(rows, size)):
        yield tuple(zip(*items)) if len(columns) > 1 else (items,)


# ---- the executor ----

_open: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def finish_all() -> None:
    """At the end of the program, calls that were submitted are executed, as with the executors of concurrent.futures."""
    for dispatcher in list(_open):
        dispatcher.close(True, False)


class Executor(cf.Executor):
    """Executes Python functions on leased workers, with the interface of concurrent.futures.Executor.

    max_workers: the number of workers.
    initializer, initargs: a function that each worker executes first, also a worker that replaces a dead one.
    modules: modules that workers can import besides those of their node, by names or paths of files and directories. A virtual environment
        gives its packages.
    session: the default is one session of this process, whose options come from the environment.
    across: leases workers on several executors, if no executor has enough.
    options: fields of LeaseOptions, such as memory=4 << 30, call_limit=60 or wait=10. Times are in seconds.

    Opening fails with PythonVersionError if the nodes do not have Python in the version of this interpreter.
    """

    def __init__(self, max_workers: int = 1, initializer: Callable[..., Any] | None = None, initargs: tuple[Any, ...] = (), *, modules: Any = (),
                 session: Any = None, across: bool = False, **options: Any) -> None:
        from . import Lease

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
        try:
            opened = (Lease.across if across else Lease)(_pickles.WORKER_LIBRARY, session=session, **options)
        except FunctionError as e:
            if e.code:
                kind = PythonVersionError if e.code == 1 else BrokenExecutor
                raise kind(e.text, -300 if e.code == 1 else -600, False, e.code) from None
            raise
        self._max_workers = max_workers
        self._dispatcher = Dispatcher(opened if across else [opened])
        _open.add(self._dispatcher)
        self._finalizer = weakref.finalize(self, self._dispatcher.close, False, False)
        self._finalizer.atexit = False

    @property
    def leases(self) -> list[Any]:
        """The leases of the workers."""
        return self._dispatcher.leases

    def __repr__(self) -> str:
        d = self._dispatcher
        return f"<rfaas.Executor, {'shut down' if d.closed else f'{d.workers} workers, {len(d.busy)} busy, {len(d.pending)} calls wait'}>"

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Starts fn(*args, **kwargs) on a worker. Returns its future."""
        return self._dispatcher.submit(fn, CALL, (args, kwargs))

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int | None = None,
            buffersize: int | None = None, unordered: bool = False) -> Iterator[Any]:
        """Returns an iterator over fn(*items), as map does.

        One call gets `chunksize` items. The default makes about 16 calls for each worker, or calls of one item with `buffersize`.
        buffersize: the most items whose results were not taken yet. Without it, all items are taken at once.
        unordered: returns results of chunks in the order in which the chunks end.
        timeout: TimeoutError is raised if a result is not there so many seconds after this call.
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
        columns, count = _columns(iterables, chunksize is None and buffersize is None)
        if chunksize is None:
            chunksize = max(1, -(-count // (CHUNKS * self._max_workers))) if buffersize is None and count else 1
        chunks = (self._dispatcher.submit(fn, operation, (chunk[0] if operation == STARRED else chunk, None))
                  for chunk in _chunks(columns, count, chunksize))
        futures: collections.deque[Future] = collections.deque()
        try:
            for future in itertools.islice(chunks, None if buffersize is None else -(-buffersize // chunksize)):
                futures.append(future)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return _results(_as_they_end(futures, chunks, timeout, begin) if unordered else _in_order(futures, chunks), timeout, begin)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accepts no more calls. Releases the workers when all calls have ended. With `wait`, returns after that.

        cancel_futures: cancels the calls that have not started.
        """
        self._dispatcher.close(wait, cancel_futures)
