"""``backward``, and the messages by which workers run their parts of it.

It follows torch's FAST mode, with one difference: torch assumes that all messages of a context take part, and waits for
ever if the result of one call is not used. Here the first of two phases finds out which messages do.

| state of a part | begins with | what the worker does |
|---|---|---|
| marking | ``backward`` at its roots; MARK | follows its graph, and tells the caller which messages it reaches |
| marked | the caller reaches no other message | knows exactly which of its messages and leaves take part |
| running | RUN, when all have been marked | runs its part once (``local_run.py``), and waits in it for GRADIENTS |
| over | the end of the run, or an error | answers RUN; the first error is raised at the caller; CANCEL follows |

| message | from, to | answer |
|---|---|---|
| MARK | caller to a sender of messages: which of their tensors get gradients | what others must mark for that |
| RUN | caller to all that take part | comes when the part there is over, with its error |
| GRADIENTS | receiver of a message to its sender | it has been taken |
| CANCEL | caller to all that take part | none |
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
from phalanx.rpc.autograd.contexts import Context, contexts
from phalanx.rpc.autograd.passes import GRADIENTS, Gradients, Key, Pass, Wanted
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member
from phalanx.rpc.worker import Incoming, Worker

__all__ = ["backward", "context", "get_gradients"]

MARK, RUN, CANCEL = "autograd.mark", "autograd.run", "autograd.cancel"
_ASKED = "its part of backward()"

_numbers = itertools.count(1)


def _equip(worker: Worker) -> None:
    contexts.start(worker)
    worker.serve(MARK, _on_mark)
    worker.serve(RUN, _on_run)
    worker.serve(GRADIENTS, _on_gradients, quick=True)
    worker.serve(CANCEL, _on_cancel)


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
        BackwardError: a function or a hook has failed, on any worker.
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
    worker = contexts.worker()
    with torch.autograd.profiler.record_function("torch::distributed::autograd::backward"):
        _backward(worker, inside, roots, bool(retain_graph), worker.timeout_s if timeout_s is None else timeout_s)


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


def _backward(
    worker: Worker, inside: Context, roots: Sequence[torch.Tensor], keep_graph: bool, timeout_s: float
) -> None:
    number = (worker.me.incarnation, next(_numbers))
    key = (inside.number, number)
    part = Pass(worker, inside, number, keep_graph=keep_graph)
    with inside.lock:
        inside.passes[number] = part
    others: set[Member] = set()
    runs: list[Future[None]] = []
    try:
        wanted = part.mark_roots(roots)
        while wanted:
            others |= wanted.keys() - {worker.me}
            marks = [
                worker.request(to, MARK, (key, keep_graph, edges), timeout_s, asked=_ASKED)
                for to, edges in wanted.items()
            ]
            wanted = {}
            for mark in marks:
                for to, edges in mark.wait().items():
                    wanted.setdefault(to, []).extend(edges)
        runs += [worker.request(other, RUN, key, timeout_s, asked=_ASKED) for other in others]
        for run in runs:
            run.add_done_callback(part.watch)
        part.run(roots)
        for run in runs:
            run.wait()
    except BaseException as error:
        keeper = _keeper(runs) if isinstance(error, CallTimeout) and error.asked == _ASKED else None
        for other in others:
            with contextlib.suppress(PhalanxError, OSError):
                worker.notify(other, CANCEL, key)
        if keeper is not None:
            raise keeper from None
        raise
    finally:
        with inside.lock:
            inside.passes.pop(number, None)


def _keeper(runs: Sequence[Future[None]]) -> CallTimeout | None:
    """Return the timeout of the worker that computes or does not answer; the others only wait for gradients.

    All parts have the same time, so each has ended, or is about to.
    """
    for run in runs:
        try:
            run.wait()
        except CallTimeout as error:
            if error.at or error.cause != "handler":
                return error
        except Exception:
            continue
    return None


# What others ask of this worker


def _on_mark(_: Incoming, asked: tuple[Key, bool, list[tuple[int, list[int]]]]) -> Wanted:
    (context_id, number), keep_graph, wanted = asked
    inside = contexts.get(context_id)
    with inside.lock:
        part = inside.passes.get(number)
        if part is None:
            part = inside.passes[number] = Pass(contexts.worker(), inside, number, keep_graph=keep_graph)
    return part.mark(wanted)


def _on_run(_: Incoming, key: Key) -> None:
    inside = contexts.get(key[0])
    part = inside.passes.get(key[1])
    if part is None:
        raise PhalanxError(f"the backward pass of context {key[0]} has been given up here")
    try:
        part.run()
    finally:
        with inside.lock:
            inside.passes.pop(key[1], None)


def _on_gradients(_: Incoming, came: tuple[Key, int, Gradients]) -> None:
    (context_id, number), edge, gradients = came
    inside = contexts.find(context_id)
    part = inside.passes.get(number) if inside is not None else None
    if part is not None:  # else the pass has been given up
        part.arrive(edge, gradients)


def _on_cancel(_: Incoming, key: Key) -> None:
    inside = contexts.find(key[0])
    if inside is None:
        return
    with inside.lock:
        part = inside.passes.pop(key[1], None)
    if part is not None:
        part.fail(PhalanxError(f"the backward pass of context {key[0]} was given up, because it failed elsewhere"))
