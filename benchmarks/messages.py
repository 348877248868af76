"""Messages there and back, in a world that spans hosts: inside a host beside a group of that host alone, and between
hosts beside Gloo, flat. Both of a pair are measured in turn.

Start three ranks, the last one on another host, with any launcher; for instance by hand, on the hosts h0 and h1:

    on h0: MASTER_ADDR=h0 MASTER_PORT=29500 WORLD_SIZE=3 RANK=0 python benchmarks/messages.py   (and RANK=1)
    on h1: MASTER_ADDR=h0 MASTER_PORT=29500 WORLD_SIZE=3 RANK=2 python benchmarks/messages.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import phalanx

SIZES = (4, 1024, 64 * 1024, 256 * 1024, 1 << 20, 16 << 20)


def one_way_us(group: dist.ProcessGroup, pair: tuple[int, int], tensor: torch.Tensor, calls: int) -> float:
    """Half of the time of a message there and back, as the first rank of a pair sees it."""
    first, second = pair
    began = time.perf_counter()
    for _ in range(calls):
        if dist.get_rank() == first:
            dist.send(tensor, second, group=group)
            dist.recv(tensor, second, group=group)
        else:
            dist.recv(tensor, first, group=group)
            dist.send(tensor, first, group=group)
    return (time.perf_counter() - began) / calls / 2 * 1e6


def compare(
    name: str, other: str, pair: tuple[int, int], groups: list[dist.ProcessGroup | None], options: argparse.Namespace
) -> None:
    """Print a line for each size: the 2 % quantile and the median of both groups, and their ratio."""
    if dist.get_rank() not in pair:
        return
    rounds = options.rounds
    for nbytes in options.sizes:
        tensor = torch.ones(nbytes // 4)
        repeats = max(2, min(options.calls, (32 << 20) // nbytes))
        took: list[list[float]] = [[], []]
        for turn in range(rounds + 1):
            for samples, group in zip(took, groups, strict=True):
                assert group is not None
                sample = one_way_us(group, pair, tensor, repeats)
                if turn:
                    samples.append(sample)
        if dist.get_rank() == pair[0]:
            least = [sorted(samples)[round(0.02 * rounds)] for samples in took]
            middle = [statistics.median(samples) for samples in took]
            print(
                f"{nbytes:9} B  {name} {least[0]:9.1f} µs (median {middle[0]:9.1f})  {other} {least[1]:9.1f} µs "
                f"(median {middle[1]:9.1f})  ratio {least[0] / least[1]:.2f} ({middle[0] / middle[1]:.2f})",
                flush=True,
            )


def main() -> None:
    """Print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    phalanx.init()
    world, inside = dist.group.WORLD, dist.new_group([0, 1])
    flat = dist.new_group([0, 1, 2], backend="gloo")
    compare("world", "one host", (0, 1), [world, inside], options)
    dist.barrier()
    compare("world", "Gloo", (0, 2), [world, flat], options)
    dist.barrier()
    phalanx.close()


if __name__ == "__main__":
    main()
