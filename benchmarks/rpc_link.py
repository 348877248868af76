"""Messages between two processes of one host: Phalanx's link over shared memory beside torch.distributed.rpc.

    python benchmarks/rpc_link.py

Three figures, each measured in turns on both, in the same two processes: an empty message and its answer; 64 MB there
and back; and an empty one while another thread sends 64 MB to and fro. The link is the layer below calls: what it
carries is not pickled.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed.rpc as torch_rpc
from torch.multiprocessing.spawn import spawn

from phalanx.rpc.links.contract import Kind, Link, Message
from phalanx.rpc.links.shared import SharedHub, SharedLink

ROUNDS = 7
NBYTES = 64 << 20
NAMES = ("phalanx", "torch")


class Caller:
    """A receiver that returns to each request what it brought, and keeps the answers for who waits."""

    def __init__(self) -> None:
        self._answers: dict[int, Message] = {}
        self._numbers = itertools.count(1)
        self.over = threading.Event()

    def deliver(self, link: Link, message: Message, *, may_block: bool) -> None:
        """See ``Receiver``."""
        if message.kind is Kind.REQUEST:
            link.send(Message(Kind.ANSWER, message.call, "", message.head, message.buffers), 60.0)
        else:
            self._answers[message.call] = message

    def ended(self, link: Link, why: str, *, left: bool = False) -> None:
        """See ``Receiver``."""
        self.over.set()

    def call(self, link: SharedLink, *buffers: memoryview) -> None:
        """Send, and wait for the answer."""
        number = next(self._numbers)
        link.send(Message(Kind.REQUEST, number, "echo", b"", buffers), 60.0)
        while number not in self._answers:
            link.wait(lambda: number in self._answers, number, 60.0)
        del self._answers[number]


def nothing() -> None:
    """What torch's empty call runs."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """What torch's large call runs."""
    return tensor


def sampled(call: Callable[[], None], count: int) -> list[float]:
    """How long each of so many calls took, in seconds."""
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    return samples


@contextmanager
def repeated(call: Callable[[], None]) -> Iterator[None]:
    """Make calls on another thread meanwhile."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            call()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def quantile(samples: list[float], share: float) -> float:
    """The sample that so large a share of all does not exceed."""
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


def report(what: str, samples: dict[str, list[float]], unit: str, per_s: float) -> None:
    """Print one figure."""
    print(f"\n{what}, {unit}")
    for name in NAMES:
        values = [quantile(samples[name], share) * per_s for share in (0.02, 0.5, 0.99)]
        print(f"  {name:<8} 2 %: {values[0]:9.1f}   median: {values[1]:9.1f}   99 %: {values[2]:9.1f}")
    ratio = quantile(samples["torch"], 0.5) / quantile(samples["phalanx"], 0.5)
    print(f"  torch's median is {ratio:.1f} times Phalanx's", flush=True)


def measure(link: SharedLink, caller: Caller) -> None:
    """The three figures."""
    tensor = torch.ones(NBYTES // 4)
    memory = memoryview(bytearray(b"x") * NBYTES)

    def torch_large() -> None:
        torch_rpc.rpc_sync("w1", echo, args=(tensor,))

    small = {"phalanx": lambda: caller.call(link), "torch": lambda: torch_rpc.rpc_sync("w1", nothing)}
    large = {"phalanx": lambda: caller.call(link, memory), "torch": torch_large}
    for calls, count, what, unit, per_s in (
        (small, 1000, "An empty message and its answer", "us", 1e6),
        (large, 5, "64 MB there and back", "ms", 1e3),
    ):
        samples: dict[str, list[float]] = {name: [] for name in NAMES}
        for _, name in itertools.product(range(ROUNDS), NAMES):
            sampled(calls[name], max(2, count // 10))  # what the other left in the caches
            samples[name] += sampled(calls[name], count)
        report(what, samples, unit, per_s)
    samples = {name: [] for name in NAMES}
    for _, name in itertools.product(range(ROUNDS), NAMES):
        with repeated(large[name]):
            samples[name] += sampled(small[name], 50 if name == "torch" else 2000)
    report("An empty message and its answer while 64 MB go to and fro", samples, "ms", 1e3)


def run(rank: int, address: str, ends: tuple[socket.socket, socket.socket]) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=address)
    torch_rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    caller = Caller()
    hub = SharedHub(caller)
    if rank == 0:
        offer = hub.offer()
        ends[0].sendall(offer)
        ends[0].recv(1)
        link = hub.confirm(offer)
        link.begin()
        measure(link, caller)
        link.close()
    else:
        accepted = hub.accept(ends[1].recv(65536))
        if accepted is None:
            raise SystemExit("the two processes share no memory")
        accepted.begin()
        ends[1].sendall(b"1")
        caller.over.wait()
    torch_rpc.shutdown()
    hub.close()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(run, (f"tcp://127.0.0.1:{port}", socket.socketpair()), nprocs=2)  # type: ignore[no-untyped-call]
