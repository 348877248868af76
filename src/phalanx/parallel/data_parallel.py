"""Data parallelism: torch's ``DistributedDataParallel`` bound to a rank's device, with hooks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

__all__ = ["COMM_HOOKS", "data_parallel"]

COMM_HOOKS: dict[str, Callable[..., Any]] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
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
        device: where the replica lives.
        comm_hook: how gradients travel: ``"bf16"`` or ``"fp16"`` halve the bytes, a function is torch's
            ``hook(process_group, bucket)``; None sends them as they are.
        options: passed to ``DistributedDataParallel`` (``find_unused_parameters``, ``bucket_cap_mb``, …).

    Returns:
        The wrapped model; the plain one is its ``.module``.

    Raises:
        ValueError: ``comm_hook`` is a name that is not in ``COMM_HOOKS``.
        RuntimeError: the module has no parameter that wants a gradient (from torch).
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
