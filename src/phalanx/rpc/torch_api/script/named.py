"""Script functions: found by their qualified names, checked by the caller, and called from Python on the callee."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.rpc.torch_api.torch_names import jit

__all__ = ["check_arguments", "return_type", "script_function"]


def script_function(name: str) -> Any:
    """The script function of this qualified name.

    Raises:
        PhalanxError: this process has none.
    """
    function = jit._state._python_cu.find_function(name)
    if function is None:
        raise PhalanxError(
            f"attempted to get undefined function {name.rpartition('.')[2]}: this worker's program has not defined a "
            f"script function {name}"
        )
    return function


def return_type(name: str, asynchronous: bool) -> str:
    """The type that a script function returns, as text.

    Args:
        name: its qualified name.
        asynchronous: whether it returns a future of that type.
    """
    kind = script_function(name).schema.returns[0].type
    return str((kind.containedTypes()[0] if asynchronous else kind).annotation_str)


def check_arguments(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse a call of a script function before it is sent.

    Raises:
        PhalanxError: the arguments do not fit the function's.
    """
    schema = script_function(name).schema
    known = [argument.name for argument in schema.arguments]
    if len(args) > len(known):
        raise PhalanxError(
            f"{schema.name}() expected at most {len(known)} argument(s) but received {len(args)} argument(s). "
            f"Declaration: {schema}"
        )
    for key in kwargs:
        if key not in known:
            raise PhalanxError(f"Unknown keyword argument '{key}' for {schema.name}(). Declaration: {schema}")
    for argument in schema.arguments[len(args) :]:
        if argument.name not in kwargs and not argument.has_default_value():
            raise PhalanxError(
                f"{schema.name}() is missing value for argument '{argument.name}'. Declaration: {schema}"
            )
