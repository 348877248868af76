"""How long a small call takes between hosts whose link delays every packet, beside one way over the same link.

It makes hosts on this machine (``tests/support/hosts.py``), so it needs root and iproute2, and joins them by a second
network on which a relay holds each packet for as long as it is told; the ranks talk over that one alone. No call can be
quicker than one way: no host knows what the farthest one contributes before it has heard from it. What one way takes is
measured beside the calls, in turn with them: half of what a byte over TCP takes there and back. All ranks begin a call
at the same moment of the clock, which all hosts share, and the last one to return counts.

    python benchmarks/delayed_links.py
    python benchmarks/delayed_links.py --worlds 2x2 --rounds 40 --delay-ms 20
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import phalanx

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.hosts import TestHosts, running_hosts, why_no_hosts

INTERFACE, NET = "delayed", "10.213.79"
PORT, ECHO_PORT = 29577, 29578
PATIENCE_S = 120.0
APART_S = 0.02  # beside the time that ranks need to learn when a call begins
WARM_UP = 3
ONE_WAY = "one way of TCP"
_CLONE_NEWNET, _TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000


def calls(size: int, rank: int) -> dict[str, Callable[[], object]]:
    """Every collective, with 4 bytes a rank."""
    one, parts, more = torch.ones(1), [torch.ones(1) for _ in range(size)], [torch.ones(1) for _ in range(size)]
    return {
        "all_reduce": lambda: dist.all_reduce(one),
        "reduce": lambda: dist.reduce(one, 0),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_gather": lambda: dist.all_gather(parts, one),
        "gather": lambda: dist.gather(one, parts if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(one, parts if rank == 0 else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(one, parts),
        "all_to_all": lambda: dist.all_to_all(more, parts),
        "barrier": lambda: dist.barrier(),
    }


class Echo:
    """A byte that goes from rank 0 to the last rank and back, over the delayed network. Every rank makes one.

    Args:
        world: all ranks.
        hosts: how many hosts there are; the last rank is on the last one.
    """

    def __init__(self, world: phalanx.World, hosts: int) -> None:
        self._asks = world.rank == 0
        self._line: socket.socket | None = None
        last = world.rank == world.world_size - 1
        where = (f"{NET}.{hosts}", ECHO_PORT)
        with socket.create_server(where) if last else contextlib.nullcontext() as server:
            world.barrier()  # it listens
            if self._asks:
                self._line = socket.create_connection(where, PATIENCE_S)
            elif server is not None:
                self._line, _ = server.accept()
        if self._line is not None:
            self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def there_and_back(self) -> None:
        """Rank 0 sends a byte, and the last rank answers it."""
        if self._line is not None and self._asks:
            self._line.sendall(b"x")
            self._line.recv(1)
        elif self._line is not None:
            self._line.sendall(self._line.recv(1))


def measure(rounds: int, hosts: int, delay_s: float) -> dict[str, list[float]]:
    """The seconds of each call in each round, as a rank."""
    world = phalanx.init(timeout_s=PATIENCE_S, quiet=True)
    echo = Echo(world, hosts)
    tasks: dict[str, Callable[[], object]] = {**calls(world.world_size, world.rank), ONE_WAY: echo.there_and_back}
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(WARM_UP + rounds):
        for name, task in tasks.items():
            at = world.broadcast_object(time.monotonic() + 4 * delay_s + APART_S)
            time.sleep(max(0.0, at - time.monotonic()))
            task()
            ended = world.all_gather_object(time.monotonic())
            lasted_s = (ended[0] if name == ONE_WAY else max(ended)) - at
            if turn >= WARM_UP:
                times[name].append(lasted_s / 2 if name == ONE_WAY else lasted_s)
    phalanx.close()
    return times


class Relay:
    """The network between the hosts: it hands on each packet when the time of its delay is over.

    Args:
        inside: of each host the id of a process there.
        delay_s: each way.
    """

    def __init__(self, inside: list[int], delay_s: float) -> None:
        self._delay_s = delay_s
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._devices = [self._device(number, pid) for number, pid in enumerate(inside)]
        _enter(home)
        os.close(home)

    @staticmethod
    def _device(number: int, pid: int) -> int:
        """A device on a host whose packets are read and written here; this thread stays in that host's network."""
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        _enter(network)
        os.close(network)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
        for words in (f"addr add {NET}.{number + 1}/24 dev {INTERFACE}", f"link set {INTERFACE} mtu 60000 up"):
            subprocess.run(["ip", *words.split()], check=True)
        return device

    def run(self) -> None:
        """Relay for ever."""
        waiting: list[tuple[float, int, bytes]] = []
        count = 0
        while True:
            pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            for device in select.select(self._devices, [], [], pause_s)[0]:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        packet = os.read(device, 1 << 16)
                        count += 1
                        heapq.heappush(waiting, (time.monotonic() + self._delay_s, count, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                packet = heapq.heappop(waiting)[2]
                to = packet[19] - 1  # the last byte of the address that it goes to
                if packet[0] >> 4 == 4 and to in range(len(self._devices)):
                    with contextlib.suppress(OSError):
                        os.write(self._devices[to], packet)


def _enter(network: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network cannot be entered")


@contextlib.contextmanager
def relayed(hosts: TestHosts, delay_s: float) -> Iterator[None]:
    """A relay between hosts, in a process of its own."""
    ready, tell = os.pipe()
    relay = os.fork()
    if relay == 0:
        try:
            made = Relay(hosts.inside, delay_s)
            os.write(tell, b"x")
            made.run()
        finally:
            os._exit(1)
    os.close(tell)
    try:
        if not os.read(ready, 1):
            sys.exit("the relay has failed, see above")
        yield
    finally:
        os.close(ready)
        os.kill(relay, signal.SIGKILL)
        os.waitpid(relay, 0)


def on_hosts(hosts: int, ranks: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """What rank 0 has measured in a world of so many hosts with so many ranks on each."""
    command = [sys.executable, __file__, "--measure", str(hosts), "--rounds", str(options.rounds)]
    command += ["--delay-ms", str(options.delay_ms)]
    size = hosts * ranks
    with (
        tempfile.TemporaryDirectory() as folder,
        running_hosts(hosts, Path(folder)) as made,
        relayed(made, options.delay_ms / 1e3),
    ):
        processes = []
        for rank in range(size):
            place = {"RANK": rank, "LOCAL_RANK": rank % ranks, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": ranks}
            meeting = {
                "MASTER_ADDR": f"{NET}.1",
                "MASTER_PORT": PORT,
                "OMP_NUM_THREADS": 1,
                "PHALANX_INTERFACE": INTERFACE,
            }
            environment = {name: str(value) for name, value in {**place, **meeting}.items()}
            processes.append(made.start(rank // ranks, command, environment, stdout=subprocess.PIPE))
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a rank has failed, see above")
    found: dict[str, list[float]] = json.loads(outputs[0].splitlines()[-1])
    return found


def table(worlds: dict[str, dict[str, list[float]]]) -> str:
    """The medians for people, in ms, and how many times as long as one way each call takes."""
    lines = [f"{'':<16}" + "".join(f"{name:>18}" for name in worlds)]
    for name in next(iter(worlds.values())):
        cells = []
        for times in worlds.values():
            median_s, way_s = statistics.median(times[name]), statistics.median(times[ONE_WAY])
            cells.append(f"{1e3 * median_s:>10.2f} ({median_s / way_s:.2f}×)")
        lines.append(f"{name:<16}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Measure as a rank, or make the hosts and start the ranks on them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--worlds", nargs="+", default=["2x2", "3x1", "4x1"], help="hosts x ranks on each [%(default)s]"
    )
    parser.add_argument("--rounds", type=int, default=30, help="of which the median counts [%(default)s]")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="of every packet [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every sample, in seconds")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.rounds, options.measure, options.delay_ms / 1e3)))
        return
    if why := why_no_hosts():
        sys.exit(f"no hosts can be made here: {why}")
    worlds = {}
    for world in options.worlds:
        hosts, ranks = map(int, world.split("x"))
        worlds[world] = on_hosts(hosts, ranks, options)
    print(json.dumps(worlds) if options.json else table(worlds))


if __name__ == "__main__":
    main()
