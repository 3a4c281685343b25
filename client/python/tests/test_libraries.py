"""Other libraries on rfaas.Executor: dask, SciPy, joblib and tqdm. Debian: python3-dask, python3-joblib, python3-scipy, python3-tqdm."""
import importlib.util
import io
import os
import sys
import unittest

import cloudpickle
import numpy as np
import rfaas
from cluster import Cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def setUpModule():
    unittest.addModuleCleanup(Cluster(cores=8).stop)
    unittest.addModuleCleanup(lambda: rfaas.default_session().close())


def needs(name):
    return unittest.skipUnless(importlib.util.find_spec(name), f"needs {name}")


def square(x):
    return x * x


def pid_and(x):
    return os.getpid(), x


def fail(x):
    raise LookupError(f"item {x}")


def rosenbrock(x):
    """Has its minimum 0 at 1, 1, ..."""
    return float(np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2))


class Libraries(unittest.TestCase):
    def setUp(self):
        self.executor = rfaas.Executor(3)
        self.addCleanup(self.executor.shutdown)

    @needs("dask")
    def test_dask(self):
        import dask

        here = dask.delayed(pid_and)
        total = dask.delayed(sum)([dask.delayed(square)(i) for i in range(30)])
        self.assertEqual(total.compute(scheduler=self.executor), sum(i * i for i in range(30)))
        with dask.config.set(scheduler=self.executor):
            places = dask.compute(*[here(i) for i in range(12)])
        self.assertEqual([x for _, x in places], list(range(12)))
        self.assertNotIn(os.getpid(), {pid for pid, _ in places})
        with self.assertRaisesRegex(LookupError, "item 4"):
            dask.delayed(fail)(4).compute(scheduler=self.executor)

    @needs("dask.array")
    def test_dask_array(self):
        import dask.array as da

        x = np.arange(4096.0).reshape(64, 64)
        blocks = da.from_array(x, chunks=(16, 64))
        with np.testing.suppress_warnings():
            np.testing.assert_allclose((blocks @ blocks.T).sum(axis=0).compute(scheduler=self.executor), (x @ x.T).sum(axis=0))

    @needs("scipy")
    def test_scipy_workers(self):
        from scipy import integrate, optimize

        found = optimize.differential_evolution(rosenbrock, [(-2, 2)] * 3, workers=self.executor.map, updating="deferred", seed=1, maxiter=60, popsize=8)
        alone = optimize.differential_evolution(rosenbrock, [(-2, 2)] * 3, workers=map, updating="deferred", seed=1, maxiter=60, popsize=8)
        np.testing.assert_array_equal(found.x, alone.x)
        grid = optimize.brute(rosenbrock, ((-1.0, 1.5, 6j),) * 2, workers=self.executor.map, finish=None)
        np.testing.assert_array_equal(grid, optimize.brute(rosenbrock, ((-1.0, 1.5, 6j),) * 2, finish=None))
        value, error = integrate.quad_vec(np.sin, 0, np.pi, workers=self.executor.map)
        self.assertAlmostEqual(value, 2)
        with self.assertRaisesRegex(LookupError, "item"):
            optimize.brute(fail, ((0, 1, 2j),), workers=self.executor.map, finish=None)

    @needs("joblib")
    def test_joblib(self):
        import joblib
        import rfaas.joblib  # noqa: F401

        with joblib.parallel_backend("rfaas", executor=self.executor):
            results = joblib.Parallel()(joblib.delayed(pid_and)(i) for i in range(200))
            self.assertEqual([x for _, x in results], list(range(200)))
            self.assertNotIn(os.getpid(), {pid for pid, _ in results})
            with self.assertRaisesRegex(LookupError, "item 7"):
                joblib.Parallel()(joblib.delayed(fail)(i) for i in [7])
            self.assertEqual(joblib.Parallel()(joblib.delayed(nested)(i) for i in range(4)), [[0, 1, 4]] * 4)
        self.assertEqual(self.executor.submit(square, 5).result(), 25)
        with joblib.parallel_backend("rfaas", n_jobs=2, call_limit=30):  # an executor of its own
            self.assertEqual(joblib.Parallel()(joblib.delayed(square)(i) for i in range(20)), [i * i for i in range(20)])
        with self.assertRaisesRegex(ValueError, "besides an executor: call_limit"):
            joblib.parallel_backend("rfaas", executor=self.executor, call_limit=30)

    @needs("tqdm")
    def test_tqdm(self):
        from tqdm import tqdm

        bar = io.StringIO()
        futures = [self.executor.submit(square, i) for i in range(40)]
        results = sorted(f.result() for f in tqdm(rfaas.as_completed(futures), total=len(futures), file=bar))
        self.assertEqual(results, [i * i for i in range(40)])
        self.assertIn("40/40", bar.getvalue())
        from tqdm.contrib.concurrent import _executor_map  # what process_map calls

        self.assertEqual(_executor_map(lambda max_workers, **_: rfaas.Executor(max_workers), square, range(9), max_workers=2, file=bar), [i * i for i in range(9)])


def nested(_):
    import joblib

    return joblib.Parallel(n_jobs=2)(joblib.delayed(square)(i) for i in range(3))


if __name__ == "__main__":
    unittest.main()
