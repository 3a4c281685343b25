"""rfaas.Executor: calls, maps, failures and the end of Python functions in workers."""
import asyncio
import concurrent.futures as cf
import contextlib
import functools
import io
import os
import random
import signal
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
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


def _interrupt():
    raise KeyboardInterrupt


class Trouble(Exception):
    pass


def divide(a, b=1):
    return a / b


def square(x):
    return x * x


def until(path):
    """Waits in a worker for the end of the process, and says by the file's name where it waits."""
    while True:
        time.sleep(60)


def set_state(value):
    global state
    state = value


def get_state():
    return state


kept = []


class ExecutorCase(unittest.TestCase):
    workers = 2

    @classmethod
    def setUpClass(cls):
        cls.executor = rfaas.Executor(cls.workers, set_state, ("ready",))
        cls.addClassCleanup(cls.executor.shutdown)

    def run_here(self, fn, *args, **kwargs):
        return self.executor.submit(fn, *args, **kwargs).result()

    def occupied(self):
        """While this is held, no worker becomes idle."""
        return self.executor._dispatcher.lock

    def end(self, future):
        """Ends all calls, which do not return, as soon as their workers run them."""
        lease, dispatcher = self.executor.leases[0], self.executor._dispatcher
        with dispatcher.lock:
            busy = list(dispatcher.busy)
        for worker in busy:
            while not lease.worker_info(dispatcher.all.index(worker)).running:
                self.assertFalse(worker.request.done())
            lease.replace_worker(dispatcher.all.index(worker))
        with self.assertRaises(rfaas.WorkerDiedError):
            future.result()


class Calls(ExecutorCase):
    def test_values(self):
        n = 5
        self.assertEqual(self.run_here(divide, 1, b=4), 0.25)
        self.assertEqual(self.run_here(lambda x: x + n, 2), 7)
        self.assertEqual(self.run_here(pow, 2, 10), 1024)
        self.assertEqual(self.run_here(functools.partial(divide, b=2), 3), 1.5)
        self.assertEqual(self.run_here(get_state), "ready")
        self.assertIsInstance(self.run_here(lambda: Trouble("here")), Trouble)
        self.assertEqual(self.run_here(lambda: lambda x: x + n)(3), 8)
        large = os.urandom(3_000_000)
        self.assertEqual(self.run_here(lambda b: b[::-1], large), large[::-1])
        self.assertEqual(self.executor.leases[0].workers, 2)
        self.assertFalse(any(worker.request for worker in self.executor._dispatcher.all), "an idle worker keeps a reply")

    def test_a_method_is_pickled_with_the_state_that_it_has_now(self):
        class Counter:
            n = 1

            def get(self):
                return self.n

        c = Counter()
        self.assertEqual(self.run_here(c.get), 1)
        c.n = 2
        self.assertEqual(self.run_here(c.get), 2)

    def test_functions_have_the_variables_that_came_with_them(self):
        global number
        for n in 1, 2, 1:
            number = n
            self.assertEqual(self.run_here(lambda: number), n)

    def test_arrays(self):
        small, large = np.arange(12.0).reshape(3, 4), np.arange(400_000.0)
        for x in small, small.T, small[:, 1], large, small[:0], np.array(["a", None], object):
            y = self.run_here(lambda x: x, x)
            np.testing.assert_array_equal(x, y)
            self.assertTrue(y.flags.writeable)
        a, b = self.run_here(lambda x, y: (x + 1, {"b": y * 2}), large, small)
        np.testing.assert_array_equal(a, large + 1)
        np.testing.assert_array_equal(b["b"], small * 2)

    def test_arguments_of_calls_that_wait_are_copied(self):
        x = np.zeros(1000)
        futures = []
        for i in range(50):
            x[:] = i
            futures.append(self.executor.submit(np.sum, x))
        self.assertEqual([f.result() for f in futures], [1000.0 * i for i in range(50)])

    def test_code_is_sent_once_to_each_worker(self):
        text = os.urandom(200_000).hex()
        size = lambda: len(text)  # noqa: E731
        before = self.executor.leases[0].statistics().bytes_in
        self.assertEqual({f.result() for f in [self.executor.submit(size) for _ in range(40)]}, {400_000})
        sent = self.executor.leases[0].statistics().bytes_in - before
        self.assertLess(sent, 2 * 400_000 + 100_000)

    def test_many_functions(self):
        """More than a worker keeps."""
        functions = [(lambda n: lambda: n)(n) for n in range(1100)]
        for _ in range(2):
            self.assertEqual([f.result() for f in [self.executor.submit(fn) for fn in functions]], list(range(1100)))

    def test_output(self):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.run_here(lambda: print("one", 2, file=sys.stdout, flush=True) or print("three", file=sys.stderr))
        self.assertEqual((out.getvalue(), err.getvalue()), ("one 2\n", "three\n"))

    def test_seeds_differ(self):
        def seeds():
            return random.random(), np.random.rand(), hash("text")

        with self.occupied():
            futures = [self.executor.submit(seeds) for _ in range(2)]
        for a, b in zip(*(f.result() for f in futures)):
            self.assertNotEqual(a, b)

    def test_threads(self):
        wrong = []

        def calls(n):
            futures = [self.executor.submit(square, n + i) for i in range(100)]
            wrong.extend(f for i, f in enumerate(futures) if f.result() != (n + i) ** 2)
            wrong.extend(i for i in range(100) if self.run_here(square, i) != i * i)

        threads = [threading.Thread(target=calls, args=(1000 * n,)) for n in range(6)]
        for t in threads:
            t.start()
        calls(0)
        for t in threads:
            t.join()
        self.assertEqual(wrong, [])

    def test_a_thread_waits_for_another_call_than_the_driver(self):
        entered = threading.Event()
        slow = self.executor.submit(time.sleep, 600)

        def wait():
            entered.set()
            slow.exception()

        waiter = threading.Thread(target=wait)
        waiter.start()
        entered.wait()
        for i in range(20):
            self.assertEqual(self.executor.submit(square, i).result(timeout=60), i * i)
        self.end(slow)
        waiter.join()


class Waits(ExecutorCase):
    def test_ways_to_wait(self):
        for wait in cf.as_completed, rfaas.as_completed:
            futures = [self.executor.submit(square, i) for i in range(20)]
            self.assertEqual(sorted(f.result() for f in wait(futures, timeout=60)), [i * i for i in range(20)])
        done, left = cf.wait([self.executor.submit(square, i) for i in range(20)])
        self.assertEqual((len(done), len(left)), (20, 0))
        called = threading.Event()
        self.executor.submit(square, 3).add_done_callback(lambda f: f.result() == 9 and called.set())
        self.assertTrue(called.wait(60))
        results = []  # of a callback that waits, in the thread that waits for its call
        future = self.executor.submit(time.sleep, 0.02)
        future.add_done_callback(lambda _: results.append(self.run_here(square, 6)))
        future.result()
        self.assertEqual((results, self.run_here(square, 2)), ([36], 4))

        async def both():
            loop = asyncio.get_running_loop()
            return await asyncio.gather(*(loop.run_in_executor(self.executor, square, i) for i in range(5)))

        self.assertEqual(asyncio.run(both()), [0, 1, 4, 9, 16])

        async def awaited():
            slow = self.executor.submit(time.sleep, 0.05)
            return await self.executor.submit(square, 3), await slow, await slow

        self.assertEqual(asyncio.run(awaited()), (9, None, None))

    def test_functions_of_asyncio(self):
        def slow(number):  # longer than `await` polls
            time.sleep(0.02)
            return number

        async def result(future):
            return await future

        async def all_ways(start):
            gathered = await asyncio.gather(*map(start, range(4)))
            first = await asyncio.wait_for(start(4), 60)
            by_end = [await f for f in asyncio.as_completed([start(5), start(6)])]
            done, waiting = await asyncio.wait([asyncio.ensure_future(start(n)) for n in (7, 8)])
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(result(start(n))) for n in (9, 10)]
                with self.assertRaises(TypeError):
                    group.create_task(start(11))
            return gathered + [first] + sorted(by_end) + sorted(task.result() for task in done) + [task.result() for task in tasks], waiting

        for f in slow, abs:
            self.assertEqual(asyncio.run(all_ways(functools.partial(self.executor.submit, f))), (list(range(11)), set()))

    def test_a_task_that_is_cancelled(self):
        """Its call goes on, and later calls are answered."""
        async def cancelled():
            slow.append(self.executor.submit(time.sleep, 0.1))
            task = asyncio.ensure_future(slow[0])
            await asyncio.sleep(0.01)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            with self.assertRaises(TimeoutError):
                slow.append(self.executor.submit(time.sleep, 0.1))
                await asyncio.wait_for(slow[1], 0.01)
            return await self.executor.submit(square, 3)

        slow = []
        self.assertEqual(asyncio.run(cancelled()), 9)
        cf.wait(slow)

    def test_submit_may_interrupt_submit(self):
        """As in a signal handler or a finalizer, wherever it calls a function."""
        futures = []
        sys.setprofile(lambda frame, event, arg: event == "call" and futures.append(self.executor.submit(square, 2)))
        try:
            futures.append(self.executor.submit(square, 2))
        finally:
            sys.setprofile(None)
        self.assertEqual({f.result(60) for f in futures}, {4})

    def test_time_limits(self):
        slow = self.executor.submit(time.sleep, 600)
        for wait in slow.result, slow.exception, lambda timeout: list(rfaas.as_completed([slow], timeout)):
            with self.assertRaises(TimeoutError):
                wait(timeout=0.01)
        with self.assertRaises(TimeoutError):
            list(self.executor.map(time.sleep, [600], timeout=0.01))
        self.end(slow)

    def test_cancel(self):
        with self.occupied():
            slow = [self.executor.submit(time.sleep, 0.01) for _ in range(2)]
            waits = self.executor.submit(square, 2)
            self.assertEqual([f.cancel() for f in (*slow, waits)], [False, False, True])
        with self.assertRaises(cf.CancelledError):
            waits.result()
        self.assertEqual([f.result() for f in slow], [None, None])
        self.assertEqual(self.run_here(square, 4), 16)

    def test_interrupt(self):
        slow = self.executor.submit(time.sleep, 600)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        with self.assertRaises(KeyboardInterrupt):
            timer.start()
            slow.result()
        timer.join()
        self.assertEqual(self.run_here(square, 5), 25)
        self.end(slow)

    def test_interrupts_at_any_place(self):
        """None of them may lose a worker, or a call of another thread."""
        end, interrupts, results = time.monotonic() + 0.7, 0, []

        def goes_on():
            return time.monotonic() < end or not interrupts or not results

        def interrupt():
            while goes_on():
                time.sleep(random.random() * 0.01)
                os.kill(os.getpid(), signal.SIGINT)

        def calls():
            while goes_on():
                try:
                    results.append(self.executor.submit(square, 3).result() == 9)
                except rfaas.FunctionError as e:
                    results.append("Ctrl-C came" in str(e))

        threads = [threading.Thread(target=target) for target in (interrupt, calls)]
        on = False
        before = signal.signal(signal.SIGINT, lambda _, frame: _interrupt() if on and frame.f_code.co_filename != __file__ else None)
        for t in threads:
            t.start()
        on = True
        while goes_on():
            try:
                while goes_on():
                    list(self.executor.map(square, range(40)))
            except KeyboardInterrupt:
                interrupts += 1
        on = False
        for t in threads:
            t.join()
        signal.signal(signal.SIGINT, before)
        self.assertTrue(interrupts and results and all(results), (interrupts, len(results)))
        self.assertEqual(self.run_here(square, 5), 25)
        dispatcher = self.executor._dispatcher
        with dispatcher.lock:
            self.assertEqual(len(dispatcher.idle) + len(dispatcher.busy), 2)


class Maps(ExecutorCase):
    def test_map(self):
        expected = [i * i for i in range(1000)]
        for items in range(1000), list(range(1000)), (i for i in range(1000)), np.arange(1000):
            self.assertEqual(list(self.executor.map(square, items)), expected)
        for options in {"chunksize": 7}, {"buffersize": 5}, {"chunksize": 10, "buffersize": 25}:
            self.assertEqual(list(self.executor.map(square, iter(range(1000)), **options)), expected)
            self.assertEqual(sorted(self.executor.map(square, range(1000), unordered=True, **options)), expected)
        self.assertEqual(list(self.executor.map(pow, range(5), [2] * 9)), [0, 1, 4, 9, 16])
        self.assertEqual(list(self.executor.map(pow, iter(range(5)), (2 for _ in range(9)), chunksize=2)), [0, 1, 4, 9, 16])
        self.assertEqual(list(self.executor.starmap(divide, [(6,), (6, 2), (6, 3)])), [6, 3, 2])
        self.assertEqual(list(self.executor.map(square, [])), [])

    def test_buffersize(self):
        taken = []
        results = self.executor.map(square, (taken.append(i) or i for i in range(1000)), buffersize=4)
        self.assertEqual(len(taken), 4)
        self.assertEqual([next(results) for _ in range(3)], [0, 1, 4])
        self.assertLessEqual(len(taken), 7)

    def test_exception_comes_after_the_results_before_it(self):
        results = self.executor.map(lambda x: 1 / x, [1, 2, 0, 4], chunksize=4)
        self.assertEqual([next(results), next(results)], [1, 0.5])
        with self.assertRaises(ZeroDivisionError):
            next(results)

    def test_bad_input(self):
        for kind, text, options in [(ValueError, "chunksize must be at least 1, not 0", {"chunksize": 0}),
                                    (TypeError, "chunksize must be an integer", {"chunksize": 1.5}),
                                    (ValueError, "buffersize must be at least 1, not -1", {"buffersize": -1})]:
            with self.assertRaisesRegex(kind, text):
                self.executor.map(square, [1], **options)
        with self.assertRaisesRegex(Exception, "argument 1 of square cannot be pickled.*lock"):
            list(self.executor.map(square, [1, threading.Lock()], chunksize=2))


class Failures(ExecutorCase):
    def test_exceptions(self):
        def raises(e):
            raise e

        with self.assertRaisesRegex(ValueError, "^no good$") as caught:
            self.run_here(raises, ValueError("no good"))
        self.assertIsInstance(caught.exception.__cause__, rfaas.RemoteTraceback)
        self.assertRegex(str(caught.exception.__cause__), r'(?s)test_executor.py", line \d+, in raises\n.*ValueError: no good')
        self.assertNotIn("_remote", str(caught.exception.__cause__))
        with self.assertRaises(Trouble):
            self.run_here(raises, Trouble("x"))
        with self.assertRaises(SystemExit):
            self.run_here(sys.exit, 3)

        def unpicklable():
            raise Trouble(threading.Lock())

        with self.assertRaisesRegex(RuntimeError, "Trouble.*lock.*the exception cannot be pickled"):
            self.run_here(unpicklable)
        with self.assertRaises(MemoryError):
            self.run_here(lambda: bytearray(1 << 60))
        self.assertEqual(self.run_here(square, 6), 36)

    def test_kept_exception(self):
        """The frames of an exception that a function keeps do not keep the request and the reply."""
        def keeps(x):
            try:
                raise KeyError(x)
            except KeyError as e:
                sys.modules["kept exception"] = e
            return x

        self.assertEqual([self.run_here(keeps, i) for i in range(3)], [0, 1, 2])
        self.assertEqual(list(self.executor.map(keeps, range(30))), list(range(30)))

    def test_bad_input(self):
        def imports(name):
            __import__(name)

        for kind, text, call in [
            (TypeError, "7 is not callable", lambda: self.run_here(7)),
            (Exception, "argument 2 of divide cannot be pickled: .*lock", lambda: self.run_here(divide, 1, threading.Lock())),
            (Exception, "argument 'b' of divide cannot be pickled", lambda: self.run_here(divide, 1, b=threading.Lock())),
            (Exception, "test_bad_input.*returned a value that cannot be pickled: .*lock", lambda: self.run_here(lambda: __import__("threading").Lock())),
            (ModuleNotFoundError, r"No module named 'nosuch'.*modules=\['nosuch'\]", lambda: self.run_here(imports, "nosuch.part")),
            (ImportError, "mpi4py cannot be imported in a worker", lambda: self.run_here(imports, "mpi4py.MPI")),
            (rfaas.FunctionError, "keeps an argument.*keep a copy", lambda: self.run_here(lambda x: sys.modules.setdefault("kept", x).sum(), np.zeros(9))),
            (ValueError, "max_workers must be greater than 0, not 0", lambda: rfaas.Executor(0)),
            (TypeError, "initializer is 3, which is not callable", lambda: rfaas.Executor(1, 3)),
            (TypeError, "sets the option depth itself", lambda: rfaas.Executor(depth=4)),
            (TypeError, "Lease has no option 'tiemout'", lambda: rfaas.Executor(tiemout=4)),
            (ModuleNotFoundError, "modules names 'nosuch'", lambda: rfaas.Executor(modules="nosuch")),
            (rfaas.BrokenExecutor, "division by zero", lambda: rfaas.Executor(1, divide, (1, 0))),
        ]:
            with self.subTest(text), self.assertRaisesRegex(kind, text):
                call()
        self.assertEqual(self.run_here(square, 7), 49)

    def test_replies_of_a_hostile_worker(self):
        """A function may change the code that writes replies. The client allocates nothing for a size that no result can have."""
        def announce(size):
            import gc

            remote = next(d for d in gc.get_objects() if type(d) is dict and d.get("__name__") == "rfaas_remote" and "put" in d)
            real = remote["put"]

            def put(room, *_, **__):
                remote["put"] = real
                text = str(size).encode()
                return remote["write"](room, [remote["REPLY"].pack(remote["MORE"], 0, len(text), 0), text])

            remote["put"] = put
            return object  # no plain value: put is called

        for size in 1 << 60, -1, 5, "x" * 30:
            with self.subTest(size), self.assertRaisesRegex(rfaas.FunctionError, "reply of the worker is malformed"):
                self.run_here(announce, size)
        self.assertEqual(self.run_here(square, 8), 64)

    def test_too_many_workers_for_one_executor(self):
        with self.assertRaisesRegex(rfaas.InvalidError, "lends .*; across=True leases workers on several executors"):
            rfaas.Executor(1000)

    def test_errors_begin_with_what_the_program_knows(self):
        with rfaas.Executor(1) as executor, self.assertRaises(rfaas.WorkerDiedError) as caught:
            executor.submit(os._exit, 3).result()
        self.assertEqual(str(caught.exception), "_exit: worker 0: called exit(3)")
        with self.assertRaises(rfaas.BrokenExecutor) as caught:
            rfaas.Executor(1, divide, (1, 0))
        self.assertEqual(str(caught.exception), "the start of worker 0: division by zero")

    def test_other_python_version(self):
        payload = _pickles.start_payload
        for change, text in ((b"3.", b"2.", 1), "the client runs Python 2"), ((b"libpython", b"libnosuch"), "finds no libpython of this version"):
            with mock.patch.object(_pickles, "start_payload", lambda *a: payload(*a).replace(*change)):
                with self.assertRaisesRegex(rfaas.PythonVersionError, text):
                    rfaas.Executor()

    def test_death_of_a_worker(self):
        import ctypes

        with rfaas.Executor(2, set_state, ("again",)) as executor:
            endless = executor.submit(until, "")
            waits = threading.Thread(target=endless.exception)  # drives, and must see calls that start later
            waits.start()
            no_thread = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
            for text, patch, fn, *args in ((r"_exit: .*called exit\(3\)", contextlib.nullcontext(), os._exit, 3),
                                           ("string_at: .*SIGSEGV", no_thread, ctypes.string_at, 8)):
                with self.subTest(text), patch, self.assertRaisesRegex(rfaas.WorkerDiedError, text) as caught:
                    executor.submit(fn, *args).result(60)
                self.assertTrue(caught.exception.started)
            self.assertEqual({executor.submit(get_state).result(60) for _ in range(10)}, {"again"})
            executor.leases[0].replace_worker(0)
            waits.join()
            self.assertIsInstance(endless.exception(), rfaas.Error)

    def test_endless_function(self):
        with rfaas.Executor(1, initializer=time.sleep, initargs=(2,), call_limit=1) as executor:  # which does not limit the initializer
            with self.assertRaisesRegex(rfaas.TimeLimitError, "until: "):
                executor.submit(until, "").result()
            self.assertEqual(executor.submit(square, 8).result(), 64)

    def test_workers_that_cannot_be_replaced(self):
        start = rfaas._dispatch.Worker.start
        with rfaas.Executor(2) as executor:
            lost = executor._dispatcher.idle[-1]

            def start_unless_lost(worker, future):
                if worker is lost:
                    raise rfaas.LeaseError("ended", -600, False)
                start(worker, future)

            with mock.patch.object(rfaas._dispatch.Worker, "start", start_unless_lost):
                self.assertEqual(executor.submit(square, 3).result(60), 9)
        with rfaas.Executor(1, wait=1) as executor, mock.patch.object(rfaas._dispatch.Worker, "start", side_effect=rfaas.LeaseError("ended", -600, False)):
            waits = executor.submit(square, 1)
            with self.assertRaisesRegex(rfaas.BrokenExecutor, "no workers any more: ended"):
                waits.result()
            with self.assertRaisesRegex(cf.BrokenExecutor, "no workers any more: ended"):
                executor.submit(square, 1)


class Ends(unittest.TestCase):
    def test_shutdown(self):
        with rfaas.Executor(1) as executor:
            futures = [executor.submit(square, i) for i in range(20)]
        self.assertEqual([f.result(timeout=0) for f in futures], [i * i for i in range(20)])
        self.assertTrue(executor.leases[0].released)
        with self.assertRaisesRegex(RuntimeError, "after shutdown"):
            executor.submit(square, 1)
        executor = rfaas.Executor(1)
        with executor._dispatcher.lock:  # no worker becomes idle
            futures = [executor.submit(square, 5), *(executor.submit(square, i) for i in range(2000))]
            executor.shutdown(wait=False, cancel_futures=True)
        self.assertEqual(futures[0].result(), 25)
        self.assertTrue(all(f.cancelled() for f in futures[1:]))

    def test_an_executor_that_is_forgotten_finishes(self):
        future = rfaas.Executor(1).submit(square, 5)
        self.assertEqual(future.result(), 25)

    def test_modules(self):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "first.py").write_text("import second\ndef f(x): return second.g(x)\n")
            Path(directory, "second").mkdir()
            Path(directory, "second/__init__.py").write_text("def g(x): return -x\n")
            with mock.patch.object(sys, "path", [directory, *sys.path]):
                import first

                with rfaas.Executor(1, modules=["first", Path(directory, "second")]) as executor:
                    self.assertEqual(executor.submit(first.f, 3).result(), -3)

    def test_child_of_fork(self):
        with rfaas.Executor(1) as executor:
            future = executor.submit(time.sleep, 600)
            for use in lambda: executor.submit(square, 1), lambda: future.result(5):
                child = os.fork()
                if not child:
                    status = 1
                    try:
                        use()
                    except rfaas.InvalidError:
                        status = 0
                    finally:
                        os._exit(status)
                self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
            executor.leases[0].replace_worker(0)
            with self.assertRaises(rfaas.WorkerDiedError):
                future.result()
            self.assertEqual(executor.submit(square, 2).result(), 4)

    def test_end_of_the_program(self):
        import subprocess

        done = subprocess.run([sys.executable, "-c", "import rfaas; e = rfaas.Executor(); e.submit(print, 'late'); import os\n"
                               "if not os.fork(): raise SystemExit\nos.wait()"], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.stderr, done.stdout), ("", "late\n"))


if __name__ == "__main__":
    unittest.main()
