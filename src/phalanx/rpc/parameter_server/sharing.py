"""Share the parameters of a model out over servers: by size, large ones cut by rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Piece", "shared_out"]


class Piece(NamedTuple):
    """Some rows of a parameter, which one server has.

    Attributes:
        parameter: the number of the parameter in the model.
        first, end: its rows (indices of the first dimension); 0 and 1 for a parameter without dimensions.
        sparse: whether its gradients are those of a few rows, as ``nn.Embedding(sparse=True)`` makes them.
    """

    parameter: int
    first: int
    end: int
    sparse: bool


def shared_out(shapes: Sequence[Sequence[int]], sparse: Sequence[bool], servers: int) -> list[list[Piece]]:
    """The pieces of each server. Every worker computes the same from the same shapes.

    A parameter with more elements than one server's share is cut into as many pieces as there are servers, if it has
    the rows for it. Then the largest piece that is left goes to the server that has the least.
    """
    sizes = [math.prod(shape) for shape in shapes]
    share = sum(sizes) / servers
    pieces: list[tuple[int, Piece]] = []
    for number, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        rows = shape[0] if len(shape) else 1
        parts = min(servers, max(1, rows)) if size > share else 1
        row = size // max(1, rows)
        for part in range(parts):
            first, end = rows * part // parts, rows * (part + 1) // parts
            pieces.append(((end - first) * row, Piece(number, first, end, sparse[number])))
    found: list[list[Piece]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for size, piece in sorted(pieces, key=lambda each: (-each[0], each[1])):
        least = loads.index(min(loads))
        found[least].append(piece)
        loads[least] += size
    return [sorted(each) for each in found]
