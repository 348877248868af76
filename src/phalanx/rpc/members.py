"""The workers of a job, in its store: who there is, and at which address.

Every process that joins takes the next number, its *incarnation*, and writes an entry under it, which never changes. A
name points to the incarnation that bears it. Entries are kept in this process once they have been read, so only what is
new costs a request to the store.

Keys: ``count``, the last number; ``entry/N``; ``name/NAME``, the number of its bearer; ``done/N``, that it makes no
more calls; ``gone/N``, why an incarnation is no more, written by itself when it leaves, or by the first worker that
found it lost; ``goings``, how often that was written.

A store that is gone with its host says nothing any more. What has been read is used then, so workers that know each
other go on; only those that nobody here has met cannot be found.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from phalanx.errors import ArgumentError, InitializationError, RankError
from phalanx.rpc.ending_store import EndingStore
from phalanx.system.host import this_host
from phalanx.wire.key import Key

__all__ = ["LEFT", "Departure", "Member", "Members", "shared_key", "store_lost"]

_NAME = re.compile(r"[A-Za-z0-9_:.@-]{1,127}")
_KINDS: dict[str, type] = {
    "name": str,
    "rank": int,
    "host": str,
    "pid": int,
    "incarnation": int,
    "address": str,
    "port": int,
}


class Departure(NamedTuple):
    """End of a worker.

    Attributes:
        left: it said so itself, as in ``rpc.shutdown()``; otherwise it is lost.
        why: how that was noticed, for people.
    """

    left: bool
    why: str


LEFT = Departure(True, "it has left")


def store_lost(error: Exception) -> InitializationError:
    """The error of a worker that waits for others, if the store fails in which it would see them."""
    return InitializationError(
        "this worker waited for others and lost the job's store, through which they are found: has the process "
        f"that keeps it ended (rank 0, or the launcher)? Look at its output ({error})"
    )


@dataclass(frozen=True)
class Member:
    """A worker, in its present incarnation.

    Attributes:
        name: unique among the living workers of the job.
        rank: its rank in the world, or its number in torch's API; -1 for a worker that is no rank.
        host, pid: where it is, for people.
        incarnation: a number that no other worker of this job has had, and no earlier one of this name.
        address, port: where it accepts connections.
    """

    name: str
    rank: int
    host: str
    pid: int
    incarnation: int
    address: str = ""
    port: int = 0

    @staticmethod
    def from_claim(said: Any) -> Member:
        """The worker that a caller says it is.

        Raises:
            ValueError: no worker is like that.
        """
        if not isinstance(said, dict) or said.keys() != _KINDS.keys():
            raise ValueError("not the attributes of a worker")
        if any(type(said[name]) is not kind for name, kind in _KINDS.items()):
            raise ValueError("an attribute of a worker is of another type")
        numbers = [said[name] for name, kind in _KINDS.items() if kind is int]
        if (
            not _NAME.fullmatch(said["name"])
            or said["incarnation"] < 1
            or not -2 < min(numbers) <= max(numbers) < 1 << 63
        ):
            raise ValueError("no worker is like that")
        return Member(**said)

    def __str__(self) -> str:
        where = f"pid {self.pid} on {self.host}"
        return f"{self.name} ({where})" if self.rank < 0 else f"{self.name} (rank {self.rank}, {where})"


def shared_key(store: Store, job: Key) -> Key:
    """The key of the workers' connections: from the job's, and a secret that the first worker has put into the store.

    Under a launcher that gives no key, whoever can read the store can join; with one, nobody else can.
    """
    own = secrets.token_hex(32)
    found = store.compare_set("key", "", own)
    return Key(job.secret + found, job.source or "the job's store")


class Members:
    """The directory of workers, as this process knows it. Safe to use from several threads.

    Args:
        store: the job's store, with a prefix of RPC's own.
    """

    def __init__(self, store: Store) -> None:
        self._store = EndingStore(store)
        self._lock = threading.Lock()
        self._entries: dict[int, Member] = {}
        self._gone: dict[int, Departure] = {}
        self._bearers: dict[str | int, int] = {}
        self._seen = 0  # the last number that this process knows of
        self._unread: set[int] = set()  # those of them whose entries it has not read
        self._goings = 0  # the number in the store when it was last asked who is gone
        self._done: set[int] = set()

    def new(self, name: str, rank: int, pid: int, address: str, port: int) -> Member:
        """A worker with a number of its own, which nobody else knows of yet.

        Raises:
            ArgumentError: the name has characters that names may not have.
        """
        if not _NAME.fullmatch(name):
            raise ArgumentError(f"{name!r} is not a worker's name: letters, digits and _ : . @ -, at most 127 of them")
        return Member(name, rank, this_host().name, pid, int(self._store.add("count", 1)), address, port)

    def join(self, me: Member, is_there: Callable[[Member], bool]) -> None:
        """Let the others find this process. It has to accept connections already.

        Args:
            me: this process, from :meth:`new`.
            is_there: whether another worker answers; asked if it has the same name.

        Raises:
            InitializationError: another living worker has the name.
        """
        incarnation, name = me.incarnation, me.name
        self._store.set(f"entry/{incarnation}", json.dumps(asdict(me)))
        before = ""
        while True:
            bearer = self._store.compare_set(f"name/{name}", before, str(incarnation)).decode()
            if bearer == str(incarnation):
                return
            earlier = self._entry(int(bearer))
            if earlier is not None and not self.gone(earlier) and is_there(earlier):
                self.leave(me, Departure(True, "its name was refused"))
                raise InitializationError(
                    f"a worker is called {name} already: {earlier}. Give each its own name: rpc.init(name=...)"
                )
            before = bearer

    def note_gone(self, member: Member, departure: Departure) -> None:
        """Note in this process that an incarnation is no more. The first reason stays."""
        with self._lock:
            self._entries.setdefault(member.incarnation, member)
            self._gone.setdefault(member.incarnation, departure)

    def leave(self, member: Member, departure: Departure) -> None:
        """Say to all workers that an incarnation is no more. The first reason in the store stays."""
        self.note_gone(member, departure)
        first = Departure(*json.loads(self._store.compare_set(f"gone/{member.incarnation}", "", json.dumps(departure))))
        with self._lock:
            self._gone[member.incarnation] = first
        if first == departure:
            self._store.add("goings", 1)  # else somebody has said so already

    def close(self) -> None:
        """Ask the store no more, and return when no thread does."""
        self._store.close()

    def gone(self, member: Member) -> Departure | None:
        """Return how this incarnation went; None if it is not known to be gone."""
        with self._lock:
            known = self._gone.get(member.incarnation)
        if known is not None:
            return known
        key = f"gone/{member.incarnation}"
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone
            if self._store.check([key]):
                known = Departure(*json.loads(self._store.get(key)))
                with self._lock:
                    self._gone[member.incarnation] = known
        return known

    def say_done(self, member: Member) -> None:
        """Note that a worker has no more calls to make, and waits until the others have none."""
        self._store.set(f"done/{member.incarnation}", "1")

    def not_done(self, members: Sequence[Member]) -> list[Member]:
        """Those who are still there, and for whom :meth:`say_done` was not called.

        Raises:
            RuntimeError: the store is gone.
        """
        asked = [member.incarnation for member in members if member.incarnation not in self._done]
        missing = self._missing("done", asked)
        self._done.update({member.incarnation for member in members} - set(missing))
        waited_for = [member for member in members if member.incarnation in missing]
        if waited_for:
            self._look_who_is_gone()
        return [member for member in waited_for if member.incarnation not in self._gone]

    def find(self, to: str | int) -> Member:
        """The newest worker of a name or a rank, which may be gone.

        Raises:
            RankError: there has been none.
        """
        with self._lock:
            known = self._entries.get(self._bearers.get(to, 0))
            if known is not None and known.incarnation not in self._gone:
                return known
        member = self._bearer(to) if isinstance(to, str) else self._of_rank(to)
        if member is None:
            names = ", ".join(sorted({member.name for member in self.all()})) or "nobody"
            what = f"no worker is called {to!r}" if isinstance(to, str) else f"no worker has the rank {to}"
            raise RankError(f"{what}; there are: {names}")
        with self._lock:
            self._bearers[to] = member.incarnation
        return member

    def all(self) -> list[Member]:
        """All workers that are not known to be gone, by rank and name."""
        self.refresh()
        with self._lock:
            entries = list(self._entries.values())
        self._look_who_is_gone()
        living = [member for member in entries if member.incarnation not in self._gone]
        return sorted(living, key=lambda member: (member.rank < 0, member.rank, member.name))

    def ranks_seen(self) -> set[int]:
        """The ranks of all workers that have ever come, though some may have gone since.

        Raises:
            InitializationError: the store is gone, so nobody who comes could be seen.
        """
        try:
            self._read_new()
        except (dist.DistError, RuntimeError) as error:
            raise store_lost(error) from error
        with self._lock:
            return {member.rank for member in self._entries.values()}

    def refresh(self) -> list[Member]:
        """Read the entries that are new in the store; return them. There are none if the store is gone."""
        try:
            return self._read_new()
        except (dist.DistError, RuntimeError):
            return []

    def _read_new(self) -> list[Member]:
        count = int(self._store.add("count", 0))
        with self._lock:
            self._unread.update(range(self._seen + 1, count + 1))
            self._seen = max(self._seen, count)
            unread = sorted(self._unread)
        # Those that are missing are being written, or their processes have ended before that.
        missing = set(self._missing("entry", unread))
        there = [number for number in unread if number not in missing]
        read = self._store.multi_get([f"entry/{number}" for number in there]) if there else []
        new = [Member(**json.loads(entry)) for entry in read]
        with self._lock:
            new = [self._entries.setdefault(member.incarnation, member) for member in new]
            self._unread.difference_update(there)
        for member in new:
            self.gone(member)
        return new

    def beside(self, known: Collection[int]) -> list[Member]:
        """The workers beside those with these numbers that are not known to be gone."""
        self.refresh()
        with self._lock:
            others = [member for number, member in self._entries.items() if number not in known]
        return [member for member in others if not self.gone(member)]

    def known(self, incarnation: int) -> Member | None:
        """The worker of this number, if this process has read its entry; the store is not asked."""
        with self._lock:
            return self._entries.get(incarnation)

    def known_gone(self) -> list[Member]:
        """The workers that this process has met and knows to be gone; the store is not asked."""
        with self._lock:
            return [self._entries[number] for number in self._gone if number in self._entries]

    def _missing(self, kind: str, numbers: list[int]) -> list[int]:
        """The numbers for which the store has no key of a kind, in few requests if they are few, or nearly all."""
        if not numbers or self._store.check([f"{kind}/{number}" for number in numbers]):
            return []
        if len(numbers) == 1:
            return numbers
        half = len(numbers) // 2
        return self._missing(kind, numbers[:half]) + self._missing(kind, numbers[half:])

    def _look_who_is_gone(self) -> None:
        try:
            goings = int(self._store.add("goings", 0))
        except (dist.DistError, RuntimeError):  # the store is gone
            return
        if goings != self._goings:
            with self._lock:
                known = list(self._entries.values())
            for member in known:
                self.gone(member)
            self._goings = goings

    def _bearer(self, name: str) -> Member | None:
        key = f"name/{name}"
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone
            if self._store.check([key]):
                return self._entry(int(self._store.get(key)))
        self.refresh()  # a worker writes its entry first, and then that it bears the name
        with self._lock:
            known = [member for member in self._entries.values() if member.name == name]
        return max(known, key=lambda member: member.incarnation, default=None)

    def _of_rank(self, rank: int) -> Member | None:
        self.refresh()
        with self._lock:
            found = [member for member in self._entries.values() if member.rank == rank]
        living = [member for member in found if not self.gone(member)]
        return max(living or found, key=lambda member: member.incarnation, default=None)

    def _entry(self, number: int) -> Member | None:
        with self._lock:
            known = self._entries.get(number)
        key = f"entry/{number}"
        if known is not None or not self._store.check([key]):
            return known
        member = Member(**json.loads(self._store.get(key)))
        with self._lock:
            self._entries[number] = member
        return member
