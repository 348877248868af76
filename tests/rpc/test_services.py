"""Typed services: values arrive as annotated, or an error names the parameter; nothing is unpickled."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypedDict

import msgspec
import numpy as np
import pytest
import torch

from phalanx import rpc
from phalanx.errors import ArgumentError, EncodingError
from phalanx.rpc import session
from phalanx.rpc.codec import Codec
from phalanx.rpc.services import typed_decode, typed_encode
from tests.rpc import workers
from tests.rpc.workers import next_of, with_workers
from tests.support.ranks import Member, on_ranks


class Mode(enum.Enum):
    TRAIN = "train"


@dataclasses.dataclass
class Batch:
    rows: torch.Tensor
    labels: list[int]
    mode: Mode = Mode.TRAIN


class Options(TypedDict):
    rate: float


class Pair(NamedTuple):
    left: int
    right: torch.Tensor


class Node(msgspec.Struct):
    value: int
    children: list[Node] = []


class Stranger:
    pass


class Trainer:
    """What is served, and the interface by which it is called."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def whose(self) -> int:
        return self.rank

    def step(self, batch: Batch, by: float = 1.0, *more: int, name: str | None = None, **options: Options) -> Any:
        return batch.rows * by, batch.labels, batch.mode == Mode.TRAIN, more, name, options

    def echo(self, value: Any) -> Any:
        return value

    async def later(self, *numbers: int) -> int:
        return sum(numbers)

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def lies(self) -> int:
        return "text"  # type: ignore[return-value]

    def hidden(self) -> int:
        return 1

    def items(self) -> Any:
        yield 1

    def bare(self, x):  # type: ignore[no-untyped-def]
        return x

    def strange(self, x: list[Stranger]) -> None: ...

    def mixed(self, x: torch.Tensor | float) -> None: ...


METHODS = ["whose", "step", "echo", "later", "fail", "lies"]


def serve(member: Member) -> None:
    rpc.serve("trainer", Trainer(member.rank), METHODS)


def with_services(body: Any, size: int) -> None:
    def run(member: Member) -> None:
        body(member, rpc.service(next_of(member), "trainer", Trainer))

    with_workers(run, size, before=serve, typed_only=True)


@pytest.mark.parametrize("size", [1, 3])
def test_methods_are_called_with_values_and_tensors(size: int) -> None:
    def body(member: Member, client: Trainer) -> None:
        assert client.whose() == (member.rank + 1) % size
        large = torch.arange(300_000.0)
        assert client.echo({"a": [large, 3]})["a"][0].equal(large)
        started: Any = rpc.start(client, "echo", torch.ones(2))  # type: ignore[arg-type]
        assert started.wait().tolist() == [1.0, 1.0]
        assert rpc.call(client, "later", 1, 2, 3, timeout_s=30) == 6  # type: ignore[arg-type]
        rows = torch.arange(6.0).view(2, 3)
        got = client.step(Batch(rows, [1, 2]), 2, 3, 4, name="n", a={"rate": 0.5})
        assert got[0].tolist() == (rows * 2).tolist()
        assert got[1:] == [[1, 2], True, [3, 4], "n", {"a": {"rate": 0.5}}]
        assert client.step(batch=Batch(rows, []))[1:] == [[], True, [], None, {}]
        complex_ = torch.complex(torch.arange(4.0), torch.ones(4))
        for tensor in (
            rows.t(), rows[:, 1], torch.tensor(2.5), torch.empty(0), torch.ones(1).expand(2, 3), complex_.conj(),
            complex_.conj().imag, torch.ones(3, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(3)),
        ):  # fmt: skip
            arrived = client.echo(tensor)
            assert (type(arrived), arrived.dtype, arrived.shape) == (torch.Tensor, tensor.dtype, tensor.shape)
            assert (arrived.tolist(), arrived.requires_grad) == (tensor.tolist(), tensor.requires_grad)

    with_services(body, size)


def test_types_of_all_kinds_arrive_and_tensors_are_not_copied() -> None:
    for value, kind in (
        (None, None), (3, int), ("text", str), (b"bytes", bytes), ([1.5], list[float]), ((1, "a"), tuple[int, str]),
        ({"a": {1, 2}}, dict[str, set[int]]), (Mode.TRAIN, Mode), (Node(1, [Node(2)]), Node), (7, int | str),
        (torch.bfloat16, torch.dtype), (torch.device("cpu"), torch.device), (torch.Size([2, 3]), torch.Size),
        ({"a": [1, None, 2.5, "b", True]}, Any), (3, Annotated[int, msgspec.Meta(gt=2)]),
    ):  # fmt: skip
        got = typed_decode(*typed_encode(value), kind)
        assert got == value
        assert type(got) is type(value)
    large = torch.zeros(1 << 22)
    head, (buffer,) = typed_encode(Pair(1, large))
    assert np.frombuffer(buffer, np.uint8).ctypes.data == large.data_ptr()
    memory = memoryview(bytearray(buffer.nbytes))
    pair = typed_decode(head, [memory], Pair)
    assert (type(pair), pair.left) == (Pair, 1)
    assert pair.right.data_ptr() == np.frombuffer(memory, np.uint8).ctypes.data


def test_wrong_values_are_refused_by_parameter_and_pickles_by_the_worker() -> None:
    good, labelled = Batch(torch.ones(1), []), Batch(torch.ones(1), ["a"])  # type: ignore[list-item]

    def body(member: Member, client: Any) -> None:
        for arguments, said in (
            ({"batch": 3}, "parameter batch of Trainer.step: Expected `object`, got `int`"),
            ({"batch": good, "by": "2"}, "parameter by of Trainer.step: Expected `float`, got `str`"),
            ({"batch": labelled}, r"batch of Trainer.step: .*`int`, got `str`.*\$\.labels\[0\]"),
            ({"batch": {"rows": [1.0], "labels": []}}, r"batch of Trainer.step: Expected `Tensor`.*\$\.rows"),
            ({"batch": good, "a": {}}, "parameter options of Trainer.step: .*rate"),
        ):
            with pytest.raises(rpc.RemoteError, match=said) as wrong:
                client.step(**arguments)
            assert wrong.value.type_name == "EncodingError"
        for value, said in (
            (Stranger(), "Stranger cannot be sent without pickle.*dataclass"),
            (lambda: 1, "function cannot be sent without pickle"),
            (2**64, "cannot be sent without pickle: can.t serialize ints"),
            (torch.eye(3).to_sparse(), "only dense tensors.*sparse_coo.*indices"),
            (torch.empty(3, device="meta"), "only dense tensors.*meta"),
            (torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})), "Sub cannot be sent without pickle"),
        ):
            with pytest.raises(EncodingError, match=r"parameter value of Trainer.echo: .*" + said):
                client.echo(value)
        with pytest.raises(ArgumentError, match="step cannot be called so: missing a required argument: 'batch'"):
            client.step()
        with pytest.raises(EncodingError, match="Expected `int`"):
            client.lies()
        with pytest.raises(rpc.RemoteError, match="KeyError: 'this key'") as caught:
            client.fail("this key")
        assert caught.value.type_name == "KeyError"
        assert "raise KeyError(text)" in str(caught.value.__cause__)
        to = next_of(member)
        wider = rpc.service(to, "trainer", Wider)  # type: ignore[type-abstract]
        for method in (wider.hidden, lambda: wider.other(1)):
            with pytest.raises(rpc.RemoteError, match=r"has no method.*whose, step"):
                method()
        with pytest.raises(AttributeError, match="nothing"):
            client.nothing()
        with pytest.raises(rpc.RemoteError, match="serves nothing called"):
            rpc.service(to, "nobody", Trainer).whose()
        for ask in (lambda: rpc.call(to, workers.pid), lambda: rpc.make(to, Stranger), lambda: rpc.each([to], int)):
            with pytest.raises(EncodingError, match="typed_only=True"):
                ask()
        assert client.whose() == 1 - member.rank

    with_services(body, 2)


class Wider(Protocol):
    def hidden(self) -> int: ...

    def other(self, number: int) -> int: ...


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("nothing", "no method 'nothing'"),
        ("items", "generator"),
        ("bare", "parameter x of .*bare has no annotation"),
        ("strange", "parameter x of .*Stranger cannot be made without pickle"),
        ("mixed", "parameter x of .*mixed is annotated as"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(method: str, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        rpc.serve("refused", Trainer(0), [method])


class Bomb:
    """Its pickle writes a file when it is loaded, whose name ends with the process that does."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return explode, (self.path,)


class Bombed(Exception):
    """The same as an exception."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __reduce__(self) -> Any:
        return explode, (self.path,)


def explode(path: str) -> Exception:
    Path(f"{path}.{os.getpid()}").touch()
    return Bombed(path)


def pickled(value: Any) -> tuple[bytes, list[memoryview]]:
    return pickle.dumps(value, protocol=5), []


def test_pickles_are_never_loaded_by_a_typed_worker_or_as_a_typed_answer(tmp_path: Path) -> None:
    path = str(tmp_path / "loaded")
    names = ["call", "objects.make", "objects.method", "objects.holds", "stream.next", "cancel", "receipt"]

    def attack(codec: Codec) -> None:
        failed = []
        for name in [*names, "typed:trainer"]:
            with pytest.raises(rpc.RemoteError) as caught:
                session.worker().request(0, name, Bomb(path), codec=codec).wait()
            failed.append(str(caught.value))
            session.worker().notify(0, name, Bomb(path))
        assert all("typed_only=True" in text for text in failed[:5]), failed
        with pytest.raises(rpc.RemoteError, match="typed_only=True"):
            rpc.call(0, workers.pid)
        assert rpc.service(0, "trainer", Trainer).whose() == 0

    def answer(incoming: Any, head: bytes) -> Any:
        if b"fail" in head:
            raise Bombed(path)
        return Bomb(path)

    def run(member: Member) -> int:
        serve(member)
        workers.begin(member, typed_only=member.rank == 0)
        if member.rank == 1:
            attack(Codec(pickled, lambda head, buffers: None, unpickles=False))
            # It pretends to be the service, and answers with pickles.
            evil = Codec(pickled, lambda head, buffers: bytes(head), unpickles=True)
            session.worker().serve("typed:trainer", answer, codec=evil)
        member.meet("serves")
        if member.rank == 0:
            client = rpc.service(1, "trainer", Trainer)
            with pytest.raises(EncodingError):
                client.whose()
            with pytest.raises(rpc.RemoteError, match="Bombed"):
                client.fail("x")
        rpc.shutdown()
        return os.getpid()

    receiver, sender = on_ranks(run, 2)
    assert not Path(f"{path}.{receiver}").exists()
    assert Path(f"{path}.{sender}").exists()  # the sender has loaded it, so the receiver could have
