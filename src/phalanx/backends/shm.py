"""The communicator for the ranks of one host: a shared segment and the C core.

The segment is a memfd that group rank 0 makes and the others reach through ``/proc/<pid>/fd/<n>``: it has no
name to leak, is not bounded by the size of /dev/shm (64 MB in containers), and is gone when the last process
is. Who can open it and reads the right cookie is on the same host; no hostname is believed.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from phalanx.backends.communicator import Communicator
from phalanx.errors import (
    BackendError,
    CollectiveMismatch,
    CollectiveTimeout,
    InitializationError,
    PeerLost,
    PhalanxError,
)
from phalanx.native.core import BROKEN_FROM, Breakage, Status, library
from phalanx.native.signals import SignalPoll

__all__ = ["NotOneHost", "SharedMemoryCommunicator"]

CHUNK_BYTES = 256 * 1024
VERDICT_GRACE = timedelta(seconds=5)

_DTYPES = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.int32: 5,
    torch.int64: 6,
}
_SUM = 1
# torch's ReduceOp compares and hashes slowly; its integer value is what travels from here on.
_OPS = {dist.ReduceOp.SUM.value: _SUM}


class NotOneHost(InitializationError):
    """Some rank cannot reach the segment: the group does not live on one host. Every rank gets it alike."""


class SharedMemoryCommunicator(Communicator):
    """Collectives through one shared segment (see ``native/csrc/segment.h`` for its protocol).

    Every rank of the group constructs it, at the same point of its program.

    Args:
        store: where the ranks meet; keys are left under the given prefix only.
        rank: this process's rank in the group.
        size: the number of ranks, at most 1024.
        timeout: how long to wait for the others, here and in every collective.
        chunk_bytes: bytes a rank puts in at a time; a multiple of 64. Small values make tests reach
            the many-chunk paths cheaply. Rank 0's value holds.

    Raises:
        NotOneHost: a rank cannot open the segment; the message says which and why.
        InitializationError: a rank did not come within the timeout.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.rank = rank
        self.size = size
        self._core = library()
        self._signals = SignalPoll()
        self._outputs = (ctypes.c_void_p * size)()
        cores = len(os.sched_getaffinity(0))
        # With more ranks than cores, whoever is awaited needs the core that a spin would burn.
        self._spin = 1000 if size <= cores else 50
        self._comm = self._meet(store, timeout, chunk_bytes)
        self._core.phx_set_timeout(self._comm, int(timeout.total_seconds() * 1e9))

    # -- meeting -----------------------------------------------------------------------------------

    def _meet(self, store: Store, timeout: timedelta, chunk_bytes: int) -> int:
        """Rank 0 offers a segment, everyone tries to attach, and all act on the one common verdict."""
        descriptor = -1
        try:
            if self.rank == 0:
                descriptor = os.memfd_create("phalanx", os.MFD_CLOEXEC)
                cookie = secrets.token_bytes(16)
                self._check(self._core.phx_segment_format(descriptor, self.size, chunk_bytes, cookie))
                store.set("offer", json.dumps([os.getpid(), descriptor, cookie.hex()]))
                comm, _ = self._attach(descriptor, cookie)
                store.set("verdict", json.dumps(self._collect_answers(store, timeout)))
            else:
                _wait(store, "offer", timeout, f"rank 0 did not come to a group of {self.size} ranks")
                pid, number, cookie_hex = json.loads(store.get("offer"))
                comm, reason = self._attach_peer(pid, number, bytes.fromhex(cookie_hex))
                store.set(f"answer/{self.rank}", reason)
                # Longer than rank 0 waits for the others, so that its verdict, which names who is missing,
                # still arrives.
                _wait(store, "verdict", timeout + VERDICT_GRACE, "rank 0 has gone while the group was made")
            missing, apart = json.loads(store.get("verdict"))
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if comm is not None and not missing and not apart:
            return comm
        if comm is not None:
            self._core.phx_close(comm)
        if missing:
            raise InitializationError(
                f"rank {self.rank}: {missing} within {timeout.total_seconds():.0f} s. Was it started, and does it "
                f"create the same groups in the same order?"
            )
        raise NotOneHost(apart)

    def _attach(self, descriptor: int, cookie: bytes) -> tuple[int | None, str]:
        comm: int | None = self._core.phx_open(descriptor, self.rank, cookie, self._spin, self._signals.callback)
        return comm, "" if comm else os.strerror(ctypes.get_errno())

    def _attach_peer(self, pid: int, number: int, cookie: bytes) -> tuple[int | None, str]:
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return None, f"{error.strerror} (/proc/{pid}/fd)"
        try:
            return self._attach(descriptor, cookie)
        finally:
            os.close(descriptor)

    def _collect_answers(self, store: Store, timeout: timedelta) -> tuple[str, str]:
        """Who has not come, and who came but could not attach; two empty texts when all is well."""
        for peer in range(1, self.size):
            try:
                _wait(store, f"answer/{peer}", timeout, "")
            except InitializationError:
                return f"rank {peer} did not come to a group of {self.size} ranks", ""
        reasons = {peer: store.get(f"answer/{peer}").decode() for peer in range(1, self.size)}
        return "", "; ".join(f"rank {peer}: {reason}" for peer, reason in reasons.items() if reason)

    # -- collectives -------------------------------------------------------------------------------

    def can_all_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return dtype in _DTYPES and op in _OPS

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        data = tensor.data_ptr()
        status = self._core.phx_all_reduce(self._comm, data, data, tensor.numel(), _DTYPES[tensor.dtype], _OPS[op])
        if status:
            self._check(status)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        status = self._core.phx_broadcast(self._comm, tensor.data_ptr(), tensor.nbytes, root)
        if status:
            self._check(status)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        pointers = self._outputs
        for peer, output in enumerate(outputs):
            pointers[peer] = output.data_ptr()
        status = self._core.phx_all_gather(self._comm, tensor.data_ptr(), pointers, tensor.nbytes)
        if status:
            self._check(status)

    def barrier(self) -> None:
        status = self._core.phx_barrier(self._comm)
        if status:
            self._check(status)

    def abort(self) -> None:
        self._core.phx_abort(self._comm)

    def close(self) -> None:
        comm, self._comm = self._comm, 0
        if comm:
            self._core.phx_close(comm)

    # -- when it goes wrong ------------------------------------------------------------------------

    def _check(self, status: int) -> None:
        if status == Status.OK:
            return
        if status == Status.SYSTEM:
            raise BackendError(f"the shared segment could not be made: {os.strerror(ctypes.get_errno())}")
        if status < BROKEN_FROM:
            raise BackendError(f"the core refused the call as malformed (status {status}, rank {self.rank})")
        self._signals.raise_pending()
        raise self._explain()

    def _explain(self) -> PhalanxError:
        """The error for a broken group, from what the rank that noticed has written down."""
        why = Breakage()
        self._core.phx_breakage(self._comm, ctypes.byref(why))
        peer = f"rank {why.peer} of the group (pid {why.peer_pid})"
        where = f"while rank {why.rank} was in {why.call}"
        if why.status == Status.MISMATCH:
            return CollectiveMismatch(
                f"the ranks called different collectives: rank {why.rank} {why.call}, "
                f"rank {why.peer} {why.peer_call}. Every rank of a group must make the same calls in the same "
                f"order; look for an if that depends on the rank, or data of different sizes"
            )
        if why.status == Status.TIMEOUT:
            return CollectiveTimeout(
                f"{peer} did not come in time {where}. It is alive: is it in other code, or much slower? "
                f"A longer timeout is set with phalanx.init(timeout_s=...)",
                group_rank=why.peer,
            )
        if why.status == Status.INTERRUPTED:
            return PeerLost(
                f"rank {why.rank} of the group (pid {why.peer_pid}) was interrupted in {why.call}; "
                f"the ranks are out of step",
                group_rank=why.rank,
                pid=why.peer_pid,
            )
        return PeerLost(
            f"{peer} has ended {where}. Look at that rank's own output for the cause",
            group_rank=why.peer,
            pid=why.peer_pid,
        )


def _wait(store: Store, key: str, timeout: timedelta, otherwise: str) -> None:
    try:
        store.wait([key], timeout)
    except RuntimeError as error:  # each kind of store has its own subclass for a wait that was in vain
        raise InitializationError(f"{otherwise} within {timeout.total_seconds():.0f} s ({error})") from error
