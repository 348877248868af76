"""Explain wrong arguments of public functions by their annotations, once a call has failed."""

from __future__ import annotations

import collections.abc
import inspect
import reprlib
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from phalanx.errors import ArgumentError, PhalanxError

__all__ = ["explained", "require"]

Function = TypeVar("Function", bound=Callable[..., Any])

_NUMBERS: dict[Any, type] = {int: Integral, float: Real}  # numpy's are of these kinds, too


def explained(function: Function) -> Function:
    """Decorate a function so that a call with a wrong argument raises ArgumentError; other calls pay for a frame."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except Exception as error:
            if not isinstance(error, PhalanxError):
                require(function, *args, **named)
            raise

    return cast(Function, call)


def require(function: Callable[..., Any], /, *args: Any, **named: Any) -> None:
    """Raise an ArgumentError if an argument is missing, has an unknown name, or is not of the annotated kind."""
    name = getattr(function, "func", function).__name__
    signature = inspect.signature(function, eval_str=True, locals=vars(collections.abc))
    try:
        given = signature.bind(*args, **named).arguments
    except TypeError as error:
        known = [parameter for parameter in signature.parameters if parameter != "self"]
        near = [close for each in named if each not in known for close in get_close_matches(each, known, 1)]
        remedy = f"Did you mean {near[0]}?" if near else f"It takes: {', '.join(known) or 'nothing'}"
        raise ArgumentError(f"{name}(): {error}. {remedy}") from None
    for key, value in given.items():
        kind = signature.parameters[key].annotation
        if not str(signature.parameters[key]).startswith("*") and not _fits(value, kind):
            text = inspect.formatannotation(kind).replace("collections.abc.", "").replace("typing.", "")
            shown = reprlib.repr(value)
            remedy = f". Write [{shown}]" if _fits([value], kind) else ""
            if "torch.Tensor" in text.split(" | ") and (isinstance(value, (Real, list)) or hasattr(value, "__array__")):
                remedy = f". Write torch.as_tensor({shown})"
            raise ArgumentError(f"{name}() takes {key}: {text}; got {shown} ({type(value).__name__}){remedy}") from None


def _fits(value: Any, kind: Any) -> bool:
    """Compare a value with an annotation, as far as that can be told."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    kind = _NUMBERS.get(kind, origin or kind)
    if not isinstance(kind, type) or kind in (Any, inspect.Parameter.empty):
        return True
    if not isinstance(value, kind) or (isinstance(value, str) and kind in (Iterable, Sequence)):
        return False
    return len(inner) != 1 or not isinstance(value, Collection) or all(_fits(each, inner[0]) for each in value)
