"""Calls, requests, maps and errors of the package rfaas against an executor. RFAAS_TEST_PROVIDER: shm or tcp."""
import array
import asyncio
import os
import pickle
import signal
import shutil
import tempfile
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import rfaas
from cluster import ECHO, Cluster


def setUpModule():
    unittest.addModuleCleanup(Cluster(os.environ.get("RFAAS_TEST_PROVIDER", "shm")).stop)
    unittest.addModuleCleanup(lambda: rfaas.default_session().close())


class LeaseCase(unittest.TestCase):
    workers = 2

    def setUp(self):
        self.lease = rfaas.lease(ECHO, workers=self.workers)
        self.addCleanup(self.lease.release)
        self.echo = self.lease["echo"]

    def ns(self, seconds):
        return np.array([int(seconds * 1e9)], np.uint64)


class Arguments(LeaseCase):
    def test_result_is_like_the_first_argument(self):
        x = np.arange(6.0).reshape(2, 3)
        y = self.echo(x)
        self.assertEqual((y.dtype, y.shape), (x.dtype, x.shape))
        np.testing.assert_array_equal(y, x)

    def test_out(self):
        x, y = np.arange(4, dtype=np.int32), np.zeros(4, np.int32)
        self.assertIs(self.echo(x, out=y), y)
        np.testing.assert_array_equal(y, x)
        part = self.echo(x, out=np.zeros(100, np.int32))
        np.testing.assert_array_equal(part, x)
        room = bytearray(8)
        self.assertEqual(bytes(self.echo(b"abc", out=room)), b"abc")
        self.assertEqual(room, b"abc\0\0\0\0\0")
        room.append(1)  # its memory is not held any more

    def test_dtype_and_shape(self):
        x = np.arange(10, dtype=np.uint8)
        self.assertEqual(self.lease["sum"](x, dtype=np.uint64, shape=()), 45)
        total = self.lease.function("sum", takes="u1", dtype="u8", shape=())
        self.assertEqual(total(x), 45)
        self.assertEqual(total(x).dtype, np.uint64)
        self.assertEqual(self.echo(b"\1\2", dtype="u1", shape=2).tolist(), [1, 2])

    def test_buffers_without_numpy(self):
        for x in b"", b"hello", bytearray(b"hello"), memoryview(b"hello")[1:], array.array("d", [1, 2, 3]), memoryview(b"abcdef")[::2]:
            self.assertEqual(self.echo(x), bytes(memoryview(x).tobytes()))
        self.assertEqual(self.echo(), b"")
        large = os.urandom(3_000_000)  # larger than what travels in one piece
        self.assertEqual(self.echo(large), large)

    def test_arrays_that_are_not_contiguous(self):
        x = np.arange(120.0).reshape(4, 5, 6)
        f = np.asfortranarray(x)
        for a in x[:, 1], x[1:3, :, 2], x[::-1], x[..., ::2], x.T, f, x[:, :, 3:5], x[::2, ::2, ::2], np.broadcast_to(x[0], (3, 5, 6)), x[:, :1, :], x[:0]:
            np.testing.assert_array_equal(self.echo(a), a)
            if a.flags.c_contiguous:
                self.echo(a, copy=False)
            else:
                with self.assertRaisesRegex(ValueError, "argument 1 of echo is not contiguous.*ascontiguousarray"):
                    self.echo(a, copy=False)

    def test_several_arguments(self):
        a, m = np.arange(3.0), np.arange(9.0).reshape(3, 3)
        got = self.echo(a, m[:, 1], m[:, ::2], dtype=float, shape=12)
        np.testing.assert_array_equal(got, np.concatenate([a, m[:, 1], m[:, ::2].ravel()]))
        self.assertEqual(self.echo(b"ab", memoryview(b"cd"), b""), b"abcd")

    def test_larger_results(self):
        """The option keep: a result larger than the room for it comes without another execution."""
        x, large = np.arange(100.0), os.urandom(3_000_000)
        calls = lambda: sum(self.lease.worker_info(i).calls for i in range(self.lease.workers))
        before = calls()
        for submit in False, True:
            call = (lambda *a, **o: self.echo.submit(*a, **o).result()) if submit else self.echo
            np.testing.assert_array_equal(call(x, shape=2, keep=1 << 20), x)
            np.testing.assert_array_equal(call(x, shape=2, dtype="i4", keep=1 << 20), x.view("i4"))
            self.assertEqual(call(large, capacity=100, keep=1 << 22), large)
            self.assertEqual(call(b"few", capacity=100, keep=1 << 22), b"few")
            for kind, text, options in [
                (ValueError, "echo returned 9 bytes, which is not a multiple of the 8 bytes of float64", dict(dtype=float, shape=1, keep=100)),
                (rfaas.ResultTooLargeError, "at most 8 bytes are kept", dict(capacity=4, keep=8)),
                (rfaas.ResultTooLargeError, "result of 9 bytes, the capacity is 2", dict(out=bytearray(2), keep=100)),
            ]:
                with self.assertRaisesRegex(kind, text):
                    call(b"123456789", **options)
        self.assertEqual(calls(), before + 14)
        kept = self.lease.function("echo", capacity=1, keep=10)
        self.assertEqual([r.result() for r in [kept.submit(b"x" * n) for n in range(11)]], [b"x" * n for n in range(11)])
        with ThreadPoolExecutor(4) as threads:
            self.assertEqual(list(threads.map(kept, [b"%d" % n for n in range(200)])), [b"%d" % n for n in range(200)])

    def test_bad_input(self):
        x, fixed = np.arange(4.0), np.arange(4.0)
        fixed.flags.writeable = False
        typed = self.lease.function("echo", takes="f8", dtype="f8", copy=False)
        objects = np.array([object()])
        for kind, text, call in [
            (TypeError, "argument 1 of echo has the type float", lambda: self.echo(3.0)),
            (TypeError, "comm is a int, want a communicator of mpi4py", lambda: rfaas.lease(ECHO, comm=5)),
            (TypeError, "argument 2 of echo has the type str", lambda: self.echo(x, "text")),
            (TypeError, "argument 1 of echo is an array of Python objects", lambda: self.echo(objects)),
            (TypeError, "argument 1 of echo contains Python objects", lambda: self.echo(memoryview(objects))),
            (TypeError, "argument 1 of echo has dtype int32, want float64", lambda: typed(x.astype(np.int32))),
            (TypeError, "argument 1 of echo is of <class 'bytes'>, which has no dtype, want float64", lambda: typed(b"12345678")),
            (TypeError, "out of echo has dtype float32, want float64", lambda: typed(x, out=np.zeros(4, np.float32))),
            (TypeError, "out of echo has dtype float32, want f8", lambda: self.echo(x, out=np.zeros(8, "f4"), dtype="f8")),
            (TypeError, "echo.map: out has dtype int32, want float64", lambda: typed.map(x, out=np.zeros(8, np.int32))),
            (TypeError, "result 1 of echo is an array of Python objects", lambda: self.echo(x, out=np.array([None] * 4))),
            (TypeError, "result 1 of echo is an array of Python objects", lambda: self.echo(x, dtype=object)),
            (TypeError, "echo: give dtype and shape", lambda: self.echo(b"ab", dtype="u1")),
            (ValueError, "out of echo is read-only", lambda: self.echo(x, out=fixed)),
            (ValueError, "out of echo is not contiguous", lambda: self.echo(x, out=np.zeros((4, 2))[:, 0])),
            (ValueError, "echo returned 3 bytes, .* 8 bytes of float64", lambda: self.echo(b"abc", dtype=float, shape=2)),
            (TypeError, "no option 'tiemout'.*timeout", lambda: self.echo(x, tiemout=1)),
            (ValueError, "timeout is -1", lambda: self.echo(x, timeout=-1)),
            (TypeError, "timeout is 'soon', want a number", lambda: self.echo(x, timeout="soon")),
            (ValueError, "capacity is -1, want a number of bytes", lambda: self.echo(b"", capacity=-1)),
            (ValueError, "repeats is 4294967296", lambda: self.echo(x, repeats=1 << 32)),
            (TypeError, "no option 'dtypes'", lambda: self.lease.function("echo", dtypes="f8")),
            (TypeError, "Lease has no option 'wokers'.*workers", lambda: rfaas.lease(ECHO, wokers=1)),
            (rfaas.InvalidError, "workers", lambda: rfaas.lease(ECHO, workers=1 << 20)),
            (rfaas.BadLibraryError, "/nowhere/lib.so", lambda: rfaas.lease("/nowhere/lib.so")),
            (ValueError, "library is .*NUL", lambda: rfaas.lease("a\0b")),
            (TypeError, "library is 7, want a str", lambda: rfaas.lease(7)),
            (KeyError, "^find function: \"ecko\" .*did you mean|\"ecko\"", lambda: self.lease["ecko"]),
            (TypeError, "a function has a str as its name, not 7", lambda: self.lease[7]),
            (rfaas.ResultTooLargeError, "echo", lambda: self.echo(x, shape=2)),
            (rfaas.InvalidError, "worker", lambda: self.echo(x, worker=9)),
            (ValueError, "cannot be divided|without dimensions", lambda: self.echo.map(np.float64(1))),
            (ValueError, "3 bytes of results cannot be divided", lambda: self.echo.map(x, out=np.zeros(3, np.uint8))),
            (ValueError, "cannot be combined", lambda: self.echo.reduce(x, dtype=np.complex128)),
        ]:
            with self.subTest(text), self.assertRaisesRegex(kind, text):
                call()
        np.testing.assert_array_equal(self.echo(x), x)


class Ends(LeaseCase):
    def test_errors_of_functions(self):
        with self.assertRaisesRegex(rfaas.FunctionError, "bad luck") as e:
            self.lease["fail"](b"bad luck")
        self.assertEqual((e.exception.status, e.exception.started, e.exception.code), (-400, True, 0))
        copy = pickle.loads(pickle.dumps(e.exception))  # as multiprocessing does with exceptions
        self.assertEqual((type(copy), str(copy), copy.status), (rfaas.FunctionError, str(e.exception), -400))
        with self.assertRaises(rfaas.NoFunctionError) as e:
            self.lease["nothing"]
        self.assertEqual((e.exception.status, isinstance(e.exception, rfaas.InvalidError)), (-202, True))

    def test_deadline(self):
        with self.assertRaises(TimeoutError) as e:
            self.lease["sleep_ns"](self.ns(30), timeout=0.05, worker=1, kill=True)
        self.assertIsInstance(e.exception, rfaas.DeadlineError)
        self.assertIsInstance(e.exception, rfaas.FunctionError)
        self.assertEqual(self.echo(b"next", worker=1), b"next")  # the worker was replaced

    def test_worker_death(self):
        first = self.lease["count"](b"", dtype="u8", shape=(), worker=0)
        with self.assertRaisesRegex(rfaas.WorkerDiedError, "SIGSEGV") as e:
            self.lease["crash"](b"", worker=0)
        self.assertIsInstance(e.exception, ConnectionError)
        self.lease["empty"](worker=0)
        second = self.lease["count"](b"", dtype="u8", shape=(), worker=0)
        self.assertEqual((first, second), (1, 1))
        events = list(self.lease.events())
        self.assertEqual([(e.kind, e.worker) for e in events], [(rfaas.EventKind.WORKER_DIED, 0)])
        self.assertEqual((self.lease.info().workers, self.lease.statistics().replaced), (2, 1))

    def test_released_lease_and_closed_session(self):
        with rfaas.Session() as session:
            session.put_table("table", np.arange(1000.0), b"end")
            lease = session.lease(ECHO)
            echo, request = lease["echo"], lease["sleep_ns"].submit(self.ns(30))
            with self.assertRaisesRegex(rfaas.InvalidError, "table"):
                session.drop_table("table")  # the lease may use it
            lease.release()
            lease.release()
            with self.assertRaisesRegex(ValueError, "the lease is released"):
                echo(b"")
            with self.assertRaises(rfaas.Error):
                request.result()
            session.drop_table("table")
        for use in lambda: session.lease(ECHO), lambda: session.cached, lambda: session.put_table("a", b""):
            with self.assertRaisesRegex(ValueError, "the session is closed"):
                use()

    def test_table_of_a_seed(self):
        functions = os.path.join(os.path.dirname(ECHO), "")  # those of the examples
        look = np.array([7, 1000], dtype="u8")
        with rfaas.Session() as session, rfaas.Session() as consumer:
            with session.lease(functions + "prepared.so", memory=64 << 20) as maker:
                seed = maker.create_seed("prepare", np.array([2000], dtype="u8"), name="rows")
            with session.lease(functions + "prepared.so", seed=seed, seed_required=True) as child:
                want = float(child["lookups"](look, dtype="f8", shape=()))
            consumer.put_table_seed("cross sections", seed)
            with self.assertRaisesRegex(rfaas.InvalidError, "another seed as a table"):
                consumer.put_table_seed("again", seed.name)
            with consumer.lease(functions + "crosssections.so") as other:  # another library, which has nothing else of the seed
                self.assertEqual(float(other["lookups"](look, dtype="f8", shape=())), want)
            consumer.drop_table("cross sections")
            name = seed.name
            seed.release()
            with self.assertRaises(rfaas.LeaseError):
                consumer.put_table_seed("again", name)

    def test_seeds(self):
        with rfaas.Session() as session, session.lease(ECHO) as maker:
            with self.assertRaises(KeyError):
                maker.create_seed("ecko", name="counter")
            made = maker.create_seed("count", b"payload", name="counter", ttl=60)  # the call is counted
            opened = session.open_seed(made.name)
            self.assertEqual(opened.info().setup, "count")
            self.assertIn(made.name, repr(opened))
            for seed in opened, made.name:
                with session.lease(ECHO, seed=seed, seed_required=True) as child:
                    self.assertEqual(int(child["count"](b"", dtype="u8", shape=())), 2)
                    self.assertEqual(child.worker_origin(0).start, rfaas.Start.SEEDED)
            with session.lease(ECHO, seed=True, init_function="count") as child:
                self.assertEqual(int(child["count"](b"", dtype="u8", shape=())), 2)
            self.assertEqual(made.info().children, 2)
            opened.release()
            made.release()
            with self.assertRaisesRegex(ValueError, "the seed is released"):
                made.info()

    def test_descriptions(self):
        self.assertGreaterEqual(rfaas.library_version(), (0, 4))
        self.assertIsInstance(self.echo, rfaas.Function)
        self.lease.check()
        self.lease.renew(60)
        self.assertGreater(self.lease.info().left, 0)
        self.assertIn(self.lease.worker_origin(0).start, rfaas.Start)
        self.assertEqual(self.lease.workers, 2)
        with self.assertRaises(rfaas.UnsupportedError) as e:
            rfaas.default_session().changes()  # there is no resource manager
        self.assertIsInstance(e.exception, NotImplementedError)

    def test_library_in_memory_and_init_call(self):
        with open(ECHO, "rb") as f, rfaas.lease(f.read(), init_function="count") as lease:
            self.assertEqual(lease["count"](b"", dtype="u8", shape=()), 2)
            self.assertIn("echo", lease.functions)
            self.assertIn("1 workers", repr(lease))
            self.assertIn("<table>", lease._repr_html_())
        self.assertEqual(repr(lease), "<rfaas.Lease, released>")

    def test_ctrl_c_ends_every_wait(self):
        """The signal comes while the worker runs the function, which would take longer than this test."""
        sleep = self.lease["sleep_ns"]
        for wait in (lambda: sleep(self.ns(60), worker=0), lambda: sleep.submit(self.ns(60), worker=0).result(),
                     lambda: list(rfaas.as_completed([sleep.submit(self.ns(60), worker=0)])),
                     lambda: [sleep.submit(self.ns(60), worker=0) for _ in range(100)]):
            self.lease["empty"]()
            presser = threading.Thread(target=self.press_ctrl_c, args=(sleep.name,))
            presser.start()
            with self.assertRaises(KeyboardInterrupt):
                wait()
            presser.join()
            self.lease.replace_worker(0)
            self.assertEqual(self.echo(b"x", worker=0), b"x")

    def press_ctrl_c(self, running):
        while self.lease.worker_info(0).running != running:
            pass
        os.kill(os.getpid(), signal.SIGINT)


class Requests(LeaseCase):
    def test_more_submits_than_slots(self):
        requests = [self.echo.submit(np.array([i])) for i in range(200)]
        self.assertEqual(self.echo(b"between"), b"between")  # while all slots may be taken
        self.assertEqual([int(r.result()[0]) for r in requests], list(range(200)))
        self.assertIs(requests[0].result(), requests[0].result())

    def test_as_completed_and_time_limits(self):
        slow = self.lease["sleep_ns"].submit(self.ns(60), worker=0)
        quick = [self.echo.submit(bytes([i]), worker=1) for i in range(5)]
        self.assertTrue(all(r.wait() for r in quick))
        done = []
        with self.assertRaisesRegex(TimeoutError, "1 calls have not ended"):
            for r in rfaas.as_completed([slow, *quick], timeout=0.1):
                done.append(r.result())
        self.assertEqual(sorted(done), [b"\0", b"\1", b"\2", b"\3", b"\4"])
        self.assertFalse(slow.done())
        self.assertFalse(slow.wait(0.01))
        with self.assertRaisesRegex(TimeoutError, "sleep_ns has not ended"):
            slow.result(timeout=0)
        self.assertTrue(slow.cancel())
        self.assertFalse(slow.cancel())
        with self.assertRaises(rfaas.CancelledError):
            slow.result()

    def test_abandoned_requests(self):
        room = np.zeros(1, np.uint64)
        del_me = self.lease["sleep_ns"].submit(self.ns(0.01), out=room)
        del del_me  # the result may not be written any more
        for _ in range(20):
            self.echo(b"")
        self.assertEqual(room[0], 0)

    def test_cancel_while_another_thread_waits(self):
        slow, ended = self.lease["sleep_ns"].submit(self.ns(60), worker=0), []

        def wait():
            with self.assertRaises(rfaas.CancelledError):
                slow.result()
            ended.append(True)

        waiter = threading.Thread(target=wait)
        waiter.start()
        while self.lease.worker_info(0).running != "sleep_ns":
            pass
        self.assertTrue(slow.cancel())
        waiter.join()
        self.assertEqual(ended, [True])

    def test_calls_wait_for_slots_of_abandoned_ones(self):
        """Nobody waits for the requests that have all slots of the worker."""
        with rfaas.lease(ECHO, depth=2) as lease:
            for call in lease["echo"], lambda x: lease["echo"].submit(x).result():
                for _ in range(2):
                    lease["sleep_ns"].submit(self.ns(0.01)).cancel()
                self.assertEqual(call(b"x"), b"x")
            for _ in range(2):
                lease["sleep_ns"].submit(self.ns(0.5)).cancel()
            self.assertEqual(lease["echo"].submit(b"y", timeout=60).result(), b"y")

    def test_failures_are_kept(self):
        failed, died = self.lease["fail"].submit(b"first", worker=0), self.lease["crash"].submit(b"", worker=1)
        died.wait()
        for _ in range(2):
            with self.assertRaisesRegex(rfaas.FunctionError, "first"):
                failed.result()
            with self.assertRaises(rfaas.WorkerDiedError):
                died.result()

    def test_threads_share_a_lease(self):
        wrong, request = [], self.lease["sleep_ns"].submit(self.ns(0.05))

        def calls(number):
            x = np.arange(number, number + 50)
            for i in range(200):
                if not np.array_equal(self.echo(x + i), x + i):
                    wrong.append(i)
            if request.result() is not request.result():
                wrong.append(request)

        threads = [threading.Thread(target=calls, args=(n,)) for n in range(8)]
        for t in threads:
            t.start()
        calls(100)  # the main thread waits in its own way
        for t in threads:
            t.join()
        self.assertEqual(wrong, [])

    def test_worker_of_a_call(self):
        requests = [self.echo.submit(b"x", worker=i) for i in (1, 0, 1)]
        self.assertEqual([(r.result(), r.worker) for r in requests], [(b"x", 1), (b"x", 0), (b"x", 1)])
        slow = self.lease["sleep_ns"].submit(self.ns(60))
        self.assertIsNone(slow.worker)
        slow.cancel()
        self.assertIsNone(slow.worker)


class Awaits(LeaseCase):
    """Calls that tasks of asyncio wait for."""

    def setUp(self):
        super().setUp()
        self.sleep = self.lease["sleep_ns"]

    def test_many_tasks(self):
        async def task(i):
            return int((await self.sleep.submit(np.array([i % 4 * 10**6], np.uint64)))[0])

        async def several():
            self.assertTrue(hasattr(self.echo.submit(b"y"), "__await__"))
            self.assertEqual(await self.echo.submit(b"x"), b"x")
            return await asyncio.gather(*map(task, range(12)))

        for _ in range(2):  # two loops, one after the other
            self.assertEqual(asyncio.run(several()), [i % 4 * 10**6 for i in range(12)])

    def test_other_tasks_run(self):
        """While a task waits for a call, others run, and wait for calls of the same lease."""
        async def several():
            slow = asyncio.ensure_future(self.result(self.sleep.submit(self.ns(60), worker=0)))
            forgotten = self.echo.submit(b"not awaited", worker=1)
            for i in range(20):
                self.assertEqual(await self.sleep.submit(np.array([i * 10**4], np.uint64), worker=1), i * 10**4)
            self.assertFalse(slow.done())
            slow.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await slow
            return await forgotten

        self.assertEqual(asyncio.run(several()), b"not awaited")

    async def result(self, request):
        return await request

    def test_failures(self):
        async def failures():
            both = self.sleep.submit(self.ns(60), worker=0, timeout=0.05), self.lease["crash"].submit(b"", worker=1)
            late, died = await asyncio.gather(*map(self.result, both), return_exceptions=True)
            self.assertIsInstance(late, rfaas.DeadlineError)
            self.assertIsInstance(died, rfaas.WorkerDiedError)
            self.lease.replace_worker(0)
            waits = asyncio.ensure_future(self.result(self.sleep.submit(self.ns(60), worker=0)))
            await asyncio.sleep(0.01)
            self.lease.release()
            with self.assertRaises(rfaas.InvalidError):
                await waits

        asyncio.run(failures())

    def test_several_loops(self):
        """Two threads with a loop each wait for calls of one lease, and another thread makes calls."""
        wrong, stop = [], threading.Event()

        async def several(worker):
            for i in range(50):
                results = await asyncio.gather(*(self.result(self.sleep.submit(np.array([j * 10**5], np.uint64), worker=worker)) for j in range(3)))
                if [int(r[0]) for r in results] != [0, 10**5, 2 * 10**5]:
                    wrong.append(results)

        def call():
            while not stop.is_set():
                if self.echo(b"x") != b"x":
                    wrong.append("x")

        threads = [threading.Thread(target=asyncio.run, args=(several(worker),)) for worker in range(2)]
        caller = threading.Thread(target=call)
        for t in caller, *threads:
            t.start()
        for t in threads:
            t.join()
        stop.set()
        caller.join()
        self.assertEqual(wrong, [])


class Maps(LeaseCase):
    def test_map(self):
        x = np.arange(30000.0).reshape(10000, 3)
        for items in x, x[:, :2], x[:0]:
            np.testing.assert_array_equal(self.echo.map(items), items)
        y = np.zeros_like(x)
        self.assertIs(self.echo.map(x, out=y, chunk=7), y)
        np.testing.assert_array_equal(y, x)
        self.assertEqual(self.echo.map(bytes(range(200)), dtype="u1").tolist(), list(range(200)))
        with self.assertRaisesRegex(ValueError, "not contiguous"):
            self.echo.map(x[:, :2], copy=False)

    def test_errors_of_a_map(self):
        x = np.arange(1000.0)
        with self.assertRaises(rfaas.FunctionError):
            self.lease["fail"].map(x)
        with self.assertRaises(TimeoutError):
            self.lease["sleep_ns"].map(np.full(100, 10**8, np.uint64), timeout=0.05, chunk=1)

    def test_reduce(self):
        x = np.random.default_rng(1).normal(size=5000)
        self.assertEqual(self.echo.reduce(x), np.add.accumulate(x)[-1])  # the same order, so the same bits
        self.assertEqual(self.echo.reduce(x, "min"), x.min())
        self.assertEqual(self.echo.reduce(x, rfaas.Operation.MAX, initial=100.0), 100)
        m = np.arange(12, dtype=np.int64).reshape(4, 3)
        self.assertEqual(self.echo.reduce(m, shape=3).tolist(), m.sum(0).tolist())

    def test_chain(self):
        chained = self.lease.chain(self.echo, self.lease["sum"])
        self.assertEqual(chained(np.arange(5, dtype=np.uint8), dtype="u8", shape=()), 10)


class Sources(unittest.TestCase):
    def test_functions_in_the_program(self):
        source = """
            #include <stdint.h>
            uint32_t twice(void *args, uint32_t size, void *res) {
                for (uint32_t i = 0; i < size / 8; i++)
                    ((double *)res)[i] = 2 * ((double *)args)[i];
                return size;
            }
        """
        with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, XDG_CACHE_HOME=directory):
            library = rfaas.compile(source, "-O2")
            with mock.patch("subprocess.run", side_effect=AssertionError("it is compiled again")):
                self.assertEqual(rfaas.compile(source, "-O2"), library)
            # A file that an option names may have changed.
            with mock.patch("subprocess.run", side_effect=lambda command, **_: shutil.copy(library, command[2]) and mock.Mock(returncode=0)) as run:
                self.assertEqual(rfaas.compile(source, f"-I{directory}"), rfaas.compile(source, f"-I{directory}"))
                self.assertEqual(run.call_count, 2)
            with rfaas.lease(library) as lease:
                np.testing.assert_array_equal(lease["twice"](np.arange(5.0)), 2 * np.arange(5.0))
            for kind, text, call in [
                (rfaas.BadLibraryError, "(?s)do not compile.*source:2:.*nosuch", lambda: rfaas.compile("\nnosuch x;")),
                (ValueError, "language is 'Pascal', want one of 'c', 'c\\+\\+', 'fortran'", lambda: rfaas.compile("", language="Pascal")),
            ]:
                with self.assertRaisesRegex(kind, text):
                    call()
            with mock.patch.dict(os.environ, RFAAS_CC="/nowhere/rfaas-cc"), self.assertRaisesRegex(FileNotFoundError, "RFAAS_CC names /nowhere/rfaas-cc"):
                rfaas.compile(source)
            os.chmod(os.path.dirname(library), 0o777)
            with self.assertRaisesRegex(PermissionError, "functions has mode 777 .* other users can write to it: remove it"):
                rfaas.compile(source, "-O2")


if __name__ == "__main__":
    unittest.main()
