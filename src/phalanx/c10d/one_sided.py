"""One-sided reads and writes of tensors between processes of one host: ``torch.distributed._transport`` (torch 2.15).

``new_transport("phalanx")`` finds the class by the entry point in the group ``torch.distributed.transports``. Two
transports need no process group: each makes an address, and the program takes it to the other one, as it does with the
descriptions of memory. A transfer is one system call of the side that wants it (``system/other_memory.py``): the bytes
are copied once, from tensor to tensor, and the other process need not run. The alternative, a shared mapping, would
need tensors that were allocated for it.

This is the only module that imports ``torch.distributed._transport``; nothing of Phalanx imports this one. Checked on
torch 2.15.0.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._transport import Memory, MemoryView, MutableMemoryView, RemoteBuffer, Transport, wait_all

from phalanx.c10d.one_sided_memory import (
    MutableView,
    RegisteredMemory,
    Registration,
    RemoteMemory,
    View,
    decoded,
    encoded,
)
from phalanx.c10d.operation import Operation
from phalanx.errors import ArgumentError, BackendError, ClosedError, DeviceMismatch, InitializationError, PeerLost
from phalanx.system.awake import AwakeClock
from phalanx.system.host import this_host
from phalanx.system.other_memory import allow_readers, read_memory, why_refused, write_memory

__all__ = ["SharedMemoryTransport"]

PIECE_BYTES = 64 * 1024 * 1024  # moved at once: a few milliseconds, after each of which a deadline is looked at
COOKIE_BYTES = 16
_ADDRESS = {"endpoint": str, "boot": str, "pids": str, "pid": int, "cookie": int}


class _Peer:
    """The process at the other end: its memory, and whether it still runs."""

    def __init__(self, address: bytes) -> None:
        fields = decoded("transport", _ADDRESS, address)
        self.endpoint, self.pid = fields["endpoint"], fields["pid"]
        host = this_host({})
        try:
            if (host.boot_id, host.pid_namespace) != (fields["boot"], fields["pids"]):
                raise InitializationError("the peer is on another host, or in another pid namespace of this one")
            self._descriptor = os.pidfd_open(self.pid)
        except OSError as error:
            raise InitializationError(f"the peer, process {self.pid}, cannot be reached: {error.strerror}") from None
        try:
            cookie = ctypes.create_string_buffer(COOKIE_BYTES)
            try:
                read_memory(self.pid, fields["cookie"], ctypes.addressof(cookie), COOKIE_BYTES)
            except OSError as error:
                refused = error.errno == errno.EPERM
                reason = why_refused(self.pid) if refused else "it has ended, or closed its transport"
                raise InitializationError(f"the peer's memory cannot be read: {reason}") from None
            if cookie.raw.hex() != self.endpoint:
                raise InitializationError(f"process {self.pid} is not the peer any more, or its transport is closed")
        except BaseException:
            self.close()
            raise

    def move(self, call: Callable[..., None], remote: int, local: int, nbytes: int) -> None:
        """Read or write the peer's memory."""
        # The number of a process that has ended may be another's by now; its descriptor can be read from then on.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if poll.poll(0):
            raise self._ended()
        try:
            call(self.pid, remote, local, nbytes)
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise self._ended() from None
            reason = why_refused(self.pid) if error.errno == errno.EPERM else "the peer's memory is not there any more"
            raise BackendError(f"{reason} ({error})") from None

    def close(self) -> None:
        os.close(self._descriptor)

    def _ended(self) -> PeerLost:
        return PeerLost(f"the peer of the transport, process {self.pid}, has ended", pid=self.pid)


class TransferWork(dist.Work):
    """The handle of one transfer that a thread makes."""

    def __init__(self, operation: Operation, timeout_s: float) -> None:
        super().__init__()
        self._operation, self._timeout_s = operation, timeout_s

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the transfer is done; True.

        Args:
            timeout: how long to wait; by default what the transfer was started with.

        Raises:
            TimeoutError: it is still under way, and can be waited for again.
            PhalanxError: it failed.
        """
        given = timeout is not None and timeout.total_seconds() > 0
        limit_s = timeout.total_seconds() if given and timeout is not None else self._timeout_s
        if not self._operation.wait_done(limit_s):
            raise TimeoutError(f"the transfer is still under way after {limit_s:.3f} s; it goes on")
        if self._operation.error is not None:
            raise self._operation.error
        return True

    def is_completed(self) -> bool:
        return self._operation.done

    def is_success(self) -> bool:
        return self._operation.done and self._operation.error is None

    def exception(self) -> BaseException | None:
        return self._operation.error

    def result(self) -> list[torch.Tensor]:
        return []

    def get_future(self) -> torch.futures.Future[Any]:
        return self._operation.future()


class SharedMemoryTransport(Transport):  # type: ignore[misc]
    """A transport between two processes of one user on one host, for CPU tensors.

    Args:
        device: ``cpu``, or nothing.
        timeout: how long a call may wait, in seconds, where it is not given its own.
    """

    def __init__(self, device: torch.device | str | None = None, *, timeout: float = 30.0) -> None:
        super().__init__(device)
        if self.device is not None and self.device.type != "cpu":
            raise DeviceMismatch(f"transport 'phalanx' moves CPU tensors, not those on {self.device}")
        self._default_timeout = timeout
        self._process = os.getpid()
        self._endpoint = secrets.token_bytes(COOKIE_BYTES)
        # Peers compare these bytes in this process with its address. Written here and in close(), under the lock; a
        # peer reads them once, in connect(), and no later one is confused by bytes that are freed.
        self._cookie = ctypes.create_string_buffer(self._endpoint, COOKIE_BYTES)
        self._peer: _Peer | None = None
        self._lock = threading.Lock()
        self._registrations: dict[tuple[int, int], Registration] = {}
        self._under_way: set[Operation] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._closing = self._closed = False

    @staticmethod
    def supported() -> bool:
        return hasattr(os, "pidfd_open") and hasattr(ctypes.CDLL(None), "process_vm_readv")

    def bind(self, *, timeout: float | None = None) -> bytes:
        """The address of this end, for the peer; whoever has it can read and write what is registered here."""
        self._refuse_if_closed()
        allow_readers()
        host = this_host({})
        fields = {"endpoint": self._endpoint.hex(), "boot": host.boot_id, "pids": host.pid_namespace}
        return encoded("transport", {**fields, "pid": os.getpid(), "cookie": ctypes.addressof(self._cookie)})

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        """Find the peer whose ``bind`` returned this address; 0.

        Raises:
            InitializationError: it is not there, not on this host, or its memory may not be read; the message says why.
        """
        self._refuse_if_closed()
        if self._peer is not None:
            raise InitializationError("the transport is connected already; make one for each peer")
        self._peer = _Peer(peer_url)
        return 0

    def connected(self) -> bool:
        return self._peer is not None and not self._closing

    def register_memory(self, tensor: torch.Tensor, *, timeout: float | None = None) -> RegisteredMemory:
        """Let the peer read and write a contiguous CPU tensor, until it is unregistered."""
        self._refuse_if_closed()
        if not tensor.is_cpu or tensor.layout != torch.strided:
            raise DeviceMismatch(f"transport 'phalanx' moves dense CPU tensors, not {tensor.layout} on {tensor.device}")
        if not tensor.is_contiguous() or not tensor.nbytes or not tensor.data_ptr():
            raise ArgumentError("register_memory needs a contiguous tensor that is not empty; call .contiguous()")
        with self._lock:
            key = (tensor.data_ptr(), tensor.nbytes)
            if key not in self._registrations:
                self._registrations[key] = Registration(tensor)
            return RegisteredMemory(self._registrations[key], self, self._endpoint.hex())

    def unregister_memory(self, memory: Memory, *, timeout: float | None = None) -> None:
        """Invalidate a registration with all its handles, views and descriptions. Transfers must be over."""
        self._refuse_if_closed()
        registration = self._own(memory).registration
        with self._lock:
            if registration.transfers:
                raise BackendError("transfers from or into the memory are under way; wait for them, then unregister it")
            if registration.active:
                registration.end()
                del self._registrations[registration.address, registration.nbytes]

    def write(
        self,
        local_buffer: MemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | dist.Work:
        """Copy a view to the beginning of the peer's memory; 0, or the transfer's ``Work``."""
        self._check_transfer(local_buffer, remote_buffer, mutable=False)
        return self._start(write_memory, local_buffer, remote_buffer, async_op, timeout)

    def read(
        self,
        local_buffer: MutableMemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | dist.Work:
        """Fill a view from the beginning of the peer's memory; 0, or the transfer's ``Work``."""
        self._check_transfer(local_buffer, remote_buffer, mutable=True)
        return self._start(read_memory, local_buffer, remote_buffer, async_op, timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for transfers under way, then invalidate all that is registered here. A second call does nothing.

        Raises:
            TimeoutError: some are still under way. New ones are refused from now on; call it again.
        """
        self._close_cuda_streams()
        limit_s = self._seconds(timeout)
        clock = AwakeClock()
        for operation in self._begin_to_close():
            if not operation.wait_done(max(0.0, limit_s - clock.now()), clock):
                raise TimeoutError(f"transfers are still under way after {limit_s:.3f} s; close the transport again")
        self._release()

    async def close_async(self, *, timeout: float | None = None) -> None:
        """``close`` without blocking the event loop."""
        self._close_cuda_streams()
        works = [TransferWork(operation, 0) for operation in self._begin_to_close()]
        try:
            await wait_all(works, timeout=self._seconds(timeout))
        except Exception:
            if not all(work.is_completed() for work in works):
                raise
        self._release()

    def _check_transfer(self, local_buffer: MemoryView, remote_buffer: RemoteBuffer, *, mutable: bool) -> None:
        self._refuse_if_closed()
        if not isinstance(local_buffer, MutableView if mutable else View):
            view = "to_mutable_view()" if mutable else "to_view()"
            raise ArgumentError(f"the local buffer is not a view of memory that was registered here: register, {view}")
        self._own(local_buffer.memory).registration.refuse_if_unusable()
        if self._peer is None:
            raise ArgumentError("the transport is not connected: call connect() with what the peer's bind() returned")
        if not isinstance(remote_buffer, RemoteMemory) or remote_buffer.endpoint != self._peer.endpoint:
            raise ArgumentError("the remote buffer does not describe memory of the peer that is connected")
        if local_buffer.size() > remote_buffer.nbytes:
            raise ArgumentError(
                f"{local_buffer.size()} bytes do not fit in the peer's memory, which has {remote_buffer.nbytes}"
            )

    def _start(
        self, call: Callable[..., None], local: Any, remote: Any, asynchronous: bool, timeout: float | None
    ) -> int | dist.Work:
        limit_s, registration = self._seconds(timeout), local.memory.registration
        deadline = None if asynchronous else time.monotonic() + limit_s
        operation = Operation(lambda: self._move(call, local, remote, deadline), [])
        with self._lock:
            self._refuse_if_closed()
            self._under_way.add(operation)
            registration.transfers += 1
            if asynchronous and self._threads is None:
                self._threads = ThreadPoolExecutor(1, "phalanx-transport")
        if asynchronous and self._threads is not None:
            self._threads.submit(self._run, operation, registration)
            return TransferWork(operation, limit_s)
        self._run(operation, registration)
        if operation.error is not None:
            raise operation.error
        return 0

    def _run(self, operation: Operation, registration: Registration) -> None:
        operation.run()
        with self._lock:
            registration.transfers -= 1
            self._under_way.discard(operation)
        operation.finish()

    def _move(self, call: Callable[..., None], local: View, remote: RemoteMemory, deadline: float | None) -> None:
        peer, nbytes = self._peer, local.size()
        if peer is None:
            raise ClosedError("the transport is closed")
        for start in range(0, nbytes, PIECE_BYTES):
            number = ctypes.c_uint64()
            peer.move(read_memory, remote.guard, ctypes.addressof(number), ctypes.sizeof(number))
            if number.value != remote.number:
                raise ClosedError("the peer has unregistered the memory, or closed its transport")
            peer.move(call, remote.address + start, local.address + start, min(PIECE_BYTES, nbytes - start))
            if deadline is not None and time.monotonic() > deadline and start + PIECE_BYTES < nbytes:
                raise TimeoutError(f"{start + PIECE_BYTES} of {nbytes} bytes were moved within the timeout")

    def _own(self, memory: Any) -> RegisteredMemory:
        if not isinstance(memory, RegisteredMemory) or memory.owner is not self:
            raise ArgumentError("the memory was not registered by this transport")
        return memory

    def _seconds(self, timeout: float | None) -> float:
        seconds: float = self._default_timeout if timeout is None else timeout
        if not 0 <= seconds < float("inf"):
            raise ArgumentError(f"a timeout is a number of seconds that is not negative, not {seconds}")
        return seconds

    def _refuse_if_closed(self) -> None:
        if self._closing:
            raise ClosedError("the transport is closed")
        if os.getpid() != self._process:
            raise ClosedError("the transport belongs to the process that this one was forked from; make one here")

    def _begin_to_close(self) -> list[Operation]:
        with self._lock:
            self._closing = True
            return list(self._under_way)

    def _release(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peer, self._peer = self._peer, None
            for registration in self._registrations.values():
                registration.end()
            self._registrations.clear()
            ctypes.memset(self._cookie, 0, COOKIE_BYTES)
        if self._threads is not None:
            self._threads.shutdown()
        if peer is not None:
            peer.close()
