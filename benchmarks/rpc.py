"""Calls between two processes of one host, over Phalanx and over torch.distributed.rpc, in turn.

Both run in the same two processes, and each measurement alternates between them, so whatever else the machine does
slows both. The table has the medians over the rounds, and how many times quicker Phalanx is:

- an empty call: the time until it has returned, at the median of the calls of a round, and at the 2 % quantile;
- many calls under way at once: calls per second;
- 64 MB there and back;
- an empty call while another thread sends 64 MB all the time: the 99 % quantile;
- 1 MB to 8 workers, each of which reads one number of it: until all have answered, and how many times longer that takes
  than one such call. Phalanx's is ``rpc.each``, torch's are 8 times ``rpc_async``. Nine processes take part in this.

Run it on an otherwise idle machine:

    python benchmarks/rpc.py
    python benchmarks/rpc.py --rounds 9 --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

LARGE_BYTES = 64 << 20
CALLS = 1000
AT_ONCE = 1000
LARGE_CALLS = 5
MIXED_S = 1.0
MANY = 8
MANY_BYTES = 1 << 20
MANY_CALLS = 100


def nothing() -> None:
    """The empty call."""


def echo(value: Any) -> Any:
    """There and back."""
    return value


def last(tensor: Any) -> float:
    """One number of a tensor."""
    return float(tensor[-1])


class Way:
    """One of the two libraries: a call that waits, one that returns a future, and one to many workers."""

    def __init__(self, call: Callable[..., Any], start: Callable[..., Any], each: Callable[..., list[Any]]) -> None:
        self.call, self.start, self.each = call, start, each


def timed(action: Callable[[], Any]) -> float:
    """The seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def empty(way: Way) -> dict[str, float]:
    """Empty calls, one after the other."""
    times = [timed(lambda: way.call(nothing)) for _ in range(CALLS)]
    return {"empty call, median (us)": 1e6 * quantile(times, 0.5), "empty call, 2 % (us)": 1e6 * quantile(times, 0.02)}


def many(way: Way) -> dict[str, float]:
    """Empty calls, all under way at the same time."""

    def go() -> None:
        for future in [way.start(nothing) for _ in range(AT_ONCE)]:
            future.wait()

    return {"many under way (us a call)": 1e6 * timed(go) / AT_ONCE}


def large(way: Way) -> dict[str, float]:
    """64 MB there and back."""
    import torch

    tensor = torch.ones(LARGE_BYTES // 4)
    way.call(echo, tensor)
    times = [timed(lambda: way.call(echo, tensor)) for _ in range(LARGE_CALLS)]
    return {"64 MB there and back (ms)": 1e3 * statistics.median(times)}


def mixed(way: Way) -> dict[str, float]:
    """Empty calls while 64 MB go to and fro."""
    import torch

    tensor, over = torch.ones(LARGE_BYTES // 4), threading.Event()

    def send() -> None:
        while not over.is_set():
            way.call(echo, tensor)

    sender = threading.Thread(target=send)
    sender.start()
    time.sleep(0.1)
    times, until = [], time.perf_counter() + MIXED_S
    while time.perf_counter() < until:
        times.append(timed(lambda: way.call(nothing)))
        time.sleep(0.001)
    over.set()
    sender.join()
    return {"empty call beside 64 MB, 99 % (ms)": 1e3 * quantile(times, 0.99)}


def to_many(way: Way) -> dict[str, float]:
    """1 MB to one worker, and to each of many."""
    import torch

    tensor = torch.ones(MANY_BYTES // 4)

    def all_of_them() -> None:
        for future in way.each(last, tensor):
            future.wait()

    pairs = [(timed(lambda: way.call(last, tensor)), timed(all_of_them)) for _ in range(MANY_CALLS)]
    one, each = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {f"1 MB to {MANY} workers (us)": 1e6 * each, f"1 MB to {MANY} workers / to one": each / one}


def worker(rank: int, size: int, folder: str, rounds: int) -> None:
    """One of the processes; the first measures and prints."""
    import torch
    import torch.distributed as dist
    import torch.distributed.rpc as torch_rpc

    from phalanx import rpc

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=size)
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", rpc_timeout=600)
    torch_rpc.init_rpc(f"torch{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    rpc.init(timeout_s=600)
    if rank == 0:
        ways = {
            "phalanx": Way(
                lambda function, *args: rpc.call("worker1", function, *args),
                lambda function, *args: rpc.start("worker1", function, *args),
                lambda function, *args: rpc.each(range(1, size), function, *args),
            ),
            "torch": Way(
                lambda function, *args: torch_rpc.rpc_sync("torch1", function, args=args),
                lambda function, *args: torch_rpc.rpc_async("torch1", function, args=args),
                lambda function, *args: [
                    torch_rpc.rpc_async(f"torch{to}", function, args=args) for to in range(1, size)
                ],
            ),
        }
        samples: dict[str, dict[str, list[float]]] = {}
        for number in range(rounds + 1):
            for measure in (empty, many, large, mixed) if size == 2 else (to_many,):
                for name, way in ways.items():
                    for what, value in measure(way).items():
                        if number:  # the first round warms up
                            samples.setdefault(what, {}).setdefault(name, []).append(value)
            print(f"{size} processes, round {number} of {rounds}", file=sys.stderr)
        print(json.dumps(samples), flush=True)
    dist.monitored_barrier(timeout=timedelta(hours=1))
    rpc.shutdown()
    torch_rpc.shutdown()
    dist.destroy_process_group()


def measured(size: int, rounds: int) -> Any:
    """What the first of ``size`` processes has measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--folder", folder, "--rounds", str(rounds)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
        command += ["--size", str(size), "--rank"]
        others = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(1, size)]
        first = subprocess.run([*command, "0"], env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if [other.wait() for other in others] != [0] * len(others) or first.returncode:
            sys.exit("a worker failed; its own output says why")
    return json.loads(first.stdout.splitlines()[-1])


def main() -> None:
    """Parse the command line, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object with every sample")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        worker(options.rank, options.size, options.folder, options.rounds)
        return
    samples = {**measured(2, options.rounds), **measured(1 + MANY, options.rounds)}
    if options.json:
        print(json.dumps(samples))
        return
    print(f"{'':<38}{'phalanx':>10}{'torch':>10}{'torch / phalanx':>18}")
    for what, by_way in samples.items():
        ours, theirs = (statistics.median(by_way[name]) for name in ("phalanx", "torch"))
        print(f"{what:<38}{ours:10.1f}{theirs:10.1f}{theirs / ours:17.1f}x")


if __name__ == "__main__":
    main()
