"""Time of a call from Python beside the same call from C, in one process and one lease. Both wait hot. The last rows call an echo function that is written in
Python too.

A pair is a batch of calls from C and one from Python, in alternating order. Many pairs are slow because something else runs on the
same processors, so the table shows medians of the fastest twentieth: of the times, of the differences and of the ratios.

Usage, after make build: python3 benchmarks/python/calls.py
"""
import argparse
import asyncio
import ctypes
import itertools
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "lib/python"), str(ROOT / "client/python/tests")]

import numpy as np
import rfaas
from cluster import ECHO, Cluster


def python_echo(arguments, result):
    result[:] = arguments


def rows(f, *statements):
    """A statement, its function and argument, and a function that executes the statement so often and returns its time."""
    x8, x64, b = np.zeros(1), np.zeros(8192), b"12345678"
    for x, statement in *((x8, s) for s in statements), *((x64, s) for s in statements if s in ("f(x, out=y)", "f(x)")):
        names = {"f": f, "x": x, "y": np.empty_like(x), "b": b, "now": time.perf_counter_ns, "repeat": itertools.repeat}
        exec(f"def run(n):\n begin = now()\n for _ in repeat(None, n): {statement}\n return (now() - begin) / n", names)
        yield statement, f, x, names["run"]


def awaits(lease):
    """The same for tasks of asyncio. A function that sleeps for 100 us ends after the poll for the reply, so the descriptor of the lease announces it."""
    events = asyncio.new_event_loop()
    for function, x in ("echo", np.zeros(1)), ("sleep_ns", np.array([100_000], np.uint64)):
        f = lease[function]

        async def calls(n, f=f, x=x):
            begin = time.perf_counter_ns()
            for _ in range(n):
                await f.submit(x)
            return (time.perf_counter_ns() - begin) / n

        yield f"await {function}.submit(x)", f, x, lambda n, calls=calls: events.run_until_complete(calls(n))


def measure(loop, f, x, from_python, seconds, calls):
    out, times, end = np.empty_like(x), [], time.monotonic() + seconds

    def from_c():
        t = loop.loop_run(ctypes.c_void_p(f.lease.handle), ctypes.c_uint32(f.index), ctypes.c_void_p(x.ctypes.data),
                          ctypes.c_void_p(out.ctypes.data), ctypes.c_size_t(x.nbytes), calls)
        if t < 0:
            raise SystemExit(f"a call from C failed with status {t:.0f}")
        return t

    while len(times) < 200 or time.monotonic() < end:
        if len(times) % 2:
            c, p = from_c(), from_python(calls)
        else:
            p, c = from_python(calls), from_c()
        times.append((c, p))
    times.sort(key=sum)
    del times[len(times) // 20:]
    median = statistics.median
    return median(c for c, _ in times), median(p for _, p in times), median(p - c for c, p in times), median(p / c for c, p in times), len(times)


SPIN = """
#include <stdint.h>
#include <time.h>

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

uint32_t spin(void *args, uint32_t size, void *res) {
    uint64_t *ns = args, *ended = res, t = now();
    for (uint32_t i = 0; i < size / 8; i++) {
        for (uint64_t end = t + ns[i]; t < end;)
            t = now();
        ended[i] = t;
    }
    return size;
}
"""


def mapped(lease, chunk, items=20000, runs=20):
    """Returns the shortest time of an item of a map over a C function that computes for 1 us for each item, with one worker, in us. chunk: items of a
    call; 0: the default."""
    x, best = np.full(items, 1000, np.uint64), float("inf")
    spin = lease["spin"]
    for _ in range(runs):
        begin = time.perf_counter()
        spin.map(x, chunk=chunk)
        best = min(best, (time.perf_counter() - begin) / items)
    return best * 1e6


def table(loop, rows, arguments):
    for what, f, x, run in rows:
        c, p, more, ratio, pairs = measure(loop, f, x, run, arguments.seconds, arguments.calls // (10 if what.startswith("await") else 1))
        print(f"{what:30} {x.nbytes:6} {c / 1e3:8.2f} {p / 1e3:11.2f} {more / 1e3:9.2f} {ratio:6.2f} {pairs:6}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3, help="for each row")
    parser.add_argument("--calls", type=int, default=100, help="of a batch")
    parser.add_argument("--provider", default="shm")
    arguments = parser.parse_args()
    cluster = Cluster(arguments.provider, cores=1)
    try:
        loop = ctypes.CDLL(ROOT / "build/bench/python-loop.so")
        loop.loop_run.restype = ctypes.c_double
        with rfaas.lease(ECHO, wait_mode=rfaas.WaitMode.HOT) as lease:
            print(f"{'call':30} {'bytes':>6} {'C, us':>8} {'Python, us':>11} {'more, us':>9} {'ratio':>6} {'pairs':>6}")
            table(loop, rows(lease["echo"], "f(x, out=y)", "f(x)", "f(b)", "f.submit(x, out=y).result()"), arguments)
            table(loop, awaits(lease), arguments)
        with rfaas.lease(rfaas.python(python_echo), wait_mode=rfaas.WaitMode.HOT) as lease:
            print("calls of a Python function:")
            table(loop, rows(lease["python_echo"], "f(x, out=y)", "f(x)"), arguments)
        with rfaas.lease(rfaas.compile(SPIN), wait_mode=rfaas.WaitMode.HOT) as lease:
            print(f"an item of spin.map(x), 1 us each: {mapped(lease, 0):.2f} us; with chunk=1: {mapped(lease, 1):.2f} us")
    finally:
        rfaas.default_session().close()
        cluster.stop()


if __name__ == "__main__":
    main()
