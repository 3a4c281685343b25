"""CPython's own tests of concurrent.futures, with rfaas.Executor in place of ProcessPoolExecutor. Debian: libpython3.11-testsuite.

What does not apply:
- ThreadPool*, ProcessPoolShutdownTest, test_saturation, test_idle_process_*, test_max_tasks_*, test_killed_child: about the threads and processes of
  the executors of concurrent.futures, and about max_tasks_per_child
- test_interpreter_shutdown, test_submit_after_interpreter_shutdown, test_hang_gh83386: programs that name an executor of concurrent.futures.
  test_executor.py has their counterparts
- FailingInitializerMixin: a failing initializer makes opening the executor fail
- test_ressources_gced_in_workers: a worker cannot connect to a process of the client
- test_timeout, test_map_timeout: their limits are 5 s. test_executor.py has their counterparts
- ExecutorDeadlockTest except those below: functions that end the worker or raise while something is unpickled break a process pool. Here the call ends with
  WorkerDiedError or with the exception itself
- test_traceback: wants a private class of concurrent.futures as the cause. The rest of it is in test_executor.py
"""
import os
import sys
import time
import types
import unittest

import cloudpickle
import rfaas
from cluster import Cluster

if sys.version_info[:2] != (3, 11):
    raise unittest.SkipTest("later versions of CPython divide these tests among several files")
from test import test_concurrent_futures as theirs

for module in sys.modules[__name__], theirs:
    cloudpickle.register_pickle_by_value(module)  # importing it in each worker would take longer than the tests

SHORTER = 5  # the sleeps of the tests are shorter by this factor


def sleep(seconds):
    time.sleep(seconds / SHORTER)


def setUpModule():
    unittest.addModuleCleanup(Cluster(os.environ.get("RFAAS_TEST_PROVIDER", "shm"), cores=8).stop)
    unittest.addModuleCleanup(lambda: rfaas.default_session().close())
    time_of = types.SimpleNamespace(**{**vars(time), "sleep": sleep})
    for module, name, value in (theirs, "time", time_of), (theirs, "BrokenProcessPool", rfaas.WorkerDiedError):
        unittest.addModuleCleanup(setattr, module, name, getattr(module, name))
        setattr(module, name, value)


class Mixin(theirs.ExecutorMixin):
    worker_count = 4
    executor_type = staticmethod(lambda max_workers, mp_context=None, **options: rfaas.Executor(max_workers, **options))

    def get_context(self):
        return None


def without(base, *names):
    """A class of tests in which some do not exist."""
    return type(base.__name__, (base,), dict.fromkeys(names))


class Waits(Mixin, without(theirs.WaitTests, "test_timeout"), theirs.BaseTestCase):
    pass


class AsCompleted(Mixin, theirs.AsCompletedTests, theirs.BaseTestCase):
    pass


class Executors(Mixin, without(theirs.ExecutorTest, "test_map_timeout"), theirs.BaseTestCase):
    test_map_chunksize = theirs.ProcessPoolExecutorTest.test_map_chunksize


class Initializer(Mixin, theirs.InitializerMixin, theirs.BaseTestCase):
    pass


class Shutdown(Mixin, without(theirs.ExecutorShutdownTest, "test_interpreter_shutdown", "test_submit_after_interpreter_shutdown", "test_hang_gh83386"),
               theirs.BaseTestCase):
    pass


class Deadlocks(Mixin, unittest.TestCase):
    TIMEOUT = theirs.support.SHORT_TIMEOUT
    for name in ("_check_crash", "_fail_on_deadlock", "test_error_at_task_pickle", "test_crash_at_task_unpickle", "test_crash_during_func_exec_on_worker",
                 "test_exit_during_func_exec_on_worker", "test_error_during_func_exec_on_worker", "test_crash_during_result_pickle_on_worker",
                 "test_exit_during_result_pickle_on_worker", "test_error_during_result_pickle_on_worker", "test_shutdown_deadlock"):
        locals()[name] = getattr(theirs.ExecutorDeadlockTest, name)


if __name__ == "__main__":
    unittest.main()
