"""Which options of ``data_parallel`` cannot be had together, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from phalanx.errors import ArgumentError
from phalanx.parallel.local_steps import OUTER

__all__ = ["COMPRESS", "refuse"]

COMPRESS = ("bf16", "fp16", "int8", "powersgd", "auto")


def refuse(
    module: torch.nn.Module,
    *,
    comm_hook: object,
    compress: str | None,
    sync_every: int,
    outer: str | None,
    options: Mapping[str, Any],
) -> None:
    """Raise if these options could only be wrong together, or surprising.

    Raises:
        ArgumentError: with the reason, and what to do.
    """
    if compress is not None and compress not in COMPRESS:
        raise ArgumentError(f"compress={compress!r} is not known; it is None or one of {', '.join(COMPRESS)}")
    if outer is not None and outer not in OUTER:
        raise ArgumentError(f"outer={outer!r} is not known; it is None or {', '.join(OUTER)}")
    if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
        raise ArgumentError(f"sync_every={sync_every!r} is not a number of steps; 1 exchanges gradients in every step")
    if outer is not None and sync_every == 1:
        raise ArgumentError(
            f"outer={outer!r} moves the parameters by what several local steps have changed; give sync_every=K with it "
            f"(DiLoCo's authors use 500; 16 to 100 are usual on fewer steps)"
        )
    if compress is not None:
        _refuse_with_compress(module, compress, sync_every, comm_hook, options)
    if sync_every > 1:
        _refuse_with_local_steps(comm_hook, options)


def _refuse_with_compress(
    module: torch.nn.Module, compress: str, sync_every: int, comm_hook: object, options: Mapping[str, Any]
) -> None:
    given = f"compress={compress!r}"
    if comm_hook is not None:
        raise ArgumentError(f"comm_hook and {given} are two ways to send the same gradients; leave one out")
    if options.get("mixed_precision") is not None:
        raise ArgumentError(
            f"DDP's mixed_precision sends gradients by a hook of its own, and {given} by another; use torch.autocast, "
            f"which works with compress"
        )
    if options.get("delay_all_reduce_named_params") is not None:
        raise ArgumentError(f"DDP sends delay_all_reduce_named_params beside its buckets, so {given} would not be used")
    if compress == "powersgd" and sync_every > 1:
        raise ArgumentError(
            f"PowerSGD approximates each gradient from the one before, which what sync_every={sync_every} steps have "
            f"changed does not resemble; use compress='int8' with sync_every, or powersgd without"
        )
    if any(getattr(layer, "sparse", False) for layer in module.modules()):
        raise ArgumentError(
            f"a layer of the module has sparse gradients, which travel as indices and values; {given} needs dense "
            f"ones. Make the layer with sparse=False, or leave compress out"
        )


def _refuse_with_local_steps(comm_hook: object, options: Mapping[str, Any]) -> None:
    if comm_hook is not None:
        raise ArgumentError("with sync_every no gradients are sent, so a comm_hook would never be called; leave it out")
    for name in ("broadcast_buffers", "forward_sync_buffers"):
        if options.get(name) is not None:
            raise ArgumentError(
                f"{name} is about sending buffers in every forward; with sync_every they are averaged with the "
                f"parameters, so leave it out"
            )
    if options.get("init_sync") is False:
        raise ArgumentError("with sync_every all replicas must begin with the same parameters; leave init_sync out")
    for name in ("delay_all_reduce_named_params", "mixed_precision"):
        if options.get(name) is not None:
            raise ArgumentError(f"{name} is about how DDP sends gradients, and with sync_every it sends none")
