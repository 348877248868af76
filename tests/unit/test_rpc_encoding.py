"""Values as RPC messages: what is sent is what arrives, tensors are not copied, and what cannot be sent is named."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import json
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from phalanx.errors import EncodingError
from phalanx.rpc import tensors
from phalanx.rpc.codec import decode, encode

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*prototype.*",
    "ignore:.*beta state.*",
    "ignore:.*deprecated.*",
    "ignore:ComplexHalf.*",
    "ignore:Sparse invariant.*",
)


def carried(value: Any, **options: Any) -> Any:
    """The value after its way: what a link hands on is a copy of the bytes, and its memory is writable."""
    head, buffers = encode(value, **options)
    assert all(buffer.contiguous and buffer.format == "B" and buffer.ndim == 1 for buffer in buffers)
    return decode(bytes(head), [memoryview(bytearray(buffer)) for buffer in buffers])


def assert_same(sent: torch.Tensor, got: torch.Tensor) -> None:
    assert type(got) is type(sent)
    assert (got.dtype, got.shape, got.layout, got.device) == (sent.dtype, sent.shape, sent.layout, sent.device)
    assert got.requires_grad == sent.requires_grad
    if sent.layout is torch.strided:
        assert got.tolist() == sent.tolist()
    else:
        assert got.to_dense().tolist() == sent.to_dense().tolist()


DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def test_every_dtype_arrives_with_its_bytes() -> None:
    for dtype in DTYPES:
        if str(dtype).startswith(("torch.q", "torch.bits")):
            continue
        content = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
        tensor = (content % 2 if dtype is torch.bool else content).view(dtype).view(2, 3)
        for sent in (tensor, tensor.t(), tensor[1], tensor[:, 1]):
            got, same_size = carried(sent), SAME_SIZE[dtype.itemsize]
            assert (got.dtype, got.shape) == (dtype, sent.shape)
            assert repr(got.view(same_size).tolist()) == repr(sent.view(same_size).tolist())


MATRIX = torch.arange(24.0).view(4, 6)
COMPLEX = torch.complex(MATRIX, MATRIX + 1)
PLAIN = {
    "whole": MATRIX,
    "no dimension": torch.tensor(2.5),
    "empty": torch.empty(0),
    "empty with a shape": torch.empty(3, 0, 2),
    "transposed": MATRIX.t(),
    "rows": MATRIX[1:3],
    "a column": MATRIX[:, 2],
    "every second column": MATRIX[:, ::2],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "one element, expanded": torch.tensor(3.0).expand(100, 100),
    "channels last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "overlapping with itself": MATRIX.view(-1).as_strided((5, 3), (1, 1)),
    "conjugate": COMPLEX.conj(),
    "a conjugate's column": COMPLEX.conj()[:, 1],
    "negative": COMPLEX.conj().imag,
    "wants a gradient": MATRIX.clone().requires_grad_()[:, 1].detach().requires_grad_(),
}


def test_plain_tensors_arrive_equal() -> None:
    for name, sent in PLAIN.items():
        got = carried(sent)
        assert_same(sent, got)
        if name in ("transposed", "expanded", "one element, expanded", "channels last", "rows"):
            assert got.stride() == sent.stride()
    got = carried(torch.ones(3, requires_grad=True) * 2)  # without its history
    assert (got.tolist(), got.is_leaf, got.requires_grad) == ([2, 2, 2], True, True)


SPARSE = torch.tensor([[0.0, 2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]])


def test_sparse_tensors_arrive_equal() -> None:
    uncoalesced = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.ones(3), (4,))
    dense = SPARSE.to_sparse(), SPARSE.to_sparse(1), SPARSE.to_sparse_csr(), SPARSE.to_sparse_bsc((2, 2))
    for sent in (*dense, uncoalesced, torch.zeros(3, 4).to_sparse()):
        got = carried(sent)
        assert_same(sent, got)
        if sent.layout is torch.sparse_coo:
            assert got.is_coalesced() == sent.is_coalesced()
        assert carried(sent.requires_grad_()).requires_grad


def test_a_quantized_tensor_arrives_equal() -> None:
    dtype = torch.quint8
    one = torch.quantize_per_tensor(MATRIX, 0.5, 3, dtype)
    many = torch.quantize_per_channel(MATRIX, torch.arange(1.0, 7.0), torch.arange(6), 1, dtype)
    sent = (one, one[1:3], one.t(), many)
    for tensor, got in zip(sent, carried(sent), strict=True):
        assert (got.dtype, got.qscheme(), got.stride()) == (dtype, tensor.qscheme(), tensor.stride())
        assert got.dequantize().tolist() == tensor.dequantize().tolist()
    four_bits = torch.quantize_per_channel(MATRIX, torch.ones(4), torch.zeros(4), 0, torch.quint4x2)
    assert carried(four_bits).dequantize().tolist() == four_bits.dequantize().tolist()


def test_nested_and_jagged_tensors() -> None:
    parts = [torch.arange(3.0), torch.arange(5.0)]
    for layout in (torch.strided, torch.jagged):
        got = carried(torch.nested.nested_tensor(parts, layout=layout))
        assert got.is_nested
        assert [part.tolist() for part in got.unbind()] == [part.tolist() for part in parts]


def test_a_meta_tensor_arrives_without_memory() -> None:
    head, buffers = encode(torch.empty(3, 4, device="meta").t())
    got = decode(head, buffers)
    assert (got.is_meta, got.shape, got.stride(), buffers) == (True, (4, 3), (1, 4), [])


class Marked(torch.Tensor):
    """A subclass that keeps something beside its elements."""

    note: str


def test_subclasses_and_attributes_arrive() -> None:
    marked = MATRIX.clone().as_subclass(Marked)
    marked.note = "mine"
    got = carried(marked)
    assert (type(got), got.note, got.tolist()) == (Marked, "mine", MATRIX.tolist())

    two = carried(TwoTensor(MATRIX, MATRIX + 1))
    assert type(two) is TwoTensor
    assert (two.a.tolist(), two.b.tolist()) == (MATRIX.tolist(), (MATRIX + 1).tolist())

    plain = MATRIX.clone()
    plain.note, plain.partner = "plain", MATRIX  # type: ignore[attr-defined]
    got = carried(plain)
    assert (type(got), got.note, got.partner.tolist()) == (torch.Tensor, "plain", MATRIX.tolist())


def test_parameters_and_modules() -> None:
    parameter = torch.nn.Parameter(MATRIX.clone(), requires_grad=False)
    parameter.tag = "frozen"  # type: ignore[attr-defined]
    got = carried(parameter)
    assert (type(got), got.requires_grad, got.tag) == (torch.nn.Parameter, False, "frozen")
    assert got.tolist() == MATRIX.tolist()

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.LSTM(4, 2))
    model[0].weight = torch.nn.Parameter(torch.eye(4)[:, :3])
    copy = carried(model)
    assert copy.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert copy.state_dict()[name].tolist() == value.tolist()
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in copy.parameters())

    copy, parameters, state = carried((model[0], list(model[0].parameters()), model[0].state_dict()))
    assert parameters[0] is copy.weight
    assert state["weight"].tolist() == model[0].weight.tolist()

    tied = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    tied[1].weight = tied[0].weight
    copy = carried(tied)
    assert copy[0].weight is copy[1].weight


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: torch.Tensor


@dataclasses.dataclass
class Batch:
    images: torch.Tensor
    labels: list[int]


class Refused(Exception):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.code = code


def test_other_things_arrive_equal() -> None:
    for value in (
        None, 1, "text", b"bytes", bytearray(b"more"), {1: (2, [3])}, {4}, 1j, range(3), Color.RED, json.dumps, Batch,
        torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.strided, np.float32(2), np.dtype("f4"),
        collections.OrderedDict(a=1), slice(1, 2),
    ):  # fmt: skip
        got = carried(value)
        assert got == value
        assert type(got) is type(value)
    point = carried(Point(1, torch.ones(2)))
    assert (type(point), point.x, point.y.tolist()) == (Point, 1, [1, 1])
    batch = carried(Batch(torch.ones(2), [1]))
    assert (batch.images.tolist(), batch.labels) == ([1, 1], [1])
    error = carried(Refused("no", 7))
    assert (type(error), error.args, error.code) == (Refused, ("no", 7), 7)
    for array in (np.arange(6).reshape(2, 3), np.arange(6)[::2], np.empty(0), np.asfortranarray(np.eye(3))):
        got = carried(array)
        assert got.tolist() == array.tolist()
        got += 1  # it may be written to
    storage = carried(torch.arange(4.0).untyped_storage())
    assert torch.empty(0).set_(storage).tolist() == [0, 1, 2, 3]


def test_large_bytes_are_sent_from_where_they_are() -> None:
    sizes = (10, 300_000, 5, 256 * 1024, 256 * 1024 - 1)
    value = [(index, bytes([index]) * size, bytearray(b"x") * size) for index, size in enumerate(sizes)]
    head, _ = encode([value, torch.ones(3), np.ones(2)])
    assert len(head) < 2 * 256 * 1024 + 2000
    got, ones, array = carried([value, torch.ones(3), np.ones(2)])
    assert got == value
    assert (ones.tolist(), array.tolist()) == ([1, 1, 1], [1, 1])


def test_what_is_cut_short_or_wrong_is_one_kind_of_error() -> None:
    value = {"a": torch.arange(5.0), "b": bytes(300_000), "c": np.arange(3), "d": Batch(torch.ones(2), [1])}
    head, buffers = encode(value)
    buffers = [memoryview(bytearray(buffer)) for buffer in buffers]
    for end in range(len(head)):
        with pytest.raises(EncodingError):
            decode(head[:end], buffers)
    for wrong in (buffers[1:], buffers[:-1], [*buffers, buffers[0]], buffers[::-1], [], [None] * len(buffers)):
        with pytest.raises(EncodingError):
            decode(head, wrong)  # type: ignore[arg-type]
    with pytest.raises(EncodingError, match="unpickled_nowhere"):
        decode(b"\x80\x05cunpickled_nowhere\nfunction\n.")
    with pytest.raises(EncodingError, match="resize_"):
        gone = torch.ones(10)
        part = gone[5:]
        gone.untyped_storage().resize_(0)
        encode(part)


def test_a_device_that_is_not_here_is_named() -> None:
    class Elsewhere:
        def __reduce__(self) -> Any:
            return tensors.on_device, (torch.ones(1), "cuda:97", False)

    with pytest.raises(EncodingError, match=r"cuda:97.*tensor\.cpu\(\)"):
        carried(Elsewhere())


def test_same_tensor_arrives_once_and_views_apart() -> None:
    base = torch.arange(40.0)
    first, (second,), view = carried((base, [base], base[10:20]))
    assert first is second
    first.fill_(7)
    assert view.tolist() == base[10:20].tolist()


def test_tensors_apart_in_one_storage_cost_only_themselves() -> None:
    base = torch.zeros(1_000_000)
    _, buffers = encode((base[:10], base[500:520], base.view(1000, 1000)[2:900, 7]))
    assert sum(buffer.nbytes for buffer in buffers) == 4 * (10 + 20 + 898)


def test_a_large_tensor_is_sent_and_received_where_it_lies() -> None:
    tensor = torch.zeros(16 * 1024 * 1024)
    for sent in (tensor, tensor[5:], tensor.view(4096, 4096).t(), torch.nn.Parameter(tensor), tensor.bfloat16()):
        _, (buffer,) = encode({"weights": sent})
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        assert 0 <= sent.data_ptr() - address < 16
    head, (buffer,) = encode(tensor)
    arrived = memoryview(bytearray(buffer.nbytes))
    got = decode(head, [arrived])
    assert got.data_ptr() == np.frombuffer(arrived, np.uint8).ctypes.data


def test_buffers_keep_their_tensor_and_received_tensors_their_buffer() -> None:
    class Held(np.ndarray):
        pass

    tensor = torch.arange(1000.0)
    kept = weakref.ref(tensor)
    head, (buffer,) = encode(tensor)
    part = buffer[4:8]
    del tensor, buffer
    assert kept() is not None
    assert bytes(part) == np.float32(1).tobytes()
    memory = Held((4000,), np.uint8)
    memory[:] = 0
    owner = weakref.ref(memory)
    got = decode(head, [memoryview(memory)])
    del memory
    view = got[10:]
    del got
    assert owner() is not None
    assert view[0] == 0
    del view, part
    assert kept() is None
    assert owner() is None


def test_received_memory_that_is_read_only_or_odd_is_copied() -> None:
    head, (buffer,) = encode(torch.arange(5.0))
    got = decode(head, [memoryview(bytes(buffer))])
    got += 1
    assert got.tolist() == [1, 2, 3, 4, 5]
    for sent in (torch.arange(5.0), MATRIX.t()):
        head, (buffer,) = encode(sent)
        got = decode(head, [memoryview(bytearray(b"x" + bytes(buffer)))[1:]])
        assert got.tolist() == sent.tolist()
        assert got.data_ptr() % 4 == 0


# Code, and errors.


CALL = ("function", "args", "kwargs")


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def generator() -> Iterator[int]:
    yield 1


def test_lambdas_closures_and_local_classes_are_sent_by_their_code() -> None:
    factor = torch.tensor(3.0)

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

        def tripled(self) -> torch.Tensor:
            return self.value * factor

    got = carried((lambda x: x + 1, functools.partial(lambda x, y: x * y, 3), Local, Local(2), Holder))
    assert (got[0](1), got[1](4), got[2](5).tripled().item(), got[3].tripled().item()) == (2, 12, 15, 6)
    assert got[4] is Holder
    _, buffers = encode(lambda: factor)
    assert [buffer.nbytes for buffer in buffers] == [4]


SCRIPT = """
def twice(x):
    return 2 * x

class Kept:
    pass

closure = lambda x: (twice, Kept, twice(x))
"""


def test_functions_of_the_script_go_by_name_and_closures_by_code(monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__main__")
    exec(SCRIPT, script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    closure = carried(script.closure)
    assert closure is not script.closure
    assert closure(4) == (script.twice, script.Kept, 8)
    assert carried(script.twice) is script.twice
    assert len(encode(script.twice)[0]) < 100


@pytest.mark.parametrize(
    ("arguments", "options", "path"),
    [
        ((1, Holder(callback=threading.Lock())), {}, "args[1].callback"),
        ((), {"log": {"file": sys.stdout, "level": 3}}, "kwargs['log']['file']"),
        (([1, (2, generator())],), {}, "args[0][1][1]"),
        ((functools.partial(print, generator()),), {}, "args[0].args[0]"),
        ((torch.ones(2), [threading.current_thread()]), {}, "args[1][0]"),
        (({3: Holder(deep=Holder(deeper={"x": threading.Lock()}))},), {}, "args[0][3].deep.deeper['x']"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_names_the_part_its_type_and_what_to_do(
    arguments: tuple[Any, ...], options: dict[str, Any], path: str
) -> None:
    with pytest.raises(EncodingError) as caught:
        encode((generator, arguments, options), names=CALL)
    text = str(caught.value)
    assert text.startswith(f"{path} cannot be sent: it is a "), text
    assert "belongs to this process" in text
    assert caught.value.__cause__ is not None


class Asked(NamedTuple):
    function: Any
    args: tuple[Any, ...]


def test_an_error_names_fields_variables_and_rings() -> None:
    lock = threading.Lock()
    ring: list[Any] = [1]
    ring.append(ring)
    got = carried(ring)
    assert got[1] is got
    ring.append(lock)
    for value, said in (
        (Asked(print, (1, lock)), r"^args\[1\] cannot be sent"),
        (lock, r"^value cannot be sent"),
        ([1, lambda: lock], r"the variable lock of value\[1\] cannot be sent"),
        (ring, r"value\[2\] cannot be sent"),
    ):
        with pytest.raises(EncodingError, match=said):
            encode(value)


# Damaged descriptions of tensors.


class Described:
    """Pickles as a call of one of the functions that rebuild tensors, with arguments of our choice."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


BYTES = bytearray(range(96))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (tensors.contiguous, (pickle.PickleBuffer(BYTES), "float32", 25)),
        (tensors.contiguous, (pickle.PickleBuffer(BYTES), "float32", -4, -6)),
        (tensors.strided, (pickle.PickleBuffer(BYTES), "float32", (4, 6), (7, 1), False)),
        (tensors.strided, (pickle.PickleBuffer(BYTES), "float32", (4,), (-1,), False)),
        (tensors.strided, (pickle.PickleBuffer(BYTES), "float32", (2**62, 4), (2**62, 1), False)),
        (tensors.empty, ("float32", (3,), (1,), False)),
        (
            tensors.sparse_coo,
            (Described(torch.tensor, ([[0, 7]],)), Described(torch.tensor, ([1, 2],)), (4,), False, False),
        ),
        (
            tensors.sparse_compressed,
            ("sparse_csr", *(Described(torch.tensor, (part,)) for part in ([0, 9], [1, 2], [1, 2])), (1, 4), False),
        ),
        (tensors.sparse_compressed, ("strided", *(Described(torch.tensor, ([1],)) for _ in range(3)), (1, 4), False)),
    ],
)
def test_a_tensor_that_would_reach_outside_of_its_memory_is_refused(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(EncodingError):
        carried(Described(function, arguments))
