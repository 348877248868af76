"""Give the number of workers, and which of them this is."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class ScalingConfig:
    """Ray's."""

    num_workers: int


class Context:
    """Ray's, over torch.distributed."""

    def get_world_rank(self) -> int:
        return dist.get_rank()


def get_context() -> Context:
    return Context()
