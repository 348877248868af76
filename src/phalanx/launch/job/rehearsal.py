"""``--rehearse``: ranks placed as if on several hosts, all of them on this one.

A rank gets the variables that a launcher on such a cluster sets (node rank, local rank, ranks on its host), and reports
the rehearsed host as its own (PHALANX_HOST). So nodes, groups and the table are those that the cluster will have. Three
things cannot be rehearsed, and the launcher prints so. Devices are the CPU. Groups that span hosts share memory
instead of a network, because Gloo among hundreds of ranks on a few cores would measure the rehearsal, not the program.
And the name that a script asks of the machine itself (``socket.gethostname()``) is this machine's.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.words import format_count

__all__ = ["Placement", "Rehearsal", "RehearsedRank", "parse_rehearsal"]

Placement = Literal["block", "cyclic"]

_HOW = "Write --rehearse 2x4 for two hosts with four ranks each, or --rehearse 1,3,2 for unequal hosts"


@dataclass(frozen=True)
class RehearsedRank:
    """Where one rank is placed: its node rank, and its local rank there."""

    node_rank: int
    local_rank: int


@dataclass(frozen=True)
class Rehearsal:
    """The hosts of a rehearsal, which do not exist.

    Attributes:
        hosts: how many ranks each takes, by node rank.
        placement: ``block`` fills one host after the other; ``cyclic`` gives each host one rank in turn, until it is
            full.
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
        """The name of a rehearsed host."""
        return f"node{node_rank}"

    def placed(self) -> list[RehearsedRank]:
        """Where each rank is placed, in rank order."""
        if self.placement == "block":
            return [RehearsedRank(node, local) for node, count in enumerate(self.hosts) for local in range(count)]
        rounds = range(max(self.hosts))
        return [RehearsedRank(node, turn) for turn in rounds for node, count in enumerate(self.hosts) if turn < count]

    def environment(self, node_rank: int) -> dict[str, str]:
        """Variables that a rank on this host gets beside those that every launcher sets."""
        # torch's store asks the name server for the name of 127.0.0.1, for a line in its log. Hundreds of ranks ask at
        # once, and a rank whose question is dropped would wait 5 s before it asks again.
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
        """The rehearsal in the title of the rank table."""
        hosts = format_count(len(self.hosts), "host")
        return f"rehearsed: {hosts} on {host}"

    def note(self) -> str:
        """The differences from the cluster, in one line."""
        between = ", groups that span hosts use shared memory in place of the network" if len(self.hosts) > 1 else ""
        return f"a rehearsal: ranks compute on the CPU{between}, and all share this machine's cores and memory"


def parse_rehearsal(text: str, placement: Placement = "block") -> Rehearsal:
    """Read ``NODESxRANKS``, or the ranks of each host separated by commas.

    Raises:
        LaunchError: it is neither, or there would be no host, or one without ranks; the message says how to write it.
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
