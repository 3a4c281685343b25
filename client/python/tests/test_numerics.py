"""Tests of numpy and SciPy themselves with rfaas.Executor. Debian: python3-pytest.

numpy's tests run in workers, a module in each call. SciPy's tests of the parameter workers= run in the client, and their functions in workers.

What does not apply:
- numpy's other modules: they need hypothesis, compilers or files beside them, or take long
- SciPy's other tests: they do not use workers= with a pool of processes
"""
import importlib.util
import sys
import unittest
from unittest import mock

import cloudpickle
import rfaas
from cluster import Cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUMPY = ["core.tests.test_einsum", "core.tests.test_indexing", "fft.tests.test_pocketfft", "lib.tests.test_stride_tricks", "linalg.tests.test_regression",
         "polynomial.tests.test_chebyshev", "random.tests.test_random"]
SCIPY = {"integrate.tests.test__quad_vec": "pool", "optimize.tests.test__differential_evolution": "parallel or map", "optimize.tests.test_optimize": "workers"}


def setUpModule():
    if not all(map(importlib.util.find_spec, ("numpy", "scipy", "pytest"))):
        raise unittest.SkipTest("needs numpy, SciPy and pytest")
    unittest.addModuleCleanup(Cluster(cores=8).stop)
    unittest.addModuleCleanup(lambda: rfaas.default_session().close())


class Counts:
    """A plugin of pytest."""

    def __init__(self):
        self.passed, self.failed = 0, []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(f"{report.nodeid}: {report.longreprtext[-800:]}")
        elif report.when == "call" and report.passed:
            self.passed += 1


def run_tests(module, *options):
    import pytest

    counts = Counts()
    status = pytest.main(["--pyargs", module, "-q", "-x", "-p", "no:cacheprovider", "--noconftest", "--disable-warnings", *options], plugins=[counts])
    return int(status), counts.passed, counts.failed


class Pool:
    """What SciPy uses of multiprocessing.Pool."""

    calls = 0

    def __init__(self, processes=None):
        self.executor = rfaas.Executor(2)

    def map(self, function, items):
        Pool.calls += 1
        return list(self.executor.map(function, items))

    def close(self):
        self.executor.shutdown()

    terminate = join = close

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Numerics(unittest.TestCase):
    def test_numpy(self):
        with rfaas.Executor(2, memory=2 << 30) as executor:
            for module, (status, passed, failed) in zip(NUMPY, executor.map(run_tests, [f"numpy.{name}" for name in NUMPY], chunksize=1)):
                with self.subTest(module):
                    self.assertEqual((status, failed), (0, []))
                    self.assertGreater(passed, 5)

    def test_scipy(self):
        import multiprocessing

        with mock.patch.object(multiprocessing, "Pool", Pool):
            for module, names in SCIPY.items():
                with self.subTest(module):
                    before = Pool.calls
                    status, passed, failed = run_tests(f"scipy.{module}", "-k", names)
                    self.assertEqual((status, failed), (0, []))
                    self.assertGreater(passed, 0)
                    self.assertGreater(Pool.calls, before)


if __name__ == "__main__":
    unittest.main()
