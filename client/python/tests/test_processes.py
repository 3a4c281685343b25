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
        """In a process of its own, because the library of this one may be connected to another agent already."""
        cluster = Cluster(os.environ.get("RFAAS_TEST_PROVIDER", "shm"), cores=2, executors=2)
        self.addCleanup(cluster.stop)
        done = subprocess.run([sys.executable, "-c", textwrap.dedent("""
            import sys
            import rfaas
            with rfaas.Session() as session:
                states = [change.state.name for change in session.changes()]
                leases = rfaas.Lease.across(sys.argv[1], session=session, workers=3, cores_per_worker=1)
                requests = [lease["echo"].submit(bytes([i])) for lease in leases for i in range(20)]
                good = sorted(r.result() for r in rfaas.as_completed(requests)) == sorted(bytes([i]) for i in range(20) for _ in leases)
                print(states, good, sum(lease.workers for lease in leases))
                for lease in leases:
                    lease.release()
                echo = rfaas.python(lambda arguments, result: 0, eval)
                leases = rfaas.Lease.across(echo, session=session, workers=3, cores_per_worker=1)
                print(sum(lease.workers for lease in leases), {lease["<lambda>"](b"x") for lease in leases})
                try:
                    rfaas.Lease.across(sys.argv[1], session=session, workers=1 << 17)
                except rfaas.InvalidError:
                    print("refused")
        """), ECHO], capture_output=True, text=True, timeout=90)
        self.assertEqual((done.stdout, done.returncode), ("['OPEN', 'OPEN'] True 3\n3 {b''}\nrefused\n", 0), done.stderr)


class Ranks(unittest.TestCase):
    """Leases for all ranks of a communicator."""

    def run_ranks(self, launcher, program, *arguments, ranks=2):
        environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        return subprocess.run([launcher, "-n", str(ranks), sys.executable, "-c", textwrap.dedent(program), ECHO, *arguments], env=environment, capture_output=True,
                              text=True, timeout=90)

    def test_places(self):
        with rfaas.Session() as session:
            places = session.places(2, ECHO, workers=2)
            self.assertEqual(places, [os.environ["RFAAS_EXECUTOR"]] * 2)
            for wrong in -1, "two":
                with self.assertRaises((ValueError, TypeError)):
                    session.places(wrong, ECHO)

    @unittest.skipUnless(importlib.util.find_spec("mpi4py") and shutil.which("mpiexec.openmpi"), "needs mpi4py and OpenMPI")
    def test_ranks(self):
        """Two executors have room for the ranks together. If one rank has no room or a wrong option, all get an error."""
        cluster = Cluster(os.environ.get("RFAAS_TEST_PROVIDER", "shm"), cores=2, executors=2)
        self.addCleanup(cluster.stop)
        done = self.run_ranks("mpiexec.openmpi", """
            import sys
            import rfaas
            from mpi4py import MPI
            comm = MPI.COMM_WORLD
            with rfaas.lease(sys.argv[1], comm=comm, workers=3) as lease:
                places = comm.gather((lease["echo"](b"rank %d" % comm.rank), lease.info().executor_address))
            errors = []
            for options in {"workers": 3 + 2 * comm.rank}, {"eager": -comm.rank}, {"depht": 1}:
                try:
                    rfaas.lease(sys.argv[1], comm=comm, **options)
                except (rfaas.Error, TypeError, ValueError, OverflowError) as e:
                    errors.append(type(e).__name__)
            for arguments in {"max_workers": comm.rank}, {"modules": ["nosuch"][comm.rank:]}, {"initializer": abs if comm.rank else 5}:
                try:
                    rfaas.Executor(**arguments, comm=comm)
                except (TypeError, ValueError, ImportError) as e:
                    errors.append(type(e).__name__)
            with rfaas.Executor(2, comm=comm) as executor:
                total = comm.reduce(sum(executor.map(abs, range(-comm.rank, 10))))
            errors = comm.gather(errors)
            if comm.rank == 0:
                print([answer for answer, _ in places], len({place for _, place in places}), errors[0] == errors[1], len(errors[0]), total)
        """)
        self.assertEqual((done.stdout, done.returncode), ("[b'rank 0', b'rank 1'] 2 True 6 91\n", 0), done.stderr)

    @unittest.skipUnless(shutil.which("mpiexec.mpich"), "needs MPICH")
    def test_mpich_with_threads(self):
        """Debian's mpi4py is for OpenMPI. So ctypes calls MPICH, at MPI_THREAD_MULTIPLE, from the threads that also call functions."""
        done = self.run_ranks("mpiexec.mpich", """
            import ctypes, os, sys, threading
            import numpy as np
            import rfaas
            mpi, integer, world = ctypes.CDLL("libmpich.so.12"), ctypes.c_int, ctypes.c_int(0x44000000)
            BYTE, ANY_STATUS = ctypes.c_int(0x4c00010d), ctypes.c_void_p(1)
            provided, rank = integer(), integer()
            assert mpi.MPI_Init_thread(None, None, 3, ctypes.byref(provided)) == 0 and provided.value == 3
            assert mpi.MPI_Comm_rank(world, ctypes.byref(rank)) == 0
            other, right = 1 - rank.value, []
            with rfaas.lease(sys.argv[1], workers=2) as lease:
                def calls(number):
                    for i in range(20):
                        mine = lease["echo"](np.arange(100) + 1000 * number + i + rank.value)
                        theirs = np.empty_like(mine)
                        assert mpi.MPI_Sendrecv(mine.ctypes, integer(mine.nbytes), BYTE, other, number, theirs.ctypes, integer(mine.nbytes), BYTE, other, number,
                                                world, ANY_STATUS) == 0
                        right.append(np.array_equal(theirs - other, mine - rank.value))
                threads = [threading.Thread(target=calls, args=(n,)) for n in range(3)]
                for t in threads:
                    t.start()
                for t in threads:
                    t.join()
            assert mpi.MPI_Finalize() == 0
            os.write(1, f"{len(right)} {all(right)}\\n".encode())  # one write, so that lines of the ranks do not mix
        """)
        self.assertEqual((done.stdout, done.returncode), ("60 True\n60 True\n", 0), done.stderr)


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
