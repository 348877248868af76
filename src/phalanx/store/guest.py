"""A connection of a process that has joined rank 0's store."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from phalanx.store.claim import Claim
from phalanx.store.table import Parked
from phalanx.wire.session import Session

__all__ = ["Guest"]


@dataclass(eq=False)
class Guest:
    """A connection of a process that has joined.

    Attributes:
        sock: the socket.
        peer: the address it comes from, for people.
        claim: what the process said of itself.
        session: the digests of its requests and of the answers.
        data: received bytes that are not a whole message yet.
        out: bytes that the network has not taken yet; nothing more is read until it has.
        waits: whether a request of this connection has not been answered yet.
        parked: that request, if it waits for keys.
        stuck: whether the selector waits for ``out`` to be taken.
        told: whether it has been told of a lost rank, which is the last thing that it is told.
    """

    sock: socket.socket
    peer: str
    claim: Claim
    session: Session
    data: bytearray = field(default_factory=bytearray)
    out: bytearray = field(default_factory=bytearray)
    waits: bool = False
    parked: Parked | None = None
    stuck: bool = False
    told: bool = False
