"""Data parallelism: DDP in its modes, with hooks, joined, sparse; optimizers that are divided; SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.differential.program import program
from tests.support.ranks import Member

TOLERANCE = 1e-5  # three and more gradients are added in another order


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(member: Member, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + member.rank))


def trained(member: Member, ddp: Any, optimizer: Any = None, steps: int = 3) -> Any:
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = ddp(batch(member, step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in ddp.parameters()]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 0.0001},
    "no_broadcast_of_buffers": {"broadcast_buffers": False},
    "no_synchronization_at_the_start": {"init_sync": False},
    "mixed_precision": {"mixed_precision": None},
}


@program(cases=OPTIONS, tolerance=TOLERANCE)
def ddp(member: Member, options: dict[str, Any]) -> Any:
    return trained(member, DistributedDataParallel(model(), **options))


@program(tolerance=TOLERANCE)
def ddp_without_synchronization(member: Member) -> Any:
    """From weights that differ, which are then rank 0's."""
    module = model()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(member.rank)
    net = DistributedDataParallel(module)
    with net.no_sync():
        net(batch(member, 0)).sum().backward()
    local = [parameter.grad.clone() for parameter in net.parameters()]
    net(batch(member, 1)).sum().backward()
    return [parameter.detach() for parameter in net.parameters()], local, [each.grad for each in net.parameters()]


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.one(x) if dist.get_rank() % 2 else self.other(x)


@program(tolerance=TOLERANCE)
def ddp_with_another_branch_on_each_rank(member: Member) -> Any:
    torch.manual_seed(0)
    return trained(member, DistributedDataParallel(Branches(), find_unused_parameters=True))


@program(tolerance=TOLERANCE, cases=["blocking", "in_the_default_bucket_size"])
def ddp_with_sparse_embeddings(member: Member, case: str) -> Any:
    torch.manual_seed(0)
    options = {"bucket_cap_mb": 0.0001} if case == "blocking" else {}
    net = torch.nn.Sequential(torch.nn.Embedding(20, 4, sparse=True), torch.nn.Linear(4, 2))
    ddp = DistributedDataParallel(net, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ddp((torch.arange(5) * (member.rank + 1) + step) % 20).sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


HOOKS = {"allreduce": default_hooks.allreduce_hook, "fp16_compress": default_hooks.fp16_compress_hook}
BUILTIN_HOOKS = ("ALLREDUCE", "FP16_COMPRESS")


@program(cases=[*HOOKS, *BUILTIN_HOOKS], tolerance=2e-2)
def ddp_with_a_hook(member: Member, name: str) -> Any:
    net = DistributedDataParallel(model())
    if name in HOOKS:
        net.register_comm_hook(None, HOOKS[name])
    else:
        net._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    return trained(member, net)


@program(tolerance=TOLERANCE)
def ddp_with_a_hook_of_its_own(member: Member) -> Any:
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations, and refuses text
        work: Any = dist.all_reduce(bucket.buffer().div_(member.size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] * 2)

    net = DistributedDataParallel(model())
    net.register_comm_hook(None, hook)
    return trained(member, net)


@program(tolerance=TOLERANCE)
def ddp_joined_with_unequal_inputs(member: Member) -> Any:
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Join([net]):
        for step in range(2 + member.rank):
            optimizer.zero_grad()
            net(batch(member, step)).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@program(tolerance=TOLERANCE, cases=["plain", "overlapped"])
def zero_redundancy_optimizer(member: Member, case: str) -> Any:
    net = DistributedDataParallel(model())
    bucketed = case == "overlapped"
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=bucketed)
    result = trained(member, net, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if member.rank:
        return result, None
    state = optimizer.state_dict()["state"]
    return result, [state[key]["exp_avg"] for key in sorted(state)]


@program(tolerance=TOLERANCE)
def a_reduction_started_early(member: Member) -> Any:
    net = model()
    delayed = [(name, parameter) for name, parameter in net.named_parameters() if name.startswith("0.")]
    ddp = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=net.get_parameter("2.weight"),
    )
    ddp(batch(member, 0)).square().mean().backward()
    return [net.get_parameter(name).grad for name in ("2.weight", "2.bias")]
