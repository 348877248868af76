"""``--replace``: which names there are, how they are rewritten, and what a mistake is told."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from tests.support.ranks import Member, on_ranks
from torch._C._distributed_c10d import HashStore

from phalanx import settings
from phalanx.c10d import vendor
from phalanx.c10d.register import names_to_replace, replace_as_asked, replaces
from phalanx.commands.run import run
from phalanx.errors import ArgumentError, DeviceMismatch
from phalanx.launch.job.job import make_job
from phalanx.launch.job.options import LaunchOptions
from phalanx.launch.job.target import Target

TARGET = Target("program", "true", "/bin/true", ("true",))


def test_names_are_listed_with_commas_and_others_are_refused_in_words() -> None:
    assert names_to_replace("gloo") == ("gloo",)
    assert names_to_replace(" MPI, gloo,gloo ") == ("mpi", "gloo")
    assert names_to_replace("") == ()
    with pytest.raises(ArgumentError, match=r"--replace gloo,nccl: 'nccl' is not .* between devices, such"):
        names_to_replace("gloo,nccl", source="--replace")
    with pytest.raises(ArgumentError, match="'glo' is not something that Phalanx stands in for; choose gloo, mpi or "):
        names_to_replace("glo")
    assert replaces("gloo", {settings.REPLACE: "mpi,GLOO"})
    assert not replaces("gloo", {settings.REPLACE: "nonsense"})
    assert not replaces("gloo", {})


def test_ranks_get_the_variable() -> None:
    environment = make_job(LaunchOptions(ranks=2, replace=("gloo", "mpi")), TARGET, {}).environment(1, port=1)
    assert environment[settings.REPLACE] == "gloo,mpi"
    assert settings.REPLACE not in make_job(LaunchOptions(ranks=2), TARGET, {}).environment(1, port=1)


@pytest.mark.parametrize(
    ("config", "replaced", "serves"),
    [
        ("cpu:gloo", "gloo", "gloo"),
        ("cpu:gloo,cuda:gloo", "gloo", "gloo"),
        ("cpu:gloo,cuda:nccl", "gloo", "nccl"),
        ("cpu:phalanx", "mpi", None),
        ("cpu:phalanx", "", None),
    ],
)
def test_tensors_of_a_gpu_stay_with_gloo(
    config: str, replaced: str, serves: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setenv(settings.REPLACE, replaced)
    group: Any = None
    if serves is not None:
        assert vendor._name(group, torch.device("cuda"), 0) == serves
    else:
        with pytest.raises(DeviceMismatch, match=r"Move it with .cpu\(\)"):
            vendor._name(group, torch.device("cuda"), 0)


def test_mistake_on_the_command_line_exits_2_with_one_line() -> None:
    command = [sys.executable, "-m", "phalanx", "run", "true"]
    environment = {**os.environ, settings.REPLACE: "glo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "choose gloo, mpi or rpc" in done.stderr
    by_option = CliRunner().invoke(run, ["--replace", "nccl", "true"], standalone_mode=False)
    assert "of cpu:gloo,cuda:nccl only gloo is replaced" in str(by_option.exception)
    text = CliRunner().invoke(run, ["--help"]).output
    assert "phalanx run -n 4 --replace gloo ddp.py" in text
    assert "PHALANX_REPLACE=gloo" in text


def test_variable_that_makes_no_sense_is_told_by_the_first_group() -> None:
    """And not by the import, which other programs of the environment make too."""

    def body(member: Member) -> str:
        os.environ[settings.REPLACE] = "nccl"
        replace_as_asked()
        with pytest.raises(ValueError, match="PHALANX_REPLACE") as caught:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return str(caught.value)

    (message,) = on_ranks(body, 1)
    assert message.startswith("PHALANX_REPLACE nccl: 'nccl' is not something that Phalanx stands in for")
