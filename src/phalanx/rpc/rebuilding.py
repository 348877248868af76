"""Tensors over received memory, and the checks before a tensor is built on it.

A pickle refers to the functions of this file by numbers of :mod:`copyreg`, which pickle resolves several times faster
than names. What they are given comes from another process. It has proven the job's key, but it may have a fault: a
shape, stride or offset that reaches outside of the memory is refused before there is a tensor that could read there.
"""

from __future__ import annotations

import copyreg
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.errors import EncodingError

__all__ = [
    "ALIGNMENT",
    "CONJUGATE",
    "DTYPES",
    "DTYPE_NAMES",
    "NEGATIVE",
    "PACKED",
    "REQUIRES_GRAD",
    "contiguous",
    "device_here",
]

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
# A tensor of these needs a scale: without one, torch's own methods read where there is nothing.
QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
# More than one element in a byte, so strides and offsets do not say where one is.
PACKED = frozenset({torch.quint4x2, torch.quint2x4})

# Memory that several tensors lie in begins at a multiple of this, here and where it was sent: no element is larger.
ALIGNMENT = 16
# Bits that a tensor's description has beside its shape.
REQUIRES_GRAD, CONJUGATE, NEGATIVE = 1, 2, 4


def contiguous(buffer: memoryview, dtype: str, *shape: int) -> torch.Tensor:
    """A tensor over a received buffer that holds exactly its elements, in order.

    Args:
        buffer: the memory. It is used in place, and lives as long as the tensor.
        dtype: the name of the dtype, a key of ``DTYPES``.
        shape: at least one element.

    Raises:
        EncodingError: the buffer is of another size, or an argument is not what it should be.
    """
    element = _dtype(dtype)
    for count in shape:
        if type(count) is not int or count < 0:
            raise EncodingError.damaged(f"a tensor of the shape {shape!r}")
    needed = math.prod(shape) * element.itemsize
    tensor = _over(buffer, element, needed, element.itemsize)
    return tensor if len(shape) == 1 else tensor.view(shape)


def contiguous_with_grad(buffer: memoryview, dtype: str, *shape: int) -> torch.Tensor:
    """Like :func:`contiguous`, and gradients are wanted for the tensor."""
    return contiguous(buffer, dtype, *shape).requires_grad_()


def memory(buffer: memoryview, device: str) -> torch.UntypedStorage:
    """Received memory that one or several tensors lie in.

    Args:
        buffer: the memory, used in place if it stays on the CPU.
        device: where the tensors were; empty for the CPU.
    """
    nbytes = buffer.nbytes if isinstance(buffer, memoryview) else 0
    received = _over(buffer, torch.uint8, nbytes, ALIGNMENT)
    return (received.to(device_here(device)) if device else received).untyped_storage()


def strided(
    storage: torch.UntypedStorage, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], flags: int
) -> torch.Tensor:
    """A tensor that lies in memory with others, or not in order.

    Args:
        storage: the memory.
        dtype: a key of ``DTYPES``.
        offset: of the first element, in elements.
        shape, stride: as torch has them, in elements.
        flags: ``REQUIRES_GRAD``, ``CONJUGATE`` and ``NEGATIVE``, added up.

    Raises:
        EncodingError: it would reach outside of the memory.
    """
    element = _dtype(dtype)
    _check_extent(storage, element, offset, shape, stride)
    tensor = torch.empty(0, dtype=element, device=storage.device).set_(storage, offset, shape, stride)
    return _flagged(tensor, flags) if flags else tensor


def empty(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], device: str, flags: int) -> torch.Tensor:
    """A tensor without elements."""
    if 0 not in shape or any(type(count) is not int or count < 0 for count in (*shape, *stride)):
        raise EncodingError.damaged(f"a tensor without elements of the shape {shape!r}")
    where = device_here(device) if device else "cpu"
    return _flagged(torch.empty_strided(shape, stride, dtype=_dtype(dtype), device=where), flags)


def quantized(
    content: torch.Tensor,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    scale: Any,
    zero_point: Any,
    axis: int | None,
) -> torch.Tensor:
    """A quantized tensor.

    Args:
        content: its memory, as bytes, in one dimension.
        dtype: a key of ``DTYPES``.
        shape, stride: as torch has them.
        scale, zero_point: one number each, or a tensor of one for each index along ``axis``.
        axis: None for one scale.
    """
    element = _dtype(dtype, quantized=True)
    _check_extent(None, element, 0, shape, stride)
    if isinstance(scale, torch.Tensor) and isinstance(zero_point, torch.Tensor):
        if type(axis) is not int or not 0 <= axis < len(shape):
            raise EncodingError.damaged(f"a quantized tensor of {len(shape)} dimensions with the axis {axis!r}")
        if scale.shape != (shape[axis],) or zero_point.shape != scale.shape:
            raise EncodingError.damaged(f"a quantized tensor with {scale.numel()} scales for {shape[axis]} indices")
        tensor = torch._empty_per_channel_affine_quantized(
            shape, scales=scale, zero_points=zero_point, axis=axis, dtype=element, device=content.device
        )
    else:
        tensor = torch._empty_affine_quantized(
            shape, scale=scale, zero_point=zero_point, dtype=element, device=content.device
        )
    if element in PACKED:
        own = torch.empty(0, dtype=torch.uint8, device=content.device).set_(tensor.untyped_storage())
        if content.shape != own.shape:
            raise EncodingError.damaged(f"{content.numel()} bytes for a tensor that takes {own.numel()}")
        own.copy_(content)
        return tensor
    storage = content.untyped_storage()
    offset, beyond = divmod(int(content.storage_offset()) * content.itemsize, element.itemsize)
    if beyond:
        raise EncodingError.damaged(f"a tensor of {element} that begins at byte {content.storage_offset()}")
    _check_extent(storage, element, offset, shape, stride)
    return tensor.set_(storage, offset, shape, stride)


def sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool, flags: int
) -> torch.Tensor:
    """A sparse tensor of coordinates; torch checks that the indices are inside of its shape."""
    return _flagged(
        torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=coalesced, check_invariants=True, device=values.device
        ),
        flags,
    )


def sparse_compressed(
    layout: str, compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], flags: int
) -> torch.Tensor:
    """A tensor of one of the compressed layouts (CSR, CSC, BSR, BSC); torch checks that its indices fit."""
    found = getattr(torch, layout, None)
    if not isinstance(found, torch.layout):
        raise EncodingError.damaged(f"a tensor of the layout {layout!r}")
    return _flagged(
        torch.sparse_compressed_tensor(
            compressed, plain, values, shape, layout=found, check_invariants=True, device=values.device
        ),
        flags,
    )


def parameter(data: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """A parameter over its data."""
    return torch.nn.Parameter(data, requires_grad)


def on_device(tensor: torch.Tensor, device: str, flags: int) -> torch.Tensor:
    """A tensor of a device whose memory cannot be addressed: it travelled as a tensor of the CPU."""
    return _flagged(tensor.detach().to(device_here(device)), flags)


def untyped_storage(content: torch.Tensor) -> torch.UntypedStorage:
    """A storage, from its bytes as a tensor."""
    return content.untyped_storage()


def typed_storage(storage: torch.UntypedStorage, dtype: str) -> torch.TypedStorage:
    """A storage of elements of a dtype."""
    of_quantized = DTYPES.get(dtype) in QUANTIZED
    return torch.TypedStorage(wrap_storage=storage, dtype=_dtype(dtype, quantized=of_quantized), _internal=True)  # type: ignore[no-untyped-call]


def set_attributes(tensor: torch.Tensor, attributes: Mapping[str, Any]) -> None:
    """Give a tensor the attributes that a program gave to the one that was sent."""
    tensor.__dict__.update(attributes)


def device_here(name: str) -> torch.device:
    """A device of this process.

    Raises:
        EncodingError: this process has none of that name.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise EncodingError.no_such_device(name, str(error).partition("\n")[0]) from error
    return device


def _dtype(name: str, *, quantized: bool = False) -> torch.dtype:
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None or (dtype in QUANTIZED) != quantized:
        raise EncodingError.damaged(f"a tensor of the dtype {name!r}, which torch {torch.__version__} does not have")
    return dtype


def _over(buffer: memoryview, dtype: torch.dtype, nbytes: int, alignment: int) -> torch.Tensor:
    """A tensor of one dimension over all of a buffer, which must have ``nbytes`` bytes.

    Kernels rely on elements that begin at a multiple of their size, so a buffer that does not begin at a multiple of
    ``alignment`` is copied.
    """
    if not isinstance(buffer, memoryview) or buffer.nbytes != nbytes or not nbytes:
        has = f"{buffer.nbytes} bytes" if isinstance(buffer, memoryview) else f"a {type(buffer).__name__}"
        raise EncodingError.damaged(f"{has} for a tensor that takes {nbytes} bytes")
    if buffer.readonly:
        buffer = memoryview(bytearray(buffer))
    tensor = torch.frombuffer(buffer, dtype=dtype)
    return tensor.clone() if tensor.data_ptr() % alignment else tensor


def _check_extent(
    storage: torch.UntypedStorage | None, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> None:
    """Raise an error unless a tensor with at least one element lies within the storage (any storage if None)."""
    if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
        raise EncodingError.damaged(f"a tensor of the shape {shape!r} and the stride {stride!r}")
    last = offset
    for count, step in zip((1, *shape), (offset, *stride), strict=True):
        if type(count) is not int or type(step) is not int or count < 1 or step < 0:
            raise EncodingError.damaged(f"a tensor of the shape {shape!r} and the stride {stride!r}")
        last += (count - 1) * step
    if storage is not None and (last + 1) * dtype.itemsize > storage.nbytes():
        raise EncodingError.damaged(
            f"{storage.nbytes()} bytes for a tensor whose last element ends at byte {(last + 1) * dtype.itemsize}"
        )


def _flagged(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & (CONJUGATE | NEGATIVE):
        bits = {name: True for name, flag in (("conj", CONJUGATE), ("neg", NEGATIVE)) if flags & flag}
        torch._utils.set_tensor_metadata(tensor, bits)  # type: ignore[no-untyped-call]
    return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor


# Numbers for this file's functions, in a range that copyreg leaves free. All workers of a job run the same release.
for _number, _function in enumerate(
    (
        contiguous,
        contiguous_with_grad,
        memory,
        strided,
        empty,
        quantized,
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
