"""Directory of workers, which lies in the job's store as a log.

Each worker has a number, its *incarnation*: a worker that comes back under an old name is another one, so names point
to the incarnation that bears them. A worker that is gone stays gone.

Keys: ``workers``, the newest of these numbers; ``count``, the number of the newest line; ``line/N``, which is read once
by each process: a worker that has come, one that makes no more calls, or one that is gone and why; ``name/NAME``, its
bearer, by which no two living workers have one name. So who is there costs one small request if nothing is new. A
process that dies between ``count`` and its line leaves a number without a line.

The ranks of a world *meet* at the first line at which each of them is a worker that makes calls; from the next line on
they have to come anew to meet again. All processes read this in the same lines. So a rank that is quick does not count
those that are about to leave, and one that has left before another looks has met it all the same.

A store that is gone with its host says nothing any more. What has been read is used then, so workers that know each
other go on; only those that nobody here has met cannot be found.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from phalanx.errors import ArgumentError, InitializationError, PhalanxError, RankError
from phalanx.system.host import this_host
from phalanx.wire.key import Key

__all__ = ["LEFT", "Departure", "Member", "Members", "needing_store", "shared_key"]

_NAME = r"[A-Za-z0-9_:.@-]{1,127}"
_STORE_S = 5.0  # far more than an answer takes; without one the store's host is gone
# What a request raises if the store is gone.
StoreGone = (dist.DistError, RuntimeError)
_Number = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]


class Departure(NamedTuple):
    """End of a worker.

    Attributes:
        left: it said so itself, as in ``rpc.shutdown()``; otherwise it is lost.
        why: how that was noticed, for people.
    """

    left: bool
    why: str


LEFT = Departure(True, "it has left")


@contextlib.contextmanager
def needing_store() -> Iterator[None]:
    """Raise an InitializationError if the store fails, in which a worker that waits for others would see them."""
    try:
        yield
    except PhalanxError:
        raise
    except StoreGone as error:
        raise InitializationError(
            "this worker waited for others and lost the job's store, through which they are found: has the process "
            f"that keeps it ended (rank 0, or the launcher)? Look at its output ({error})"
        ) from error


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

    name: Annotated[str, msgspec.Meta(pattern=rf"^{_NAME}\Z")]
    rank: _Number
    host: str
    pid: _Number
    incarnation: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    address: str = ""
    port: _Number = 0

    def __str__(self) -> str:
        where = f"pid {self.pid} on {self.host}"
        return f"{self.name} ({where})" if self.rank < 0 else f"{self.name} (rank {self.rank}, {where})"


def shared_key(store: Store, job: Key) -> Key:
    """Derive the key of the workers' connections from the job's, and a secret that the first worker puts in the store.

    Under a launcher that gives no key, whoever can read the store can join; with one, nobody else can.
    """
    with needing_store():
        found = store.compare_set("key", "", secrets.token_hex(32))
    return Key(job.secret + found, job.source or "the job's store")


class Members:
    """Directory of workers, as this process knows it. Safe to use from several threads.

    Args:
        store: the job's store, with a prefix of RPC's own.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asking = threading.Condition()  # guards the next two
        self._under_way = 0  # requests to the store
        self._closed = False
        atexit.register(self.close)
        self._lock = threading.Lock()  # guards the rest
        self._entries: dict[int, Member] = {}
        self._gone: dict[int, Departure] = {}
        self._came: dict[int, int] = {}  # the line of each worker
        self._over: dict[int, int] = {}  # the first line that says that a worker is done, or gone
        self._bearers: dict[str | int, int] = {}
        self._seen = 0  # the last number that this process knows of
        self._unread: set[int] = set()  # those of them whose lines it has not read

    def new(self, name: str, rank: int, pid: int, address: str, port: int) -> Member:
        """Make a worker with a number of its own, which nobody else knows of yet.

        Raises:
            ArgumentError: the name has characters that names may not have.
        """
        if not re.fullmatch(_NAME, name):
            raise ArgumentError(f"{name!r} is not a worker's name: letters, digits and _ : . @ -, at most 127 of them")
        return Member(name, rank, this_host().name, pid, int(self._ask("add", "workers", 1)), address, port)

    def join(self, me: Member, is_there: Callable[[Member], bool]) -> None:
        """Let the others find this process. It has to accept connections already.

        Args:
            me: this process, from :meth:`new`.
            is_there: whether another worker answers; asked if it has the same name.

        Raises:
            InitializationError: another living worker has the name.
        """
        own, before = json.dumps(asdict(me)), ""
        while (bearer := self._ask("compare_set", f"name/{me.name}", before, own).decode()) != own:
            earlier = Member(**json.loads(bearer))
            if not self.gone(earlier) and is_there(earlier):
                raise InitializationError(
                    f"a worker is called {me.name} already: {earlier}. Give each its own name: rpc.init(name=...)"
                )
            before = bearer
        self._write({"came": asdict(me)})

    def note_gone(self, member: Member, departure: Departure) -> None:
        """Note in this process that an incarnation is no more. The first reason stays."""
        with self._lock:
            self._entries.setdefault(member.incarnation, member)
            self._gone.setdefault(member.incarnation, departure)

    def leave(self, member: Member, departure: Departure) -> None:
        """Say to all workers that an incarnation is no more."""
        self.note_gone(member, departure)
        self._write({"gone": member.incarnation, "left": departure.left, "why": departure.why})

    def say_done(self, member: Member) -> None:
        """Note that a worker has no more calls to make, and waits until the others have none."""
        self._write({"done": member.incarnation})

    def close(self) -> None:
        """Ask the store no more, and return when no thread does.

        A store of torch's gives the interpreter's lock up while it waits. A thread that wants it back when the
        interpreter has ended would end the process: ``terminate called without an active exception``. So this is also
        called before a process ends that has not done so.
        """
        atexit.unregister(self.close)
        with self._asking:
            self._closed = True
            self._asking.wait_for(lambda: not self._under_way, _STORE_S)

    def gone(self, member: Member) -> Departure | None:
        """Return how this incarnation went; None if it is not known to be gone."""
        if member.incarnation not in self._gone:
            self.refresh()
        return self._gone.get(member.incarnation)

    def not_done(self, members: Sequence[Member]) -> list[Member]:
        """Return those who are still there, and for whom :meth:`say_done` was not called.

        Raises:
            RuntimeError: the store is gone.
        """
        self._read_new()
        return [each for each in members if each.incarnation not in self._over and each.incarnation not in self._gone]

    def find(self, to: str | int | Member) -> Member:
        """Return the newest worker of a name or a rank, which may be gone; a ``Member`` is found already.

        Raises:
            RankError: there has been none.
        """
        if isinstance(to, Member):
            return to
        known = self._entries.get(self._bearers.get(to, 0))
        if known is not None and known.incarnation not in self._gone:
            return known
        self.refresh()
        with self._lock:
            found = [each for each in self._entries.values() if to == (each.name if isinstance(to, str) else each.rank)]
            living = [member for member in found if member.incarnation not in self._gone]
            newest = max(living or found, key=lambda member: member.incarnation, default=None)
            if newest is not None:
                self._bearers[to] = newest.incarnation
                return newest
        names = ", ".join(sorted({member.name for member in self.all()})) or "nobody"
        what = f"no worker is called {to!r}" if isinstance(to, str) else f"no worker has the rank {to}"
        raise RankError(f"{what}; there are: {names}")

    def all(self) -> list[Member]:
        """Return all workers that are not known to be gone, by rank and name."""
        self.refresh()
        with self._lock:
            there = [member for number, member in self._entries.items() if number not in self._gone]
        return sorted(there, key=lambda member: (member.rank < 0, member.rank, member.name))

    def late(self, me: Member, size: int) -> list[int]:
        """Return the ranks that have not met this one, see the module's docstring; none if all have.

        Args:
            me: the worker of this rank, which has joined.
            size: how many ranks there are.

        Raises:
            InitializationError: the store is gone, so nobody who comes could be seen.
        """
        with needing_store():
            self._read_new()
        with self._lock:
            lines = [(number, who, True) for who, number in self._came.items()]
            lines += [(number, who, False) for who, number in self._over.items() if who in self._came]
            ranks = {who: self._entries[who].rank for who in self._came}
        there: dict[int, int] = {}
        for _, who, comes in sorted(lines):
            rank = ranks[who]
            if comes and 0 <= rank < size:
                there[rank] = who
            elif there.get(rank) == who:
                del there[rank]
            if len(there) == size:
                if there[me.rank] == me.incarnation:
                    return []
                there.clear()
        return [rank for rank in range(size) if rank not in there]

    def known(self, incarnation: int) -> Member | None:
        """Return the worker of this number, if this process has read its line; the store is not asked."""
        return self._entries.get(incarnation)

    def known_gone(self) -> list[Member]:
        """Return the workers that this process has met and knows to be gone; the store is not asked."""
        with self._lock:
            return [self._entries[number] for number in self._gone if number in self._entries]

    def refresh(self) -> None:
        """Read what is new in the store; nothing if the store is gone."""
        with contextlib.suppress(*StoreGone):
            self._read_new()

    def _read_new(self) -> None:
        count = int(self._ask("add", "count", 0))
        with self._lock:
            self._unread.update(range(self._seen + 1, count + 1))
            self._seen = max(self._seen, count)
            unread = sorted(self._unread)
        # Those that are missing are being written, or their processes have ended before that.
        there = self._written(unread)
        read = self._ask("multi_get", [f"line/{number}" for number in there]) if there else []
        lines = [(number, json.loads(line)) for number, line in zip(there, read, strict=True)]
        with self._lock:
            for number, line in lines:
                if "came" in line:
                    member = Member(**line["came"])
                    self._entries.setdefault(member.incarnation, member)
                    self._came[member.incarnation] = number
                    continue
                who = line.get("done") or line["gone"]
                self._over[who] = min(number, self._over.get(who, number))
                if "gone" in line:
                    self._gone.setdefault(who, Departure(line["left"], line["why"]))
            self._unread.difference_update(there)

    def _written(self, numbers: list[int]) -> list[int]:
        """Return the numbers that have lines, in few requests if nearly all have."""
        if not numbers or self._ask("check", [f"line/{number}" for number in numbers]):
            return numbers
        half = len(numbers) // 2
        return self._written(numbers[:half]) + self._written(numbers[half:]) if half else []

    def _write(self, line: dict[str, Any]) -> None:
        self._ask("set", f"line/{self._ask('add', 'count', 1)}", json.dumps(line))

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._asking:
            if self._closed:
                raise dist.DistStoreError("this worker has been closed, and asks the job's store no more")
            self._under_way += 1
        try:
            return getattr(self._store, name)(*arguments)
        finally:
            with self._asking:
                self._under_way -= 1
                self._asking.notify_all()
