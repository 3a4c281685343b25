"""Runtimes of an executor: workers that start with an interpreter and imported modules."""
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

import cloudpickle
import numpy as np
import rfaas
from cluster import ROOT, Cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])

RUNTIMES = {"numpy": {"python": "/usr/bin/python3", "preload": ["numpy"]}, "plain": {"python": "/usr/bin/python3"},
            "pickles": {"python": "/usr/bin/python3", "preload": ["numpy", "cloudpickle"]}}


def state():
    """Describes the interpreter of a worker."""
    import os as os_
    import threading

    return {"modules": set(sys.modules), "random": random.random(), "numpy": np.random.random(), "uuid": os_.urandom(4), "thread": threading.main_thread().ident == threading.get_ident(),
            "environment": dict(os_.environ), "version": sys.version_info[:2], "uid": os_.getuid()}


noted = None


def note(value):
    global noted
    noted = value


def get_noted():
    return noted


def opens():
    """Returns the number of files that the import of numpy and the first product open."""
    count = 0

    def hook(event, arguments):
        nonlocal count
        count += event == "open"

    sys.addaudithook(hook)
    import numpy

    assert float((numpy.eye(3) @ numpy.ones(3)).sum()) == 3
    return count


class TestRuntimes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster(cores=16, settings=("--runtimes", json.dumps(RUNTIMES)))

    @classmethod
    def tearDownClass(cls):
        cls.cluster.stop()

    def test_modules_are_there(self):
        with rfaas.Executor(runtime="numpy") as executor:
            self.assertEqual(executor.submit(opens).result(), 0)
            found = executor.submit(state).result()
        self.assertIn("numpy", found["modules"])
        self.assertTrue(found["thread"])
        self.assertEqual(found["environment"]["OPENBLAS_NUM_THREADS"], "1")
        self.assertIn("USER", found["environment"])
        self.assertNotIn("RFAAS_RUNTIME_PRELOAD", found["environment"])
        with rfaas.Executor(runtime="plain") as executor:
            self.assertNotIn("numpy", executor.submit(lambda: set(sys.modules)).result())

    def test_workers_have_their_own_seeds(self):
        with rfaas.Executor(4, runtime="numpy") as executor:
            states = [future.result() for future in [executor.submit(state) for _ in range(4)]]
            workers = {s["random"] for s in states}
            self.assertEqual(len(workers), 4)
            self.assertEqual(len({s["numpy"] for s in states}), 4)

    def test_sixteen_workers_start_at_once(self):
        with rfaas.Executor(16, runtime="numpy") as executor:
            self.assertEqual(list(executor.map(lambda x: float(np.full(2, x).sum()), range(64), chunksize=1)), [2.0 * x for x in range(64)])

    def test_threads_of_openblas(self):
        def product():
            return float((np.ones((256, 256)) @ np.ones((256, 256))).sum()), os.environ["OPENBLAS_NUM_THREADS"], len(os.listdir("/proc/self/task"))

        with rfaas.Executor(runtime="numpy", cores_per_worker=2) as executor:
            total, variable, threads = executor.submit(product).result()
        self.assertEqual((total, variable), (256.0 ** 3, "2"))
        self.assertGreaterEqual(threads, 2)

    def test_worker_is_replaced_with_its_runtime(self):
        with rfaas.Executor(runtime="numpy") as executor:
            with self.assertRaises(rfaas.WorkerDiedError):
                executor.submit(os._exit, 3).result()
            self.assertEqual(executor.submit(opens).result(), 0)

    def test_leases_of_both_kinds_stay_apart(self):
        """The workers of a lease with a runtime are not cached for one without, nor the reverse."""
        for runtime in "", "numpy", "", "plain":
            with rfaas.Executor(runtime=runtime) as executor:
                self.assertEqual("numpy" in executor.submit(lambda: list(sys.modules)).result(), runtime == "numpy")

    def test_runtime_with_the_code_of_the_client(self):
        """Workers use the code that the runtime has executed if it is the same as the client's, and the runtime's cloudpickle if it has the client's
        version. Then they have less private memory."""
        def use():
            assert cloudpickle.loads(cloudpickle.dumps(lambda: 1))() == 1
            with open("/proc/self/smaps_rollup") as f:
                private = sum(int(line.split()[1]) for line in f if line.startswith("Private_"))
            return bool(sys.modules["rfaas_remote"].functions), type(cloudpickle.__spec__.loader).__name__, private

        private = {}
        source_hash, code = rfaas._pickles._remote()
        for runtime, hash_, version, expected in [("pickles", source_hash, None, (True, "SourceFileLoader")), ("pickles", source_hash, "0.1", (True, "Finder")),
                                                  ("pickles", "0" * 16, None, (False, "SourceFileLoader")), ("numpy", source_hash, None, (True, "Finder")),
                                                  ("numpy", "0" * 16, None, (False, "Finder"))]:
            with self.subTest(runtime=runtime, hash=hash_, version=version), unittest.mock.patch.object(rfaas._pickles, "_remote", lambda: (hash_, code)), \
                    unittest.mock.patch.object(cloudpickle, "__version__", version or cloudpickle.__version__), rfaas.Executor(runtime=runtime) as executor:
                *found, private[runtime, hash_, version] = executor.submit(use).result()
                self.assertEqual(tuple(found), expected)
                executor.submit(note, 7).result()
                self.assertEqual(executor.submit(get_noted).result(), 7)  # functions share the variables of their module
        least = private["pickles", source_hash, None]
        self.assertLess(least, 3 << 10)
        self.assertLess(least + 400, private["pickles", "0" * 16, None])
        self.assertLess(least + 400, private["numpy", source_hash, None])

    def test_unknown_runtime(self):
        with self.assertRaisesRegex(rfaas.UnsupportedError, 'runtime "pypy" is not available on this node, which has numpy, pickles, plain'):
            rfaas.Executor(runtime="pypy")
        with self.assertRaisesRegex(rfaas.InvalidError, "cannot have a seed"):
            rfaas.Executor(runtime="numpy", seed=True)

    def test_other_version(self):
        real = rfaas._pickles.sys.version_info
        try:
            rfaas._pickles.sys = type("sys", (), {**vars(sys), "version_info": type("v", (), {"major": 3, "minor": real.minor + 1})})
            with self.assertRaisesRegex(rfaas.PythonVersionError, f"the client runs Python 3.{real.minor + 1}, and the runtime numpy of the executor's node is version"):
                rfaas.Executor(runtime="numpy")
        finally:
            rfaas._pickles.sys = sys

    def test_mpi_is_refused(self):
        with rfaas.Executor(runtime="numpy") as executor, self.assertRaisesRegex(ImportError, "not part of an MPI program"):
            def use():
                from mpi4py import MPI
                return MPI

            executor.submit(use).result()

    def test_virtual_environment(self):
        with tempfile.TemporaryDirectory() as directory:
            packages = Path(directory, "venv/lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
            packages.mkdir(parents=True)
            Path(directory, "venv/pyvenv.cfg").write_text("home = /usr/bin\n")
            Path(directory, "venv/bin").mkdir()
            Path(directory, "venv/bin/python3").symlink_to("/usr/bin/python3")
            (packages / "answers.py").write_text("answer = 42\n")

            def use():
                import answers
                return answers.answer, sys.prefix

            for runtime in "numpy", "":
                with self.subTest(runtime), rfaas.Executor(runtime=runtime, modules=[f"{directory}/venv"]) as executor:
                    answer, prefix = executor.submit(use).result()
                    self.assertEqual((answer, os.path.basename(prefix)), (42, "venv"))


class BadRuntimes(unittest.TestCase):
    """An executor that cannot start a runtime does not start, and says why."""

    def executor(self, runtime):
        run = subprocess.run([ROOT / "bin/executor", "--listen", "127.0.0.1:0", "--providers", "shm", "--runtimes", json.dumps({"bad": runtime})],
                             capture_output=True, text=True, timeout=60, env={**os.environ, "RFAAS_SECRET_FILE": ""})
        self.assertNotEqual(run.returncode, 0)
        return run.stderr

    def directory(self):
        temporary = tempfile.TemporaryDirectory(dir=ROOT / "build")
        self.addCleanup(temporary.cleanup)
        os.chmod(temporary.name, 0o755)
        return temporary.name


class TestBadRuntimes(BadRuntimes):
    def test_missing_module(self):
        self.assertIn("runtime bad: import no_such_module: ModuleNotFoundError", self.executor({"python": "/usr/bin/python3", "preload": ["no_such_module"]}))

    def test_missing_interpreter(self):
        self.assertIn("runtime bad: python /usr/bin/no-python: No such file", self.executor({"python": "/usr/bin/no-python"}))
        self.assertIn("want python3.N", self.executor({"python": "/usr/bin/env"}))

    def test_threads(self):
        directory = self.directory()
        Path(directory, "starts_a_thread.py").write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n")
        said = self.executor({"python": "/usr/bin/python3", "preload": ["starts_a_thread"], "paths": [directory]})
        if os.getuid() == 0 and "can be changed by others" in said:
            self.skipTest("another user than root can change the clone")
        self.assertIn("have started 1 threads", said)

    def test_interpreter_outside_of_bin(self):
        directory = self.directory()
        shutil.copy(os.path.realpath("/usr/bin/python3"), directory)
        self.assertIn("want DIRECTORY/bin/python3", self.executor({"python": f"{directory}/python3.{sys.version_info[1]}"}))


@unittest.skipIf(os.getuid(), "only an executor that root starts refuses files of others")
class TestFilesOfOthers(BadRuntimes):
    """An executor of root refuses what others can change, before code from there runs. The code would end the
    process, and the executor would report that instead."""

    def directory(self):
        temporary = tempfile.TemporaryDirectory(dir="/opt")
        self.addCleanup(temporary.cleanup)
        os.chmod(temporary.name, 0o755)
        return Path(temporary.name)

    def setUp(self):
        self.site, self.code = self.directory(), "import os; os._exit(77)\n"

    def refused(self, path, runtime):
        self.assertRegex(self.executor({"python": "/usr/bin/python3", **runtime}), f"runtime bad: (import .*)?{path} can be changed by others than root")

    def test_module_runs_if_only_root_changes_it(self):
        (self.site / "module.py").write_text(self.code)
        self.assertIn("exit status 77", self.executor({"python": "/usr/bin/python3", "preload": ["module"], "paths": [str(self.site)]}))

    def test_directory(self):
        link = self.directory() / "link"
        link.symlink_to(self.site / "missing")
        for mode in 0o777, 0o775:
            os.chmod(self.site, mode)
            for path in self.site, self.site / "missing/too", link:
                self.refused(self.site, {"paths": [str(path)]})

    def test_file(self):
        for name, top in ("module.py", "module"), ("package/inner.py", "package.inner"):
            file = self.site / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(self.code)
            os.chmod(file, 0o664)
            self.refused(file, {"preload": [top], "paths": [str(self.site)]})
            os.chmod(file, 0o644)
            os.chown(file, 65534, 0)
            self.refused(file, {"preload": [top], "paths": [str(self.site)]})
            os.chown(file, 0, 0)

    def test_refusal_that_a_module_catches(self):
        (self.site / "module.py").write_text("try:\n    import inner\nexcept Exception:\n    pass\n")
        (self.site / "inner.py").write_text(self.code)
        os.chmod(self.site / "inner.py", 0o666)
        self.refused(self.site / "inner.py", {"preload": ["module"], "paths": [str(self.site)]})

    def installation(self):
        """Returns an installation of the system's interpreter with a site-packages of its own."""
        prefix, version = self.directory(), f"python3.{sys.version_info[1]}"
        (prefix / "bin").mkdir()
        (prefix / "lib").mkdir()
        shutil.copy(os.path.realpath("/usr/bin/python3"), prefix / "bin" / version)
        shutil.copy(next(Path("/usr/lib").glob(f"*/lib{version}.so.1.0")), prefix / "lib")
        shutil.copytree(f"/usr/lib/{version}", prefix / "lib" / version, symlinks=True, ignore=shutil.ignore_patterns("test", "config-*"))
        return prefix, {"python": str(prefix / "bin" / version)}

    def test_parts_of_an_installation(self):
        prefix, runtime = self.installation()
        library = prefix / "lib" / f"python3.{sys.version_info[1]}"
        for part in next((prefix / "bin").iterdir()), next((prefix / "lib").glob("*.so.1.0")), library / "encodings/utf_8.py", library / "os.py", library:
            mode = part.stat().st_mode
            os.chmod(part, mode | 0o020)
            self.refused(part, runtime)
            os.chmod(part, mode)
        (prefix / "pyvenv.cfg").write_text("")
        os.chmod(prefix / "pyvenv.cfg", 0o666)
        self.refused(f"{prefix}/bin/../pyvenv.cfg", runtime)

    def test_environment(self):
        """Python's variables do not choose modules."""
        inner = self.site / "inner"
        inner.mkdir()
        (inner / "sitecustomize.py").write_text(self.code)
        with unittest.mock.patch.dict(os.environ, PYTHONPATH=str(inner), PYTHONHOME=str(inner)):
            self.assertIn("import no_such_module", self.executor({"python": "/usr/bin/python3", "preload": ["no_such_module"], "paths": [str(self.site)]}))

    def test_start_of_site(self):
        prefix, runtime = self.installation()
        packages = prefix / "local/lib" / f"python3.{sys.version_info[1]}" / "dist-packages"
        packages.mkdir(parents=True)
        for name, code in ("a.pth", self.code), ("sitecustomize.py", self.code):
            (packages / name).write_text(code)
            os.chmod(packages / name, 0o666)
            self.refused(packages / name, runtime)
            (packages / name).unlink()


if __name__ == "__main__":
    unittest.main()
