"""Rehearsed hosts: how they are written, which rank is on which, and the variables that each rank gets."""

from __future__ import annotations

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.job import Job, make_job
from phalanx.launch.job.rehearsal import Placement, parse_rehearsal
from phalanx.launch.job.target import Target

SCRIPT = Target("script", "train.py", "/train.py", ("train.py", "--lr", "1"))


def rehearse(text: str, placement: Placement = "block") -> Job:
    return make_job(None, SCRIPT, rehearsal=parse_rehearsal(text, placement), environment={})


@pytest.mark.parametrize(
    ("text", "placement", "placed"),
    [
        ("2x4", "block", ["00", "01", "02", "03", "10", "11", "12", "13"]),
        ("2x4", "cyclic", ["00", "10", "01", "11", "02", "12", "03", "13"]),
        ("1,3,2", "block", ["00", "10", "11", "12", "20", "21"]),
        ("1,3,2", "cyclic", ["00", "10", "20", "11", "21", "12"]),
    ],
)
def test_every_rank_is_placed_as_on_the_cluster(text: str, placement: Placement, placed: list[str]) -> None:
    """For each rank its node rank and its local rank, one digit each."""
    job = rehearse(text, placement)
    assert job.ranks == len(placed)
    assert [f"{row.node_rank}{row.local_rank}" for row in job.rows()] == placed
    for rank, (row, own) in enumerate(zip(job.rows(), placed, strict=True)):
        environment = job.environment(rank, port=1)
        beside = [other for other in placed if other[0] == own[0]]
        assert row.host == environment["PHALANX_HOST"] == f"node{own[0]}"
        assert (environment["RANK"], environment["WORLD_SIZE"]) == (str(rank), str(len(placed)))
        assert (environment["GROUP_RANK"], environment["LOCAL_RANK"]) == (own[0], own[1])
        assert environment["LOCAL_WORLD_SIZE"] == str(len(beside))
        assert environment["GROUP_WORLD_SIZE"] == str(len({other[0] for other in placed}))


def test_the_cpu_is_in_place_of_devices() -> None:
    job = make_job(None, SCRIPT, rehearsal=parse_rehearsal("2x2"), environment={"PHALANX_DEVICE": "cuda"})
    assert [row.device for row in job.rows()] == ["cpu"] * 4
    assert job.environment(3, port=1)["PHALANX_DEVICE"] == "cpu"
    assert job.environment(3, port=1)["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(LaunchError, match="computes on the CPU in place of devices"):
        make_job(None, SCRIPT, rehearsal=parse_rehearsal("2x2"), device="cuda", environment={})


def test_the_device_of_each_rank() -> None:
    def devices(device: str | None, **environment: str) -> list[str]:
        job = make_job(2, SCRIPT, device=device, environment=environment)
        told = {job.environment(rank, port=1).get("PHALANX_DEVICE") for rank in range(2)}
        assert told == {device or environment.get("PHALANX_DEVICE")}
        return [row.device for row in job.rows()]

    for wrong in ("", "3", "cuda:x", "CUDA"):
        with pytest.raises(LaunchError, match="is not a device"):
            devices(wrong)
    assert devices("cuda") == ["cuda:0", "cuda:1"]
    assert devices("cpu") == ["cpu", "cpu"]
    assert devices("xpu:1") == ["xpu:1", "xpu:1"]
    assert devices(None, PHALANX_DEVICE="npu") == ["npu:0", "npu:1"]
