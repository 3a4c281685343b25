"""Measures how soon workers of rfaas.Executor have a first result of numpy: with a cold interpreter, with a runtime that has imported numpy, and in a
worker that has executed a call before. Also counts the files that the first use of numpy opens, and the private memory of each worker. The times are medians of several runs.

The private memory is the sum of Private_Clean and Private_Dirty in /proc/self/smaps_rollup, after the first product. A function in the worker reads it, which itself
adds 0.2 MB. Of several workers, the table has the largest figure. Shared memory, such as the channel, does not count, nor do pages that the worker shares with the runtime's
process because it has not written to them.

Usage, after make build: python3 benchmarks/python/starts.py
"""
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "lib/python"), str(ROOT / "client/python/tests")]

import rfaas
from cluster import Cluster

RUNS = 9
RUNTIMES = {"numpy": {"python": "/usr/bin/python3", "preload": ["numpy", "cloudpickle"]}}


def product():
    import numpy

    return float((numpy.eye(3) @ numpy.ones(3)).sum())


def counted():
    """Returns the number of files that Python opens for the first product."""
    import sys

    count = 0

    def hook(event, arguments):
        nonlocal count
        count += event == "open"

    sys.addaudithook(hook)
    product()
    return count


def private():
    """Returns the private memory of the worker's process in MB."""
    product()
    with open("/proc/self/smaps_rollup") as f:
        return sum(int(line.split()[1]) for line in f if line.startswith("Private_")) / 1024


def first_result(workers, **options):
    """Returns the milliseconds until each of new workers has made a product, and what later calls take."""
    begin = time.perf_counter()
    with rfaas.Executor(workers, **options) as executor:
        for future in [executor.submit(product) for _ in range(workers)]:
            future.result()
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        executor.submit(product).result()
        return first * 1e3, (time.perf_counter() - begin) * 1e3


def main():
    cluster = Cluster(cores=16, settings=("--runtimes", json.dumps(RUNTIMES), "--cache-time", "0", "--pool", "0"))
    try:
        print("| workers | first result, ms | of each, ms | later calls, ms | opens | private MB |\n|---|---|---|---|---|---|")
        for workers in 1, 16:
            for name, options in ("cold", {}), ("preloaded", {"runtime": "numpy"}):
                times = [first_result(workers, **options) for _ in range(RUNS if workers == 1 else 3)]
                first, later = (statistics.median(t) for t in zip(*times))
                with rfaas.Executor(workers, **options) as executor:
                    n = executor.submit(counted).result()
                with rfaas.Executor(workers, **options) as executor:
                    mb = max(future.result() for future in [executor.submit(private) for _ in range(workers)])
                print(f"| {workers}, {name} | {first:.1f} | {first / workers:.1f} | {later:.2f} | {n} | {mb:.1f} |", flush=True)
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
