"""Maps of rfaas.Executor: how items are divided among calls, and how the results come back."""
from __future__ import annotations

import collections
import itertools
import queue
import sys
import time
from typing import Any, Iterable, Iterator

from ._futures import Future


class Part:
    """The results of a chunk up to an exception."""

    def __init__(self, results: list[Any], exception: BaseException) -> None:
        self.results, self.exception = results, exception


def results(futures: Iterator[Future], timeout: float | None, begin: float) -> Iterator[Any]:
    """Yields the results of the items. Raises the exception of the first item that has one."""
    for future in futures:
        chunk = future.result(None if timeout is None else max(0.0, begin + timeout - time.monotonic()))
        results = chunk.results if isinstance(chunk, Part) else chunk
        results.reverse()
        while results:
            yield results.pop()  # pop, so that neither the future nor this generator keeps the result
        if isinstance(chunk, Part):
            raise chunk.exception


def in_order(futures: collections.deque[Future], chunks: Iterator[Future]) -> Iterator[Future]:
    """Yields futures. Submits another chunk for each one that was taken. Cancels the futures that are left when the generator ends."""
    try:
        while futures:
            yield futures.popleft()
            futures.extend(itertools.islice(chunks, 1))
    finally:
        for future in futures:
            future.cancel()


def as_they_end(futures: Iterable[Future], chunks: Iterator[Future], timeout: float | None, begin: float) -> Iterator[Future]:
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


def can_be_sliced(column: Any) -> bool:
    """Returns whether slices of the column have the same items, and are pickled faster than single items."""
    numpy = sys.modules.get("numpy")
    return type(column) in (list, tuple, range) or (numpy is not None and type(column) is numpy.ndarray and column.ndim > 0)


def columns_of(iterables: tuple[Iterable[Any], ...], counted: bool) -> tuple[Any, int | None]:
    """Returns the columns of a map, and the number of items if all columns can be sliced, else None. With `counted`, makes lists of columns that
    cannot be sliced."""
    if counted and not all(map(can_be_sliced, iterables)):
        iterables = tuple(zip(*zip(*iterables))) if len(iterables) > 1 else (list(iterables[0]),)
    if all(map(can_be_sliced, iterables)):
        return iterables, min(map(len, iterables), default=0)  # type: ignore[arg-type]
    return iterables, None


def chunks_of(columns: Any, count: int | None, size: int) -> Iterator[Any]:
    """Yields tuples of columns, each with `size` items. The last tuple may have fewer."""
    if count is not None:
        for i in range(0, count, size):
            yield tuple(column[i:min(i + size, count)] for column in columns)
        return
    rows = zip(*columns) if len(columns) > 1 else iter(columns[0])
    while items := list(itertools.islice(rows, size)):
        yield tuple(zip(*items)) if len(columns) > 1 else (items,)
