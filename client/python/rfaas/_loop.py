"""Calls that tasks of asyncio wait for. An event loop watches the descriptor of a lease while its tasks wait for calls of the lease."""
from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Generator

from ._generated import Error

if TYPE_CHECKING:
    import asyncio

    from ._rfaas import Request

LOOK = 20e-6  # seconds for which `await` polls for the reply


class Watch:
    """The tasks that wait for calls of a lease. They may belong to several event loops, which share the descriptor."""

    def __init__(self, lease: Any) -> None:
        self.lease = lease
        self.fd = os.dup(lease._descriptor())  # the lease closes its own when it is released
        self.waiting: dict[asyncio.Future[None], Request] = {}
        self.armed = False

    def __del__(self) -> None:
        os.close(self.fd)

    def future(self, loop: asyncio.AbstractEventLoop, request: Request) -> asyncio.Future[None]:
        """Returns a future that ends when the call has ended."""
        waiter = loop.create_future()
        self.waiting[waiter] = request
        loop.add_reader(self.fd, self.look, loop)
        if not self.armed:
            self.armed = True
            self.lease._arm()
        self.end(loop, waiter, request)  # the descriptor may have become readable for this call before the call was in the dictionary
        return waiter

    def end(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None], request: Request) -> None:
        """Ends the future if its call has ended. Runs on the thread of the loop."""
        other = waiter.get_loop()
        if waiter.cancelled() or other.is_closed():
            self.waiting.pop(waiter, None)
        elif request.wait(0) and self.waiting.pop(waiter, None):
            if other is loop:
                waiter.set_result(None)
            else:
                other.call_soon_threadsafe(lambda: waiter.done() or waiter.set_result(None))

    def look(self, loop: asyncio.AbstractEventLoop) -> None:
        """The descriptor is readable."""
        self.armed = False
        for waiter, request in list(self.waiting.items()):
            self.end(loop, waiter, request)
        if self.waiting:
            self.armed = True
            self.lease._arm()
        if not any(waiter.get_loop() is loop for waiter in list(self.waiting)):
            loop.remove_reader(self.fd)


def await_request(request: Request) -> Generator[Any, None, Any]:
    """Waits for the result of a request. First polls for the reply for some microseconds, because the descriptor would take longer."""
    lease: Any = request.function.lease
    watch = lease._watch
    if not request.wait(0 if watch and watch.waiting else LOOK):
        import asyncio

        try:
            if watch is None:
                watch = lease._watch = Watch(lease)
            yield from watch.future(asyncio.get_running_loop(), request)
        except asyncio.CancelledError:
            request.cancel()
            raise
        except Error:  # the lease was released
            if not request.wait(0):
                raise
    return request.result()
