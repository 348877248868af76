"""Meet in a segment of shared memory, or find that there can be none; share further memory beside it.

All of it are memfds that group rank 0 makes and the others reach through ``/proc/<pid>/fd/<n>``
(docs/design/transports.md says why). A rank that can open the segment and reads the right cookie is on the same host.

The ranks meet under one key, ``offer``. Rank 0 deletes it before it publishes the outcome, and every other key carries
the offer's cookie, so no meeting takes anything of an earlier one for its own.

Who finds the segment under rank 0's pid has the same ``/proc`` as rank 0. So if a rank finds itself there, all others
find it as well, and learn of its death.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from phalanx.errors import InitializationError
from phalanx.membership.client import peek
from phalanx.membership.rendezvous_store import OFFER, RendezvousStore
from phalanx.native.core import Status, library
from phalanx.transports.contract import Communicator
from phalanx.transports.shm.tuning import Tuning
from phalanx.words import format_limit, format_named

__all__ = ["NotOneHost", "join_segment", "share_parts"]

_Outcome = tuple[str, str, tuple[int, int, str] | tuple[()]]
_Attached = tuple[int | None, str]  # the core's handle, or why there is none

OUTCOME_GRACE = timedelta(seconds=5)
MAX_RANKS = 1024  # PHX_MAX_RANKS


class NotOneHost(InitializationError):
    """Some rank cannot reach the segment, so the group does not live on one host. Every rank raises it.

    ``meeting`` names the meeting that ended so, equally on every rank; no other meeting has that name.
    """

    def __init__(self, message: str, meeting: str = "") -> None:
        super().__init__(message)
        self.meeting = meeting


def join_segment(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    tuning: Tuning,
    spin: int,
    poll: Callable[[], int],
) -> tuple[int, str]:
    """Rank 0 offers a segment, every rank tries to attach, and all act on the one outcome that rank 0 publishes.

    Args:
        store: where they meet; when they have, nothing of the meeting stays there.
        rank, size, timeout: of the group, and for all of them to come.
        tuning, spin, poll: for the core.

    Returns:
        The core's handle of this rank's view of the segment, and the name of the meeting (:class:`NotOneHost`).

    Raises:
        NotOneHost: some rank, perhaps rank 0 itself, could not make or attach the segment.
        InitializationError: some rank did not come.
    """
    comm: int | None = None
    descriptor = -1
    try:
        if rank == 0:
            name = secrets.token_hex(16)
            cookie = bytes.fromhex(name)
            descriptor, reason = _make_segment(size, tuning, cookie)
            if not reason:
                comm, reason = _attach(descriptor, rank, cookie, spin, poll)
            missing, apart, blamed = _offer(store, size, timeout, descriptor, name, reason)
        else:
            pid, number, name = json.loads(_await_offer(store, size, timeout))
            cookie, reason = bytes.fromhex(name), ""
            if number >= 0:
                descriptor, reason = _reach(pid, number)
                if not reason:
                    comm, reason = _attach(descriptor, rank, cookie, spin, poll)
            store.set(f"{name}/answer/{rank}", json.dumps(reason))
            # Longer than rank 0 waits for the others, so that its outcome, which names the missing ranks, arrives.
            _wait(store, f"{name}/outcome", timeout + OUTCOME_GRACE, f"rank 0 did not finish a group of {size} ranks")
            missing, apart, blamed = json.loads(store.get(f"{name}/outcome"))
        if blamed:
            raise InitializationError.of_rank(missing, *blamed)
        if missing:
            raise InitializationError(f"rank {rank}: {missing}")
        if isinstance(store, RendezvousStore):
            store.all_have_come()
        if store.add(f"{name}/read", 1) == size:
            store.delete_key(f"{name}/outcome")
            store.delete_key(f"{name}/read")
        if apart:
            raise NotOneHost(apart, name)
        if comm is None:
            raise InitializationError(f"rank {rank} came to a group of {size} ranks that had been made ({reason})")
        library().phx_look(comm)
    except BaseException:
        if comm is not None:
            library().phx_close(comm)
        raise
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return comm, name


def _offer(
    store: Store,
    size: int,
    timeout: timedelta,
    descriptor: int,
    name: str,
    reason: str,
) -> _Outcome:
    """Rank 0's part: offer the segment, or none if ``reason`` says why there is none, and publish the outcome.

    Returns:
        Why the group was not made; which ranks came but could not attach; and the rank that has gone, with its pid and
        host. All empty when all is well.
    """
    try:
        store.set(OFFER, json.dumps([_own_pid(), descriptor, name]))
        outcome = _collect_answers(store, size, timeout, name, reason)
    except BaseException as error:
        # The others must neither wait for an outcome nor find this offer at their next attempt. If the store is out of
        # reach, they find that themselves.
        outcome = f"rank 0 gave up ({type(error).__name__}: {error})", "", ()
        cause = store.cause_for_others(error) if isinstance(store, RendezvousStore) else None
        if cause is not None:
            outcome = str(cause), "", (cause.rank, cause.pid, cause.host)
        with contextlib.suppress(RuntimeError):
            _publish(store, name, outcome)
        raise
    _publish(store, name, outcome)
    return outcome


def _await_offer(store: Store, size: int, timeout: timedelta) -> bytes:
    _wait(store, OFFER, timeout, f"rank 0 did not come to a group of {size} ranks")
    offer = peek(store, OFFER)  # a ``get`` would wait in silence for another one
    if offer is None:
        raise InitializationError(f"rank 0 did not come to a group of {size} ranks: it has just given up")
    return offer


def _own_pid() -> int:
    """This process's id as its /proc counts, in which the others look for it; getpid() counts in a namespace."""
    try:
        return int(os.readlink("/proc/self"))
    except OSError:
        return os.getpid()


def _publish(store: Store, name: str, outcome: _Outcome) -> None:
    store.delete_key(OFFER)  # first: see the module's docstring
    store.set(f"{name}/outcome", json.dumps(outcome))


def _make_segment(size: int, tuning: Tuning, cookie: bytes) -> tuple[int, str]:
    """A formatted segment's descriptor; or -1, and why there is none."""
    if size > MAX_RANKS:
        return -1, f"a shared segment serves at most {MAX_RANKS} ranks, not {size}"
    try:
        descriptor = os.memfd_create("phalanx", os.MFD_CLOEXEC)
    except OSError as error:
        return -1, f"{error.strerror} (memfd_create)"
    status = library().phx_segment_format(descriptor, size, *tuning.for_size(size), cookie)
    if not status:
        return descriptor, ""
    reason = os.strerror(ctypes.get_errno()) if status == Status.SYSTEM else f"{tuning} does not fit {size} ranks"
    os.close(descriptor)
    return -1, f"the shared segment could not be made: {reason}"


def _attach(descriptor: int, rank: int, cookie: bytes, spin: int, poll: Callable[[], int]) -> _Attached:
    comm: int | None = library().phx_open(descriptor, rank, cookie, spin, poll)
    return comm, "" if comm else os.strerror(ctypes.get_errno())


def _reach(pid: int, number: int) -> tuple[int, str]:
    """A descriptor of the file that rank 0 has open under this number; or -1, and why there is none.

    On another host it is the number of any process, which may have a device there: so it is looked at first, by O_PATH.
    """
    try:
        seen = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        return -1, f"{error.strerror} (/proc/{pid}/fd)"
    try:
        if not stat.S_ISREG(os.fstat(seen).st_mode):
            return -1, f"another file is there (/proc/{pid}/fd)"
        os.readlink("/proc/self")  # else nobody would find this rank there
        return os.open(f"/proc/self/fd/{seen}", os.O_RDWR | os.O_CLOEXEC), ""
    except OSError as error:
        return -1, f"{error.strerror} (/proc/{pid}/fd)"
    finally:
        os.close(seen)


def _collect_answers(store: Store, size: int, timeout: timedelta, name: str, answer: str) -> _Outcome:
    """The outcome, given rank 0's own answer: why it cannot attach."""
    keys = {peer: f"{name}/answer/{peer}" for peer in range(1, size)}
    try:
        store.wait(list(keys.values()), timeout)
    except InitializationError:
        raise  # a rank has gone
    except RuntimeError:
        absent = [peer for peer, key in keys.items() if not store.check([key])]
        late = (
            f"{format_named('rank', absent)} did not come within {format_limit(timeout.total_seconds())}. Was each "
            f"rank started, and does each create the same groups in the same order?"
        )
        return late, "", ()
    answers = [answer, *map(json.loads, store.multi_get(list(keys.values())))]
    for key in keys.values():
        store.delete_key(key)
    apart = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(answers) if text)
    return "", apart, ()


def _wait(store: Store, key: str, timeout: timedelta, otherwise: str) -> None:
    try:
        store.wait([key], timeout)
    except InitializationError:
        raise  # a rank has gone
    except RuntimeError as error:  # each kind of store has a subclass of its own for a wait that timed out
        raise InitializationError(f"{otherwise} within {format_limit(timeout.total_seconds())} ({error})") from error


def share_parts(local: Communicator, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make memory in which each rank of a communicator has a part of the size it wants, which it alone writes.

    Returns:
        All of the memory, zeros at first, and this rank's part. Once no tensor of the part is left its pages are given
        back, and its addresses stay taken as long as the whole memory is there.

    Raises:
        OSError, RuntimeError: the kernel gives no memory, or no descriptor: make fewer groups.
        PeerLost: a rank has gone.
    """
    wanted = [torch.zeros(1, dtype=torch.int64) for _ in range(local.size)]
    local.all_gather(wanted, torch.tensor([nbytes]))
    each = -(-max(1, *map(int, wanted)) // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = _share_memory(local, each * local.size)
    begin = whole.data_ptr() + each * local.rank
    part = memoryview((ctypes.c_ubyte * each).from_address(begin))
    # With the whole memory as an argument, which is thereby there until this is done.
    weakref.finalize(part, _give_back, whole, begin, each, os.getpid()).atexit = False
    return whole, torch.frombuffer(part, dtype=torch.uint8)[:nbytes]


def _share_memory(local: Communicator, nbytes: int) -> torch.Tensor:
    offer, descriptor, refused = torch.zeros(2, dtype=torch.int64), -1, None
    try:
        if local.rank == 0:
            descriptor = os.memfd_create("phalanx-shared", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
            offer[0], offer[1] = _own_pid(), descriptor
        local.broadcast(offer, 0)
        if local.rank != 0:
            pid, number = offer.tolist()
            try:
                descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                refused = error
        local.barrier()  # if rank 0 has died, so that there is nothing to open, this says so
        if refused is not None:
            raise refused
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _give_back(whole: torch.Tensor, begin: int, nbytes: int, pid: int) -> None:
    """Free the pages of a part of shared memory, which reads as zeros afterwards; a forked child has no part in it."""
    if os.getpid() == pid:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), mmap.MADV_REMOVE)
