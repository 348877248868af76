"""Keeps ``torch.compile`` out of this package: its frames run as they are, inside compiled programs too.

torch passes its own distributed functions over by name and compiles whatever frame comes next, which would be ours.
They hold locks, pointers and thread-local state, of which a compiler can make nothing. Checked on torch 2.13.0.
"""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

__all__ = ["uncompiled"]

_Owner = TypeVar("_Owner")


def _skip(code: CodeType) -> None:
    """Have dynamo run the frames of ``code``, and those that they call, as they are.

    ``torch.compiler.disable`` does the same with a wrapper, which every call would pay for, and imports dynamo, which
    takes seconds. On a torch where this name has moved nothing is marked: uncompiled programs are as before, and in
    compiled ones dynamo reports the first of our lines that it cannot compile.
    """
    eval_frame: Any = getattr(torch._C, "_dynamo", None)
    try:
        inner = eval_frame.eval_frame
        inner.set_code_exec_strategy(code, inner._FrameExecStrategy(inner._FrameAction.SKIP, inner._FrameAction.SKIP))
    except AttributeError:
        return


def uncompiled(owner: _Owner) -> _Owner:
    """Decorate a class or a function so that ``torch.compile`` neither compiles it nor traces into it."""
    for value in vars(owner).values() if isinstance(owner, type) else (owner,):
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            _skip(function.__code__)
            function._torchdynamo_disable = True  # a graph ends before a call of it
    return owner
