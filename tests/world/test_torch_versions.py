"""What torch's release changes: how the backends are found, and what is said of a release that nobody tried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import every_rank
from torch._C._distributed_c10d import HashStore

from phalanx.c10d import torch_versions
from phalanx.errors import InitializationError

ROOT = Path(__file__).parents[2]
ASKS_ITS_TABLE = hasattr(dist.Backend, "_ensure_backend_registered")  # torch >= 2.14


def join_alone(backend: str = "phalanx") -> list[float]:
    place = {} if backend == "mpi" else {"store": HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **place)  # type: ignore[arg-type]
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=[dist.new_group([0]) for _ in range(2)][1])
    dist.destroy_process_group()
    return tensor.tolist()


def test_releases_of_the_package_the_page_and_make_agree() -> None:
    assert ' "torch>=2.6",' in (ROOT / "pyproject.toml").read_text()  # what the launcher needs
    assert min(torch_versions.TRIED) == torch_versions.OLDEST
    for name in ("docs/compatibility.md", "requirements/torch-versions.txt"):
        found = re.findall(r"\b(\d+)\.(\d+)\.\d+\b", (ROOT / name).read_text())
        assert set(torch_versions.TRIED) <= {(int(major), int(minor)) for major, minor in found}, name


def test_newer_torch_is_noted_once_and_by_rank_0() -> None:
    def body(_: Member) -> list[str]:
        vars(torch)["__version__"] = "9.1.0"
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            torch_versions.note_if_newer("9.1.0", 1)
            assert noted == []
            assert join_alone() == [1.0, 1.0]
        return [str(each.message) for each in noted]

    told = "torch 9.1.0 is newer than every release that this Phalanx was tried on"
    assert sum(told in text for text in on_ranks(body, 1)[0]) == 1


@pytest.mark.parametrize("version", ["2.13.0", "2.15.7+cpu", "2.15.0a0+git123", "unknown"])
def test_release_that_was_tried_is_not_noted(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_versions.note_if_newer(version, 0)
        torch_versions.refuse_if_older(version)


def test_older_torch_is_refused_in_words() -> None:
    def body(_: Member) -> list[str]:
        vars(torch)["__version__"] = "2.8.1"
        told = []
        for backend in ("phalanx", "mpi"):
            with pytest.raises(InitializationError) as caught:
                join_alone(backend)
            told.append(str(caught.value))
        return told

    for text in on_ranks(body, 1)[0]:
        assert text.startswith("torch 2.8.1 is too old")
        assert "pip install 'torch>=2.9'" in text
    with pytest.raises(InitializationError):
        torch_versions.refuse_if_older("1.13.1")


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", dedent(script)]
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600, check=False
    )


ALONE = """
    import torch.distributed as dist
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
    print(dist.get_backend())
"""


def test_init_does_not_need_torchs_autoload() -> None:
    """From torch 2.14 on a script does not need ``phalanx.init()`` for that either: torch asks the entry points."""
    script = "import phalanx; print(phalanx.init().backend); phalanx.close()"
    for each in [script, ALONE] if ASKS_ITS_TABLE else [script]:
        done = run(each, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert done.stdout == "phalanx\n", done.stderr


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="torch has gather_single from 2.14 on")
@pytest.mark.parametrize("asynchronous", [False, True])
@every_rank(size=3)
def test_gather_single_fills_the_tensor_of_the_root(member: Member, asynchronous: bool) -> None:
    c10d: Any = dist
    whole = torch.zeros(3, 2) if member.rank == 1 else None
    work = c10d.gather_single(torch.tensor([float(member.rank), 10.0]), whole, dst=1, async_op=asynchronous)
    if asynchronous:
        work.wait(timedelta(seconds=60))
    if whole is not None:
        assert whole.tolist() == [[float(rank), 10.0] for rank in range(3)]
