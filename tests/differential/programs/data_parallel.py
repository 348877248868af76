"""Data parallelism: DDP in its modes, with hooks, joined, sparse; optimizers that are divided; SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.differential.program import program, raised
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
def ddp_starts_from_rank_0(member: Member) -> Any:
    net = model()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(member.rank)
    return [parameter.detach() for parameter in DistributedDataParallel(net).parameters()]


@program(tolerance=TOLERANCE)
def ddp_without_synchronization(member: Member) -> Any:
    net = DistributedDataParallel(model())
    with net.no_sync():
        net(batch(member, 0)).sum().backward()
    local = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    net(batch(member, 1)).sum().backward()
    return local, [parameter.grad for parameter in net.parameters()]


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


HOOKS: dict[str, Callable[..., Any]] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
    "bf16_compress": default_hooks.bf16_compress_hook,
}


@program(cases=HOOKS, tolerance=2e-2)
def ddp_with_a_hook(member: Member, hook: Callable[..., Any]) -> Any:
    net = DistributedDataParallel(model())
    return raised(lambda: net.register_comm_hook(None, hook), gives="registered"), trained(member, net)


@program(tolerance=1e-4)
def ddp_with_power_sgd(member: Member) -> Any:
    net = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained(member, net, steps=5)


@program(tolerance=TOLERANCE)
def ddp_with_a_hook_of_its_own(member: Member) -> Any:
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations, and refuses text
        work = dist.all_reduce(bucket.buffer().div_(member.size), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0] * 2)

    net = DistributedDataParallel(model())
    net.register_comm_hook(None, hook)
    return trained(member, net)


@program(cases=["ALLREDUCE", "FP16_COMPRESS"], tolerance=2e-2)
def ddp_with_a_builtin_hook(member: Member, name: str) -> Any:
    net = DistributedDataParallel(model())
    net._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
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


@program(tolerance=TOLERANCE)
def ddp_with_buffers(member: Member) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    losses, parameters = trained(member, DistributedDataParallel(net))
    return losses, parameters, list(net.buffers())


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
def post_local_sgd(member: Member) -> Any:
    net = DistributedDataParallel(model())
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), averager)
    return trained(member, net, optimizer, steps=5)


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
