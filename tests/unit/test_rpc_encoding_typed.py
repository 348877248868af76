"""Typed RPC messages: arguments arrive as annotated, or an error names the parameter; nothing is unpickled."""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypedDict

import msgspec
import numpy as np
import pytest
import torch

from phalanx.errors import ArgumentError, EncodingError
from phalanx.rpc.typed import Signature, decode_call, encode_call, typed_decode, typed_encode


def arrived(buffers: list[memoryview]) -> list[memoryview]:
    return [memoryview(bytearray(buffer)) for buffer in buffers]


def carried(value: Any, kind: Any) -> Any:
    head, buffers = typed_encode(value)
    return typed_decode(head, arrived(buffers), kind)


def called(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    head, buffers = encode_call(function, arguments, options)
    bound = decode_call(function, head, arrived(buffers))
    return function(*bound.args, **bound.kwargs)


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


def step(batch: Batch, scale: float = 1.0, *more: int, name: str | None = None, **options: Options) -> Any:
    return batch.rows * scale, batch.labels, batch.mode, more, name, options


def test_arguments_arrive_as_annotated() -> None:
    rows = torch.arange(6.0).view(2, 3)
    got = called(step, Batch(rows, [1, 2]), 2, 3, 4, name="n", a={"rate": 0.5})
    assert got[0].tolist() == (rows * 2).tolist()
    assert got[1:] == ([1, 2], Mode.TRAIN, (3, 4), "n", {"a": {"rate": 0.5}})
    assert called(step, batch=Batch(rows, []))[1:] == ([], Mode.TRAIN, (), None, {})


def test_types_of_all_kinds() -> None:
    for value, kind in (
        (None, None), (3, int), ("text", str), (b"bytes", bytes), ([1.5], list[float]), ((1, "a"), tuple[int, str]),
        ({"a": {1, 2}}, dict[str, set[int]]), (Mode.TRAIN, Mode), (Node(1, [Node(2)]), Node), (7, int | str),
        (torch.bfloat16, torch.dtype), (torch.device("cpu"), torch.device), (torch.Size([2, 3]), torch.Size),
        ({"a": [1, None, 2.5, "b", True]}, Any), (3, Annotated[int, msgspec.Meta(gt=2)]),
    ):  # fmt: skip
        got = carried(value, kind)
        assert got == value
        assert type(got) is type(value)
    pair = carried(Pair(1, torch.ones(2)), Pair)
    assert (type(pair), pair.left, pair.right.tolist()) == (Pair, 1, [1, 1])
    anything = carried({"a": [torch.ones(2), 3]}, Any)
    assert anything["a"][0].tolist() == [1, 1]


COMPLEX = torch.complex(torch.arange(4.0), torch.ones(4))


def test_dense_tensors_arrive_equal() -> None:
    matrix = torch.arange(6).view(2, 3)
    for tensor in (
        matrix.t(), matrix[:, 1], torch.tensor(2.5), torch.empty(0), torch.ones(1).expand(2, 3), COMPLEX.conj(),
        COMPLEX.conj().imag, torch.ones(3, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(3)),
    ):  # fmt: skip
        got = carried([tensor], list[torch.Tensor])[0]
        assert (type(got), got.dtype, got.shape) == (torch.Tensor, tensor.dtype, tensor.shape)
        assert (got.tolist(), got.requires_grad) == (tensor.tolist(), tensor.requires_grad)
        assert got.stride() == torch.empty(tensor.shape).stride()


def test_tensors_are_not_copied() -> None:
    tensor = torch.zeros(16 * 1024 * 1024)
    head, (buffer,) = typed_encode({"weights": tensor})
    assert np.frombuffer(buffer, np.uint8).ctypes.data == tensor.data_ptr()
    assert len(head) < 100
    memory = memoryview(bytearray(buffer.nbytes))
    got = typed_decode(head, [memory], dict[str, torch.Tensor])["weights"]
    assert got.data_ptr() == np.frombuffer(memory, np.uint8).ctypes.data


class Stranger:
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Stranger(), "Stranger cannot be sent without pickle.*dataclass"),
        (lambda: 1, "function cannot be sent without pickle"),
        (2**64, "cannot be sent without pickle: can.t serialize ints"),
        (torch.eye(3).to_sparse(), "only dense tensors.*sparse_coo.*indices"),
        (torch.empty(3, device="meta"), "only dense tensors.*meta"),
        (torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})), "Sub cannot be sent without pickle"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(value: Any, text: str) -> None:
    def take(x: Any, y: Any) -> None: ...

    with pytest.raises(EncodingError, match=text):
        typed_encode([value])
    with pytest.raises(EncodingError, match=r"parameter y of .*take: .*" + text):
        encode_call(take, (1, value), {})


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ({"batch": 3}, "parameter batch of step: Expected `object`, got `int`"),
        ({"batch": Batch(torch.ones(1), []), "scale": "2"}, "parameter scale of step: Expected `float`, got `str`"),
        ({"batch": Batch(torch.ones(1), ["a"])}, r"parameter batch of step: .*`int`, got `str`.*\$\.labels\[0\]"),  # type: ignore[list-item]
        ({"batch": {"rows": [1.0], "labels": []}}, r"parameter batch of step: Expected `Tensor`, got `list`.*\$\.rows"),
        ({}, "parameter batch of step was not sent"),
        ({"batch": Batch(torch.ones(1), []), "size": 3, "b": 1}, "step has no parameter b, size"),
        ({"batch": Batch(torch.ones(1), []), "more": [1, None]}, r"parameter more of step: .*\$\[1\]"),
        ({"batch": Batch(torch.ones(1), []), "options": {"a": {}}}, "parameter options of step: .*rate"),
        ([1], "a call of step has arrived damaged"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(sent: Any, text: str) -> None:
    head, buffers = typed_encode(sent)
    with pytest.raises(EncodingError, match=text):
        decode_call(step, head, arrived(buffers))


def test_a_call_that_cannot_be_made_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ArgumentError, match="step cannot be called so: missing a required argument: 'batch'"):
        encode_call(step, (), {})


def test_signatures_that_cannot_be_checked_are_refused() -> None:
    def bare(x: int, y) -> None: ...  # type: ignore[no-untyped-def]

    def strange(x: list[Stranger]) -> None: ...

    def mixed(x: torch.Tensor | float) -> None: ...

    for function, text in (
        (bare, "parameter y of .*bare has no annotation"),
        (strange, "parameter x of .*Stranger cannot be made without pickle"),
        (mixed, "parameter x of .*mixed is annotated as"),
    ):
        with pytest.raises(ArgumentError, match=text):
            Signature(function)


class Ran(Exception):
    pass


def run() -> None:
    raise Ran


class Attack:
    def __reduce__(self) -> Any:
        return run, ()


def test_nothing_is_unpickled() -> None:
    head = pickle.dumps(Attack())
    for kind in (Any, torch.Tensor, bytes, Batch):
        with pytest.raises(EncodingError):
            typed_decode(head, [], kind)
        with pytest.raises(EncodingError):
            typed_decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, head)), [], kind)
        with pytest.raises(EncodingError):
            typed_decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(7, head)), [], kind)
