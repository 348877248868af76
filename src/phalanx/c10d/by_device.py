"""The mark of the calls that belong to the backend of their tensors' device, in groups that have several backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["by_device", "mark_of"]

_Call = TypeVar("_Call", bound=Callable[..., Any])

_MARK = "_phalanx_by_device"


def by_device(backends_name: str = "", *, one_by_one: bool = False) -> Callable[[_Call], _Call]:
    """Mark a method of a process group that moves tensors; ``vendor.py`` routes it.

    Args:
        backends_name: the name of the method in the backends, if it is another one there.
        one_by_one: the backends' method takes one tensor only, and is called once for each.
    """

    def mark(call: _Call) -> _Call:
        setattr(call, _MARK, (backends_name or call.__name__, one_by_one))
        return call

    return mark


def mark_of(call: object) -> tuple[str, bool] | None:
    """The mark of a method: the backends' name, and whether it is called one by one. None if it has none."""
    mark: tuple[str, bool] | None = getattr(call, _MARK, None)
    return mark
