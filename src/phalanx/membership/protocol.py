"""Messages between a rank and the registrar, and the facts that they carry.

Ranks are those of the membership, but in facts and in messages about a group those of the group.
Nobody reads a sentence out of a fact.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from phalanx.wire.framing import Malformed, frame
from phalanx.wire.sockets import KeepAlive

ROLE = "registrar"
# A host that acknowledges nothing is noticed within some 4 s, by probes while nothing is sent, else by what is sent. A
# cable that is out for a second is not.
KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=3, unacknowledged_s=3)


class Way:
    """Ways to lose a rank. Of several ranks the one whose way is first here tells the cause.

    One whose script fails often does so for another one that has ended, and one that leaves for one that has failed.
    """

    ENDED, REPLACED, FAILED, LEFT, SILENT = DEPARTED = "ended", "replaced", "failed", "left", "silent"
    INTERRUPTED = "interrupted"  # by a signal, in a call of this group
    UNKNOWN = "unknown"  # a transfer failed, and nobody says why


class _Struct(msgspec.Struct, omit_defaults=True, frozen=True, tag=True):
    pass


# -- why a group broke ---------------------------------------------------------------------------------


class Lost(_Struct, frozen=True):
    """A rank is lost, or the way to one.

    ``by`` has noticed it. ``rank`` is -1 if it is not known which. The others are those of :class:`Departed`.
    """

    by: int
    way: str
    rank: int = -1
    text: str = ""
    signal: int = 0
    last_operation: str = ""
    last_line: str = ""
    was_in_it: bool = False


class Late(_Struct, frozen=True):
    """Ranks have not come in time to a collective of rank ``by``, or ``rank`` to its message, which ``text`` tells."""

    by: int
    rank: int = -1
    text: str = ""


class Differs(_Struct, frozen=True):
    """Call number ``at`` of rank ``by`` does not match the others', or the ``ends`` of a message (``MessageEnd``)."""

    by: int
    at: int = -1
    ends: tuple[tuple[int, int, int, str], ...] = ()


Fact: TypeAlias = Lost | Late | Differs


def needs_positions(fact: Fact) -> bool:
    """Tell whether the error says where all ranks are."""
    return not fact.text if isinstance(fact, Late) else isinstance(fact, Differs) and not fact.ends


# -- messages ------------------------------------------------------------------------------------------


class Hello(_Struct, frozen=True):
    """Claim of a rank that dials: which process it is."""

    rank: int
    pid: int


class Address(_Struct, frozen=True):
    """The address of a rank for what has this name: Gloo, or messages."""

    group: str
    rank: int
    name: str
    address: bytes


class Join(_Struct, frozen=True):
    """The sender is in a group of these ranks, and has these addresses."""

    group: str
    ranks: list[int]
    addresses: list[Address]


class Joined(_Struct, frozen=True):
    """All ranks of a group have joined; the addresses are those of all."""

    group: str
    pids: list[int]
    addresses: list[Address]


class Left(_Struct, frozen=True):
    """Ranks have left a group in order; of itself a rank says so to the registrar."""

    group: str
    ranks: list[int]


class Broken(_Struct, frozen=True):
    """The reason why a group broke: as the sender has found it, and from the registrar what was found first.

    ``departs``: the sender's script fails with that.
    """

    group: str
    fact: Fact
    departs: bool = False


class Position(_Struct, frozen=True):
    """The position of a rank when its group breaks.

    ``kind`` is ``call``, ``message``, ``place`` outside both, or ``stopped``, and ``text`` what it is. It has begun
    ``number`` collectives; ``before`` is the one before the call, or the last one. ``stopped`` has the process states
    of ranks beside it that are stopped, and cannot say so themselves.
    """

    rank: int
    kind: str = ""
    number: int = 0
    text: str = ""
    before: str = ""
    group: str = ""
    stopped: dict[int, str] = {}


class Positions(_Struct, frozen=True):
    """The positions of those ranks of a broken group that have said so."""

    group: str
    ranks: list[Position]


class Departed(_Struct, frozen=True):
    """A rank has gone, or its host acknowledges nothing; of itself a rank says that it has left all groups.

    ``text`` says why it failed or was interrupted, or how it ended; ``signal`` is 0 if none ended it. The last
    operation is that of its flight recorder, if that could be read; it ``was_in_it`` if it had not returned.
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
    """The ranks of a host, as values of ``RankSnapshot``, handed on to the rank that asked."""

    number: int
    asker: int
    snapshots: list[Any]


OfGroup: TypeAlias = Joined | Address | Left | Broken | Position | Positions
Message: TypeAlias = Join | OfGroup | Departed | Ask | Answer

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the message in its frame."""
    return frame(msgspec.msgpack.encode(message))


def decode(data: bytes) -> Message:
    """Return the message, which comes without its frame; raise Malformed if it is none."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)) from None
