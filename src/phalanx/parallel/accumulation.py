"""Gradient accumulation: the gradients of several batches are exchanged once, with those of the last one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from phalanx.errors import ArgumentError

__all__ = ["accumulated"]

Batch = TypeVar("Batch")


def accumulated(module: torch.nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Go through the batches of one optimizer step; all but the last leave the gradients on their rank.

    Args:
        module: the model as it is called: ``DistributedDataParallel``, FSDP, or what ``fully_shard`` has made.
        batches: those of one step. One more than is handed out has been taken from it, to know which one is the last.

    Raises:
        ArgumentError: the module cannot hold back its exchange.
    """
    held_back = _holding_back(module)
    iterator = iter(batches)
    for batch in iterator:
        for following in iterator:
            with held_back():
                yield batch
            batch = following
        yield batch
        return


def _holding_back(module: Any) -> Any:
    """A function that makes a context in which ``module`` exchanges no gradients."""
    if hasattr(module, "no_sync"):
        return module.no_sync
    if hasattr(module, "set_requires_gradient_sync"):

        @contextlib.contextmanager
        def without_sync() -> Iterator[None]:
            module.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                module.set_requires_gradient_sync(True)

        return without_sync
    raise ArgumentError(
        f"{type(module).__name__} exchanges no gradients; give accumulate() what world.data_parallel() has returned"
    )
