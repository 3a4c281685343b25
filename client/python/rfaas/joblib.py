"""A backend of joblib that executes on the workers of an rfaas.Executor. Importing this module registers it:

    import joblib, rfaas, rfaas.joblib

    with rfaas.Executor(8) as executor, joblib.parallel_backend("rfaas", executor=executor):
        squares = joblib.Parallel()(joblib.delayed(pow)(x, 2) for x in range(1000))

Workers need joblib: on their nodes, or by rfaas.Executor(modules=["joblib"]).
"""
from __future__ import annotations

from typing import Any, Callable

from joblib.parallel import AutoBatchingMixin, ParallelBackendBase, SequentialBackend, register_parallel_backend

from ._executor import Executor
from ._futures import Future


class _Job:
    """The interface of multiprocessing's AsyncResult that joblib uses."""

    def __init__(self, future: Future) -> None:
        self.get = future.result


class Backend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """A backend with the workers of `executor`, or of an executor of its own with the other options, which Parallel closes."""

    supports_timeout = True

    def __init__(self, executor: Executor | None = None, nesting_level: int | None = None, **options: Any) -> None:
        options.pop("inner_max_num_threads", None)  # joblib has refused it: a worker uses as many threads as it has cores
        if executor is not None and options:
            raise ValueError(f"options of rfaas.Executor besides an executor: {', '.join(options)}")
        super().__init__(nesting_level=nesting_level)
        self.given, self.options = executor, options
        self.executor = executor

    def __reduce__(self) -> tuple[Any, ...]:  # in a worker, functions that use joblib run in one process
        return SequentialBackend, ()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs must not be 0")
        if self.given is None:
            return n_jobs if n_jobs and n_jobs > 0 else self.options.get("max_workers", 1)
        most = self.given._max_workers
        return most if n_jobs is None or n_jobs < 0 else min(n_jobs, most)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
        n_jobs = self.effective_n_jobs(n_jobs)
        self.parallel = parallel
        if self.given is None:
            self.executor = Executor(**{**self.options, "max_workers": n_jobs})
        return n_jobs

    def apply_async(self, func: Callable[[], Any], callback: Callable[[Any], Any] | None = None) -> _Job:
        assert self.executor
        future = self.executor.submit(func)
        if callback:
            future.add_done_callback(lambda f: None if f.cancelled() or f.exception() else callback(f.result()))
        return _Job(future)

    def abort_everything(self, ensure_ready: bool = True) -> None:
        dispatcher = self.executor._dispatcher if self.executor else None
        if dispatcher:
            with dispatcher.lock:
                waiting = list(dispatcher.pending)
                dispatcher.pending.clear()
            for future in waiting:
                future.cancel()
                future._begin()

    def terminate(self) -> None:
        super().terminate()
        if self.given is None and self.executor:
            self.executor.shutdown()
            self.executor = None


register_parallel_backend("rfaas", Backend)
