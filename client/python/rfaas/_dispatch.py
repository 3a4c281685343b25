"""The workers of rfaas.Executor and the calls that wait for them.

A thread that waits for a result looks for replies and starts the next calls itself, because handing them to another thread would take some ten
microseconds. Only one thread at a time does this: the driver. If no thread waits, a background thread becomes the driver after GRACE seconds.
"""
from __future__ import annotations

import collections
import functools
import os
import pickle
import queue
import re
import sys
import threading
import time
from concurrent.futures._base import FINISHED, PENDING, RUNNING, InvalidStateError
from typing import Any, Callable

from . import _frames, _pickles, _rfaas
from ._frames import FETCH, MORE, PART, PING, RAISED, REPLY, REQUEST, VALUE
from ._futures import BrokenExecutor, Future, RemoteTraceback
from ._generated import ConnectionError, Error, FunctionError, InvalidError, LeaseError
from ._maps import Part

GRACE = 0.001  # seconds until the background thread becomes the driver, if no thread waits
LOOK = 0.001  # seconds that a driver waits before it looks for calls that other threads have started
ROOM = 65536  # bytes for a reply. A second call fetches a larger one
PING_REQUEST = REQUEST.pack(b"", PING, 0, 0, 0)
FETCH_REQUEST = REQUEST.pack(b"", FETCH, 0, 0, 0)

_forks = 0  # number of forks that led to this process


def _after_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_after_fork)


class Worker:
    """A worker of a lease, which executes one call at a time, so that its death affects only one call."""

    __slots__ = "call", "known", "request", "future", "repeats", "replacement", "lost"

    def __init__(self, lease: Any, index: int) -> None:
        self.repeats, self.lost = 0, False
        self.replacement: threading.Thread | None = None
        self.call = lease.function("call", capacity=ROOM, worker=index)
        self.known: set[bytes] = set()  # digests of functions
        self.request: Any = None
        self.future: Future | None = None

    def start(self, future: Future) -> None:
        operation, code, data, buffers = future._job
        # A worker that has lost the function gets the request again. Buffers may have changed by then, so a request with buffers has the function.
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


class Bell:
    """An event for one thread that waits. A signal handler or a finalizer may set it while the thread that it interrupts does."""

    def __init__(self) -> None:
        self.rung: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        if self.rung.empty():
            self.rung.put(None)

    def wait(self, timeout: float | None = None) -> None:
        """Also clears it."""
        try:
            self.rung.get(timeout=timeout)
        except queue.Empty:
            pass


class Dispatcher:
    """The workers of an executor and the calls that wait for them."""

    def __init__(self, leases: list[Any], largest: int) -> None:
        self.leases, self.forks, self.largest = leases, _forks, largest  # largest: bytes of a result
        self.all = [Worker(lease, i) for lease in leases for i in range(lease.workers)]
        self.idle = self.all[::-1]
        self.busy: dict[Worker, None] = {}
        self.pending: collections.deque[Future] = collections.deque()
        self.lock = threading.RLock()  # guards the fields above. A signal handler or a finalizer may submit a call
        self.done: collections.deque[tuple[Future, Any]] = collections.deque()  # replies that the driver must unpickle
        self.failures: collections.deque[tuple[Future, Exception]] = collections.deque()  # to be set without the lock
        self.driver: dict[int, int] = {}  # 0: the thread that is the driver
        self.inside = 0  # the thread that is the driver and may execute callbacks now
        self.left = threading.Event()  # the background thread has let another thread be the driver
        self.bell = Bell()  # wakes the background thread
        self.attended = self.hurried = self.wanted = self.background = self.closed = False
        self.turns = 0  # calls of look() by drivers other than the background thread
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
        self.check_process()
        with self.lock:
            if self.closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self.broken:
                raise BrokenExecutor(self.broken.text, self.broken.status, False, self.broken.code)
            if future._state == FINISHED:
                return future
            if self.idle:
                try:
                    self.next(self.idle.pop(), future)
                except BaseException:
                    self.recover()
                    raise
            else:
                self.queue(future)
        if not self.attended:
            self.bell.set()
        if self.failures:
            self.end_failures()
        return future

    def check_process(self) -> None:
        if self.forks != _forks:
            raise InvalidError("the executor belongs to the parent of this process: open another one", -200, False)

    def queue(self, future: Future) -> None:
        operation, code, data, buffers = future._job
        if buffers:  # the program may change them before the call starts
            future._job = operation, code, data, [memoryview(bytes(b)) for b in buffers]
        self.pending.append(future)

    def start(self, worker: Worker, future: Future) -> bool:
        """Starts a call on a worker that is in no list. Returns whether the worker is in use afterwards. Under the lock."""
        if not future._begin():
            return False
        worker.request, worker.future, worker.repeats = None, future, 0
        try:
            worker.start(future)
        except Error as e:
            return self.failed(worker, e)
        except Exception as e:
            self.failures.append((future, e))
            worker.future = None
            return False
        self.busy[worker] = None
        return True

    def next(self, worker: Worker, future: Future | None = None) -> None:
        """Gives `future` or the next call that waits to a worker, or makes it idle. Under the lock."""
        while future or self.pending:
            if self.start(worker, future or self.pending.popleft()):
                if not self.pending or not self.idle:
                    return
                worker = self.idle.pop()  # the first worker is lost, and its call waits again
            future = None
        self.idle.append(worker)
        if self.over():
            self.bell.set()

    # ---- ending calls ----

    def drive(self, future: Future, timeout: float | None) -> bool:
        """Is the driver until the future has ended, or for `timeout` seconds. If another thread is the driver, waits for the future. Returns whether
        the future has a result or an exception."""
        self.check_process()
        end = None if timeout is None else time.monotonic() + timeout
        me = threading.get_ident()
        in_callback = self.inside == me
        while future._state in (PENDING, RUNNING):
            left = None if end is None else end - time.monotonic()
            if left is not None and left < 0:
                break
            try:
                if self.become_driver():
                    self.drive_until(future, end)
                    continue
            except BaseException:
                if self.driver.get(0) == me:
                    self.recover()
                raise
            finally:
                if not in_callback and self.leave() and self.busy:
                    self.bell.set()
            self.hurried = True  # the background thread takes over as soon as the driver leaves
            with future._condition:
                if future._state in (PENDING, RUNNING):
                    future._condition.wait(LOOK if in_callback else left)
        return future._state == FINISHED

    def drive_until(self, future: Future, end: float | None) -> None:
        while future._state in (PENDING, RUNNING) and self.busy:
            left = None if end is None else end - time.monotonic()
            if left is not None and left < 0:
                return
            self.turns += 1
            self.look(left)

    def become_driver(self) -> bool:
        """The driver is an entry of a dictionary instead of a lock, so that leave() can remove it wherever Ctrl-C interrupted the thread."""
        me = threading.get_ident()
        if not self.busy:  # the worker is being replaced
            return False
        if self.driver.setdefault(0, me) == me:
            return True
        if not self.background:
            return False
        self.left.clear()
        self.wanted = True
        self.left.wait(5 * LOOK)
        return self.driver.setdefault(0, me) == me

    def leave(self) -> bool:
        """Returns whether this thread was the driver."""
        if self.driver.get(0) != threading.get_ident():
            return False
        del self.driver[0]
        return True

    def look(self, timeout: float | None) -> None:
        """Waits until a call ends, at most for `timeout` seconds, and handles its end. Only the driver calls it."""
        busy = list(self.busy)
        if len(busy) < len(self.all) and (timeout is None or timeout > LOOK):  # another thread may start a call on another worker
            timeout = LOOK
        index = _rfaas.wait_any([worker.request for worker in busy], timeout)
        if index is None:
            return
        before, self.inside = self.inside, threading.get_ident()
        try:
            self.ended(busy[index])
        finally:
            self.inside = before

    def ended(self, worker: Worker) -> None:
        future = worker.future
        try:
            reply = worker.request.result()
            outcome = REPLY.unpack_from(reply)[0]
            if outcome > PART:
                return self.again(worker, future, outcome, reply)
        except Exception as e:
            error = e if isinstance(e, Error) else FunctionError(f"the reply of the worker is malformed: {e}", -400)
            with self.lock:
                self.busy.pop(worker, None)
                if not self.failed(worker, error):
                    self.next(worker)
                elif self.pending and self.idle:
                    self.next(self.idle.pop())
            return self.end_failures()
        with self.lock:
            if future:
                self.done.append((future, reply))
            worker.future = worker.request = None  # an idle worker keeps no large result
            self.busy.pop(worker, None)
            self.next(worker)
        self.deliver_all()
        if self.failures:
            self.end_failures()

    def again(self, worker: Worker, future: Future, outcome: int, reply: Any) -> None:
        """Sends the next request of a call whose reply had no room, or whose function the worker has lost."""
        worker.repeats += 1
        if outcome > MORE or worker.repeats > 2:
            raise ValueError(f"the outcome is {outcome} in reply {worker.repeats}")
        if outcome == MORE:
            size = int(bytes(reply[REPLY.size:REPLY.size + 20]))
            if not ROOM < size <= self.largest:
                raise ValueError(f"it announces a result of {size} bytes, and the largest is {self.largest} (option bulk_max)")
            worker.fetch(size)
        else:
            worker.known.clear()
            worker.start(future)

    def recover(self) -> None:
        """Repairs the lists after Ctrl-C, which may interrupt the main thread anywhere: puts each worker into the list for what it does, and
        ends the futures whose calls have ended."""
        with self.lock:
            self.idle, self.busy = [], {}
            for worker in self.all:
                if worker.replacement:
                    if worker.replacement.ident is None:
                        self.start_replacement(worker)
                elif worker.future and worker.request:
                    self.busy[worker] = None
                elif not worker.lost:
                    if worker.future:
                        self.failures.append((worker.future, FunctionError("Ctrl-C came while the call was being started: it may have been executed", -400)))
                        worker.future = None
                    self.idle.append(worker)
            if self.pending and self.idle:
                self.next(self.idle.pop())
        self.deliver_all(())
        self.end_failures()

    def deliver_all(self, interrupts: Any = KeyboardInterrupt) -> None:
        """Unpickles the replies and ends their futures. Called by the driver, or by the thread that was the driver."""
        while self.done:
            reply = self.done[0]
            future = reply[0]
            try:
                if future._state != FINISHED:  # otherwise this is a callback of it
                    self.deliver(*reply)
            except interrupts:
                raise  # recover() delivers it again
            except BaseException as e:  # the reply is malformed, or its value cannot be unpickled here
                future._finish(None, e)
            if self.done and self.done[0] is reply:  # a callback may have delivered it by waiting for another call
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
        """Handles a call that failed for another reason than an exception of its function. Returns whether the worker is lost. Under the lock."""
        future = worker.future
        lost = isinstance(e, (ConnectionError, LeaseError))
        if lost and not e.started:
            self.pending.appendleft(future)
        else:
            self.failures.append((future, type(e)(f"{future._job[1].name}: {said(e)}", e.status, e.started, e.code)))
        worker.future = None
        if isinstance(e, LeaseError):
            self.drop(worker, e)
        elif lost:
            self.replace(worker)
        return lost

    def end_failures(self) -> None:
        """Ends futures without the lock, because their callbacks may wait for other threads."""
        while True:
            try:
                future, e = self.failures[0]
                future._finish(None, e)
                self.failures.remove((future, e))
            except (IndexError, ValueError, InvalidStateError):
                if not self.failures:
                    return  # another thread has ended them

    # ---- dead workers ----

    def replace(self, worker: Worker) -> None:
        """Waits for a new worker in another thread, so that the other workers continue."""
        worker.replacement = threading.Thread(target=self.await_replacement, args=(worker,), name="rfaas.Executor replacement", daemon=True)
        self.start_replacement(worker)

    def start_replacement(self, worker: Worker) -> None:
        try:
            worker.replacement.start()  # type: ignore[union-attr]
        except RuntimeError:  # no thread can be started, for example at the end of the program
            self.await_replacement(worker)

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
            worker.known.clear()
            worker.replacement = None
            if error is None:
                self.next(worker)
            else:
                self.drop(worker, error)
        self.end_failures()
        self.bell.set()

    def drop(self, worker: Worker, e: Error) -> None:
        """Continues without the worker. If it was the last one, ends the calls that wait. Under the lock."""
        worker.lost = True
        if not all(worker.lost for worker in self.all):
            return
        self.broken = BrokenExecutor(f"the executor has no workers any more: {said(e)}", e.status, e.started, e.code)
        while self.pending:
            future = self.pending.popleft()
            if future._begin():
                self.failures.append((future, self.broken))
        self.bell.set()

    # ---- the background thread ----

    def hurry(self) -> None:
        """Makes the background thread the driver at once, because a thread waits for futures without driving."""
        self.hurried = True
        self.bell.set()

    def over(self) -> bool:
        return self.closed and not self.busy and not self.pending and not any(worker.replacement for worker in self.all)

    def run(self) -> None:
        while not self.over():
            self.attended = False
            if not self.busy or self.driver:
                self.bell.wait()
            self.bell.wait(0)
            self.attended = True
            turns = -1
            while not self.hurried and turns != self.turns and self.busy:
                turns = self.turns
                self.bell.wait(GRACE)
            if self.busy and self.become_driver():
                self.background = True
                while self.busy and not self.wanted:
                    self.look(None)
                self.wanted = self.background = False
                self.leave()
                self.left.set()
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
            future._begin()  # notifies the threads that wait for it
        self.hurry()
        if wait and threading.get_ident() not in (self.thread.ident, self.inside):  # not in a callback
            self.thread.join()


# What the C library says before the reason: names of its functions, of the function of the worker's library, and of the class of the error.
_CALL = re.compile(r"^(?:wait|waitany|invoke)? ?call(?: on worker (\d+) failed)?: (?:(?:worker died|time limit exceeded): )?(?:function call of worker (\d+): )?")
_INIT = re.compile(r"^lease: init call start on worker (\d+) failed: (?:start Python: )?")


def said(e: Error) -> str:
    """Returns the text of an error of the C library in the words of an executor."""
    text = _CALL.sub(lambda m: f"worker {m[1] or m[2]}: " if m[1] or m[2] else "", e.text)
    return _INIT.sub(lambda m: f"the start of worker {m[1]}: ", text)


def _print(out: str, err: str) -> None:
    """Prints the output of a function."""
    for file, text in (sys.stdout, out), (sys.stderr, err):
        try:
            if text:
                file.write(text)
        except Exception:
            pass  # for example, the file is closed. The result does not depend on it


def _exception(pickled: bytes, trace: str) -> BaseException:
    e = pickle.loads(pickled)
    if not isinstance(e, BaseException):
        raise TypeError(f"the worker's reply has a {type(e).__name__} in place of an exception")
    e.__cause__ = RemoteTraceback(trace)
    return e
