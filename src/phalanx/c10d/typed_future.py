"""Futures that C++ takes for a list of tensors, for DDP's built-in hooks.

A future that is made and completed in Python holds a Python object, whatever that is. DDP itself takes it for tensors;
its hooks in C++ (``_register_builtin_comm_hook(FP16_COMPRESS)``) insist on a list of tensors that is one for C++ too,
which Python can only have from TorchScript. Such a future completes on a thread of TorchScript's, a switch of threads
later, and has its error as text; so there are none of these until a hook of that kind is registered.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch.futures import Future

__all__ = ["typed", "wanted"]

wanted = False  # set once, when the process registers the first such hook (register.py); read by every thread


def typed(future: Future[Any], tensors: list[torch.Tensor]) -> Any:
    """A future of ``tensors`` that C++ can read too; it ends when ``future`` does, with that one's error."""
    return _script()(future, tensors)


def _after(signal: Future[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.jit.wait(signal)
    return tensors


def _begin(signal: Future[int], tensors: list[torch.Tensor]) -> Future[list[torch.Tensor]]:
    return torch.jit.fork(_after, signal, tensors)  # type: ignore[no-any-return]


@cache
def _script() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has nothing in TorchScript's place for this
        return torch.jit.script(_begin)
