"""The time of all_reduce between hosts over each engine that there is: Gloo, MPI where it started the job, UCX.

Started on two hosts or more by any launcher: ``mpiexec -hosts h0,h1 -ppn 2 -n 4 python benchmarks/engines.py``. The
engines take turns in every round, so that what else the machines do falls on all of them alike. Rank 0 prints, for each
size, the median and the least of the rounds, in milliseconds.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

import phalanx
from phalanx.transports.gloo.engine import GlooOnDemand, lazy_gloo
from phalanx.transports.hosts.communicator import HostsCommunicator
from phalanx.transports.hosts.gloo_lane import UNLIMITED, GlooEngine
from phalanx.transports.hosts.islands import join_islands
from phalanx.transports.hosts.lane import Engine
from phalanx.transports.hosts.mpi_lane import MpiEngine
from phalanx.transports.hosts.ucx_lane import UcxEngine
from phalanx.transports.hosts.ucx_library import UcxFailed, open_library
from phalanx.transports.mpi.runtime import running

SIZES = [4, 1024, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
TIMEOUT = timedelta(seconds=120)
ROUND_S = 0.05


def engines(store: Store, rank: int, size: int) -> dict[str, Engine]:
    """Those that this job can use, made on all ranks in one order."""
    found: dict[str, Engine] = {"Gloo": GlooEngine(_gloo(PrefixStore("gloo", store), rank, size), TIMEOUT)}
    runtime = running()
    if runtime is not None:
        found["MPI"] = MpiEngine(runtime, range(size), "benchmark", TIMEOUT)
    try:
        open_library()
        found["UCX"] = UcxEngine(PrefixStore("ucx", store), rank, TIMEOUT)
    except UcxFailed as error:
        print(error, file=sys.stderr)
    return found


def _gloo(store: Store, rank: int, size: int) -> GlooOnDemand:
    return GlooOnDemand(lambda timeout: lazy_gloo(store, rank, size, timeout, one_host=False), TIMEOUT)


def main() -> None:
    """Run on every rank."""
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if sys.argv[1:] else 7
    world = phalanx.init(timeout_s=120)
    rank, size = world.rank, world.world_size
    store = PrefixStore("benchmark", dist.distributed_c10d._get_default_store())
    groups: dict[str, HostsCommunicator] = {}
    for name, engine in engines(store, rank, size).items():
        own = PrefixStore(name, store)
        layout, local, _ = join_islands(PrefixStore("islands", own), rank, size, TIMEOUT)
        messages = _gloo(PrefixStore("messages", own), rank, size)
        messages.get()
        way = GlooEngine(messages, UNLIMITED, awaits_what_came=True)
        groups[name] = HostsCommunicator(layout, rank, local, engine, way, PrefixStore("broken", own), TIMEOUT)
    if rank == 0:
        print(f"{'bytes':>9}", *(f"{name + ' median':>12} {name + ' least':>11}" for name in groups), flush=True)
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4)
        times: dict[str, list[float]] = {name: [] for name in groups}
        calls = 1
        for turn in range(rounds + 2):
            began_round = time.perf_counter()
            for name, group in groups.items():
                began = time.perf_counter()
                for _ in range(calls):
                    group.all_reduce(tensor, dist.ReduceOp.MAX.value)
                if turn > 1:  # the first one connects, and the second one says how many calls a round has
                    times[name].append((time.perf_counter() - began) / calls * 1e3)
            if turn == 1:
                took = torch.tensor([time.perf_counter() - began_round])
                world.all_reduce(took, op=dist.ReduceOp.MAX)
                calls = max(1, min(50, int(ROUND_S * len(groups) / took.item())))
        if rank == 0:
            found = (sorted(each) for each in times.values())
            print(f"{nbytes:9}", *(f"{each[len(each) // 2]:12.3f} {each[0]:11.3f}" for each in found), flush=True)
    for group in groups.values():
        group.barrier()
        group.close()
    phalanx.close()


if __name__ == "__main__":
    main()
