"""Tensors in messages: a description within the pickle, and their memory beside it.

The first half takes tensors apart. A tensor is sent with the memory that its own elements span, so a row of a large
batch costs a row. The second half builds them over received memory. A pickle refers to its functions by numbers of
:mod:`copyreg`, which pickle resolves several times faster than names. What they are given comes from a process that has
proven the job's key and may have a fault: torch refuses shapes, strides and offsets that reach outside of the memory,
because memory that somebody else owns cannot be resized.
"""

from __future__ import annotations

import copyreg
import ctypes
import math
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from phalanx.errors import EncodingError

__all__ = ["DTYPES", "DTYPE_NAMES", "QUANTIZED", "Reducer", "Table", "elements_of"]

Reduced: TypeAlias = tuple[Any, ...]
Reducer: TypeAlias = "Callable[[Any], Any]"
# A piece of memory to send: its owner, address and size, or a tensor whose elements are copied when all were seen.
Source: TypeAlias = "tuple[object, int, int] | torch.Tensor"

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
# A tensor of these needs a scale: without one, torch's own methods read where there is nothing.
QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})

# Stands in the pickle for the memory of a tensor. It must be writable, or pickle would mark what arrives as read-only.
_MARK = pickle.PickleBuffer(bytearray(1))
# A tensor whose elements are spread over more than this many times their own size is sent as a contiguous copy.
_SPREAD = 2
# Elements are copied as these, because torch copies no element of some dtypes (int1, for instance).
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_BYTE = np.dtype("u1")
_READ_AND_WRITE = 0x200
_memoryview_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_memoryview_at.restype = ctypes.py_object


class _Held(np.ndarray[Any, Any]):
    """Memory, and what keeps it alive. ``Tensor.numpy()`` would do, but it forbids the tensor ever to be resized."""

    owner: object


def _memory_of(owner: object, address: int, nbytes: int) -> memoryview:
    held = _Held((nbytes,), _BYTE, _memoryview_at(address, nbytes, _READ_AND_WRITE))
    held.owner = owner
    return memoryview(held)


def elements_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a strided tensor in order; its own memory, if it is so on the CPU."""
    _check_memory(tensor, _span(tensor))
    plain = tensor.detach().resolve_conj().resolve_neg()
    host = plain.view(_SAME_SIZE[plain.itemsize]).cpu().contiguous()
    return _memory_of(host, host.data_ptr(), host.nbytes)


class Table(dict[type, Reducer]):
    """Dispatch table of one pickling: how objects of a type are taken apart, and the memory of the tensors so far.

    A reducer is entered when its type is first met, because most messages have no object that needs one. The reducers
    refer to the table, so it must be reset after use, or the garbage collector would have to find it.

    Args:
        others: the reducers of types that this file does not know.
    """

    def __init__(self, others: Mapping[type, Reducer] = copyreg.dispatch_table) -> None:
        self._others = others
        self._sources: list[Source] = []  # in the order of the marks

    def __missing__(self, kind: type) -> Reducer:
        if issubclass(kind, type):
            raise KeyError(kind)  # a class of classes: pickle refers to those by name
        self[kind] = reducer = self._usual(kind)
        return reducer

    def _usual(self, kind: type) -> Reducer:
        own = _OWN.get(kind)
        return own.__get__(self) if own is not None else self._others.get(kind) or _by_itself

    def reset(self) -> None:
        """Forget everything, for the next pickling."""
        self.clear()
        self._sources = []

    def use(self, reducers: Mapping[type, Reducer]) -> None:
        """Ask these reducers first; where one returns ``NotImplemented``, the usual one is asked."""
        for kind, reducer in reducers.items():
            self[kind] = _first_of(reducer, self._usual(kind))

    def buffers(self, found: Sequence[pickle.PickleBuffer]) -> list[memoryview]:
        """Return the memory beside the message: that of tensors in the place of their marks, and of other objects."""
        sources = iter(self._sources)
        return [_content(next(sources)) if buffer is _MARK else buffer.raw() for buffer in found]

    def _tensor(self, tensor: torch.Tensor) -> Reduced:
        reduced = self._plain(tensor)
        if tensor.__dict__ and len(reduced) == 2:  # else torch's own reducer has seen to them
            return _with_attributes(tensor, reduced)
        return reduced

    def _plain(self, tensor: torch.Tensor) -> Reduced:
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return _unusual(tensor)
        nbytes, dtype, wants_gradient = tensor.nbytes, DTYPE_NAMES[tensor.dtype], tensor.requires_grad
        if not nbytes:
            return empty, (dtype, tuple(tensor.shape), tensor.stride(), wants_gradient)
        low, is_plain = tensor.data_ptr(), not (tensor.is_conj() or tensor.is_neg())
        in_order = tensor.is_contiguous()
        span = nbytes if in_order else _span(tensor)
        _check_memory(tensor, span)
        if in_order and is_plain:
            self._sources.append((tensor, low, nbytes))
        elif is_plain and span <= _SPREAD * nbytes:
            self._sources.append((tensor, low, span))
            return strided, (_MARK, dtype, tuple(tensor.shape), tensor.stride(), wants_gradient)
        else:
            self._sources.append(tensor)
        return contiguous_with_grad if wants_gradient else contiguous, (_MARK, dtype, *tensor.shape)

    def _parameter(self, tensor: torch.nn.Parameter) -> Reduced:
        reduced = parameter, (tensor.data, tensor.requires_grad)
        return _with_attributes(tensor, reduced) if tensor.__dict__ else reduced

    def _untyped_storage(self, storage: torch.UntypedStorage) -> Reduced:
        if storage.device.type == "meta":
            return _by_itself(storage)
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return untyped_storage, (content,)

    def _typed_storage(self, storage: torch.TypedStorage) -> Reduced:
        return typed_storage, (storage._untyped_storage, DTYPE_NAMES[storage.dtype])


_OWN: dict[type, Any] = {
    torch.Tensor: Table._tensor,
    torch.nn.Parameter: Table._parameter,
    torch.UntypedStorage: Table._untyped_storage,
    torch.TypedStorage: Table._typed_storage,
}
_by_itself: Callable[[Any], Reduced] = operator.methodcaller("__reduce_ex__", pickle.HIGHEST_PROTOCOL)


def _first_of(reducer: Reducer, otherwise: Reducer) -> Reducer:
    def reduce(value: Any) -> Any:
        reduced = reducer(value)
        return otherwise(value) if reduced is NotImplemented else reduced

    return reduce


def _content(source: Source) -> memoryview:
    return elements_of(source) if isinstance(source, torch.Tensor) else _memory_of(*source)


def _with_attributes(tensor: torch.Tensor, reduced: Reduced) -> Reduced:
    return (*reduced, tensor.__dict__, None, None, set_attributes)


def _unusual(tensor: torch.Tensor) -> Reduced:
    """Take a tensor apart that is not a plain one of the CPU."""
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return _by_itself(tensor)
    bare, wants_gradient = tensor.detach(), tensor.requires_grad
    if not tensor.is_cpu:
        return on_device, (bare.cpu(), str(tensor.device), wants_gradient)
    shape = tuple(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        return sparse_coo, (bare._indices(), bare._values(), shape, bare.is_coalesced(), wants_gradient)
    layout = str(tensor.layout).removeprefix("torch.")
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (bare.crow_indices(), bare.col_indices()) if by_row else (bare.ccol_indices(), bare.row_indices())
    return sparse_compressed, (layout, *indices, bare.values(), shape, wants_gradient)


def _span(tensor: torch.Tensor) -> int:
    """Count the bytes from the first element to the end of the last."""
    last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _check_memory(tensor: torch.Tensor, span: int) -> None:
    end = tensor.storage_offset() * tensor.itemsize + span
    if tensor.untyped_storage().nbytes() < end:
        raise EncodingError.freed(tuple(tensor.shape))


# -- what arrives ----------------------------------------------------------------------------------


def contiguous(buffer: memoryview, dtype: str, *shape: int) -> torch.Tensor:
    """Build a tensor over a received buffer that holds exactly its elements, in order.

    Args:
        buffer: the memory. It is used in place, and lives as long as the tensor.
        dtype: a key of ``DTYPES``.
        shape: at least one element.

    Raises:
        EncodingError: the buffer is of another size.
    """
    element = _dtype(dtype)
    tensor = _over(buffer, element)
    if buffer.nbytes != math.prod(shape) * element.itemsize:
        raise EncodingError.damaged(f"{buffer.nbytes} bytes for a tensor of the shape {shape!r} and {element}")
    return tensor if len(shape) == 1 else tensor.view(shape)


def contiguous_with_grad(buffer: memoryview, dtype: str, *shape: int) -> torch.Tensor:
    """Build a tensor as :func:`contiguous` does, for which gradients are wanted."""
    return contiguous(buffer, dtype, *shape).requires_grad_()


def strided(
    buffer: memoryview, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], wants_gradient: bool
) -> torch.Tensor:
    """Build a tensor that does not lie in order, but begins where its memory does."""
    memory = _over(buffer, _dtype(dtype))
    tensor = torch.empty(0, dtype=memory.dtype).set_(memory.untyped_storage(), 0, shape, stride)
    return tensor.requires_grad_(wants_gradient)


def empty(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], wants_gradient: bool) -> torch.Tensor:
    """Make a tensor without elements."""
    if 0 not in shape:
        raise EncodingError.damaged(f"a tensor without elements of the shape {shape!r}")
    return torch.empty_strided(shape, stride, dtype=_dtype(dtype)).requires_grad_(wants_gradient)


def sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool, wants_gradient: bool
) -> torch.Tensor:
    """Make a sparse tensor of coordinates; torch checks that the indices are inside of its shape."""
    made = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)
    return made.requires_grad_(wants_gradient)


def sparse_compressed(
    layout: str,
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    wants_gradient: bool,
) -> torch.Tensor:
    """Make a tensor of one of the compressed layouts (CSR, CSC, BSR, BSC); torch checks that its indices fit."""
    found: torch.layout = getattr(torch, layout)
    made = torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=found, check_invariants=True)
    return made.requires_grad_(wants_gradient)


def parameter(data: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """Make a parameter over its data."""
    return torch.nn.Parameter(data, requires_grad)


def on_device(tensor: torch.Tensor, device: str, wants_gradient: bool) -> torch.Tensor:
    """Move a tensor to its device: it has travelled as one of the CPU."""
    return tensor.detach().to(device_here(device)).requires_grad_(wants_gradient)


def untyped_storage(content: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of these bytes."""
    return content.untyped_storage()


def typed_storage(storage: torch.UntypedStorage, dtype: str) -> torch.TypedStorage:
    """Make a storage of elements of a dtype."""
    return torch.TypedStorage(wrap_storage=storage, dtype=DTYPES[dtype], _internal=True)  # type: ignore[no-untyped-call]


def set_attributes(tensor: torch.Tensor, attributes: Mapping[str, Any]) -> None:
    """Give a tensor the attributes that a program gave to the one that was sent."""
    tensor.__dict__.update(attributes)


def device_here(name: str) -> torch.device:
    """Return a device of this process.

    Raises:
        EncodingError: this process has none of that name.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise EncodingError.no_such_device(name, str(error).partition("\n")[0]) from error
    return device


def _dtype(name: str) -> torch.dtype:
    dtype = DTYPES.get(name)
    if dtype is None or dtype in QUANTIZED:
        raise EncodingError.damaged(f"a tensor of the dtype {name!r}, which torch {torch.__version__} does not have")
    return dtype


def _over(buffer: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Build a tensor of one dimension over all of a buffer.

    Kernels rely on elements that begin at a multiple of their size, so a buffer that does not is copied.
    """
    if buffer.readonly:
        buffer = memoryview(bytearray(buffer))
    tensor = torch.frombuffer(buffer, dtype=dtype)
    return tensor.clone() if tensor.data_ptr() % dtype.itemsize else tensor


# Numbers for these functions, in a range that copyreg leaves free. All workers of a job run the same release.
for _number, _function in enumerate(
    (
        contiguous,
        contiguous_with_grad,
        strided,
        empty,
        sparse_coo,
        sparse_compressed,
        parameter,
        on_device,
        untyped_storage,
        typed_storage,
        set_attributes,
    )
):
    copyreg.add_extension(__name__, _function.__name__, 0xA110 + _number)
