"""Pairs of hosts in rounds, so that no host is measured by two others at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["rounds"]

Host = TypeVar("Host")


def rounds(hosts: Sequence[Host]) -> list[list[tuple[Host, Host]]]:
    """Every pair of hosts once, in as few rounds as can be; no host is twice in a round.

    It is the round-robin tournament: one place stays, the others go around it. With H hosts there are H - 1 rounds, or
    H if that is odd.
    """
    places: list[Host | None] = [*hosts]
    if len(places) % 2:
        places.append(None)
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found
