"""What is to be measured: the values of the command line, read and checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DTYPES",
    "OPERATIONS",
    "UNBOUNDED",
    "BenchOptions",
    "Case",
    "format_size",
    "parse_dtypes",
    "parse_operations",
    "parse_sizes",
    "tuning_label",
]

# In the order of the tables. Their bodies are in operations.py, which needs torch; this module must not.
OPERATIONS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "send_recv",
    "barrier",
)
DTYPES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
UNBOUNDED = 1 << 40  # bytes; no tensor here has so many
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes:
        operation: one of OPERATIONS.
        dtype: torch's name of the dtype; empty for a barrier.
        nbytes: the size that was asked for; 0 for a barrier.
    """

    operation: str
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class BenchOptions:
    """Everything the ranks need to know.

    Attributes:
        operations, sizes, dtypes: every combination is measured, with every number in ``ranks``.
        ranks: world sizes.
        against: backends of torch to measure beside ``phalanx``; MPI is not one of them.
        rounds: how often the backends take turns in each case.
        round_s: about how long one backend's turn is, in seconds.
        asynchronous: ``async_op=True`` and ``wait()`` instead of a synchronous call.
        patience_s: for each world size, how long may be spent on waiting for a quiet machine and on repeating rows
            that were measured on a noisy one, in seconds.
        tunings: the values of :class:`~phalanx.transports.shm.tuning.Tuning` for groups to compare with each other
            instead of with other backends; with none, what is in force on this machine.
    """

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    against: tuple[str, ...]
    rounds: int
    round_s: float
    asynchronous: bool
    patience_s: float
    tunings: tuple[tuple[int, int, int], ...] = ()

    @staticmethod
    def from_json(fields: dict[str, Any]) -> BenchOptions:
        """The options whose fields went through JSON, where tuples become lists."""
        read: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
        read["tunings"] = tuple(tuple(values) for values in fields.get("tunings", ()))
        return BenchOptions(**read)

    def cases(self) -> Iterator[Case]:
        """The rows of one world size, in the order they are measured."""
        for operation in self.operations:
            if operation == "barrier":
                yield Case(operation, "", 0)
                continue
            for dtype in self.dtypes:
                for nbytes in self.sizes:
                    yield Case(operation, dtype, nbytes)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read ``4,64K,1M`` (K, M and G count in steps of 1024; ``KiB`` and ``KB`` mean the same).

    Raises:
        ValueError: a part is no size.
    """
    sizes = []
    for part in _parts(text):
        match = _SIZE.fullmatch(part)
        if match is None or not int(match[1]):
            raise ValueError(f"{part!r} is no size; write bytes, as in 4, 64K, 1M or 1G")
        sizes.append(int(match[1]) * _UNITS[match[2].upper()])
    return tuple(dict.fromkeys(sizes))


def parse_dtypes(text: str) -> tuple[str, ...]:
    """Read ``float32,bfloat16``.

    Raises:
        ValueError: a name is not one of DTYPES.
    """
    return _known(_parts(text), tuple(DTYPES), "dtype")


def parse_operations(names: Sequence[str]) -> tuple[str, ...]:
    """Check names of operations; ``all`` stands for every one.

    Raises:
        ValueError: a name is neither.
    """
    return OPERATIONS if "all" in names else _known(names, OPERATIONS, "operation")


def format_size(nbytes: int) -> str:
    """The inverse of :func:`parse_sizes`: ``65536`` is ``64K``."""
    for unit in ("G", "M", "K"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def tuning_label(tuning: tuple[int, int, int]) -> str:
    """The name under which a group with these values appears among the samples: 256K/16K/16M."""
    return "/".join("∞" if value == UNBOUNDED else format_size(value) for value in tuning)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _known(names: Sequence[str], known: tuple[str, ...], what: str) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no {what} that can be measured; choose from {', '.join(known)}")
    return tuple(dict.fromkeys(names))
