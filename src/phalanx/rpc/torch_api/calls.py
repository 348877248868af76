"""The caller's side: what torch's ``rpc_sync``, ``rpc_async`` and ``remote`` ask of C++, and their futures.

torch's Python layer encodes the arguments, by its own pickler, before it asks for the call. The references among them
are noted on the way (:func:`note_reference`) and travel beside the payload as remote objects, so that the receiver
holds them before it decodes the payload.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.futures import Future

from phalanx.errors import CallTimeout, PhalanxError
from phalanx.rpc.autograd.requests import unwrap, wrap
from phalanx.rpc.future import Future as OwnFuture
from phalanx.rpc.objects import RemoteObject
from phalanx.rpc.torch_api import profiling
from phalanx.rpc.torch_api.agent import agent
from phalanx.rpc.torch_api.torch_names import internal, stand_in
from phalanx.rpc.worker import Member

__all__ = ["CALL", "FETCH", "Answer", "Call", "RpcTimeout", "call", "fetch", "operator_call", "wait_all"]

CALL, FETCH = "torch.call", "torch.fetch"


class Call(NamedTuple):
    """A call as it travels."""

    payload: bytes  # function and arguments; like ``tensors`` as ``torch.distributed.rpc.internal.serialize`` makes it
    tensors: list[torch.Tensor]
    references: Sequence[RemoteObject]  # those in the payload
    autograd: Any  # what distributed autograd sends
    into: RemoteObject | None  # for ``remote``, the value to make
    profile: dict[str, bool] | None  # what to record, if the caller has a profiler on


class Answer(NamedTuple):
    """An answer as it travels; ``payload`` is empty where nothing is sent back."""

    payload: bytes = b""
    tensors: Sequence[torch.Tensor] = ()
    references: Sequence[RemoteObject] = ()
    autograd: Any = None
    events: Sequence[Any] = ()


class _Noted(threading.local):
    references: Sequence[RemoteObject] = ()


_noted = _Noted()


def note_reference(reference: RemoteObject) -> None:
    """The payload that this thread makes has a reference."""
    _noted.references = [*_noted.references, reference]


def noted_references() -> Sequence[RemoteObject]:
    """The references in the payload that this thread has made."""
    references, _noted.references = _noted.references, ()
    return references


def seconds(timeout: float) -> float:
    """Torch's timeout in ours: 0 stands for no limit, and a negative one for the default."""
    timeout = agent().timeout_s if timeout < 0 else timeout
    return timeout or math.inf


def call(
    to: Any,
    payload: bytes,
    tensors: list[torch.Tensor],
    timeout: float,
    *,
    asked: str = "a function",
    into: RemoteObject | None = None,
) -> Future[Any]:
    """Make a call to a worker, of which ``torch.distributed.rpc`` has encoded the arguments on this thread."""
    own = agent()
    member = own.member(to)
    references = noted_references()
    profile, sent_at = profiling.sending(), time.monotonic()
    sent, autograd = wrap(member, tensors)
    flags = profile[0].flags if profile is not None else None
    request = (payload, sent, references, autograd, into, flags)
    started = own.phalanx.request(member, CALL, request, seconds(timeout), asked=asked)
    own.count(started)

    def finish(answer: tuple[Any, ...]) -> Any:
        found = Answer(*answer)
        if profile is not None:
            profile[0].add(profile[1], sent_at, list(found.events))
        return _value_of(member, found)

    future: Future[Any] = CallFuture(started, finish, own.phalanx.run)
    if profile is None:
        return future
    return future.then(lambda done: done.wait())  # torch's profiler loses an error that was set from Python


def fetch(owner: Member, name: tuple[Any, ...], timeout: float) -> Any:
    """Return the value of a name on its owner, once it has been made. The caller has a reference to it."""
    own = agent()
    _, autograd = wrap(owner, [])
    started = own.phalanx.request(owner, FETCH, (name, autograd), seconds(timeout), asked="to_here()")
    own.count(started)
    try:
        return _value_of(owner, Answer(*started.wait()))
    except CallTimeout as error:
        raise RpcTimeout.of(error) from None


def _value_of(member: Member, answer: Answer) -> Any:
    """Return what a call returned, or raise what the function raised."""
    if not answer.payload:
        return None
    tensors = unwrap(member, answer.tensors, answer.autograd)
    with pickle_errors():
        value = internal.deserialize(answer.payload, tensors)
    if isinstance(value, AttributeError) and "RPC pickler does not serialize" in str(value):
        raise value
    if isinstance(value, internal.RemoteException):
        _raise_here(value)
    return value


@contextlib.contextmanager
def pickle_errors() -> Iterator[None]:
    """Raise what pickling raises as torch's C++ does: as a RuntimeError that begins with the name of its type."""
    try:
        yield
    except Exception as error:
        raise PhalanxError(f"{type(error).__name__}: {error}") from error


def _raise_here(remote: Any) -> None:
    """Raise what a Python function raised on its worker, so that both its own type and RuntimeError catch it.

    torch makes a RuntimeError of all but ValueError and TypeError, and programs rely on either.
    """
    try:
        internal._handle_exception(remote)
    except (RuntimeError, ValueError, TypeError):
        raise
    except Exception as error:
        own_type = type(error)
        with contextlib.suppress(TypeError):  # some types cannot be combined
            both = type(own_type.__name__, (own_type, RuntimeError), {"__module__": own_type.__module__})
            raise both(*error.args) from None
        raise


class RpcTimeout(CallTimeout):
    """A call took longer than it may; the text begins as torch's does, because programs look for it."""

    @classmethod
    def of(cls, error: CallTimeout) -> RpcTimeout:
        """The error with torch's words before it."""
        limit = f"RPC ran for more than set timeout ({error.timeout_s * 1000:g} ms)"
        text = f"{limit} and will now be marked with an error: {error}"
        return cls(text, worker=error.worker, asked=error.asked, timeout_s=error.timeout_s)


class CallFuture(torch.futures.Future):  # type: ignore[type-arg]
    """The future that ``rpc_async`` returns.

    The answer is turned into a value by the thread that waits for it, which saves a change of threads; without one by a
    thread of the agent, but never by one that receives messages, because the user's callbacks may wait.

    Args:
        call: the call.
        finish: makes the value of the call's answer.
        run: calls a function on a thread that may block.
    """

    def __init__(self, call: OwnFuture[Any], finish: Callable[[Any], Any], run: Callable[..., None]) -> None:
        super().__init__()
        self._call, self._finish, self._run = call, finish, run
        self._waiting = 0
        self._completing = threading.Lock()
        call.add_done_callback(self._on_answer, short=True)

    def wait(self) -> Any:
        """See :class:`torch.futures.Future`."""
        if not super().done():
            self._waiting += 1  # a hint: where it is missed, two threads come to _complete, and one of them does it
            try:
                self._call.wait()
            except Exception:
                pass
            except BaseException:  # such as Ctrl-C: this thread will not complete it
                self._waiting -= 1
                self._call.add_done_callback(self._on_answer)
                raise
            self._complete()
        return super().wait()

    def _on_answer(self, call: OwnFuture[Any]) -> None:
        if not self._waiting:
            self._run(self._complete)

    def _complete(self) -> None:
        if not self._completing.acquire(blocking=False):
            return
        try:
            value = self._finish(self._call.wait(0))
        except CallTimeout as error:
            self.set_exception(RpcTimeout.of(error))
        except Exception as error:
            self.set_exception(error)
        except BaseException as error:
            self.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            self.set_result(value)


def wait_all(futures: Sequence[Any]) -> list[Any]:
    """Stand in for ``torch.futures.wait_all``, which waits for all where a future's error was set from Python.

    Returns:
        The values, in the order of the futures.

    Raises:
        Exception: that of the first future that fails, without waiting for the others.
    """
    finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(finished.put)
    for _ in futures:
        finished.get().wait()
    return [future.wait() for future in futures]


def operator_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
    """Encode a call of one of torch's operators, which torch names instead of encoding them."""
    encoded: tuple[bytes, list[torch.Tensor]] = internal.serialize(
        internal.PythonUDF(_run_operator, (name, *args), kwargs)
    )
    return encoded


def _run_operator(name: str, /, *args: Any, **kwargs: Any) -> Any:
    function, _ = torch._C._jit_get_operation(name)
    return function(*args, **kwargs)


@stand_in
def _invoke_rpc_builtin(dst: Any, name: str, timeout: float, *args: Any, **kwargs: Any) -> Future[Any]:
    return call(dst, *operator_call(name, args, kwargs), timeout, asked=name)


@stand_in
def _invoke_rpc_python_udf(
    dst: Any, payload: bytes, tensors: list[torch.Tensor], timeout: float, asynchronous: bool
) -> Future[Any]:
    return call(dst, payload, tensors, timeout)


def _invoke_rpc_torchscript(dst: str, name: str, *_: Any) -> NoReturn:
    raise PhalanxError(
        f"{name} is a TorchScript function, which cannot be called on {dst} over Phalanx. Pass the Python function, or "
        f"run without --replace rpc"
    )


stand_in(_invoke_rpc_torchscript)
stand_in(_invoke_rpc_torchscript, "_invoke_remote_torchscript")
