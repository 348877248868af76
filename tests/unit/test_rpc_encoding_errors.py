"""What cannot be sent over RPC, and what is sent by code: errors name the part, and damaged tensors are refused."""

from __future__ import annotations

import functools
import pickle
import random
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.encoded import carried

from phalanx.errors import EncodingError
from phalanx.rpc import rebuilding
from phalanx.rpc.encoding import encode

CALL = ("function", "args", "kwargs")


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def generator() -> Iterator[int]:
    yield 1


# Code.


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


def test_a_function_of_the_script_is_sent_by_its_name_and_closures_by_their_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = types.ModuleType("__main__")
    text = """
        def twice(x):
            return 2 * x

        class Kept:
            pass

        closure = lambda x: (twice, Kept, twice(x))
    """
    exec(textwrap.dedent(text), script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    closure = carried(script.closure)
    assert closure is not script.closure
    assert closure(4) == (script.twice, script.Kept, 8)
    assert carried(script.twice) is script.twice
    assert len(encode(script.twice)[0]) < 100


def test_without_cloudpickle_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(EncodingError, match=r"args\[1\].*lambda.*pip install cloudpickle"):
        encode((generator, (1, lambda: 2), {}), names=CALL)
    assert carried((generator, 1)) == (generator, 1)


# Errors.


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


def test_the_parts_of_a_named_tuple_are_called_by_their_names() -> None:
    with pytest.raises(EncodingError, match=r"^args\[1\] cannot be sent"):
        encode(Asked(print, (1, threading.Lock())))
    with pytest.raises(EncodingError, match=r"^value cannot be sent"):
        encode(threading.Lock())


def test_a_variable_of_a_closure_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(EncodingError, match=r"the variable lock of value\[1\] cannot be sent"):
        encode([1, lambda: lock])


def test_a_value_that_contains_itself() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    got = carried(ring)
    assert got[1] is got
    ring.append(threading.Lock())
    with pytest.raises(EncodingError, match=r"value\[2\] cannot be sent"):
        encode(ring)


# Damaged descriptions of tensors.


class Described:
    """Pickles as a call of one of the functions that rebuild tensors, with arguments of our choice."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


BYTES = bytearray(range(96))


def storage(nbytes: int = 96) -> Described:
    return Described(rebuilding.memory, (pickle.PickleBuffer(BYTES[:nbytes]), ""))


def bytes_of(nbytes: int = 96) -> Described:
    return Described(rebuilding.contiguous, (pickle.PickleBuffer(BYTES[:nbytes]), "uint8", nbytes))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (rebuilding.contiguous, (pickle.PickleBuffer(BYTES), "float32", 25)),
        (rebuilding.contiguous, (pickle.PickleBuffer(BYTES), "float32", -4, -6)),
        (rebuilding.contiguous, (pickle.PickleBuffer(BYTES), "float99", 24)),
        (rebuilding.contiguous, (bytes(BYTES), "float32", 24)),
        (rebuilding.strided, (storage(), "float32", 1, (4, 6), (6, 1), 0)),
        (rebuilding.strided, (storage(), "float32", -1, (4,), (1,), 0)),
        (rebuilding.strided, (storage(), "float32", 5, (4,), (-1,), 0)),
        (rebuilding.strided, (storage(), "float32", 0, (2**62, 4), (2**62, 1), 0)),
        (rebuilding.strided, (storage(), "float32", 0, (4,), (1, 1), 0)),
        (rebuilding.strided, (storage(), "float32", 2**62, (1,), (1,), 0)),
        (rebuilding.strided, (storage(), "float32", 0, (24,), (1,), rebuilding.CONJUGATE)),
        (rebuilding.empty, ("float32", (3,), (1,), "", 0)),
        (rebuilding.empty, ("float32", (0, 2**70), (1, 1), "", 0)),
        (rebuilding.quantized, (bytes_of(), "qint8", (97,), (1,), 0.5, 0, None)),
        (rebuilding.quantized, (bytes_of(), "float64", (24,), (1,), 0.5, 0, None)),
        (rebuilding.quantized, (bytes_of(), "qint8", (4, 6), (6, 1), bytes_of(4), bytes_of(4), 2)),
        (
            rebuilding.sparse_coo,
            (Described(torch.tensor, ([[0, 7]],)), Described(torch.tensor, ([1, 2],)), (4,), False, 0),
        ),
        (
            rebuilding.sparse_compressed,
            ("sparse_csr", *(Described(torch.tensor, (part,)) for part in ([0, 9], [1, 2], [1, 2])), (1, 4), 0),
        ),
        (rebuilding.sparse_compressed, ("strided", storage(), storage(), storage(), (1, 4), 0)),
    ],
)
def test_a_tensor_that_would_reach_outside_of_its_memory_is_refused(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(EncodingError):
        carried(Described(function, arguments))


def test_mutated_descriptions_are_refused_or_stay_within_their_memory() -> None:
    draw = random.Random(13)
    odd = [0, 1, 2, 3, 5, 7, 23, 25, 48, 97, -1, -7, 2**31, 2**62, 2**64, None, True, 1.5, "x", (), (1,), b"", "cuda:0"]

    def mutated(value: Any) -> Any:
        if isinstance(value, tuple):
            parts = [mutated(part) for part in value]
            if draw.random() < 0.1 and parts:
                del parts[draw.randrange(len(parts))]
            return tuple(parts)
        if draw.random() < 0.75:
            return value
        if isinstance(value, Described):
            return draw.choice([storage, bytes_of])(draw.randrange(97))
        return draw.choice([*rebuilding.DTYPES, *odd]) if isinstance(value, str) else draw.choice(odd)

    built = 0
    for _ in range(6000):
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (rebuilding.contiguous, (pickle.PickleBuffer(BYTES), "float32", 4, 6)),
            (rebuilding.strided, (storage(), "int16", 2, (4, 6), (6, 1), 0)),
            (rebuilding.empty, ("float32", (3, 0), (1, 1), "", 0)),
            (rebuilding.quantized, (bytes_of(), "qint8", (4, 6), (6, 1), 0.5, 1, None)),
        ]
        function, arguments = draw.choice(calls)
        try:
            got = carried(Described(function, mutated(arguments)))
        except EncodingError:
            continue
        built += 1
        if got.numel() and got.dtype not in rebuilding.PACKED:
            assert min(got.stride(), default=0) >= 0
            last = got.storage_offset() + sum((n - 1) * s for n, s in zip(got.shape, got.stride(), strict=True))
            assert (last + 1) * got.itemsize <= got.untyped_storage().nbytes() <= max(96, got.nbytes)
    assert built > 500
