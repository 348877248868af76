"""The values of two runs of a program, made plain on the ranks, and compared by the test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from tests.differential.program import Raised

__all__ = ["difference", "plain"]


@dataclass(frozen=True)
class Values:
    """A tensor as bytes: torch's own pickle has no unsigned integers of 16 bits and more."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> Values:
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        data = bytes(dense.reshape(-1).view(torch.uint8).numpy()) if dense.numel() else b""
        return Values(dense.dtype, tuple(dense.shape), data)

    def tensor(self) -> torch.Tensor:
        empty = torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(self.shape) if self.data else empty

    def __repr__(self) -> str:
        return f"{self.tensor().tolist()} ({str(self.dtype)[6:]})"


def plain(value: Any) -> Any:
    """The value with each tensor strided, on the CPU, without its history, so that any process can read it.

    Raises:
        TypeError: a program may not return a value of that type.
    """
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, Raised, Values)):
        return value
    raise TypeError(f"a program returned {value!r}, a {type(value).__name__}, which cannot be compared")


def _plain_tensor(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, DTensor):
        return {"placements": str(tensor.placements), "shape": list(tensor.shape), "local": plain(tensor.to_local())}
    if isinstance(tensor, AsyncCollectiveTensor):
        return plain(tensor.wait())
    tensor = tensor.detach()
    if tensor.is_meta:
        return {"meta": str(tensor.dtype), "shape": list(tensor.shape)}
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return plain({"indices": tensor.indices(), "values": tensor.values(), "shape": list(tensor.shape)})
    return Values.of(tensor)


def difference(expected: Any, value: Any, tolerance: float, where: str = "the value") -> str:
    """Where the two differ, in words; empty if they are equal.

    An error equals another if whatever catches the expected one catches it, too.
    """
    if isinstance(expected, Raised) and isinstance(value, Raised):
        if expected.classes[0] in value.classes:
            return ""
        return f"{where}: {value.classes[0]} ({value.text}) is not a {expected.classes[0]} ({expected.text})"
    if type(expected) is not type(value):
        return f"{where}: {value!r} in place of {expected!r}"
    if isinstance(expected, Values):
        if expected == value:
            return ""
        try:
            torch.testing.assert_close(
                value.tensor(), expected.tensor(), rtol=tolerance, atol=tolerance, equal_nan=True
            )
        except AssertionError as error:
            return f"{where}: {value} in place of {expected}: {error}"
        return ""
    if isinstance(expected, dict):
        if list(expected) != list(value):
            return f"{where} has the keys {list(value)} in place of {list(expected)}"
        return _first(difference(expected[key], value[key], tolerance, f"{where}[{key!r}]") for key in expected)
    if isinstance(expected, list):
        if len(expected) != len(value):
            return f"{where} has {len(value)} items in place of {len(expected)}: {value} in place of {expected}"
        pairs = enumerate(zip(expected, value, strict=True))
        return _first(difference(one, other, tolerance, f"{where}[{index}]") for index, (one, other) in pairs)
    if isinstance(expected, (float, complex)):
        close = abs(expected - value) <= tolerance * (1 + abs(expected)) or expected == value
        both_nan = expected != expected and value != value
        return "" if close or both_nan else f"{where}: {value!r} in place of {expected!r}"
    return "" if expected == value else f"{where}: {value!r} in place of {expected!r}"


def _first(differences: Any) -> str:
    return next((text for text in differences if text), "")
