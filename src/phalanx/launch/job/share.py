"""The ranks of a job that one zygote forks: all of them on one host, and on several those of the zygote's host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.topology.table import RankRow

__all__ = ["Share"]


@dataclass(frozen=True)
class Share:
    """What a zygote has to know beside the job itself.

    Attributes:
        ranks: the ranks that it forks, by their numbers in the world. Its messages and its files count them from 0.
        rows: the rank table of the whole world.
        port: the port of the job's store.
        listener: the bound, listening socket of the store, if this zygote starts the process that serves it.
        terminal: whether the launcher's standard input is a terminal.
    """

    ranks: range
    rows: Sequence[RankRow]
    port: int
    listener: socket.socket | None
    terminal: bool
