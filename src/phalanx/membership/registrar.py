"""The registrar of a membership: it knows of every rank, and tells all.

It lives in rank 0's process, on the loop of that rank's own membership, listens at one address, and has a session to
every other rank. Of the facts for which a group broke the first one that comes counts.

A session that ends says little: networks end connections, too. So the ranks beside that one look at its process, and it
may dial again. If it has not, and nobody beside it knows how it ended, it has ended; the launcher may say how.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx.diagnosis.ends import ended_elsewhere
from phalanx.membership.loop import Channel, Loop
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
    Leave,
    Left,
    Lost,
    Message,
    OfGroup,
    Position,
    Positions,
    Silent,
    Way,
    WhoKnows,
    needs_positions,
)
from phalanx.system.interfaces import outward_address
from phalanx.wire.door import Arrival, Door
from phalanx.wire.key import job_key
from phalanx.wire.sockets import listen

__all__ = ["LOOK_S", "POSITIONS_S", "WELCOME", "Registrar", "end_of", "may_be_told"]

WELCOME, _NO = b"welcome", b"no"  # verdicts for a rank that dials
# How long a rank may take to dial again after its session has ended, and those beside it to say that it has ended; and
# how long a launcher may take to say how.
REDIAL_S, LAUNCHER_S = 0.25, 0.75
LOOK_S = 0.02
_LEFT_S = 0.02  # ranks that leave at about the same time are told together
# How long ranks may take to say where they are; once all have said something, how long those outside of a call may take
# to come to it.
POSITIONS_S, _LATER_CALLS_S = 1.0, 0.3
_FINISH_S = 0.5
_MOST_STRANGERS = 512


def end_of(rank: int, host: str, pid: int) -> Departed:
    """Say that a rank has ended, and how if a launcher has said so by now."""
    said = ended_elsewhere(host, pid) or {}
    facts = {name: said[name] for name in Departed.__struct_fields__ if name in said}
    return Departed(**{**facts, "rank": rank, "way": Way.ENDED, "text": str(said.get("how", ""))})


def may_be_told(host: str, pid: int, since: float) -> bool:
    """Return whether the launcher may still say how a process has ended whose end was noticed then."""
    return ended_elsewhere(host, pid) == {} and time.monotonic() - since < LAUNCHER_S


@dataclass
class _Member:
    """A rank; ``send`` is None without a session, of which it has lost so many."""

    host: int
    name: str
    pid: int = 0
    send: Callable[[Message], object] | None = None
    channel: Channel | None = None
    lost: int = 0
    is_silent: bool = False
    departed: Departed | None = None


@dataclass
class _Group:
    """A group: its ranks in the membership, and of its own ranks who joined and left, why it broke, where they are."""

    name: str
    ranks: list[int]
    joined: dict[int, Join] = field(default_factory=dict)
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
        pid: of this process.
        own: takes messages for rank 0.

    Attributes:
        address: where it listens, by which name ranks mean it, and its process id.
    """

    def __init__(
        self, loop: Loop, hosts: Sequence[int], names: Sequence[str], pid: int, own: Callable[[Message], object]
    ) -> None:
        self._loop = loop
        self._members = [_Member(host, name) for host, name in zip(hosts, names, strict=True)]
        self._members[0].pid, self._members[0].send = pid, own
        self._groups: dict[str, _Group] = {}
        self._left: list[tuple[str, int]] = []
        listener = listen(outward_address(), 0)
        self._name = secrets.token_hex(8)
        self.address = (*listener.getsockname()[:2], self._name, pid)
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

    def let_go(self) -> None:
        """In a forked child: close the parent's files."""
        self._door.let_go()

    # -- sessions ----------------------------------------------------------------------------------

    def _admit(self, arrival: Arrival) -> None:
        try:
            hello = msgspec.msgpack.decode(arrival.proven.claim, type=Hello)
            member = self._members[hello.rank]
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
            hello, member = Hello(registrar="", rank=0, pid=0), self._members[0]
        if hello.registrar != self._name or hello.rank < 1 or member.pid not in (0, hello.pid):
            arrival.answer(_NO)
            arrival.sock.close()
            return
        arrival.answer(WELCOME)
        rank, session = hello.rank, arrival.proven.session()
        channel = Channel(self._loop, arrival.sock, session, arrival.rest, rank, self.take, self._lose)
        if member.channel is not None:
            member.channel.close()
        member.pid, member.channel, member.send = hello.pid, channel, channel.say
        if member.lost:
            self._catch_up(rank)
        self._set_silent(rank, is_silent=False)

    def _catch_up(self, rank: int) -> None:
        """Tell a rank that was away what it may have missed."""
        for each in self._members:
            if each.departed is not None:
                self._push([rank], each.departed)
        for group in self._groups.values():
            if rank in group.ranks:
                self._push([rank], Left([(group.name, own) for own in group.left]))
                if group.fact is not None:
                    self._push([rank], Broken(group.name, group.fact))

    def _lose(self, rank: int, channel: Channel, is_silent: bool) -> None:
        member = self._members[rank]
        if member.channel is not channel:
            return
        member.channel = member.send = None
        member.lost += 1
        if is_silent:
            self._set_silent(rank, is_silent=True)
        elif member.departed is None:
            beside = [each for each, other in enumerate(self._members) if other.host == member.host and each != rank]
            self._push(beside, WhoKnows(rank))
            lost, now = member.lost, time.monotonic()
            self._loop.later(REDIAL_S, lambda: self._conclude(rank, lost, now))

    def _conclude(self, rank: int, lost: int, since: float) -> None:
        """Note that a rank has ended, which has not dialled again in time."""
        member = self._members[rank]
        if member.channel is not None or member.lost != lost or member.departed is not None:
            return
        if may_be_told(member.name, member.pid, since):
            self._loop.later(LOOK_S, lambda: self._conclude(rank, lost, since))
        else:
            self._depart(end_of(rank, member.name, member.pid))

    def _depart(self, departed: Departed) -> None:
        member = self._members[departed.rank]
        if member.departed is None:  # one whose script has failed ends soon after, and so does one that has left
            member.departed = departed
            self._push(range(len(self._members)), departed)
            for group in self._groups.values():
                self._gather(group)

    def _set_silent(self, rank: int, *, is_silent: bool) -> None:
        if self._members[rank].is_silent != is_silent:
            self._members[rank].is_silent = is_silent
            self._push(range(len(self._members)), Silent(rank, is_silent))

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
            if message.rank == rank or self._members[message.rank].channel is None:
                self._depart(message)
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
        group.joined[rank] = message
        if len(group.joined) == len(group.ranks):
            pids = [self._members[each].pid for each in group.ranks]
            addresses = [group.joined[each].addresses for each in group.ranks]
            self._push(group.ranks, Joined(group.name, pids, addresses))

    def _take_of_group(self, group: _Group, rank: int, own: int, message: OfGroup) -> None:
        if isinstance(message, Leave):
            group.left.add(own)
            if not self._left:
                self._loop.later(_LEFT_S, self._push_left)
            self._left.append((group.name, own))
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
        left, self._left = self._left, []
        for rank in range(len(self._members)):
            theirs = [each for each in left if rank in self._groups[each[0]].ranks]
            if theirs:
                self._push([rank], Left(theirs))
        for name in {each[0] for each in left}:
            group = self._groups[name]
            if len(group.left | self._departed_in(group)) == len(group.ranks):
                del self._groups[name]

    def _departed_in(self, group: _Group) -> set[int]:
        return {own for own, rank in enumerate(group.ranks) if self._members[rank].departed is not None}
