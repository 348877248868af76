"""The variables that frameworks find: under ``phalanx run``, and from ``phalanx.init()`` to ``close()``."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks
from torch.distributed.rendezvous import rendezvous

import phalanx
from phalanx.system.device_files import accelerator_files
from phalanx.topology.frameworks import cpu_settings

__all__ = ["launcher"]

LAUNCHERS = ("TORCHELASTIC", "PHALANX", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "ACCELERATE")
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def forget_launchers() -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]


def become_mpi_rank(member: Member, port: int) -> None:
    """Set the variables that Hydra gives a rank, and an address to meet at; no other launcher's variables."""
    forget_launchers()
    os.environ.update(
        PMI_RANK=str(member.rank),
        PMI_SIZE=str(member.size),
        MPI_LOCALRANKID=str(member.rank),
        MPI_LOCALNRANKS=str(member.size),
        HYDI_CONTROL_FD="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def test_init_sets_what_torchrun_sets_and_close_undoes_it() -> None:
    def body(member: Member) -> tuple[dict[str, str], str, str]:
        become_mpi_rank(member, port)
        before = dict(os.environ)
        phalanx.init(quiet=True, timeout_s=60, device="cpu")
        during = dict(os.environ)
        phalanx.close()
        assert dict(os.environ) == before
        told = {name: during[name] for name in TOLD}
        return told, during["MASTER_PORT"], during["ACCELERATE_USE_CPU"]

    with held_port() as port:
        outcomes = on_ranks(body, 3)
    for rank, (told, where, use_cpu) in enumerate(outcomes):
        assert told == dict(zip(TOLD, map(str, (rank, 3, rank, 3, 0, 1)), strict=True))
        assert int(where) > 0
        assert use_cpu == "true"


def test_where_no_port_was_given_a_second_store_can_meet_at_the_one_that_is_set() -> None:
    def body(member: Member) -> Any:
        forget_launchers()
        where = f"tcp://127.0.0.1:{port}"
        world = phalanx.init(
            quiet=True, timeout_s=60, device="cpu", init_method=where, rank=member.rank, world_size=member.size
        )
        # What torch.distributed.rpc does, beside the world's own store.
        store, _, _ = next(rendezvous("env://"))
        store.set(f"here {world.rank}", "yes")
        store.wait([f"here {rank}" for rank in range(world.size)])
        world.barrier()
        second = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        phalanx.close()
        assert "MASTER_PORT" not in os.environ
        return second

    with held_port() as port:
        found = on_ranks(body, 3)
    assert len(set(found)) == 1
    assert found[0][0] == "127.0.0.1"


def test_a_world_of_one_changes_nothing() -> None:
    def body(member: Member) -> bool:
        forget_launchers()
        before = dict(os.environ)
        phalanx.init(quiet=True, device="cpu")
        unchanged = dict(os.environ) == before
        phalanx.close()
        return unchanged

    assert on_ranks(body, 1) == [True]


def test_several_ranks_on_the_cpu_are_told_to_accelerate(launcher: Launcher) -> None:
    script = launcher.script("import json, os; print(json.dumps(os.environ.get('ACCELERATE_USE_CPU')))")
    for ranks, own, expected in (("2", {}, "true"), ("2", {"ACCELERATE_USE_CPU": "no"}, "no"), ("1", {}, None)):
        ended = launcher.run("-q", "--no-prefix", "-n", ranks, script, environment={"PHALANX_DEVICE": "cpu", **own})
        assert [json.loads(line) for line in ended.out_lines] == [expected] * int(ranks)


def test_ranks_that_may_have_an_accelerator_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.topology.frameworks.accelerator_files", lambda: ["/dev/nvidia0"])
    assert cpu_settings({"WORLD_SIZE": "2"}) == {}
    assert cpu_settings({"WORLD_SIZE": "2", "PHALANX_DEVICE": "cpu"}) == {"ACCELERATE_USE_CPU": "true"}
    monkeypatch.undo()
    assert bool(cpu_settings({"WORLD_SIZE": "2"})) != bool(accelerator_files())


def test_mpi_is_available_only_to_ranks_that_mpi_can_have_started(launcher: Launcher) -> None:
    """Accelerate takes MPI for the CPU wherever it is available; each rank of another launcher would be alone in it."""
    launcher.script("rc = None\n", "mpi4py/__init__.py")
    script = launcher.script("import torch.distributed as dist; print(dist.is_mpi_available())")
    path = f"{launcher.directory}:{os.environ.get('PYTHONPATH', '')}"
    for ranks, own, expected in (
        ("2", {}, "False"),
        ("2", {"PMI_RANK": "0"}, "True"),
        ("2", {"OMPI_COMM_WORLD_RANK": "0"}, "True"),
        ("1", {}, "True"),
    ):
        ended = launcher.run("-q", "--no-prefix", "-n", ranks, script, environment={"PYTHONPATH": path, **own})
        assert ended.out_lines == [expected] * int(ranks), ended.err_text
