"""``backward``, and the messages by which workers run their parts of it.

It follows torch's FAST mode, with one difference: torch assumes that all messages of a context take part, and waits for
ever if the result of one call is not used. Here the first of two phases finds out which messages do.

| state of a part | begins with | what the worker does |
|---|---|---|
| marking | ``backward`` at its roots; MARK | follows its graph, and asks the senders of what it reaches in turn |
| marked | the last answer to MARK | knows exactly which of its messages and leaves take part |
| running | all marked, at the caller; or GRADIENTS of the latest message | runs its part once (``local_run.py``) |
| over | the end of the run, or an error | answers FINISH; the first error is raised at the caller; CANCEL follows |

| message | from, to | answer |
|---|---|---|
| MARK | receiver of a message to its sender: which of its tensors get gradients | all that take part because of it |
| FINISH | caller to all that take part | comes when the part there is over, with its error |
| GRADIENTS | receiver of a message to its sender | it has been taken |
| CANCEL | caller to all; they to those that they asked | none |
| STATE | caller, when the time is over (``errors.overdue``) | for whom the part waits, or where it computes |
| RELEASE | along the tree of a context (``contexts.py``) | none |

What a worker had computed in a pass that fails is dropped, except where its part had ended already.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from phalanx.errors import ArgumentError, CallTimeout, PhalanxError
from phalanx.rpc import session
from phalanx.rpc.agent import Agent, Incoming
from phalanx.rpc.autograd.contexts import Context, contexts
from phalanx.rpc.autograd.errors import STATE, overdue
from phalanx.rpc.autograd.passes import GRADIENTS, MARK, Gradients, Pass, gathered
from phalanx.rpc.codec import FACTS
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member

__all__ = ["backward", "context", "get_gradients"]

FINISH = "autograd.finish"
CANCEL = "autograd.cancel"
_LONGER_S = 5.0

Key = tuple[int, tuple[int, int]]  # of a context, and of a pass in it: the caller's incarnation, and a count

_numbers = itertools.count(1)


def _equip(agent: Agent) -> None:
    contexts.start(agent)
    agent.serve(MARK, _on_mark)
    agent.serve(GRADIENTS, _on_gradients)
    agent.serve(FINISH, _on_finish, quick=True)
    agent.serve(CANCEL, _on_cancel)
    agent.serve(STATE, _on_state, quick=True, codec=FACTS)


session.on_init(_equip)


class context:  # noqa: N801 - torch's name
    """A context, in which calls are recorded so that gradients can follow them: ``with context() as context_id``.

    The thread that enters it is in it, and so is what it has other workers run. Leaving it releases the context on all
    workers, with its graph and its gradients.

    Raises:
        PhalanxError: the thread is in a context.
    """

    def __enter__(self) -> int:
        self._context = contexts.new()
        return self._context.number

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        contexts.release(self._context.number)


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
    agent = contexts.agent()
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
        names = [other.name for other in others]
        raised = (overdue(agent, part.state(), key, names, timeout_s) if late else None) or error
        _cancel(agent, part, key, others)
        if raised is error:
            raise
        raise raised from None
    finally:
        with inside.lock:
            inside.passes.pop(number, None)


def _cancel(agent: Agent, part: Pass, key: Key, others: set[Member]) -> None:
    part.fail(PhalanxError(f"the backward pass of context {key[0]} was given up, because it failed on another worker"))
    for other in (others | part.asked) - {agent.me}:
        with contextlib.suppress(PhalanxError, OSError):
            agent.notify(other, CANCEL, key)


# What others ask of this worker


def _on_mark(_: Incoming, asked: tuple[int, tuple[int, int], bool, float, list[tuple[int, list[int]]]]) -> Future[Any]:
    context_id, number, keep_graph, left_s, wanted = asked
    inside = contexts.get(context_id)
    with inside.lock:
        part = inside.passes.get(number)
        if part is None:
            # The worker that called backward() is to notice first that it takes too long.
            timeout_s = left_s + _LONGER_S
            part = Pass(contexts.agent(), inside, number, keep_graph=keep_graph, timeout_s=timeout_s)
            inside.passes[number] = part
    return part.mark(wanted)


def _on_gradients(_: Incoming, came: tuple[int, tuple[int, int], int, Gradients]) -> None:
    context_id, number, edge, gradients = came
    part = _part((context_id, number))
    if part is not None:  # else the pass has been given up
        part.arrive(edge, gradients)


def _on_finish(_: Incoming, key: Key) -> Future[None]:
    inside = contexts.get(key[0])
    part = _part(key)
    if part is None:
        raise PhalanxError(f"the backward pass of context {key[0]} has been given up here")

    def forget(_: Future[None]) -> None:
        with inside.lock:
            inside.passes.pop(key[1], None)

    part.done.add_done_callback(forget)
    return part.done


def _on_cancel(_: Incoming, key: Key) -> None:
    inside = contexts.find(key[0])
    if inside is None:
        return
    with inside.lock:
        part = inside.passes.pop(key[1], None)
    if part is not None:
        _cancel(contexts.agent(), part, key, set())


def _on_state(_: Incoming, key: Sequence[int]) -> dict[str, Any]:
    part = _part((key[0], (key[1], key[2])))
    return part.state() if part is not None else {"asked": []}


def _part(key: Key) -> Pass | None:
    inside = contexts.find(key[0])
    return inside.passes.get(key[1]) if inside is not None else None
