"""What a group and the lookout of its process know of each other: whom the group watches, and what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from phalanx.transports.hierarchical.contact import Sign

__all__ = ["Endpoint", "Watcher"]


@dataclass(frozen=True)
class Endpoint:
    """Where a process can be reached by a lookout, and which process it is.

    Attributes:
        identity: names this process, and no other one of any host.
        address, port: where its lookout listens.
        pid: its process id, for people.
    """

    identity: str
    address: str
    port: int
    pid: int

    def encode(self) -> str:
        """As :meth:`decode` takes it."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Endpoint:
        """What another process has encoded."""
        return cls(**json.loads(text))


class Watcher(Protocol):
    """A group that wants to know of processes of other hosts. Its methods are called on the lookout's thread."""

    name: str

    def look(self, now: float, sign_of: Callable[[Endpoint], tuple[Sign | None, float]]) -> None:
        """It is time to judge.

        Args:
            now: the time, on a clock that stands still while this process does.
            sign_of: what is known of a process, and since when; None if it has not been reached yet, and then since
                when that fails, or infinity if it has not failed.
        """

    def told(self, sender: str, message: dict[str, Any]) -> None:
        """The process of this identity has sent the group a message; the same one may come again."""

    def says(self) -> dict[str, Any]:
        """What a process has to know that begins to watch for the group now; empty if nothing."""
