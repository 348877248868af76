"""Becoming a worker, and leaving: ``rpc.init()`` and ``rpc.shutdown()``.

The directory of workers (``members.py``) lies in the job's store, in a part for each attempt of the launcher and each
size of the world. There the ranks meet. A worker that is no rank finds the part by a key, which rank 0 empties before
the ranks meet and writes once they have.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from phalanx import settings
from phalanx import world as worlds
from phalanx.errors import ClosedError, InitializationError
from phalanx.membership.client import kept_store, peek, underlying
from phalanx.rpc.inquiry import LONG_S
from phalanx.rpc.members import Member, needing_store
from phalanx.rpc.worker import Worker
from phalanx.system.interfaces import LOOPBACK, chosen_interface, is_loopback, outward_address, resolve
from phalanx.system.threads import renew_engine, within
from phalanx.topology.environment import place_with
from phalanx.wire.key import Key, job_key
from phalanx.words import format_named, tell

__all__ = ["begin", "current", "init", "on_init", "own_address", "shutdown", "wait_for_shutdown", "worker"]

T = TypeVar("T")

# How often the store is asked whether others have come or are done: together the ranks ask it so often.
_LOOKS_PER_S = 1000
_MOST_LOOKS_PER_S = 50
_TELL_S = 5.0  # after which the user is told who is missing
_STORE_S = 5.0  # for the job's store, beside what the others may take
# When one who waits in shutdown() makes links to those who are late, to how many of them at a time, and in what time.
_LINK_AFTER_S = 0.1
_LINKS_AT_ONCE = 4
REACH_S = 2.0
_ATTEMPT_S = 5.0  # for one attempt to connect to the store of a job that this process is no rank of
JOIN_S = 60.0  # for connecting to a launcher's store
_PART = "phalanx/rpc/part"

_worker: Worker | None = None
_own_world: worlds.World | None = None  # that init() has joined, and shutdown() leaves
# What the rooms of RPC do with a new worker: they register their services.
_equip: list[Callable[[Worker], None]] = []
_at_shutdown: list[Callable[[], None]] = []


def on_init(equip: Callable[[Worker], None]) -> None:
    """Have ``equip`` called with every worker of this process before other workers can find it."""
    _equip.append(equip)


def on_shutdown(forget: Callable[[], None]) -> None:
    """Have ``forget`` called when this process stops being a worker, but not when it could not become one."""
    _at_shutdown.append(forget)


def worker() -> Worker:
    """Return this process's worker.

    Raises:
        ClosedError: it is no worker.
    """
    if _worker is None:
        raise ClosedError("this process is not a worker: call rpc.init() first, on every rank that calls or is called")
    return _worker


def current() -> Worker | None:
    """Return this process's worker, or None."""
    return _worker


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
) -> Worker:
    """Make this process a worker in a store. ``init`` and torch's ``init_rpc`` call it.

    Raises:
        InitializationError: it is a worker already, another has its name, or it cannot encrypt, and was to.
        BackendError: the system gives this process no more threads.
    """
    global _worker

    def publish(worker: Worker) -> None:
        global _worker
        _worker = worker  # before others can find this worker: what they ask for may make calls of its own

    _require_none()
    key = job_key()
    renew_engine()
    try:
        return Worker(
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
        _worker = None
        raise


def _require_none() -> None:
    if _worker is not None:
        raise InitializationError(
            f"rpc.init() was called twice in this process, which is {_worker.me}; shut it down first"
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
            encrypt, and was to. It may be called again; the others wait for it meanwhile.
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
    # No prefix of torch's or of the program's: a worker that is no rank reads it too, and cannot know such a prefix.
    whole = underlying(store)
    part = f"phalanx/rpc/{place_with(None, None, None, None).attempt}/of {size}"
    with needing_store():
        if rank == 0:
            whole.set(_PART, "")
    made = begin(PrefixStore(part, whole), own_name, rank, address, timeout_s, **how)
    try:
        with needing_store():
            wait_for(
                lambda: made.directory.late(made.me, size),
                lambda late: f"for rpc.init() of {format_named('rank', late)}.",
                wait_s,
                size,
            )
            if rank == 0:
                whole.set(_PART, part)
    except BaseException:
        _close(made)
        raise
    return made.me


def shutdown(*, wait: bool = True, timeout_s: float = math.inf) -> None:
    """Stop being a worker. Does nothing if this process is none.

    Args:
        wait: first wait until every rank of the world has called this, or is gone: until then the others may still call
            this worker. A worker that is no rank does not wait.
        timeout_s: how long to wait, in seconds; then it leaves all the same, and says who had not come.
    """
    made = _worker
    if made is None:
        return
    try:
        if wait and made.me.rank >= 0:
            _wait_for_others(made, timeout_s)
    finally:
        if _worker is made:
            for forget in _at_shutdown:
                forget()
        _close(made)
        if _own_world is not None and worlds._world is _own_world:
            worlds.close()


def _close(made: Worker) -> None:
    global _worker
    if _worker is made:  # else another thread has closed it, and there may be a new one
        _worker = None
    made.close()


def _wait_for_others(made: Worker, timeout_s: float) -> None:
    late: list[Member] = []  # written by the thread that waits, and read once that has taken too long

    def wait() -> None:
        # Those that are here now: a rank that comes back meanwhile as a new worker waits for this one.
        late[:] = [member for member in made.directory.all() if member.rank >= 0]
        made.directory.say_done(made.me)

        def missing() -> list[Member]:
            late[:] = made.directory.not_done(late)
            return late

        wait_for_shutdown(made, missing, timeout_s, len(late))

    try:
        within(timeout_s + _STORE_S, wait)
    except TimeoutError:
        whom = f" of {format_named('rank', [one.rank for one in late])}" if late else ""
        tell(
            f"warning: rpc.shutdown() ends without the others: waited {timeout_s:g} s for rpc.shutdown(){whom}. "
            f"What keeps them could not be found out within {_STORE_S:g} s more: does the job's store answer?"
        )
    except (InitializationError, dist.DistError, RuntimeError) as error:  # the store may be gone with its host
        tell(f"warning: rpc.shutdown() ends without the others: {error}")


def wait_for_shutdown(made: Worker, missing: Callable[[], list[Member]], timeout_s: float, waiting: int) -> None:
    """Wait until all others have come to ``shutdown``, or are gone.

    Nobody may have a link to one that is killed meanwhile, and so nobody would notice. So each who waits makes links to
    those whom it waits for, a few at a time. They begin after its own rank, so that those who wait have the others
    shared out among them.

    Args:
        made: this worker.
        missing: those who have not come, and are not known to be gone.
        timeout_s: how long to wait, in seconds.
        waiting: how many workers do so.

    Raises:
        InitializationError: the time is over; it says who is late and what they do.
    """
    since = time.monotonic()

    def late() -> list[Member]:
        found = missing()
        if time.monotonic() - since >= _LINK_AFTER_S:
            for member in sorted(found, key=lambda one: (one.rank < made.me.rank, one.rank))[:_LINKS_AT_ONCE]:
                made.reach(member, max(0.0, min(REACH_S, since + timeout_s - time.monotonic())))
        return found

    def text(members: Sequence[Member]) -> str:
        ranks = format_named("rank", [member.rank for member in members])
        return f"for rpc.shutdown() of {ranks}. {made.inquiries.why_not_done(members)}".rstrip()

    wait_for(late, text, timeout_s, waiting)


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
    missing: Callable[[], Sequence[T]], text: Callable[[Sequence[T]], str], timeout_s: float, waiting: int
) -> None:
    """Wait until nothing is missing, and say now and then what is.

    Args:
        missing: what is.
        text: what is waited for, if these are missing, in words that go behind "waiting".
        timeout_s: how long to wait, in seconds.
        waiting: how many processes look as this one does.

    Raises:
        InitializationError: the time is over.
    """
    began = time.monotonic()
    silent_s = _TELL_S
    while late := missing():
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise InitializationError(f"waited {timeout_s:g} s {text(late)}")
        # A server that others call is where it should be: it waits for as long as they train.
        idle_s = min(waited_s, time.monotonic() - _worker.active_at()) if _worker is not None else waited_s
        if idle_s > silent_s:
            silent_s = 4 * idle_s
            tell(f"waiting {text(late)}")
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
    with needing_store():
        wait_for(lambda: [] if peek(store, _PART) else [_PART], lambda _: what, wait_s, 1)
        part = (peek(store, _PART) or b"").decode()
    local = all(is_loopback(found) for found in resolve(host))
    return PrefixStore(part, store), own_address(one_host=local)


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
