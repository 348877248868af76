"""Values as messages that nothing is unpickled from: msgpack by msgspec, checked against types.

This is for services that are called by programs one does not trust with this process: what arrives can only become what
a type allows. Types are those of msgspec: numbers, text, bytes, lists, tuples, dicts, sets, dates, enums, dataclasses,
``TypedDict``, ``NamedTuple`` and ``msgspec.Struct``, unions of them, ``Any`` of the basic ones, and here
``torch.Tensor``, ``torch.dtype``, ``torch.device`` and ``torch.Size`` as well. A tensor arrives contiguous, and shares
its memory with no other.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from phalanx.errors import ArgumentError, EncodingError
from phalanx.rpc.tensors import DTYPE_NAMES, DTYPES, QUANTIZED, contiguous, device_here, elements_of, empty

__all__ = ["Signature", "typed_decode", "typed_encode"]

TENSOR = 1  # the number of tensors among msgpack's extensions

# In the extension: the number of the buffer (-1 for no elements), dtype, shape, device (empty for the CPU), whether
# gradients are wanted.
_Description = tuple[int, str, tuple[int, ...], str, bool]
_description = msgspec.msgpack.Decoder(_Description)
_arguments = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def typed_encode(value: Any) -> tuple[bytes, list[memoryview]]:
    """A value as bytes, and the memory of its tensors beside them.

    Args:
        value: a value of one of the types above. Only the other side checks whether it is of the type expected there.

    Raises:
        EncodingError: there is something in it that this mode does not send.
    """
    buffers: list[memoryview] = []

    def replaced(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return _described(item, buffers)
        if isinstance(item, torch.dtype):
            return DTYPE_NAMES[item]
        if isinstance(item, torch.device):
            return str(item)
        raise EncodingError(
            f"a {type(item).__module__}.{type(item).__qualname__} cannot be sent without pickle. Make it a dataclass "
            f"or a msgspec.Struct, or send its parts"
        )

    try:
        return msgspec.msgpack.Encoder(enc_hook=replaced).encode(value), buffers
    except EncodingError:
        raise
    except Exception as error:
        raise EncodingError(f"a value cannot be sent without pickle: {error}") from error


def typed_decode(head: bytes | memoryview, buffers: Sequence[memoryview], kind: Any) -> Any:
    """The value that ``typed_encode`` made a head and buffers of; nothing that arrives here is run.

    Args:
        head, buffers: what has arrived; see ``encoding.decode``.
        kind: the type that it must be of.

    Raises:
        EncodingError: it is of another type; the text says where and which.
        ArgumentError: ``kind`` is not a type that can be checked.
    """
    try:
        decoder = _cached_decoder(kind)
    except TypeError:  # a type that cannot be hashed
        decoder = _decoder(kind)
    return _decoded(decoder, head, buffers, "a value that has arrived")


class Signature:
    """The parameters of a function as types, by which calls are sent and checked.

    Attributes:
        function: the function.
        result: the type that it returns, for ``typed_decode``; ``Any`` if it does not say.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the annotations of a function.

        Raises:
            ArgumentError: a parameter has no annotation, or one that cannot be checked.
        """
        self.function = function
        self._name = getattr(function, "__qualname__", repr(function))
        self._signature = inspect.signature(function)
        hinted = function if inspect.isroutine(function) else type(function).__call__
        try:
            hints = typing.get_type_hints(hinted, include_extras=True)
        except NameError as error:
            raise ArgumentError(f"an annotation of {self._name} names what is not there: {error}") from error
        self.result: Any = hints.get("return", Any)
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}
        for name, parameter in self._signature.parameters.items():
            if name not in hints:
                raise ArgumentError(
                    f"parameter {name} of {self._name} has no annotation, and without one nothing can be checked. "
                    f"Annotate it (typing.Any allows numbers, text, lists, dicts and tensors)"
                )
            kind: Any = hints[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                kind = tuple[kind, ...]
            elif parameter.kind is parameter.VAR_KEYWORD:
                kind = dict[str, kind]
            self._decoders[name] = _decoder(kind, f"parameter {name} of {self._name}")

    def encode(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> tuple[bytes, list[memoryview]]:
        """A call as a message.

        Args:
            arguments, options: the positional and the named arguments.

        Raises:
            ArgumentError: the function cannot be called so.
            EncodingError: an argument cannot be sent; the text names the parameter.
        """
        try:
            bound = self._signature.bind(*arguments, **options).arguments
        except TypeError as error:
            raise ArgumentError(f"{self._name} cannot be called so: {error}") from None
        try:
            return typed_encode(bound)
        except EncodingError:
            for name, value in bound.items():
                try:
                    typed_encode(value)
                except EncodingError as error:
                    raise EncodingError(f"parameter {name} of {self._name}: {error}") from error
            raise

    def decode(self, head: bytes | memoryview, buffers: Sequence[memoryview]) -> inspect.BoundArguments:
        """The arguments of a call that has arrived, each of the type that its parameter is annotated with.

        Returns:
            The arguments, with defaults for those that were not sent: ``function(*bound.args, **bound.kwargs)``.

        Raises:
            EncodingError: an argument is of another type, missing, or unknown; the text names the parameter.
        """
        try:
            sent = _arguments.decode(head)
        except Exception as error:
            raise EncodingError(f"a call of {self._name} has arrived damaged: {error}") from error
        unknown = sent.keys() - self._decoders.keys()
        if unknown:
            raise EncodingError(f"{self._name} has no parameter {', '.join(sorted(unknown))}")
        arguments: dict[str, Any] = {}
        for name, parameter in self._signature.parameters.items():
            content = sent.get(name)
            if content is not None:
                what = f"parameter {name} of {self._name}"
                arguments[name] = _decoded(self._decoders[name], content, buffers, what)
            elif parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                raise EncodingError(f"parameter {name} of {self._name} was not sent, and it has no default")
        bound = inspect.BoundArguments(self._signature, arguments)
        bound.apply_defaults()
        return bound


class _Arriving(threading.local):
    buffers: Sequence[memoryview] = ()


_arriving = _Arriving()  # the memory beside the message that this thread decodes


def _decoded(
    decoder: msgspec.msgpack.Decoder[Any], head: bytes | memoryview, buffers: Sequence[memoryview], what: str
) -> Any:
    before, _arriving.buffers = _arriving.buffers, buffers
    try:
        return decoder.decode(head)
    except Exception as error:
        raise EncodingError(f"{what}: {error}") from error
    finally:
        _arriving.buffers = before


def _described(tensor: torch.Tensor, buffers: list[memoryview]) -> msgspec.msgpack.Ext:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise EncodingError(
            f"a {type(tensor).__qualname__} cannot be sent without pickle: send the tensors it is made of"
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.dtype in QUANTIZED:
        raise EncodingError(
            f"only dense tensors are sent without pickle, and this one is a {tensor.layout} of {tensor.dtype} on "
            f"{tensor.device}: send its parts (indices() and values(), unbind(), int_repr())"
        )
    index = len(buffers) if tensor.numel() else -1
    if index >= 0:
        buffers.append(elements_of(tensor))
    device = "" if tensor.is_cpu else str(tensor.device)
    description = index, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), device, tensor.requires_grad
    return msgspec.msgpack.Ext(TENSOR, msgspec.msgpack.encode(description))


def _extension(code: int, data: memoryview) -> torch.Tensor:
    if code != TENSOR:
        raise EncodingError.damaged(f"an extension of msgpack with the number {code}")
    index, dtype, shape, device, wants_gradient = _description.decode(data)
    if index == -1:
        order = tuple(math.prod(max(count, 1) for count in shape[at + 1 :]) for at in range(len(shape)))
        tensor = empty(dtype, shape, order, False)
    elif not 0 <= index < len(_arriving.buffers):
        raise EncodingError.damaged(f"a tensor in buffer {index} of {len(_arriving.buffers)}")
    else:
        tensor = contiguous(_arriving.buffers[index], dtype, *shape)
    if device:
        tensor = tensor.to(device_here(device))
    return tensor.requires_grad_() if wants_gradient else tensor


def _converted(kind: Any, value: Any) -> Any:
    """What msgspec has decoded, as one of the types that only this file knows."""
    if kind is torch.Tensor and isinstance(value, torch.Tensor):
        return value
    if kind is torch.dtype and isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    if kind is torch.device and isinstance(value, str):
        return torch.device(value)
    if kind is torch.Size and isinstance(value, list) and all(type(count) is int for count in value):
        return torch.Size(value)
    raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


_OWN = frozenset({torch.Tensor, torch.dtype, torch.device, torch.Size})


def _decoder(kind: Any, what: str = "a value") -> msgspec.msgpack.Decoder[Any]:
    try:
        strangers = [found for found in _custom(msgspec.inspect.type_info(kind)) if found not in _OWN]
        if not strangers:
            return msgspec.msgpack.Decoder(kind, dec_hook=_converted, ext_hook=_extension)
    except TypeError as error:
        raise ArgumentError(f"{what} is annotated as {kind}, which cannot be checked: {error}") from error
    names = ", ".join(getattr(found, "__qualname__", str(found)) for found in strangers)
    raise ArgumentError(
        f"{what} is annotated as {kind}, and {names} cannot be made without pickle. Make it a dataclass or a "
        f"msgspec.Struct"
    )


_cached_decoder = functools.lru_cache(maxsize=1024)(_decoder)


def _custom(info: Any) -> Iterator[Any]:
    """The types within a type that msgspec leaves to its caller."""
    seen: set[int] = set()
    waiting = [info]
    while waiting:
        info = waiting.pop()
        if id(info) in seen:
            continue
        seen.add(id(info))
        if isinstance(info, msgspec.inspect.CustomType):
            yield info.cls
        for name in info.__struct_fields__:
            part = getattr(info, name)
            parts = part if isinstance(part, tuple) else (part,)
            waiting += [one for one in parts if isinstance(one, (msgspec.inspect.Type, msgspec.inspect.Field))]
