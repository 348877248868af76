"""The registrar of a membership: it knows of every rank, and tells all.

It lives in rank 0's process, on the loop of that rank's own membership, listens at one address, and has a session to
every other rank. Of the facts for which a group broke the first one that comes counts.

A session that ends is the end of its rank, and the launcher may say how that ended. If the other host acknowledges
nothing, the rank is lost to all as silent.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx.diagnosis.ends import ended_elsewhere
from phalanx.membership.loop import Channel, Loop, was_silent
from phalanx.membership.protocol import (
    KEEP_ALIVE,
    ROLE,
    Address,
    Answer,
    Ask,
    Broken,
    Departed,
    Fact,
    Hello,
    Join,
    Joined,
    Left,
    Lost,
    Message,
    OfGroup,
    Position,
    Positions,
    Way,
    decode,
    encode,
    needs_positions,
)
from phalanx.system.interfaces import outward_address
from phalanx.wire.door import Arrival, Door
from phalanx.wire.key import job_key
from phalanx.wire.sockets import listen

__all__ = ["POSITIONS_S", "WELCOME", "Registrar", "await_end"]

WELCOME, _NO = b"welcome", b"no"  # verdicts for a rank that dials
_LAUNCHER_S = 0.75  # how long a launcher may take to say how a rank ended
_LOOK_S = 0.02
_LEFT_S = 0.02  # ranks that leave at about the same time are told together
# How long ranks may take to say where they are; once all have said something, how long those outside of a call may take
# to come to it.
POSITIONS_S, _LATER_CALLS_S = 1.0, 0.3
_FINISH_S = 0.5
_MOST_STRANGERS = 512


def await_end(loop: Loop, rank: int, host: str, pid: int, take: Callable[[Departed], object]) -> None:
    """Pass on how a rank has ended, as soon as the launcher says it, or soon without that. For the loop's thread."""
    until = time.monotonic() + _LAUNCHER_S

    def look() -> None:
        said = ended_elsewhere(host, pid)
        if said == {} and time.monotonic() < until:  # the launcher may still say it
            loop.later(_LOOK_S, look)
            return
        said = said or {}
        facts = {name: said[name] for name in Departed.__struct_fields__ if name in said}
        take(Departed(**{**facts, "rank": rank, "way": Way.ENDED, "text": str(said.get("how", ""))}))

    look()


@dataclass
class _Member:
    """A rank; ``send`` is None without a session."""

    host: int
    name: str
    pid: int = 0
    send: Callable[[Message], object] | None = None
    channel: Channel | None = None
    departed: Departed | None = None


@dataclass
class _Group:
    """A group: its ranks in the membership, and of its own ranks who has left, why it broke, where they are."""

    name: str
    ranks: list[int]
    joined: set[int] = field(default_factory=set)
    addresses: list[Address] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    fact: Fact | None = None
    positions: dict[int, Position] = field(default_factory=dict)
    gathered: bool = False


class Registrar:
    """See above. Only the loop's thread uses it, but for making it.

    Args:
        loop: its thread.
        hosts: the number of the host of each rank.
        names: what each rank's host is called.
        own: takes messages for rank 0.

    Attributes:
        address: where it listens, and its process id.
    """

    def __init__(
        self, loop: Loop, hosts: Sequence[int], names: Sequence[str], own: Callable[[Message], object]
    ) -> None:
        self._loop = loop
        self._members = [_Member(host, name) for host, name in zip(hosts, names, strict=True)]
        self._members[0].pid, self._members[0].send = os.getpid(), own
        self._groups: dict[str, _Group] = {}
        self._left: defaultdict[str, list[int]] = defaultdict(list)  # who is still to be told of
        listener = listen(outward_address(), 0)
        self.address = (*listener.getsockname()[:2], os.getpid())
        most = max(_MOST_STRANGERS, 2 * len(hosts))  # all ranks may dial at the same time
        self._door = Door(listener, job_key(), ROLE, KEEP_ALIVE, loop.selector, self._admit, most=most)
        loop.tend = self._door.tend

    def close(self) -> None:
        """End all sessions, when everything is sent."""
        self._push_left()
        self._door.close()
        for member in self._members:
            if member.channel is not None:
                member.channel.finish(_FINISH_S)

    # -- sessions ----------------------------------------------------------------------------------

    def _admit(self, arrival: Arrival) -> None:
        member = None
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, IndexError):
            hello = msgspec.msgpack.decode(arrival.proven.claim, type=Hello)
            member = self._members[hello.rank] if hello.rank > 0 else None
        if member is None or member.pid:  # it is no rank, or has come already
            arrival.answer(_NO)
            arrival.sock.close()
            return
        arrival.answer(WELCOME)
        session, rank = arrival.proven.session(), hello.rank
        channel = Channel(self._loop, arrival.sock, session, lambda data: self.take(rank, decode(data)))
        channel.ended = lambda why: self._lose(rank, why)
        member.pid, member.channel = hello.pid, channel
        member.send = lambda message: channel.say(encode(message))
        channel.take(arrival.rest)

    def _lose(self, rank: int, why: Exception | None) -> None:
        member = self._members[rank]
        member.channel = member.send = None
        if was_silent(why):
            self._depart(Departed(rank, Way.SILENT))
        else:
            await_end(self._loop, rank, member.name, member.pid, self._depart)

    def _depart(self, departed: Departed) -> None:
        member = self._members[departed.rank]
        if member.departed is None:  # one whose script has failed ends soon after, and so does one that has left
            member.departed = departed
            self._push(range(len(self._members)), departed)
            for group in self._groups.values():
                self._gather(group)

    def _push(self, ranks: Iterable[int], message: Message) -> None:
        for rank in ranks:
            if (send := self._members[rank].send) is not None:
                send(message)

    # -- messages ----------------------------------------------------------------------------------

    def take(self, rank: int, message: Message) -> None:
        """Take a message of a rank."""
        if isinstance(message, Join):
            self._take_join(rank, message)
        elif isinstance(message, Departed):
            self._depart(msgspec.structs.replace(message, rank=rank))
        elif isinstance(message, Ask):
            host = self._members[rank].host
            others = [each for each, member in enumerate(self._members) if member.host != host]
            self._push(others, Ask(message.number, asker=rank))
        elif isinstance(message, Answer):
            self._push([message.asker], message)
        elif isinstance(message, OfGroup):
            group = self._groups.get(message.group)
            if group is not None and rank in group.ranks:  # else all have left it
                self._take_of_group(group, rank, group.ranks.index(rank), message)

    def _take_join(self, rank: int, message: Join) -> None:
        group = self._groups.setdefault(message.group, _Group(message.group, message.ranks))
        group.joined.add(rank)
        group.addresses += message.addresses
        if len(group.joined) == len(group.ranks):
            pids = [self._members[each].pid for each in group.ranks]
            self._push(group.ranks, Joined(group.name, pids, group.addresses))

    def _take_of_group(self, group: _Group, rank: int, own: int, message: OfGroup) -> None:
        if isinstance(message, Left):
            group.left.add(own)
            if not self._left:
                self._loop.later(_LEFT_S, self._push_left)
            self._left[group.name].append(own)
            self._gather(group)
        elif isinstance(message, Address):
            self._push(group.ranks, message)
        elif isinstance(message, Position):
            if message.kind != "place" or group.positions.get(own, message).kind in ("place", "stopped"):
                group.positions[own] = message
            for each, state in message.stopped.items():
                group.positions.setdefault(each, Position(each, "stopped", text=state))
            self._gather(group)
        elif isinstance(message, Broken):
            self._take_fact(group, rank, message)

    def _take_fact(self, group: _Group, rank: int, message: Broken) -> None:
        fact = message.fact
        if message.departs and isinstance(fact, Lost):
            self._depart(Departed(rank, Way.FAILED, fact.text))
        if group.fact is not None:
            self._push([rank], Broken(group.name, group.fact))
            return
        group.fact = fact
        self._push(group.ranks, Broken(group.name, fact))
        if needs_positions(fact):
            self._loop.later(POSITIONS_S, lambda: self._push_positions(group))
            self._gather(group)

    def _gather(self, group: _Group) -> None:
        """Push where the ranks of a broken group are, soon, if all have said so."""
        if group.fact is None or group.gathered or not needs_positions(group.fact):
            return
        awaited = set(range(len(group.ranks))) - self._departed_in(group) - group.left
        if awaited <= group.positions.keys():
            are_in_calls = all(group.positions[own].kind in ("call", "message") for own in awaited)
            self._loop.later(0.0 if are_in_calls else _LATER_CALLS_S, lambda: self._push_positions(group))

    def _push_positions(self, group: _Group) -> None:
        if not group.gathered:
            group.gathered = True
            self._push(group.ranks, Positions(group.name, [*group.positions.values()]))

    def _push_left(self) -> None:
        for name, left in self._left.items():
            group = self._groups[name]
            self._push(group.ranks, Left(name, left))
            if len(group.left | self._departed_in(group)) == len(group.ranks):
                del self._groups[name]
        self._left.clear()

    def _departed_in(self, group: _Group) -> set[int]:
        return {own for own, rank in enumerate(group.ranks) if self._members[rank].departed is not None}
