"""Meet in a segment of shared memory, or find that there can be none; share further memory beside it.

All of it are memfds that group rank 0 makes and the others reach through ``/proc/<pid>/fd/<n>``
(docs/design/transports.md says why). A rank that can open the segment and reads the right cookie is on the same host.

The ranks meet under one key, ``offer``. Rank 0 deletes it before it publishes the outcome, and every other key carries
the offer's cookie, so no meeting takes anything of an earlier one for its own. A rank that gives up while rank 0 still
waits takes its answer back, and may come again to the same offer.

When all have attached, each looks whether it sees the others' processes, by descriptors of the segment that they hold
open meanwhile: else it could not learn of their deaths. What they have seen they exchange in the segment itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from phalanx.errors import InitializationError
from phalanx.membership.client import peek
from phalanx.membership.rendezvous_store import OFFER, RendezvousStore, error_of
from phalanx.native.core import NOBODY, Status, library
from phalanx.system.threads import AwakeClock, ended_early
from phalanx.transports.contract import Communicator
from phalanx.transports.shm.tuning import Tuning
from phalanx.words import format_limit

__all__ = ["NotOneHost", "join_segment", "share_parts"]

_Outcome = tuple[str, str, tuple[int, int, str] | tuple[()]]
_Attached = tuple[int | None, str]  # the core's handle, or why there is none

OUTCOME_GRACE = timedelta(seconds=5)
SIGHT_S = 5.0  # how long to wait for a rank that one cannot see, and so cannot know to be alive
NAP_S = 0.0005
_SHORTEST_WAIT_S = 0.1  # rather than none, which would mean no limit
LOOK_S = 0.5  # how often a rank that waits for others to look tells whether one is stopped
MAX_RANKS = 1024  # PHX_MAX_RANKS
_ENDED_WAIT = "the store ended the wait before its time"


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
            cookie = secrets.token_bytes(16)
            descriptor, reason = _make_segment(size, tuning, cookie)
            if not reason:
                comm, reason = _attach(descriptor, rank, cookie, spin, poll)
            missing, apart, blamed = _offer(store, size, timeout, descriptor, cookie.hex(), reason)
        else:
            pid, number, name = json.loads(_await_offer(store, size, timeout))
            cookie, reason = bytes.fromhex(name), ""
            if number >= 0:
                descriptor, reason = _reach(pid, number)
                if not reason:
                    comm, reason = _attach(descriptor, rank, cookie, spin, poll)
            answer, outcome = f"{name}/answer/{rank}", f"{name}/outcome"
            store.set(answer, json.dumps(reason))
            try:
                # Longer than rank 0 waits for the others, so that its outcome, which names the missing ranks, arrives.
                _wait(store, outcome, timeout + OUTCOME_GRACE, f"rank 0 did not finish a group of {size} ranks")
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the store has gone
                    store.delete_key(answer)
                raise
            missing, apart, blamed = json.loads(store.get(outcome))
        if blamed:
            raise InitializationError.of_rank(missing, *blamed)
        if missing:
            raise InitializationError(f"rank {rank}: {missing}")
        if isinstance(store, RendezvousStore):
            store.all_have_come()  # before any rank can be through, and make the next world in the same store
        if apart:
            raise NotOneHost(apart, cookie.hex())
        if comm is None:
            raise InitializationError(f"rank {rank} came to a group of {size} ranks that had been made ({reason})")
        apart = _see_each_other(store, comm, descriptor, rank, timeout.total_seconds())
        if rank == 0:
            store.delete_key(f"{cookie.hex()}/outcome")  # all have read it, else they would not have looked
        if apart:
            raise NotOneHost(apart, cookie.hex())
    except BaseException:
        if comm is not None:
            library().phx_close(comm)
        raise
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return comm, cookie.hex()


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
    """Rank 0's offer. It may be taken back between two requests; then a ``get`` would wait in silence for another."""
    began = time.monotonic()
    offer = None
    while offer is None:
        left_s = max(_SHORTEST_WAIT_S, timeout.total_seconds() - (time.monotonic() - began))
        _wait(store, OFFER, timedelta(seconds=left_s), f"rank 0 did not come to a group of {size} ranks")
        offer = peek(store, OFFER)
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
        return os.open(f"/proc/self/fd/{seen}", os.O_RDWR | os.O_CLOEXEC), ""
    except OSError as error:
        return -1, f"{error.strerror} (/proc/{pid}/fd)"
    finally:
        os.close(seen)


def _see_each_other(store: Store, comm: int, descriptor: int, rank: int, timeout_s: float) -> str:
    """Look at the other ranks' processes, and wait until all ranks have looked.

    Returns:
        Which rank does not see which, the same text on every rank; empty if all see all.

    Raises:
        InitializationError: a rank has ended, or did not look in time.
    """
    core, by, whom = library(), ctypes.c_uint32(), ctypes.c_uint32()
    core.phx_look(comm, descriptor)
    clock, next_look_s = AwakeClock(), LOOK_S
    while (status := core.phx_all_seen(comm, ctypes.byref(by), ctypes.byref(whom))) != Status.OK:
        waited_s = clock.now()
        unseen = core.phx_sees(comm, by.value) == 0
        if status == Status.PEER_LOST:
            raise error_of(store, f"rank {rank}: rank {by.value} of the group ended while the ranks met")
        if waited_s > (limit_s := min(SIGHT_S, timeout_s) if unseen else timeout_s):
            raise error_of(
                store,
                f"rank {rank}: rank {by.value} of the group had attached to the shared segment, and did not look for "
                f"the others within {format_limit(limit_s)}. Has it ended, or is it stopped?",
                late=True,
            )
        if waited_s >= next_look_s:
            next_look_s = waited_s + LOOK_S
            if isinstance(store, RendezvousStore):
                store.look()
        time.sleep(NAP_S)
    if whom.value == NOBODY:
        return ""
    return (
        f"rank {by.value} does not see the process of rank {whom.value}, so it could not learn of its end: has one of "
        f"them a pid namespace of its own?"
    )


def _collect_answers(store: Store, size: int, timeout: timedelta, name: str, answer: str) -> _Outcome:
    """The outcome, given rank 0's own answer: why it cannot attach."""
    keys = {peer: f"{name}/answer/{peer}" for peer in range(1, size)}
    began = time.monotonic()
    texts: dict[int, bytes] = {}
    while len(texts) < len(keys):
        left_s = timeout.total_seconds() - (time.monotonic() - began)
        absent = _absent(store, keys, timedelta(seconds=max(_SHORTEST_WAIT_S, left_s)))
        if not absent:
            texts = {peer: text for peer, key in keys.items() if (text := peek(store, key)) is not None}
            if left_s <= 0:
                absent = sorted(keys.keys() - texts.keys())  # else a rank has just given up, and may come again
        if absent:
            names = f"rank{'s' if absent[1:] else ''} {', '.join(map(str, absent))}"
            late = (
                f"{names} did not come within {format_limit(timeout.total_seconds())}. Was each rank started, and does "
                f"each create the same groups in the same order?"
            )
            return late, "", ()
    answers = [answer, *map(json.loads, texts.values())]
    for key in keys.values():
        store.delete_key(key)
    apart = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(answers) if text)
    return "", apart, ()


def _absent(store: Store, keys: Mapping[int, str], timeout: timedelta) -> list[int]:
    """Wait for the keys of these ranks, with one deadline for all; the ranks whose keys are not there by then."""
    began = time.monotonic()
    try:
        store.wait(list(keys.values()), timeout)
    except InitializationError:
        raise  # a rank has gone
    except RuntimeError as error:
        if ended_early(began, timeout.total_seconds()):
            raise InitializationError(f"rank 0 could not wait for the other ranks: {_ENDED_WAIT} ({error})") from error
        return [peer for peer, key in keys.items() if not store.check([key])]
    return []


def _wait(store: Store, key: str, timeout: timedelta, otherwise: str) -> None:
    began = time.monotonic()
    try:
        store.wait([key], timeout)
    except InitializationError:
        raise  # a rank has gone
    except RuntimeError as error:  # each kind of store has a subclass of its own for a wait that timed out
        if ended_early(began, timeout.total_seconds()):
            raise InitializationError(f"{otherwise}: {_ENDED_WAIT} ({error})") from error
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
