"""Every parser of bytes that come from outside, with valid bytes and the refusals that it may answer with.

``tests/unit/test_fuzzed_bytes.py`` gives them changed bytes, and finds modules that read bytes and are not here.

Bytes before the proof may be anybody's. What follows it has a digest, so it is another rank's; without a key it may be
anybody's too. Files and memory are those of the same user, or reports that somebody has sent him.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ctypes import addressof
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import torch
from torch.distributed import DistStoreError

from phalanx.c10d.one_sided_memory import RemoteMemory
from phalanx.c10d.reconfigure_handles import Handle
from phalanx.commands.run import run as run_command
from phalanx.errors import ArgumentError, EncodingError, InitializationError, LaunchError
from phalanx.launch.job.config_file import read_config
from phalanx.launch.output import report as rank_report
from phalanx.launch.rank.trace import Trace, open_trace
from phalanx.launch.relay.channel import Channel, Lost
from phalanx.launch.running import jobs
from phalanx.native.core import RECORDER_BYTES
from phalanx.rpc.codecs import FACTS, NUMBER
from phalanx.rpc.failure import Failure
from phalanx.rpc.large_heads import put_together, take_apart
from phalanx.rpc.links import wire_format
from phalanx.rpc.links.contract import Link
from phalanx.rpc.links.image import Box, Damaged, pack, received
from phalanx.rpc.links.shared import SharedHub
from phalanx.rpc.links.socket import SocketLink
from phalanx.rpc.links.wire_format import Layout, layout_of
from phalanx.rpc.members import Member
from phalanx.rpc.message import Kind, Message
from phalanx.rpc.network import answer_of
from phalanx.rpc.services import _LENGTH, _decode_call
from phalanx.rpc.typed import Signature, decode_call, encode_call
from phalanx.store import requests
from phalanx.store.claim import Claim, Verdict
from phalanx.store.client import JobStore
from phalanx.store.company import Company
from phalanx.store.seats import Seats
from phalanx.store.table import Table
from phalanx.store.torch_requests import Conversation, TorchTable
from phalanx.system.foreign_values import read_json
from phalanx.system.sight import own_sight
from phalanx.transports import seat
from phalanx.transports.hosts.contact import _MESSAGE, Contact
from phalanx.transports.hosts.inquiry import answer_from
from phalanx.transports.hosts.lookout import Lookout
from phalanx.transports.hosts.reaching import NO, WELCOME
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
from phalanx.wire.encryption import Exchange
from phalanx.wire.framing import LONGEST_UNPROVEN, PREFIX_BYTES, Malformed, end_of_frame, frame
from phalanx.wire.key import Key
from phalanx.wire.proof import Challenge, NoProof, PassedOn, Response, WrongKey
from phalanx.wire.session import TAG_BYTES, Session

__all__ = ["Bomb", "Pair", "Parser", "parsers"]

KEY, HERE, ROLE = Key(b"the key of the tests", "a test"), ("127.0.0.1", 29500), "store"
NOW = 10**15


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


def as_bytes(**values: Any) -> bytes:
    """A JSON object."""
    return json.dumps(values).encode()


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
            *_from_workers(),
            *_memory(stack),
            *_files(folder),
        ]


def _before_the_proof() -> Iterator[Parser]:
    challenge = Challenge(KEY, ROLE)
    response = Response(KEY, ROLE, challenge.greeting, HERE, b'{"rank": 1}')
    proven = challenge.check(response.message, [HERE])
    assert proven is not None
    refused = (NoProof, WrongKey, PassedOn)
    bomb = Response(KEY, ROLE, challenge.greeting, HERE, pickle.dumps(Bomb()))
    proofs = (response.message, bomb.message)

    def proof(data: bytes) -> object:
        proven = challenge.check(data, [HERE])
        assert proven is None or data.startswith(proofs)  # nothing but a proof itself is one
        return proven

    yield Parser("a caller's proof", proofs, proof, refused)
    greetings = [challenge.greeting]
    yield Parser("a listener's greeting", greetings, lambda data: Response(KEY, ROLE, data, HERE, b""), (NoProof,))

    def verdict(data: bytes) -> object:
        said = None if response.missing(data) else response.check(data)
        assert said in (None, b"welcome")
        return said

    yield Parser("a listener's verdict", [proven.answer(b"welcome")], verdict, (NoProof, WrongKey))

    def frames(data: bytes) -> object:
        at = 0
        while (end := end_of_frame(data, at, shortest=1, longest=LONGEST_UNPROVEN)) is not None and end <= len(data):
            assert at + PREFIX_BYTES < end <= at + PREFIX_BYTES + LONGEST_UNPROVEN
            at = end
        return at or None

    yield Parser("the lengths of frames", [frame(b"one") + frame(b"two", b"three")], frames, (Malformed,))


def _from_ranks() -> Iterator[Parser]:
    sealed = Session(b"k" * 32, is_listener=False).seal(b"a message")

    def session(data: bytes) -> bool:
        Session(b"k" * 32, is_listener=True).check(bytearray(data), max(0, len(data) - TAG_BYTES))
        assert data == sealed
        return True

    yield Parser("a message with its digest", [sealed], session, (Malformed,))

    claim = Claim(1, 3, 4242, "h1", "a job", 0, 1, None, "secret", 123456, "0123456789abcdef", 1, 3)

    def claimed(data: bytes) -> object:
        """Whatever is claimed is judged, and what is said of it can be sent."""
        said, seats = Claim.decode(data), Seats(replace(claim, rank=0))
        for _ in range(2):
            verdict = seats.judge(said)
            assert Verdict.decode(verdict.encode()).kind == verdict.kind
            seats.describe_missing().encode()
        return verdict

    yield Parser("the claim of a rank", [claim.encode()], claimed, (NoProof,))
    welcome = Verdict("welcome", rank_0=replace(claim.without_token(), rank=0))
    verdicts = [welcome.encode(), Verdict("refused", "rank 1 is taken").encode()]
    yield Parser("the verdict on a claim", verdicts, Verdict.decode, (NoProof,))

    refused = (ValueError, TypeError, KeyError, IndexError)  # after all of which calls are compared no longer
    yield Parser("the calls that a host sends", [_sent_calls()], _hear_calls, refused)

    keys: list[Table] = [Table()]

    def request(data: bytes) -> object:
        length = requests.length_of(data)
        if length is None or length > len(data):
            return None
        code, number, fields = requests.unpack(data, length)
        assert requests.pack(code, number, fields) == data[:length]
        answers: list[Any] = []
        if keys[0].handle(code, number, fields, lambda *answer: answers.append(answer), 0.0) is not None:
            keys[0].expire(1e30)
        assert len(answers) == 1 or code in (requests.READ, requests.WAIT)
        if len(keys[0]._entries) > 100:
            keys[0] = Table()
        return True

    asked = [
        requests.pack(code, 5, fields)
        for code in range(1, 15)
        for fields in ([], [b"a key"], [b"a key", b"a value"], [b"a", b"b", b"c"])
    ]
    yield Parser("a request to the store", asked, request, (Malformed,))
    told = [requests.pack(code, 5, fields) for code in range(6) for fields in ([], [b"a"], [b"a", b"b"])]
    yield Parser("an answer of the store", told, _hear_answer, (Malformed, DistStoreError, InitializationError), 0.3)
    keeper = Session(b"k" * 32, is_listener=False)
    frames = keeper.seal(frame(b"m{}")) + keeper.seal(frame(b"o"))
    yield Parser("the frames of a keeper", [frames], _hear_keeper, (Lost,), 0.3)

    table: list[TorchTable] = [TorchTable()]

    def torch_request(data: bytes) -> bool:
        Conversation(table[0], lambda answer: None).hear(data)
        if len(table[0].entries) + len(table[0].waiting) + len(table[0].queues) > 100:
            table[0] = TorchTable()
        return True

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

    def signs(data: bytes) -> object:
        """The content of a message whose digest is right, and a stream of bytes."""
        heard = []
        for stream in (_MESSAGE + Session(b"k" * 32, is_listener=False).seal(frame(data)), data):
            contact = Contact.__new__(Contact)
            contact._session, contact._incoming = Session(b"k" * 32, is_listener=True), bytearray(stream)
            contact.ended = False
            contact.sock = cast(Any, SimpleNamespace(recv=_nothing_more))
            heard += contact.read(0.0)
        assert all(isinstance(message, dict) for message in heard)
        return heard or None

    said = [
        as_bytes(joined=True, group="0"),
        as_bytes(dialled=True),
        as_bytes(leaves=1, group="0", why="x", ranks=[1, 2]),
    ]
    yield Parser("a message between lookouts", said, signs)

    lookout = cast(Any, SimpleNamespace(endpoint=SimpleNamespace(identity="mine"), _unused={}))
    sock = SimpleNamespace(close=lambda: None)

    def knocks(data: bytes) -> object:
        verdicts: list[bytes] = []

        def answer(verdict: bytes) -> None:
            verdicts.append(verdict)
            if verdict == WELCOME:
                raise StopIteration

        arrival = SimpleNamespace(proven=SimpleNamespace(claim=data), answer=answer, sock=sock)
        with suppress(StopIteration):
            Lookout._admit(lookout, cast(Any, arrival))
        return None if verdicts == [NO] else verdicts

    claims = [json.dumps({"from": "one", "to": "mine", "probes": probes}).encode() for probes in (True, False)]
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

    def claims(data: bytes) -> object:
        found = list(seat._decoded(data))
        for each in found:
            assert each.name
            assert each.has_left() in (True, False)
        return found or None

    yield Parser("who claims a rank", [json.dumps([claim, claim]).encode()], claims)

    world = Group("0", "phalanx", (0, 1, 2), 2)
    record = Record(3, world, 4, "all_reduce", 64, "float32", "sum", -1, "train.py:7", "", 3, NOW - 9, 0, False, -1)
    seen = [Seen(rank, Recording(42, rank, 3, 3, "", 4, (record,)), "S", place="train.py:7") for rank in (1, 2)]
    waiting = Seen(0, Recording(41, 0, 3, 3, "", 4, (replace(record, entered_ns=NOW - 99),)), "S")
    answer = as_bytes(number=3, ranks=[seen_to_json(each, each.recording) for each in seen])

    def answered(data: bytes) -> object:
        _, ranks = answer_from(data, [1, 2])
        judge([waiting, *ranks])
        return ranks

    yield Parser("what the ranks of another host do", [answer], answered, (ValueError,))


def _sent_calls() -> bytes:
    group, other = Group("0", "gloo", (0, 1, 2, 3)), Group("1", "gloo", (1, 3))
    once = DoneCall(9, "broadcast", 64, "float32", "", 0, "train.py:9", "an evaluation", 3)
    whole = DoneCalls(group, (2, 3), 5, (_often(), once, _often(), None, _often()))
    return json.dumps(calls_to_json([whole, DoneCalls(other, (3,), 10, (), failed=True)])).encode()


def _often() -> DoneCall:
    return DoneCall(7, "all_reduce", 64, "float32", "sum", -1, "train.py:7", "", 3, "[4, 4]")


def _hear_calls(data: bytes) -> bool:
    comparison = Comparison(0.0, 100, lines=True)
    others = DoneCalls(Group("0", "gloo", (0, 1, 2, 3)), (0, 1), 5, (_often(), None, _often(), _often(), _often()))
    comparison.look([others])
    comparison.look(calls_from_json(read_json(data), range(2, 4), 4))
    return True


def _hear_answer(data: bytes) -> object:
    """A rank's own store, which is given this answer to whatever it asks."""
    length = requests.length_of(data)
    if length is None or length > len(data):
        return None
    answer = requests.unpack(data, length)
    store = JobStore(cast(Any, SimpleNamespace(call=lambda *_: answer, company=Company())), timedelta(seconds=1))
    done: list[object] = []
    for ask in (
        lambda: store.get("a"),
        lambda: store.multi_get(["a", "b"]),
        lambda: store.wait(["a"]),
        lambda: store.set("a", "b"),
        lambda: store.add("a", 1),
        lambda: store.compare_set("a", "b", "c"),
        lambda: store.check(["a"]),
        lambda: store.list_keys(),
        lambda: store.wait_for_all(1.0),
    ):
        with suppress(DistStoreError, InitializationError):
            done.append(ask())
    return done or None


def _hear_keeper(data: bytes) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Channel(ours, Session(b"k" * 32, is_listener=True))
        theirs.sendall(data[: 1 << 15])
        theirs.shutdown(socket.SHUT_WR)
        return link.receive() or None


def _nothing_more(count: int) -> bytes:
    raise BlockingIOError


def _example(x: torch.Tensor, count: int, names: list[str], scale: float = 1.0) -> None: ...


def _from_workers() -> Iterator[Parser]:
    good = Layout(Kind.REQUEST, 7, "a service", 4, [1, 2, 3]).encode() + b"head"

    def layout(data: bytes) -> object:
        found, end = Layout.decode(memoryview(data))
        assert end + found.head_nbytes <= len(data)
        return found

    yield Parser("the layout of a call", [good], layout, (Malformed,))
    yield from _links()

    worker = Member("worker1", 1, "h1", 4242, 3, "10.0.0.1", 4000)
    fields = as_bytes(**asdict(worker))
    named = (ValueError, TypeError, KeyError, OverflowError, RecursionError)  # all of which Connections refuses
    yield Parser("the claim of a worker", [fields], lambda data: Member.from_claim(json.loads(data)), named)

    head, buffers = encode_call(_example, (torch.ones(3), 2, ["a", "b"]), {"scale": 2.0})

    def call(data: bytes) -> object:
        return decode_call(_example, data, buffers)

    yield Parser("a call without pickle", [bytes(head)], call, (EncodingError,))
    failure = Failure(b"", "ValueError", "a text", "a traceback").encode()
    yield Parser("the failure of a call", [failure], Failure.decode, (EncodingError,))
    yield Parser("facts of a worker", [b'{"a": [1, 2.5, null]}'], lambda data: FACTS.decode(data, []), (EncodingError,))
    yield Parser("the number of a call", [bytes(8)], lambda data: NUMBER.decode(data, []), (EncodingError,))
    pieces = [b"begins", b"x" * 300_000, b"ends", b"y" * 300_000]
    whole, beside = put_together(pieces, [])

    def head_of(data: bytes) -> object:
        file, _ = take_apart(data, beside)
        content = file.read(1 << 30)
        assert len(content) <= len(data) + 600_000
        return content

    yield Parser("the head of a large call", [whole], head_of, (EncodingError,))
    yield from _calls_of_services()
    yield from _before_links()


class Receiver:
    """What the agent sees of a link."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.why: list[str] = []

    def deliver(self, link: Link, message: Message, *, may_block: bool) -> None:
        self.messages.append(message)

    def ended(self, link: Link, why: str) -> None:
        self.why.append(why)


class Plain:
    """A socket that is no TCP socket, and knows nothing of TCP's options."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def setsockopt(self, *args: Any) -> None:
        pass


class Pair:
    """A link between workers, and the bare socket at its other end."""

    def __init__(self) -> None:
        ours, self.other = socket.socketpair()
        self.receiver = Receiver()
        self.session = Session(b"k" * 32, is_listener=False)
        self.link = SocketLink(cast(Any, Plain(ours)), Session(b"k" * 32, is_listener=True), self.receiver)

    def send(self, data: bytes) -> None:
        for start in range(0, len(data), 1 << 15):  # as much as the socket holds
            if self.receiver.why:
                return
            self.other.sendall(data[start : start + (1 << 15)])
            while not self.receiver.why and self._readable():
                self.link.read()

    def _readable(self) -> bool:
        try:
            return bool(self.link.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def frame(self, kind: int, body: bytes) -> bytes:
        made = struct.pack("!IB", len(body) + 1, kind) + body
        return made + self.session.digest(made, sha=kind == wire_format.HASHED)

    def close(self) -> None:
        self.other.close()
        self.link.close()


def small(number: int, head: bytes = b"head", buffers: tuple[bytes, ...] = (b"abc", b"")) -> tuple[int, bytes]:
    message = Message(Kind.REQUEST, number, "call", head, [memoryview(part) for part in buffers])
    return wire_format.SMALL, layout_of(message).encode() + head + b"".join(buffers)


def _links() -> Iterator[Parser]:
    bomb = pickle.dumps(Bomb())

    def link(frame_of: Callable[[Pair, bytes], bytes]) -> Callable[[bytes], object]:
        def feed(data: bytes) -> object:
            pair = Pair()
            pair.send(pair.frame(*small(0, bomb)))
            pair.send(frame_of(pair, data))
            pair.close()
            assert len(pair.receiver.why) == 1
            assert 1 <= len(pair.receiver.messages) <= 2
            return pair.receiver.messages[1:] or None

        return feed

    pair = Pair()
    pair.frame(*small(0, bomb))
    whole = pair.frame(*small(1, bomb))
    pair.close()
    yield Parser("a frame of a link", [whole], link(lambda pair, data: data), share=0.05)
    kind, body = small(1, bomb)
    right = link(lambda pair, data: pair.frame(data[0] if data else 0, data[1:]))
    yield Parser("a frame of a link with a right digest", [bytes([kind]) + body], right, share=0.05)

    image = pack(Message(Kind.REQUEST, 1, "call", bomb, [memoryview(b"abc"), memoryview(b"")]), Link.SMALL_BYTES)
    assert image is not None
    box = Box()

    def boxed(data: bytes) -> object:
        box.view[64 : 64 + len(data)] = data
        values = list(box.open())
        values[2], values[3], values[-1] = len(data), 0xFFFFFFFE, len(data)
        message = received(box, tuple(values), lambda *args: None)
        assert message.nbytes <= len(data)
        return message

    yield Parser("a message in shared memory", [image], boxed, (Damaged,))


def _calls_of_services() -> Iterator[Parser]:
    arguments, buffers = encode_call(_example, (torch.ones(3), 2, ["a", "b"]), {"scale": 2.0})
    head = _LENGTH.pack(len("example")) + b"example" + bytes(arguments)
    signatures = {"example": Signature(_example)}
    yield Parser(
        "a call of a service",
        [head],
        lambda data: _decode_call("a service", signatures, data, buffers),
        (EncodingError, ArgumentError),
    )


def _before_links() -> Iterator[Parser]:
    """What two workers say before there is a link."""
    hub = SharedHub.__new__(SharedHub)
    taken: list[object] = []

    def accept(*numbers: object) -> int:
        taken.append(numbers)
        return 0

    hub._core = cast(Any, SimpleNamespace(phx_rpc_accept=accept, phx_rpc_close=lambda handle: None))
    hub._handle = 1

    def offered(data: bytes) -> object:
        taken.clear()
        hub.accept(data)
        return taken or None

    offer = as_bytes(pid=4242, channel=5, cookie="00" * 16, place=7, place_cookie="ff" * 16)
    yield Parser("the offer of shared memory", [offer], offered)
    answers = [as_bytes(shared=1), as_bytes(received=9), as_bytes(refused="another worker is at its address")]
    yield Parser("the answer of a worker", answers, answer_of, (ConnectionAbortedError,))

    def exchange(data: bytes) -> object:
        session = Session(b"k" * 32, is_listener=True)
        return Exchange().session(session, data.decode("utf-8", "surrogateescape"), is_listener=True)

    yield Parser("a key for encryption", [Exchange().public.encode()], exchange, (Malformed,), share=0.2)


def _memory(stack: ExitStack) -> Iterator[Parser]:
    file = os.memfd_create("test")
    stack.callback(os.close, file)

    def put(data: bytes) -> None:
        os.ftruncate(file, 0)
        os.pwrite(file, data, 0)

    def described(data: bytes) -> object:
        put(data)
        job = jobs._read(f"/proc/self/fd/{file}")
        if job is not None and job.pid == os.getpid():
            assert job.runs in (True, False)
        return job

    rank = {"rank": 0, "pid": 4243, "start": 7, "host": "h0", "part": 0}
    job = {
        "run_id": "phalanx-abc", "pid": 4242, "start": 6, "since": 1.5, "ranks": 1, "target": "train.py",
        "arguments": ["--lr", "0.1"], "directory": "/", "host": "h0", "hosts": [], "starter": [], "mpi": "",
        "is_python": True, "end_s": 30.0, "descriptor": 5,
    }  # fmt: skip
    lines = as_bytes(**job) + b"\n" + as_bytes(processes=[rank], trace=9) + b"\n"
    yield Parser("the description of a job", [lines], described)

    def of_rank(data: bytes) -> object:
        put(data)
        found = rank_report.read_report(file)
        if found is not None:
            json.dumps(found.to_record())
        return found

    told = rank_report.Report("ValueError", "a text", "Traceback", False, None, 1)
    others = as_bytes(message={"message": "of torch's @record", "extraInfo": {}})
    yield Parser("the report of a rank that failed", [json.dumps(told.to_record()).encode(), others], of_rank)

    traced = open_trace("phalanx-test")
    stack.callback(os.close, traced)

    def trace(data: bytes) -> object:
        os.pwrite(traced, data[:2000].ljust(2000, b"\0"), 0)
        os.pwrite(traced, data[2000:4000].ljust(2000, b"\0"), 4096)
        read = Trace(traced, "phalanx-test")
        assert read.stage(0) is not None
        return read.asked(0), read.operation(0), read.take([0])

    stacks = b'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in main\n'
    yield Parser("the trace of a rank", [b"\2\0\0\0\1\0\0\0asked" + bytes(1990) + stacks], trace)
    yield Parser("the stacks of a rank", [stacks], lambda data: frames_of(data.decode(errors="replace")) or None)

    kept = os.memfd_create("recorder")
    stack.callback(os.close, kept)
    os.ftruncate(kept, RECORDER_BYTES)
    recorded = _recorded(kept)

    def recording(data: bytes) -> object:
        os.pwrite(kept, data, 0)
        found = read_recording(kept)
        if found is not None:
            for record in found.records[:20]:
                record.text(with_shape=True)
            Recording.from_json(json.loads(json.dumps(found.excerpt(10).to_json())))
        return found

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

    def hang(data: bytes) -> object:
        path.write_bytes(data)
        found = read_report(path)
        return found.text(), page(found)

    yield Parser("the report on a job that hangs", [whole], hang, (ValueError,), share=0.3)

    config = folder / "config.toml"
    options = cast(click.Command, run_command).params

    def configured(data: bytes) -> object:
        config.write_bytes(data)
        return read_config(str(config), options)

    toml = b'ranks = 4\ntarget = "train.py"\narguments = ["--lr", "0.1"]\nlog-dir = "logs"\nrestarts = 2\n'
    yield Parser("a configuration file", [toml], configured, (LaunchError,), share=0.5)

    sizes = folder / "tuning.json"

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

    yield Parser(
        "measured sizes", [as_bytes(chunk_bytes=4096, small_bytes=100, stream_bytes=1 << 20)], tuned, share=0.5
    )
