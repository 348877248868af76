"""The memory of a one-sided transport: what is registered, views of it, and its description for the peer.

A description holds the address of a *guard* beside that of the memory: eight bytes in the owner's process that hold a
random number as long as the memory is registered, and zero afterwards. The owner alone writes it, under Python's lock;
peers read it before each transfer, by the system call that also moves the data. A guard is never freed, only used again
with another number, so a late peer finds neither its number nor somebody else's bytes. If the owner dies, the system
call fails.
"""

from __future__ import annotations

import ctypes
import json
import secrets
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from phalanx.errors import ArgumentError, ClosedError

__all__ = ["MutableView", "RegisteredMemory", "Registration", "RemoteMemory", "View", "decoded", "encoded"]

_free_guards: list[ctypes.c_uint64] = []
_LARGEST = 2**64


def encoded(kind: str, fields: dict[str, Any]) -> bytes:
    """A description as bytes: JSON, with its kind and version."""
    return json.dumps({"phalanx": kind, "version": 1, **fields}, separators=(",", ":")).encode()


def decoded(kind: str, fields: dict[str, type], data: bytes) -> dict[str, Any]:
    """The fields of a description that came as bytes, each checked for its type.

    Raises:
        ValueError: the bytes are no description of this kind.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError, TypeError):
        raise ValueError(f"not the description of a {kind} of Phalanx's: it is no JSON") from None
    if not isinstance(found, dict) or found.pop("phalanx", None) != kind or found.pop("version", None) != 1:
        raise ValueError(f"not the description of a {kind} of this version of Phalanx's transport")
    if found.keys() != fields.keys():
        raise ValueError(f"the description of a {kind} has other fields than {', '.join(fields)}")
    for name, wanted in fields.items():
        value = found[name]
        if type(value) is not wanted or (isinstance(value, int) and not 0 <= value < _LARGEST):
            raise ValueError(f"the description of a {kind} has a wrong {name}: {value!r:.80}")
    return found


class Registration:
    """One tensor that peers may read and write, until it is unregistered.

    Args:
        tensor: contiguous, on the CPU, not empty; it is kept alive.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
        self._number = secrets.randbits(63) + 1
        self._guard = _free_guards.pop() if _free_guards else ctypes.c_uint64()
        self._guard.value = self._number
        self.active = True
        self.transfers = 0  # under way from or into it; changed under the transport's lock

    def end(self) -> None:
        """Invalidate all views and descriptions."""
        if self.active:
            self.active = False
            self._guard.value = 0
            _free_guards.append(self._guard)

    def refuse_if_unusable(self) -> None:
        """Raise if the memory is not registered any more, or is not the tensor's any more."""
        if not self.active:
            raise ClosedError("the memory has been unregistered; register the tensor again")
        if (self.tensor.data_ptr(), self.tensor.nbytes) != (self.address, self.nbytes):
            raise ArgumentError("the registered tensor has been resized, or its storage replaced; register it again")

    def described(self, endpoint: str) -> RemoteMemory:
        return RemoteMemory(endpoint, self.address, self.nbytes, ctypes.addressof(self._guard), self._number)


@dataclass(frozen=True)
class RemoteMemory:
    """Registered memory as its owner's peer sees it. It grants access: hand it only to that peer.

    Attributes:
        endpoint: the name of the owner's transport.
        address, nbytes: where the memory is in the owner's process.
        guard, number: the address of its guard, and what stands there while the memory is registered.
    """

    endpoint: str
    address: int
    nbytes: int
    guard: int
    number: int

    def serialize(self) -> bytes:
        return encoded("memory", asdict(self))

    @classmethod
    def deserialize(cls, data: bytes) -> RemoteMemory:
        """The description that ``serialize`` made.

        Raises:
            ValueError: the bytes are something else.
        """
        fields = {"endpoint": str, "address": int, "nbytes": int, "guard": int, "number": int}
        return cls(**decoded("memory", fields, data))


class View:
    """A range of registered memory, to be read from."""

    def __init__(self, memory: RegisteredMemory, offset: int, nbytes: int) -> None:
        self.memory = memory
        self.address, self._nbytes = memory.registration.address + offset, nbytes

    def size(self) -> int:
        """In bytes."""
        return self._nbytes


class MutableView(View):
    """A range of registered memory, to be read from or written into."""

    @property
    def writable(self) -> Literal[True]:
        return True


class RegisteredMemory:
    """A handle of a registration; several handles may share one."""

    def __init__(self, registration: Registration, owner: object, endpoint: str) -> None:
        self.registration, self.owner = registration, owner
        self._endpoint = endpoint

    def to_view(self, offset: int | None = None, length: int | None = None) -> View:
        """Bytes ``offset`` to ``offset + length``; all that follow, or all, where these are left out."""
        return View(self, *self._range(offset, length))

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> MutableView:
        """As ``to_view``, for reads of the peer's memory into it."""
        return MutableView(self, *self._range(offset, length))

    def to_remote_buffer(self, *, timeout: float | None = None) -> RemoteMemory:
        """The description for the peer; it takes no time, so ``timeout`` has no effect."""
        self.registration.refuse_if_unusable()
        return self.registration.described(self._endpoint)

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        self.registration.refuse_if_unusable()
        whole = self.registration.nbytes
        start = 0 if offset is None else offset
        nbytes = whole - start if length is None else length
        if start < 0 or nbytes < 0 or start + nbytes > whole:
            raise ArgumentError(f"bytes {start} to {start + nbytes} are not within the {whole} bytes of the tensor")
        return start, nbytes
