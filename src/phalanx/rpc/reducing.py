"""What of a tensor goes into a message: its description into the pickle, and the memory it lies in beside it.

Memory is found by its address. A tensor is sent with the memory that its own elements span, so a row of a large batch
costs a row. Tensors of one message that overlap in memory are found when all have been seen, and then the value is
pickled again, with the memory that they have in common sent once: at the other side they overlap as they did here.
"""

from __future__ import annotations

import copyreg
import ctypes
import operator
import pickle
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from phalanx.errors import EncodingError
from phalanx.rpc import rebuilding
from phalanx.rpc.rebuilding import ALIGNMENT, CONJUGATE, DTYPE_NAMES, NEGATIVE, PACKED, REQUIRES_GRAD

__all__ = ["Reduced", "Reducer", "Region", "Table", "elements_of", "regions_in_common"]

Reduced: TypeAlias = tuple[Any, ...]
Reducer: TypeAlias = "Callable[[Any], Any]"

# Stands in the pickle for the memory of a tensor. It must be writable, or pickle would mark what arrives as read-only.
MARK = pickle.PickleBuffer(bytearray(1))
# A tensor whose elements are spread over more than this many times their own size is sent as a contiguous copy.
SPREAD = 2

_BYTE = np.dtype("u1")
_CPU = 0  # the address space of the CPU, among those of storages on other devices
_READ_AND_WRITE = 0x200
_memoryview_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_memoryview_at.restype = ctypes.py_object


# Elements are copied as these, because torch copies no element of some dtypes (int1, for instance).
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class _Held(np.ndarray[Any, Any]):
    """Memory, and what keeps it alive. ``Tensor.numpy()`` would do, but it forbids the tensor ever to be resized."""

    owner: object


def memory_of(owner: object, address: int, nbytes: int) -> memoryview:
    """Memory of the CPU as a buffer of bytes that keeps its owner alive."""
    held = _Held((nbytes,), _BYTE, _memoryview_at(address, nbytes, _READ_AND_WRITE))
    held.owner = owner
    return memoryview(held)


# A piece of memory to send: its owner, address and size, or a tensor that is copied to the host when all were seen.
Source: TypeAlias = "tuple[object, int, int] | torch.Tensor"


class Region:
    """Memory of one or several tensors, which is sent once.

    Attributes:
        space: ``_CPU``, or the storage on another device.
        low, high: the bytes, as addresses of the CPU or counted from the beginning of the storage.
        source: the memory.
        device: empty for the CPU.
    """

    def __init__(self, space: int, low: int, high: int, owners: Sequence[torch.Tensor]) -> None:
        first = owners[0]
        storage = first.untyped_storage()
        base = storage.data_ptr() if space == _CPU else 0
        # A multiple of the alignment, counted from the storage, so that the offsets of tensors of all dtypes fit.
        low = base + (low - base) // ALIGNMENT * ALIGNMENT
        self.space, self.low, self.high = space, low, high
        self.source: Source
        if space == _CPU:
            self.source, self.device = (owners, low, high - low), ""
        else:
            # The bytes are copied as such, whatever their dtype.
            content = torch.empty(0, dtype=torch.uint8, device=first.device)
            self.source, self.device = content.set_(storage, low, (high - low,), (1,)), str(first.device)


Span: TypeAlias = tuple[int, int, int, torch.Tensor]


def regions_in_common(spans: list[Span]) -> list[Region]:
    """The regions that more than one tensor lies in, by address."""
    spans.sort(key=operator.itemgetter(0, 1))
    regions: list[Region] = []
    space, low, high, owner = spans[0]
    owners = [owner]
    for next_space, next_low, next_high, owner in (*spans[1:], (-1, 0, 0, spans[0][3])):
        if next_space == space and next_low < high:
            high = max(high, next_high)
            owners.append(owner)
            continue
        if len(owners) > 1:
            regions.append(Region(space, low, high, owners))
        space, low, high, owners = next_space, next_low, next_high, [owner]
    return regions


class Table(dict[type, Reducer]):
    """The dispatch table of one pickling: how objects of a type are taken apart, and the tensors seen so far.

    A reducer is entered when its type is first met, because most messages have no object that needs one. The reducers
    refer to the table, so it must be reset after use, or the garbage collector would have to find it.

    Attributes:
        others: the reducers of types that this file does not know.
        regions: the memory that tensors of the message have in common, as far as it is known.
        sources: the memory beside the message, in the order of the marks in it.
        spans: where each tensor lies that was sent with memory of its own.
    """

    others: Mapping[type, Reducer] = copyreg.dispatch_table
    regions: Sequence[Region] = ()

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.spans: list[Span] = []

    def __missing__(self, kind: type) -> Reducer:
        reducer: Reducer
        if (usual := _USUAL.get(kind)) is not None:
            reducer = usual.__get__(self)
        elif issubclass(kind, type):
            raise KeyError(kind)  # a class of classes: pickle refers to those by name
        else:
            reducer = self.others.get(kind) or _by_itself
        self[kind] = reducer
        return reducer

    def reset(self) -> None:
        """Forget everything, for the next pickling."""
        self.clear()
        if self.sources or self.spans:
            self.sources, self.spans = [], []
        self.regions = ()

    def use(self, reducers: Mapping[type, Reducer]) -> None:
        """Ask these reducers first; where one returns ``NotImplemented``, the usual one is asked."""
        for kind, reducer in reducers.items():
            if (usual := _USUAL.get(kind)) is not None:
                otherwise = usual.__get__(self)
            else:
                otherwise = self.others.get(kind) or _by_itself
            self[kind] = _first_of(reducer, otherwise)

    def buffers(self, found: Sequence[pickle.PickleBuffer]) -> list[memoryview]:
        """The memory beside the message: that of tensors in the place of their marks, and that of other objects."""
        sources = iter(self.sources)
        return [_content(next(sources)) if buffer is MARK else buffer.raw() for buffer in found]

    def _tensor(self, tensor: torch.Tensor) -> Reduced:
        reduced = self._plain(tensor)
        if tensor.__dict__:
            return _with_attributes(tensor, reduced)
        return reduced

    def _plain(self, tensor: torch.Tensor) -> Reduced:
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return self._unusual(tensor)
        flags = _flags(tensor)
        nbytes = tensor.nbytes
        if not nbytes:
            return _empty(tensor, flags)
        low = tensor.data_ptr()
        in_order = tensor.is_contiguous()
        span = nbytes if in_order else _span(tensor)
        _check_memory(tensor, span)
        if self.regions and (region := self._region(_CPU, low, tensor.itemsize)):
            return _in_region(region, tensor, low - region.low, flags)
        self.spans.append((_CPU, low, low + span, tensor))
        if in_order and flags <= REQUIRES_GRAD:
            self.sources.append((tensor, low, nbytes))
        elif span > SPREAD * nbytes:
            self.sources.append(tensor)
            flags &= REQUIRES_GRAD
        else:
            return _in_region(own := Region(_CPU, low, low + span, [tensor]), tensor, low - own.low, flags)
        rebuild = rebuilding.contiguous_with_grad if flags else rebuilding.contiguous
        return rebuild, (MARK, DTYPE_NAMES[tensor.dtype], *tensor.shape)

    def _unusual(self, tensor: torch.Tensor) -> Reduced:
        """A tensor that is not a plain one of the CPU."""
        if tensor.is_meta or tensor.is_nested:
            return _by_itself(tensor)
        flags = _flags(tensor)
        bare = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            parts = bare._indices(), bare._values(), tuple(bare.shape), bare.is_coalesced()
            return rebuilding.sparse_coo, (*parts, flags)
        if tensor.layout is not torch.strided:
            return rebuilding.sparse_compressed, (*_compressed(bare), tuple(bare.shape), flags)
        if not torch._C._has_storage(tensor):
            return rebuilding.on_device, (bare.cpu(), str(tensor.device), flags)
        if not tensor.nbytes:
            return _empty(tensor, flags)
        if tensor.is_quantized:
            return _quantized(tensor)
        low, span = int(tensor.storage_offset()) * tensor.itemsize, _span(tensor)
        _check_memory(tensor, span)
        space = tensor.untyped_storage()._cdata
        region = self._region(space, low, tensor.itemsize)
        if region is None:
            self.spans.append((space, low, low + span, tensor))
            if span > SPREAD * tensor.nbytes:
                bare, low, flags = bare.contiguous().resolve_conj().resolve_neg(), 0, flags & REQUIRES_GRAD
                space, span = bare.untyped_storage()._cdata, bare.nbytes
            region = Region(space, low, low + span, [bare])
        return _in_region(region, bare, low - region.low, flags)

    def _region(self, space: int, low: int, itemsize: int) -> Region | None:
        """The common region that a tensor lies in."""
        at = bisect_right(self.regions, (space, low), key=lambda region: (region.space, region.low)) - 1
        if at < 0:
            return None
        region = self.regions[at]
        inside = region.space == space and low < region.high and not (low - region.low) % itemsize
        return region if inside else None

    def _in_parameter(self, tensor: torch.nn.Parameter) -> Reduced:
        reduced = rebuilding.parameter, (tensor.data, tensor.requires_grad)
        return _with_attributes(tensor, reduced) if tensor.__dict__ else reduced

    def _untyped_storage(self, storage: torch.UntypedStorage) -> Reduced:
        if storage.device.type == "meta":
            return _by_itself(storage)
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return rebuilding.untyped_storage, (content,)

    def _typed_storage(self, storage: torch.TypedStorage) -> Reduced:
        return rebuilding.typed_storage, (storage._untyped_storage, DTYPE_NAMES[storage.dtype])

    def _memory(self, region: Region) -> Reduced:
        self.sources.append(region.source)
        return rebuilding.memory, (MARK, region.device)


_USUAL: dict[type, Any] = {
    torch.Tensor: Table._tensor,
    torch.nn.Parameter: Table._in_parameter,
    torch.UntypedStorage: Table._untyped_storage,
    torch.TypedStorage: Table._typed_storage,
    Region: Table._memory,
}
_by_itself: Callable[[Any], Reduced] = operator.methodcaller("__reduce_ex__", pickle.HIGHEST_PROTOCOL)


def _first_of(reducer: Reducer, otherwise: Reducer) -> Reducer:
    def reduce(value: Any) -> Any:
        reduced = reducer(value)
        return otherwise(value) if reduced is NotImplemented else reduced

    return reduce


def _content(source: Source) -> memoryview:
    return elements_of(source) if isinstance(source, torch.Tensor) else memory_of(*source)


def elements_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a strided tensor with memory, in order; its own memory, if it is so on the CPU."""
    _check_memory(tensor, _span(tensor))
    plain = tensor.detach().resolve_conj().resolve_neg()
    host = plain.view(_SAME_SIZE[plain.itemsize]).cpu().contiguous()
    return memory_of(host, host.data_ptr(), host.nbytes)


def _with_attributes(tensor: torch.Tensor, reduced: Reduced) -> Reduced:
    if len(reduced) > 2:
        return reduced  # torch's own reducer has seen to them
    return (*reduced, tensor.__dict__, None, None, rebuilding.set_attributes)


def _flags(tensor: torch.Tensor) -> int:
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if tensor.is_conj():
        flags |= CONJUGATE
    if tensor.is_neg():
        flags |= NEGATIVE
    return flags


def _span(tensor: torch.Tensor) -> int:
    """How many bytes there are from the first element to the end of the last."""
    last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _check_memory(tensor: torch.Tensor, span: int) -> None:
    end = tensor.storage_offset() * tensor.itemsize + span
    if tensor.untyped_storage().nbytes() < end:
        raise EncodingError.freed(tuple(tensor.shape))


def _in_region(region: Region, tensor: torch.Tensor, nbytes: int, flags: int) -> Reduced:
    offset = nbytes // tensor.itemsize
    description = DTYPE_NAMES[tensor.dtype], offset, tuple(tensor.shape), tensor.stride(), flags
    return rebuilding.strided, (region, *description)


def _empty(tensor: torch.Tensor, flags: int) -> Reduced:
    device = "" if tensor.is_cpu else str(tensor.device)
    return rebuilding.empty, (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), device, flags)


def _compressed(tensor: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]:
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return layout, tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return layout, tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _quantized(tensor: torch.Tensor) -> Reduced:
    packed = tensor.dtype in PACKED
    if packed:
        tensor = tensor.contiguous()
    storage = tensor.untyped_storage()
    low, span = (0, storage.nbytes()) if packed else (tensor.storage_offset() * tensor.itemsize, _span(tensor))
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, low, (span,), (1,))
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scheme: Reduced = tensor.q_scale(), tensor.q_zero_point(), None
    else:
        scheme = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()
    return rebuilding.quantized, (content, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), *scheme)
