"""The flight recorder of this process: its last 4,096 operations, in memory that outlives it.

The core writes the records (``native/csrc/recorder/record.h`` has their protocol). This module opens the memory, with
the process's first group, and keeps its texts: names of groups, and lines from which operations are called. The memory
belongs to the launcher, if there is one (:func:`keep_in`); else it is a file of this process (``reading.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

from phalanx.diagnosis import call_site
from phalanx.diagnosis.call_site import CallSite, lengths_that_count
from phalanx.diagnosis.divergence import identity
from phalanx.diagnosis.snapshot import KIND_NUMBERS, spans
from phalanx.errors import BackendError
from phalanx.native.core import NBYTES_BITS, RECORDER_BYTES, STRINGS_AT, RecordedGroup, library, quick_entry

MEMORY_NAME = "phalanx-recorder"
_LONGEST_TEXT = 2048
# Up to which share of the room there may be labels, and shapes: a script may make new ones for each batch.
_LABELS, _SHAPES = 0.5, 0.25
_GROUP = ctypes.POINTER(RecordedGroup)

_keeper: tuple[int, Callable[[], tuple[int, int]]] | None = None  # whose memory it is, and what makes it
_state: _Recorder | None = None
_opening = threading.Lock()
_dtypes: dict[int, str] = {}
_label = ""


def keep_in(where: Callable[[], tuple[int, int]]) -> None:
    """Have the memory made by ``where``, as the launcher does: a descriptor, and the place in that file."""
    global _keeper
    _keeper = os.getpid(), where


def is_kept() -> bool:
    """Return whether a launcher keeps the memory of this process's recorder."""
    return _keeper is not None and _keeper[0] == os.getpid()


class _Recorder:
    """The open recorder of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.core = library()
        if _keeper is not None and is_kept():  # a child that the script forks is not the rank
            self.place = _keeper[1]()
        else:  # the descriptor stays open, since others find the file by that
            self.place = os.memfd_create(f"{MEMORY_NAME}-{self.pid}"), 0
            os.ftruncate(self.place[0], RECORDER_BYTES)
        memory = self.core.phx_recorder_open(*self.place, self.pid, -1, 0)
        if not memory:
            raise OSError(ctypes.get_errno(), "the recorder's memory cannot be mapped")
        self.memory: int = memory
        texts = (ctypes.c_char * (RECORDER_BYTES - STRINGS_AT)).from_address(memory + STRINGS_AT)
        self._strings = memoryview(texts).cast("B")
        self._used = 4  # 0 is no text
        self._known: dict[str, int] = {}
        self._sites: dict[tuple[int, int], tuple[CodeType, int]] = {}  # the code is held: its id stays its own
        self._lock = threading.RLock()  # of the texts: a signal handler that interrupts its holder may come here too
        self.step, self.label = -1, 0
        entry: Any = quick_entry()
        if isinstance(entry, str):
            self.begin: Callable[[int, int, int, int], int] = self._begin_by_ctypes
            self.end: Callable[[int, bool], None] = self.core.phx_record_end
            self.here: Callable[[], int] = self._here_by_frames
        else:
            entry.set_recorder(call_site.inside, self.number_of, call_site.running)
            self.begin, self.end, self.here = entry.record_begin, entry.record_end, entry.site_number

    def text(self, text: str, *, share: float = 1.0, identity: int = 0) -> int:
        """The number of a text, which is written when it is first asked for; 0 if that share of the room is used up.

        In front of it stands the identity of a call site, by which ranks compare the lines of their calls.
        """
        found = self._known.get(text)
        if found is not None:
            return found
        with self._lock:
            data = text.encode(errors="replace")[:_LONGEST_TEXT]
            at, after = self._used + 4, self._used + 8 + len(data)
            if after > share * len(self._strings):
                return 0
            self._used = after  # first, for that handler
            self._strings[at - 4 : after] = identity.to_bytes(4, "little") + len(data).to_bytes(4, "little") + data
            return self._known.setdefault(text, at)

    def text_at(self, number: int) -> str:
        """The text that has this number; empty for 0."""
        length = int.from_bytes(self._strings[number : number + 4], "little") if number else 0
        return bytes(self._strings[number + 4 : number + 4 + length]).decode(errors="replace")

    def number_of(self, code: CodeType, instruction: int) -> int:
        """The number of a call site's text."""
        key = id(code), instruction
        known = self._sites.get(key)
        if known is None:
            place = call_site.text_of((code, instruction))
            known = self._sites[key] = code, self.text(place, identity=identity(place))
        return known[1]

    def site_of(self, number: int) -> CallSite | None:
        """See :func:`site_of`."""
        sites = list(self._sites.items())
        return next(((code, instruction) for (_, instruction), (code, known) in sites if known == number), None)

    def _here_by_frames(self) -> int:
        site = call_site.capture(2)
        return 0 if site is None else self.number_of(*site)

    def _begin_by_ctypes(self, group: int, what: int, nbytes: int, peer: int) -> int:
        ticket: int = self.core.phx_record_begin(ctypes.cast(group, _GROUP), what, nbytes, self.here(), peer)
        return ticket


def open_recorder(rank: int = -1, size: int = 0) -> bool:
    """Begin to record, if this process does not yet, with its place in the world, if that is known; whether it does."""
    global _state
    if _own() is None:
        with _opening:
            if _own() is None:
                try:
                    _state = _Recorder()
                except (OSError, BackendError):  # no memory, no descriptor, no core: a job runs as well without
                    return False
    if size and _state is not None:
        _state.core.phx_recorder_names(_state.text(json.dumps(_dtypes)) if _dtypes else 0, rank, size)
    return True


def _own() -> _Recorder | None:
    """The recorder of this process, and not of one that has forked it."""
    return _state if _state is not None and _state.pid == os.getpid() else None


def describe_dtypes(names: dict[int, str]) -> None:
    """Give the dtypes' names by their numbers in the core, before the recorder is opened."""
    _dtypes.update(names)


def group(name: str, backend: str, ranks: Sequence[int], own: int) -> RecordedGroup | None:
    """A group whose operations are recorded; None without a recorder.

    ``name`` and ``backend`` are torch's, ``ranks`` are in the world, and ``own`` is this process's rank in the group.
    """
    state = _own()
    text = json.dumps({"name": name, "backend": backend, "ranks": spans(ranks), "own": own})
    return None if state is None else RecordedGroup(name=state.text(text))


def own_memory() -> int:
    """Return the address of this process's recorder; 0 if it has none."""
    state = _own()
    return 0 if state is None else state.memory


def own_place() -> tuple[int, int]:
    """The descriptor of the file with this process's recorder (-1: none; the program may close it), and where it is."""
    state = _own()
    return (-1, 0) if state is None else state.place


def place_of(number: int) -> str:
    """The line of the program that has this number, as ``file:line``; empty if there is none, and for 0."""
    return "" if _state is None else _state.text_at(number)


def site_of(number: int) -> CallSite | None:
    """Return the call site whose text has this number; None if it is not known."""
    state = _own()
    return None if state is None or not number else state.site_of(number)


def number_here() -> int:
    """The number of the line that called this thread's operation; 0 if it is not known."""
    state = _own()
    return 0 if state is None else state.here()


def number_of(site: CallSite | None) -> int:
    """The number of a call site; 0 for None, and without a recorder."""
    state = _own()
    return 0 if site is None or state is None else state.number_of(*site)


def begin(group: int, what: int, nbytes: int, peer: int) -> int:
    """Record that an operation begins, on the thread that runs it; the ticket is for :func:`end`.

    Args:
        group: the address of a :class:`RecordedGroup`.
        what: its kind, dtype and operation, as ``phx_record_begin`` takes them.
        nbytes: of this rank's tensor, or what :func:`shaped` makes of them.
        peer: the root, or the other end of a message; -1 for none.
    """
    return _state.begin(group, what, nbytes, peer) if _state is not None else 0


def begin_and_end() -> tuple[Callable[[int, int, int, int], int], Callable[[int, bool], None]]:
    """The functions :func:`begin` and :func:`end` of the open recorder, for a call that takes microseconds."""
    assert _state is not None, "a group is recorded, and so the recorder is open"
    return _state.begin, _state.end


def shaped(nbytes: int, shape: tuple[int, ...]) -> int:
    """The bytes and the shape of a tensor as one number, which :func:`begin` takes for the bytes."""
    state = _state
    if state is None or nbytes >> NBYTES_BITS:  # more than there is: a tensor without memory
        return nbytes
    text = _shape_text(shape)
    return nbytes | (state.text(text, share=_SHAPES) if text else 0) << NBYTES_BITS


@lru_cache(maxsize=4096)
def _shape_text(shape: tuple[int, ...]) -> str:
    """Empty for a shape that goes with every other of as many elements."""
    return str(list(shape)) if lengths_that_count(shape) else ""


def begin_at(group: RecordedGroup, what: int, nbytes: int, *, line: str, entered_ns: int) -> int:
    """Record a collective without a root that has begun before, on another thread; the ticket is for :func:`drop`.

    It is not counted: it gets the number of the group's next collective. ``line`` is as ``file:line`` or empty.
    """
    state = _own()
    if state is None:
        return 0
    site = state.text(line) if line else 0
    ticket: int = state.core.phx_record_begin_at(ctypes.byref(group), what, nbytes, site, -1, entered_ns)
    return ticket


def drop(ticket: int) -> None:
    """Take back a record, on the thread that has begun it."""
    if (state := _own()) is not None:
        state.core.phx_record_drop(ticket)


def end(ticket: int, failed: bool) -> None:
    """Record that an operation has ended. Any thread may; only the first time counts."""
    if _state is not None:
        _state.end(ticket, failed)


@contextlib.contextmanager
def joining(name: str, backend: str, ranks: Sequence[int], own: int) -> Iterator[None]:
    """Record that this process waits for all of these ranks to join the world or a group, while the body runs.

    So ``phalanx run`` sees that a rank does not come. The record is taken back when all have come; else it is the
    rank's last operation. The arguments are those of :func:`group`, with an empty name for the world.
    """
    ticket = 0
    if is_kept() and len(ranks) > 1:
        with contextlib.suppress(Exception):  # a job runs as well without
            made = group(name, backend, ranks, own) if open_recorder() else None
            if made is not None:
                line = call_site.text_of(call_site.capture(3))
                ticket = begin_at(made, KIND_NUMBERS["init"], 0, line=line, entered_ns=time.monotonic_ns())
    try:
        yield
    except BaseException:
        end(ticket, True)
        raise
    drop(ticket)


def mark(step: int | None = None, label: str | None = None) -> None:
    """Note what the script says of what it does from now on: which step, and a label (empty for none)."""
    global _label
    if not open_recorder():
        return
    state = _state
    assert state is not None
    if step is not None:
        state.step = step
    if label is not None:
        _label = label
        state.label = state.text(label, share=_LABELS) if label else 0
    state.core.phx_recorder_mark(state.step, state.label)


def label_now() -> str:
    """The label that counts now; empty if there is none."""
    return _label
