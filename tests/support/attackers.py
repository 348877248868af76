"""Attacks on the ports of a job that works, and what they cost it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from phalanx.wire.proof import GREETING_BYTES
from tests.launch_support import Launcher, RunningJob
from tests.support import attacks
from tests.support.strangers import NOBODY
from tests.support.waiting import soon

__all__ = [
    "HAS_EVERYTHING", "LENGTHS", "MOST_ANSWERED", "NOBODY", "PATIENCE_S", "Attack", "attack_all", "check_delays",
    "listening", "sockets_of", "start_everything",
]  # fmt: skip

PATIENCE_S = 200.0  # no busy machine needs as long
# A listener greets, and tells a caller that proves another key so, with a digest and an empty verdict.
MOST_ANSWERED = GREETING_BYTES + 32 + 4
LISTENS = "0A"
# How long each attack takes, and what a step may take longer meanwhile, both in seconds. A stranger for whom somebody
# waited would hold up a step for the ten seconds that he has to prove himself. On a quiet machine it is far below 1 s.
LENGTHS = pytest.mark.parametrize(("seconds", "limit_s"), [(0.3, 7.0), pytest.param(5.0, 1.0, marks=pytest.mark.fault)])


def listening(pid: int, inodes: Collection[str] | None = None) -> list[tuple[str, int]]:
    """The addresses and ports at which the host of this process listens; what listens everywhere, at loopback.

    Args:
        pid: the process.
        inodes: only these sockets.
    """
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and (inodes is None or words[9] in inodes):
                address, _, port = words[1].partition(":")
                numbers = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
                text = socket.inet_ntop(family, struct.pack(f"={len(numbers)}I", *numbers))
                found.append(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(text, text), int(port, 16)))
    return sorted(set(found))


def sockets_of(pid: int) -> set[str]:
    """The inodes of the sockets of a process."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            if link.startswith("socket:["):
                found.add(link[8:-1])
    return found


# It uses all that listens, in a job over hosts and on one.
HAS_EVERYTHING = """
    import json, operator, os, pathlib, sys, time
    import torch, torch.distributed as dist
    import phalanx
    from phalanx import rpc
    folder = pathlib.Path(sys.argv[1] if sys.argv[1:] else os.environ["FOLDER"])
    world = phalanx.init(timeout_s=100, quiet=True)
    rpc.init()
    if world.num_nodes == 1:
        dist.all_reduce(torch.ones(4).to_sparse())  # only Gloo has it, which listens from now on
    steps, large, works = [], torch.ones(100_000), True
    while works:
        began = time.monotonic()
        over = torch.tensor([float((folder / "over").exists())])
        world.all_reduce(over)
        world.all_reduce(large.fill_(1))
        assert large.eq(world.size).all()
        assert rpc.call((world.rank + 1) % world.size, operator.add, world.rank, 1) == world.rank + 1
        works = not over.item()
        print("step", len(steps))  # which goes over the connection to the launcher, if there is one
        steps.append((began, time.monotonic()))
        (folder / f"works-{world.rank}").touch()
        time.sleep(0.003)
    dist.barrier(dist.new_group())  # the store still answers
    rpc.shutdown(timeout_s=60)
    (folder / f"steps-{world.rank}").write_text(json.dumps(steps))
    phalanx.close()
"""


def start_everything(launcher: Launcher, *options: str) -> RunningJob:
    """Start three ranks that use all that listens, and return when each has done a step."""
    folder = launcher.directory
    job = launcher.start("-n", "3", "-q", *options, launcher.script(HAS_EVERYTHING), str(folder))
    assert soon(lambda: all((folder / f"works-{rank}").exists() for rank in range(3)) or job.process.poll() is not None)
    assert job.process.poll() is None, job.finish().err_text
    return job


@dataclass
class Attack:
    """Somebody who attacks, and from where: the words before his commands, his user, and what he can reach."""

    words: Sequence[str]
    user: int
    ports: list[tuple[str, int]]
    times: dict[str, tuple[float, float]] = field(default_factory=dict)

    def command(self, attack: str, seconds: float, ports: Sequence[tuple[str, int]] = ()) -> list[str]:
        targets = [f"{address}:{port}" for address, port in ports or self.ports]
        return [*self.words, sys.executable, attacks.__file__, attack, str(seconds), str(self.user), *targets]

    def run(self, attack: str, seconds: float) -> dict[str, int]:
        began = time.monotonic()
        done = subprocess.run(
            self.command(attack, seconds), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        self.times[attack] = began, time.monotonic()
        assert done.returncode == 0, done.stderr
        told: dict[str, int] = json.loads(done.stdout)
        return told


def attack_all(attack: Attack, seconds: float, runs: Callable[[], bool]) -> None:
    """Every attack after the other, with a pause of the same length before each."""
    for name in ("silent", "slow", "garbage", "large", "flood"):
        time.sleep(seconds)
        told = attack.run(name, seconds)
        print(name, told, flush=True)
        assert told["made"] > 0
        assert told["most_heard"] <= MOST_ANSWERED, name
        assert runs(), name


def check_delays(folder: Path, attack: Attack, limit_s: float) -> None:
    """The longest step during each attack took at most so many seconds longer than the longest one of the pauses."""
    longest: dict[str, float] = {}
    for file in folder.glob("steps-*"):
        steps = json.loads(file.read_text())
        # The last of them begins before the first attack, so that there is a pause to compare with.
        assert steps[0][0] < min(begin for begin, _ in attack.times.values())
        for began, ended in steps[1:]:
            names = [name for name, (begin, end) in attack.times.items() if began < end and ended > begin]
            for name in names or ["pause"]:
                longest[name] = max(longest.get(name, 0.0), ended - began)
    print({name: round(each, 3) for name, each in longest.items()}, flush=True)
    assert set(attack.times) <= set(longest)  # there were steps during each
    assert max(longest[name] - longest["pause"] for name in attack.times) < limit_s
