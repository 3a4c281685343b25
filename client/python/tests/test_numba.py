"""Functions of rfaas.njit, which numba compiles for workers without Python."""
import os
import tempfile
import unittest
from unittest import mock

import numpy as np
import rfaas
from cluster import Cluster
from rfaas import _numba


def setUpModule():
    unittest.addModuleCleanup(Cluster("shm").stop)
    unittest.addModuleCleanup(lambda: rfaas.default_session().close())


class Numba(unittest.TestCase):
    def test_functions(self):
        @rfaas.njit("float64(float64)")
        def root(x):
            if x < 0:
                raise ValueError("a negative number")
            return x ** 0.5

        @rfaas.njit("float64(float64)")
        def wordy(x):
            if x == 1:
                raise ValueError("many words, " * 50)
            return x

        @rfaas.njit("int64[:](float64[:])")
        def running(x, y):
            total = np.zeros(1, np.int64)
            for i in range(x.size):
                total[0] += int(x[i])
                y[i] = total[0]

        self.assertEqual(root(9.0), 3)
        directory = self.enterContext(tempfile.TemporaryDirectory())
        self.enterContext(mock.patch.dict(os.environ, XDG_CACHE_HOME=directory))
        with rfaas.lease(rfaas.compile([root, wordy, running]), workers=2) as lease:
            self.assertEqual(lease.functions, ["root", "wordy", "running"])
            np.testing.assert_array_equal(lease["root"].map(np.arange(1000.0)), np.arange(1000.0) ** 0.5)
            sums = lease["running"](np.arange(5.0))
            np.testing.assert_array_equal(sums, [0, 1, 3, 6, 10])
            self.assertEqual(sums.dtype, np.int64)
            for kind, text, call in [
                (ValueError, "^a negative number$", lambda: lease["root"](np.array([-1.0]))),
                (ValueError, r"^(many words, ){15,}[many words,]*\.\.\.$", lambda: lease["wordy"](np.ones(1))),
                (TypeError, "dtype int64, want float64", lambda: lease["root"](np.arange(3))),
                (TypeError, "dtype int64, want float64", lambda: lease["root"].map(np.arange(3))),
                (TypeError, "dtype float32, want float64", lambda: lease.function("running", timeout=60)(np.ones(3, "f4"))),
                (rfaas.NoFunctionError, "no function 'other'", lambda: lease["other"]),
                (TypeError, "of <class 'bytes'>, which has no dtype, want float64", lambda: lease["root"](b"abc")),
                (rfaas.ResultTooLargeError, "80 bytes", lambda: lease["root"](np.arange(10.0), shape=2)),
                (TypeError, "want a result and one argument", lambda: rfaas.njit("float64(float64, float64)")(max)),
                (TypeError, "an array as the argument and the result, or a number as both", lambda: rfaas.njit("float64(float64[:])")(max)),
                (TypeError, "7 is neither the text of functions", lambda: rfaas.compile([root, 7])),
            ]:
                with self.subTest(text), self.assertRaisesRegex(kind, text):
                    call()
            np.testing.assert_array_equal(lease["root"](np.array([4.0])), [2])

    def test_pickles_of_workers_name_exceptions_only(self):
        error = rfaas.FunctionError("failed", -400, True, _numba.CODE)
        for pickled in b"cos\nsystem\n(S'true'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b"cbuiltins\nValueError\n.", b"r\xff\xff\xff\x7f.", b"(":
            self.assertIsNone(_numba.exception_of("numba:" + pickled.hex(), error))
        self.assertIsNone(_numba.exception_of("numba:", error))


if __name__ == "__main__":
    unittest.main()
