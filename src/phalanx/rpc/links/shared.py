"""Shared memory as a way between two processes of one host.

The core (``native/csrc/rpc/*.c``) moves the messages: small ones through a ring, large ones through a slab that stays
mapped, so that what is received is read where it lies. Here they are put together and taken apart, and given to the
agent. Threads of the hub sleep in the core, and one of them returns with each message, so a handler may run on it; a
thread that waits for an answer receives it itself (:meth:`SharedLink.wait`).

Two processes meet so: one makes an offer, which the other gets over a proven connection and accepts; when the first has
learnt of that, it confirms. An offer names a process and two of its descriptors, which the other opens through /proc.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from ctypes import c_int, c_uint32, c_uint64
from functools import partial

from phalanx.native.core import Status, library, rpc
from phalanx.rpc.links.contract import Link, LinkEnded, Receiver
from phalanx.rpc.links.image import OWN, Box, Damaged, pack, pieces, received
from phalanx.rpc.message import Kind, Message, SentToMany
from phalanx.system.processes import state_of
from phalanx.system.threads import AwakeClock, start
from phalanx.words import tell

__all__ = ["SharedHub", "SharedLink"]

SLAB_BYTES = 256 << 20  # of address space for each direction of a link; memory is taken when it is first used
FEW_THREADS = 2  # that stay when there is nothing to do
MOST_THREADS = 256  # a limit on mistakes, such as calls that go to and fro for ever
IDLE_S = 30.0
JOIN_S = 2.0
_COOKIE_BYTES = 16
_SMALL_LANE, _BULK_LANE = 0, 1  # enum phx_rpc_lane
_HERE = "this process has closed it"
_WHY = (  # enum phx_rpc_end
    "",
    _HERE,
    "it has left",
    "its process has ended",
    "its process has become another program",
    "it found the memory shared with this process damaged, or had no memory left for a message",
    "the memory shared with it is damaged",
    "this process has no memory left for the messages between them",
)


class _Patience:
    """Waits until the other process takes something from a lane, and gives up when it has taken nothing for long."""

    def __init__(self, link: SharedLink, lane: int, timeout_s: float) -> None:
        self._link, self._lane, self._timeout_s = link, lane, timeout_s
        self._clock = AwakeClock()
        self._since = 0.0
        self._taken = -1
        self.look()

    def look(self) -> None:
        """Note what has been taken; before each attempt to send."""
        taken = self._link._core.phx_rpc_taken(self._link._handle, self._lane)
        if taken != self._taken:
            self._taken, self._since = taken, self._clock.now()

    def check(self) -> None:
        """Raise TimeoutError if it has been too long."""
        if self._clock.now() - self._since >= self._timeout_s:
            raise TimeoutError(f"the other process has taken nothing for {self._timeout_s:g} s")

    def wait(self) -> None:
        """Wait a little after an attempt for which there was no room.

        Raises:
            TimeoutError: it has been too long.
        """
        self.check()
        self._link._core.phx_rpc_wait_room(self._link._handle, self._lane, self._taken)


class SharedLink(Link):
    """A way through shared memory; made by :class:`SharedHub`."""

    name = "shared memory"

    def __init__(self, hub: SharedHub, handle: int) -> None:
        self._hub = hub
        self._handle = handle
        self._core = rpc()
        quick = rpc(holding=True)
        self._send, self._begun, self._drop = quick.phx_rpc_send, quick.phx_rpc_begun, quick.phx_rpc_drop
        self._bulk = threading.Lock()  # held for the records of one large message
        self._ending = threading.Lock()
        self._over = ""

    def __del__(self) -> None:
        self._drop(self._handle)

    def begin(self) -> None:
        """Receive from now on. The receiver has to know the link before.

        Raises:
            LinkEnded: the hub has been closed.
        """
        self._hub._links[self._handle] = self
        if self._core.phx_rpc_begin(self._handle) != Status.OK:
            self._hub._links.pop(self._handle, None)
            raise LinkEnded(_HERE)

    def send(self, message: Message, timeout_s: float) -> None:
        """See :class:`Link`."""
        image = pack(message, self.SMALL_BYTES)
        if image is None:
            self._send_large(message, timeout_s)
        elif status := self._send(self._handle, image, len(image)):
            patience = _Patience(self, _SMALL_LANE, timeout_s)
            while status == Status.UNDER_WAY:
                patience.look()
                if status := self._send(self._handle, image, len(image)):
                    patience.wait()
            if status:
                raise self._lost()

    def _send_large(self, message: Message, timeout_s: float) -> None:
        self.check(message)
        if isinstance(message.buffers, SentToMany):
            shared = message.buffers.copy_of(self._hub, partial(self._hub._share, message), self._hub._unshare)
            lend = partial(self._core.phx_rpc_lend, self._handle, shared, message.call)
            if shared and self._post(lend, timeout_s) != Status.BAD_ARGUMENT:
                return
        placed = c_uint64()
        with pieces(message) as where:
            try:
                self._core.phx_rpc_put(self._handle, *where, placed)  # beside other large messages, and small ones
                if placed.value:
                    attempt = partial(self._core.phx_rpc_post, self._handle, placed)
                else:
                    attempt = partial(self._core.phx_rpc_stream, self._handle, *where, c_uint64())
                if self._post(attempt, timeout_s) != Status.OK:
                    raise self._lost()
            except BaseException:
                # Unless it has been posted: a signal's handler may raise as soon as the core has done so.
                if placed.value:
                    self._core.phx_rpc_take_back(self._handle, placed)
                raise

    def _post(self, attempt: Callable[[], int], timeout_s: float) -> int:
        """Call ``attempt``, which puts records into the bulk lane, until it has: its status."""
        patience = _Patience(self, _BULK_LANE, timeout_s)
        while not self._bulk.acquire(timeout=0.05):
            patience.look()
            patience.check()
        try:
            while True:
                patience.look()
                status = attempt()
                if status != Status.UNDER_WAY:
                    break
                patience.wait()
        finally:
            self._bulk.release()
        if status not in (Status.OK, Status.BAD_ARGUMENT):
            raise self._lost()
        return status

    def _lost(self) -> LinkEnded:
        if os.getpid() != self._hub._pid:
            return LinkEnded("this process was forked from the one that has it")
        return LinkEnded(self._over or _WHY[self._core.phx_rpc_why(self._handle)] or "it has not begun")

    def wait(self, done: Callable[[], bool], call: int, timeout_s: float) -> None:
        """See :class:`Link`."""
        hub = self._hub
        receive, box, answers = self._core.phx_rpc_await, hub._box(), hub._answers
        until = time.monotonic() + timeout_s
        while True:
            seen = answers.value  # before done(): another thread counts after it has delivered
            if done() or self._over:
                return
            try:
                status = receive(hub._handle, self._handle, call, seen, box.address)
                if status == Status.OK:
                    hub._take(box, serving=False)
            except BaseException:
                # A signal's handler may raise as soon as the core has returned. What it brought may be for others.
                if box.has_more():
                    hub._take(box, serving=False)
                raise
            if status == Status.PEER_LOST or (status != Status.OK and time.monotonic() >= until):
                return

    def close(self) -> None:
        """See :class:`Link`."""
        self._core.phx_rpc_end(self._handle)
        self._end(_HERE)

    def state(self) -> dict[str, float | str]:
        """See :class:`Link`. ``python_s_ago`` is long ago if something holds the interpreter's lock."""
        alive, python = c_uint64(), c_uint64()
        pid = self._core.phx_rpc_facts(self._handle, alive, python)
        return {
            "alive_s_ago": alive.value / 1e9,
            "python_s_ago": python.value / 1e9,
            "process": state_of(pid),
            "pid": pid,
        }

    def _end(self, why: str) -> None:
        with self._ending:
            if self._over:
                return
            self._over = why
        self._hub._links.pop(self._handle, None)
        self._hub._receiver.ended(self, why)


class SharedHub:
    """This process's end of all its links through shared memory.

    Args:
        receiver: takes what comes.
        threads: on how many threads at most; they are started when they are needed.
        slab_bytes: how much of a link's memory large messages may take in each direction before they are copied in
            pieces, and how much those to several workers may take together; a multiple of 4096.

    Raises:
        OSError: there can be none on this system.
    """

    def __init__(self, receiver: Receiver, threads: int = MOST_THREADS, slab_bytes: int = SLAB_BYTES) -> None:
        library()
        self._core = rpc()
        quick = rpc(holding=True)
        self._release, self._answered = quick.phx_rpc_release, quick.phx_rpc_answered
        self._receiver = receiver
        self._slab_bytes = slab_bytes
        self._cookie = secrets.token_bytes(_COOKIE_BYTES)
        self._pid = os.getpid()
        self._links: dict[int, SharedLink] = {}
        self._offers: dict[bytes, tuple[SharedLink, int]] = {}
        self._boxes = threading.local()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._most = threads
        self._closed = False
        self._handle = self._core.phx_rpc_open(self._cookie, slab_bytes)
        if not self._handle:
            error = ctypes.get_errno()
            raise OSError(error, f"no shared memory for RPC: {os.strerror(error)}")
        self._answers = c_uint32.from_address(self._core.phx_rpc_answers(self._handle))
        for _ in range(min(FEW_THREADS, threads)):
            self._add_thread()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._core.phx_rpc_close(self._handle)

    def offer(self) -> bytes:
        """Something for one other process, by which it can attach.

        Raises:
            OSError: there is no memory or no descriptor for it.
        """
        cookie, descriptor = secrets.token_bytes(_COOKIE_BYTES), c_int(-1)
        handle = self._core.phx_rpc_offer(self._handle, cookie, self._slab_bytes, descriptor)
        if not handle:
            error = ctypes.get_errno()
            raise OSError(error, f"no shared memory for RPC: {os.strerror(error)}")
        offer = {
            "pid": self._core.phx_rpc_pid(),
            "channel": descriptor.value,
            "cookie": cookie.hex(),
            "place": self._core.phx_rpc_descriptor(self._handle),
            "place_cookie": self._cookie.hex(),
        }
        text = json.dumps(offer).encode()
        self._offers[text] = SharedLink(self, handle), descriptor.value
        return text

    def accept(self, offer: bytes) -> SharedLink | None:
        """The link to the process that made the offer; None if its memory is out of reach, as on another host.

        Call :meth:`SharedLink.begin` when the receiver knows it.
        """
        try:
            said = json.loads(offer)
            numbers = [said["pid"], said["channel"], said["place"]]
            cookies = [bytes.fromhex(said["cookie"]), bytes.fromhex(said["place_cookie"])]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if any(type(number) is not int or not 0 <= number < 1 << 31 for number in numbers):
            return None
        if any(len(cookie) != _COOKIE_BYTES for cookie in cookies):
            return None
        pid, channel, place = numbers
        handle = self._core.phx_rpc_accept(self._handle, pid, channel, cookies[0], place, cookies[1])
        return SharedLink(self, handle) if handle else None

    def confirm(self, offer: bytes) -> SharedLink:
        """The link to whoever has accepted the offer. Call :meth:`SharedLink.begin` when the receiver knows it.

        Raises:
            LinkEnded: that process is gone, or its memory is out of reach.
        """
        offered = self._offers.pop(offer, None)
        if offered is None:
            raise LinkEnded("this worker has left")
        link, descriptor = offered
        os.close(descriptor)
        if self._core.phx_rpc_confirm(link._handle) != Status.OK:
            reason = os.strerror(ctypes.get_errno())
            self._core.phx_rpc_end(link._handle)
            raise LinkEnded(f"its shared memory is out of reach: {reason}")
        return link

    def withdraw(self, offer: bytes) -> None:
        """Forget an offer that was not accepted."""
        if (offered := self._offers.pop(offer, None)) is not None:
            os.close(offered[1])

    def close(self) -> None:
        """End all links and threads. Threads that run a handler end after it."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for link in list(self._links.values()):
            link.close()
        for offer in list(self._offers):
            self.withdraw(offer)
        self._core.phx_rpc_shut(self._handle)
        until = time.monotonic() + JOIN_S
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _share(self, message: Message, shared: c_uint64) -> None:
        with pieces(message) as where:
            self._core.phx_rpc_share(self._handle, *where, shared)

    def _unshare(self, shared: c_uint64) -> None:
        self._core.phx_rpc_unshare(self._handle, shared)

    def _box(self) -> Box:
        try:
            return self._boxes.box  # type: ignore[no-any-return]
        except AttributeError:
            self._boxes.box = Box()
            return self._boxes.box  # type: ignore[no-any-return]

    def _add_thread(self) -> bool:
        """Start one more thread; whether there may be one more."""
        with self._lock:
            if self._closed or len(self._threads) >= self._most:
                return False
            thread = threading.Thread(target=self._serve, name="phalanx-rpc-shared", daemon=True)
            self._threads.add(thread)
        try:
            start(thread)
        except RuntimeError:
            with self._lock:
                self._threads.discard(thread)
            if not self._threads:
                raise
            return False
        return True

    def _serve(self) -> None:
        receive, box = self._core.phx_rpc_next, self._box()
        idle_since = time.monotonic()
        while True:
            status = receive(self._handle, box.address)
            if status == Status.OK:
                self._take(box, serving=True)
                idle_since = time.monotonic()
            elif status == Status.PEER_LOST:
                break
            elif time.monotonic() - idle_since > IDLE_S:
                with self._lock:
                    if len(self._threads) > FEW_THREADS:
                        self._threads.discard(threading.current_thread())
                        return
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _take(self, box: Box, *, serving: bool) -> None:
        """Give what has been received to the receiver."""
        values = box.open()
        box.taken = values[8]
        handle, lane, ended, kind = values[0], values[5], values[6], values[12]
        link = self._links.get(handle)
        if ended:
            if link is not None:
                link._end(_WHY[ended])
            return
        try:
            # To unmap a large image's own memory takes long, so that lets other threads run.
            release = self._release if values[3] != OWN else self._core.phx_rpc_release
            message = received(box, values, release)  # also without a link: its memory is given back
            if link is None:
                return
        except Damaged:
            if link is not None:
                self._core.phx_rpc_end(handle)
                link._end(_WHY[6])
            return
        try:
            if kind == Kind.REQUEST:
                others = values[7] or self._add_thread()  # one has to receive meanwhile
                link._begun(handle, lane)
                self._receiver.deliver(link, message, may_block=bool(others))
            else:
                self._receiver.deliver(link, message, may_block=False)
        except Exception as error:
            tell(f"warning: a message could not be delivered: {error!r}")
        finally:
            if kind == Kind.NOTICE:
                link._begun(handle, lane)
            elif kind != Kind.REQUEST and serving:
                self._answered(self._handle)
