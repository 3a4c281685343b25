"""Futures of rfaas.Executor, and its exceptions."""
from __future__ import annotations

import concurrent.futures as cf
import os
import threading
from concurrent.futures._base import FINISHED, PENDING, RUNNING
from typing import TYPE_CHECKING, Any, Callable, Generator

from ._generated import LeaseError, UnsupportedError

if TYPE_CHECKING:
    from ._dispatch import Dispatcher

AWAIT_LOOK = 20e-6  # seconds for which `await` polls for the reply


class PythonVersionError(UnsupportedError):
    """The executor's node has no Python of the client's version."""


class BrokenExecutor(LeaseError, cf.BrokenExecutor):
    """The executor has lost all of its workers, or the initializer has failed."""


class RemoteTraceback(Exception):
    """The traceback of an exception in a worker. It is the __cause__ of the exception."""

    @property
    def tb(self) -> str:
        return self.args[0]

    def __str__(self) -> str:
        return f'\n"""\n{self.tb}"""'


_conditions = threading.RLock()  # guards the creation of conditions. A finalizer that a garbage collection runs may take it again


def _after_fork() -> None:
    global _conditions
    _conditions = threading.RLock()  # another thread of the parent may hold it


os.register_at_fork(after_in_child=_after_fork)
_LAZY = vars(cf.Future()).keys() == {"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"}


class Future(cf.Future):
    """The future of a call. Its condition is made when a thread needs it, because making one takes a microsecond."""

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
        """Marks the call as started. Returns False if it has been cancelled."""
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
                return  # it was finished before Ctrl-C
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

    def __await__(self) -> Generator[Any, None, Any]:
        """Returns the result of `await executor.submit(f)`. First polls for the reply for some microseconds, because another thread would take longer
        to wake the event loop."""
        if self._state != FINISHED and not self._dispatcher.drive(self, AWAIT_LOOK):
            import asyncio

            return (yield from asyncio.wrap_future(self).__await__())
        return self.result()

    def add_done_callback(self, fn: Callable[[cf.Future], object]) -> None:
        super().add_done_callback(fn)
        self.hurry()

    def hurry(self) -> None:
        """Makes the background thread look for replies at once, because this thread will wait without driving."""
        if self._state != FINISHED:
            self._dispatcher.hurry()
