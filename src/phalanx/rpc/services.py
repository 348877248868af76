"""Typed services: what a worker offers for calls in which nothing is ever unpickled, and how others call it.

The methods' annotations are the contract. The callee reads each argument as the type of its parameter, the caller reads
the answer as the type that the method returns, and whatever is of another type is refused.

Values travel as msgpack, by msgspec. Types are those of msgspec: numbers, text, bytes, lists, tuples, dicts, sets,
dates, enums, dataclasses, ``TypedDict``, ``NamedTuple`` and ``msgspec.Struct``, unions of them, ``Any`` of the basic
ones, and here ``torch.Tensor``, ``torch.dtype``, ``torch.device`` and ``torch.Size`` as well. A tensor arrives
contiguous, and shares its memory with no other.
"""

from __future__ import annotations

import functools
import inspect
import math
import struct
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import torch

from phalanx.errors import ArgumentError, EncodingError
from phalanx.rpc import session, verbs
from phalanx.rpc.codec import Codec
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member
from phalanx.rpc.tensors import DTYPE_NAMES, DTYPES, QUANTIZED, contiguous, device_here, elements_of, empty
from phalanx.rpc.worker import Incoming, Worker
from phalanx.wrong_arguments import require

__all__ = ["Signature", "serve", "service", "typed_decode", "typed_encode"]

T = TypeVar("T")

_PREFIX = "typed:"
_LENGTH = struct.Struct("!H")


class _Asked(NamedTuple):
    """A call as its callee has read it."""

    method: Callable[..., Any]
    bound: inspect.BoundArguments


# What is offered by the next worker, or by the present one.
_offered: dict[str, Codec] = {}


def serve(name: str, thing: Any, methods: Iterable[str]) -> None:
    """Let other workers call methods of an object, without unpickling anything.

    They call it with :func:`service`. Call this before ``rpc.init()``, so that nobody can ask too early, or after it.
    The service ends with ``rpc.shutdown()``.

    Args:
        name: the service's name on this worker.
        thing: the object, or a module.
        methods: the names of the methods that may be called. Each parameter has an annotation; ``async`` methods are
            awaited. They run on the worker's threads, several at the same time.

    Raises:
        ArgumentError: there is no such method, a parameter has no annotation or one that cannot be checked, a method is
            a generator, or the name is taken.
    """
    require(serve, name, thing, methods)
    if name in _offered:
        raise ArgumentError(f"this worker has a service {name!r} already; give each its own name")
    named = [methods] if isinstance(methods, str) else list(methods)
    signatures: dict[str, Signature] = {}
    for method in named:
        function = getattr(thing, method, None)
        if not callable(function):
            raise ArgumentError(f"{thing!r} has no method {method!r}, so it cannot be served")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ArgumentError(
                f"{method} is a generator, and typed services have none: return a list, or a part of it"
            )
        signatures[method] = Signature(function)
    codec = Codec(typed_encode, partial(_decode_call, name, signatures), unpickles=False)
    _offered[name] = codec
    worker = session.current()
    if worker is not None:
        worker.serve(_PREFIX + name, _on_call, codec=codec)


def service(to: str | int | Member, name: str, interface: type[T], *, timeout_s: float | None = None) -> T:
    """Make a client of another worker's typed service. Its methods are calls; nothing that comes back is unpickled.

    ``rpc.start(client, "method", ...)`` begins a call and returns a future, and
    ``rpc.call(client, "method", ..., timeout_s=5)`` gives one call its own timeout.

    Args:
        to: the worker's name, rank, or ``Member``; a name or a rank is looked up for each call.
        name: the name that the worker gave to ``rpc.serve``.
        interface: a class or a ``Protocol`` whose methods are annotated as the service's are.
        timeout_s: how long a call may take, in seconds; ``rpc.init(timeout_s=...)`` by default.

    Returns:
        An object with the public methods of ``interface``. They raise what ``rpc.call`` raises, and an exception of
        the method as :class:`RemoteError`, because its own type would have to be unpickled.
    """
    require(service, to, name, interface, timeout_s=timeout_s)  # they are used only when it is called
    return cast(T, _Client(to, name, interface, timeout_s))


class _Client:
    def __init__(self, to: str | int | Member, name: str, interface: type, timeout_s: float | None) -> None:
        self._to, self._name, self._interface, self._timeout_s = to, name, interface, timeout_s
        self._methods: dict[str, tuple[Signature, Codec]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        self._codec_of(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._start_call(name, args, kwargs, None).wait()

        call.__name__ = name
        call.__qualname__ = f"{self._interface.__qualname__}.{name}"
        return call

    def __repr__(self) -> str:
        return f"<service {self._name} of {self._to}>"

    def _codec_of(self, method: str) -> tuple[Signature, Codec]:
        found = self._methods.get(method)
        if found is None:
            function = _method_of(self._interface, method)
            signature = Signature(function)
            prefix = method.encode()
            prefix = _LENGTH.pack(len(prefix)) + prefix

            def encode(arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> tuple[bytes, list[memoryview]]:
                head, buffers = signature.encode(*arguments)
                return prefix + head, buffers

            def decode(head: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
                return typed_decode(head, buffers, signature.result)

            found = self._methods[method] = signature, Codec(encode, decode, unpickles=False)
        return found

    def _start_call(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None
    ) -> Future[Any]:
        if not isinstance(function, str):
            raise ArgumentError(f"{self!r} has methods, and a function cannot be sent to it: give a method's name")
        _, codec = self._codec_of(function)
        allowed = self._timeout_s if timeout_s is None else timeout_s
        asked = f"{self._name}.{function}"
        return session.worker().request(
            self._to, _PREFIX + self._name, (args, kwargs), allowed, asked=asked, codec=codec
        )


def _method_of(interface: type, name: str) -> Callable[..., Any]:
    """Return a method as it is called, without its first parameter."""
    static = inspect.getattr_static(interface, name, None)
    function = getattr(interface, name, None)
    if static is None or not callable(function):
        raise AttributeError(f"{interface.__qualname__} has no method {name!r}")
    if isinstance(static, types.FunctionType):
        return types.MethodType(static, interface)
    return cast(Callable[..., Any], function)


def _decode_call(
    name: str, signatures: Mapping[str, Signature], head: bytes | memoryview, buffers: Sequence[memoryview]
) -> _Asked:
    if len(head) < _LENGTH.size:
        raise EncodingError.damaged("a call without a method")
    start = _LENGTH.size + _LENGTH.unpack_from(head)[0]
    method = bytes(head[_LENGTH.size : start]).decode(errors="replace")
    signature = signatures.get(method)
    if signature is None:
        raise ArgumentError(f"the service {name} has no method {method!r}; it has: {', '.join(signatures)}")
    return _Asked(signature.function, signature.decode(memoryview(head)[start:], buffers))


def _on_call(incoming: Incoming, asked: _Asked) -> Any:
    return verbs.perform(incoming, asked.method, asked.bound.args, asked.bound.kwargs)


def _equip(worker: Worker) -> None:
    for name, codec in list(_offered.items()):
        worker.serve(_PREFIX + name, _on_call, codec=codec)


session.on_init(_equip)
session.on_shutdown(_offered.clear)


# -- values and calls without pickle ---------------------------------------------------------------

TENSOR = 1  # the number of tensors among msgpack's extensions

# In the extension: the number of the buffer (-1 for no elements), dtype, shape, device (empty for the CPU), whether
# gradients are wanted.
_Description = tuple[int, str, tuple[int, ...], str, bool]
_description = msgspec.msgpack.Decoder(_Description)
_arguments = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def typed_encode(value: Any) -> tuple[bytes, list[memoryview]]:
    """Encode a value as bytes, and the memory of its tensors beside them.

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
    """Decode what ``typed_encode`` has made; nothing that arrives here is run.

    Args:
        head, buffers: what has arrived; see ``codec.decode``.
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
        """Encode a call.

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
        """Decode the arguments of a call, each of the type that its parameter is annotated with.

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
    """Convert what msgspec has decoded to one of the types that only this file knows."""
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
    """Find the types within a type that msgspec leaves to its caller."""
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
