"""Shared memory as a way between two processes of one host.

The core (``native/csrc/rpc/*.c``) moves the messages: small ones through a ring, large ones through a slab that stays
mapped, so that what is received is read where it lies. Here they are put together and taken apart, and given to the
worker. Threads of the hub sleep in the core, and one of them returns with each message, so a handler may run on it; a
thread that waits for an answer receives it itself (:meth:`SharedLink.wait`).

Two processes meet so: one makes an offer, which the other gets over a proven connection and accepts; when the first has
learnt of that, it confirms. An offer names a process and two of its descriptors, which the other opens through /proc.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable
from ctypes import c_int, c_ubyte, c_uint32, c_uint64, c_void_p
from functools import cache, partial
from typing import Annotated, Any

import msgspec
import numpy as np

from phalanx.errors import EncodingError
from phalanx.native.core import Status, library, rpc
from phalanx.rpc.handlers import IDLE_S, Pool
from phalanx.rpc.links.contract import (
    Buffer,
    Kind,
    Link,
    LinkEnded,
    Message,
    Receiver,
    SentToMany,
    decode_service,
    encode_service,
)
from phalanx.words import format_gib, tell

__all__ = ["Box", "Damaged", "Offer", "SharedHub", "SharedLink", "image_of", "received"]

# Of address space for the large messages of a worker; memory is taken when it is first used.
SLAB_BYTES = min(64 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 16 << 16)
FEW_THREADS = 2  # that stay when there is nothing to do
MOST_THREADS = 256  # a limit on mistakes, such as calls that go to and fro for ever
_COOKIE_BYTES = 16
_Cookie = Annotated[bytes, msgspec.Meta(min_length=_COOKIE_BYTES, max_length=_COOKIE_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_HERE = "this process has closed it"
_TAKES_NOTHING = "the other process takes nothing"
_PEER_LEFT = 2  # in the list below
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


# -- images: messages as they lie in memory (``native/csrc/rpc/rpc.h``) ------------------------------

# An image begins with a header that the core reads, followed by the sizes of the buffers, the service's name, the head,
# and the buffers, each at a multiple of ALIGN bytes.
ALIGN = 64
LARGEST_SMALL = 126976  # PHX_RPC_SMALL: an image of more bytes does not fit into a ring
_HEADER = struct.Struct("<QIHBxI4xQ")  # struct phx_rpc_image
_BOX = struct.Struct("<QQQ5I20xQIHBxI4xQ")  # struct phx_rpc_box, and the header of the image after it
_BOX_HEAD = 64
BOX_BYTES = _BOX_HEAD + LARGEST_SMALL
_INLINE = 0xFFFFFFFE  # PHX_RPC_INLINE
_COPY = 0x40000000  # PHX_RPC_COPY
_PADDING = bytes(ALIGN)
_KINDS = dict(enumerate(Kind, 1))


class Damaged(Exception):
    """Memory that was received and holds no message."""


def image_of(message: Message) -> tuple[int, list[bytes | memoryview]]:
    """Return how many bytes the image of a message has, and its parts in order."""
    service, head, buffers = encode_service(message.service), message.head, message.buffers
    at = _HEADER.size + 8 * len(buffers) + len(service) + len(head)
    parts: list[bytes | memoryview] = [b"", service, head]
    sizes = []
    for buffer in buffers:
        padding = -at % ALIGN
        sizes.append(buffer.nbytes)
        parts += (_PADDING[:padding], buffer)
        at += padding + buffer.nbytes
    header = _HEADER.pack(message.call, len(head), len(service), message.kind, len(buffers), at)
    parts[0] = header + struct.pack(f"<{len(sizes)}Q", *sizes) if sizes else header
    return at, parts


def places_of(parts: list[bytes | memoryview]) -> tuple[int, Any, Any, object]:
    """Return where the parts of a large image lie: their number, addresses and sizes, and their owners."""
    places = [np.frombuffer(part, np.uint8) for part in parts if len(part)]
    number = len(places)
    addresses = (c_void_p * number)(*[place.__array_interface__["data"][0] for place in places])
    return number, addresses, (c_uint64 * number)(*[place.nbytes for place in places]), places


@cache
def _memory_type(order: int) -> type[ctypes.Array[c_ubyte]]:
    """Make a type of memory of at most 2**order bytes that is lent; a type per size would be slow to make."""

    class Lent(c_ubyte * (1 << order)):  # type: ignore[misc]
        give_back: Callable[[], None]

        def __del__(self) -> None:
            self.give_back()

    return Lent


class Box:
    """Receive buffer of a thread, with room for a small message.

    Attributes:
        address: where it lies.
        view: its bytes.
        taken: how often the core had put something into it when the thread last took that out.
    """

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(BOX_BYTES)
        self.address = ctypes.addressof(self._memory)
        self.view = memoryview(self._memory).cast("B")
        self.taken = 0

    def open(self) -> tuple[int, ...]:
        """Return what came last: link, where, nbytes, block, sequence, ended, idle, taken.

        Then of its image: call, head_bytes, service_bytes, kind, buffers, nbytes.
        """
        return _BOX.unpack_from(self._memory)

    def has_more(self) -> bool:
        """Return whether something was put into it that has not been taken out."""
        return self.open()[7] != self.taken


def received(box: Box, values: tuple[int, ...], release: Callable[[int, int, int, int, int], None]) -> Message:
    """Return the message in a box. A large one lies where it came, and is released when nobody can reach it any more.

    When its sender is short of room, it is copied, and released at once.

    Raises:
        Damaged: its lengths do not fit together.
    """
    link, where, nbytes, block, sequence, _, _, _, call, head_bytes, service_bytes, kind, buffers, _ = values
    at = _HEADER.size + 8 * buffers
    body = at + service_bytes
    end = body + head_bytes
    if block == _INLINE:
        view = box.view[_BOX_HEAD : _BOX_HEAD + nbytes]
        if end > nbytes:
            raise Damaged
        head: Buffer | bytes = bytes(view[body:end])
    else:
        memory = _memory_type((nbytes - 1).bit_length()).from_address(where)
        memory.give_back = partial(release, link, block, sequence, where, nbytes)  # type: ignore[attr-defined]
        view = memoryview(memory).cast("B")[:nbytes]
        if block & _COPY:
            view = memoryview(bytearray(view))
        if end > nbytes:
            raise Damaged
        head = view[body:end]
    if kind not in _KINDS:  # only now, because a large image is given back by its memory
        raise Damaged
    parts = []
    if buffers:
        for size in struct.unpack_from(f"<{buffers}Q", view, _HEADER.size):
            end += -end % ALIGN
            part = view[end : end + size]
            if len(part) != size:
                raise Damaged
            parts.append(memoryview(bytearray(part)) if block == _INLINE else part)
            end += size
    if end != nbytes:
        raise Damaged
    try:
        service = decode_service(bytes(view[at:body]))
    except UnicodeDecodeError:
        raise Damaged from None
    return Message(_KINDS[kind], call, service, head, parts)


# -- links -----------------------------------------------------------------------------------------


class SharedLink(Link):
    """A way through shared memory; made by :class:`SharedHub`."""

    name = "shared memory"

    def __init__(self, hub: SharedHub, handle: int) -> None:
        self._hub = hub
        self._handle = handle
        self._core = rpc()
        quick = rpc(holding=True)
        self._send, self._begun, self._drop = quick.phx_rpc_send, quick.phx_rpc_begun, quick.phx_rpc_drop
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
        try:
            nbytes, parts = image_of(message)
        except struct.error:  # the header has no room for such a number
            self.check(message)
            raise
        if nbytes > LARGEST_SMALL:
            self._send_large(message, nbytes, parts, time.monotonic() + timeout_s)
            return
        image = b"".join(parts)
        if self._send(self._handle, image, len(image)):
            attempt = partial(self._send, self._handle, image, len(image))
            self._put(attempt, time.monotonic() + timeout_s)

    def _send_large(self, message: Message, nbytes: int, parts: list[bytes | memoryview], until: float) -> None:
        share = partial(self._share, nbytes, parts, until)
        if isinstance(many := message.buffers, SentToMany):
            if many.give_up is None:
                many.give_up = self._hub._unshare
                share(many.handle)
            lend = partial(self._core.phx_rpc_lend, self._handle, many.handle, message.call, True)
            if self._put(lend, until) != Status.BAD_ARGUMENT:  # else it has that already, and gets one of its own
                return
        own = c_uint64()
        try:
            share(own)
            self._put(partial(self._core.phx_rpc_lend, self._handle, own, message.call, False), until)
        finally:
            self._hub._unshare(own)

    def _share(self, nbytes: int, parts: list[bytes | memoryview], until: float, shared: c_uint64) -> None:
        """Copy a large image to where others can read it; write the handle of that."""
        *where, owners = places_of(parts)
        status = self._put(partial(self._core.phx_rpc_share, self._hub._handle, *where, shared), until)
        del owners
        if status == Status.BAD_ARGUMENT:
            raise EncodingError(
                f"a message of {format_gib(nbytes)} cannot be sent by {self.name}: at most "
                f"{format_gib(self._hub._slab_bytes // 2)} are possible. Send the value in several calls"
            )

    def _put(self, attempt: Callable[[], int], until: float) -> int:
        """Call ``attempt``, which places a message, until there was room for it; return its status."""
        while True:
            taken = self._core.phx_rpc_taken(self._handle)
            status = attempt()
            if status in (Status.OK, Status.BAD_ARGUMENT):
                return status
            if status == Status.SYSTEM:
                raise MemoryError("this host has no memory left for a message to another process")
            if status != Status.UNDER_WAY:
                raise self._lost()
            if time.monotonic() >= until:
                raise TimeoutError(_TAKES_NOTHING)
            self._core.phx_rpc_wait_room(self._handle, taken)

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

    def _end(self, why: str, *, left: bool = False) -> None:
        with self._ending:
            if self._over:
                return
            self._over = why
        self._hub._links.pop(self._handle, None)
        self._hub._receiver.ended(self, why, left=left)


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Offer of a link to one other process of this host: how that finds its memory.

    Attributes:
        pid: this process, in the /proc that both see.
        channel, cookie: its descriptor of the link's memory, and what is written at the beginning of that.
        place, place_cookie: the same for the memory of all its links.
    """

    pid: _Number
    channel: _Number
    cookie: _Cookie
    place: _Number
    place_cookie: _Cookie


class SharedHub:
    """This process's end of all its links through shared memory.

    Args:
        receiver: takes what comes.
        threads: on how many threads at most; they are started when they are needed.
        slab_bytes: how much memory the large messages that are sent may take; a multiple of 4096. No message may take
            more than half of it.

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
        self._offers: dict[Offer, SharedLink] = {}
        self._boxes = threading.local()
        self._closed = False
        self._handle = self._core.phx_rpc_open(self._cookie, slab_bytes)
        if not self._handle:
            error = ctypes.get_errno()
            raise OSError(error, f"no shared memory for RPC: {os.strerror(error)}")
        self._answers = c_uint32.from_address(self._core.phx_rpc_answers(self._handle))
        self._pool = Pool("phalanx-rpc-shared", self._serve, threads, FEW_THREADS)
        self._pool.fill()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._core.phx_rpc_close(self._handle)

    def offer(self) -> Offer:
        """Make something for one other process, by which it can attach.

        Raises:
            OSError: there is no memory or no descriptor for it.
        """
        cookie, descriptor = secrets.token_bytes(_COOKIE_BYTES), c_int(-1)
        handle = self._core.phx_rpc_offer(self._handle, cookie, descriptor)
        if not handle:
            error = ctypes.get_errno()
            raise OSError(error, f"no shared memory for RPC: {os.strerror(error)}")
        offer = Offer(
            pid=self._core.phx_rpc_pid(),
            channel=descriptor.value,
            cookie=cookie,
            place=self._core.phx_rpc_descriptor(self._handle),
            place_cookie=self._cookie,
        )
        self._offers[offer] = SharedLink(self, handle)
        return offer

    def accept(self, offer: Offer) -> SharedLink | None:
        """Return the link to the process that made the offer; None if its memory is out of reach, as on another host.

        Call :meth:`SharedLink.begin` when the receiver knows it.
        """
        handle = self._core.phx_rpc_accept(
            self._handle, offer.pid, offer.channel, offer.cookie, offer.place, offer.place_cookie
        )
        return SharedLink(self, handle) if handle else None

    def confirm(self, offer: Offer) -> SharedLink:
        """Return the link to whoever has accepted the offer. Call :meth:`SharedLink.begin` when the receiver knows it.

        Raises:
            LinkEnded: that process is gone, or its memory is out of reach.
        """
        link = self.withdraw(offer)
        if link is None:
            raise LinkEnded("this worker has left")
        if self._core.phx_rpc_confirm(link._handle) != Status.OK:
            reason = os.strerror(ctypes.get_errno())
            self._core.phx_rpc_end(link._handle)
            raise LinkEnded(f"its shared memory is out of reach: {reason}")
        return link

    def withdraw(self, offer: Offer) -> SharedLink | None:
        """Forget an offer, so that nobody can accept it any more; return its link if it was not forgotten before."""
        if (link := self._offers.pop(offer, None)) is not None:
            os.close(offer.channel)
        return link

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
        self._pool.close()

    def _unshare(self, shared: c_uint64) -> None:
        self._core.phx_rpc_unshare(self._handle, shared)

    def _box(self) -> Box:
        try:
            return self._boxes.box  # type: ignore[no-any-return]
        except AttributeError:
            self._boxes.box = Box()
            return self._boxes.box  # type: ignore[no-any-return]

    def _serve(self) -> None:
        receive, box = self._core.phx_rpc_next, self._box()
        idle_since = time.monotonic()
        while (status := receive(self._handle, box.address)) != Status.PEER_LOST:
            if status == Status.OK:
                self._take(box, serving=True)
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > IDLE_S and self._pool.may_end():
                return

    def _take(self, box: Box, *, serving: bool) -> None:
        """Give what has been received to the receiver."""
        values = box.open()
        box.taken = values[7]
        handle, ended, kind = values[0], values[5], values[11]
        link = self._links.get(handle)
        if ended:
            if link is not None:
                link._end(_WHY[ended], left=ended == _PEER_LEFT)
            return
        try:
            message = received(box, values, self._release)  # also without a link: its memory is given back
            if link is None:
                return
        except Damaged:
            if link is not None:
                self._core.phx_rpc_end(handle)
                link._end(_WHY[6])
            return
        try:
            if kind == Kind.REQUEST:
                others = values[6] or self._pool.add()  # one has to receive meanwhile
                link._begun(handle)
                self._receiver.deliver(link, message, may_block=bool(others))
            else:
                self._receiver.deliver(link, message, may_block=False)
        except Exception as error:
            tell(f"warning: a message could not be delivered: {error!r}")
        finally:
            if kind == Kind.NOTICE:
                link._begun(handle)
            elif kind != Kind.REQUEST and serving:
                self._answered(self._handle)
