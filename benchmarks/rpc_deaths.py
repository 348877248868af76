"""How soon workers know that another one has been killed while they waited for it.

For each kind of wait and each size of the world, a world of workers is started again and again; when all of them wait
for the last one, it is killed (SIGKILL), and each of the others notes when its wait has ended. All of them read the
same clock. The table has the milliseconds from the kill to the end of a wait, over all waits of all rounds:

- callee: each worker waits for a call of a function there;
- owner: for a method of an object that lives there;
- holder: until the objects that only that worker held have been freed;
- middle: for a call there, which itself waits for a call of the first worker;
- end: for a call of the last but one, which waits for a call there;
- stream: for the next item of a generator there;
- large: while tensors of 16 MB go to and fro;
- backward: for a backward pass through a function there;
- shutdown: in ``rpc.shutdown()``, which waits for all workers; they have not talked to each other before;
- store: for a call of the first worker, which serves the job's store; it is the one that is killed.

    python benchmarks/rpc_deaths.py
    python benchmarks/rpc_deaths.py --rounds 50 --sizes 2 3 --waits callee shutdown
    python benchmarks/rpc_deaths.py --tcp
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from phalanx import rpc

FOREVER_S = 600.0
LARGE_BYTES = 16 << 20

kept: list[Any] = []


class Thing:
    """What the workers make on each other."""

    def stay(self) -> None:
        """Do not return."""
        time.sleep(FOREVER_S)


class Stays(torch.autograd.Function):
    """The identity, whose backward does not return."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Do not return."""
        time.sleep(FOREVER_S)
        return gradient


def stay() -> None:
    """Do not return."""
    time.sleep(FOREVER_S)


def echo(value: Any) -> Any:
    """There and back."""
    return value


def hold(thing: Any) -> None:
    """Keep a reference."""
    kept.append(thing)


def items() -> Iterator[int]:
    """One item, and no second one."""
    yield 0
    stay()


def apply_stays(x: torch.Tensor) -> torch.Tensor:
    """A function whose backward does not return."""
    stayed: torch.Tensor = Stays.apply(x)  # type: ignore[no-untyped-call]
    return stayed


# Each prepares a wait of a rank for a victim, in a world of a size, and returns what waits.
Wait = Callable[[], object]


def callee(rank: int, victim: int, size: int) -> Wait:
    """For a call."""
    return lambda: rpc.call(victim, stay)


def owner(rank: int, victim: int, size: int) -> Wait:
    """For a method."""
    thing = rpc.make(victim, Thing)
    return lambda: thing.stay()


def holder(rank: int, victim: int, size: int) -> Wait:
    """Until an object has been freed."""
    rpc.call(victim, hold, rpc.make(rank, Thing))
    gc.collect()

    def wait() -> None:
        while rpc.objects():
            time.sleep(0.001)

    return wait


def middle(rank: int, victim: int, size: int) -> Wait:
    """For a call that waits for another."""
    return lambda: rpc.call(victim, rpc.call, 0, stay)


def end(rank: int, victim: int, size: int) -> Wait:
    """For a call of a worker that waits for the victim."""
    between = (victim - 1) % size
    return lambda: rpc.call(victim, stay) if rank == between else rpc.call(between, rpc.call, victim, stay)


def stream(rank: int, victim: int, size: int) -> Wait:
    """For an item."""
    coming = rpc.call(victim, items)
    next(coming)
    return lambda: next(coming)


def large(rank: int, victim: int, size: int) -> Wait:
    """While tensors flow."""
    tensor = torch.ones(LARGE_BYTES // 4)

    def wait() -> None:
        while True:
            rpc.call(victim, echo, tensor)

    return wait


def backward(rank: int, victim: int, size: int) -> Wait:
    """For gradients."""

    def wait() -> None:
        with rpc.context() as context_id:
            rpc.backward(context_id, [rpc.call(victim, apply_stays, torch.ones(2, requires_grad=True)).sum()])

    return wait


def leaving(rank: int, victim: int, size: int) -> Wait:
    """For all others to leave."""
    return rpc.shutdown


WAITS: dict[str, Callable[[int, int, int], Wait]] = {
    "callee": callee,
    "owner": owner,
    "holder": holder,
    "middle": middle,
    "end": end,
    "stream": stream,
    "large": large,
    "backward": backward,
    "shutdown": leaving,
    "store": callee,
}


def worker(what: str, rank: int, victim: int, size: int, port: int, ready: int, noted: int, *, tcp: bool) -> None:
    """One process: join, wait, and note when the wait has ended."""
    if tcp:
        os.environ["PHALANX_HOST"] = f"host{rank}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    rpc.init(timeout_s=FOREVER_S)
    wait = None if rank == victim else WAITS[what](rank, victim, size)
    os.write(ready, b"x")
    if wait is None:
        stay()
        return
    why = ""
    try:
        wait()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    os.write(noted, json.dumps([rank, time.monotonic(), why]).encode() + b"\n")
    if what != "store":
        rpc.shutdown()


def fork(function: Callable[[], None]) -> int:
    """A child that runs a function."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def one_death(what: str, size: int, chance: random.Random, *, tcp: bool) -> list[float]:
    """The seconds until each worker of a new world knew of the death of one of them."""
    victim = 0 if what == "store" else size - 1
    port = free_port()
    ready, ready_end = os.pipe()
    noted, noted_end = os.pipe()

    def child(rank: int) -> Callable[[], None]:
        return lambda: worker(what, rank, victim, size, port, ready_end, noted_end, tcp=tcp)

    children = [fork(child(rank)) for rank in range(size)]
    os.close(ready_end)
    os.close(noted_end)
    try:
        came = 0
        while came < size:
            got = len(os.read(ready, size))
            if not got:
                sys.exit("a worker failed; its own output says why")
            came += got
        time.sleep(0.1 + 0.1 * chance.random())  # all of them wait now
        began = time.monotonic()
        os.kill(children[victim], signal.SIGKILL)
        with os.fdopen(noted, closefd=False) as file:
            notes = [json.loads(line) for line in file]
    finally:
        for pid in children:
            os.waitpid(pid, 0)
        os.close(ready)
        os.close(noted)
    for _, at, why in notes:
        if at < began:
            sys.exit(f"a wait for {what} ended before the death: {why}")
    if len(notes) != size - 1:
        sys.exit(f"only {len(notes)} of {size - 1} waits have ended")
    return [at - began for _, at, _ in notes]


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Parse the command line, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 8])
    parser.add_argument("--waits", choices=WAITS, nargs="+", default=list(WAITS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tcp", action="store_true", help="over TCP, as between hosts")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every sample")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    samples: dict[str, dict[int, list[float]]] = {what: {size: [] for size in options.sizes} for what in options.waits}
    for number in range(options.rounds):
        for what, by_size in samples.items():
            for size, times in by_size.items():
                times += one_death(what, size, chance, tcp=options.tcp)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    if options.json:
        print(json.dumps(samples))
        return
    print(f"{'ms until known':<16}{'workers':>8}{'waits':>8}{'median':>10}{'99 %':>10}{'longest':>10}")
    for what, by_size in samples.items():
        for size, times in by_size.items():
            row = "".join(f"{1e3 * quantile(times, share):10.1f}" for share in (0.5, 0.99, 1.0))
            print(f"{what:<16}{size:>8}{len(times):>8}{row}")


if __name__ == "__main__":
    main()
