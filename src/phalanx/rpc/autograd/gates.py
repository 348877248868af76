"""One run of torch's autograd engine over a worker's part of a distributed backward pass, which waits where it must.

The graph of a worker has no edges to the graphs of others, and yet its functions depend on them: the gradients of a
tensor that was sent come back only when the receiver's part has run, which in turn may need gradients of tensors that
this worker received later. The run is one run of the engine all the same, so that every function runs once, with
the whole of its gradient, and with all that the engine does for it: hooks, sums, streams, checks.

For this, the sent messages that take part are opened one after the other, the latest first, each by a *gate*: a
function that waits until the gradients of its message have come, and gives them to the handles of the message. The
gates form a chain, and have the lowest of priorities, so that the engine runs everything else that can run before it
enters the next one.

Why this never waits for itself: functions point to older functions only. So all that the gradients of a received
message need on this worker is what came after the message: the roots, and messages that were sent later. When the gate
of a message is entered, the gates of all later ones have been passed, and everything behind them has run, so all
messages received later have been handed back. What other workers need from this one for the message of the gate is
among these. Every wait is thus for something that came later in real time, and there is no circle in time.

Functions on an accelerator run on threads of the engine, so a gate may be entered while they work. It then lets the
engine run what they made possible on this thread, until all later messages have been handed back (:func:`_let_run`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from phalanx.rpc.autograd.edges import START, Send

__all__ = ["Opening", "run"]


class Opening:
    """One gate.

    Args:
        send: the message.
        places: which of its tensors take part.
        wait: returns their gradients when they have come.
        later: whether all messages that were received later have been handed back.
    """

    def __init__(
        self,
        send: Send,
        places: Sequence[int],
        wait: Callable[[Send], Mapping[int, torch.Tensor | None]],
        later: Callable[[Send], bool],
    ) -> None:
        self.send, self.places, self.wait, self.later = send, places, wait, later

    def close(self) -> None:
        """Let go of the pass, whose run has ended."""
        del self.wait, self.later


def run(
    openings: Sequence[Opening], roots: Sequence[torch.Tensor], begin: Callable[[], None], *, keep_graph: bool
) -> None:
    """Run the engine over a worker's part of the graph.

    Args:
        openings: the gates, the latest message first.
        roots: scalars whose gradients are 1.
        begin: is called before any function runs, on the engine's thread.
        keep_graph: whether the graph can be used again.
    """
    begins = [begin]
    try:
        with torch.enable_grad():
            chain = START
            for opening in reversed(openings):
                chain = _apply_gate(opening, chain, *(opening.send.handles[place] for place in opening.places))
                if chain.grad_fn is not None:
                    chain.grad_fn._set_sequence_nr(0)
            first = _apply_begin(begins, chain, *roots)
        torch.autograd.backward((first,), retain_graph=keep_graph)
    finally:
        # The pass keeps an error of this, whose traceback keeps the graph. If a function of it still led to the pass,
        # all of them would stay for ever, because Python's garbage collection does not see from tensors to functions.
        begins.clear()
        for opening in openings:
            opening.close()


class _Begin(torch.autograd.Function):
    """The first function of a run."""

    @staticmethod
    def forward(ctx: Any, begins: list[Callable[[], None]], _: torch.Tensor, *roots: torch.Tensor) -> torch.Tensor:
        ctx.begins = begins
        ctx.gradients = [torch.ones_like(root, memory_format=torch.contiguous_format) for root in roots]
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        for begin in ctx.begins:
            begin()
        return (None, None, *ctx.gradients)


class _Gate(torch.autograd.Function):
    """Waits for the gradients of a message."""

    @staticmethod
    def forward(ctx: Any, opening: Opening, _: torch.Tensor, *handles: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.opening = opening
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        opening: Opening = ctx.opening
        while not opening.later(opening.send):
            _let_run()
        gradients = opening.wait(opening.send)
        return (None, None, *(gradients[place] for place in opening.places))


# torch does not type ``apply``.
_apply_begin: Any = _Begin.apply
_apply_gate: Any = _Gate.apply


def _let_run() -> None:
    """Let the engine run, on this thread, functions that can run by now.

    A backward pass within a function runs whatever is ready on its thread while it waits for a part of itself that is
    on the accelerator's thread.
    """
    device = torch.accelerator.current_accelerator()
    with torch.enable_grad():
        there = torch.zeros((), device="cpu", requires_grad=True).to(device or "cpu").mul(1)
        back = there.to("cpu").mul(1)
    torch.autograd.backward(back)
