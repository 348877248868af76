"""The time that torch and Phalanx add to MPI: all_reduce through ``torch.distributed`` beside the bare call of mpi4py.

    mpiexec -n 2 python benchmarks/mpi_overhead.py
    PHALANX_MPI_CHECK=0 mpiexec -n 2 python benchmarks/mpi_overhead.py   (without comparing the calls)

Both reduce the same tensor, in interleaved rounds. A round's figure is the mean time of a call on the slowest rank. The
table shows the lower quartile over the rounds, because on a machine with other work the median measures that work;
``--median`` shows the median. ``async_op`` is a call with ``async_op=True`` and ``wait()``, beside MPI's Iallreduce and
``Wait``.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

SIZES = (4, 256, 4096, 16384, 65536, 1 << 20, 16 << 20)
ROUND_S = 0.01


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--dtype", default="float32", help="float16 and bfloat16 have no bare call beside them")
    parser.add_argument("--median", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure and print, on rank 0."""
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("mpi")
    mpi = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD.Dup()
    dtype = getattr(torch, options.dtype)
    has_bare = dtype not in (torch.float16, torch.bfloat16)
    if world.rank == 0:
        print(f"{mpi.Get_library_version().splitlines()[0].strip()}, {world.size} ranks, {options.dtype}")
        print("µs per call   bytes    mpi4py     torch  added  ratio | Iallreduce  async_op  added  ratio")
    for nbytes in options.sizes:
        tensor = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)

        def through_torch(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor)

        def asynchronous(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor, async_op=True).wait()

        calls: dict[str, Callable[[], None]] = {"torch": through_torch, "async_op": asynchronous}
        if has_bare:
            spec = [tensor.numpy(), getattr(mpi, "FLOAT" if dtype == torch.float32 else "DOUBLE")]
            calls["mpi4py"] = lambda spec=spec: world.Allreduce(mpi.IN_PLACE, spec)  # type: ignore[misc]
            calls["Iallreduce"] = lambda spec=spec: world.Iallreduce(mpi.IN_PLACE, spec).Wait()  # type: ignore[misc]
        took = measure(calls, options.rounds, 1 if options.median else 0)
        if world.rank == 0:
            print(f"{nbytes:19}" + pair(took, "mpi4py", "torch") + " |" + pair(took, "Iallreduce", "async_op"))
    world.Free()
    dist.destroy_process_group()


def measure(calls: dict[str, Callable[[], None]], rounds: int, quantile: int) -> dict[str, float]:
    """The time of each call in µs; the calls take turns in every round."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    repeats = dict.fromkeys(calls, 1)
    for turn in range(-2, rounds):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            took = torch.tensor((time.perf_counter() - began) / repeats[name], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn < 0:  # these rounds warm up, and find how many calls fit into a round
                repeats[name] = max(5, min(2000, int(ROUND_S / took.item())))
            else:
                samples[name].append(took.item() * 1e6)
    return {name: statistics.quantiles(values, n=4)[quantile] for name, values in samples.items()}


def pair(took: dict[str, float], bare: str, ours: str) -> str:
    """Two columns of the table: a bare call of MPI, and the same through torch."""
    if bare not in took:
        return f"{'':10} {took[ours]:9.1f} {'':13}"
    added = took[ours] - took[bare]
    return f"{took[bare]:10.1f} {took[ours]:9.1f} {added:6.1f} {took[ours] / took[bare]:6.2f}"


if __name__ == "__main__":
    main()
