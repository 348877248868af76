"""The time of torch's way to a backend that is written in Python and does nothing.

A ``ProcessGroup`` subclass is called by torch directly; a ``Backend`` subclass (torch >= 2.14) through the dispatcher,
in C++, with the group's hooks: by default torch's flight recorder. One process, a world of one, 4 bytes, all in turn.

    python benchmarks/python_backends.py
    TORCH_FR_BUFFER_SIZE=0 python benchmarks/python_backends.py    # without the flight recorder
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, HashStore

CALLS, ROUNDS = 2000, 60


def allreduce(self: Any, tensors: list[torch.Tensor], opts: Any) -> None:
    """Read the two options that every backend must read, and do nothing."""
    _ = opts.reduceOp, opts.asyncOp


def main() -> None:
    """Print the 2 % quantile and the median of the rounds, for each way."""
    ways: dict[str, Any] = {"group": dist.ProcessGroup, "backend": Backend}
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    groups: dict[str, Any] = {}
    for name, base in ways.items():
        methods = {"allreduce": allreduce, "getBackendName": lambda self: "nothing"}
        made = type(name, (base,), methods)

        def create(options: Any, _: Any, made: Any = made) -> Any:
            return made(options.group_rank, options.group_size)

        dist.Backend.register_backend(f"nothing-{name}", create, extended_api=True, devices=["cpu"])
        groups[name] = dist.new_group([0], backend=f"nothing-{name}")
    tensor = torch.ones(1)
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, group in groups.items():
            began = time.perf_counter()
            for _ in range(CALLS):
                dist.all_reduce(tensor, group=group)
            took[name].append((time.perf_counter() - began) / CALLS * 1e6)
    for name, samples in took.items():
        quantile = sorted(samples)[round(0.02 * ROUNDS)]
        print(f"{name:8} {quantile:5.2f} µs  median {statistics.median(samples):5.2f} µs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
