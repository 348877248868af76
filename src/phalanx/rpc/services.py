"""Typed services: what a worker offers for calls in which nothing is ever unpickled, and how others call it.

The methods' annotations are the contract. The callee reads each argument as the type of its parameter, the caller reads
the answer as the type that the method returns, and whatever is of another type is refused (``typed.py``).
"""

from __future__ import annotations

import inspect
import struct
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from phalanx.errors import ArgumentError, EncodingError
from phalanx.rpc import session, verbs
from phalanx.rpc.agent import Agent, Incoming
from phalanx.rpc.codec import Codec
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member
from phalanx.wrong_arguments import require

if TYPE_CHECKING:
    from phalanx.rpc.typed import Signature

__all__ = ["serve", "service"]

T = TypeVar("T")

_PREFIX = "typed:"
_LENGTH = struct.Struct("!H")


class _Asked(NamedTuple):
    """A call as its callee has read it."""

    method: Callable[..., Any]
    bound: inspect.BoundArguments


# What is offered by the next agent, or by the present one.
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
    from phalanx.rpc.typed import Signature

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
    codec = Codec(_encode_answer, partial(_decode_call, name, signatures), unpickles=False)
    _offered[name] = codec
    agent = session.current()
    if agent is not None:
        agent.serve(_PREFIX + name, _on_call, codec=codec)


def service(to: str | int | Member, name: str, interface: type[T], *, timeout_s: float | None = None) -> T:
    """A client of another worker's typed service. Its methods are calls; nothing that comes back is unpickled.

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
        from phalanx.rpc.typed import Signature, typed_decode

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
        return session.agent().request(
            self._to, _PREFIX + self._name, (args, kwargs), allowed, asked=asked, codec=codec
        )


def _method_of(interface: type, name: str) -> Callable[..., Any]:
    """A method as it is called, without its first parameter."""
    static = inspect.getattr_static(interface, name, None)
    function = getattr(interface, name, None)
    if static is None or not callable(function):
        raise AttributeError(f"{interface.__qualname__} has no method {name!r}")
    if isinstance(static, types.FunctionType):
        return types.MethodType(static, interface)
    return cast(Callable[..., Any], function)


def _encode_answer(value: Any) -> tuple[bytes, list[memoryview]]:
    from phalanx.rpc.typed import typed_encode

    return typed_encode(value)


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


def _equip(agent: Agent) -> None:
    for name, codec in list(_offered.items()):
        agent.serve(_PREFIX + name, _on_call, codec=codec)


session.on_init(_equip)
session.on_shutdown(_offered.clear)
