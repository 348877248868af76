"""The variables that frameworks find: under ``phalanx run``, and from ``phalanx.init()`` to ``close()``."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks
from torch.distributed.rendezvous import rendezvous

import phalanx
from phalanx.topology.device_files import accelerator_files
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


def test_second_store_can_meet_at_the_port_that_init_sets() -> None:
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


def test_world_of_one_changes_nothing() -> None:
    def body(member: Member) -> bool:
        forget_launchers()
        before = dict(os.environ)
        phalanx.init(quiet=True, device="cpu")
        unchanged = dict(os.environ) == before
        phalanx.close()
        return unchanged

    assert on_ranks(body, 1) == [True]


def start(ranks: str, told: str | None, mpi: str, **own: str) -> Any:
    marks = [] if (ranks, own) == ("2", {}) else [pytest.mark.long]
    return pytest.param(ranks, own, told, mpi, marks=marks)


@pytest.mark.parametrize(
    ("ranks", "own", "told", "has_mpi"),
    [
        start("2", "true", "False"),
        start("2", "no", "False", ACCELERATE_USE_CPU="no"),
        start("2", "true", "True", PMI_RANK="0"),
        start("2", "true", "True", OMPI_COMM_WORLD_RANK="0"),
        start("1", None, "True"),
    ],
)
def test_several_ranks_on_the_cpu_are_told_to_accelerate_and_have_no_mpi(
    launcher: Launcher, ranks: str, own: dict[str, str], told: str | None, has_mpi: str
) -> None:
    """Accelerate takes MPI for the CPU wherever it is available; each rank of another launcher would be alone in it."""
    launcher.script("rc = None\n", "mpi4py/__init__.py")
    script = launcher.script("""
        import os, torch.distributed as dist
        print(os.environ.get("ACCELERATE_USE_CPU"), dist.is_mpi_available())
    """)
    path = f"{launcher.directory}:{os.environ.get('PYTHONPATH', '')}"
    environment = {"PHALANX_DEVICE": "cpu", "PYTHONPATH": path, **own}
    ended = launcher.run("-q", "--no-prefix", "-n", ranks, script, environment=environment)
    assert ended.out_lines == [f"{told} {has_mpi}"] * int(ranks), ended.err_text


def test_ranks_that_may_have_an_accelerator_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.topology.frameworks.accelerator_files", lambda: ["/dev/nvidia0"])
    assert cpu_settings({"WORLD_SIZE": "2"}) == {}
    assert cpu_settings({"WORLD_SIZE": "2", "PHALANX_DEVICE": "cpu"}) == {"ACCELERATE_USE_CPU": "true"}
    monkeypatch.undo()
    assert bool(cpu_settings({"WORLD_SIZE": "2"})) != bool(accelerator_files())
