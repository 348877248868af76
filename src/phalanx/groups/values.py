"""Numbers, tensors and nests of them, reduced or gathered over the ranks of a group into new values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phalanx.c10d.torch_versions import function
from phalanx.errors import ArgumentError, UnsupportedTensor
from phalanx.groups.objects import ObjectCalls

__all__ = ["ValueCalls"]

Value = TypeVar("Value")
Leaves = dict[str, Any]  # numbers and tensors by where they stand in the value, as ``['loss'][0]``


class ValueCalls(ObjectCalls):
    """The methods of a group that take a *value*: a number, a tensor, or a dict, list or tuple of values.

    They return a new value of the same form, the same on every rank, and leave the one that was given as it is. The
    order of a dict's keys does not matter. Whole numbers stay whole and are exact up to 2**53. Every rank must call,
    with a value of the same form and with tensors of the same dtype and shape.

    All methods raise:
        ArgumentError: the forms differ (on every rank, with the differences), or the value has something else in it.
    """

    def sum(self, value: Value) -> Value:
        """The sum over all ranks: ``world.sum({"correct": correct, "seen": len(labels)})``."""
        return self._reduced("sum", value, dist.ReduceOp.SUM)

    def mean(self, value: Value) -> Any:
        """The mean over all ranks, each counting the same: ``world.mean({"loss": loss})``.

        Numbers become floats, and tensors of whole numbers become floating point. If the ranks' values stand for
        different numbers of items, take :meth:`sum` of totals and of counts and divide.
        """
        total = self._reduced("mean", value, dist.ReduceOp.SUM)
        return _rebuilt(total, {place: leaf / self.size for place, leaf in _leaves("mean", total)})

    def max(self, value: Value) -> Value:
        """The largest over all ranks; of tensors, element by element."""
        return self._reduced("max", value, dist.ReduceOp.MAX)

    def min(self, value: Value) -> Value:
        """The smallest over all ranks; of tensors, element by element."""
        return self._reduced("min", value, dist.ReduceOp.MIN)

    def gather_for_metrics(self, value: Any) -> Any:
        """All ranks' values in one: tensors are joined along their first dimension, in rank order, on every rank.

        ``predictions, labels = world.gather_for_metrics((predictions, labels))`` after each batch of ``world.loader``
        has every item of the dataset exactly once: no batch is padded, so there are no duplicates to drop. With
        ``shuffle=False`` they are in the order of the dataset (for an ``IterableDataset``, within each global batch in
        rank order). Numbers and tensors without dimensions become tensors with one entry for each rank.

        Args:
            value: the tensors may have different first dimensions on different ranks; the others must agree.
        """
        leaves = {place: self._rows(leaf) for place, leaf in _leaves("gather_for_metrics", value)}
        self._agree("gather_for_metrics", [f"{p} {leaf.dtype} {list(leaf.shape[1:])}" for p, leaf in leaves.items()])
        device = self._device_of_numbers()
        own = torch.tensor([len(leaf) for leaf in leaves.values()], device=device)
        counts = torch.empty(self.size * len(leaves), dtype=own.dtype, device=device)
        if leaves:
            function("all_gather_single")(counts, own, group=self._use(own))
        joined = {}
        for (place, leaf), rows in zip(leaves.items(), counts.view(self.size, -1).T.tolist(), strict=True):
            most = max(rows)
            padded = leaf.new_zeros((most, *leaf.shape[1:]))
            padded[: len(leaf)] = leaf
            gathered = leaf.new_empty((self.size * most, *leaf.shape[1:]))
            if gathered.numel():
                function("all_gather_single")(gathered, padded, group=self._use(padded))
            parts = gathered.view(self.size, most, *leaf.shape[1:])
            joined[place] = torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])
        return _rebuilt(value, joined)

    def _rows(self, leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, torch.Tensor):
            leaf = torch.tensor(leaf, device=self._device_of_numbers())
        self._use(leaf)
        rows: torch.Tensor = leaf.detach().reshape(-1) if leaf.dim() == 0 else leaf.detach()
        return rows

    def _reduced(self, call: str, value: Value, op: Any) -> Value:
        leaves = dict(_leaves(call, value))
        tensors = {place: leaf for place, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        self._use(*tensors.values())
        numbers = {place: leaf for place, leaf in leaves.items() if place not in tensors}
        self._agree(
            call,
            [
                f"{place} {f'{leaf.dtype} {list(leaf.shape)}' if place in tensors else 'number'}"
                for place, leaf in leaves.items()
            ],
        )
        results = self._reduced_numbers(numbers, op) if numbers else {}
        for place, tensor in tensors.items():
            whole = tensor.detach().clone(memory_format=torch.contiguous_format)
            if whole.dtype == torch.bool and op == dist.ReduceOp.SUM:
                whole = whole.long()
            dist.all_reduce(whole, op=op, group=self._use(whole))
            results[place] = whole
        return _rebuilt(value, results)  # type: ignore[no-any-return]

    def _reduced_numbers(self, numbers: Leaves, op: Any) -> Leaves:
        # Beside each number travels whether some rank's is not whole: a total that is still 0 on one rank may be 0.5 on
        # another. The mark is the one that this reduction lets win.
        mark = -1.0 if op == dist.ReduceOp.MIN else 1.0
        marks = [0.0 if isinstance(number, Integral) else mark for number in numbers.values()]
        sent = torch.tensor(
            [*map(float, numbers.values()), *marks], dtype=torch.float64, device=self._device_of_numbers()
        )
        dist.all_reduce(sent, op=op, group=self._use(sent))
        reduced, fractions = sent.view(2, -1).tolist()
        return {
            place: number if fraction or not math.isfinite(number) else int(number)
            for place, number, fraction in zip(numbers, reduced, fractions, strict=True)
        }

    def _agree(self, call: str, form: list[str]) -> None:
        """Compare the forms of the ranks' values, because their leaves travel without their names."""
        if self.size == 1:
            return
        digest = int.from_bytes(hashlib.blake2b("\n".join(form).encode(), digest_size=7).digest(), "big")
        ends = torch.tensor([digest, -digest], device=self._device_of_numbers())
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._use(ends))
        largest, smallest = ends.tolist()
        if largest == -smallest:
            return
        forms = self.all_gather_object(form)
        common = set.intersection(*map(set, forms))
        lines = [
            f"rank {rank}: {', '.join(entry for entry in theirs if entry not in common) or 'nothing more'}"
            for rank, theirs in enumerate(forms)
        ]
        raise ArgumentError(f"{call}: the ranks gave different values:\n" + "\n".join(lines))


def _leaves(call: str, value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and tensors in a value, in an order that does not depend on the order of a dict's keys."""
    if isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield from _leaves(call, value[key], f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _leaves(call, entry, f"{place}[{index}]")
    elif isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_nested or value.is_quantized):
        raise UnsupportedTensor(
            f"{call} takes strided tensors, neither nested nor quantized; got one of {value.dtype}, {value.layout}. "
            f"Convert it, as by .to_dense(), .dequantize() or torch.nested.to_padded_tensor()"
        )
    elif isinstance(value, (Real, torch.Tensor)):
        yield place, value
    else:
        at = f" at {place}" if place else ""
        raise ArgumentError(
            f"{call} takes numbers, tensors, and dicts, lists and tuples of them; got a {type(value).__name__}{at}. "
            f"Other objects are gathered by all_gather_object()"
        )


def _rebuilt(value: Any, leaves: Leaves, place: str = "") -> Any:
    """A value of the same form with other leaves."""
    if isinstance(value, dict):
        return {key: _rebuilt(entry, leaves, f"{place}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_rebuilt(entry, leaves, f"{place}[{index}]") for index, entry in enumerate(value)]
        make: Callable[..., Any] = getattr(type(value), "_make", type(value))  # a named tuple is made by its _make
        return make(entries)
    return leaves[place]
