"""Data parallelism: torch's ``DistributedDataParallel`` bound to a rank's device, and what it may leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import ArgumentError
from phalanx.parallel.exchange import Exchange, Narrow, Unchanged, choose
from phalanx.parallel.gradients import narrow_hook
from phalanx.parallel.integers import Integers, Lanes
from phalanx.parallel.local_steps import OUTER
from phalanx.parallel.low_rank import LowRank
from phalanx.parallel.replica import Replica
from phalanx.words import tell
from phalanx.wrong_arguments import require

__all__ = ["COMM_HOOKS", "data_parallel"]

COMM_HOOKS: dict[str, Callable[..., Any]] = {"bf16": narrow_hook("bf16"), "fp16": narrow_hook("fp16")}
COMPRESS = ("bf16", "fp16", "int8", "powersgd", "auto")
# What "auto" chooses among. It leaves the rest to the user: fp16 is as long as bf16 and can overflow, and PowerSGD
# changes what is learned more than a rounding does.
_AUTO = ("none", "bf16", "int8")


def data_parallel(
    module: torch.nn.Module,
    process_group: dist.ProcessGroup,
    device: torch.device,
    *,
    comm_hook: str | Callable[..., Any] | None = None,
    compress: str | None = None,
    sync_every: int = 1,
    outer: str | None = None,
    lanes: Callable[[], Lanes] | None = None,
    **options: Any,
) -> Replica:
    """Wrap ``module`` so that every backward averages its gradients over the group, or exchanges less than that.

    docs/slow_links.md says what each way costs in bytes, precision and memory, and when to take it.

    ``compress`` says how the gradients travel. Everything else about DDP stays: accumulation (the sum is what travels),
    unused parameters, static graphs, ``join``. Each way gives every rank the same bits (``powersgd`` where processors
    are of one kind), and gradients of a dtype that is as narrow already travel as they are.

    - ``"bf16"``, ``"fp16"``: buckets travel, half as wide, while backward computes.
    - ``"int8"``: what rounding leaves out is added to the next gradient. Two collectives at the end of backward.
    - ``"powersgd"``: matrices travel as a product of two of rank 3, after 10 steps that are not compressed. Five
      collectives at the end of backward. Needs numpy.
    - ``"auto"``: the quickest of none, bf16 and int8, measured here for about two seconds; rank 0 says which and why.
      As times differ from run to run, so may the choice.

    ``sync_every=K`` exchanges no gradients. Each rank takes K steps of its own optimizer on its own batches, then the
    parameters and buffers are averaged. Steps are counted by a hook on all optimizers of the process. Replicas differ
    between two averages, so call ``model.synchronize()`` before evaluating and at the end. With ``compress``, what
    travels is the change since the last average. ``outer="diloco"`` moves the parameters by the mean change with SGD of
    Nesterov momentum 0.9 and learning rate 0.7 (Douillard et al. 2023, arXiv:2311.08105), which bears a K of hundreds.

    A checkpoint by ``world.save`` has what all of these keep, once for all ranks, and a run that is resumed ends with
    the bits of the run that went on. What could only be wrong or surprising together is refused with the reason.

    Args:
        module: moved to ``device``; the same shape on every rank. Rank 0's values are copied to the others.
        process_group: the ranks that hold a replica; all of them must call this.
        device: the device of this rank's replica.
        comm_hook: ``"bf16"`` and ``"fp16"``, as ``compress``; or a function, torch's ``hook(process_group, bucket)``.
        compress: see above; None sends gradients unchanged.
        sync_every: after how many optimizer steps replicas are averaged; 1 averages gradients in every backward.
        outer: the outer optimizer, ``"diloco"``, or None.
        lanes: makes the groups for ``int8`` between hosts of several ranks; None lets every rank count as a host.
        options: passed to ``DistributedDataParallel`` (``find_unused_parameters``, ``bucket_cap_mb``, …).

    Returns:
        The wrapped model; the plain one is its ``.module``.

    Raises:
        ArgumentError: a name or an option is not known, or a combination is refused, with the reason and what to do.
        RuntimeError: no parameter of the module requires a gradient (torch's own error).
    """
    if isinstance(comm_hook, str):
        if comm_hook not in COMM_HOOKS:
            raise ArgumentError(f"comm_hook={comm_hook!r} is not known; names are {', '.join(sorted(COMM_HOOKS))}")
        comm_hook = COMM_HOOKS[comm_hook]
    _refuse(module, compress, sync_every, outer, {"comm_hook": comm_hook, **options})
    require(torch.nn.parallel.DistributedDataParallel, module, **options)
    if device.type != "cpu":
        options.setdefault("device_ids", [device.index])
    # Buckets that are summed as they are.
    plain = device.type == "cpu" and comm_hook is None and compress is None and sync_every == 1
    model = Replica(module.to(device), share_buckets=plain, process_group=process_group, **options)
    if sync_every > 1:
        model.broadcast_buffers = False  # as an option it would leave out the first copies, too
    if comm_hook is not None:
        model.register_comm_hook(process_group, comm_hook)
        return model
    alone = process_group.size() == 1
    exchange: Exchange = Unchanged(process_group)
    if compress is not None and not alone:  # one rank sends nothing, and is not to pay for less of it
        exchange = _chosen(model, compress, lanes or (lambda: Lanes.flat(process_group)))
    if sync_every > 1:
        model.step_locally(exchange, sync_every, outer)
    elif exchange.name != "none":
        model.exchange_by(exchange)
    return model


def _chosen(model: Replica, compress: str, lanes: Callable[[], Lanes]) -> Exchange:
    """The exchange of that name, or the quickest one."""
    group = model.process_group

    def named(name: str) -> Exchange:
        if name == "none":
            return Unchanged(group)
        if name == "int8":
            return Integers(lanes())
        if name == "powersgd":
            return LowRank(group, lanes())
        return Narrow(group, name)

    if compress != "auto":
        return named(compress)
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in parameters)
    chosen, why = choose({name: named(name) for name in _AUTO}, elements, parameters[0].device, group)
    if group.rank() == 0:
        tell(why)
    return named(chosen)  # a new one: the measured one has left out parts of what it was measured with


# -- options that cannot be had together -----------------------------------------------------------

_WITH_COMPRESS = {
    "comm_hook": "comm_hook and {} are two ways to send the same gradients; leave one out",
    "mixed_precision": "DDP's mixed_precision and {} are two ways to send the same gradients; use torch.autocast",
    "delay_all_reduce_named_params": "delay_all_reduce_named_params travel beside the buckets, which {} is about",
}
_BUFFERS = "with sync_every buffers are averaged with the parameters, and no forward sends them; leave {} out"
_GRADIENTS = "with sync_every no gradients are sent, so {} would never be called; leave it out"
_WITH_LOCAL_STEPS = {
    **dict.fromkeys(("comm_hook", "delay_all_reduce_named_params", "mixed_precision"), _GRADIENTS),
    **dict.fromkeys(("broadcast_buffers", "forward_sync_buffers"), _BUFFERS),
}


def _refuse(
    module: torch.nn.Module, compress: str | None, sync_every: int, outer: str | None, options: Mapping[str, Any]
) -> None:
    """Raise ArgumentError, with the reason and what to do, if these options could only be wrong or surprising."""
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
    given = {name for name, value in options.items() if value is not None}
    if compress is not None:
        for name in given & _WITH_COMPRESS.keys():
            raise ArgumentError(_WITH_COMPRESS[name].format(f"compress={compress!r}"))
        if compress == "powersgd" and sync_every > 1:
            raise ArgumentError(
                f"PowerSGD approximates each gradient from the one before, which what sync_every={sync_every} steps "
                f"have changed does not resemble; use compress='int8' with sync_every, or powersgd without"
            )
        if any(getattr(layer, "sparse", False) for layer in module.modules()):
            raise ArgumentError(
                f"a layer of the module has sparse gradients, which travel as indices and values; "
                f"compress={compress!r} needs dense ones. Make the layer with sparse=False, or leave compress out"
            )
    if sync_every > 1:
        for name in given & _WITH_LOCAL_STEPS.keys():
            raise ArgumentError(_WITH_LOCAL_STEPS[name].format(name))
        if options.get("init_sync") is False:
            raise ArgumentError("with sync_every all replicas must begin with the same parameters; leave init_sync out")
