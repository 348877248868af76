"""``--rehearse``: ranks placed as if on several hosts, all of them on this one.

A rank gets the variables that a launcher on such a cluster sets, and reports the rehearsed host as its own
(PHALANX_HOST), so nodes, groups and the table are those of the cluster. What cannot be rehearsed is printed: devices
are the CPU, and groups that span hosts share memory, because Gloo among hundreds of ranks on a few cores would measure
the rehearsal and not the program.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from phalanx import settings
from phalanx.errors import LaunchError

__all__ = ["Placement", "Rehearsal", "parse_rehearsal"]

Placement = Literal["block", "cyclic"]
_HOW = "Write --rehearse 2x4 for two hosts with four ranks each, or --rehearse 1,3,2 for unequal hosts"


@dataclass(frozen=True)
class Rehearsal:
    """The hosts of a rehearsal, which do not exist.

    Attributes:
        hosts: how many ranks each takes, by node rank.
        placement: ``block`` fills one host after the other; ``cyclic`` gives each host one rank in turn.
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

    def placed(self) -> list[tuple[int, int]]:
        """The node rank and the local rank of each rank."""
        placed = [(node, local) for node, count in enumerate(self.hosts) for local in range(count)]
        return placed if self.placement == "block" else sorted(placed, key=lambda place: (place[1], place[0]))

    def environment(self, node_rank: int) -> dict[str, str]:
        """Variables that a rank on this host gets beside those that every launcher sets."""
        # torch's store asks the name server for the name of 127.0.0.1. Hundreds of ranks ask at once, and a rank whose
        # question is dropped would wait 5 s before it asks again.
        patience = {} if "RES_OPTIONS" in os.environ else {"RES_OPTIONS": "timeout:1 attempts:5"}
        return {
            **patience,
            settings.HOST: self.host(node_rank),
            settings.REHEARSAL: self.given,
            settings.DEVICE: "cpu",
            # For scripts that ask torch themselves: CUDA and ROCm show no device then.
            "CUDA_VISIBLE_DEVICES": "",
        }

    def note(self) -> str:
        """The differences from the cluster, in one line."""
        between = ", groups that span hosts use shared memory in place of the network" if len(self.hosts) > 1 else ""
        return f"a rehearsal: ranks compute on the CPU{between}, and all share this machine's cores and memory"


def parse_rehearsal(text: str, placement: Placement = "block") -> Rehearsal:
    """Read ``NODESxRANKS``, or the ranks of each host separated by commas."""
    if match := re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", text):
        numbers = (int(match[2]),) * int(match[1])
    elif re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)+", text):
        numbers = tuple(int(part) for part in text.split(","))
    else:
        raise LaunchError(f"--rehearse {text}: is neither NODESxRANKS nor a list of ranks for each host. {_HOW}")
    if not numbers or min(numbers) < 1:
        raise LaunchError(f"--rehearse {text}: there is at least one host, and each has at least one rank. {_HOW}")
    return Rehearsal(numbers, placement, text.replace(" ", ""))
