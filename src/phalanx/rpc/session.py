"""Becoming a worker, and leaving: ``rpc.init()`` and ``rpc.shutdown()``.

The ranks that become workers meet in the first part of the world's store that is not over. Part ``K`` has a random
name, which the first rank that comes there gives it. A part is over when its outcome is written, once: the first who
sees that all ranks have come writes that they have met, or the first who has waited in vain that it gives up. All obey
that, and nobody goes into a part that is over. So a rank that is quick does not find those who are about to leave, and
one that tries again does not count those who have gone. An attempt that fails before its rank is a worker does not
count: the others wait for it in the same part.

A worker that is no rank waits until the ranks have met in the part that rank 0 was in last.

======================  ======================  ================================  ================================
key                     written by              read by                           if the writer dies before
======================  ======================  ================================  ================================
``.../K``               any rank, first wins    ranks                             another one writes it
``phalanx/rpc/newest``  rank 0                  workers that are no rank          they wait until their time is over
``came/R`` (of a part)  rank R, as a worker     ranks                             it is waited for
``outcome``             any rank, first wins    all                               others write it after their time
======================  ======================  ================================  ================================
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from phalanx import settings
from phalanx import world as worlds
from phalanx.errors import ClosedError, InitializationError
from phalanx.membership.client import kept_store
from phalanx.rpc.agent import Agent
from phalanx.rpc.inquiry import LONG_S
from phalanx.rpc.members import Member, StoreGone, store_lost
from phalanx.system.interfaces import LOOPBACK, chosen_interface, is_loopback, outward_address, resolve
from phalanx.system.threads import renew_engine, within
from phalanx.topology.environment import place_with
from phalanx.wire.key import Key, job_key
from phalanx.words import format_named, tell

__all__ = ["agent", "begin", "current", "init", "on_init", "own_address", "shutdown", "wait_for"]

# How often the store is asked whether others have come or are done: together the ranks ask it so often.
_LOOKS_PER_S = 1000
_MOST_LOOKS_PER_S = 50
_TELL_S = 5.0  # after which the user is told who is missing
_STORE_S = 5.0  # for the job's store, beside what the others may take
# When one who waits in shutdown() makes links to those who are late, to how many of them at a time, and in what time.
_LINK_AFTER_S = 0.1
_LINKS_AT_ONCE = 4
_REACH_S = 2.0
_ATTEMPT_S = 5.0  # for one attempt to connect to the store of a job that this process is no rank of
JOIN_S = 60.0  # for connecting to a launcher's store
_NEWEST = "phalanx/rpc/newest"
_OUTCOME, _MET = "outcome", "met"
_CONCLUDE_S = 1.0

_agent: Agent | None = None
_own_world: worlds.World | None = None  # that init() has joined, and shutdown() leaves
# What the rooms of RPC do with a new agent: they register their services.
_equip: list[Callable[[Agent], None]] = []
_at_shutdown: list[Callable[[], None]] = []


def on_init(equip: Callable[[Agent], None]) -> None:
    """Have ``equip`` called with every agent of this process before other workers can find it."""
    _equip.append(equip)


def on_shutdown(forget: Callable[[], None]) -> None:
    """Have ``forget`` called when this process stops being a worker, but not when it could not become one."""
    _at_shutdown.append(forget)


def agent() -> Agent:
    """Return this process's agent.

    Raises:
        ClosedError: it is no worker.
    """
    if _agent is None:
        raise ClosedError("this process is not a worker: call rpc.init() first, on every rank that calls or is called")
    return _agent


def current() -> Agent | None:
    """Return this process's agent, or None."""
    return _agent


def begin(
    store: Store,
    name: str,
    rank: int,
    address: str,
    timeout_s: float,
    *,
    typed_only: bool = False,
    warn_after_s: float = LONG_S,
    encrypt: bool | None = None,
) -> Agent:
    """Make this process a worker in a store. ``init`` and torch's ``init_rpc`` call it.

    Raises:
        InitializationError: it is a worker already, another has its name, or it cannot encrypt, and was to.
        BackendError: the system gives this process no more threads.
    """
    global _agent

    def publish(agent: Agent) -> None:
        global _agent
        _agent = agent  # before others can find this worker: what they ask for may make calls of its own

    _require_none()
    key = job_key()
    renew_engine()
    try:
        return Agent(
            store,
            name,
            rank,
            key,
            address,
            timeout_s,
            equip=[*_equip, publish],
            typed_only=typed_only,
            long_s=warn_after_s,
            encrypt=_encrypts(encrypt, key),
        )
    except BaseException:
        _agent = None
        raise


def _require_none() -> None:
    if _agent is not None:
        raise InitializationError(
            f"rpc.init() was called twice in this process, which is {_agent.me}; shut it down first"
        )


def _encrypts(asked: bool | None, key: Key) -> bool:
    """Return whether this worker is to encrypt, which it then can."""
    source = "rpc.init(encrypt=True)"
    if asked is None:
        value = os.environ.get(settings.RPC_ENCRYPT) or "0"
        source = f"{settings.RPC_ENCRYPT}={value}"
        if value not in ("0", "1"):
            raise InitializationError(f"{source}: it must be 1 (encrypt what goes over TCP) or 0 (do not)")
        asked = value == "1"
    if not asked:
        return False
    if key.is_open:
        raise InitializationError(
            f"{source} needs the job's key, which says whom to encrypt for. Start the job by `phalanx run`, or name a "
            f"file with a key in {settings.KEY_FILE} on every host"
        )
    importlib.import_module("phalanx.wire.encryption")  # which says what is missing
    return True


def init(
    name: str | None = None,
    *,
    timeout_s: float = 60.0,
    wait_s: float = 300.0,
    join: str | None = None,
    typed_only: bool = False,
    warn_after_s: float = LONG_S,
    encrypt: bool | None = None,
) -> Member:
    """Become a worker, so that others can call functions here and this process can call them.

    Every rank of the world may call it, after ``phalanx.init()`` or ``init_process_group``; it returns when all ranks
    of the world have. Without either it joins the launcher's ranks, by ``phalanx.init(device="cpu")``, until
    ``shutdown``. A process that is no rank, such as a parameter server that was started by itself, names the job's
    store. For such a process it returns as soon as the ranks have met; from then on it may leave and come back.

    Args:
        name: this worker's name, which no other living worker has; ``worker{rank}`` by default.
        timeout_s: how long a call may take, unless it says otherwise, in seconds.
        wait_s: how long to wait for the ranks, in seconds.
        join: ``host:port`` of the job's store (its ranks' MASTER_ADDR and MASTER_PORT), for a process that is no rank.
        typed_only: unpickle nothing that another worker sends: only typed services (``rpc.serve``) can be called here,
            and only those of others can be called from here.
        warn_after_s: a call that has not returned after so many seconds is noted on standard error, with why, and again
            each time that it has taken twice as long; infinity for no notes.
        encrypt: encrypt what goes over TCP, as between hosts; the same on all workers. It needs the job's key and the
            package ``cryptography``. By default as ``PHALANX_RPC_ENCRYPT`` says, or else not.

    Returns:
        This worker: its name, rank, host, pid and incarnation.

    Raises:
        InitializationError: it is a worker already, the name is taken, ranks did not come in time, or it cannot
            encrypt, and was to. It may be called again. If it has waited in vain, the others are told, and have to
            call it again as well.
        BackendError: the system gives this process no more threads.
    """
    global _own_world
    how: dict[str, Any] = {"typed_only": typed_only, "warn_after_s": warn_after_s, "encrypt": encrypt}
    if join is not None:
        if name is None:
            raise InitializationError("a worker that is no rank needs a name: rpc.init(name, join=...)")
        store, address = _foreign_store(join, wait_s)
        return begin(store, name, -1, address, timeout_s, **how).me
    _require_none()
    if not dist.is_initialized() and place_with(None, None, None, None).world_size > 1:
        _own_world = worlds.init(device="cpu", timeout_s=wait_s)
    store, rank, size, one_host = _world_store()
    address = own_address(one_host=one_host)
    own_name = name or f"worker{rank}"
    meeting = find_meeting(store, rank, size)
    made = begin(meeting.store, own_name, rank, address, timeout_s, **how)
    in_vain = True
    try:
        meeting.come(rank)
        # A rank that was quick may have called shutdown() before this one has seen it.
        wait_for(lambda: meeting.missing(made.ranks_seen(), size), wait_s, "for rpc.init() of", size)
        in_vain = False
    except InitializationError as error:
        in_vain = meeting.give_up(rank, error)  # no, if another one has seen that all have met
        if in_vain:
            raise
    except BaseException as error:
        meeting.give_up(rank, error)
        raise
    finally:
        if in_vain:
            _close(made)
    return made.me


def shutdown(*, wait: bool = True, timeout_s: float = math.inf) -> None:
    """Stop being a worker. Does nothing if this process is none.

    Args:
        wait: first wait until every rank of the world has called this, or is gone: until then the others may still call
            this worker. A worker that is no rank does not wait.
        timeout_s: how long to wait, in seconds; then it leaves all the same, and says who had not come.
    """
    made = _agent
    if made is None:
        return
    try:
        if wait and made.me.rank >= 0:
            _wait_for_others(made, timeout_s)
    finally:
        if _agent is made:
            for forget in _at_shutdown:
                forget()
        _close(made)
        if _own_world is not None and worlds._world is _own_world:
            worlds.close()


def _close(made: Agent) -> None:
    global _agent
    if _agent is made:  # else another thread has closed it, and there may be a new one
        _agent = None
    made.close()


def _wait_for_others(made: Agent, timeout_s: float) -> None:
    waited_for: list[Member] = []  # written by the thread that waits, and read once that has taken too long

    def wait() -> None:
        # Those that are here now: a rank that comes back meanwhile as a new worker waits for this one.
        others = [member for member in made.members() if member.rank >= 0]
        made.say_done()
        since = time.monotonic()

        def missing() -> list[int]:
            waited_for[:] = made.not_done(others)
            _reach_late(made, waited_for, since, since + timeout_s)
            return [member.rank for member in waited_for]

        wait_for(
            missing, timeout_s, "for rpc.shutdown() of", len(others), lambda: made.inquiries.why_not_done(waited_for)
        )

    try:
        within(timeout_s + _STORE_S, wait)
    except TimeoutError:
        whom = f" of {format_named('rank', [one.rank for one in waited_for])}" if waited_for else ""
        tell(
            f"warning: rpc.shutdown() ends without the others: waited {timeout_s:g} s for rpc.shutdown(){whom}. "
            f"What keeps them could not be found out within {_STORE_S:g} s more: does the job's store answer?"
        )
    except (InitializationError, dist.DistError, RuntimeError) as error:  # the store may be gone with its host
        tell(f"warning: rpc.shutdown() ends without the others: {error}")


def _reach_late(made: Agent, late: list[Member], since: float, until: float) -> None:
    """Have links to some of those who are there and have not called ``shutdown``.

    Nobody may have a link to one that is killed meanwhile, and so nobody would notice. So each who waits has links to
    those whom it waits for, a few at a time, which are all of them before the end. They begin after its own rank, so
    that those who wait have the others shared out among them.
    """
    if time.monotonic() - since >= _LINK_AFTER_S:
        for member in sorted(late, key=lambda member: (member.rank < made.me.rank, member.rank))[:_LINKS_AT_ONCE]:
            made.reach(member, max(0.0, min(_REACH_S, until - time.monotonic())))


def own_address(*, one_host: bool) -> str:
    """Return the address at which others reach this process.

    Args:
        one_host: whether all of them are on this host.
    """
    chosen = chosen_interface()
    if chosen is not None:
        return chosen[1][0]
    return LOOPBACK if one_host else outward_address()


def wait_for(
    missing: Callable[[], list[int]], timeout_s: float, what: str, size: int, why: Callable[[], str] = str
) -> None:
    """Wait until no ranks are missing, and say now and then which ones are, and why.

    Args:
        missing: the ranks that are.
        timeout_s: how long to wait, in seconds.
        what: what for, in words that go before the ranks.
        size: how many ranks there are, who all look as this one does.
        why: says what the missing ones do.

    Raises:
        InitializationError: the time is over.
    """
    late: list[int] = []

    def pending() -> bool:
        late[:] = missing()
        return bool(late)

    _wait_while(pending, lambda: f"{what} {format_named('rank', late)}. {why()}".rstrip(), timeout_s, size)


def _wait_while(pending: Callable[[], bool], text: Callable[[], str], timeout_s: float, waiting: int) -> None:
    """Wait as long as it is pending, say now and then what for, and raise an InitializationError after the time.

    Args:
        text: what for, in words that go behind "waiting".
        waiting: how many processes look as this one does.
    """
    began = time.monotonic()
    silent_s = _TELL_S
    while pending():
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise InitializationError(f"waited {timeout_s:g} s {text()}")
        # A server that others call is where it should be: it waits for as long as they train.
        idle_s = min(waited_s, time.monotonic() - _agent.active_at()) if _agent is not None else waited_s
        if idle_s > silent_s:
            silent_s = 4 * idle_s
            tell(f"waiting {text()}")
        time.sleep(max(1 / _MOST_LOOKS_PER_S, waiting / _LOOKS_PER_S))


def _world_store() -> tuple[Store, int, int, bool]:
    """Return the store of this process's world, its rank, the world's size, and whether all ranks are on this host."""
    world = worlds._world
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        # The rank of a world of one has met nobody, but its launcher may keep a store that workers can join by.
        place = place_with(None, None, None, None)
        return (kept_store(place, JOIN_S) if place.keeps_store else HashStore()), 0, 1, True
    one_host = world is not None and world.num_nodes == 1
    store = worlds._store if worlds._store is not None else dist.distributed_c10d._get_default_store()
    return store, dist.get_rank(), size, one_host


def _foreign_store(join: str, wait_s: float) -> tuple[Store, str]:
    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal():
        raise InitializationError(f"join={join!r} is not HOST:PORT")
    store = _connected(host, int(port), wait_s)
    what = f"for all ranks of the job whose store is at {join} to call rpc.init()"
    meeting = newest_meeting(store, lambda pending: _wait_while(pending, lambda: what, wait_s, 1))
    local = all(is_loopback(found) for found in resolve(host))
    return meeting.store, own_address(one_host=local)


def _connected(host: str, port: int, wait_s: float) -> Store:
    until = time.monotonic() + wait_s
    while True:
        attempt_s = min(_ATTEMPT_S, max(1.0, until - time.monotonic()))
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=attempt_s))
        except (dist.DistError, RuntimeError, ValueError) as error:
            if "Ping failed" in str(error):  # torch tries again for as long as it may
                raise InitializationError(
                    f"what listens at {host}:{port} is no store of torch's. Ranks that were started by mpiexec, srun "
                    f"or by hand keep a store that only ranks can use: start them with phalanx run or torchrun, or "
                    f"have them call init_process_group() before rpc.init()"
                ) from error
            if time.monotonic() >= until:
                raise InitializationError(f"the job's store at {host}:{port} cannot be reached: {error}") from error
        else:
            store.set_timeout(timedelta(seconds=wait_s))
            return store


# -- the rendezvous of the ranks -------------------------------------------------------------------


class Meeting:
    """One part of a store, in which workers meet.

    Attributes:
        store: that part.
    """

    def __init__(self, part: str, whole: Store) -> None:
        self.store = PrefixStore(part, whole)

    def come(self, rank: int) -> None:
        """Say that this process has become a worker here.

        Raises:
            InitializationError: the store is gone.
        """
        try:
            self.store.set(f"came/{rank}", "")
        except StoreGone as error:
            raise store_lost(error) from error

    def missing(self, seen: set[int], size: int) -> list[int]:
        """Return the ranks that have not come.

        Args:
            seen: the ranks that were seen here; some may have been refused.
            size: how many ranks there are.

        Raises:
            InitializationError: another rank has given up; or the store is gone.
        """
        try:
            late = sorted(set(range(size)) - seen)
            if not late and not self.store.check([f"came/{rank}" for rank in range(size)]):
                late = [rank for rank in range(size) if not self.store.check([f"came/{rank}"])]
            outcome = self.outcome() if late else self._conclude(_MET)
        except StoreGone as error:
            raise store_lost(error) from error
        if outcome in ("", _MET):
            return late
        raise InitializationError(f"rpc.init() cannot succeed: {outcome}. Call it again on all ranks")

    def give_up(self, rank: int, why: BaseException) -> bool:
        """Say that this rank has waited in vain. Whether that counts: not if all have met, as another one has seen."""
        text = f"rank {rank} has given up ({str(why) or type(why).__name__})"
        # The store may be gone with its host, and then those who wait learn of that.
        with contextlib.suppress(*StoreGone, TimeoutError):
            return within(_CONCLUDE_S, lambda: self._conclude(text)) != _MET
        return True

    def has_met(self) -> bool:
        """Return whether all ranks have come here, as one of them has seen."""
        return self.outcome() == _MET

    def outcome(self) -> str:
        """Return how it has ended; empty if it has not."""
        return self.store.get(_OUTCOME).decode() if self.store.check([_OUTCOME]) else ""

    def _conclude(self, outcome: str) -> str:
        return self.store.compare_set(_OUTCOME, "", outcome).decode()


def find_meeting(store: Store, rank: int, size: int) -> Meeting:
    """Return the part of a world's store in which its workers meet now.

    Each attempt of a launcher has parts of its own. No prefix of torch's or of the program's stands before their keys:
    a worker that is no rank reads them too, and cannot know such a prefix.

    Args:
        store: the world's.
        rank, size: this process's rank, and the number of ranks.

    Raises:
        InitializationError: the store is gone.
    """
    key = f"phalanx/rpc/{place_with(None, None, None, None).attempt}/of {size}"
    whole = store
    while isinstance(whole, PrefixStore):
        whole = whole.underlying_store
    try:
        for number in itertools.count():
            own = f"phalanx/rpc/{secrets.token_hex(8)}"
            part = store.compare_set(f"{key}/{number}", "", own).decode()
            meeting = Meeting(part, whole)
            if not meeting.outcome():
                break
        if rank == 0:
            whole.set(_NEWEST, part)
    except StoreGone as error:
        raise store_lost(error) from error
    return meeting


def newest_meeting(whole: Store, wait: Callable[[Callable[[], bool]], None]) -> Meeting:
    """Return the part of a job's store in which its ranks have met, for a worker that is none of them.

    Args:
        whole: the job's store.
        wait: waits as long as the function that it is given says so.

    Raises:
        InitializationError: what ``wait`` raises; or the store is gone.
    """
    found = Meeting("", whole)

    def pending() -> bool:
        nonlocal found
        if whole.check([_NEWEST]):
            found = Meeting(whole.get(_NEWEST).decode(), whole)
            return not found.has_met()
        return True

    try:
        wait(pending)
    except InitializationError:
        raise
    except StoreGone as error:
        raise store_lost(error) from error
    return found
