"""Bad arguments and failing functions, with the same tests for functions in C, of numba and of rfaas.python. Each failure is an exception that says what
happened, in which function, and on which worker. test_executor.py has such tests for rfaas.Executor."""
import importlib.util
import os
import sys
import tempfile
import threading
import unittest
from unittest import mock

import cloudpickle
import numpy as np
import rfaas
from cluster import Cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file


def setUpModule():
    unittest.addModuleCleanup(Cluster(os.environ.get("RFAAS_TEST_PROVIDER", "shm")).stop)
    unittest.addModuleCleanup(lambda: rfaas.default_session().close())
    directory = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(directory.cleanup)
    unittest.enterModuleContext(mock.patch.dict(os.environ, XDG_CACHE_HOME=directory.name))


class Failures:
    """A subclass has library(), whose functions get arrays of float64: doubled, refuses, endless, hungry and crash, and if it is possible, leaves."""

    @classmethod
    def setUpClass(cls):
        cls.lease = rfaas.lease(cls.library(), workers=1, memory=256 << 20)
        cls.addClassCleanup(cls.lease.release)

    def works(self):
        np.testing.assert_array_equal(self.lease["doubled"](np.arange(3.0)), [0, 2, 4])

    def test_arguments(self):
        x, fixed, objects = np.arange(6.0).reshape(2, 3), np.zeros(6), np.array([1, None])
        fixed.flags.writeable = False
        doubled, typed, strict = (self.lease.function("doubled", **options) for options in ({"takes": "f8"}, {"dtype": "f8"}, {"copy": False}))
        for kind, text, call in [
            (TypeError, "argument 1 of doubled has dtype int64, want float64", lambda: doubled(x.astype(np.int64))),
            (TypeError, "out of doubled has dtype float32, want float64", lambda: typed(x, out=np.zeros(6, "f4"))),
            (ValueError, "argument 1 of doubled is not contiguous.*ascontiguousarray", lambda: strict(x.T)),
            (TypeError, "argument 1 of doubled is an array of Python objects", lambda: doubled(objects)),
            (TypeError, "result 1 of doubled is an array of Python objects", lambda: doubled(x, out=objects)),
            (ValueError, "out of doubled is read-only", lambda: doubled(x, out=fixed)),
            (ValueError, "out of doubled is not contiguous", lambda: doubled(x, out=np.zeros((6, 2))[:, 0])),
        ]:
            with self.subTest(text), self.assertRaisesRegex(kind, text):
                call()
        np.testing.assert_array_equal(doubled(x.T), 2 * x.T)  # is copied unless copy=False
        self.works()

    def test_exception(self):
        with self.assertRaisesRegex(*self.refusal) as caught:
            self.lease["refuses"](np.ones(1))
        where = caught.exception.__cause__ or caught.exception
        self.assertIsInstance(where, rfaas.FunctionError)
        self.assertRegex(str(where), "refuses on worker 0 failed: " + self.place)
        self.assertTrue(where.started)
        self.works()

    def test_function_that_never_returns(self):
        with self.assertRaises(Exception):
            self.lease["refuses"](np.ones(1))  # whose code must not be that of the next error
        for call in self.lease["endless"], lambda *a, **o: self.lease["endless"].submit(*a, **o).result():
            timeout, runs = 0.1, False
            while not runs and timeout < 10:  # until it is long enough for the call to start
                with self.assertRaisesRegex(rfaas.DeadlineError, "endless") as caught:
                    call(np.ones(1), timeout=timeout, kill=True)
                timeout, runs = 2 * timeout, "still runs" in str(caught.exception)
            self.assertRegex(str(caught.exception), 'endless on worker 0: .*still runs "endless"; the worker is killed and replaced')
            self.assertIsInstance(caught.exception, TimeoutError)
            self.assertEqual((caught.exception.code, caught.exception.started), (0, True))
            self.works()  # in the new worker

    def test_memory(self):
        with self.assertRaisesRegex(MemoryError, self.memory) as caught:
            self.lease["hungry"](np.ones(1))
        self.assertRegex(str(caught.exception.__cause__ or caught.exception), "hungry (on|of) worker 0")
        self.works()

    def test_crash(self):
        with self.assertRaisesRegex(rfaas.WorkerDiedError, "crash: worker died: function crash of worker 0: SIGSEGV") as caught:
            self.lease["crash"](np.ones(1))
        self.assertIsInstance(caught.exception, ConnectionError)
        self.works()

    def test_exit(self):
        with self.assertRaisesRegex(rfaas.WorkerDiedError, r"leaves: worker died: function leaves of worker 0: called exit\(3\)"):
            self.lease["leaves"](np.ones(1))
        self.works()


class FunctionsInC(Failures, unittest.TestCase):
    refusal, place = (rfaas.FunctionError, "one is refused"), "one is refused"
    memory = "hungry"

    @staticmethod
    def library():
        return rfaas.compile(r"""
            #include <rfaas_function.h>
            #include <stdlib.h>
            #include <string.h>
            #include <unistd.h>
            uint32_t doubled(void *args, uint32_t size, void *res) {
                for (uint32_t i = 0; i < size / 8; i++)
                    ((double *)res)[i] = 2 * ((double *)args)[i];
                return size;
            }
            uint32_t refuses(void *args, uint32_t size, void *res) { return rfaas_fail("%s is refused", *(double *)args == 1 ? "one" : "a number"); }
            uint32_t endless(void *args, uint32_t size, void *res) { for (volatile int i = 0;;) i = !i; }
            uint32_t crash(void *args, uint32_t size, void *res) { *(volatile int *)8 = 1; return 0; }
            uint32_t leaves(void *args, uint32_t size, void *res) { _exit(3); }
            uint32_t hungry(void *args, uint32_t size, void *res) {
                for (;;) {
                    char *p = malloc(1 << 20);
                    if (p)
                        memset(p, 1, 1 << 20);
                    else
                        *(volatile int *)8 = 1;
                }
            }
        """)

    def test_library_that_a_worker_cannot_load(self):
        for text, source in [("(?s)do not compile.*undefined reference to .nosuch", "#include <stdint.h>\nvoid nosuch(void);\n"
                              "uint32_t f(void *a, uint32_t n, void *r) { nosuch(); return 0; }"),
                             ("(?s)do not compile.*unknown type name", "uint42_t f;")]:
            with self.assertRaisesRegex(rfaas.BadLibraryError, text):
                rfaas.compile(source)


class FunctionsOfPython(Failures, unittest.TestCase):
    refusal, place = (ValueError, "^one is refused$"), r"line \d+ of .*test_failures.py, in refuses, raised ValueError: one is refused"
    memory = ""

    @staticmethod
    def library():
        def doubled(arguments, result):
            np.multiply(np.frombuffer(arguments), 2, out=np.frombuffer(result))

        def refuses(arguments, result):
            raise ValueError("one is refused")

        def endless(arguments, result):
            while True:
                pass

        def hungry(arguments, result):
            bytearray(1 << 60)

        def crash(arguments, result):
            import ctypes

            ctypes.string_at(8)

        def leaves(arguments, result):
            os._exit(3)

        return rfaas.python(doubled, refuses, endless, hungry, crash, leaves)

    def test_what_cannot_be_pickled(self):
        lock = threading.Lock()

        def locked(arguments, result):
            return lock.locked()

        with self.assertRaisesRegex(Exception, "locked.* cannot be pickled: .*lock"):
            rfaas.python(locked)
        with self.assertRaisesRegex(Exception, "argument 1 of .*abs cannot be pickled: .*lock"):
            rfaas.python(FunctionsOfPython.library, initializer=abs, initargs=(lock,))


@unittest.skipUnless(importlib.util.find_spec("numba") and os.environ.get("RFAAS_TEST_PROVIDER", "shm") == "shm", "needs numba, or does not depend on the provider")
class FunctionsOfNumba(Failures, unittest.TestCase):
    refusal, place = (ValueError, "^one is refused$"), r"line \d+ of .*test_failures.py, in refuses, raised ValueError: one is refused"
    memory = "Allocation failed"
    test_exit = None  # numba has no such function

    @staticmethod
    def library():
        signature = rfaas.njit("float64[:](float64[:])")

        @signature
        def doubled(x, y):
            y[:] = 2 * x

        @signature
        def refuses(x, y):
            if x[0] == 1:
                raise ValueError("one is refused")

        @signature
        def endless(x, y):
            while x[0] == x[0]:
                y[0] += 1

        @signature
        def hungry(x, y):
            y[0] = np.zeros(1 << 50)[5]

        @signature
        def crash(x, y):
            y[1 << 40] = 1  # numba does not check indices

        return rfaas.compile([doubled, refuses, endless, hungry, crash])

    def test_part_of_numba_that_is_missing(self):
        @rfaas.njit("float64(float64)")
        def drawn(x):
            return x * np.random.rand()

        with self.assertRaisesRegex(rfaas.BadLibraryError, "(?s)do not compile.*undefined reference to .numba_get_np_random_state"):
            rfaas.compile([drawn])


if __name__ == "__main__":
    unittest.main()
