"""Data parallelism: torch's ``DistributedDataParallel`` bound to a rank's device, with hooks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["COMM_HOOKS", "data_parallel"]


def _compressing_hook(dtype: torch.dtype) -> Callable[..., Any]:
    """A hook that sends gradients as ``dtype``. torch's own hook refuses bfloat16 on the CPU; this one sends it."""

    # This has no annotations, because torch compares those of a hook with its classes, and they are strings here.
    def hook(process_group, bucket):  # type: ignore[no-untyped-def]
        gradients = bucket.buffer()
        # Divide before summing, because the sum over many ranks could leave float16's range.
        narrow = gradients.div(process_group.size()).to(dtype)
        work = dist.all_reduce(narrow, group=process_group, async_op=True)
        return work.get_future().then(lambda future: gradients.copy_(future.value()[0]))

    return hook


COMM_HOOKS: dict[str, Callable[..., Any]] = {
    "bf16": _compressing_hook(torch.bfloat16),
    "fp16": _compressing_hook(torch.float16),
}


def data_parallel(
    module: torch.nn.Module,
    process_group: dist.ProcessGroup,
    device: torch.device,
    *,
    comm_hook: str | Callable[..., Any] | None = None,
    **options: Any,
) -> DistributedDataParallel:
    """Wrap ``module`` so that every backward averages its gradients over the group.

    Args:
        module: moved to ``device``; the same shape on every rank. Rank 0's values are copied to the others.
        process_group: the ranks that hold a replica; all of them must call this.
        device: the device of this rank's replica.
        comm_hook: how gradients are sent. ``"bf16"`` and ``"fp16"`` halve the bytes; a function is torch's
            ``hook(process_group, bucket)``; None sends them unchanged.
        options: passed to ``DistributedDataParallel`` (``find_unused_parameters``, ``bucket_cap_mb``, …).

    Returns:
        The wrapped model; the plain one is its ``.module``.

    Raises:
        ValueError: ``comm_hook`` is a name that is not in ``COMM_HOOKS``.
        RuntimeError: no parameter of the module requires a gradient (torch's own error).
    """
    if isinstance(comm_hook, str):
        if comm_hook not in COMM_HOOKS:
            raise ValueError(f"comm_hook={comm_hook!r} is not known; names are {', '.join(sorted(COMM_HOOKS))}")
        comm_hook = COMM_HOOKS[comm_hook]
    if device.type != "cpu":
        options.setdefault("device_ids", [device.index])
    model = DistributedDataParallel(module.to(device), process_group=process_group, **options)
    if comm_hook is not None:
        model.register_comm_hook(process_group, comm_hook)
    return model
