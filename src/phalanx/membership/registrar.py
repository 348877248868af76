"""The registrar of a job's ranks over several hosts: one for a membership, in its rank 0's process.

It listens at one address and has a session to every other rank, on the loop of rank 0's own membership. All that is
known of a rank comes here and is pushed to all. Of the facts for which a group broke the first one counts.

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
    Closing,
    Departed,
    Fact,
    Hello,
    Join,
    Joined,
    Leave,
    Leaving,
    Left,
    Lost,
    Meet,
    Message,
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

__all__ = ["LAUNCHER_S", "LOOK_S", "POSITIONS_S", "WELCOME", "Registrar", "end_of"]

WELCOME, NO = b"welcome", b"no"  # verdicts for a rank that dials
# How long a rank may take to dial again after its session has ended, and those beside it to say that it has ended.
REDIAL_S = 0.25
# The same where a launcher says how ranks ended.
LAUNCHER_S = 0.75
LOOK_S = 0.02
# Ranks that leave at about the same time are told together.
_LEFT_S = 0.02
# How long ranks may take to say where they are; once all have said something, how long those outside of a call may take
# to come to it.
POSITIONS_S, _LATER_CALLS_S = 1.0, 0.3
_FINISH_S = 0.5


def end_of(rank: int, host: str, pid: int) -> Departed | None:
    """Say that a rank of another host has ended, and how if a launcher knows; None if it may still learn that."""
    said = ended_elsewhere(host, pid)
    if said is not None and not said:
        return None
    known = dict(said or {})
    facts = {name: known[name] for name in Departed.__struct_fields__ if name in known}
    return Departed(**{**facts, "rank": rank, "way": Way.ENDED, "text": str(known.get("how", ""))})


@dataclass
class _Member:
    """A rank; ``send`` is None without a session. ``lost`` counts the sessions that it has lost."""

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

    ranks: list[int]
    joined: dict[int, Join] = field(default_factory=dict)
    left: dict[int, list[int]] = field(default_factory=dict)
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
        address: where it listens, by which name ranks mean it, and its process id.
    """

    def __init__(
        self, loop: Loop, hosts: Sequence[int], names: Sequence[str], pid: int, own: Callable[[Message], object]
    ) -> None:
        self._loop = loop
        self._members = [_Member(host, name) for host, name in zip(hosts, names, strict=True)]
        self._members[0].pid, self._members[0].send = pid, own
        self._groups: dict[str, _Group] = {}
        self._left: list[tuple[str, int, list[int]]] = []
        listener = listen(outward_address(), 0)
        self._name = secrets.token_hex(8)
        self.address = (*listener.getsockname()[:2], self._name, pid)
        self._door = Door(listener, job_key(), ROLE, KEEP_ALIVE, loop.selector, self._admit)
        loop.tend = self._door.tend

    def close(self) -> None:
        """End all sessions; the other ranks hear that this process leaves."""
        self._push_left()
        self._door.close()
        for member in self._members:
            if member.channel is not None:
                member.channel.send(Closing())
                member.channel.finish(_FINISH_S)

    def let_go(self) -> None:
        """In a forked child: close the parent's files."""
        self._door.let_go()
        for member in self._members:
            if member.channel is not None:
                member.channel.let_go()

    # -- sessions ----------------------------------------------------------------------------------

    def _admit(self, arrival: Arrival) -> None:
        try:
            hello = msgspec.msgpack.decode(arrival.proven.claim, type=Hello)
            member = self._members[hello.rank]
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
            hello, member = Hello(registrar="", rank=0, pid=0), self._members[0]
        if hello.registrar != self._name or hello.rank < 1 or member.pid not in (0, hello.pid):
            arrival.answer(NO)
            arrival.sock.close()
            return
        arrival.answer(WELCOME)
        if member.channel is not None:
            member.channel.close()
        rank = hello.rank
        channel = Channel(
            self._loop,
            arrival.sock,
            arrival.proven.session(),
            arrival.rest,
            lambda message: self.take(rank, message),
            lambda is_silent: self._lose(rank, channel, is_silent),
        )
        member.pid, member.channel, member.send = hello.pid, channel, channel.send
        if member.lost:
            self._catch_up(rank)
        self._set_silent(rank, is_silent=False)

    def _catch_up(self, rank: int) -> None:
        """Tell a rank that was away what it may have missed."""
        for each in self._members:
            if each.departed is not None:
                self._send(rank, each.departed)
        for name, group in self._groups.items():
            if rank in group.ranks:
                self._send(rank, Left(ranks=[(name, *left) for left in group.left.items()]))
                if group.fact is not None:
                    self._send(rank, Broken(group=name, fact=group.fact))

    def _lose(self, rank: int, channel: Channel, is_silent: bool) -> None:
        member = self._members[rank]
        if member.channel is not channel:
            return
        member.channel = member.send = None
        member.lost += 1
        if member.departed is not None:
            return
        if is_silent:
            self._set_silent(rank, is_silent=True)
            return
        for beside, other in enumerate(self._members):
            if other.host == member.host and beside != rank:
                self._send(beside, WhoKnows(rank=rank))
        lost, began = member.lost, time.monotonic()
        self._loop.later(REDIAL_S, lambda: self._conclude(rank, lost, began))

    def _conclude(self, rank: int, lost: int, began: float) -> None:
        """A rank has not dialled again, and nobody beside it has said how it ended."""
        member = self._members[rank]
        if member.channel is not None or member.lost != lost or member.departed is not None:
            return
        found = end_of(rank, member.name, member.pid)
        if found is None and time.monotonic() - began < LAUNCHER_S:
            self._loop.later(LOOK_S, lambda: self._conclude(rank, lost, began))
        else:
            self._depart(found or Departed(rank=rank, way=Way.ENDED))

    def _depart(self, departed: Departed) -> None:
        member = self._members[departed.rank]
        # A rank whose script has failed ends soon after, and one that left in order does.
        if member.departed is None:
            member.departed = departed
            self._push(range(len(self._members)), departed)
            for name in self._groups:
                self._gather(name)

    def _set_silent(self, rank: int, *, is_silent: bool) -> None:
        if self._members[rank].is_silent != is_silent:
            self._members[rank].is_silent = is_silent
            self._push(range(len(self._members)), Silent(rank=rank, is_silent=is_silent))

    def _send(self, rank: int, message: Message) -> None:
        send = self._members[rank].send
        if send is not None:
            send(message)

    def _push(self, ranks: Iterable[int], message: Message) -> None:
        for rank in ranks:
            self._send(rank, message)

    # -- messages ----------------------------------------------------------------------------------

    def take(self, rank: int, message: Message) -> None:
        """Take a message of a rank."""
        if isinstance(message, Join):
            group = self._groups.setdefault(message.group, _Group(message.ranks))
            group.joined[rank] = message
            if len(group.joined) == len(group.ranks):
                pids = [self._members[each].pid for each in group.ranks]
                addresses = [group.joined[each].addresses for each in group.ranks]
                self._push(group.ranks, Joined(group=message.group, pids=pids, addresses=addresses))
        elif isinstance(message, Departed):
            if message.rank != rank and self._members[message.rank].channel is None:
                self._depart(message)
        elif isinstance(message, Leaving):
            self._depart(Departed(rank=rank, way=Way.LEFT))
        elif isinstance(message, Ask):
            host = self._members[rank].host
            others = [each for each, member in enumerate(self._members) if member.host != host]
            self._push(others, Ask(number=message.number, asker=rank))
        elif isinstance(message, Answer):
            self._send(message.asker, message)
        elif isinstance(message, (Address, Leave, Broken, Position, Meet)):
            group = self._groups.get(message.group, _Group([]))
            if rank in group.ranks:  # else all have left it
                self._take_of_group(message, group, group.ranks.index(rank), rank)

    def _take_of_group(
        self, message: Address | Leave | Broken | Position | Meet, group: _Group, own: int, rank: int
    ) -> None:
        name = message.group
        if isinstance(message, Leave):
            group.left[own] = message.but_for
            if not self._left:
                self._loop.later(_LEFT_S, self._push_left)
            self._left.append((name, own, message.but_for))
            self._gather(name)
        elif isinstance(message, Address):
            self._push(group.ranks, message)
        elif isinstance(message, Meet):
            self._send(group.ranks[message.peer], Meet(group=name, peer=own))
        elif isinstance(message, Position):
            before = group.positions.get(own)
            if before is None or message.kind != "place" or before.kind in ("", "stopped"):
                group.positions[own] = message
            for each, state in message.stopped.items():
                group.positions.setdefault(each, Position(rank=each, kind="stopped", text=state))
            self._gather(name)
        else:
            if isinstance(message.fact, Lost) and message.departs:
                self._depart(Departed(rank=rank, way=Way.FAILED, text=message.fact.text))
            if group.fact is not None:
                self._send(rank, Broken(group=name, fact=group.fact))
                return
            group.fact = message.fact
            self._push(group.ranks, Broken(group=name, fact=group.fact))
            if needs_positions(group.fact):
                self._loop.later(POSITIONS_S, lambda: self._push_positions(group, name))
                self._gather(name)

    def _gather(self, name: str) -> None:
        """Push where the ranks of a broken group are, if all have said so."""
        group = self._groups[name]
        if group.fact is None or group.gathered or not needs_positions(group.fact):
            return
        open_ranks = set(range(len(group.ranks))) - self._departed_in(group) - group.left.keys()
        if open_ranks <= group.positions.keys():
            in_calls = all(group.positions[own].kind in ("call", "message") for own in open_ranks)
            self._loop.later(0.0 if in_calls else _LATER_CALLS_S, lambda: self._push_positions(group, name))

    def _push_positions(self, group: _Group, name: str) -> None:
        if not group.gathered:
            group.gathered = True
            self._push(group.ranks, Positions(group=name, ranks=[*group.positions.values()]))

    def _push_left(self) -> None:
        left, self._left = self._left, []
        for rank in range(len(self._members)):
            theirs = [each for each in left if rank in self._groups[each[0]].ranks]
            if theirs:
                self._send(rank, Left(ranks=theirs))
        for name in {each[0] for each in left}:
            group = self._groups[name]
            over = {own for own, but_for in group.left.items() if not but_for} | self._departed_in(group)
            if len(over) == len(group.ranks):
                del self._groups[name]

    def _departed_in(self, group: _Group) -> set[int]:
        return {own for own, rank in enumerate(group.ranks) if self._members[rank].departed is not None}
