"""One pickling of a value, with the memory of its tensors beside it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.rpc import large_heads
from phalanx.rpc.reducing import Reducer, Region, Table, regions_in_common

__all__ = ["pickled"]


def pickled(
    pickler: Callable[..., pickle.Pickler],
    new_table: Callable[[], Table],
    value: Any,
    reducers: Mapping[type, Reducer] | None,
    restart: Callable[[], None] | None,
    regions: Sequence[Region] = (),
) -> tuple[bytes, list[memoryview]]:
    """A value as a head and buffers.

    Args:
        pickler: makes the pickler, from a file, the protocol and a callback for buffers.
        new_table: makes its dispatch table.
        value, reducers, restart: see ``encoding.encode``.
        regions: the memory that tensors of the value have in common, as a first pickling has found it.
    """
    found: list[pickle.PickleBuffer] = []
    chunks = large_heads.Chunks()
    table = new_table()
    if reducers:
        table.use(reducers)
    if regions:
        table.regions = regions
    writer = pickler(chunks, 5, buffer_callback=found.append)
    writer.dispatch_table = table
    try:
        writer.dump(value)
    finally:
        table.clear()
    if len(table.spans) > 1 and not regions and (common := regions_in_common(table.spans)):
        if restart is not None:
            restart()
        return pickled(pickler, new_table, value, reducers, restart, common)
    buffers = table.buffers(found) if found else []
    return (chunks[0], buffers) if len(chunks) == 1 else large_heads.put_together(chunks, buffers)
