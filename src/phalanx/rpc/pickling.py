"""Pickling values, with the memory of their tensors beside them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.rpc import large_heads
from phalanx.rpc.reducing import Reducer, Region, Table, regions_in_common

__all__ = ["Writer"]


class Writer:
    """A pickler with what it needs. Made once for many values, because making it takes longer than a small value does.

    Args:
        pickler: makes the pickler, from a file, the protocol and a callback for buffers.
        table: its dispatch table, which belongs to it alone.
    """

    def __init__(self, pickler: Callable[..., pickle.Pickler], table: Table) -> None:
        self._table = table
        self._found: list[pickle.PickleBuffer] = []
        self._chunks = large_heads.Chunks()
        self._pickler = pickler(self._chunks, 5, buffer_callback=self._found.append)
        self._pickler.dispatch_table = table

    def write(
        self,
        value: Any,
        reducers: Mapping[type, Reducer] | None,
        restart: Callable[[], None] | None,
        regions: Sequence[Region] = (),
    ) -> tuple[bytes, list[memoryview]]:
        """A value as a head and buffers. After an exception the writer is not to be used again.

        Args:
            value, reducers, restart: see ``encoding.encode``.
            regions: the memory that tensors of the value have in common, as a first pickling has found it.
        """
        table, found, chunks = self._table, self._found, self._chunks
        if reducers:
            table.use(reducers)
        if regions:
            table.regions = regions
        try:
            self._pickler.dump(value)
            self._pickler.clear_memo()
            common = regions_in_common(table.spans) if len(table.spans) > 1 and not regions else ()
            buffers = table.buffers(found) if found and not common else []
        finally:
            table.reset()
            found.clear()
        if common:
            chunks.clear()
            if restart is not None:
                restart()
            return self.write(value, reducers, restart, common)
        written = (chunks[0], buffers) if len(chunks) == 1 else large_heads.put_together(chunks, buffers)
        chunks.clear()
        return written
