"""Changed bytes for every parser of bytes from outside: each refuses them as it says, or takes them, and no more.

Here are some thousands; ``python -m tests.support.mutations`` gives a million (CONTRIBUTING.md).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tests.support.mutations import try_all
from tests.support.parser import Parser
from tests.support.parsers import parsers
from tests.support.ranks import on_ranks

from phalanx.system.foreign_values import checked, is_number, read_json

DEEP = b"[" * 4000
HUGE = b"9" * 5000


def in_report(data: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    values = json.loads(data)
    change(values["ranks"][0]["recording"])
    return json.dumps(values).encode()


# What mutations have found: by the parser, what is made of its first valid bytes.
FOUND: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("the claim of a lookout", lambda _: DEEP),
    ("a message between lookouts", lambda _: DEEP),
    ("the description of a job", lambda _: DEEP + b"\n"),
    ("the description of a job", lambda data: data.replace(b"4243", b'"x"')),
    ("the report of a rank that failed", lambda _: DEEP),
    ("the report of a rank that failed", lambda data: data.replace(b'"ValueError"', b"1.5")),
    ("the trace of a rank", lambda data: b"\x5b" + data[1:]),
    ("the stacks of a rank", lambda data: data.replace(b"line 3", b"line " + HUGE)),
    ("the report on a job that hangs", lambda data: in_report(data, lambda r: r.update(step="x"))),
    (
        "the report on a job that hangs",
        lambda data: in_report(data, lambda r: r.update(groups=[["0", "phalanx", [[0, 10**12, 1]], 0]])),
    ),
    ("a configuration file", lambda data: data.replace(b"4", DEEP)),
    ("a configuration file", lambda data: data.replace(b"4", HUGE)),
    ("measured sizes", lambda _: DEEP),
    ("measured sizes", lambda _: b"\xff\xfe"),
    ("measured sizes", lambda data: data.replace(b"4096", b"1e999")),
]


@pytest.mark.parametrize("number", range(len(FOUND)))
def test_what_was_found_once_is_refused(number: int) -> None:
    name, change = FOUND[number]
    with parsers() as every:
        (parser,) = [each for each in every if each.name == name]
        data = change(parser.valid[0])
        assert data != parser.valid[0]
        with contextlib.suppress(*parser.refusals):
            parser.feed(data)


@pytest.mark.parametrize("count", [4_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_changed_bytes_are_refused_or_taken(count: int) -> None:
    """In a process of its own, whose memory is limited."""
    ((found, had),) = on_ranks(lambda _: try_all(count, seed=2), 1)
    assert not found, "\n\n".join(map(str, found))
    assert sum(had.values()) >= count


def test_a_parser_that_fails_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(data: bytes) -> None:
        if data != b"12":
            raise ZeroDivisionError

    def hangs(data: bytes) -> None:
        while data != b"12":
            pass

    @contextlib.contextmanager
    def made():  # type: ignore[no-untyped-def]
        yield [Parser("one", [b"12"], breaks), Parser("two", [b"12"], hangs)]

    def body(_: object) -> list[tuple[str, str]]:
        found, _ = try_all(20, seed=1)
        return [(finding.parser, finding.what) for finding in found]

    monkeypatch.setattr("tests.support.mutations.parsers", made)
    monkeypatch.setattr("tests.support.mutations.MOST_CPU_S", 0.01)
    assert on_ranks(body, 1) == [[("one", "ZeroDivisionError"), ("two", "Hung")]]


@dataclass(frozen=True)
class Thing:
    number: int
    text: str = ""
    share: float | None = None
    others: tuple[int, ...] = ()


def test_a_value_of_another_kind_is_refused_by_its_name() -> None:
    assert checked(Thing, {"number": 3, "text": "a", "share": 1, "others": ["x"]}) == Thing(3, "a", 1, ["x"])  # type: ignore[arg-type]
    for wrong in ({"number": "3"}, {"number": True}, {"number": 1 << 64}, {"number": 1, "text": None}, {"number": 1.0}):
        with pytest.raises(ValueError, match=r"number|text"):
            checked(Thing, wrong)
    for wrong in ({}, {"number": 1, "more": 2}):
        with pytest.raises(ValueError, match=r"number|more"):
            checked(Thing, wrong)
    assert [is_number(value) for value in (0, -1, (1 << 64) - 1, 1 << 64, True, 1.0, "1")] == [True] * 3 + [False] * 4


def test_json_that_is_nested_too_deeply_is_no_json() -> None:
    assert read_json(b'{"a": [1]}') == {"a": [1]}
    for data in (DEEP, b'{"a":' * 4000, b"", b"\xff", b"[1"):
        with pytest.raises(ValueError, match=r"."):
            read_json(data)
