"""Leases for all ranks of a communicator of mpi4py, as rfaas_mpi.h opens them. Rank 0 chooses the executors, so that ranks with neighbouring numbers share
one, and a thousand ranks do not compete for the same cores."""
from __future__ import annotations

import contextlib
import pickle
from typing import Any, Callable, Iterator

from ._generated import BusyError, ConnectionError, Error


@contextlib.contextmanager
def joined(comm: Any) -> Iterator[None]:
    """Surrounds what precedes open_together. If it raises an error on a rank, open_together raises that on the other ranks, which would otherwise wait. comm may be None."""
    try:
        yield
    except BaseException as e:
        if callable(getattr(comm, "Get_rank", None)):
            agree(comm, comm.Get_rank(), e)
        raise


def open_together(comm: Any, places: Callable[[int], list[str]], open_at: Callable[..., Any]) -> Any:
    """Opens a lease on every rank, or on none. Collective.

    places: returns an executor for each of n ranks. Only rank 0 calls it.
    open_at: opens this rank's lease at an executor, or wherever there is room if it gets no argument.
    """
    if not callable(getattr(comm, "Get_rank", None)):
        raise TypeError(f"comm is a {type(comm).__name__}, want a communicator of mpi4py, such as MPI.COMM_WORLD")
    rank, error, chosen, lease = comm.Get_rank(), None, None, None
    if rank == 0:
        try:
            chosen = places(comm.Get_size())
        except BaseException as e:  # Ctrl-C too: the other ranks wait for this one
            error = e
    agree(comm, rank, error)
    place = comm.scatter(chosen)
    try:
        try:
            lease = open_at(place)
        except (BusyError, ConnectionError):  # another client has taken its cores meanwhile
            lease = open_at()
    except BaseException as e:
        error = e
    try:
        agree(comm, rank, error)
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    return lease


def agree(comm: Any, rank: int, error: BaseException | None) -> None:
    """Raises an error on every rank if a rank has one."""
    errors = comm.allgather(None if error is None else portable(error))
    if error is not None:
        raise error
    for number, e in enumerate(errors):
        if isinstance(e, Error):
            raise type(e)(f"{e.text} (rank {number})", e.status, e.started, e.code)
        if e is not None:
            raise e


def portable(error: BaseException) -> BaseException:
    """Returns the error, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
