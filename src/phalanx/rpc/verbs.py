"""Calling functions on other workers: ``rpc.call``, ``rpc.start``, ``rpc.each``."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import operator
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Protocol, TypeVar, runtime_checkable

from phalanx.errors import ArgumentError, WorkerLost
from phalanx.rpc import session, streams
from phalanx.rpc.autograd import requests
from phalanx.rpc.autograd.contexts import contexts
from phalanx.rpc.codec import keep, pickled_parts, sending
from phalanx.rpc.failure import RemoteTraceback
from phalanx.rpc.future import Future
from phalanx.rpc.links.contract import SentToMany
from phalanx.rpc.members import Member
from phalanx.rpc.worker import Incoming, Worker
from phalanx.system import threads

__all__ = ["ASKED", "CALL", "Asked", "call", "each", "name_of", "perform", "refuse_timeout", "start"]

T = TypeVar("T")

CALL = "call"
_PAUSE_S = 0.1
_LOOP_END_S = 2.0


@runtime_checkable
class Callee(Protocol):
    """Something that can be called in the place of a worker: a remote object (``objects.py``)."""

    def _start_call(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None
    ) -> Future[Any]: ...


# A call as it travels: a plain tuple, because a class of its own would take longer to pickle than all the rest.
Asked = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
ASKED = pickled_parts("function", "args", "kwargs")


def call(
    to: str | int | Member | Callee,
    function: Callable[..., T] | str,
    *args: Any,
    timeout_s: float | None = None,
    retry: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a function on another worker, and wait for what it returns.

    Args:
        to: the worker's name, rank, or ``Member``; this process itself is allowed. Or a remote object: then
            ``function`` is the name of a method, or a function that gets the object as its first argument.
        function: a function that both processes can import, or any that cloudpickle can send. If it is ``async``, it is
            awaited there. If it is a generator, the caller gets an iterator of its items, and holds it back by its
            pace.
        args, kwargs: its arguments. Tensors are not pickled; the function gets copies. Inside of ``rpc.context()``
            gradients flow back through them, and through what the function returns.
        timeout_s: how long it may take, in seconds; ``rpc.init(timeout_s=...)`` by default, infinity for no limit.
        retry: whether the call may run twice: if the worker is lost, it is called again as soon as a worker has come
            back under its name. Without it the function runs at most once.

    Returns:
        What the function returned.

    Raises:
        Exception: what the function raised, with the remote traceback as its cause.
        WorkerLost: the worker is gone; the function may have run, or not.
        CallTimeout: no answer came in time.
        EncodingError: an argument cannot be sent.
    """
    if not retry:
        return start(to, function, *args, timeout_s=timeout_s, **kwargs).wait()
    allowed = session.worker().timeout_s if timeout_s is None else timeout_s
    until = time.monotonic() + allowed
    while True:
        try:
            return start(to, function, *args, timeout_s=until - time.monotonic(), **kwargs).wait()
        except WorkerLost as error:
            # What the function itself raised, or an object that went with its worker, is lost for good.
            is_own = not isinstance(error.__cause__, RemoteTraceback) and isinstance(to, (str, int, Member))
            if not is_own or time.monotonic() + _PAUSE_S >= until:
                raise
            time.sleep(_PAUSE_S)


def start(
    to: str | int | Member | Callee,
    function: Callable[..., Any] | str,
    *args: Any,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> Future[Any]:
    """Begin a call, and return at once with a future of what it returns. See :func:`call`.

    The arguments may be changed when this returns. The errors of the call are raised by ``future.wait()``.
    """
    if not isinstance(to, (str, int, Member)):
        return to._start_call(function, args, kwargs, timeout_s)
    return requests.request(
        session.worker(),
        to,
        CALL,
        (function, args, kwargs),
        timeout_s,
        asked=name_of(function),
        made=streams.received if timeout_s is None else partial(streams.received, timeout_s=timeout_s),
        codec=ASKED,
    )


def each(
    group: Iterable[str | int | Member] | None,
    function: Callable[..., T],
    *args: Any,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> list[Future[T]]:
    """Begin the same call on several workers; the arguments are encoded once, or in a context once for each.

    Args:
        group: the workers; all others if None.
        function, args, kwargs, timeout_s: see :func:`call`.

    Returns:
        A future for each worker, in their order.
    """
    worker = session.worker()
    if group is None:
        group = [member for member in worker.directory.all() if member != worker.me]
    if contexts.current() is not None:  # each worker's part of the graph has edges of its own
        return [start(to, function, *args, timeout_s=timeout_s, **kwargs) for to in group]
    (head, buffers), kept = sending(ASKED.encode, (function, args, kwargs))
    name, made = name_of(function), partial(streams.received, timeout_s=timeout_s)
    with contextlib.closing(SentToMany(buffers)) as shared:

        def encoded(_: None) -> tuple[bytes, list[memoryview]]:
            for thing, taken in kept:
                keep(thing, taken)
            return head, shared

        codec = replace(ASKED, encode=encoded)
        return [worker.request(to, CALL, None, timeout_s, asked=name, made=made, codec=codec) for to in group]


def perform(incoming: Incoming, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function for another worker; return its value, a future of it, or the stream of its items."""
    refuse_timeout(function, kwargs)
    result = function(*args, **kwargs)
    if isinstance(result, CoroutineType):
        return _await(result)
    if isinstance(result, (GeneratorType, AsyncGeneratorType)):
        return streams.offer(incoming.peer, result, event_loop)
    return result


def refuse_timeout(function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raise an ArgumentError if a limit that is meant for the call has come to the function, which takes none."""
    for name in {"timeout", "timeout_s"} & kwargs.keys():
        try:
            taken = inspect.signature(function).parameters
        except ValueError:  # a function in C may not say what it takes
            continue
        if name not in taken and all(each.kind is not each.VAR_KEYWORD for each in taken.values()):
            raise ArgumentError(f"{name_of(function)} takes no {name}; a call's limit is rpc.call(..., timeout_s=5)")


def name_of(function: object) -> str:
    """Return a function's name for people; it must be one."""
    if not callable(function):
        raise ArgumentError(f"{function!r} is not a function; names are those of methods, of remote objects")
    return getattr(function, "__qualname__", None) or type(function).__qualname__


_loops: dict[Worker, tuple[asyncio.AbstractEventLoop, threading.Thread]] = {}
_loop_lock = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop on which this worker awaits what others ask for; it has a thread of its own."""
    worker = session.worker()
    with _loop_lock:
        if worker not in _loops:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="phalanx-rpc-asyncio", daemon=True)
            try:
                threads.start(thread)
            except BaseException:
                loop.close()
                raise
            _loops[worker] = loop, thread
            worker.on_close(lambda: _end_event_loop(worker))
        return _loops[worker][0]


def _end_event_loop(worker: Worker) -> None:
    with _loop_lock:
        loop, thread = _loops.pop(worker)
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(_LOOP_END_S)
    if not thread.is_alive():  # else something on it does not return, and its thread ends with the process
        loop.close()


def _await(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    future: Future[T] = Future()

    async def run() -> None:
        try:
            future.set_result(await coroutine)
        except BaseException as error:
            future.set_exception(error)

    asyncio.run_coroutine_threadsafe(run(), event_loop())
    return future


def _on_call(incoming: Incoming, asked: Asked) -> Any:
    return perform(incoming, *asked)


def _equip(worker: Worker) -> None:
    requests.serve(worker, CALL, _on_call, operator.itemgetter(0))


session.on_init(_equip)
