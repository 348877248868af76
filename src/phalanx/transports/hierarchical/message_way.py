"""The way from this rank to one of another host, on which messages travel over an engine that knows no messages.

An engine moves bytes into memory that waits for them. It must not be sent more than that memory holds (Gloo ends the
process then), and where its peer dies in the middle of a transfer, the wait for that transfer may never end (Gloo's
does not). So what travels is *frames*, of a limited size, for which both sides always have memory waiting, and nobody
ever waits for anything else than the next frame, or a last byte, of which the peer's end is noticed:

- A *small* message is in its frame.
- The bytes of a *staged* message go into a stage, which is memory of the receiver's that waits for them. They are sent
  before the frame, so they are there when it is.
- A *large* message is announced by its frame, and goes straight into the tensor that it is received into, through a
  slot of its own, once the receiver has given that to the engine. A last byte follows, and is what the receiver waits
  for; then a frame tells the sender that it is done.

A sender has *credit*: so many frames, and stages, as the receiver has read and has not told it. A message whose receive
is not posted keeps its credit, so a sender that is ahead is held up, and no rank's memory fills. It is given back when
the receiver waits for something that comes later on the same way: a message, or the news that a large one is there.

A large message of a tag, dtype and size that were sent this way before goes through the same slot as the one before, so
the receiver can give its tensor to the engine before it has heard of the message, and no time is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.diagnosis import recorder
from phalanx.transports.hierarchical.gloo_engine import GlooEngine as Engine
from phalanx.transports.hierarchical.gloo_engine import Transfer, TransferFailed

__all__ = ["BROKEN", "DONE", "LARGE", "LEFT", "SMALL", "SMALL_BYTES", "STAGED", "STAGED_BYTES", "Arrival", "Key", "Way"]

SMALL_BYTES = 4 * 1024
STAGED_BYTES = 256 * 1024
FRAMES = 8  # that a sender may be ahead
SPARE = 4  # frames that are sent without credit: news of credit, and how this rank ends
STAGES = 4

# What a frame says.
SMALL, STAGED, LARGE, DONE, CREDIT, LEFT, BROKEN = range(7)
# Its kind; the dtype's number; the slot of a large message, and the slot that later ones like it will use; the tag; the
# message's bytes and number; how many frames and stages of the other side this one has read; the line of the program
# that sends, by its number in the sender's recorder, and how many bytes of its text follow the data.
_HEAD = struct.Struct("<BxHIIqQQQQIH")
HEAD_BYTES = 64  # so that the data is aligned
_LINE_BYTES = 512  # of the text of a line, which goes with the first message from there
_FRAME_BYTES = HEAD_BYTES + SMALL_BYTES + _LINE_BYTES

# The engine's tags: of frames, of stages, of the bytes by which a side knows that all it sent is there, and a pair for
# each slot: its data and its last byte. MPI allows 32767.
_FRAME, _STAGE, _THERE = 0, 1, 2
_LASTING, _SLOTS = 3, 1024  # slots of messages that are alike
_PASSING, _NUMBERED = _LASTING + 2 * _SLOTS, 14_000  # of the first message of a kind

Key = tuple[int, int, int]  # tag, the dtype's number, bytes


class Arrival:
    """What has come, or for a large message what will come."""

    __slots__ = (
        "address",
        "aside",
        "dtype",
        "key_slot",
        "kind",
        "line",
        "lost",
        "memory",
        "nbytes",
        "number",
        "sender",
        "slot",
        "tag",
        "taker",
        "way",
    )

    def __init__(self, way: Way | None, kind: int, dtype: int, tag: int, nbytes: int) -> None:
        self.way, self.kind, self.dtype, self.tag, self.nbytes = way, kind, dtype, tag, nbytes
        self.number = self.slot = self.key_slot = self.address = 0
        self.line = ""  # of the sender's program
        self.memory: torch.Tensor | bytes | None = None
        self.aside = False  # whether it has no receive yet
        self.lost = False  # whether it was being set aside when the way ended
        self.sender: Any = None  # of a message to oneself
        self.taker: Any = None  # the receive that gets a large message which is being set aside


class Way:
    """One rank's side of the way to another.

    All of it is read and written under the group's lock, but for :meth:`open` and :meth:`read`, during which no other
    thread may call the same of this way; they touch what only they use until they return.

    Args:
        engine: carries the frames.
        peer: the other rank.

    Attributes:
        is_open: whether frames can be sent. Written once, by :meth:`opened`.
        over: why nothing comes any more: the rank has left in order (None), or an error; see ``is_over``.
        known: the slots of large messages that have come this way.
    """

    def __init__(self, engine: Engine, peer: int) -> None:
        self._engine = engine
        self.peer = peer
        self.is_open = self.is_over = False
        self.over: TransferFailed | None = None
        self.known: dict[Key, int] = {}
        self._keys: dict[Key, int] = {}  # the slots of those that were sent
        self._frames: deque[tuple[torch.Tensor, memoryview, int, Transfer]] = deque()
        self._stages: deque[tuple[torch.Tensor, Transfer]] = deque()
        self._outgoing: list[tuple[torch.Tensor, memoryview, int]] = []
        self._outgoing_stages: list[tuple[torch.Tensor, int]] = []
        self._sent: deque[Transfer] = (
            deque()
        )  # frames, until the other side has read them: the engine needs them so long
        self._sent_stages: deque[Transfer] = deque()
        self._frames_sent = self._frames_known_read = 0
        self._stages_sent = self._stages_known_read = 0
        self._frames_read = self._frames_told = 0
        self._stages_read = self._stages_told = 0
        self._held = [0, 0]  # frames and stages that have been read and keep their credit
        self._numbers = 0
        self._there: list[Transfer] = []
        self._told_lines: set[int] = set()
        self._lines: dict[int, str] = {}  # of the other side

    # -- opening -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect the two ranks. May take until the other one does so too.

        Raises:
            TransferFailed: they cannot be connected.
        """
        # Stages first: what is sent into them must not be overtaken by its frame.
        for _ in range(STAGES):
            self._await_stage(torch.empty(STAGED_BYTES, dtype=torch.uint8))
        for _ in range(FRAMES + SPARE):
            frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
            self._await_frame(frame, memoryview(frame.numpy()), frame.data_ptr())  # type: ignore[arg-type]
            frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
            self._outgoing.append((frame, memoryview(frame.numpy()), frame.data_ptr()))  # type: ignore[arg-type]
        for _ in range(STAGES):
            stage = torch.empty(STAGED_BYTES, dtype=torch.uint8)
            self._outgoing_stages.append((stage, stage.data_ptr()))
        # The engine keeps them until the other side asks for them; see wait_until_there.
        self._there = [self._engine.send(torch.empty(1, dtype=torch.uint8), self.peer, _THERE) for _ in range(2)]

    def _await_frame(self, frame: torch.Tensor, memory: memoryview, address: int) -> None:
        self._frames.append((frame, memory, address, self._engine.recv(frame, self.peer, _FRAME)))

    def _await_stage(self, stage: torch.Tensor) -> None:
        self._stages.append((stage, self._engine.recv(stage, self.peer, _STAGE)))

    # -- sending -----------------------------------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        """Whether there is credit for a message of this size."""
        if not self.is_open or self.is_over or self._frames_sent - self._frames_known_read >= FRAMES:
            return False
        return not SMALL_BYTES < nbytes <= STAGED_BYTES or self._stages_sent - self._stages_known_read < STAGES

    def send(self, tensor: torch.Tensor, dtype: int, tag: int, site: int) -> None:
        """Send a message of at most ``STAGED_BYTES``, for which there is room. It is copied.

        Args:
            tensor: the message.
            dtype, tag: of it.
            site: the line of the program that sends it, by its number in this rank's recorder.

        Raises:
            TransferFailed: the connection is broken.
        """
        nbytes = tensor.nbytes
        if nbytes <= SMALL_BYTES:
            self._send_frame(SMALL, dtype, 0, 0, tag, nbytes, 0, tensor.data_ptr(), site)
            return
        stage, address = self._outgoing_stages[self._stages_sent % STAGES]
        ctypes.memmove(address, tensor.data_ptr(), nbytes)
        self._sent_stages.append(self._engine.send(stage[:nbytes], self.peer, _STAGE))
        self._stages_sent += 1
        self._send_frame(STAGED, dtype, 0, 0, tag, nbytes, 0, 0, site)

    def send_large(
        self, tensor: torch.Tensor, dtype: int, tag: int, site: int
    ) -> tuple[int, tuple[Transfer, Transfer]]:
        """Send a larger message, for which there is room; the arguments are those of :meth:`send`.

        Returns:
            Its number, which the other side says when it has it, and what has to be kept until then.
        """
        self._numbers += 1
        number, key = self._numbers, (tag, dtype, tensor.nbytes)
        lasting = slot = self._keys.get(key, 0)
        if not slot:
            slot = _PASSING + 2 * (number % _NUMBERED)
            if len(self._keys) < _SLOTS:
                lasting = self._keys[key] = _LASTING + 2 * len(self._keys)
        self._send_frame(LARGE, dtype, slot, lasting, tag, tensor.nbytes, number, 0, site)
        last = torch.empty(1, dtype=torch.uint8)
        data = self._engine.send(tensor, self.peer, slot)
        return number, (data, self._engine.send(last, self.peer, slot + 1))

    def say_done(self, number: int) -> None:
        """Tell the other side that a large message of its own is here; there must be room for a frame."""
        self._send_frame(DONE, 0, 0, 0, 0, 0, number, 0)

    def say_last(self, kind: int) -> list[Transfer]:
        """Tell the other side how this one ends; what has to be waited for before the engine is closed.

        Args:
            kind: ``LEFT``: in order; ``BROKEN``: the group is broken, for a reason that is told elsewhere.
        """
        self._send_frame(kind, 0, 0, 0, 0, 0, 0, 0)
        return [*self._sent, *self._sent_stages]

    @property
    def is_ahead(self) -> bool:
        """Whether anything was sent that the other side has not said to have read."""
        return self._frames_sent > self._frames_known_read

    def wait_until_there(self, sent: Sequence[Transfer]) -> None:
        """Wait until what was sent is in the other process's memory for it, whether or not somebody reads there.

        The other side has given its engine two bytes for this one, which the engine hands out without asking anybody.
        The second is asked for when everything else is on the wire, and the engine over there reads a connection in
        order. The first is asked for before that: if the connection has broken, the wait for a byte ends, while that
        for what was sent may not (``gloo_engine.py``).

        Args:
            sent: what :meth:`say_last` has returned.

        Raises:
            TransferFailed: the connection has ended.
        """
        self._engine.recv(torch.empty(1, dtype=torch.uint8), self.peer, _THERE).wait()
        for transfer in sent:
            transfer.wait()
        self._engine.recv(torch.empty(1, dtype=torch.uint8), self.peer, _THERE).wait()

    def _line_for(self, site: int) -> bytes:
        """The text of a line of this rank's program, unless the other side has it."""
        if not site or site in self._told_lines:
            return b""
        self._told_lines.add(site)
        text = recorder.place_of(site).encode(errors="replace")
        return text if len(text) <= _LINE_BYTES else b""

    def _send_frame(
        self,
        kind: int,
        dtype: int,
        slot: int,
        lasting: int,
        tag: int,
        nbytes: int,
        number: int,
        data: int,
        site: int = 0,
    ) -> None:
        frame, memory, address = self._outgoing[self._frames_sent % (FRAMES + SPARE)]
        read, line = self._frames_read, self._line_for(site)
        progress = read, self._stages_read
        _HEAD.pack_into(memory, 0, kind, dtype, slot, lasting, tag, nbytes, number, *progress, site, len(line))
        size = HEAD_BYTES
        if data:
            ctypes.memmove(address + HEAD_BYTES, data, nbytes)
            size += nbytes
        if line:
            ctypes.memmove(address + size, line, len(line))
            size += len(line)
        self._sent.append(self._engine.send(frame[:size], self.peer, _FRAME))
        self._frames_sent += 1
        self._frames_told, self._stages_told = read, self._stages_read

    # -- receiving ---------------------------------------------------------------------------------

    def read(self) -> None:
        """Wait for the next frame.

        Raises:
            TransferFailed: there will be none.
        """
        if not self._frames:
            raise TransferFailed(self.peer, "the connection is closed")
        self._frames[0][3].wait()

    def take(self, handle: Callable[[Arrival], bool]) -> None:
        """Read the frame that has come.

        Args:
            handle: is given what it says. The data of a small message is valid until it returns, that of a staged one
                as well, unless it is set aside. If it returns False, the frame keeps its credit until
                :meth:`release`, as does its stage.

        """
        frame, memory, address, _ = self._frames.popleft()
        kind, dtype, slot, lasting, tag, nbytes, number, *progress, site, length = _HEAD.unpack_from(memory)
        self._hear_of_credit(*progress)
        arrival = Arrival(self, kind, dtype, tag, nbytes)
        arrival.number, arrival.slot, arrival.key_slot = number, slot, lasting
        if 0 < length <= _LINE_BYTES:  # the frame has no room for more
            at = address + HEAD_BYTES + (nbytes if kind == SMALL else 0)
            self._lines[site] = ctypes.string_at(at, length).decode(errors="replace")
        arrival.line = self._lines.get(site, "")
        staged = kind == STAGED
        if kind == SMALL:
            arrival.address = address + HEAD_BYTES
        elif staged:
            stage, transfer = self._stages.popleft()
            transfer.wait()  # it was sent before the frame
            arrival.memory, arrival.address = stage, stage.data_ptr()
        elif kind == LARGE and lasting:
            self.known[tag, dtype, nbytes] = lasting
        used = handle(arrival)
        with contextlib.suppress(TransferFailed):  # what came before the connection ended can still be read
            if staged:  # what has no receive yet keeps the stage that it is in
                self._await_stage(torch.empty(STAGED_BYTES, dtype=torch.uint8) if arrival.aside else stage)
            self._await_frame(frame, memory, address)
        if used:
            self._frames_read += 1
            self._stages_read += staged
            self._tell_of_credit()
        else:
            self._held[0] += 1
            self._held[1] += staged

    def receive_large(self, tensor: torch.Tensor, slot: int) -> tuple[Transfer, Transfer]:
        """Give a tensor to the engine for a large message; the two transfers are to be waited for in this order."""
        data = self._engine.recv(tensor, self.peer, slot)
        return self._engine.recv(torch.empty(1, dtype=torch.uint8), self.peer, slot + 1), data

    def let_go(self) -> None:
        """The engine has been closed: keep none of its transfers, each of which keeps its connections."""
        for transfers in (self._frames, self._stages, self._sent, self._sent_stages, self._there):
            transfers.clear()

    def release(self) -> None:
        """Give credit for all that was read without."""
        frames, stages = self._held
        if frames:
            self._held = [0, 0]
            self._frames_read += frames
            self._stages_read += stages
            self._tell_of_credit()

    def _hear_of_credit(self, frames_read: int, stages_read: int) -> None:
        for _ in range(frames_read - self._frames_known_read):
            self._sent.popleft()
        for _ in range(stages_read - self._stages_known_read):
            self._sent_stages.popleft()
        self._frames_known_read, self._stages_known_read = frames_read, stages_read

    def _tell_of_credit(self) -> None:
        """Tell of credit in a frame of its own, if no other frame has told of it lately."""
        much = (
            self._frames_read - self._frames_told >= FRAMES // 2 or self._stages_read - self._stages_told >= STAGES // 2
        )
        if much and self._frames_sent - self._frames_known_read < FRAMES + SPARE - 1:
            with contextlib.suppress(TransferFailed):  # the end of the connection is found by reading
                self._send_frame(CREDIT, 0, 0, 0, 0, 0, 0, 0)
