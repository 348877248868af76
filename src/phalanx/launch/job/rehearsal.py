"""``--rehearse``: ranks placed as if on several hosts, all of them on this one.

What a rank is told is what a launcher on such a cluster tells it (node rank, local rank, ranks beside it), and it
reports the rehearsed host as its own (PHALANX_HOST), so nodes, groups and the table come out as they will there. Three
things cannot be rehearsed, and the launcher says so: devices are the CPU; groups that span hosts share memory, where
the cluster has a network between them, because Gloo among hundreds of ranks on a few cores would time the rehearsal and
not the program; and the machine's own name (``socket.gethostname()``) stays what it is.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from phalanx import settings
from phalanx.errors import LaunchError

__all__ = ["Placement", "Rehearsal", "Seat", "parse_rehearsal"]

Placement = Literal["block", "cyclic"]

_HOW = "Say --rehearse 2x4 for two hosts with four ranks each, or --rehearse 1,3,2 for unequal hosts"


@dataclass(frozen=True)
class Seat:
    """Where one rank sits: its node rank, and its local rank there."""

    node_rank: int
    local_rank: int


@dataclass(frozen=True)
class Rehearsal:
    """Hosts that are not there.

    Attributes:
        hosts: how many ranks each takes, by node rank.
        placement: ``block`` fills one host after the other; ``cyclic`` gives each host one rank in turn, as long as it
            takes any.
        given: what the user wrote.
    """

    hosts: tuple[int, ...]
    placement: Placement = "block"
    given: str = ""

    @property
    def ranks(self) -> int:
        """How many ranks there are on all hosts."""
        return sum(self.hosts)

    def host(self, node_rank: int) -> str:
        """The name of a host that is not there."""
        return f"node{node_rank}"

    def seats(self) -> list[Seat]:
        """Where every rank sits, in rank order."""
        if self.placement == "block":
            return [Seat(node, local) for node, count in enumerate(self.hosts) for local in range(count)]
        rounds = range(max(self.hosts))
        return [Seat(node, turn) for turn in rounds for node, count in enumerate(self.hosts) if turn < count]

    def environment(self, node_rank: int) -> dict[str, str]:
        """What a rank on this host is given beside what every launcher gives."""
        # torch's store asks the name server for the name of 127.0.0.1, for a line of a log. Hundreds of ranks ask at
        # once, and where it drops some of the questions, each of those ranks would wait 5 s before it asks again.
        patience = {} if "RES_OPTIONS" in os.environ else {"RES_OPTIONS": "timeout:1 attempts:5"}
        return {
            **patience,
            settings.HOST: self.host(node_rank),
            settings.REHEARSAL: self.given,
            settings.DEVICE: "cpu",
            # For scripts that ask torch themselves: CUDA and ROCm show no device then.
            "CUDA_VISIBLE_DEVICES": "",
        }

    def title(self, host: str) -> str:
        """What the table's title says of it."""
        hosts = f"{len(self.hosts)} host" + ("s" if len(self.hosts) > 1 else "")
        return f"rehearsed: {hosts} on {host}"

    def note(self) -> str:
        """What is not as it will be there, in one line."""
        between = ", groups that span hosts use shared memory in place of the network" if len(self.hosts) > 1 else ""
        return f"a rehearsal: ranks compute on the CPU{between}, and all share this machine's cores and memory"


def parse_rehearsal(text: str, placement: Placement = "block") -> Rehearsal:
    """Read ``NODESxRANKS``, or the ranks of each host separated by commas.

    Raises:
        LaunchError: it is neither, or a host or all of them would be empty; the message says how to write it.
    """
    numbers: tuple[int, ...]
    if match := re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", text):
        nodes, ranks = int(match[1]), int(match[2])
        numbers = (ranks,) * nodes
    elif re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)+", text):
        numbers = tuple(int(part) for part in text.split(","))
    else:
        raise LaunchError(f"--rehearse {text}: is neither NODESxRANKS nor a list of ranks for each host. {_HOW}")
    if not numbers or min(numbers) < 1:
        raise LaunchError(
            f"--rehearse {text}: every host has at least one rank, and there is at least one host. {_HOW}"
        )
    return Rehearsal(numbers, placement, text.replace(" ", ""))
