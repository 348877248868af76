"""Values that come from outside as JSON: of the right kind, or refused with a ValueError, whatever the bytes are."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")
# How the attributes of dataclasses are declared, and what JSON makes of them. Others are not looked at.
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
}


def read_json(data: str | bytes | bytearray) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, nested so deeply that Python cannot read it, or has a number of over 64 bits.
    """
    try:
        return json.loads(data, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole(digits: str) -> int:
    number = int(digits)
    if not is_number(number):
        raise ValueError("a number has more than 64 bits")
    return number


def is_number(value: object) -> bool:
    """Return whether it is an integer that fits into 64 bits: arithmetic with a larger one may fail, or take long."""
    return type(value) is int and -(1 << 63) <= value < 1 << 64


def checked(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make an instance of a dataclass from its attributes.

    Raises:
        ValueError: one is missing or unknown, or of another type than it is declared with, if that is a plain one.
    """
    for name, wanted in _plain(cast(Any, kind)):
        value = values.get(name)
        if name in values and (type(value) not in wanted or (type(value) is int and not is_number(value))):
            raise ValueError(f"{name} is of another kind")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error)) from None


@functools.cache
def _plain(kind: Any) -> list[tuple[str, tuple[type, ...]]]:
    declared = [(field.name, str(field.type)) for field in dataclasses.fields(kind)]
    return [(name, _KINDS[text]) for name, text in declared if text in _KINDS]
