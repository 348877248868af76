"""Who holds which remote reference: the tables behind torch's ``RRef``, on its owner and on its users.

The owner of a value knows every reference to it (a *fork*) and the worker that holds it, and drops the value with the
last one. A reference that is handed on reaches the owner's table before the one it was made from can go:

- the owner enters a fork when it sends the reference, so the receiver has nothing to ask for;
- a user keeps its own reference until the receiver reports that the owner knows the new one; and the receiver runs no
  function on a reference that the owner has not confirmed.

References that have been collected are reported to the owner many at a time, by one thread. A worker that is lost
holds nothing any more: its forks go with it, and so does what was kept for its sake.

Every table is read and written under one lock. A reference's ``__del__`` may run on any thread, inside of any of these
methods, so it only puts a note into a queue, which is safe there.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.errors import ClosedError, PhalanxError
from phalanx.rpc.agent import Agent, Incoming, Member
from phalanx.rpc.future import Future
from phalanx.system.threads import start

__all__ = ["FORKED", "Forked", "Identity", "Owned", "Owner", "References", "User"]

SERVICE = "torch.rref"
FORKED, ACCEPTED, DROPPED = "forked", "accepted", "dropped"

_local_numbers = itertools.count()


class Identity(NamedTuple):
    """What names a value or a reference: the worker that made it, in which incarnation, and a number there."""

    created_on: int
    local_id: int
    incarnation: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


class Owner(NamedTuple):
    """The worker that has a value: its name, its number in torch's API, and its incarnation."""

    name: str
    rank: int
    incarnation: int


class Owned:
    """A value on its owner.

    Attributes:
        identity: its name.
        value: ends with the value, or with what the function raised that should have made it.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.value: Future[Any] = Future()

    def __str__(self) -> str:
        return f"OwnerRRef({self.identity})"


class User:
    """A reference on a worker that is not the owner.

    Attributes:
        identity, fork, owner: the value, this reference, and where the value is.
        confirmed: ends when the owner knows this reference.
        deleted: whether it was given up at shutdown.
        failure: why the value was never made, if so; a use of the reference raises that.
    """

    def __init__(self, identity: Identity, fork: Identity, owner: Owner, dropped: queue.SimpleQueue[Any]) -> None:
        self.identity, self.fork, self.owner = identity, fork, owner
        self.confirmed: Future[None] = Future()
        self.deleted = False
        self.failure: BaseException | None = None
        self._dropped = dropped

    def __str__(self) -> str:
        return f"UserRRef(RRefId = {self.identity}, ForkId = {self.fork})"

    def in_errors(self) -> str:
        """The reference as torch writes it in errors."""
        return f"UserRRef(rref_id={self.identity}, fork_id={self.fork})"

    def give_up(self) -> None:
        """Have the owner told that this reference is no more, once."""
        if not self.deleted:
            self.deleted = True
            self._dropped.put((self.owner, self.identity, self.fork))

    def __del__(self) -> None:
        self.give_up()


class Forked(NamedTuple):
    """A reference as it travels in a message."""

    identity: Identity
    fork: Identity
    owner: Owner
    parent: Owner


class References:
    """The references of one process, from ``init_rpc`` to ``shutdown``.

    Args:
        agent: sends the messages about them.
        rank: this worker's number in torch's API.
    """

    def __init__(self, agent: Agent, rank: int) -> None:
        self._agent = agent
        self.me = Owner(agent.me.name, rank, agent.me.incarnation)
        self._changed = threading.Condition()
        self._values: dict[Identity, Owned] = {}
        self._awaited: dict[Identity, Future[Owned]] = {}  # asked for before the call that makes the value has come
        self._forks: dict[Identity, dict[Identity, int]] = {}  # value -> fork -> the holder's incarnation, 0 if unknown
        self._unconfirmed: dict[Identity, User] = {}
        self._confirmed: weakref.WeakValueDictionary[Identity, User] = weakref.WeakValueDictionary()
        self._handed_on: dict[Identity, tuple[User, int]] = {}  # new fork -> what it was made from, for whom
        self._dropped: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asking = 0
        self._thread = threading.local()
        agent.serve(SERVICE, self._serve, quick=True)
        agent.on_change(self._on_change)
        self._reporter = threading.Thread(target=self._report, name="phalanx-rpc-references", daemon=True)
        start(self._reporter)

    # Making them

    def new_identity(self) -> Identity:
        """A name that nothing else in this job has."""
        return Identity(self.me.rank, next(_local_numbers), self.me.incarnation)

    def new_value(self) -> Owned:
        """A value of this process; others do not know it before it is sent to one."""
        return Owned(self.new_identity())

    def new_user(self, member: Member) -> User:
        """A reference to a value that ``member`` is about to make."""
        owner = Owner(member.name, member.rank, member.incarnation)
        user = User(self.new_identity(), self.new_identity(), owner, self._dropped)
        with self._changed:
            self._unconfirmed[user.fork] = user
        return user

    def confirm(self, user: User, failure: BaseException | None = None) -> None:
        """The owner knows a reference, or its value could not be made."""
        with self._changed:
            user.failure = failure
            if self._unconfirmed.pop(user.fork, None) is not None:
                self._confirmed[user.fork] = user
            self._changed.notify_all()
        user.confirmed.set_result(None)

    # Handing them on

    def hand_on(self, reference: Owned | User) -> Forked:
        """A reference as it travels; called while a message is made, and :meth:`sent_to` says for whom."""
        if isinstance(reference, User) and reference.deleted:
            raise PhalanxError(
                f"{reference.in_errors()} has been deleted. Cannot call fork an UserRRef after deletion."
            )
        fork = self.new_identity()
        with self._changed:
            if isinstance(reference, Owned):
                self._values[reference.identity] = reference
                self._forks.setdefault(reference.identity, {})[fork] = 0
                owner = self.me
            else:
                self._handed_on[fork] = reference, 0
                owner = reference.owner
        self._made().append((reference.identity, fork))
        return Forked(reference.identity, fork, owner, self.me)

    def sent_to(self, member: Member) -> None:
        """The references that this thread has handed on since the last call are for ``member``."""
        made, self._thread.made = self._made(), []
        with self._changed:
            for identity, fork in made:
                if fork in self._forks.get(identity, ()):
                    self._forks[identity][fork] = member.incarnation
                elif fork in self._handed_on:
                    self._handed_on[fork] = self._handed_on[fork][0], member.incarnation

    def receive(self, forked: Forked) -> Owned | User:
        """The reference that has come in a message."""
        identity, fork, owner, parent = forked
        if owner.incarnation == self.me.incarnation:
            value = self.own(identity)
            if parent.incarnation == self.me.incarnation:
                self._drop(identity, fork)
            else:
                self._tell(parent, (ACCEPTED, fork))
            return value
        user = User(identity, fork, owner, self._dropped)
        if parent.incarnation == owner.incarnation:
            with self._changed:
                self._confirmed[fork] = user
            user.confirmed.set_result(None)
            return user
        with self._changed:
            self._unconfirmed[fork] = user
            self._asking += 1
        received = getattr(self._thread, "received", None)
        if received is not None:
            received.append(user)
        asked = self._agent.request(self.member(owner), SERVICE, (FORKED, identity, fork), asked="RRef fork")
        asked.add_done_callback(lambda done: self._forked(done, user, parent))
        return user

    def _forked(self, done: Future[Any], user: User, parent: Owner) -> None:
        failure = None
        try:
            done.wait(0)
        except Exception as error:
            failure = error
        self.confirm(user, failure)
        self._tell(parent, (ACCEPTED, user.fork))
        with self._changed:
            self._asking -= 1

    def collect_received(self) -> list[User]:
        """From now on, note the references that this thread receives before their owners know them; return the list."""
        received: list[User] = []
        self._thread.received = received
        return received

    def stop_collecting(self) -> None:
        """The end of what :meth:`collect_received` began."""
        self._thread.received = None

    # The owner's side

    def own(self, identity: Identity) -> Owned:
        """The value of this name, known to the others from now on; it may have no content yet."""
        with self._changed:
            value = self._values.get(identity)
            if value is None:
                value = self._values[identity] = Owned(identity)
            awaited = self._awaited.pop(identity, None)
        if awaited is not None:
            awaited.set_result(value)
        return value

    def keep(self, value: Owned, fork: Identity, holder: int) -> None:
        """Enter a value and a reference to it."""
        with self._changed:
            self._values[value.identity] = value
            self._forks.setdefault(value.identity, {})[fork] = holder
            awaited = self._awaited.pop(value.identity, None)
        if awaited is not None:
            awaited.set_result(value)
        self._drop_if_gone(holder, value.identity, fork)

    def release(self, identity: Identity, fork: Identity) -> None:
        """A reference is no more."""
        self._drop(identity, fork)

    def find(self, identity: Identity) -> Future[Owned]:
        """A future of a value of this process; the call that makes it may still be on its way."""
        with self._changed:
            value = self._values.get(identity)
            if value is None:
                return self._awaited.setdefault(identity, Future())
        found: Future[Owned] = Future()
        found.set_result(value)
        return found

    def _serve(self, incoming: Incoming, message: tuple[Any, ...]) -> None:
        verb, *rest = message
        if verb == FORKED:
            identity, fork = rest
            with self._changed:  # the call that makes the value may come later
                self._forks.setdefault(identity, {})[fork] = incoming.peer.incarnation
            self._drop_if_gone(incoming.peer.incarnation, identity, fork)
        elif verb == ACCEPTED:
            with self._changed:
                kept = self._handed_on.pop(rest[0], None)
                self._changed.notify_all()
            del kept
        elif verb == DROPPED:
            for identity, fork in rest[0]:
                self._drop(identity, fork)

    def _drop(self, identity: Identity, fork: Identity) -> None:
        value = None
        with self._changed:
            forks = self._forks.get(identity)
            if forks is not None:
                forks.pop(fork, None)
                if not forks:
                    del self._forks[identity]
                    value = self._values.pop(identity, None)
            self._changed.notify_all()
        if value is not None:
            self._dropped.put(value)  # its destructor may be long, and is not for this thread

    def _drop_if_gone(self, holder: int, identity: Identity, fork: Identity) -> None:
        """Of a reference that has just been entered: its holder may have died since it sent word of it."""
        if any(member.incarnation == holder for member in self._agent.known_gone()):
            self._drop(identity, fork)

    # Ends

    def _on_change(self, member: Member, how: str) -> None:
        if how in ("left", "lost"):
            self.forget(member)

    def forget(self, member: Member) -> None:
        """A worker is gone: it holds nothing any more, and its values are lost."""
        gone = member.incarnation
        with self._changed:
            forks = [(value, fork) for value, held in self._forks.items() for fork, who in held.items() if who == gone]
            kept = [self._handed_on.pop(fork) for fork, (_, who) in list(self._handed_on.items()) if who == gone]
            orphans = [user for user in self._unconfirmed.values() if user.owner.incarnation == gone]
        for value, fork in forks:
            self._drop(value, fork)
        for user in orphans:
            self.confirm(user, PhalanxError(f"{member} is gone, and with it the value of {user}"))
        del kept

    def _report(self) -> None:
        """Tell owners of references that are no more; ends with a None in the queue."""
        while True:
            batch = [self._dropped.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._dropped.get_nowait())
            by_owner: dict[Owner, list[tuple[Identity, Identity]]] = {}
            for note in batch:
                if isinstance(note, tuple):
                    owner, identity, fork = note
                    by_owner.setdefault(owner, []).append((identity, fork))
            last = None in batch
            batch.clear()
            for owner, gone in by_owner.items():
                self._tell(owner, (DROPPED, gone))
            if last:
                return

    def _tell(self, worker: Owner, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(PhalanxError):  # a worker that is gone needs not be told
            self._agent.notify(self.member(worker), SERVICE, message)

    def member(self, worker: Owner) -> Member:
        """The worker that has a value, in the incarnation that made it.

        Raises:
            ObjectLost: it has left or was lost; another worker may have its name.
        """
        found = self._agent.member(worker.name)
        if found.incarnation != worker.incarnation:
            raise PhalanxError(
                f"{worker.name} has come back as another process, {found}: what the earlier one held is lost"
            )
        return found

    def give_all_up(self, timeout_s: float) -> list[str]:
        """Before a shutdown that all take part in: settle what is under way, then give up every reference.

        Returns:
            What was left after that time, in words.
        """
        until = time.monotonic() + timeout_s
        late = []
        with self._changed:
            if not self._wait(lambda: not self._unconfirmed and not self._handed_on, until):
                late.append("references that their owners had not confirmed")
            users = list(self._confirmed.values())
        for user in users:
            user.give_up()
        del users
        with self._changed:
            for identity in [identity for identity in self._values if identity not in self._forks]:
                del self._values[identity]
            if not self._wait(lambda: not self._values, until):
                late.append("values of this worker that others still refer to")
        return late

    def _wait(self, done: Callable[[], bool], until: float) -> bool:
        return self._changed.wait_for(done, max(0.0, until - time.monotonic()))

    def leaks(self) -> list[str]:
        """The references of others to values of this process, in words."""
        with self._changed:
            held = [(identity, fork) for identity, forks in self._forks.items() for fork in forks]
        return [f"Leaking RRef {identity} with fork Id {fork}" for identity, fork in held]

    def close(self) -> None:
        """End the thread, and all that is kept for others."""
        self._dropped.put(None)
        self._reporter.join(5.0)
        with self._changed:
            awaited = list(self._awaited.values())
            kept = self._values, self._forks, self._unconfirmed, self._handed_on
            self._values, self._forks, self._unconfirmed, self._handed_on, self._awaited = {}, {}, {}, {}, {}
        for future in awaited:
            future.set_exception(ClosedError("the value was not made before rpc.shutdown()"))
        del kept

    def debug_info(self) -> dict[str, str]:
        """Counts by torch's names."""
        with self._changed:
            counts = {
                "num_owner_rrefs": len(self._values),
                "num_pending_futures": self._asking,
                "num_pending_users": len(self._unconfirmed),
                "num_forks": sum(map(len, self._forks.values())),
            }
        return {name: str(count) for name, count in counts.items()}

    def _made(self) -> list[tuple[Identity, Identity]]:
        made: list[tuple[Identity, Identity]] | None = getattr(self._thread, "made", None)
        if made is None:
            made = self._thread.made = []
        return made
