#!/usr/bin/env python3
"""Estimates pi on MPI ranks and leased cores, in Python. Each rank computes blocks of random points from the end of its list, while its
workers compute them from the beginning. The count must equal that of the ranks alone.

    mpirun -n 2 examples/mpi/points/points.py --blocks 200
"""
import argparse

import numpy as np
import rfaas
from mpi4py import MPI

POINTS = 200_000  # in a block


def hits(seed):
    x, y = np.random.default_rng(seed).random((2, POINTS))
    return np.count_nonzero(x * x + y * y < 1)


def with_workers(executor, seeds):
    """Returns the hits of all blocks. The rank takes a block back from its workers by cancelling the call, if no worker has begun it."""
    futures, total = [executor.submit(hits, seed) for seed in seeds], 0
    for seed, future in zip(reversed(seeds), reversed(futures)):
        if not future.cancel():
            break
        total += hits(seed)
    return total + sum(future.result() for future in futures if not future.cancelled())


def timed(comm, count):
    """Returns the sum of all ranks' counts, and the time of the slowest rank."""
    comm.Barrier()
    begin = MPI.Wtime()
    total = comm.allreduce(count())
    return total, comm.allreduce(MPI.Wtime() - begin, op=MPI.MAX)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100, help="number of blocks of %d points, for all ranks together" % POINTS)
    parser.add_argument("--workers", type=int, default=1, help="workers of each rank")
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD
    seeds = range(comm.rank, arguments.blocks, comm.size)
    alone, alone_time = timed(comm, lambda: sum(map(hits, seeds)))
    with rfaas.Executor(arguments.workers, wait=10, comm=comm) as executor:
        with_workers(executor, range(2 * arguments.workers))  # the workers import numpy before the time is taken
        helped, helped_time = timed(comm, lambda: with_workers(executor, seeds))
    if comm.rank == 0:
        print(f"pi is about {4 * helped / (arguments.blocks * POINTS):.4f}; {comm.size} ranks alone {alone_time:.2f} s, with {arguments.workers} workers each "
              f"{helped_time:.2f} s; speed-up {alone_time / helped_time:.2f}")
    if helped != alone:
        raise SystemExit(f"rank {comm.rank}: {helped} hits with workers, and {alone} without")


if __name__ == "__main__":
    main()
