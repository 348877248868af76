"""DDP and functional collectives raise Phalanx's own errors over MPI too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.launch_support import Launcher

PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(sys.argv[1], "cache")  # which torch makes with DDP
dist.init_process_group("mpi")
rank, size = dist.get_rank(), dist.get_world_size()
odd = rank == 1
x = torch.ones(8 if odd else 4)
many = torch.ones((8 if odd else 4) * size)

def in_ddp(group):
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    if odd:
        dist.all_reduce(torch.ones(3), group=group)
    else:
        model(torch.ones(2, 4)).sum().backward()

class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.other_head = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, both):
        x = self.body(x)
        return (self.head(x) + self.other_head(x)).sum() if both else self.head(x).sum()

def unused(group):
    model = DistributedDataParallel(TwoHeads(), process_group=group)
    model(torch.ones(2, 4), True).backward()
    model(torch.ones(2, 4), False).backward()
    model(torch.ones(2, 4), False)

def in_backward(group):
    leaf = torch.ones(4, requires_grad=True)
    whole = functional.all_gather_tensor_autograd(leaf, 0, group).sum()
    if odd:
        functional.all_reduce(leaf.detach(), "sum", group) + 1
    else:
        whole.backward()

MISTAKES = {
    "ddp": in_ddp,
    "unused": unused,
    "in_backward": in_backward,
    "all_reduce": lambda group: functional.all_reduce(x, "sum", group) + 1,
    "all_gather": lambda group: functional.all_gather_tensor(x, 0, group) + 1,
    "reduce_scatter": lambda group: functional.reduce_scatter_tensor(many, "sum", 0, group) + 1,
    "all_to_all": lambda group: functional.all_to_all_single(many, None, None, group) + 1,
}
errors = {}
for name, mistake in MISTAKES.items():
    group = dist.new_group()
    try:
        mistake(group)
    except Exception as error:
        errors[name] = [type(error).__name__, str(error)]
    dist.barrier()
with open(os.path.join(sys.argv[1], f"errors-{rank}"), "w") as file:
    json.dump(errors, file)
"""

NAMES = ["ddp", "unused", "in_backward", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.long)])
def test_they_are_phalanxs_errors_with_lines_of_the_script(launcher: Launcher, size: int) -> None:
    launcher.run("-n", str(size), "-q", launcher.script(PROGRAM), str(launcher.directory))
    for rank in range(size):
        errors: dict[str, Any] = json.loads((launcher.directory / f"errors-{rank}").read_text())
        assert list(errors) == NAMES
        kind, text = errors.pop("unused")
        assert kind == "UnusedParameters", text
        assert "other_head.weight, other_head.bias" in text
        for name, (kind, text) in errors.items():
            assert kind == "CollectiveMismatch", (name, text)
            assert "running the callback" not in text
            calls = text.splitlines()[1:-1]
            assert len(calls) == 2, text
            assert all(" at script.py:" in call for call in calls), (name, text)
        assert "rank 1: all_reduce(float32[3], sum)" in errors["ddp"][1]
