"""The caller's side: calls, and what remote references ask of their owners."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.futures import Future

from phalanx.errors import CallTimeout, PhalanxError, WorkerLost
from phalanx.rpc.agent import Member
from phalanx.rpc.autograd.requests import unwrap, wrap
from phalanx.rpc.future import Future as OwnFuture
from phalanx.rpc.torch_api import current, profiling
from phalanx.rpc.torch_api.futures import CallFuture, RpcTimeout
from phalanx.rpc.torch_api.references import Identity, User
from phalanx.rpc.torch_api.torch_names import autograd as torch_autograd
from phalanx.rpc.torch_api.torch_names import cpp, internal

__all__ = ["Answer", "Call", "backward", "call", "fetch", "pickle_errors", "usable"]

CALL, FETCH, BACKWARD = "torch.call", "torch.fetch", "torch.backward"
BUILTIN, PYTHON = "builtin", "python"
UNSET = cpp._UNSET_RPC_TIMEOUT


class Call(NamedTuple):
    """A call as it travels.

    Attributes:
        kind: ``builtin`` if ``name`` is one of torch's operators, ``python`` if the function is in the payload.
        payload, tensors: the arguments as ``torch.distributed.rpc.internal.serialize`` makes them.
        autograd: what distributed autograd sends with them.
        asynchronous: the function returns a future.
        into: for ``remote``, the value to make and the first reference to it.
        profile: what to record, if the caller has a profiler on.
    """

    kind: str
    name: str
    payload: bytes
    tensors: list[torch.Tensor]
    autograd: Any
    asynchronous: bool
    into: tuple[Identity, Identity] | None
    profile: profiling.Flags | None


class Answer(NamedTuple):
    """What a call returned, as it travels; ``payload`` is empty where nothing is sent back."""

    payload: bytes
    tensors: list[torch.Tensor]
    autograd: Any
    events: list[list[profiling.Event]]


def seconds(timeout: float) -> float:
    """Torch's timeout in ours: 0 stands for no limit, and a negative one for the default."""
    timeout = current.agent().timeout_s if timeout < 0 else timeout
    return timeout or math.inf


def call(
    to: Any,
    kind: str,
    name: str,
    payload: bytes,
    tensors: list[torch.Tensor],
    timeout: float,
    *,
    asynchronous: bool = False,
    into: tuple[Identity, Identity] | None = None,
) -> Future[Any]:
    """Make a call to a worker, of which ``torch.distributed.rpc`` has encoded the arguments on this thread."""
    agent = current.agent()
    member = agent.member(to)
    profile = profiling.sending()
    agent.references.sent_to(member)
    sent, autograd = wrap(member, tensors)
    flags = profile.flags if profile is not None else None
    request = Call(kind, name, payload, sent, autograd, asynchronous, into, flags)
    started = agent.phalanx.request(member, CALL, tuple(request), seconds(timeout), asked=name or "a function")
    agent.count(started)

    def finish(answer: tuple[Any, ...]) -> Any:
        found = Answer(*answer)
        if profile is not None:
            profile.receive(found.events)
        return value_of(member, found)

    future: Future[Any] = CallFuture(started, finish, partial(forget_lost, member), agent.pool)
    if profile is None:
        return future
    return future.then(lambda done: done.wait())  # torch's profiler loses an error that was set from Python


def value_of(member: Member, answer: Answer) -> Any:
    """What a call returned; raises what the function raised."""
    if not answer.payload:
        return None
    tensors = unwrap(member, answer.tensors, answer.autograd)
    with pickle_errors():
        value = internal.deserialize(answer.payload, tensors)
    if isinstance(value, AttributeError) and "RPC pickler does not serialize" in str(value):
        raise value
    if isinstance(value, internal.RemoteException):
        raise_here(value)
    return value


@contextlib.contextmanager
def pickle_errors() -> Iterator[None]:
    """Raise what pickling raises as torch's C++ does: as a RuntimeError that begins with the name of its type."""
    try:
        yield
    except Exception as error:
        raise PhalanxError(f"{type(error).__name__}: {error}") from error


def raise_here(remote: Any) -> None:
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


def forget_lost(member: Member, error: BaseException) -> None:
    """Where a worker proves to be gone, what it held is free: nobody else may notice."""
    if isinstance(error, WorkerLost) and current.is_set():
        current.agent().references.forget(member)


def fetch(user: User, timeout: float) -> Any:
    """``to_here``: the value of a reference, copied."""
    usable(user, "to_here()")
    agent = current.agent()
    member = agent.references.member(user.owner)
    name = f"to_here#({agent.me.name})->({member.name})"
    scope = torch_autograd.profiler.record_function(name) if torch_autograd._profiler_enabled() else None
    with scope or contextlib.nullcontext():
        _, autograd = wrap(member, [])
        started = agent.phalanx.request(member, FETCH, (user.identity, autograd), seconds(timeout), asked="to_here()")
        agent.count(started)
        return value_of(member, Answer(*answer(started)))


def backward(user: User, context: int, retain_graph: bool) -> None:
    """``rref.backward``: begin the backward pass at a value of another worker."""
    usable(user, "backward()")
    agent = current.agent()
    member = agent.references.member(user.owner)
    message = user.identity, context, retain_graph
    answer(agent.phalanx.request(member, BACKWARD, message, seconds(UNSET), asked="backward()"))


def answer(started: OwnFuture[Any]) -> Any:
    """Wait for a call."""
    try:
        return started.wait()
    except CallTimeout as error:
        raise RpcTimeout.of(error) from None


def usable(user: User, what: str, on_it: str = " on it") -> None:
    """Refuse to use a reference whose value was never made, or that was given up.

    Raises:
        PhalanxError: it is one of these.
    """
    if user.failure is not None:
        raise user.failure
    if user.deleted:
        raise PhalanxError(f"{user.in_errors()} has been deleted. Cannot call {what}{on_it} after deletion.")
