"""The flight recorder of this process: its last 4,096 operations, in memory that outlives it.

The core writes the records (``native/csrc/record.h`` has their protocol); this module opens the memory and keeps its
texts: the names of groups, and the lines of the program from which operations are called. A place is the code and the
instruction in it, which a call finds quickly; its text is looked up once, and from then on it is a number.

The memory belongs to the launcher, if there is one that keeps it (``keep_in``); else it is a file of this process,
which others find by its name under /proc (``records.py``). It begins with the process's first group.

A lock guards the texts. It is reentrant, because a signal handler that interrupts its holder may call an operation too:
room is taken before anything is written to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any

from phalanx.diagnosis import call_site
from phalanx.diagnosis.call_site import CallSite, lengths_that_count
from phalanx.diagnosis.program_text import identity
from phalanx.diagnosis.shapes import shape_text
from phalanx.errors import BackendError
from phalanx.native.core import NBYTES_BITS, RECORDER_BYTES, STRINGS_AT, RecordedGroup, addresses, library, quick_entry
from phalanx.system.foreign_values import is_number

__all__ = [
    "MEMORY_NAME",
    "begin",
    "begin_at",
    "describe_dtypes",
    "drop",
    "end",
    "group",
    "is_kept",
    "keep_in",
    "label_now",
    "mark",
    "open_recorder",
    "own_memory",
    "own_place",
    "place_of",
    "ranks_in",
    "shaped",
    "spans",
    "writers",
]

MEMORY_NAME = "phalanx-recorder"
_LONGEST_TEXT = 2048
_MOST_RANKS = 1 << 20
# Up to which share of the room there may be labels: a script may make a new one for each batch, and the groups and
# lines that come later need room too.
_LABELS = 0.5
# The same for shapes, of which a program whose batches have all lengths may have thousands.
_SHAPES = 0.25
_MOST_SHAPES = 4096

_keeper: tuple[int, Callable[[], tuple[int, int]]] | None = None  # whose memory it is, and what makes it
_state: _State | None = None
_opening = threading.Lock()


def keep_in(where: Callable[[], tuple[int, int]]) -> None:
    """Have the memory made by ``where``, which gives a descriptor and where the memory begins in that file.

    The launcher does so in its ranks, before they have a group. It may raise OSError.
    """
    global _keeper
    _keeper = os.getpid(), where


def is_kept() -> bool:
    """Whether a launcher keeps the memory of this process's recorder."""
    return _keeper is not None and _keeper[0] == os.getpid()


class _State:
    """The open recorder of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.core = library()
        # A child that the script forks is not the rank.
        own, offset = _keeper[1]() if _keeper is not None and is_kept() else (_own_file(), 0)
        self.place = own, offset
        memory = self.core.phx_recorder_open(own, offset, self.pid, -1, 0)
        if not memory:
            raise OSError(ctypes.get_errno(), "the recorder's memory cannot be mapped")
        self.memory: int = memory
        texts = (ctypes.c_char * (RECORDER_BYTES - STRINGS_AT)).from_address(memory + STRINGS_AT)
        self._strings = memoryview(texts).cast("B")
        self._used = 4  # 0 is no text
        self._known: dict[tuple[str, int], int] = {}
        self._shapes: dict[tuple[int, ...], int] = {}
        self._sites: dict[tuple[int, int], tuple[CodeType, int]] = {}  # the code is held: its id stays its own
        self.places: dict[int, CallSite] = {}  # the last one of each number
        self._lock = threading.RLock()
        self.step, self.label = -1, 0
        # So that this thread has the attribute: to find that there is none takes longer than to record.
        call_site.running.site = getattr(call_site.running, "site", None)
        entry: Any = quick_entry()
        if isinstance(entry, str):
            self.begin: Callable[[int, int, int, int, int], int] = self._begin_by_ctypes
            self.end: Callable[[int, bool], None] = self.core.phx_record_end
            self.site: Callable[[], int] = self._site_by_frames
        else:
            entry.set_recorder(addresses(("record_begin", "record_end")), call_site.inside, self.number_of)
            self.begin, self.end, self.site = entry.record_begin, entry.record_end, entry.site_number

    def text(self, text: str, *, share: float = 1.0, identity: int = 0) -> int:
        """The number of a text, which is written when it is first asked for; 0 if there is no room.

        Args:
            text: the text.
            share: of the room, which it may fill up to there.
            identity: of the place in the program that the text names; 0 if it names none.
        """
        key = text, identity
        found = self._known.get(key)
        if found is not None:
            return found
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                return found
            data = text.encode(errors="replace")[:_LONGEST_TEXT]
            at, after = self._used + 4, self._used + 8 + len(data)
            if after > share * len(self._strings):
                return 0
            self._used = after  # first: a signal handler may come here too
            self._strings[at - 4 : after] = identity.to_bytes(4, "little") + len(data).to_bytes(4, "little") + data
            self._known[key] = at
            return at

    def shape(self, shape: tuple[int, ...]) -> int:
        """The number of a shape; 0 if it goes with every other of as many elements, or has no room."""
        number = self._shapes.get(shape)
        if number is None:
            number = self.text(shape_text(shape), share=_SHAPES) if lengths_that_count(shape) else 0
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = number
        return number

    def here(self) -> int:
        """The number of the line of the program that called the operation of this thread; 0 if it is not known."""
        queued: CallSite | None = getattr(call_site.running, "site", None)
        return self.site() if queued is None else self.number_of(*queued)

    def number_of(self, code: CodeType, instruction: int) -> int:
        """The number of a place in a program."""
        key = id(code), instruction
        known = self._sites.get(key)
        if known is None:
            site = code, instruction
            known = code, self.text(call_site.text_of(site), identity=identity(site))
            if known[1]:
                self.places[known[1]] = site  # first: another thread that finds the number may ask for the place
            self._sites[key] = known
        return known[1]

    def _site_by_frames(self) -> int:
        site = call_site.capture(2)
        return 0 if site is None else self.number_of(*site)

    def _begin_by_ctypes(self, group: int, what: int, nbytes: int, site: int, peer: int) -> int:
        ticket: int = self.core.phx_record_begin(ctypes.cast(group, _GROUP), what, nbytes, site, peer)
        return ticket


_GROUP = ctypes.POINTER(RecordedGroup)


def _own_file() -> int:
    """A file for a process whose launcher keeps none. Its descriptor stays open, since others find it by that."""
    file = os.memfd_create(MEMORY_NAME)
    os.ftruncate(file, RECORDER_BYTES)
    # A child that kept it would be taken for a process with these operations.
    os.register_at_fork(after_in_child=partial(_close_once, [file]))
    return file


def _close_once(files: list[int]) -> None:
    """Close the file in the list and empty it: the child's own children have the hook too, and other files."""
    while files:
        file = files.pop()
        with contextlib.suppress(OSError):  # the program may have closed it
            if os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{MEMORY_NAME} "):
                os.close(file)


def open_recorder(rank: int = -1, size: int = 0) -> bool:
    """Begin to record, if this process does not yet; whether it does.

    Args:
        rank, size: this process's place in the world, if it is known by now.
    """
    global _state
    if _state is None or _state.pid != os.getpid():
        with _opening:
            if _state is None or _state.pid != os.getpid():
                try:
                    _state = _State()
                except (OSError, BackendError):  # no memory, no descriptor, no core: a job runs as well without
                    return False
    if size:
        _state.core.phx_recorder_names(_state.text(json.dumps(_dtypes)) if _dtypes else 0, rank, size)
    return True


_dtypes: dict[int, str] = {}


def describe_dtypes(names: dict[int, str]) -> None:
    """Give the dtypes' names by their numbers in the core, before the recorder is opened."""
    _dtypes.update(names)


def group(name: str, backend: str, ranks: Sequence[int], own: int) -> RecordedGroup | None:
    """A group whose operations are recorded; None without a recorder.

    Args:
        name: torch's name of the group, equal on all members.
        backend: the backend's name.
        ranks: the members' ranks in the world.
        own: this process's rank in the group.
    """
    if _state is None or _state.pid != os.getpid():
        return None
    text = json.dumps({"name": name, "backend": backend, "ranks": spans(ranks), "own": own})
    return RecordedGroup(name=_state.text(text))


def spans(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as ``[first, how many, step]``: a large world must not need a long text."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == 1:
            spans[-1][1:] = [2, rank - spans[-1][0]]
        elif spans and rank == spans[-1][0] + spans[-1][1] * spans[-1][2]:
            spans[-1][1] += 1
        else:
            spans.append([rank, 1, 1])
    return spans


def ranks_in(parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks that :func:`spans` has shortened.

    Raises:
        ValueError, TypeError: it has not; a few bytes must not become a list that fills the memory.
    """
    if not all(is_number(number) for part in parts for number in part):
        raise TypeError("spans are numbers")
    if sum(max(0, count) for _, count, _ in parts) > _MOST_RANKS:
        raise ValueError("no job has so many ranks")
    return tuple(first + i * step for first, count, step in parts for i in range(count))


def writers() -> tuple[Callable[[int, int, int, int, int], int], Callable[[int, bool], None], Callable[[], int]]:
    """The parts of :func:`begin` and :func:`end` by themselves, for callers that are called often.

    They are: begin(group, what, nbytes, site, peer), end(ticket, failed), and here(), the site.
    A forked child may call them, and records nothing.
    """
    state = _state
    assert state is not None, "a group is recorded only in a process with a recorder"
    return state.begin, state.end, state.here


def own_memory() -> int:
    """Where this process's recorder is mapped; 0 if it has none."""
    return 0 if _state is None or _state.pid != os.getpid() else _state.memory


def own_place() -> tuple[int, int]:
    """Where this process's recorder is: the descriptor of its file, and where in that; the former is -1 without one.

    The program may have closed the descriptor. Then something else may be there by now.
    """
    return (-1, 0) if _state is None or _state.pid != os.getpid() else _state.place


def place_of(number: int) -> CallSite | None:
    """The place in the program that has this number; None if there is none, and for 0."""
    return None if _state is None else _state.places.get(number)


def number_here() -> int:
    """The number of the line of the program that called the operation of this thread; 0 if it is not known."""
    state = _state
    return 0 if state is None or state.pid != os.getpid() else state.here()


def number_of(site: CallSite | None) -> int:
    """The number of a place in the program; 0 for None, and without a recorder."""
    state = _state
    return 0 if site is None or state is None or state.pid != os.getpid() else state.number_of(*site)


def begin(group: int, what: int, nbytes: int, peer: int) -> int:
    """Record that an operation begins, on the thread that runs it; the ticket is for :func:`end`.

    Args:
        group: the address of a :class:`RecordedGroup`.
        what: its kind, dtype and operation, as ``phx_record_begin`` takes them.
        nbytes: of this rank's tensor, or what :func:`shaped` makes of them.
        peer: the root, or the other end of a message; -1 for none.
    """
    state = _state
    if state is None:
        return 0
    return state.begin(group, what, nbytes, state.here(), peer)


def shaped(nbytes: int, shape: tuple[int, ...]) -> int:
    """The bytes and the shape of a tensor as one number, which :func:`begin` takes for the bytes."""
    state = _state
    if state is None or nbytes >> NBYTES_BITS:  # more than there is: a tensor without memory
        return nbytes
    return nbytes | state.shape(shape) << NBYTES_BITS


def begin_at(group: RecordedGroup, what: int, nbytes: int, *, line: str, entered_ns: int) -> int:
    """Record a collective without a root that has begun before, on another thread; the ticket is for :func:`drop`.

    It is not counted: it gets the number of the group's next collective.

    Args:
        group: its group.
        what: its kind, dtype and operation, as ``phx_record_begin`` takes them.
        nbytes: of this rank's tensor.
        line: the line that called it, as ``file:line``; empty if it is not known.
        entered_ns: when it began, by ``time.monotonic_ns``.
    """
    state = _state
    if state is None or state.pid != os.getpid():
        return 0
    site = state.text(line) if line else 0
    ticket: int = state.core.phx_record_begin_at(ctypes.byref(group), what, nbytes, site, -1, entered_ns)
    return ticket


def drop(ticket: int) -> None:
    """Take back a record, on the thread that has begun it."""
    state = _state
    if state is not None and state.pid == os.getpid():
        state.core.phx_record_drop(ticket)


def end(ticket: int, failed: bool) -> None:
    """Record that an operation has ended. Any thread may; only the first time counts."""
    state = _state
    if state is not None:
        state.end(ticket, failed)


def mark(step: int | None = None, label: str | None = None) -> None:
    """Note what the script says of what it does from now on: which step, and a label (empty for none).

    Without a group nothing is recorded yet, but what was said last counts when the recorder is opened.
    """
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


_label = ""


def label_now() -> str:
    """The label that counts now; empty if there is none."""
    return _label
