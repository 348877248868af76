"""Which device a rank takes. Accelerators are stand-ins: this is about counting, hiding and saying what is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import phalanx
from phalanx.errors import DeviceError
from phalanx.topology import device as devices
from phalanx.topology.device import Accelerator, choose_device, shared_devices, why_unfit

FOUR = Accelerator("cuda", 4)


@pytest.mark.parametrize(
    ("local_rank", "wanted", "accelerator", "environment", "device"),
    [
        (3, None, FOUR, {}, "cuda:3"),
        (1, None, Accelerator("privateuseone", 4), {}, "privateuseone:1"),
        (0, None, None, {}, "cpu"),
        (3, "cpu", FOUR, {"PHALANX_DEVICE": "cuda:2"}, "cpu"),
        (3, None, FOUR, {"PHALANX_DEVICE": "cpu"}, "cpu"),
        (3, None, FOUR, {"PHALANX_DEVICE": "cuda"}, "cuda:3"),
        # A rank that sees only its own devices takes the first.
        (3, None, Accelerator("cuda", 1, ("CUDA_VISIBLE_DEVICES", "3")), {}, "cuda:0"),
        (3, None, Accelerator("cuda", 2), {"SLURM_GPUS_PER_TASK": "2"}, "cuda:0"),
    ],
)
def test_which_device_a_rank_of_four_on_its_host_takes(
    local_rank: int, wanted: str | None, accelerator: Accelerator | None, environment: dict[str, str], device: str
) -> None:
    assert str(choose_device(5, local_rank, 4, wanted, accelerator, environment)) == device


def test_more_ranks_than_devices_is_told_to_every_rank_of_the_host() -> None:
    for local_rank in (0, 4):
        with pytest.raises(DeviceError, match=r"5 ranks on this host, but only 4 cuda devices\. Start at most 4 ranks"):
            choose_device(0, local_rank, 5, None, FOUR, {})
    hidden = Accelerator("cuda", 2, ("CUDA_VISIBLE_DEVICES", "0,2"))
    with pytest.raises(DeviceError, match=r"only 2 cuda devices \(CUDA_VISIBLE_DEVICES=0,2\)"):
        choose_device(0, 0, 4, None, hidden, {})


def test_device_that_is_not_there_is_refused() -> None:
    cases: list[tuple[str, Accelerator | None, dict[str, str], str]] = [
        ("cuda:4", FOUR, {}, "sees only 4 cuda devices"),
        ("xpu", FOUR, {}, "sees 4 of type cuda"),
        ("cuda", None, {}, "sees no accelerator"),
        ("cuda", None, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides them"),
        ("graphics", None, {}, "'graphics' is not a device"),
    ]
    for wanted, accelerator, environment, text in cases:
        with pytest.raises(DeviceError, match=text):
            choose_device(0, 0, 1, wanted, accelerator, environment)


def test_what_this_process_sees_and_a_busy_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(index: int) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore lines")

    stand_in = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: torch.device("cuda"))
    stand_in.device_count, stand_in.set_device_index = (lambda: 2), busy
    monkeypatch.setattr(torch, "accelerator", stand_in)
    assert devices.find_accelerator({}) == Accelerator("cuda", 2)
    mask = ("HIP_VISIBLE_DEVICES", "1,5")
    assert devices.find_accelerator(dict([mask])) == Accelerator("cuda", 2, mask)
    with pytest.raises(DeviceError) as caught:
        devices.open_device(torch.device("cuda", 1), rank=5)
    assert "rank 5 could not open cuda:1: CUDA error: all CUDA-capable devices are busy" in str(caught.value)
    assert "more lines" not in str(caught.value)  # the vendor's reason
    stand_in.device_count = lambda: 0
    assert devices.find_accelerator({"CUDA_VISIBLE_DEVICES": ""}) is None
    said = "the backend nccl serves cuda devices, and this process sees no accelerator; phalanx fits the CPU"
    with pytest.raises(phalanx.PhalanxError, match=said):
        phalanx.init(backend="nccl")
    assert why_unfit("cpu:gloo,cuda:nccl", FOUR) == ""


def test_devices_that_ranks_share_are_found_by_host() -> None:
    hosts = ["a", "a", "b", "b", "a"]
    assert shared_devices(hosts, ["cuda 0", "cuda 1", "cuda 0", "cuda 0", "cuda 1"]) == [
        ("a", "cuda 1", [1, 4]),
        ("b", "cuda 0", [2, 3]),
    ]
    assert shared_devices(hosts, [""] * 5) == []
    masks = [Accelerator("cuda", 1, ("MASK", mask)) for mask in ("2", "3")]  # number 0 of each is another device
    assert len({devices.physical_device(torch.device("cuda", 0), mask) for mask in masks}) == 2


def test_the_hint_is_for_one_process_on_many_devices() -> None:
    assert "phalanx run -n 4" in devices.hint_for_one_process("none", torch.device("cuda", 0), FOUR)
    assert not devices.hint_for_one_process("none", torch.device("cpu"), FOUR)
    assert not devices.hint_for_one_process("none", torch.device("cuda", 0), Accelerator("cuda", 1))
    assert not devices.hint_for_one_process("slurm", torch.device("cuda", 0), FOUR)
