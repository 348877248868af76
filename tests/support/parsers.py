"""Every parser of bytes that come from outside, with valid bytes and the refusals that it may answer with.

``reading.py`` has a list of all modules that read bytes, and ``tests/unit/test_every_parser.py`` holds it complete.

Bytes before the proof may be anybody's. What follows it has a digest, so it is another rank's; without a key it may be
anybody's too. Files and memory are those of the same user, or reports that somebody has sent him.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import addressof
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click

from phalanx.c10d.one_sided_memory import RemoteMemory
from phalanx.c10d.reconfigure_handles import Handle
from phalanx.commands.run import run as run_command
from phalanx.errors import ArgumentError, LaunchError
from phalanx.launch.job.config_file import read_config
from phalanx.launch.output import report as rank_report
from phalanx.launch.rank.trace import Trace, open_trace
from phalanx.launch.running import jobs
from phalanx.native.core import RECORDER_BYTES
from phalanx.store import requests
from phalanx.store.claim import Claim, Verdict
from phalanx.store.table import Table
from phalanx.store.torch_requests import Conversation, TorchTable
from phalanx.system.foreign_values import read_json
from phalanx.system.sight import own_sight
from phalanx.transports import seat
from phalanx.transports.hosts.contact import _MESSAGE, Contact
from phalanx.transports.hosts.inquiry import answer_from
from phalanx.transports.hosts.lookout import Lookout
from phalanx.transports.shm import tuning
from phalanx.watch import recorder
from phalanx.watch.comparison import Comparison
from phalanx.watch.done_calls import DoneCall, DoneCalls
from phalanx.watch.hang_report import HangReport, read_report, write_report
from phalanx.watch.html_page import page
from phalanx.watch.records import Group, Record, Recording, read_recording
from phalanx.watch.seen_values import seen_to_json
from phalanx.watch.sent_calls import calls_from_json, calls_to_json
from phalanx.watch.stack_text import frames_of
from phalanx.watch.verdict import Seen, judge
from phalanx.watch.verdict import Verdict as HangVerdict
from phalanx.wire.framing import LONGEST_UNPROVEN, Malformed, end_of_frame, frame
from phalanx.wire.key import Key
from phalanx.wire.proof import Challenge, NoProof, PassedOn, Response, WrongKey
from phalanx.wire.session import TAG_BYTES, Session
from tests.support.parser import Parser, as_bytes
from tests.support.parsers_of_workers import from_workers

__all__ = ["parsers"]

KEY, HERE, ROLE = Key(b"the key of the tests", "a test"), ("127.0.0.1", 29500), "store"
NOW = 10**15


@contextmanager
def parsers() -> Iterator[list[Parser]]:
    """All of them; what they need is given back afterwards."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-test-")))
        yield [
            *_before_the_proof(),
            *_from_ranks(),
            *_from_scripts(),
            *_from_stores(),
            *from_workers(),
            *_memory(stack),
            *_files(folder),
        ]


def _before_the_proof() -> Iterator[Parser]:
    challenge = Challenge(KEY, ROLE)
    response = Response(KEY, ROLE, challenge.greeting, HERE, b'{"rank": 1}')
    proven = challenge.check(response.message, [HERE])
    assert proven is not None
    refused = (NoProof, WrongKey, PassedOn)
    yield Parser("a caller's proof", [response.message], lambda data: challenge.check(data, [HERE]), refused)
    yield Parser(
        "a listener's greeting", [challenge.greeting], lambda data: Response(KEY, ROLE, data, HERE, b""), (NoProof,)
    )

    def verdict(data: bytes) -> None:
        if not response.missing(data):
            response.check(data)

    yield Parser("a listener's verdict", [proven.answer(b"welcome")], verdict, (NoProof, WrongKey))

    def frames(data: bytes) -> None:
        at = 0
        while (end := end_of_frame(data, at, shortest=1, longest=LONGEST_UNPROVEN)) is not None and end <= len(data):
            at = end

    yield Parser("the lengths of frames", [frame(b"one") + frame(b"two", b"three")], frames, (Malformed,))


def _from_ranks() -> Iterator[Parser]:
    sealed = Session(b"k" * 32, is_listener=False).seal(b"a message")

    def session(data: bytes) -> None:
        Session(b"k" * 32, is_listener=True).check(bytearray(data), max(0, len(data) - TAG_BYTES))

    yield Parser("a message with its digest", [sealed], session, (Malformed,))

    claim = Claim(1, 3, 4242, "h1", "a job", 0, 1, None, "secret", 123456, "0123456789abcdef", 1, 3)
    yield Parser("the claim of a rank", [claim.encode()], Claim.decode, (NoProof,))
    welcome = Verdict("welcome", rank_0=replace(claim.without_token(), rank=0))
    verdicts = [welcome.encode(), Verdict("refused", "rank 1 is taken").encode()]
    yield Parser("the verdict on a claim", verdicts, Verdict.decode, (NoProof,))

    refused = (ValueError, TypeError, KeyError, IndexError)  # after all of which calls are compared no longer
    yield Parser("the calls that a host sends", [_sent_calls()], _hear_calls, refused)

    keys: list[Table] = [Table()]

    def request(data: bytes) -> None:
        length = requests.length_of(data)
        if length is None or length > len(data):
            return
        code, number, fields = requests.unpack(data, length)
        answers: list[Any] = []
        if keys[0].handle(code, number, fields, lambda *answer: answers.append(answer), 0.0) is not None:
            keys[0].expire(1e30)
        assert len(answers) == 1 or code in (requests.READ, requests.WAIT)
        if len(keys[0]._entries) > 100:
            keys[0] = Table()

    asked = [
        requests.pack(code, 5, fields)
        for code in range(1, 15)
        for fields in ([], [b"a key"], [b"a key", b"a value"], [b"a", b"b", b"c"])
    ]
    yield Parser("a request to the store", asked, request, (Malformed,))

    table: list[TorchTable] = [TorchTable()]

    def torch_request(data: bytes) -> None:
        Conversation(table[0], lambda answer: None).hear(data)
        if len(table[0].entries) + len(table[0].waiting) + len(table[0].queues) > 100:
            table[0] = TorchTable()

    key, value = (len(text).to_bytes(8, "little") + text for text in (b"a key", b"12"))
    one = (1).to_bytes(8, "little")
    bodies = [key, key + value, key + one, one + key, key + value + value, one + key + value, b""]
    hello = b"\0" + (0x3C85F7CE).to_bytes(4, "little")
    torchs = [hello + bytes([code]) + body for code in range(1, 20) for body in bodies]
    yield Parser("a request of torch's store client", torchs, torch_request, (Malformed,))

    handles = [str(Handle.new(rank)).encode() for rank in (0, 12)]
    yield Parser(
        "the handle of a group whose ranks change",
        handles,
        lambda data: Handle.parse(data.decode("utf-8", "surrogateescape")),
        (ArgumentError,),
    )

    def signs(data: bytes) -> None:
        """The content of a message whose digest is right, and a stream of bytes."""
        for stream in (_MESSAGE + Session(b"k" * 32, is_listener=False).seal(frame(data)), data):
            contact = Contact.__new__(Contact)
            contact._session, contact._incoming = Session(b"k" * 32, is_listener=True), bytearray(stream)
            contact.ended = False
            contact.sock = cast(Any, SimpleNamespace(recv=_nothing_more))
            for message in contact.read(0.0):
                assert isinstance(message, dict)

    said = [
        as_bytes(joined=True, group="0"),
        as_bytes(dialled=True),
        as_bytes(leaves=1, group="0", why="x", ranks=[1, 2]),
    ]
    yield Parser("a message between lookouts", said, signs)

    lookout = cast(Any, SimpleNamespace(endpoint=SimpleNamespace(identity="mine"), _unused={}))
    sock = SimpleNamespace(close=lambda: None)

    def knocks(data: bytes) -> None:
        arrival = SimpleNamespace(proven=SimpleNamespace(claim=data), answer=lambda verdict: None, sock=sock)
        Lookout._admit(lookout, cast(Any, arrival))

    claims = [json.dumps({"from": "one", "to": "another", "probes": probes}).encode() for probes in (True, False)]
    yield Parser("the claim of a lookout", claims, knocks)


def _from_scripts() -> Iterator[Parser]:
    """Descriptions that a script carries from one process to another."""
    memory = RemoteMemory("an endpoint", 4096, 64, 4160, 7).serialize()
    yield Parser("the description of memory", [memory], RemoteMemory.deserialize, (ValueError,))


def _from_stores() -> Iterator[Parser]:
    """Values in a store of torch's, where anybody may write who reaches it."""
    claim = {
        "rank": 1,
        "size": 3,
        "pid": 4242,
        "start": 7,
        "sight": own_sight(),
        "host": "h1",
        "thread": "t",
        "number": "a1",
    }

    def claims(data: bytes) -> None:
        for each in seat._decoded(data):
            assert each.name
            assert each.has_left() in (True, False)

    yield Parser("who claims a rank", [json.dumps([claim, claim]).encode()], claims)

    world = Group("0", "phalanx", (0, 1, 2), 2)
    record = Record(3, world, 4, "all_reduce", 64, "float32", "sum", -1, "train.py:7", "", 3, NOW - 9, 0, False, -1)
    seen = [Seen(rank, Recording(42, rank, 3, 3, "", 4, (record,)), "S", place="train.py:7") for rank in (1, 2)]
    waiting = Seen(0, Recording(41, 0, 3, 3, "", 4, (replace(record, entered_ns=NOW - 99),)), "S")
    answer = as_bytes(number=3, ranks=[seen_to_json(each, each.recording) for each in seen])

    def answered(data: bytes) -> None:
        _, ranks = answer_from(data, [1, 2])
        judge([waiting, *ranks])

    yield Parser("what the ranks of another host do", [answer], answered, (ValueError,))


def _sent_calls() -> bytes:
    group, other = Group("0", "gloo", (0, 1, 2, 3)), Group("1", "gloo", (1, 3))
    once = DoneCall(9, "broadcast", 64, "float32", "", 0, "train.py:9", "an evaluation", 3)
    whole = DoneCalls(group, (2, 3), 5, (_often(), once, _often(), None, _often()))
    return json.dumps(calls_to_json([whole, DoneCalls(other, (3,), 10, (), failed=True)])).encode()


def _often() -> DoneCall:
    return DoneCall(7, "all_reduce", 64, "float32", "sum", -1, "train.py:7", "", 3, "[4, 4]")


def _hear_calls(data: bytes) -> None:
    comparison = Comparison(0.0, 100, lines=True)
    others = DoneCalls(Group("0", "gloo", (0, 1, 2, 3)), (0, 1), 5, (_often(), None, _often(), _often(), _often()))
    comparison.look([others])
    comparison.look(calls_from_json(read_json(data), range(2, 4), 4))


def _nothing_more(count: int) -> bytes:
    raise BlockingIOError


def _memory(stack: ExitStack) -> Iterator[Parser]:
    file = os.memfd_create("test")
    stack.callback(os.close, file)

    def put(data: bytes) -> None:
        os.ftruncate(file, 0)
        os.pwrite(file, data, 0)

    def described(data: bytes) -> None:
        put(data)
        job = jobs._read(f"/proc/self/fd/{file}")
        if job is not None and job.pid == os.getpid():
            assert job.runs in (True, False)

    rank = {"rank": 0, "pid": 4243, "start": 7, "host": "h0", "part": 0}
    job = {
        "run_id": "phalanx-abc", "pid": 4242, "start": 6, "since": 1.5, "ranks": 1, "target": "train.py",
        "arguments": ["--lr", "0.1"], "directory": "/", "host": "h0", "hosts": [], "mpi": "", "is_python": True,
        "end_s": 30.0, "descriptor": 5,
    }  # fmt: skip
    lines = as_bytes(**job) + b"\n" + as_bytes(processes=[rank], trace=9) + b"\n"
    yield Parser("the description of a job", [lines], described)

    def of_rank(data: bytes) -> None:
        put(data)
        found = rank_report.read_report(file)
        if found is not None:
            json.dumps(found.to_record())

    told = rank_report.Report("ValueError", "a text", "Traceback", False, None, 1)
    others = as_bytes(message={"message": "of torch's @record", "extraInfo": {}})
    yield Parser("the report of a rank that failed", [json.dumps(told.to_record()).encode(), others], of_rank)

    traced = open_trace("phalanx-test")
    stack.callback(os.close, traced)

    def trace(data: bytes) -> None:
        os.pwrite(traced, data[:2000].ljust(2000, b"\0"), 0)
        os.pwrite(traced, data[2000:4000].ljust(2000, b"\0"), 4096)
        read = Trace(traced, "phalanx-test")
        assert read.stage(0) is not None
        read.asked(0), read.operation(0), read.take([0])

    stacks = b'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in main\n'
    yield Parser("the trace of a rank", [b"\2\0\0\0\1\0\0\0asked" + bytes(1990) + stacks], trace)
    yield Parser("the stacks of a rank", [stacks], lambda data: frames_of(data.decode(errors="replace")))

    kept = os.memfd_create("recorder")
    stack.callback(os.close, kept)
    os.ftruncate(kept, RECORDER_BYTES)
    recorded = _recorded(kept)

    def recording(data: bytes) -> None:
        os.pwrite(kept, data, 0)
        found = read_recording(kept)
        if found is not None:
            for record in found.records[:20]:
                record.text(with_shape=True)
            Recording.from_json(json.loads(json.dumps(found.excerpt(10).to_json())))

    yield Parser("a flight recorder", [recorded], recording, share=0.02)


def _recorded(file: int) -> bytes:
    """The parts of a recorder that a child has written."""
    pid = os.fork()
    if pid == 0:
        try:
            recorder.keep_in(lambda: (file, 0))
            recorder.open_recorder(3, 8)
            group = recorder.group("0", "phalanx", range(8), 3)
            assert group is not None
            for number in range(30):
                nbytes = recorder.shaped(4 * number, (number, 2))
                ticket = recorder.begin(addressof(group), 1 | 1 << 8, nbytes, -1)
                recorder.end(ticket, False)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return os.pread(file, RECORDER_BYTES, 0)


def _files(folder: Path) -> Iterator[Parser]:
    world = Group("0", "phalanx", (0, 1), 0)
    record = Record(3, world, 4, "all_reduce", 64, "float32", "sum", -1, "train.py:7", "", 3, NOW - 9, 0, False, -1)
    seen = [Seen(rank, Recording(42, rank, 2, 3, "", 4, (record,)), "S", place="train.py:7") for rank in (0, 1)]
    verdict = HangVerdict("rank 1 is late", (1,), (0,), NOW - 5, "look")
    report = HangReport("phalanx run", "h0", "2026-11-23T01:00:00", NOW, verdict, seen, {0: ["  File a", "    b()"]})
    path = write_report(folder, report)
    whole = path.read_bytes()

    def hang(data: bytes) -> None:
        path.write_bytes(data)
        found = read_report(path)
        found.text()
        page(found)

    yield Parser("the report on a job that hangs", [whole], hang, (ValueError,), share=0.3)

    config = folder / "config.toml"
    options = cast(click.Command, run_command).params

    def configured(data: bytes) -> None:
        config.write_bytes(data)
        read_config(str(config), options)

    toml = b'ranks = 4\ntarget = "train.py"\narguments = ["--lr", "0.1"]\nlog-dir = "logs"\nrestarts = 2\n'
    yield Parser("a configuration file", [toml], configured, (LaunchError,), share=0.5)

    sizes = folder / "tuning.json"

    def tuned(data: bytes) -> None:
        sizes.write_bytes(data)
        before, tuning.tuning_path = tuning.tuning_path, lambda: sizes
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tuning._read.__wrapped__()
        finally:
            tuning.tuning_path = before

    yield Parser(
        "measured sizes", [as_bytes(chunk_bytes=4096, small_bytes=100, stream_bytes=1 << 20)], tuned, share=0.5
    )
