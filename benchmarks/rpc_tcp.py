"""Calls over TCP beside a bare socket of Python, between two ranks, in turn.

    phalanx run -n 2 benchmarks/rpc_tcp.py                    (over loopback)
    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=h1 MASTER_PORT=29500 python benchmarks/rpc_tcp.py
                                                              (on h1; on h2 with RANK=1)

Both go between the same two processes, and each round measures one after the other: an echo of 100 bytes with
``sendall`` and ``recv``, an empty call; then 64 MB to the other side, with ``sendall`` into one ``bytearray``,
and as the argument of a call.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from phalanx import rpc
from phalanx.rpc import session

CALLS = 1000
LARGE_BYTES = 64 << 20
LARGE_CALLS = 4
SMALL_BYTES = 100


def nothing() -> None:
    """The empty call."""


def take(tensor: torch.Tensor) -> int:
    """What a large call runs."""
    return tensor.numel()


def serve_bare() -> tuple[str, int]:
    """Listen for one bare connection, echo small messages and take large ones; where it listens."""
    address = session.worker().me.address
    listener = socket.create_server((address, 0))

    def run() -> None:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory = memoryview(bytearray(LARGE_BYTES))
        while data := sock.recv(SMALL_BYTES):
            if data[:1] == b"s":
                sock.sendall(data)
            else:
                got = len(data)
                while got < LARGE_BYTES:
                    got += sock.recv_into(memory[got:])
                sock.sendall(b"x")
        listener.close()

    threading.Thread(target=run, daemon=True).start()
    return str(address), int(listener.getsockname()[1])


def sampled(action: Callable[[], object], count: int) -> list[float]:
    """The seconds that each of so many actions took."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return times


def measure(rounds: int) -> None:
    """All figures, on the first rank."""
    bare = socket.create_connection(rpc.call(1, serve_bare))
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    small, large, tensor = b"s" * SMALL_BYTES, bytes(LARGE_BYTES), torch.ones(LARGE_BYTES // 4)

    def bare_echo() -> None:
        bare.sendall(small)
        bare.recv(SMALL_BYTES)

    def bare_large() -> None:
        bare.sendall(large)
        bare.recv(1)

    ways: dict[str, tuple[Callable[[], object], int]] = {
        "bare echo": (bare_echo, CALLS),
        "empty call": (lambda: rpc.call(1, nothing), CALLS),
        "bare 64 MB": (bare_large, LARGE_CALLS),
        "64 MB in a call": (lambda: rpc.call(1, take, tensor), LARGE_CALLS),
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (action, count) in ways.items():
            sampled(action, max(1, count // 10))
            samples[name] += sampled(action, count)
    for name, times in samples.items():
        times.sort()
        low, median = times[len(times) // 50], statistics.median(times)
        if name in ("bare echo", "empty call"):
            beside = statistics.median(samples["bare echo"])
            print(
                f"{name:<18} 2 %: {1e6 * low:8.1f} us   median: {1e6 * median:8.1f} us   {median / beside:5.2f} x bare"
            )
        else:
            beside = statistics.median(samples["bare 64 MB"])
            print(f"{name:<18} median: {LARGE_BYTES / median / 1e6:8.1f} MB/s   {beside / median:5.2f} x bare")


def main() -> None:
    """Join, measure on rank 0, leave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PHALANX_HOST"] = f"{socket.gethostname()}-{os.environ.get('RANK', '')}"  # they share no memory then
    dist.init_process_group("gloo")
    rpc.init(timeout_s=600)
    if dist.get_rank() == 0:
        measure(options.rounds)
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
