"""Read from the command line what is to be measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from phalanx.bench.operations import DTYPES, OPERATIONS, SizeOf
from phalanx.words import did_you_mean, format_size

# Names among the samples of a row, beside those of backends of torch.
MEMCPY, MPI, NOTHING = "memcpy", "mpi", "nothing"
UNBOUNDED = 1 << 40  # bytes; more than any tensor here has
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s)?", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """One row of a table; ``dtype`` is empty and ``nbytes`` is 0 for an operation that moves no data."""

    operation: str
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class BenchOptions:
    """The measurements to make, and for how long; every rank gets it as JSON.

    Attributes:
        operations, sizes, dtypes: every combination is measured, with every number in ``ranks``.
        against: backends of torch to measure beside ``phalanx``, or ``nothing``.
        rounds, round_s: how many turns each backend gets in each case, and about how long one is.
        patience_s: for each world size, how long to repeat rows that were measured on a noisy machine.
        tunings: values of :class:`~phalanx.transports.shm.tuning.Tuning`; if there are any, groups with these are
            compared instead of backends.
        link_bytes_per_s: the rate of a link between hosts; 0 to measure it.
    """

    operations: Sequence[str]
    sizes: Sequence[int]
    dtypes: Sequence[str]
    ranks: Sequence[int]
    against: Sequence[str]
    rounds: int
    round_s: float
    asynchronous: bool
    patience_s: float
    tunings: Sequence[Sequence[int]] = ()
    link_bytes_per_s: float = 0.0

    def cases(self) -> Iterator[Case]:
        """Return the rows of one world size, in order."""
        for operation in self.operations:
            if OPERATIONS[operation].size_of is SizeOf.NOTHING:
                yield Case(operation, "", 0)
            else:
                yield from (Case(operation, dtype, nbytes) for dtype in self.dtypes for nbytes in self.sizes)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read ``4,64K,1M``: K, M and G are powers of 1024; ``KiB`` and ``KB`` mean the same; else raise ValueError."""
    sizes = []
    for part in map(str.strip, text.split(",")):
        match = _SIZE.fullmatch(part)
        if match is None or not int(match[1]):
            raise ValueError(f"{part!r} is not a valid size; write a number of bytes, as in 4, 64K, 1M or 1G")
        sizes.append(int(match[1]) * _FACTORS[match[2].upper()])
    return tuple(dict.fromkeys(sizes))


def parse_rate(text: str) -> float:
    """Read ``1gbit``, ``100mbit`` or ``25gbit/s``, and return bytes a second; raise ValueError if it is not a rate."""
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a rate; write one as in 100mbit, 1gbit or 25gbit")
    return float(match[1]) * _BITS[match[2].lower()] / 8


def parse_dtypes(text: str) -> tuple[str, ...]:
    """Read ``float32,bfloat16``; raise ValueError for a name that is not one of DTYPES."""
    return _known([part.strip() for part in text.split(",")], DTYPES, "a dtype")


def parse_operations(names: Sequence[str]) -> tuple[str, ...]:
    """Check names of operations, of which ``all`` means every one; raise ValueError for an unknown one."""
    return tuple(OPERATIONS) if "all" in names else _known(names, OPERATIONS, "an operation")


def tuning_label(tuning: Sequence[int]) -> str:
    """Name a group with these values among the samples of a row: ``256K/16K/16M``."""
    return "/".join("∞" if value == UNBOUNDED else format_size(value) for value in tuning)


def _known(names: Sequence[str], known: Iterable[str], what: str) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known)
            raise ValueError(f"{name!r} is not {what} that can be measured; {meant}choose from {', '.join(known)}")
    return tuple(dict.fromkeys(names))
