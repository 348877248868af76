"""Parsers x mutations: each parser of bytes from outside refuses changed ones as it says, or takes them, and no more.

Here are some thousands; ``python -m tests.support.mutations`` gives a million (CONTRIBUTING.md). Listeners are attacked
in ``test_listeners.py``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.support.mutations import changed, try_all
from tests.support.parsers import Pair, Parser, parsers, small
from tests.support.ranks import on_ranks

import phalanx
from phalanx.rpc.links import wire_format
from phalanx.rpc.links.wire_format import Layout
from phalanx.rpc.message import Kind
from phalanx.store.table import Table
from phalanx.system.foreign_values import checked, is_number, read_json

SCALE = int(os.environ.get("PHALANX_STRESS_SCALE", "1"))
DEEP = b"[" * 4000
HUGE = b"9" * 5000


@pytest.mark.parametrize("count", [5_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_changed_bytes_are_refused_or_taken_and_nothing_is_unpickled(count: int) -> None:
    """In a process of its own, whose memory is limited."""

    def run(_: object) -> Any:
        unpickled: list[str] = []

        def hear(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "pickle.find_class":
                unpickled.append(str(arguments))

        sys.addaudithook(hear)
        return *try_all(count, seed=2), unpickled

    ((found, had, unpickled),) = on_ranks(run, 1)
    assert not found, "\n\n".join(map(str, found))
    assert sum(had.values()) >= count
    assert unpickled == []


def test_a_parser_that_fails_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(data: bytes) -> bool:
        if data != b"12":
            raise ZeroDivisionError
        return True

    def hangs(data: bytes) -> bool:
        while data != b"12":
            pass
        return True

    @contextlib.contextmanager
    def made():  # type: ignore[no-untyped-def]
        yield [Parser("one", [b"12"], breaks), Parser("two", [b"12"], hangs)]

    def body(_: object) -> list[tuple[str, str]]:
        found, _ = try_all(20, seed=1)
        return [(finding.parser, finding.what) for finding in found]

    monkeypatch.setattr("tests.support.mutations.parsers", made)
    monkeypatch.setattr("tests.support.mutations.MOST_CPU_S", 0.01)
    assert on_ranks(body, 1) == [[("one", "ZeroDivisionError"), ("two", "Hung")]]


def in_report(**change: object) -> Callable[[bytes], bytes]:
    def make(data: bytes) -> bytes:
        values = json.loads(data)
        values["ranks"][0]["recording"].update(change)
        return json.dumps(values).encode()

    return make


# What mutations have found: by the parser, what is made of its first valid bytes, and which must be refused.
FOUND: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("the claim of a rank", lambda _: DEEP),
    ("the claim of a rank", lambda data: data.replace(b'"rank": 1', b'"rank": true')),
    ("the claim of a rank", lambda data: data.replace(b'"h1"', b'"\\ud800"')),
    ("the verdict on a claim", lambda _: DEEP),
    ("the claim of a lookout", lambda _: DEEP),
    ("a message between lookouts", lambda _: DEEP),
    ("the description of a job", lambda _: DEEP + b"\n"),
    ("the description of a job", lambda data: data.replace(b"4243", b'"x"')),
    ("the report of a rank that failed", lambda _: DEEP),
    ("the report of a rank that failed", lambda data: data.replace(b'"ValueError"', b"1.5")),
    ("the stacks of a rank", lambda data: data.replace(b"line 3", b"line " + HUGE)),
    ("the report on a job that hangs", in_report(step="x")),
    ("the report on a job that hangs", in_report(groups=[["0", "phalanx", [[0, 10**12, 1]], 0]])),
    ("a configuration file", lambda data: data.replace(b"4", DEEP)),
    ("a configuration file", lambda data: data.replace(b"4", HUGE)),
    ("measured sizes", lambda _: DEEP),
    ("measured sizes", lambda _: b"\xff\xfe"),
    ("measured sizes", lambda data: data.replace(b"4096", b"1e999")),
]


def test_what_was_found_once_is_refused() -> None:
    with parsers() as every:
        for number, (name, change) in enumerate(FOUND):
            (parser,) = [each for each in every if each.name == name]
            valid = parser.valid[0]
            assert parser.takes(valid)
            assert change(valid) != valid
            assert not parser.takes(change(valid)), (number, name)


# -- no parser is forgotten --------------------------------------------------------------------------------------------

SOURCES = Path(phalanx.__file__).parent
# What makes values of bytes: functions of these modules, and methods and functions of these names.
LOADING, FORMATS = {"load", "loads"}, {"json", "pickle", "tomllib", "torch"}
READING = {
    "b64decode", "from_buffer_copy", "from_bytes", "fromhex", "iter_unpack", "literal_eval", "read_json", "unpack",
    "unpack_from",
}  # fmt: skip
# Modules that read bytes of nobody else's, or that another test attacks.
TRUSTED = {
    "a file that this user names or has written, or his environment": """
        bench/measurement.py launch/mpi/leftover_records.py place/readers.py training/checkpoint.py""",
    "a process of this job on this host, over what only it can reach": """
        bench/mpi_worker.py bench/processes.py launch/function/call.py launch/function/spawning.py
        launch/function/start.py launch/mpi/child.py launch/rank/descriptors.py launch/rank/other_ends.py
        launch/rank/trace.py launch/remote/local_ranks.py transports/shm/explanation.py watch/done_calls.py
        watch/glance.py""",
    "values that ranks write into the job's store (docs/security.md says what is open in torch's)": """
        c10d/create_mpi.py rpc/members.py rpc/torch_api/torch_agent.py store/ended.py topology/topology.py
        transports/attendance.py
        transports/hosts/breaking.py transports/hosts/choosing.py transports/hosts/guard.py
        transports/hosts/islands.py transports/hosts/measuring.py transports/hosts/ucx_lane.py
        transports/hosts/watcher.py transports/hosts/whereabouts.py transports/shm/segment.py""",
    "this process's own bytes": """
        c10d/quick.py data/sampler.py groups/values.py rendezvous/meeting_point.py transports/mpi/crossing.py""",
    "the kernel, or torch in this process": """
        c10d/stalled_calls.py system/connection_owner.py system/interfaces.py wire/acknowledged.py""",
    "the length of what follows, which is read and forgotten, after a random word": """
        doctor/probe.py""",
    "an agent or a keeper of this job, after the proof of the key, or over the way that started it": """
        launch/relay/channel.py launch/relay/exchange.py launch/relay/services.py launch/remote/agent.py
        launch/remote/helpers.py launch/remote/helping.py launch/remote/protocol.py launch/remote/start_agent.py""",
    "ranks of the job, after the proof of the key; they trust each other": """
        rendezvous/meet.py rpc/encoding.py store/client.py""",
    "they are attacked by the frames below, and in test_listeners.py": """
        rpc/connections.py rpc/links/assembling.py store/server.py""",
    "another rank, over Gloo, MPI or UCX, which ask nobody for a key (docs/security.md)": """
        transports/hosts/frames.py transports/hosts/message_way.py transports/mpi/notices.py""",
}


def reads(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            of = called.value.id if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) else ""
            if name in READING or (name in LOADING and of in FORMATS):
                return True
    return False


def test_every_module_that_reads_bytes_is_attacked_or_trusted() -> None:
    files = {str(path.relative_to(SOURCES)): path.read_text() for path in SOURCES.rglob("*.py")}
    readers = {name for name, text in files.items() if reads(ast.parse(text))}
    attacked: set[str] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        """The module of each call that reads."""
        if event == "c_call" and getattr(arg, "__name__", "") in READING:
            attacked.add(frame.f_code.co_filename)
        elif event == "call" and frame.f_code.co_name in READING | LOADING and frame.f_back is not None:
            attacked.add(frame.f_back.f_code.co_filename)

    with parsers() as every:
        sys.setprofile(note)
        try:
            for parser in every:
                for data in parser.valid:
                    parser.takes(data)
        finally:
            sys.setprofile(None)
    attacked = {name for name in readers if str(SOURCES / name) in attacked}
    trusted = {name for names in TRUSTED.values() for name in names.split()}
    assert readers - attacked - trusted == set(), "attack them in tests/support/parsers.py, or say here whose bytes"
    assert trusted - readers == set(), "these read no bytes any more"


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


def test_every_request_to_the_store_is_answered_once() -> None:
    """Whatever the requests are, whether ranks are lost, and when the store ends."""
    chance = random.Random(1)
    keys = [b"a", b"b", b"", b"\xff"]
    for turn in range(200 * SCALE):
        table = Table()
        answers: list[list[Any]] = []
        for now in range(12):
            code = chance.randrange(15) if chance.random() < 0.9 else chance.randrange(256)
            number = chance.choice([*range(-5, 6), -(1 << 63), (1 << 63) - 1])
            fields = [chance.choice(keys) for _ in range(chance.randrange(5))]
            answers.append([])
            parked = table.handle(code, number, fields, lambda *answer, to=answers[-1]: to.append(answer), float(now))
            assert (parked is not None) == (not answers[-1])
            table.expire(now + 0.5)
        if turn % 2:
            table.lose([b"rank 1 has gone"])
        table.expire(1e30)
        table.end("over")
        assert [len(each) for each in answers] == [1] * len(answers)
        assert not table._parked


# -- the frames of a link between workers ------------------------------------------------------------------------------


def frames(chance: random.Random) -> list[tuple[int, bytes]]:
    """Frames of a few messages, small and large."""
    made = [small(1), small(2, b"", ())]
    sizes = [chance.choice([0, 1, 100, 70_000, 300_000]) for _ in range(chance.randrange(1, 4))]
    made.append((wire_format.LARGE, Layout(Kind.ANSWER, 3, "", 5, sizes).encode() + b"large"))
    for size in sizes:
        data = chance.randbytes(size)
        kind = chance.choice([wire_format.PIECE, wire_format.HASHED])
        made += [(kind, bytes(piece)) for piece in wire_format.pieces_of([memoryview(data)])]
    return [*made, small(4), (wire_format.DROP, b""), (wire_format.END, b"")]


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_frames_that_were_changed_end_the_link_and_deliver_nothing_more() -> None:
    chance = random.Random(1)
    for _ in range(60 * SCALE):
        pair, before = Pair(), Pair()
        whole = [pair.frame(*frame) for frame in frames(chance)]
        chosen = chance.randrange(len(whole))
        broken = changed(chance, whole[chosen])
        if not broken.startswith(whole[chosen]):
            for part in whole[:chosen]:
                before.send(part)
                pair.send(part)
            pair.send(broken + b"".join(whole[chosen + 1 :]))
            pair.other.close()
            if not pair.receiver.why:
                pair.link.read()
            assert len(pair.receiver.messages) == len(before.receiver.messages)
        before.close()
        pair.close()
        assert len(pair.receiver.why) == 1


def test_nonsense_with_a_right_digest_ends_the_link_or_is_a_message() -> None:
    chance = random.Random(1)
    before = peak_bytes()
    for _ in range(100 * SCALE):
        pair = Pair()
        for kind, body in frames(chance):
            if chance.random() < 0.5:
                kind, body = chance.choice([kind, chance.randrange(256)]), changed(chance, body)
            pair.send(pair.frame(kind, body))
        pair.close()
        assert len(pair.receiver.why) == 1
        for message in pair.receiver.messages:
            assert len(message.head) + sum(part.nbytes for part in message.buffers) < 2_000_000
    assert peak_bytes() - before < 200 << 20


@pytest.mark.parametrize("sizes", [[1 << 63], [1 << 40] * 1000, [100, 1 << 46], [(1 << 64) - 1] * 3])
def test_a_size_that_no_machine_has_is_refused_with_its_number(sizes: list[int]) -> None:
    pair = Pair()
    before = peak_bytes()
    pair.send(pair.frame(wire_format.LARGE, Layout(Kind.REQUEST, 1, "call", 0, sizes).encode()))
    assert str(sum(sizes)) in pair.receiver.why[0]
    assert peak_bytes() - before < 100 << 20
    pair.close()


def test_memory_for_a_large_message_is_taken_when_its_bytes_arrive() -> None:
    pair = Pair()
    before = peak_bytes()
    sizes = [3 << 30] + [200_000] * 10_000  # as much as many machines have; nothing of it arrives
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sum(sizes) > memory:
        sizes = [memory // 2]
    pair.send(pair.frame(wire_format.LARGE, Layout(Kind.REQUEST, 1, "call", 0, sizes).encode()))
    assert pair.receiver.why == []
    assert peak_bytes() - before < 100 << 20
    pair.send(pair.frame(wire_format.DROP, b""))
    pair.send(pair.frame(*small(5)))
    assert [message.call for message in pair.receiver.messages] == [5]
    pair.close()


@pytest.mark.parametrize("kind", [wire_format.PIECE, wire_format.HASHED])
def test_a_large_message_arrives_as_it_was_sent(kind: int) -> None:
    for sizes in ([], [0], [0, 0, 5, 0], [300_000, 0, 1], [1 << 18, (1 << 18) - 1]):
        pair = Pair()
        parts = [random.Random(size).randbytes(size) for size in sizes]
        pair.send(pair.frame(wire_format.LARGE, Layout(Kind.REQUEST, 1, "call", 4, sizes).encode() + b"head"))
        for piece in wire_format.pieces_of([memoryview(part) for part in parts]):
            pair.send(pair.frame(kind, bytes(piece)))
        (message,) = pair.receiver.messages
        assert (message.head, [bytes(part) for part in message.buffers]) == (b"head", parts)
        assert not any(part.readonly for part in message.buffers)
        pair.close()


@pytest.mark.parametrize("kinds", [(wire_format.PIECE, wire_format.HASHED), (wire_format.HASHED, wire_format.PIECE)])
def test_a_piece_that_says_that_it_has_the_other_digest_is_refused(kinds: tuple[int, int]) -> None:
    for nbytes in (100, 70_000):
        pair = Pair()
        pair.send(pair.frame(wire_format.LARGE, Layout(Kind.REQUEST, 1, "call", 0, [nbytes]).encode()))
        frame = bytearray(pair.frame(kinds[0], bytes(nbytes)))
        frame[4] = kinds[1]
        pair.send(bytes(frame))
        assert pair.receiver.messages == []
        assert len(pair.receiver.why) == 1
        pair.close()
