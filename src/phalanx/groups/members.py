"""The part of a group that its other parts rely on: its ranks, its process group, and the checks before each call."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from phalanx.c10d.torch_versions import uncompiled
from phalanx.wrong_arguments import explained

__all__ = ["Members"]


class Members(ABC):
    """The ranks of a group, as seen from one of them. :class:`phalanx.group.Group` is one."""

    rank: int
    size: int

    def __init_subclass__(cls) -> None:
        for name in [name for name, value in vars(cls).items() if name[0] != "_" and inspect.isfunction(value)]:
            setattr(cls, name, explained(vars(cls)[name]))
        uncompiled(cls)

    @abstractmethod
    def _use(self, *tensors: torch.Tensor) -> dist.ProcessGroup:
        """The process group, after checking that it is open and that its backend serves the tensors' devices."""

    @abstractmethod
    def _member(self, rank: int) -> int:
        """The rank, after checking that the group has it."""

    @abstractmethod
    def _other(self, rank: int) -> int:
        """The rank, after checking that the group has it and that it is not this one."""

    @abstractmethod
    def _device_of_numbers(self) -> torch.device:
        """A device that the backend serves, for numbers that are not on any."""
