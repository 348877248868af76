"""Script functions on the callee: found by their qualified names, and called from Python.

What TorchScript does in C++ cannot be had: calls made from inside of a script function, and remote references as its
arguments, go to the C++ agent that Phalanx stands in for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from phalanx.errors import PhalanxError

__all__ = ["script_function"]


def script_function(name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The script function of this qualified name.

    Raises:
        PhalanxError: this process has none, or the arguments hold remote references.
    """
    from phalanx.rpc.torch_api.rref import PyRRef

    if any(isinstance(value, PyRRef) for value in (*args, *kwargs.values())):
        raise PhalanxError(
            f"the script function {name} takes an RRef, which TorchScript can only hold if torch's own agent made it. "
            f"Pass the value, make it a Python function, or run this program without --replace rpc"
        )
    function = torch.jit._state._python_cu.find_function(name)  # type: ignore[attr-defined]
    if function is None:
        raise PhalanxError(f"attempted to get undefined function {name}: this worker's program has not defined it")
    found: Callable[..., Any] = function
    return found
