"""Values that plain pickle does not take: closures and the like by cloudpickle, and for others an error that says why.

Pickle refers to functions and classes by name. Lambdas, closures and local classes have none that another process
could find, and cloudpickle sends their code. A function or class of the script itself has one, and stays a reference,
because the other workers run the same script: cloudpickle alone would send its code and all that it refers to.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.rpc import unpicklable
from phalanx.rpc.pickling import Writer
from phalanx.rpc.reducing import Reducer, Table

__all__ = ["encode"]


def encode(
    value: Any,
    reducers: Mapping[type, Reducer] | None,
    restart: Callable[[], None] | None,
    names: Sequence[str],
    error: Exception,
) -> tuple[bytes, list[memoryview]]:
    """Encode a value that plain pickle has refused.

    Args:
        value, reducers, restart, names: see ``encoding.encode``.
        error: what pickle said.
    """
    try:
        pickler, table = _with_cloudpickle()
    except ImportError:
        has_cloudpickle = False
        pickler, table = pickle.Pickler, Table
    else:
        has_cloudpickle = True
        try:
            return Writer(pickler, table()).write(value, reducers, restart)
        except PhalanxError:
            raise
        except Exception as second:
            error = second

    def attempt(part: Any) -> Exception | None:
        try:
            Writer(pickler, table()).write(part, reducers, None)
        except Exception as why:
            return why
        return None

    try:
        raise unpicklable.explained(value, names, attempt, error, has_cloudpickle) from error
    finally:
        if restart is not None:
            restart()


def _with_cloudpickle() -> tuple[Callable[..., pickle.Pickler], Callable[[], Table]]:
    import cloudpickle

    class ClosurePickler(cloudpickle.Pickler):  # type: ignore[misc]
        # Pickle's own attribute, which cloudpickle's class has hidden by a table of that name.
        dispatch_table = pickle.Pickler.dispatch_table

        def reducer_override(self, obj: Any) -> Any:
            if _of_script(obj):
                return NotImplemented
            return super().reducer_override(obj)

    class ClosureTable(Table):
        others = cloudpickle.Pickler.dispatch_table

    return ClosurePickler, ClosureTable


def _of_script(value: Any) -> bool:
    """Whether a value is a function or class of the script that this process runs, and can be found there by name."""
    if getattr(value, "__module__", None) != "__main__" or not hasattr(value, "__qualname__"):
        return False
    found: Any = sys.modules.get("__main__")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value
