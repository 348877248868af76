"""Liveness of the ranks of a job over several hosts: one rank's side.

A membership is a star. Rank 0's process has the registrar (``registrar.py``), every other rank one session to it. The
session is the only sign of life: the kernel ends it with the process, and within some 4 s if the other host
acknowledges nothing. A process that is stopped, or whose interpreter is held, keeps it.

The world's group makes the membership; a group of some ranks uses that of the world, or makes its own where the world
has none. It ends with its last group, and with rank 0's last group for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import msgspec
from torch._C._distributed_c10d import Store

from phalanx.diagnosis.snapshot import RankSnapshot, snapshots_from
from phalanx.errors import InitializationError
from phalanx.membership.loop import Channel, Loop, was_silent
from phalanx.membership.protocol import (
    KEEP_ALIVE,
    ROLE,
    Answer,
    Ask,
    Departed,
    Hello,
    Message,
    OfGroup,
    Way,
    decode,
    encode,
)
from phalanx.membership.registrar import WELCOME, Registrar, await_end
from phalanx.system.exit_order import Stage, at_exit
from phalanx.wire.dial import dial
from phalanx.wire.key import job_key

__all__ = ["Gone", "Membership", "Subscriber", "gone_ranks", "set_world", "world_membership"]

_KEY = "registrar"  # in the part of the store in which the ranks meet
_CLOSING_S = 2.0
_ANSWER_S = 3.0  # how long another host may take to say what its ranks do: it may have to ask them
_RECORDS = 32  # of each rank, beside those that show which collectives it has come to


@dataclass(frozen=True)
class Gone:
    """A rank that has gone.

    Attributes:
        way: ``ended``: its process is gone; ``replaced``: that runs another program; ``failed``: an exception, or an
            exit with a code other than 0, ended its script; ``left``: it closed its groups, or its script is over;
            ``silent``: its host acknowledges nothing.
        text: how one has ended, as ``by signal 9 (SIGKILL)``; why one has failed.
    """

    pid: int
    host: str
    way: str
    text: str = ""

    @property
    def words(self) -> str:
        """The way it has gone, for people."""
        match self.way:
            case Way.LEFT:
                return "has left in order (it destroyed its groups, or its script has come to its end)"
            case Way.REPLACED:
                return "has replaced itself by another program (exec)"
            case Way.SILENT:
                return "cannot be reached (its host acknowledges nothing)"
            case Way.FAILED:
                return f"has failed ({self.text})" if self.text else "has failed"
        return f"has ended {self.text}" if self.text else "has ended"

    @property
    def remedy(self) -> str:
        """The next step."""
        if self.way == Way.LEFT:
            return "Every rank must make the same groups before it leaves"
        if self.way == Way.REPLACED:
            return "Let it start the program as a child process"
        return "Look at that rank's own output for the cause"


class Subscriber(Protocol):
    """A group; called on the loop's thread, so it must not wait."""

    def take(self, message: Message) -> None:
        """Take a message about the group."""

    def look(self) -> float | None:
        """Conclude what follows from what is known; return in how many seconds to look again, None for never."""


class Membership:
    """One process's side. :meth:`meet` makes it.

    =====================================  ===========  ==========  =====================================
    field                                  writer       readers     guard
    =====================================  ===========  ==========  =====================================
    ``departed``, ``connected``            the loop     any thread  one step of Python's, then ``changed``
    ``_groups``                            any thread   the loop    one step of Python's
    ``_users``, ``_closed``, ``_answers``  any thread   any thread  ``changed``
    everything else                        the loop     the loop
    =====================================  ===========  ==========  =====================================

    Args:
        rank: this process's rank.
        hosts, names: the number and the name of each rank's host.

    Attributes:
        changed: notified after everything that the loop has learned.
        departed: the ranks that have gone, each with how, and when this one learned it.
        connected: the registrar can be reached, as far as this one knows.
        answer: tells other hosts what the ranks of this one do; empty if another rank here does. Set once.
    """

    def __init__(self, rank: int, hosts: Sequence[int], names: Sequence[str]) -> None:
        self.rank = rank
        self._hosts, self._names = hosts, names
        self.changed = threading.Condition(threading.RLock())  # a signal handler may close a group
        self.departed: dict[int, tuple[Departed, float]] = {}
        self.connected = True
        self.answer: Callable[[], Sequence[RankSnapshot]] = list
        self._groups: dict[str, Subscriber] = {}
        self._users, self._closed = 1, False
        self._answers: list[list[list[Any]]] = []  # to each question
        self._will_look = False
        self._registrar_pid = 0
        self._loop = Loop("phalanx-membership")
        self._channel: Channel | None = None
        self._registrar: Registrar | None = None
        if rank == 0:
            self._registrar = Registrar(self._loop, hosts, names, self._take_later)
        _alive[id(self)] = self

    @classmethod
    def meet(
        cls, store: Store, rank: int, hosts: Sequence[int], names: Sequence[str], timeout: timedelta
    ) -> Membership:
        """Make it. Every rank calls this, with a part of the job's store where nobody has met before.

        Raises:
            InitializationError: rank 0 has gone, did not come in time, or cannot be reached.
        """
        made = cls(rank, hosts, names)
        try:
            if made._registrar is not None:
                store.set(_KEY, json.dumps(made._registrar.address))
            else:
                store.wait([_KEY], timeout)
                made._dial(json.loads(store.get(_KEY)), timeout.total_seconds())
            made._loop.start()
        except BaseException as error:
            made._give_back()
            if isinstance(error, OSError):
                raise InitializationError(f"rank {rank} cannot reach rank 0's registrar of ranks: {error}") from error
            raise
        return made

    # -- from any thread ---------------------------------------------------------------------------

    def retain(self) -> Membership | None:
        """Have it for one more group; None if it has ended."""
        with self.changed:
            self._users += not self._closed
            return None if self._closed else self

    def release(self) -> None:
        """Need it for one group less; with the last one it ends."""
        with self.changed:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self.end()

    def subscribe(self, group: str, subscriber: Subscriber) -> None:
        """Have a group told of its messages, and asked to look."""
        self._groups[group] = subscriber

    def unsubscribe(self, group: str) -> None:
        """Tell a group nothing more."""
        self._groups.pop(group, None)

    def send(self, message: Message) -> None:
        """Send the registrar a message."""
        self._loop.call(lambda: self._send(message))

    def later(self, seconds: float, task: Callable[[], object]) -> None:
        """Do something on the loop's thread in so many seconds."""
        self._loop.call(lambda: self._loop.later(seconds, task))

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something is so that the loop learns; return whether it is."""
        if threading.current_thread() is self._loop.thread:
            return condition()
        with self.changed:
            return self.changed.wait_for(condition, timeout_s)

    def ask(self, over: Callable[[], bool]) -> list[RankSnapshot]:
        """Ask what the ranks of other hosts do, for some seconds at most, unless that is ``over``.

        The first rank of each host that is not stopped answers for all there. If none does, the host is silent: its
        ranks are stopped, or something holds their interpreters. Nothing is returned if the registrar cannot be asked.
        """
        answers: list[list[Any]] = []
        with self.changed:
            self._answers.append(answers)
            number = len(self._answers) - 1
        self.send(Ask(number))
        others = [rank for rank, host in enumerate(self._hosts) if host != self._hosts[self.rank]]
        hosts = len({self._hosts[rank] for rank in others})
        until = time.monotonic() + _ANSWER_S
        while self.connected and time.monotonic() < until and not over():
            if self.wait_for(lambda: len(answers) >= hosts, 0.1):
                break
        if not self.connected:
            return []
        found = {rank: RankSnapshot(rank, silent=True) for rank in others}
        for answer in [*answers]:
            with contextlib.suppress(ValueError):
                found.update({each.rank: each for each in snapshots_from(answer) if each.rank in found})
        return [self.named(each) for each in found.values()]

    def named(self, seen: RankSnapshot) -> RankSnapshot:
        """The same with the name of its host."""
        return msgspec.structs.replace(seen, host=self._names[seen.rank])

    def end(self) -> None:
        """Say that this rank leaves, and end the thread and the session."""
        with self.changed:
            was_closed, self._closed = self._closed, True

        def end() -> None:
            self._send(Departed(self.rank, Way.LEFT))
            self._give_back()

        if not was_closed and not self._loop.call(end):
            self._give_back()

    def join(self) -> None:
        """Wait until the thread has ended, for a limited time."""
        if self._loop.thread is not threading.current_thread() and self._loop.thread.ident is not None:
            self._loop.thread.join(_CLOSING_S)

    def let_go(self) -> None:
        """Forget everything in a forked child, in which the loop has closed its files."""
        self.changed = threading.Condition(threading.RLock())
        self.connected, self._closed = False, True

    # -- the loop's thread -------------------------------------------------------------------------

    def _give_back(self) -> None:
        self._closed = True
        _alive.pop(id(self), None)
        if self._registrar is not None:
            self._registrar.close()
        if self._channel is not None:
            self._channel.finish(_CLOSING_S)
        self._loop.stop()

    def _send(self, message: Message) -> None:
        if self._registrar is not None:
            self._registrar.take(0, message)
        elif self._channel is not None:
            self._channel.say(encode(message))

    def _take_later(self, message: Message) -> None:
        self._loop.call(lambda: self._take(message))

    def _take(self, message: Message) -> None:
        if isinstance(message, Departed):
            self._note_departed(message)
            if message.rank == 0 and message.way == Way.LEFT:
                self.connected = False
        elif isinstance(message, Ask):
            if snapshots := self.answer():
                self._send(Answer(message.number, message.asker, [each.to_json(_RECORDS) for each in snapshots]))
        elif isinstance(message, Answer):
            self._answers[message.number].append(message.snapshots)
        elif isinstance(message, OfGroup) and (group := self._groups.get(message.group)) is not None:
            group.take(message)
        self._tell()

    def _tell(self) -> None:
        """Tell all who wait that something has been learned."""
        with self.changed:
            self.changed.notify_all()
        self._look()

    def _look(self) -> None:
        dues = [due for group in list(self._groups.values()) if (due := group.look()) is not None]
        if dues and not self._will_look:
            self._will_look = True
            self._loop.later(min(dues), self._look_again)

    def _look_again(self) -> None:
        self._will_look = False
        self._look()

    def _note_departed(self, departed: Departed) -> None:
        self.departed.setdefault(departed.rank, (departed, time.monotonic()))

    # -- the session -------------------------------------------------------------------------------

    def _dial(self, address: tuple[str, int, int], patience_s: float) -> None:
        host, port, self._registrar_pid = address
        claim = msgspec.msgpack.encode(Hello(self.rank, os.getpid()))
        line, verdict = dial((host, port), job_key(), ROLE, claim, patience_s=patience_s, keep_alive=KEEP_ALIVE)
        if verdict != WELCOME:
            line.close()
            raise ConnectionRefusedError("another process listens there")
        self._channel = Channel(self._loop, line.sock, line.session, lambda data: self._take(decode(data)))
        self._channel.ended = self._lose

    def _lose(self, why: Exception | None) -> None:
        self._channel = None
        if not self.connected:
            return  # rank 0 has said that it leaves
        if was_silent(why):
            beside = [rank for rank, host in enumerate(self._hosts) if host == self._hosts[0]]
            self._lose_registrar(*(Departed(rank, Way.SILENT) for rank in beside))
        else:
            await_end(self._loop, 0, self._names[0], self._registrar_pid, self._lose_registrar)

    def _lose_registrar(self, *departed: Departed) -> None:
        for each in departed:
            self._note_departed(each)
        self.connected = False
        self._tell()


# Memberships that have not ended, by identity; each adds and removes itself in one step of Python's.
_alive: dict[int, Membership] = {}


# -- the world: which of its ranks have gone -------------------------------------------------------------
#
# A store cannot know that a rank will never write a key. But a process that makes a further group has the world's
# communicator, which looks after its ranks, whichever store they met in. A group of some ranks would know less: one
# that has left it may be there for another.


class World(Protocol):
    """The communicator of the world."""

    def gone(self, ranks: Collection[int]) -> dict[int, Gone]:
        """Return those of these ranks that have gone; none if this rank has closed it. It may take a second."""
        ...


# As long as they exist. Each is one reference, which the thread that makes the world replaces whole.
_world: weakref.ref[World] | None = None
_membership: weakref.ref[Membership] | None = None


def set_world(world: World, membership: Membership | None = None) -> None:
    """Ask this one from now on, and have further groups use its membership, if it has one."""
    global _world, _membership
    _world = weakref.ref(world)
    _membership = None if membership is None else weakref.ref(membership)


def world_membership() -> Membership | None:
    """Return that of the world, for one more group; None if the world has none."""
    found = None if _membership is None else _membership()
    return None if found is None else found.retain()


def gone_ranks(ranks: Collection[int]) -> dict[int, Gone] | None:
    """Return those of these ranks of the world that have gone, as far as is known; None without a world."""
    world = None if _world is None else _world()
    return None if world is None else world.gone(ranks)


def _at_exit() -> None:
    ending = list(_alive.values())
    for each in ending:
        each.end()
    for each in ending:
        each.join()


def _after_fork() -> None:
    for each in list(_alive.values()):
        each.let_go()
    _alive.clear()


at_exit(Stage.END_MEMBERSHIP, _at_exit)
os.register_at_fork(after_in_child=_after_fork)
