"""What ``torch.distributed.autograd`` takes from torch's C++, by :mod:`phalanx.rpc.autograd`."""

from __future__ import annotations

from typing import Any

from phalanx.errors import PhalanxError
from phalanx.rpc.autograd import engine
from phalanx.rpc.autograd.contexts import Context, contexts

__all__ = ["STAND_INS"]


def _init(worker_id: int) -> None:
    """The agent says which worker this is, when it is made."""


def _current_context() -> Context:
    found = contexts.current()
    if found is None:
        raise PhalanxError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with torch.distributed.autograd.context() as context_id`"
        )
    return found


def _is_valid_context(number: int) -> bool:
    contexts.get(number)
    return True


def _release_context(number: int) -> None:
    contexts.get(number)
    contexts.release(number)


def _get_debug_info() -> dict[str, str]:
    living = contexts.all()
    passes = sum(len(context.passes) for context in living)
    return {"num_current_backward_passes": str(passes), "num_autograd_contexts": str(len(living))}


STAND_INS: dict[str, Any] = {
    "DistAutogradContext": Context,
    "_current_context": _current_context,
    "_get_debug_info": _get_debug_info,
    "_get_max_id": contexts.max_id,
    "_init": _init,
    "_is_valid_context": _is_valid_context,
    "_new_context": contexts.new,
    "_release_context": _release_context,
    "_retrieve_context": contexts.get,
    "backward": engine.backward,
    "get_gradients": engine.get_gradients,
}
