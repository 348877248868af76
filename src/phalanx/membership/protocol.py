"""Messages between a rank and the registrar, and the facts that they carry. Nobody reads a sentence out of a fact."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from phalanx.wire.framing import Malformed
from phalanx.wire.sockets import KeepAlive

__all__ = [
    "KEEP_ALIVE",
    "ROLE",
    "Address",
    "Answer",
    "Ask",
    "Broken",
    "Closing",
    "Departed",
    "Differs",
    "Fact",
    "Hello",
    "Join",
    "Joined",
    "Late",
    "Leave",
    "Leaving",
    "Left",
    "Lost",
    "Meet",
    "Message",
    "Position",
    "Positions",
    "Silent",
    "Way",
    "WhoKnows",
    "decode",
    "encode",
    "needs_positions",
]

ROLE = "registrar"
# A host that acknowledges nothing is noticed within some 4 s, by probes while nothing is sent, else by what is sent. A
# cable that is out for a second is not.
KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=3, unacknowledged_s=3)


class Way:
    """How a rank is lost; the first four are those of ``departures.py``."""

    ENDED, REPLACED, FAILED, LEFT = "ended", "replaced", "failed", "left"
    INTERRUPTED = "interrupted"  # by a signal in this group's call
    SILENT = "silent"  # its host acknowledges nothing
    UNKNOWN = "unknown"  # a transfer failed, and nobody says why


class _Struct(msgspec.Struct, omit_defaults=True, frozen=True, tag=True):
    pass


# -- why a group broke. Ranks are group ranks ----------------------------------------------------------


class Lost(_Struct, frozen=True):
    """A rank is lost, or the way to one.

    Attributes:
        by: the rank that noticed it.
        rank: the lost one; -1 if it is not known.
        way: see :class:`Way`.
        text: of one that failed or was interrupted by what; else what its host says of it, if that is more.
        how: it has ended, as ``by signal 9 (SIGKILL)``.
        signal, last_operation, last_line, was_in_it: see :class:`Departed`.
        at: the last call, which it has not made, if it left without that; -1 for other losses.
    """

    by: int
    way: str
    rank: int = -1
    text: str = ""
    how: str = ""
    signal: int = 0
    last_operation: str = ""
    last_line: str = ""
    was_in_it: bool = False
    at: int = -1


class Late(_Struct, frozen=True):
    """Ranks have not come in time to a collective of rank ``by``, or ``rank`` to its message, which ``text`` tells."""

    by: int
    rank: int = -1
    text: str = ""


class Differs(_Struct, frozen=True):
    """The calls of the ranks do not match.

    Attributes:
        by: the rank that found it.
        at: which call, by its count; -1 for a message.
        ends: of a message, what was sent and what was to be received (``MessageEnd``).
    """

    by: int
    at: int = -1
    ends: tuple[tuple[int, int, int, str], ...] = ()


Fact: TypeAlias = Lost | Late | Differs


def needs_positions(fact: Fact) -> bool:
    """Tell whether the error says where all ranks are."""
    return not fact.text if isinstance(fact, Late) else isinstance(fact, Differs) and not fact.ends


# -- a rank to the registrar. Ranks are those of the membership, but for groups' ------------------------


class Hello(_Struct, frozen=True):
    """Claim of a rank that dials: which registrar it means, and which process it is."""

    registrar: str
    rank: int
    pid: int


class Join(_Struct, frozen=True):
    """The rank is a member of a group of these ranks; where Gloo can reach it, for each group of Gloo's."""

    group: str
    ranks: list[int]
    addresses: dict[str, bytes] = {}


class Address(_Struct, frozen=True):
    """Where Gloo can reach a rank of a group, for a group of Gloo's that is made later; handed on to the others."""

    group: str
    rank: int
    name: str
    address: bytes


class Leave(_Struct, frozen=True):
    """The rank has left a group in order. Messages of it may still be under way to these ranks of the group."""

    group: str
    but_for: list[int] = []


class Broken(_Struct, frozen=True):
    """A rank has found why a group broke; the registrar says so of the first one.

    ``departs``: the rank that found it is gone from the job with that, as its script fails.
    """

    group: str
    fact: Fact
    departs: bool = False


class Position(_Struct, frozen=True):
    """Where a rank is when its group breaks.

    Attributes:
        rank: in the group.
        kind: ``call``, ``message``, ``place`` outside both, or ``stopped``; empty if it does not say.
        number: how many collectives it has begun.
        text: the call, message, place, or the process state.
        before: the collective before it; for a place the last one.
        group: which one, on the way to the registrar.
        stopped: process states of ranks of its host that are stopped, which cannot say so themselves.
    """

    rank: int
    kind: str = ""
    number: int = 0
    text: str = ""
    before: str = ""
    group: str = ""
    stopped: dict[int, str] = {}


class Meet(_Struct, frozen=True):
    """The rank is ready to connect with another one of the group; the registrar hands it on, with who says it."""

    group: str
    peer: int


class Departed(_Struct, frozen=True):
    """A rank has gone: said by one of its host, and by the registrar to all.

    Attributes:
        rank, way: which one, and how; see :class:`Way`.
        text: of one that failed, why; of one that has ended, how.
        signal: that ended it; 0 if none did or it is not known.
        last_operation, last_line: from its flight recorder; empty if not known.
        was_in_it: it had not returned from that operation.
    """

    rank: int
    way: str
    text: str = ""
    signal: int = 0
    last_operation: str = ""
    last_line: str = ""
    was_in_it: bool = False


class Ask(_Struct, frozen=True):
    """``asker`` wants to know what the ranks of other hosts do."""

    number: int
    asker: int = -1


class Answer(_Struct, frozen=True):
    """What the ranks of a host do, as JSON values of ``RankSnapshot``, for the rank that asked."""

    number: int
    asker: int
    snapshots: list[Any]


class Leaving(_Struct, frozen=True):
    """The rank has left all groups, and ends its session."""


# -- the registrar to a rank ---------------------------------------------------------------------------


class Joined(_Struct, frozen=True):
    """All ranks of a group have joined; their process ids and addresses."""

    group: str
    pids: list[int]
    addresses: list[dict[str, bytes]]


class Left(_Struct, frozen=True):
    """Ranks have left groups: the group, its rank, and for whom messages of that may be under way."""

    ranks: list[tuple[str, int, list[int]]]


class Silent(_Struct, frozen=True):
    """The host of a rank acknowledges nothing, or does again."""

    rank: int
    is_silent: bool


class Positions(_Struct, frozen=True):
    """Where the ranks of a broken group are."""

    group: str
    ranks: list[Position]


class WhoKnows(_Struct, frozen=True):
    """The session of a rank of this host has ended: how has its process?"""

    rank: int


class Closing(_Struct, frozen=True):
    """The registrar's process leaves the job in order."""


Message: TypeAlias = (
    Hello
    | Join
    | Address
    | Leave
    | Broken
    | Position
    | Meet
    | Departed
    | Ask
    | Answer
    | Leaving
    | Joined
    | Left
    | Silent
    | Positions
    | WhoKnows
    | Closing
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Return the message; raise Malformed if it is none."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)) from None
