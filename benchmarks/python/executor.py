"""Measures calls by rfaas.Executor beside ProcessPoolExecutor, and beside calls of a C function in the same program. The table has the fastest of
several runs, because other programs on the same processors can only make a run slower.

Usage, after make build: python3 benchmarks/python/executor.py
"""
import argparse
import asyncio
import concurrent.futures
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "lib/python"), str(ROOT / "client/python/tests")]

import numpy as np
import rfaas
from cluster import ECHO, Cluster


def nothing(x):
    return x


def fastest(run, times):
    """Returns the shortest time of an operation in us. run() executes several operations and returns their number."""
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        n = run()
        best = min(best, (time.perf_counter() - begin) / n * 1e6)
    return best


def rows(executor):
    """Yields each measurement: its name, and a function that executes several operations and returns their number."""
    large = np.zeros(1 << 17)

    def one_by_one(n=300):
        for _ in range(n):
            executor.submit(nothing, None).result()
        return n

    def burst(n=3000):
        begin = time.perf_counter()
        futures = [executor.submit(nothing, None) for _ in range(n)]
        burst.submitted = min(burst.submitted, (time.perf_counter() - begin) / n * 1e6)
        concurrent.futures.wait(futures)
        return n

    def items(n=200_000):
        for _ in executor.map(nothing, range(n), chunksize=10_000):
            pass
        return n

    def arguments(n=100):
        for _ in range(n):
            executor.submit(len, large).result()
        return n

    def loop(n=200):
        async def calls():
            run = asyncio.get_running_loop().run_in_executor
            for _ in range(n):
                await run(executor, nothing, None)

        asyncio.run(calls())
        return n

    def awaited(n=200):
        async def calls():
            for _ in range(n):
                await executor.submit(nothing, None)

        asyncio.run(calls())
        return n

    burst.submitted = float("inf")
    yield "submit(f).result()", one_by_one
    yield "a call of many that were submitted at once", burst
    yield "submit(f) of these", lambda: burst.submitted
    yield "an item of map", items
    yield "submit(len, 1 MiB array).result()", arguments
    yield "await run_in_executor(f)", loop
    yield "await submit(f)", awaited if isinstance(executor, rfaas.Executor) else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--provider", default="shm")
    arguments = parser.parse_args()
    cluster = Cluster(arguments.provider)
    try:
        with rfaas.lease(ECHO) as lease, rfaas.Executor(arguments.workers) as ours, \
                concurrent.futures.ProcessPoolExecutor(arguments.workers) as theirs:
            echo, large, small, out = lease["echo"], np.zeros(1 << 17), np.zeros(1), bytearray(8)
            print(f"C function, 8 bytes: {fastest(lambda: [echo(small, out=out) for _ in range(1000)].__len__(), arguments.runs):.2f} us", end="; ")
            print(f"1 MiB and 8 bytes back: {fastest(lambda: [lease['sum'](large, out=out) for _ in range(20)].__len__(), arguments.runs):.1f} us")
            print(f"{'':45}{'rfaas us':>10}{'pool us':>10}")
            for (name, run), (_, other) in zip(rows(ours), rows(theirs)):
                if not other:
                    print(f"{name:45}{fastest(run, arguments.runs):10.2f}")
                elif name.startswith("submit(f) of"):
                    print(f"{name:45}{run():10.2f}{other():10.2f}")
                else:
                    print(f"{name:45}{fastest(run, arguments.runs):10.2f}{fastest(other, max(2, arguments.runs // 5)):10.2f}", flush=True)
    finally:
        rfaas.default_session().close()
        cluster.stop()


if __name__ == "__main__":
    main()
