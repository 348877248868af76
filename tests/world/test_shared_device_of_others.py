"""Ranks of ``phalanx run`` that all compute on one device over a backend of torch's own: one line says so.

The device is ``meta``, with torch's fake backend, and its name is given by the test: a machine of tests has none.
"""

from __future__ import annotations

import re

import pytest
from tests.launch_support import Launcher, launcher

__all__ = ["launcher"]  # a fixture

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from phalanx.c10d import shared_device

rank, how = int(os.environ["RANK"]), sys.argv[1]
shared_device.physical_device = lambda device, accelerator: f"{device.type} {rank if how == 'apart' else 0}"
dist.Backend.register_backend(
    "standin", lambda store, rank, size, timeout: FakeProcessGroup._create_internal(rank, size), devices=["meta"]
)
dist.init_process_group("cpu:gloo,meta:standin")
for _ in range(3):
    dist.all_reduce(torch.ones(4, device="cpu" if how == "cpu" else "meta"))
dist.barrier()
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["together", *(pytest.param(how, marks=pytest.mark.long) for how in ("apart", "cpu"))])
def test_ranks_on_one_device_of_torchs_backends_are_warned_of_once(launcher: Launcher, how: str) -> None:
    done = launcher.run("-n", "3", "-q", launcher.script(SCRIPT), how)
    assert done.code == 0, done.err_text
    warned = re.findall(r"warning: ranks ([\d, -]+) compute on the same device \(meta 0\)", done.err_text)
    assert len(warned) == (how == "together")
    for ranks in warned:
        named = [int(rank) for rank in re.split("[, -]+", ranks)]  # those that the one which says it has seen
        assert len(named) > 1
        assert set(named) <= {0, 1, 2}
