"""Which part of a value cannot be pickled, and what to do about it."""

from __future__ import annotations

import functools
import io
import pickle
import socket
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from phalanx.errors import EncodingError, PhalanxError

__all__ = ["explained"]

# Things that belong to one process.
_OF_THIS_PROCESS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Thread,
    threading.Event,
    threading.Condition,
    io.IOBase,
    socket.socket,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.FrameType,
    types.TracebackType,
)

DEEPEST = 50  # levels; a path longer than this says no more


def explained(
    value: Any,
    names: Sequence[str],
    attempt: Callable[[Any], Exception | None],
    error: Exception,
    has_cloudpickle: bool,
) -> Exception:
    """The error for a value that cannot be pickled.

    Args:
        value: the value.
        names: what the parts of the value are called, if it is a tuple; a named tuple has names itself.
        attempt: pickles a part, and returns what was raised.
        error: what was raised for the whole value.
        has_cloudpickle: whether cloudpickle is installed.
    """
    part, path = value, "value"
    if not names and isinstance(value, tuple):
        names = getattr(value, "_fields", ())
    seen = {id(value)}
    for depth in range(DEEPEST):
        parts = zip(names, value, strict=False) if depth == 0 and names else _parts(part, path)
        found = next(
            (
                (where, item, why)
                for where, item in parts
                if id(item) not in seen and (why := attempt(item)) is not None
            ),
            None,
        )
        if found is None:
            break
        path, part, error = found
        seen.add(id(part))
    if isinstance(error, PhalanxError):
        return EncodingError(f"{path} cannot be sent: {error}")
    kind = f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins.")
    name = getattr(part, "__qualname__", None)
    kind += f" ({name})" if isinstance(name, str) else ""
    return EncodingError.cannot_send(path, kind, str(error) or type(error).__name__, _remedy(part, has_cloudpickle))


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The parts of a value that pickle would take one after the other, with their paths."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{path}[{key!r:.50}]", item
            yield f"a key of {path}", key
    elif isinstance(value, tuple) and (fields := getattr(value, "_fields", None)):
        yield from ((f"{path}.{name}", item) for name, item in zip(fields, value, strict=False))
    elif isinstance(value, (list, tuple)):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"an item of {path}", item) for item in value)
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.func", value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords))
        return
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                yield f"the variable {name} of {path}", cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
        for name in value.__code__.co_names:
            if name in value.__globals__:
                yield f"the global {name} of {path}", value.__globals__[name]
        return
    elif isinstance(value, (type, *_OF_THIS_PROCESS)):
        return
    yield from _state(value, path)


def _state(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    try:
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:
        return
    if not isinstance(reduced, tuple):
        return
    if type(reduced[1]) is tuple:
        yield from ((f"{path} (part {index} of how it is rebuilt)", item) for index, item in enumerate(reduced[1]))
    state = reduced[2] if len(reduced) > 2 else None
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, Mapping):
            yield from ((f"{path}.{name}", item) for name, item in attributes.items())


def _remedy(part: Any, has_cloudpickle: bool) -> str:
    if isinstance(part, _OF_THIS_PROCESS):
        return "It belongs to this process: leave it out, or make it on the worker that needs it"
    if isinstance(part, (types.FunctionType, type)) and not has_cloudpickle:
        return (
            "No other process finds it by its name. Define it at the top level of a module, or let its code be sent: "
            "pip install cloudpickle"
        )
    if isinstance(part, types.ModuleType):
        return "Import it on the other worker instead"
    return "Leave it out, or give its class a method __reduce__ that says how to make it anew"
