"""``--replace``: which names there are, how they are rewritten, and what a mistake is told."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from phalanx import settings
from phalanx.c10d import vendor
from phalanx.c10d.replace import names_to_replace, replaces
from phalanx.errors import ArgumentError, DeviceMismatch
from phalanx.launch.job.job import make_job
from phalanx.launch.job.target import Target

TARGET = Target("program", "true", "/bin/true", ("true",))


def phalanx_run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "run", *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)


def test_names_are_listed_with_commas() -> None:
    assert names_to_replace("gloo") == ("gloo",)
    assert names_to_replace(" MPI, gloo,gloo ") == ("mpi", "gloo")
    assert names_to_replace("") == ()


@pytest.mark.parametrize("name", ["nccl", "xccl", "hccl"])
def test_backends_of_devices_are_refused_in_words(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"--replace gloo,{name}: {name} moves tensors between devices"):
        names_to_replace(f"gloo,{name}", source="--replace")


def test_an_unknown_name_is_refused_with_the_choice() -> None:
    with pytest.raises(
        ArgumentError, match="'glo' is not something that Phalanx stands in for; choose gloo, mpi or rpc"
    ):
        names_to_replace("glo")


def test_whether_a_name_is_replaced_is_asked_without_errors() -> None:
    assert replaces("gloo", {settings.REPLACE: "mpi,GLOO"})
    assert not replaces("gloo", {settings.REPLACE: "nonsense"})
    assert not replaces("gloo", {})


def test_ranks_get_the_variable() -> None:
    environment = make_job(2, TARGET, replace=("gloo", "mpi"), environment={}).environment(1, port=1)
    assert environment[settings.REPLACE] == "gloo,mpi"
    assert settings.REPLACE not in make_job(2, TARGET, environment={}).environment(1, port=1)


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
    member = vendor.Membership(HashStore(), 0, 1, timedelta(seconds=1), "group", [0])
    group: Any = None
    if serves is not None:
        assert vendor._name(group, torch.device("cuda"), member) == serves
    else:
        with pytest.raises(DeviceMismatch, match=r"Move it with .cpu\(\)"):
            vendor._name(group, torch.device("cuda"), member)


@pytest.mark.parametrize(
    ("name", "words"), [("nccl", "moves tensors between devices"), ("glo", "choose gloo, mpi or rpc")]
)
def test_a_mistake_on_the_command_line_exits_2_with_one_line(name: str, words: str) -> None:
    for done in (
        phalanx_run("--replace", name, "true"),
        phalanx_run("true", **{settings.REPLACE: name}),
    ):
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""


def test_the_help_teaches_it() -> None:
    text = phalanx_run("--help").stdout
    assert "phalanx run -n 4 --replace gloo ddp.py" in text
    assert "PHALANX_REPLACE=gloo" in text


def test_a_variable_that_makes_no_sense_is_told_by_the_first_group_and_not_by_the_import(tmp_path: Path) -> None:
    script = (
        "import torch.distributed as dist\n"
        "print('imported')\n"
        "try:\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, settings.REPLACE: "nccl"}, capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    imported, message = done.stdout.splitlines()
    assert imported == "imported"
    assert message.startswith("PHALANX_REPLACE nccl: nccl moves tensors between devices")
