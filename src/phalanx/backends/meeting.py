"""How the ranks of a group find their common segment, or find that there can be none.

The segment is a memfd that group rank 0 makes and the others reach through ``/proc/<pid>/fd/<n>``: it has no
name to leak, is not bounded by the size of /dev/shm (64 MB in containers), and is gone when the last process
is. Who can open it and reads the right cookie is on the same host; no hostname is believed.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store

from phalanx.backends.tuning import Tuning
from phalanx.errors import BackendError, InitializationError
from phalanx.native.core import library

__all__ = ["NotOneHost", "meet"]

VERDICT_GRACE = timedelta(seconds=5)


class NotOneHost(InitializationError):
    """Some rank cannot reach the segment: the group does not live on one host. Every rank gets it alike."""


def meet(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    tuning: Tuning,
    spin: int,
    poll: Callable[[], int],
) -> int:
    """Rank 0 offers a segment, everyone tries to attach, and all act on the one common verdict.

    Returns:
        The core's handle of this rank's view of the segment.
    """
    descriptor = -1
    try:
        if rank == 0:
            descriptor = os.memfd_create("phalanx", os.MFD_CLOEXEC)
            cookie = secrets.token_bytes(16)
            if library().phx_segment_format(descriptor, size, *tuning.for_size(size), cookie):
                raise BackendError(f"the shared segment could not be made: {os.strerror(ctypes.get_errno())}")
            store.set("offer", json.dumps([os.getpid(), descriptor, cookie.hex()]))
            comm, _ = _attach(descriptor, rank, cookie, spin, poll)
            store.set("verdict", json.dumps(_collect_answers(store, size, timeout)))
        else:
            _wait(store, "offer", timeout, f"rank 0 did not come to a group of {size} ranks")
            pid, number, cookie_hex = json.loads(store.get("offer"))
            comm, reason = _attach_peer(pid, number, rank, bytes.fromhex(cookie_hex), spin, poll)
            store.set(f"answer/{rank}", reason)
            # Longer than rank 0 waits for the others, so that its verdict, which names who is missing, still
            # arrives.
            _wait(store, "verdict", timeout + VERDICT_GRACE, "rank 0 has gone while the group was made")
        missing, apart = json.loads(store.get("verdict"))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if comm is not None and not missing and not apart:
        return comm
    if comm is not None:
        library().phx_close(comm)
    if missing:
        raise InitializationError(
            f"rank {rank}: {missing} within {timeout.total_seconds():.0f} s. Was it started, and does it create "
            f"the same groups in the same order?"
        )
    raise NotOneHost(apart)


def _attach(descriptor: int, rank: int, cookie: bytes, spin: int, poll: Callable[[], int]) -> tuple[int | None, str]:
    comm: int | None = library().phx_open(descriptor, rank, cookie, spin, poll)
    return comm, "" if comm else os.strerror(ctypes.get_errno())


def _attach_peer(
    pid: int, number: int, rank: int, cookie: bytes, spin: int, poll: Callable[[], int]
) -> tuple[int | None, str]:
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return None, f"{error.strerror} (/proc/{pid}/fd)"
    try:
        return _attach(descriptor, rank, cookie, spin, poll)
    finally:
        os.close(descriptor)


def _collect_answers(store: Store, size: int, timeout: timedelta) -> tuple[str, str]:
    """Who has not come, and who came but could not attach; two empty texts when all is well."""
    for peer in range(1, size):
        try:
            _wait(store, f"answer/{peer}", timeout, "")
        except InitializationError:
            return f"rank {peer} did not come to a group of {size} ranks", ""
    reasons = {peer: store.get(f"answer/{peer}").decode() for peer in range(1, size)}
    return "", "; ".join(f"rank {peer}: {reason}" for peer, reason in reasons.items() if reason)


def _wait(store: Store, key: str, timeout: timedelta, otherwise: str) -> None:
    try:
        store.wait([key], timeout)
    except RuntimeError as error:  # each kind of store has its own subclass for a wait that was in vain
        raise InitializationError(f"{otherwise} within {timeout.total_seconds():.0f} s ({error})") from error
