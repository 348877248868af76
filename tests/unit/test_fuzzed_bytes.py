"""Parsers of bytes from outside refuse changed ones as they say, or take them, and do nothing else.

Bytes before the proof may be anybody's. What follows it has a digest, so it is another rank's; without a key it may be
anybody's too. Files and memory are those of the same user, or reports that somebody has sent him. ``make test`` gives
some thousands of inputs; ``PHALANX_STRESS_SCALE=1000`` gives millions. Every input follows from the parser and its
number, which a finding names. The frames of a link are in ``test_link_frames.py``, listeners in ``test_listeners.py``.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import msgspec
import pytest
import torch
from tests.support.mutations import changed
from tests.support.ranks import on_ranks

from phalanx.commands.run import run as run_command
from phalanx.diagnosis import recorder
from phalanx.diagnosis.diagnose import HangDiagnosis, diagnose
from phalanx.diagnosis.reading import read_recording
from phalanx.diagnosis.render import report_page, report_text
from phalanx.diagnosis.report import HangReport, read_report, write_report
from phalanx.diagnosis.snapshot import Group, RankSnapshot, Record, Recording, snapshots_from
from phalanx.diagnosis.stacks import frames_of
from phalanx.errors import EncodingError, LaunchError
from phalanx.launch.job.config_file import read_config
from phalanx.launch.output import failure as rank_report
from phalanx.launch.running import jobs
from phalanx.membership import registration
from phalanx.membership.launcher_store import TorchConversation
from phalanx.membership.protocol import Broken, Left, Lost, Position, decode, encode
from phalanx.membership.protocol import Message as Told
from phalanx.membership.store_protocol import Claim, Code, Verdict, unpack
from phalanx.membership.store_protocol import pack as pack_request
from phalanx.membership.store_server import Seats, _Conversation
from phalanx.membership.table import Table
from phalanx.native.core import RECORDER_BYTES
from phalanx.rpc import connections
from phalanx.rpc.failure import Failure
from phalanx.rpc.links.contract import Kind, Message
from phalanx.rpc.links.shared import Box, Damaged, image_of, received
from phalanx.rpc.members import Member
from phalanx.rpc.services import Signature
from phalanx.system.foreign_values import checked, is_number, read_json
from phalanx.transports.shm import tuning
from phalanx.wire.framing import PREFIX_BYTES, Malformed
from phalanx.wire.key import Key
from phalanx.wire.proof import Challenge, NoProof, PassedOn, Response, WrongKey

SCALE = int(os.environ.get("PHALANX_STRESS_SCALE", "1"))
INPUTS = 5_000 * SCALE
# What one input may cost: CPU time, so that a busy machine does not matter, and memory.
MOST_CPU_S = 5.0
MOST_BYTES = 1 << 30
DEEP, HUGE = b"[" * 4000, b"9" * 5000
KEY, HERE, ROLE = Key(b"the key of the tests", "a test"), ("127.0.0.1", 29500), "store"
WORLD = Group("0", "phalanx", (0, 1, 2), 2)
RECORD = Record(3, WORLD, 4, "all_reduce", 64, "float32", "sum", -1, "train.py:7", "", 3, 10**15, 0, False, -1)


@dataclass(frozen=True)
class Parser:
    """A parser.

    Attributes:
        name: what it reads, for people.
        valid: bytes from which inputs are made; it takes some of them, and the others belong to another state.
        feed: gives it bytes, and returns what it has made of them; None if it has refused them.
        refusals: what it may raise.
        share: how many inputs it gets, of those that a quick parser gets.
    """

    name: str
    valid: Sequence[bytes]
    feed: Callable[[bytes], object]
    refusals: tuple[type[BaseException], ...] = ()
    share: float = 1.0

    def takes(self, data: bytes) -> bool:
        try:
            return self.feed(data) is not None
        except self.refusals:
            return False


class Bomb:
    """What must not be unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


NOT_READ = (msgspec.MsgspecError, ValueError, RecursionError)  # all of which Connections refuses


def as_bytes(**values: Any) -> bytes:
    return json.dumps(values).encode()


def parsers(folder: Path) -> list[Parser]:
    return [*of_the_handshake(), *of_the_store(), *of_ranks(), *of_workers(), *of_memory(), *of_files(folder)]


def of_the_handshake() -> Iterator[Parser]:
    challenge = Challenge(KEY, ROLE)
    response = Response(KEY, ROLE, challenge.greeting, HERE, b'{"rank": 1}')
    bomb = Response(KEY, ROLE, challenge.greeting, HERE, pickle.dumps(Bomb()))
    proofs = (response.message, bomb.message)
    proven = challenge.check(response.message, [HERE])
    assert proven is not None

    def proof(data: bytes) -> object:
        proven = challenge.check(data, [HERE])
        assert proven is None or data.startswith(proofs)  # nothing but a proof itself is one
        return proven

    def verdict(data: bytes) -> object:
        said = None if response.missing(data) else response.check(data)
        assert said in (None, b"welcome")
        return said

    yield Parser("a caller's proof", proofs, proof, (NoProof, WrongKey, PassedOn))
    yield Parser("a listener's verdict", [proven.answer(b"welcome")], verdict, (NoProof, WrongKey))


def of_the_store() -> Iterator[Parser]:
    claim = Claim(1, 4242, 123456, "0123456789abcdef", "h1", 3, "a job", 0, 1, -1, "secret")

    def claimed(data: bytes) -> object:
        """Whatever is claimed is judged, and what is said of it can be sent."""
        said, seats = Claim.decode(data), Seats(replace(claim, rank=0))
        for _ in range(2):
            verdict = seats.judge(said)
            assert Verdict.decode(verdict.encode()).kind == verdict.kind
            seats.describe_missing().encode()
        return verdict

    welcome = Verdict("welcome", "", 4242, "h0", 123456, "0123456789abcdef")
    verdicts = [welcome.encode(), Verdict("refused", "rank 1 is taken").encode()]
    yield Parser("the claim of a rank", [claim.encode()], claimed, (NoProof,))
    yield Parser("the verdict on a claim", verdicts, Verdict.decode, (NoProof,))

    def request(data: bytes) -> object:
        code, number, fields = unpack(data)
        assert unpack(pack_request(code, number, fields)[PREFIX_BYTES:]) == (code, number, fields)
        assert len(answers_to(Table(), [(code, number, fields)])[0]) == 1 or code in (Code.READ, Code.WAIT)
        return True

    texts = [b"a", b"b", b"c"]
    asked = [pack_request(code, 5, texts[:count])[PREFIX_BYTES:] for code in range(1, 15) for count in range(4)]
    yield Parser("a request to the store", asked, request, (Malformed,))

    def torch_request(data: bytes) -> bool:
        TorchConversation(Table(), lambda answer: None).hear(data)
        return True

    key, value = (len(text).to_bytes(8, "little") + text for text in (b"a key", b"12"))
    one = (1).to_bytes(8, "little")
    bodies = [key, key + value, key + one, one + key, key + value + value, one + key + value, b""]
    hello = b"\0" + (0x3C85F7CE).to_bytes(4, "little")
    torchs = [hello + bytes([code]) + body for code in range(1, 20) for body in bodies]
    yield Parser("a request of torch's store client", torchs, torch_request, (Malformed,))


def of_ranks() -> Iterator[Parser]:
    """What ranks and hosts of a job tell each other, or write into a store where anybody may write who reaches it."""

    def said(data: bytes) -> object:
        """The content of a message whose digest is right."""
        return decode(data)

    fact = Lost(by=1, rank=2, way="ended", text="by signal 9 (SIGKILL)")
    messages: list[Told] = [Broken(group="0", fact=fact), Left(group="0", ranks=[1]), Position(rank=1, group="0")]
    yield Parser("a message of a registrar", [encode(each)[PREFIX_BYTES:] for each in messages], said, (Malformed,))

    seen = [RankSnapshot(rank, Recording(42, rank, 3, 3, "", 4, (RECORD,)), "S", place="train.py:7") for rank in (1, 2)]
    earlier = msgspec.structs.replace(RECORD, entered_ns=10**15 - 99)
    waiting = RankSnapshot(0, Recording(41, 0, 3, 3, "", 4, (earlier,)), "S")

    def of_host(data: bytes) -> object:
        ranks = snapshots_from(read_json(data))
        diagnose([waiting, *ranks])
        return ranks

    answer = json.dumps([each.to_json() for each in seen]).encode()
    yield Parser("what the ranks of another host do", [answer], of_host, (ValueError,))


def example(x: torch.Tensor, count: int, names: list[str], scale: float = 1.0) -> None: ...


def of_workers() -> Iterator[Parser]:
    message = Message(Kind.REQUEST, 1, "call", pickle.dumps(Bomb()), [memoryview(b"abc")])
    image = b"".join(image_of(message)[1])
    box = Box()

    def boxed(data: bytes) -> object:
        box.view[64 : 64 + len(data)] = data
        values = list(box.open())
        values[2], values[3], values[-1] = len(data), 0xFFFFFFFE, len(data)
        message = received(box, tuple(values), lambda *args: None)
        assert message.nbytes <= len(data)
        return message

    yield Parser("a message in shared memory", [image], boxed, (Damaged,))

    me = asdict(Member("worker1", 1, "h1", 4242, 3, "10.0.0.1", 4000))
    cookie = "AAAAAAAAAAAAAAAAAAAAAA=="
    offer = {"pid": 4242, "channel": 5, "cookie": cookie, "place": 7, "place_cookie": cookie}
    claim = as_bytes(me=me, to=4, offer=offer, exchange="00" * 32)
    yield Parser("the claim of a worker", [claim], msgspec.json.Decoder(connections.Claim).decode, NOT_READ)

    signature = Signature(example)
    head, buffers = signature.encode((torch.ones(3), 2, ["a", "b"]), {"scale": 2.0})
    failure = Failure(b"", "ValueError", "a text", "a traceback").encode()
    yield Parser("a call without pickle", [bytes(head)], lambda data: signature.decode(data, buffers), (EncodingError,))
    yield Parser("the failure of a call", [failure], Failure.decode, (EncodingError,))

    answers = [as_bytes(shared=True), as_bytes(refused="another worker is at its address")]
    yield Parser("the answer of a worker", answers, msgspec.json.Decoder(connections.Verdict).decode, NOT_READ)


def of_memory() -> Iterator[Parser]:
    rank = {"rank": 0, "pid": 4243, "host": "h0"}
    job = {
        "run_id": "phalanx-abc", "pid": 4242, "start": 6, "since": 1.5, "ranks": 1, "target": "train.py",
        "arguments": ["--lr", "0.1"], "directory": "/", "host": "h0", "hosts": [], "mpi": "",
        "is_python": True, "end_s": 30.0, "processes": [rank],
    }  # fmt: skip

    file = os.memfd_create("test")

    def in_memory(data: bytes) -> int:
        os.ftruncate(file, 0)
        os.pwrite(file, data, 0)
        return file

    def of_rank(data: bytes) -> object:
        found = rank_report.as_report(read_json(data), float)
        if found is not None:
            json.dumps(found.to_record())
        return found

    lines = as_bytes(**job) + b"\n"
    told = rank_report.Report("ValueError", "a text", "Traceback", False, None, 1)
    reports = [json.dumps(told.to_record()).encode(), as_bytes(message={"message": "torch's @record", "extraInfo": {}})]
    yield Parser("the description of a job", [lines], lambda data: jobs._read(f"/proc/self/fd/{in_memory(data)}"))
    yield Parser("the report of a rank that failed", reports, of_rank, (ValueError,))

    stacks = b'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in main\n'
    yield Parser("the stacks of a rank", [stacks], lambda data: frames_of(data.decode(errors="replace")) or None)

    kept = os.memfd_create("recorder")
    os.ftruncate(kept, RECORDER_BYTES)
    on_ranks(lambda _: record_calls(kept), 1)
    recorded = os.pread(kept, RECORDER_BYTES, 0)

    def recording(data: bytes) -> object:
        os.pwrite(kept, data, 0)
        found = read_recording(kept)
        if found is not None:
            for record in found.records[:20]:
                record.text(with_shape=True)
            Recording.from_json(json.loads(json.dumps(found.excerpt(10).to_json())))
        return found

    yield Parser("a flight recorder", [recorded], recording, (), 0.02)


def record_calls(file: int) -> None:
    recorder.keep_in(lambda: (file, 0))
    recorder.open_recorder(3, 8)
    group = recorder.group("0", "phalanx", range(8), 3)
    assert group is not None
    for number in range(30):
        ticket = recorder.begin(addressof(group), 1 | 1 << 8, recorder.shaped(4 * number, (number, 2)), -1)
        recorder.end(ticket, False)


def of_files(folder: Path) -> Iterator[Parser]:
    seen = [RankSnapshot(rank, Recording(42, rank, 3, 3, "", 4, (RECORD,)), "S", place="train.py:7") for rank in (0, 1)]
    verdict = HangDiagnosis("rank 1 is late", (1,), (0,), 10**15, "look")
    report = HangReport("phalanx run", "h0", "2026-11-23T01:00:00", 10**15, verdict, seen, {0: ["  File a", "    b()"]})
    path, config, sizes = write_report(folder, report), folder / "config.toml", folder / "tuning.json"
    options = cast(click.Command, run_command).params

    def hang(data: bytes) -> object:
        path.write_bytes(data)
        found = read_report(path)
        return report_text(found), report_page(found)

    def configured(data: bytes) -> object:
        config.write_bytes(data)
        return read_config(str(config), options)

    def tuned(data: bytes) -> object:
        sizes.write_bytes(data)
        before, tuning.tuning_path = tuning.tuning_path, lambda: sizes
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = tuning._read.__wrapped__()
                return found if found != tuning.Tuning() else None
        finally:
            tuning.tuning_path = before

    toml = b'ranks = 4\ntarget = "train.py"\narguments = ["--lr", "0.1"]\nlog-dir = "logs"\nrestarts = 2\n'
    measured = as_bytes(chunk_bytes=4096, small_bytes=100, stream_bytes=1 << 20)
    yield Parser("the report on a job that hangs", [path.read_bytes()], hang, (ValueError,), 0.3)
    yield Parser("a configuration file", [toml], configured, (LaunchError,), 0.5)
    yield Parser("measured sizes", [measured], tuned, (), 0.5)


# -- changed inputs ----------------------------------------------------------------------------------------------------


class Hung(BaseException):
    """A parser has used more CPU time than one input may cost."""


def try_all(every: list[Parser], count: int) -> list[str]:
    """Give ``count`` changed inputs to the parsers; what they did that they must not, once for each place."""

    def hung(*_: object) -> None:
        raise Hung

    signal.signal(signal.SIGPROF, hung)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    found: dict[tuple[str, str, int | None], str] = {}
    for parser in every:
        assert any(map(parser.takes, parser.valid)), parser.name
        for number in range(max(20, int(count * parser.share / sum(each.share for each in every)))):
            chance = random.Random((number << 24) + sum(parser.name.encode()))
            data = changed(chance, chance.choice(parser.valid))
            signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
            try:
                parser.takes(data)
            except (Exception, Hung) as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = "".join(traceback.format_exception(error)[-4:])
                found[parser.name, where.filename, where.lineno] = f"{parser.name}, {number}: {data[:300]!r}\n{text}"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    return list(found.values())


def test_changed_bytes_are_refused_or_taken_and_never_unpickled(tmp_path: Path) -> None:
    """In a process of its own, whose memory is limited."""

    def run(_: object) -> Any:
        unpickled: list[str] = []

        def hear(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "pickle.find_class":
                unpickled.append(str(arguments))

        every = parsers(tmp_path)
        sys.addaudithook(hear)
        return try_all(every, INPUTS), unpickled

    ((found, unpickled),) = on_ranks(run, 1)
    assert not found, "\n\n".join(found)
    assert unpickled == []


def in_report(**change: object) -> Callable[[bytes], bytes]:
    def make(data: bytes) -> bytes:
        values = json.loads(data)
        values["ranks"][0]["recording"].update(change)
        return json.dumps(values).encode()

    return make


# What mutations have found: by the parser, what is made of its first valid bytes, and which must be refused.
FOUND: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("the claim of a rank", lambda _: DEEP),
    ("the claim of a rank", lambda data: data.replace(b'"rank":1', b'"rank":true')),
    ("the claim of a rank", lambda data: data.replace(b'"h1"', b'"\\ud800"')),
    ("the verdict on a claim", lambda _: DEEP),
    ("the answer of a worker", lambda _: DEEP),
    ("the answer of a worker", lambda _: b"[]"),
    ("a message of a registrar", lambda _: DEEP),
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


def test_what_was_found_once_is_refused(tmp_path: Path) -> None:
    def run(_: object) -> list[str]:
        every = {parser.name: parser for parser in parsers(tmp_path)}
        taken = []
        for number, (name, change) in enumerate(FOUND):
            valid = every[name].valid[0]
            assert every[name].takes(valid)
            assert change(valid) != valid
            if every[name].takes(change(valid)):
                taken.append(f"{number}: {name}")
        return taken

    assert on_ranks(run, 1) == [[]]


# -- values of others --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thing:
    number: int
    text: str = ""
    share: float | None = None
    others: tuple[int, ...] = ()


def test_value_of_another_kind_is_refused_by_its_name() -> None:
    assert checked(Thing, {"number": 3, "text": "a", "share": 1, "others": ["x"]}) == Thing(3, "a", 1, ["x"])  # type: ignore[arg-type]
    for wrong in ({"number": "3"}, {"number": True}, {"number": 1 << 64}, {"number": 1, "text": None}, {"number": 1.0}):
        with pytest.raises(ValueError, match=r"number|text"):
            checked(Thing, wrong)
    for wrong in ({}, {"number": 1, "more": 2}):
        with pytest.raises(ValueError, match=r"number|more"):
            checked(Thing, wrong)
    assert [is_number(value) for value in (0, -1, (1 << 64) - 1, 1 << 64, True, 1.0, "1")] == [True] * 3 + [False] * 4


def test_nonsense_in_the_place_of_a_rank_is_no_claim() -> None:
    """In a store of torch's anybody may write."""
    for data in (DEEP, b"7", b"[7]", b"\xff", b'[{"rank": "1"}]'):
        assert registration._decoded(data) is None
        assert registration._decoded_failure(data) is None


def test_json_that_is_nested_too_deeply_is_no_json() -> None:
    assert read_json(b'{"a": [1]}') == {"a": [1]}
    for data in (DEEP, b'{"a":' * 4000, b"", b"\xff", b"[1"):
        with pytest.raises(ValueError, match=r"."):
            read_json(data)


def test_every_request_to_the_store_is_answered_once() -> None:
    """Whatever the requests are, and when the store ends."""
    chance = random.Random(1)
    keys = [b"a", b"b", b"", b"\xff"]
    for _ in range(200 * SCALE):
        table, requests = Table(), []
        for _ in range(12):
            code = chance.randrange(15) if chance.random() < 0.9 else chance.randrange(256)
            number = chance.choice([*range(-5, 6), -(1 << 63), (1 << 63) - 1])
            requests.append((code, number, [chance.choice(keys) for _ in range(chance.randrange(5))]))
        answers = answers_to(table, requests)
        for key in keys:
            table.set(key, b"")
        assert [len(each) for each in answers] == [1] * len(answers)
        assert not table._waits


def answers_to(table: Table, requests: Sequence[tuple[int, int, list[bytes]]]) -> list[list[bytes]]:
    """The answers of the store to these requests, each of which comes by a connection of its own."""
    said: list[list[bytes]] = []
    seats = Seats(Claim(0, 1, 0, "", "h0", 2))
    store = SimpleNamespace(table=table, seats=seats, given_up="")
    for code, number, fields in requests:
        said.append([])
        conversation = _Conversation(cast(Any, store), seats.own, said[-1].append)
        conversation.take(pack_request(code, number, fields)[PREFIX_BYTES:])
    return said
