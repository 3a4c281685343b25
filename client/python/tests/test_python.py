"""rfaas.python: Python functions of raw buffers in workers. RFAAS_TEST_PROVIDER: shm or tcp."""
import asyncio
import os
import sys
import threading
import unittest
from unittest import mock

import cloudpickle
import numpy as np
import rfaas
from cluster import Cluster
from rfaas import _pickles

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file


def setUpModule():
    unittest.addModuleCleanup(Cluster(os.environ.get("RFAAS_TEST_PROVIDER", "shm")).stop)
    unittest.addModuleCleanup(lambda: rfaas.default_session().close())


def echo(arguments, result):
    result[:len(arguments)] = arguments
    return len(arguments)


def doubled(arguments, result):
    np.multiply(np.frombuffer(arguments), 2, out=np.frombuffer(result))


def set_factor(value):
    global factor
    factor = value


def scaled(arguments, result):
    np.multiply(np.frombuffer(arguments), factor, out=np.frombuffer(result))


def returns(arguments, result):
    """Returns what the client passes as text."""
    return eval(bytes(arguments))


class Trouble(Exception):
    pass


def raises(arguments, result):
    raise eval(bytes(arguments), {"Trouble": Trouble})


def keeps(arguments, result):
    global kept
    kept = {b"arguments": arguments, b"result": result, b"array": np.frombuffer(arguments, "u1"), b"part": result[1:]}[bytes(arguments)]


def exits(arguments, result):
    os._exit(3)


class Functions(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        library = rfaas.python(echo, doubled, scaled, returns, raises, keeps, exits, initializer=set_factor, initargs=(3.0,))
        cls.lease = rfaas.lease(library, workers=2)
        cls.addClassCleanup(cls.lease.release)

    def test_calls(self):
        self.assertEqual(self.lease.functions, ["echo", "doubled", "scaled", "returns", "raises", "keeps", "exits"])
        x = np.arange(1000.0)
        np.testing.assert_array_equal(self.lease["doubled"](x), 2 * x)
        np.testing.assert_array_equal(self.lease["scaled"].map(x), 3 * x)
        self.assertEqual(self.lease["echo"](b"ab", bytearray(b"cd")), b"abcd")
        self.assertEqual(self.lease["echo"](), b"")
        y = np.empty_like(x)
        self.assertIs(self.lease["scaled"].submit(x, out=y).result(), y)
        np.testing.assert_array_equal(y, 3 * x)
        large = np.random.default_rng(1).random(1 << 20)
        np.testing.assert_array_equal(self.lease["doubled"](large), 2 * large)
        typed = self.lease.function("doubled", takes="f8", dtype="f8", shape=3)
        np.testing.assert_array_equal(typed(np.ones(3)), [2, 2, 2])
        with self.assertRaisesRegex(TypeError, "argument 1 of doubled has dtype int8, want float64"):
            typed(np.ones(3, "i1"))

        async def awaited():
            return await asyncio.gather(*(self.lease["doubled"].submit(x) for _ in range(5)))

        for y in asyncio.run(awaited()):
            np.testing.assert_array_equal(y, 2 * x)

    def test_threads(self):
        failed = []

        def calls(n):
            x = np.full(100, float(n))
            for _ in range(200):
                if not np.array_equal(self.lease["doubled"](x), 2 * x):
                    failed.append(n)

        threads = [threading.Thread(target=calls, args=(n,)) for n in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failed, [])

    def test_size_of_the_result(self):
        f = self.lease["returns"]
        for text, size in (b"0", 0), (b"3", 3), (b"None", 10), (b"True", 1):
            self.assertEqual(len(f(text, capacity=10)), size)
        with self.assertRaisesRegex(rfaas.ResultTooLargeError, "returns.*: result of 11 bytes, the capacity is 10"):
            f(b"11", capacity=10)
        for text, kind, message in [(b"-1", ValueError, "size of its result, from 0 to 4294967295"), (b"1 << 32", ValueError, "from 0 to"),
                                    (b"1 << 80", OverflowError, "too large"), (b"'text'", TypeError, "'str' object cannot be interpreted as an integer")]:
            with self.assertRaisesRegex(kind, message):
                f(text)

    def test_exceptions(self):
        f = self.lease["raises"]
        for call in f, lambda x: f.submit(x).result(), lambda x: f.map(np.frombuffer(x, "u1").reshape(1, -1)):
            with self.assertRaisesRegex(ValueError, "^no root of -1: \nfor example$") as caught:
                call(b"ValueError('no root of -1: \\nfor example')")
            self.assertIsInstance(caught.exception.__cause__, rfaas.FunctionError)
            self.assertRegex(str(caught.exception.__cause__), r"raises.* failed: line \d+ of .*test_python.py, in raises, raised ValueError: no root")
        for text, message in [(b"Trouble('here')", r"raised \w+\.Trouble: here"), (b"SystemExit(2)", "raised SystemExit: 2"),
                              (b"b'x'.decode('nothing')", "raised LookupError"), (b"KeyboardInterrupt()", "raised KeyboardInterrupt: $"),
                              (b"UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad')", "raised UnicodeDecodeError: 'utf-8' codec")]:
            with self.assertRaisesRegex((rfaas.FunctionError, LookupError), message if b"nothing" not in text else "unknown encoding"):
                f(text)
        with self.assertRaisesRegex(ModuleNotFoundError, r"No module named 'nosuch'.*pass modules=\['nosuch'\] to rfaas.Executor or rfaas.python"):
            f(b"__import__('nosuch')")
        output = "".join(self.lease.worker_info(i).output for i in range(2))
        self.assertIn("Traceback (most recent call last):", output)

    def test_views_that_are_kept(self):
        for what in b"arguments", b"result", b"array", b"part":
            with self.assertRaisesRegex(rfaas.FunctionError, "keeps on worker . failed: the function keeps an argument, such as an array"):
                self.lease["keeps"](what)
        self.assertEqual(self.lease["echo"](b"x"), b"x")

    def test_death(self):
        with self.assertRaisesRegex(rfaas.WorkerDiedError, "exits: worker died: function exits of worker .: called exit\\(3\\)"):
            self.lease["exits"]()
        for _ in range(4):  # the worker that replaces it has the functions, and has executed the initializer
            self.assertEqual(self.lease["scaled"].map(np.ones(8)).tolist(), [3.0] * 8)

    def test_bad_input(self):
        self.assertRaisesRegex(rfaas.NoFunctionError, "the lease has no function 'python_00'", lambda: self.lease["python_00"])
        self.assertRaisesRegex(rfaas.NoFunctionError, "the lease has no function 5", lambda: self.lease[5])
        for kind, text, call in [
            (ValueError, "rfaas.python has 0 functions, want 1 to 64", lambda: rfaas.python()),
            (ValueError, "rfaas.python has 65 functions", lambda: rfaas.python(*[echo] * 65)),
            (ValueError, "two functions of rfaas.python have the name echo", lambda: rfaas.python(echo, doubled, echo)),
            (TypeError, "5 is not callable", lambda: rfaas.python(5)),
            (TypeError, "has no __name__", lambda: rfaas.python(np.vectorize(echo))),
            (TypeError, "initializer is 5, which is not callable", lambda: rfaas.python(echo, initializer=5)),
            (ModuleNotFoundError, "modules names 'nosuch'", lambda: rfaas.python(echo, modules=["nosuch"])),
            (TypeError, "sets the option reuse itself, or cannot use it", lambda: rfaas.lease(rfaas.python(echo), reuse=True)),
            (rfaas.BrokenExecutor, "the start of worker 0: division by zero", lambda: rfaas.lease(rfaas.python(echo, initializer=lambda: 1 / 0))),
        ]:
            with self.assertRaisesRegex(kind, text):
                call()
        payload = _pickles.start_payload
        with mock.patch.object(_pickles, "start_payload", lambda *a: payload(*a).replace(b"3.", b"2.", 1)):
            library = rfaas.python(echo)
        with self.assertRaisesRegex(rfaas.PythonVersionError, "the client runs Python 2"):
            rfaas.lease(library)

    def test_as_many_functions_as_possible(self):
        source = "\n".join(f"def f{i}(arguments, result):\n    result[0] = {i}\n    return 1" for i in range(64))
        names = {}
        exec(source, names)
        with rfaas.lease(rfaas.python(*(names[f"f{i}"] for i in range(64)))) as lease:
            self.assertEqual([lease[f"f{i}"]()[0] for i in range(64)], list(range(64)))


if __name__ == "__main__":
    unittest.main()
