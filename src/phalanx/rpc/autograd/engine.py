"""Distributed autograd: what the layers that send calls need of it, and what programs call.

A call carries the number of the context in which it was made, and its tensors, in both directions, become edges
between the graphs of two workers (edges.py). ``backward`` follows them, in two phases (passes.py), and each worker runs
its part of the graph once (gates.py). Gradients of leaves are kept in the context (leaves.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch

from phalanx.diagnosis.call_site import CallSite, capture
from phalanx.errors import ArgumentError, CallTimeout, ClosedError, PhalanxError
from phalanx.rpc import session
from phalanx.rpc.agent import Agent, Incoming
from phalanx.rpc.autograd.contexts import Context, contexts, is_creator, worker_id
from phalanx.rpc.autograd.edges import receive, send
from phalanx.rpc.autograd.overdue import STATE, overdue
from phalanx.rpc.autograd.passes import GRADIENTS, MARK, Gradients, Pass, gathered
from phalanx.rpc.codec import FACTS
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member

__all__ = [
    "Metadata",
    "backward",
    "context",
    "get_gradients",
    "install",
    "max_id",
    "new_context",
    "release_context",
    "running_in",
    "unwrap",
    "wrap",
]

# What a message of a context carries: the context's number, the edge (None if no tensor requires gradients), and which
# of the message's tensors do.
Metadata = tuple[int, int | None, tuple[int, ...]]

FINISH = "autograd.finish"
CANCEL = "autograd.cancel"
RELEASE = "autograd.release"
JOINED = "autograd.joined"
_LONGER_S = 5.0

_agent: Agent | None = None
_numbers = itertools.count(1)
# What runs for another worker on this thread, for errors.
_running: ContextVar[str] = ContextVar("phalanx_autograd_running", default="")


def install(agent: Agent) -> None:
    """Let other workers ask this one for its part in their backward passes. What an earlier agent had is forgotten."""
    global _agent
    contexts.clear()
    contexts.count_as(worker_id(agent.me), agent.me.incarnation)
    _agent = agent
    agent.serve(MARK, _on_mark)
    agent.serve(GRADIENTS, _on_gradients)
    agent.serve(FINISH, _on_finish, quick=True)
    agent.serve(CANCEL, _on_cancel)
    agent.serve(RELEASE, _on_release)
    agent.serve(JOINED, _on_joined)
    agent.serve(STATE, _on_state, quick=True, codec=FACTS)
    agent.on_change(_on_change)
    agent.on_close(lambda: _end(agent))


def _end(agent: Agent) -> None:
    """This process is no worker any more: it has no part in what others have begun, and keeps no way to the store."""
    global _agent
    if _agent is not agent:
        return  # it is another one meanwhile, which has forgotten all that
    _agent = None
    for inside in contexts.all():
        if not is_creator(agent.me, inside.number):
            _forget(inside.number, "this worker has left")


session.on_init(install)


# For the layers that send calls


def wrap(
    to: str | int | Member, tensors: Sequence[torch.Tensor], *, answer: bool = False
) -> tuple[list[torch.Tensor], Metadata | None]:
    """Make the tensors of a message part of the current context. The sender of a call or of an answer calls it.

    Args:
        to: who gets the message.
        tensors: all tensors in it, in their order.
        answer: whether the message is the answer to a call, so that errors name the function that was called.

    Returns:
        The tensors to send, which require no gradients, and what goes beside them: None outside of contexts. Inside
        one, the context's number is sent also if no tensor requires gradients, so that nested calls know it.
    """
    inside = contexts.current()
    if inside is None:
        return list(tensors), None
    agent = _require_agent()
    member = agent.member(to)
    if member.incarnation != agent.me.incarnation:
        with inside.lock:
            fresh = inside.known.get(worker_id(member)) != member
            inside.known[worker_id(member)] = member
        if fresh and contexts.was_released(inside.number):  # by another thread, which did not know this member
            with contextlib.suppress(PhalanxError, OSError):
                agent.notify(member, RELEASE, inside.number)
    places = tuple(place for place, tensor in enumerate(tensors) if tensor.requires_grad)
    if not places or not torch.is_grad_enabled():
        return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors], (inside.number, None, ())
    edge = contexts.next_edge()
    about: str | CallSite = (None if answer else capture()) or _running.get() or "a function"
    send(inside, edge, member, [tensors[place] for place in places], about)
    sent = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    return sent, (inside.number, edge, places)


def unwrap(sender: Member, tensors: Sequence[torch.Tensor], metadata: Metadata | None) -> list[torch.Tensor]:
    """Make received tensors part of the graph here. The receiver of a call or of an answer calls it.

    Args:
        sender: who sent the message.
        tensors: all tensors in it, in their order.
        metadata: what came beside them.

    Returns:
        The tensors; those whose sender wants gradients require them.
    """
    received = list(tensors)
    if metadata is None:
        return received
    number, edge, places = metadata
    inside = _join(sender, number)
    if inside is None or edge is None:
        return received
    with torch.enable_grad():
        entered = receive(inside, edge, sender, [received[place] for place in places])
    for place, tensor in zip(places, entered, strict=True):
        received[place] = tensor
    return received


@contextlib.contextmanager
def running_in(metadata: Metadata | None, function: Callable[..., Any] | None = None) -> Iterator[None]:
    """Let the context of a received call be current while what it asks for runs, and while its answer is wrapped.

    Args:
        metadata: what came with the call.
        function: what the call asks for, so that an error in its backward can name it.
    """
    if metadata is not None:
        _join(None, metadata[0])  # a call without tensors need not have been unwrapped
    name = _running.set(_described(function) if function is not None and metadata is not None else "")
    token = contexts.enter(None if metadata is None else metadata[0])
    try:
        yield
    finally:
        contexts.leave(token)
        _running.reset(name)


def _described(function: Callable[..., Any]) -> str:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name


def _join(sender: Member | None, number: int) -> Context | None:
    """Take part in a context. Its creator is told, unless it is the sender, and so knows."""
    inside, fresh = contexts.join(number)
    if not fresh:
        return inside
    agent = _require_agent()
    if not is_creator(agent.me, number) and (sender is None or not is_creator(sender, number)):
        for member in agent.members():
            if is_creator(member, number):
                agent.notify(member, JOINED, number)
    # It may have died since it sent this, before there was a context here that could be forgotten.
    if any(is_creator(member, number) for member in agent.known_gone()):
        _forget(number, "its creator is gone")
        return None
    return inside


# For programs


class context:  # noqa: N801 - torch's name
    """A context, in which calls are recorded so that gradients can follow them: ``with context() as context_id``.

    The thread that enters it is in it, and so is what it has other workers run. Leaving it releases the context on all
    workers, with its graph and its gradients.

    Raises:
        PhalanxError: the thread is in a context.
    """

    def __enter__(self) -> int:
        self._context = new_context()
        return self._context.number

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        release_context(self._context.number)


def new_context() -> Context:
    """Make a context, and let it be this thread's until it is released."""
    _require_agent()
    return contexts.new()


def release_context(number: int) -> bool:
    """Forget a context here and on all workers that took part in it. Whether there was one."""
    inside = _forget(number, "it was released")
    if inside is None:
        return False
    with inside.lock:
        others = {*inside.known.values(), *inside.others.values()}
    for other in others:
        with contextlib.suppress(PhalanxError, OSError):  # that worker, or this one, is leaving
            _require_agent().notify(other, RELEASE, number)
    return True


def max_id() -> int:
    """The largest number that a context of this worker can have."""
    _require_agent()
    return contexts.max_id()


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that the backward passes of a context have computed for this worker's leaves.

    Args:
        context_id: the context's number.

    Returns:
        For each leaf its gradient. The gradients are the context's own, not copies.

    Raises:
        PhalanxError: there is no such context.
    """
    inside = contexts.get(context_id)
    with inside.lock:
        return dict(inside.gradients)


def backward(
    context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False, *, timeout_s: float | None = None
) -> None:
    """Compute the gradients of the sum of ``roots`` for all leaves that they depend on, on whichever worker.

    The gradients are added to those of the context on the leaves' workers (:func:`get_gradients`); ``.grad`` stays as
    it is. Only one worker calls it. What other workers returned may be used several times, or not at all.

    Args:
        context_id: the number of the context in which the calls were made.
        roots: scalars of this worker that require gradients.
        retain_graph: whether the graph can be used for another backward pass.
        timeout_s: how long other workers may be waited for, in seconds; ``rpc.init(timeout_s=...)`` by default.

    Raises:
        PhalanxError: there is no such context; or a root is no scalar, or requires no gradients.
        BackwardError: a function or a hook has failed, on any worker. It is of the raised error's type as well.
        WorkerLost: a worker that takes part is gone.
        CallTimeout: the pass has not ended in time. It names the worker that keeps it, and where that worker is.
    """
    if not isinstance(context_id, int) or not _are_tensors(roots):
        raise ArgumentError(
            "backward(): incompatible function arguments. It takes the number of a context, a list of tensors, and "
            f"whether to retain the graph; it got {type(context_id).__name__} and {type(roots).__name__}"
        )
    inside = contexts.get(context_id)
    _check(roots)
    agent = _require_agent()
    with torch.autograd.profiler.record_function("torch::distributed::autograd::backward"):
        _backward(agent, inside, roots, bool(retain_graph), agent.timeout_s if timeout_s is None else timeout_s)


def _are_tensors(roots: Any) -> bool:
    return isinstance(roots, Sequence) and all(isinstance(root, torch.Tensor) for root in roots)


def _check(roots: Sequence[torch.Tensor]) -> None:
    if not roots:
        raise ArgumentError("No tensors provided for gradient computation.")
    for root in roots:
        if not root.requires_grad:
            raise ArgumentError("requires_grad not set on root: it depends on nothing that requires gradients")
        if root.numel() != 1:
            raise ArgumentError(
                f"a root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar: sum it"
            )
        if root.grad_fn is None:
            raise ArgumentError(
                "a root does not have a valid gradient function: it is a leaf, not the result of anything"
            )


def _backward(agent: Agent, inside: Context, roots: Sequence[torch.Tensor], keep_graph: bool, timeout_s: float) -> None:
    number = (agent.me.incarnation, next(_numbers))
    part = Pass(agent, inside, number, keep_graph=keep_graph, timeout_s=timeout_s)
    with inside.lock:
        inside.passes[number] = part
    key = (inside.number, number)
    others: set[Member] = set()
    try:
        others = part.mark_roots(roots).wait() - {agent.me}
        ends = [agent.request(other, FINISH, key, part.left_s(), asked="backward()") for other in others]
        for end in ends:
            end.add_done_callback(part.watch)
        part.run(roots)
        gathered(ends).wait()
    except BaseException as error:
        late = isinstance(error, CallTimeout) and not part.left_s()
        raised = (overdue(agent, part, key, others, timeout_s) if late else None) or error
        with inside.lock:
            others |= {*inside.known.values()}
        _cancel(agent, part, key, others)
        if raised is error:
            raise
        raise raised from None
    finally:
        with inside.lock:
            inside.passes.pop(number, None)


# What others ask of this worker


def _on_mark(
    incoming: Incoming, asked: tuple[int, tuple[int, int], bool, float, list[tuple[int, list[int]]]]
) -> Future[Any]:
    context_id, number, keep_graph, left_s, wanted = asked
    inside = contexts.get(context_id)
    agent = _require_agent()
    with inside.lock:
        part = inside.passes.get(number)
        if part is None:
            # The worker that called backward() is to notice first that it takes too long.
            timeout_s = left_s + _LONGER_S
            part = inside.passes[number] = Pass(agent, inside, number, keep_graph=keep_graph, timeout_s=timeout_s)
    return part.mark(wanted)


def _on_gradients(incoming: Incoming, came: tuple[int, tuple[int, int], int, Gradients]) -> None:
    context_id, number, edge, gradients = came
    inside = contexts.find(context_id)
    part = inside.passes.get(number) if inside is not None else None
    if part is not None:  # else the pass has been given up
        part.arrive(edge, gradients)


def _on_finish(incoming: Incoming, key: tuple[int, tuple[int, int]]) -> Future[None]:
    context_id, number = key
    inside = contexts.get(context_id)
    part: Pass | None = inside.passes.get(number)
    if part is None:
        raise PhalanxError(f"the backward pass of context {context_id} has been given up here")

    def forget(_: Future[None]) -> None:
        with inside.lock:
            inside.passes.pop(number, None)

    part.done.add_done_callback(forget)
    return part.done


def _on_cancel(incoming: Incoming, key: tuple[int, tuple[int, int]]) -> None:
    context_id, number = key
    inside = contexts.find(context_id)
    if inside is None:
        return
    with inside.lock:
        part = inside.passes.pop(number, None)
    if part is not None:
        _cancel(_require_agent(), part, key, set())


def _cancel(agent: Agent, part: Pass, key: tuple[int, tuple[int, int]], others: set[Member]) -> None:
    part.fail(PhalanxError(f"the backward pass of context {key[0]} was given up, because it failed on another worker"))
    for other in (others | part.asked) - {agent.me}:
        with contextlib.suppress(PhalanxError, OSError):
            agent.notify(other, CANCEL, key)


def _on_state(incoming: Incoming, key: Sequence[int]) -> dict[str, Any]:
    context_id, *number = key
    inside = contexts.find(context_id)
    part = inside.passes.get((number[0], number[1])) if inside is not None else None
    return part.state() if part is not None else {"waits_for": []}


def _on_release(incoming: Incoming, number: int) -> None:
    release_context(number)


def _on_joined(incoming: Incoming, number: int) -> None:
    inside = contexts.find(number)
    if inside is not None:
        with inside.lock:
            inside.others[worker_id(incoming.peer)] = incoming.peer
    if contexts.was_released(number):
        _require_agent().notify(incoming.peer, RELEASE, number)


def _on_change(member: Member, _: str) -> None:
    for inside in contexts.all():
        if is_creator(member, inside.number):
            _forget(inside.number, f"its creator {member} is gone")
            continue
        with inside.lock:
            orphans = [part for number, part in inside.passes.items() if number[0] == member.incarnation]
        for part in orphans:
            part.fail(PhalanxError(f"{member}, which called backward(), is gone"))


def _forget(number: int, why: str) -> Context | None:
    inside = contexts.release(number)
    if inside is None:
        return None
    with inside.lock:
        parts = list(inside.passes.values())
        for recv in inside.recvs.values():
            recv.node = None  # else the function and what describes it would keep each other alive
    for part in parts:
        part.fail(PhalanxError(f"context {number} ended during its backward pass: {why}"))
    return inside


def _require_agent() -> Agent:
    agent = _agent  # another thread may end it
    if agent is None:
        raise ClosedError("distributed autograd needs workers: call rpc.init() first, on every rank that takes part")
    return agent
