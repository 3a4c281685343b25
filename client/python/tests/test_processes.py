"""The package rfaas in several processes, without its library, and without numpy."""
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest

import numpy as np
import rfaas
from cluster import ECHO, Cluster


def setUpModule():
    unittest.addModuleCleanup(Cluster(os.environ.get("RFAAS_TEST_PROVIDER", "shm")).stop)
    unittest.addModuleCleanup(lambda: rfaas.default_session().close())


def calls(number):
    """Opens the default session and a lease of its own. Returns how many results were right."""
    with rfaas.lease(ECHO) as lease:
        echo, x = lease["echo"], np.arange(100)
        return sum(np.array_equal(echo(x + number + i), x + number + i) for i in range(50))


class Executors(unittest.TestCase):
    def test_leases_across_executors(self):
        cluster = Cluster(os.environ.get("RFAAS_TEST_PROVIDER", "shm"), cores=2, executors=2)
        self.addCleanup(cluster.stop)
        with rfaas.Session() as session:
            self.assertEqual([change.state for change in session.changes()], [rfaas.ExecutorState.OPEN] * 2)
            leases = rfaas.Lease.across(ECHO, session=session, workers=3, cores_per_worker=1)
            requests = [lease["echo"].submit(bytes([i])) for lease in leases for i in range(20)]
            self.assertEqual(sorted(r.result() for r in rfaas.as_completed(requests)), sorted(bytes([i]) for i in range(20) for _ in leases))
            self.assertEqual(sum(lease.workers for lease in leases), 3)
            with self.assertRaises(rfaas.InvalidError):
                rfaas.Lease.across(ECHO, session=session, workers=1 << 17)


class Processes(unittest.TestCase):
    def test_multiprocessing(self):
        self.assertEqual(calls(-1), 50)  # so that forked processes inherit a library that was used
        with rfaas.lease(ECHO) as lease:
            for method in "fork", "spawn", "forkserver":
                with self.subTest(method), multiprocessing.get_context(method).Pool(3) as pool:
                    self.assertEqual(pool.map(calls, range(6), chunksize=1), [50] * 6)
            self.assertEqual(lease["echo"](b"still mine"), b"still mine")

    def test_child_of_fork_uses_no_handle_of_its_parent(self):
        with rfaas.lease(ECHO) as lease:
            request = lease["echo"].submit(b"parent")
            minute = (60 * 10**9).to_bytes(8, "little")
            watched = lease["sleep_ns"].submit(minute)
            watcher = threading.Thread(target=watched.wait)
            watcher.start()
            child = os.fork()
            if not child:
                status = 1
                try:
                    lease["echo"](b"")
                except rfaas.InvalidError:
                    failed = 0
                    for r in request, watched:
                        try:
                            r.result()
                        except rfaas.InvalidError:
                            failed += 1
                    if failed == 2:
                        del request
                        lease = rfaas.lease(ECHO)
                        status = lease["echo"](b"own") != b"own"
                finally:
                    os._exit(status)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
            self.assertEqual(request.result(), b"parent")
            watched.cancel()
            watcher.join()

    def run_python(self, program, *arguments, **environment):
        return subprocess.run([sys.executable, "-c", textwrap.dedent(program), ECHO, *arguments], env=os.environ | environment, capture_output=True, text=True,
                              timeout=60)

    def test_mpi_with_threads_and_openmp_beside(self):
        """Threads of an MPI program at MPI_THREAD_MULTIPLE send messages and call functions, while an OpenMP region runs."""
        if not importlib.util.find_spec("mpi4py") or not shutil.which("gcc"):
            self.skipTest("needs mpi4py and gcc")
        with tempfile.TemporaryDirectory() as directory:
            library = os.path.join(directory, "busy.so")
            source = "long busy(long n) { long s = 0;\n#pragma omp parallel for reduction(+:s) num_threads(3)\nfor (long i = 0; i < n; i++) s += i % 7; return s; }"
            subprocess.run(["gcc", "-shared", "-fPIC", "-fopenmp", "-O1", "-x", "c", "-", "-o", library], input=source, text=True, check=True)
            done = self.run_python("""
                import ctypes, sys, threading
                import numpy as np
                import rfaas
                from mpi4py import MPI
                assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
                busy = ctypes.CDLL(sys.argv[2]).busy
                right = []
                with rfaas.lease(sys.argv[1], workers=2) as lease:
                    def calls(number):
                        for i in range(50):
                            x = np.arange(100) + 1000 * number + i
                            got = MPI.COMM_SELF.sendrecv(lease["echo"](x), dest=0, sendtag=number, source=0, recvtag=number)
                            right.append(np.array_equal(got, x))
                    threads = [threading.Thread(target=calls, args=(n,)) for n in range(4)]
                    for t in threads:
                        t.start()
                    sums = {busy(ctypes.c_long(1 << 22)) for _ in range(5)}
                    for t in threads:
                        t.join()
                print(len(right), all(right), len(sums))
            """, library)
        self.assertEqual((done.stderr, done.stdout), ("", "200 True 1\n"))

    def test_without_the_library(self):
        done = self.run_python("""
            import rfaas
            try:
                rfaas.Session()
            except ImportError as e:
                print(e)
        """, RFAAS_LIBRARY="/nowhere/librfaas.so.0")
        self.assertRegex(done.stdout, "set RFAAS_LIBRARY.*/nowhere/librfaas.so.0: cannot open")

    def test_without_numpy(self):
        done = self.run_python("""
            import sys
            sys.modules["numpy"] = None
            import array, rfaas
            with rfaas.lease(sys.argv[1]) as lease:
                print(lease["echo"](array.array("i", [1, 2])), lease["echo"].map(b"abc", out=bytearray(3)))
        """)
        self.assertEqual((done.stderr, done.stdout), ("", "b'\\x01\\x00\\x00\\x00\\x02\\x00\\x00\\x00' bytearray(b'abc')\n"))

    def test_exit_with_open_leases_and_calls_in_flight(self):
        program = """
            import sys, threading, rfaas
            lease = rfaas.lease(sys.argv[1], workers=2)
            minute = (60 * 10**9).to_bytes(8, "little")
            request = lease["sleep_ns"].submit(minute, worker=0)
            if len(sys.argv) > 2:
                threading.Thread(target=lease["sleep_ns"], args=(minute,), kwargs={"worker": 1}, daemon=True).start()
                while lease.worker_info(1).running != "sleep_ns":
                    pass
            print("end")
        """
        for arguments in (), ("daemon thread",):
            done = self.run_python(program, *arguments)
            self.assertEqual((done.stderr, done.stdout, done.returncode), ("", "end\n", 0))


if __name__ == "__main__":
    unittest.main()
