"""Data model of a rank: its operations, the recording that holds them, and its state; as values and as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from phalanx.diagnosis.stacks import Frame
from phalanx.system.files import beside
from phalanx.words import format_bytes

# The core's numbers (enum phx_kind).
_COLLECTIVES = "all_reduce broadcast all_gather barrier reduce reduce_scatter gather scatter all_to_all"
KINDS = dict(enumerate((*_COLLECTIVES.split(), "send", "recv", "init"), 1))
KIND_NUMBERS = {kind: number for number, kind in KINDS.items()}
_ROOTS = {"reduce": "dst", "gather": "dst", "broadcast": "src", "scatter": "src"}
_MOST_RANKS = 1 << 20
_MOST_EACH = 64
_SHAPE = re.compile(r"\[\d{1,18}(, \d{1,18})*\]", re.ASCII)


class Group(msgspec.Struct, frozen=True):
    """A group of ranks, as one of its members recorded it."""

    name: str = ""  # torch's; the world's is ``0`` in most programs
    backend: str = ""
    ranks: tuple[int, ...] = ()  # in the world, in the group's order
    own: int = -1  # the group rank of the member that recorded it; -1 if that is not known


class Record(msgspec.Struct, frozen=True):
    """One operation; times are on the host's monotonic clock."""

    number: int  # which of the process's operations, counted from 0
    group: Group
    in_group: int  # which collective or message of the group, counted from 1; for a collective equal on all ranks
    kind: str
    nbytes: int  # of this rank's tensor
    dtype: str
    op: str
    peer: int  # the group rank of the root, or of the other end of a message; -1 for none, or any
    site: str  # as ``train.py:42``; empty if it is not known
    label: str  # what the script said it was doing; empty, and a step of -1, if nothing
    step: int
    entered_ns: int
    left_ns: int  # 0 while it is under way
    failed: bool
    awaits: int  # the group rank that it waits for, or waited for last; -1 if that is not known
    # It was called by C++ and recorded only since it lasts (c10d/torch_backends.py). So another rank may be in the same
    # collective without a record, and ``in_group`` is what the next counted one will have.
    found_late: bool = False
    shape: str = ""  # as ``[2, 3]``; empty for vectors, several tensors, and Phalanx's backends, which compare shapes

    @property
    def is_message(self) -> bool:
        return self.kind in ("send", "recv")

    @property
    def under_way(self) -> bool:
        return self.left_ns == 0

    def name(self) -> str:
        """``all_reduce #118``; in a group that is not the world ``all_reduce #118 of group 3``."""
        text = self.kind + (f" #{self.in_group}" if self.kind != "init" else "")
        if self.is_message:
            peer = f"rank {world_rank(self.group, self.peer)}" if self.peer >= 0 else "any rank"
            text = f"{self.kind} {'to' if self.kind == 'send' else 'from'} {peer}"
        return text if self.group.name in ("", "0") else f"{text} of group {self.group.name!r}"

    def text(self, *, with_shape: bool = False) -> str:
        """``all_reduce #118 (float32, 4.0 KiB, sum) at train.py:42 in step 7, "evaluation"``."""
        shape = self.shape if with_shape else ""
        about = [f"{self.dtype}{shape}"] if self.dtype or shape else []
        if self.kind not in ("barrier", "init"):
            about.append(format_bytes(self.nbytes))
        if self.op:
            about.append(self.op)
        if self.kind in _ROOTS:
            about.append(f"{_ROOTS[self.kind]}={self.peer}")
        described = f" ({', '.join(about)})" if about else ""
        return f"{self.name()}{described}{self.where()}"

    def where(self) -> str:
        """`` at train.py:42 in step 7, "evaluation"``; empty if nothing of it is known."""
        text = f" at {self.site}" if self.site else ""
        said = ([f"step {self.step}"] if self.step >= 0 else []) + ([f'"{self.label}"'] if self.label else [])
        return text + (f" in {', '.join(said)}" if said else "")


def world_rank(group: Group, rank: int) -> int:
    """The rank in the world of a rank of the group."""
    return group.ranks[rank] if 0 <= rank < len(group.ranks) else rank


class Recording(msgspec.Struct, frozen=True, dict=True):
    """Contents of the recorder of one process."""

    pid: int
    rank: int  # in the world; -1, and a size of 0, if it is not known
    size: int
    step: int  # what its script said last of what it does; -1 and an empty label if nothing
    label: str
    begun: int  # how many operations have begun since the process's first
    records: tuple[Record, ...]  # the last of them, the oldest first
    done: int = -1  # how far the one under way is, in percent; -1 if it has not moved any of several pieces

    @cached_property
    def last(self) -> Record | None:
        """The operation that tells where the process is: the oldest collective under way, or else the last to begin."""
        under_way = [record for record in self.records if record.under_way]
        waiting = [record for record in under_way if not record.is_message] or under_way
        return waiting[0] if waiting else self.records[-1] if self.records else None

    def excerpt(self, count: int) -> Recording:
        """The same with few operations, from which another process can still conclude who waits for whom.

        These are the last ``count``, the last collective of each of the 64 groups that were used last, and the 64
        oldest that are under way.
        """
        last = {record.group: record for record in self.records if not record.is_message}
        groups = sorted(last.values(), key=lambda record: record.number)[-_MOST_EACH:]
        under_way = [record for record in self.records if record.under_way][:_MOST_EACH]
        kept = {record.number for record in (*groups, *under_way, *(self.records[-count:] if count else ()))}
        return replace(self, records=tuple(record for record in self.records if record.number in kept))

    def seen_from(self, folder: str, later_ns: int) -> Recording:
        """The same on another host's clock, which is later, with files below a folder as people there write them."""
        moved = (
            replace(
                each,
                site=beside(each.site, folder) if folder else each.site,
                entered_ns=each.entered_ns + later_ns,
                left_ns=each.left_ns + later_ns if each.left_ns else 0,
            )
            for each in self.records
        )
        return replace(self, records=tuple(moved))

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which :meth:`from_json` makes the same."""
        groups = list(dict.fromkeys(record.group for record in self.records))
        number = {group: index for index, group in enumerate(groups)}
        return {
            **{name: getattr(self, name) for name in self.__struct_fields__},
            "groups": [[group.name, group.backend, spans(group.ranks), group.own] for group in groups],
            "fields": ["group", *_FIELDS],
            "records": [[number[record.group], *_values_of(record)] for record in self.records],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Recording:
        """See :meth:`to_json`; other values raise ValueError, TypeError, KeyError or IndexError."""
        groups = [
            msgspec.convert({"name": name, "backend": backend, "ranks": ranks_in(ranks), "own": own}, Group)
            for name, backend, ranks, own in values["groups"]
        ]
        records = [
            {"group": groups[group], **dict(zip(_FIELDS, rest, strict=True))} for group, *rest in values["records"]
        ]
        return msgspec.convert({**values, "records": records}, cls)


_FIELDS = [name for name in Record.__struct_fields__ if name != "group"]
_values_of = attrgetter(*_FIELDS)


class RankSnapshot(msgspec.Struct, frozen=True):
    """State of one rank, seen from outside; place and frames are of its main thread, and empty if it did not say."""

    rank: int  # in the world
    recording: Recording | None = None  # None if it has no group yet
    state: str = ""  # of its main thread, as /proc says it: ``R``, ``S``, ``D``, ``T``; empty if that is not known
    ended: str = ""  # how, as ``exit code 0``; empty if it runs
    place: str = ""  # the line of the program, with its text
    asked: str = ""  # what it has asked another process for, and waits for
    host: str = ""  # empty if all ranks of the job are on one host
    silent: bool = False  # its host did not answer in time, so that nothing else of this is known
    ended_well: bool = False
    local_rank: int = 0  # its number among the ranks of its host, where they are on several
    frames: tuple[Frame, ...] = ()  # the innermost call first

    @property
    def operation(self) -> Record | None:
        """The operation that it is in."""
        last = self.recording.last if self.recording is not None else None
        return last if last is not None and last.under_way and not self.ended else None

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    def to_json(self, records: int | None = None) -> dict[str, Any]:
        """Plain values without the stack, with an excerpt of so many operations, by default all."""
        recording = self.recording
        if recording is not None and records is not None:
            recording = recording.excerpt(records)
        values = {name: getattr(self, name) for name in _SAID}
        return {**values, "recording": recording.to_json() if recording is not None else None}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankSnapshot:
        """See :meth:`to_json`; other values raise these, AttributeError or RecursionError."""
        recording = Recording.from_json(values["recording"]) if values["recording"] is not None else None
        return msgspec.convert({**values, "recording": recording}, cls)


_SAID = ("rank", "state", "ended", "place", "asked", "host", "silent")


def snapshots_from(answer: Sequence[Any]) -> list[RankSnapshot]:
    """The snapshots of which another process has sent this; raise ValueError if it has sent something else."""
    try:
        return [RankSnapshot.from_json(each) for each in answer]
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not an answer: {error}") from None


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
    """The ranks that :func:`spans` has shortened; others raise ValueError."""
    found = msgspec.convert(parts, list[tuple[int, int, int]])
    if sum(max(0, count) for _, count, _ in found) > _MOST_RANKS:  # a few bytes must not become a list without end
        raise ValueError("no job has so many ranks")
    return tuple(first + i * step for first, count, step in found for i in range(count))


@lru_cache(maxsize=4096)
def lengths_in(text: str) -> tuple[int, ...]:
    """The shape that a recorder has named, as ``[2, 3]``; empty for any other text."""
    return tuple(map(int, text[1:-1].split(", "))) if _SHAPE.fullmatch(text) else ()
