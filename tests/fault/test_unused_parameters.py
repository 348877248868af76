"""Parameters of DDP that take no part in a backward pass are named, on the rank where it is so and on the others."""

from __future__ import annotations

import torch
import torch._dynamo  # before the ranks are forked: a DDP module's first one takes each of them seconds
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import PeerLost, UnusedParameters


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other_head = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.head(self.body(x)) + (self.other_head(self.body(x)) if both else 0)
        return x.sum()


def test_ranks_that_wait_for_gradients_are_told_the_rank_and_names() -> None:
    def body(member: Member) -> tuple[type, str, tuple[str, ...], bool]:
        member.join()
        model = DistributedDataParallel(TwoHeads())
        try:
            for _ in range(2):
                model(torch.ones(2, 4), member.rank != 1).backward()
        except (PeerLost, UnusedParameters) as error:
            dist.destroy_process_group()  # because of it, so this tells the others
            assert get_debug_level() == DebugLevel.OFF
            first, _, rest = str(error).partition("\n")
            names = error.names if isinstance(error, UnusedParameters) else ()
            return type(error), first, names, rest.startswith("Expected to have finished reduction in the prior")
        raise AssertionError("it was not noticed")

    names = "other_head.weight", "other_head.bias"
    for rank, (kind, text, named, explained) in enumerate(on_ranks(body, 3)):
        expected = (UnusedParameters, names, True) if rank == 1 else (PeerLost, (), False)
        assert (kind, named, explained) == expected
        assert text.startswith("rank 1 of the group"), text
        assert "no gradient came in the last backward pass for other_head.weight, other_head.bias" in text
