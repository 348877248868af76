"""A million changed inputs for every parser of bytes from outside: refused as documented, or taken, and nothing else.

``python -m tests.support.mutations --count 1000000 --seed 1`` prints what it found, and ends with 1 if that is
anything. Every input follows from the seed, the parser and its number, which a finding names.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.parsers import Parser, parsers

__all__ = ["Finding", "changed", "try_all"]

# What one input may cost: CPU time, so that a busy machine does not matter, and memory.
MOST_CPU_S = 5.0
MOST_BYTES = 1 << 30
MOST_KEPT_BYTES = 64 << 20
# What JSON, TOML and people's texts can be changed into.
WORDS = (
    b"null", b"true", b"-1", b"0", b"1e999", b"-1e999", b"NaN", b"9" * 400, b"9" * 5000, b"1.5", b'""', b'"\\ud800"',
    b"[]", b"{}", b"[[]]", b"[" * 3000, b'{"a":' * 1500, b'"' + b"x" * 3000 + b'"', b"\xff\xfe", b"\0",
    b"1000000000000", b"[0, 1000000000000, 1]", b"\n", b'"\n', b"\x1b[2J", b"-9223372036854775809",
    b"18446744073709551615",
)  # fmt: skip
ENDS = (b"\0", b"\xff", b"\x7f", b"\x80")


class Hung(BaseException):
    """A parser has used more CPU time than one input may cost."""


@dataclass(frozen=True)
class Finding:
    """What a parser has done that it must not: the input's number, and the end of the traceback."""

    parser: str
    what: str
    where: str
    number: int
    data: bytes
    text: str

    def __str__(self) -> str:
        return f"{self.parser}, input {self.number}: {self.what} at {self.where}\n  {self.data[:300]!r}\n{self.text}"


def changed(chance: random.Random, data: bytes) -> bytes:
    """The same bytes with a few changes: bits, numbers, cuts, repetitions, and whole values."""
    out = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(out)) if out else 0
        how = chance.randrange(8)
        if how == 0 and out:
            out[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            width = chance.choice((1, 2, 4, 8))
            out[at : at + width] = chance.choice(ENDS) * width
        elif how == 2:
            del out[at : at + chance.randrange(1, 9)]
        elif how == 3:
            out[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif how == 4:
            out[at:at] = out[at : at + chance.randrange(1, 17)]
        elif how == 5:
            del out[at:]
        else:
            begin, end = value_at(out, at)
            out[begin:end] = chance.choice(WORDS)
    return bytes(out)


def value_at(data: bytearray, at: int) -> tuple[int, int]:
    """Where the value around this place begins and ends, if that is a text with values."""
    ends = b' ,:[]{}=\n"'
    begin = at
    while begin and data[begin - 1] not in ends and at - begin < 40:
        begin -= 1
    end = at
    while end < len(data) and data[end] not in ends and end - at < 40:
        end += 1
    quoted = begin and end < len(data) and data[begin - 1] == data[end] == ord('"')
    return (begin - 1, end + 1) if quoted else (begin, end)


def try_all(count: int, seed: int, only: str = "") -> tuple[list[Finding], Counter[str]]:
    """Give ``count`` changed inputs to the parsers; what was found, one of each kind, and how many each has had."""
    found: dict[tuple[str, str, str], Finding] = {}
    had: Counter[str] = Counter()

    def hung(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGPROF, hung)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with parsers() as every:
            every = [parser for parser in every if only in parser.name]
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + MOST_BYTES, limits[1]))
            shares = sum(parser.share for parser in every)
            for parser in every:
                inputs = -(-int(count * parser.share) // int(shares)) if shares >= 1 else count
                for finding in _try(parser, max(20, inputs), seed):
                    found.setdefault((finding.parser, finding.what, finding.where), finding)
                had[parser.name] = max(20, inputs)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGPROF, before)
    return list(found.values()), had


def _try(parser: Parser, count: int, seed: int) -> Sequence[Finding]:
    found: dict[tuple[str, str], Finding] = {}
    assert any(map(parser.takes, parser.valid)), parser.name
    kept = 0
    for number in range(count):
        data = input_of(parser, seed, number)
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        try:
            parser.feed(data)
        except parser.refusals:
            pass
        except (Exception, Hung) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            if (type(error).__name__, place) not in found:
                text = "".join(traceback.format_exception(error)[-4:])
                finding = Finding(parser.name, type(error).__name__, place, number, data, text)
                found[type(error).__name__, place] = finding
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if number == count // 10:
            kept = resident()
    if kept and (grown := resident() - kept) > MOST_KEPT_BYTES:
        found["memory", ""] = Finding(parser.name, f"{grown >> 20} MiB more memory", "the end", count, b"", "")
    return list(found.values())


def input_of(parser: Parser, seed: int, number: int) -> bytes:
    """One input, which is the same whenever it is asked for."""
    chance = random.Random((seed << 64) + (number << 24) + sum(parser.name.encode()))
    return changed(chance, chance.choice(parser.valid))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    options = argparse.ArgumentParser(description="Give changed inputs to every parser of bytes from outside.")
    options.add_argument("--count", type=int, default=1_000_000, help="how many inputs, of all parsers together")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", default="", help="parsers with these words in their names")
    given = options.parse_args()
    began = time.monotonic()
    found, had = try_all(given.count, given.seed, given.only)
    for name, count in had.items():
        print(f"{count:9}  {name}")
    for finding in found:
        print(f"\n{finding}")
    print(f"{sum(had.values())} inputs in {time.monotonic() - began:.0f} s: {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
