"""The rank table's devices, from the files of the drivers as machines have them."""

from pathlib import Path

import pytest

from phalanx.topology import device_files
from phalanx.topology.device_files import FoundDevice, device_of_rank, devices_of_ranks, visible_devices

H200 = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{0}f2e\nBus Location: \t 0000:{0}9:00.0\nDevice Minor: \t {0}\n"


def seen(environment: dict[str, str], root: str) -> list[FoundDevice]:
    found = visible_devices(environment, root)
    assert found is not None
    return found


@pytest.fixture
def four_h200(tmp_path: Path) -> str:
    for minor in range(4):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:{minor}9:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(H200.format(minor))
    (tmp_path / "dev").mkdir()
    for minor in range(3):  # the fourth is not given to this container
        (tmp_path / f"dev/nvidia{minor}").touch()
    return str(tmp_path)


@pytest.mark.parametrize(
    ("mask", "buses"), [(None, "012"), ("", ""), ("2,0", "20"), ("GPU-1", "1"), ("1,-1,0", "1"), ("7", "")]
)
def test_masks_of_cuda_choose_and_order_devices(four_h200: str, mask: str | None, buses: str) -> None:
    found = seen({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}, four_h200)
    assert "".join(device.pci[5] for device in found) == buses
    assert {device.name for device in found} <= {"H200"}


def test_models_are_not_said_where_cuda_may_order_them_otherwise(four_h200: str) -> None:
    other = Path(four_h200, "proc/driver/nvidia/gpus/0000:19:00.0/information")
    other.write_text(other.read_text().replace("H200", "L4"))
    assert [device.name for device in seen({}, four_h200)] == ["", "", ""]


def test_devices_of_amd_and_of_ascend_are_found(tmp_path: Path) -> None:
    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/1"
    node.mkdir(parents=True)
    (node / "properties").write_text("simd_count 304\nlocation_id 768\ndomain 0\nunique_id 255\n")
    (node / "name").write_text("aqua_vanjaram\n")
    assert seen({"HIP_VISIBLE_DEVICES": "0"}, str(tmp_path))[0].pci == "0000:03:00.0"
    (tmp_path / "b/dev").mkdir(parents=True)
    (tmp_path / "b/dev/davinci0").touch()
    (tmp_path / "b/dev/davinci_manager").touch()
    assert [device.kind for device in seen({}, str(tmp_path / "b"))] == ["npu"]


@pytest.mark.parametrize(
    ("asked", "names", "said"),
    [
        (None, [], "cpu"),
        (None, None, "?"),
        (None, ["cuda:0 H200", "cuda:1 H200"], "cuda:1 H200"),
        (None, ["cuda:0 H200"], "?"),
        ("cpu", ["cuda:0 H200"], "cpu"),
        ("cuda:0", ["cuda:0 H200"], "cuda:0 H200"),
        ("cuda", None, "cuda:1"),
    ],
)
def test_table_says_the_device_of_local_rank_1(asked: str | None, names: list[str] | None, said: str) -> None:
    assert device_of_rank(1, asked, names) == said


def test_ranks_take_the_device_asked_for_or_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [FoundDevice("cuda", pci=bus) for bus in "ab"]
    monkeypatch.setattr(device_files, "visible_devices", lambda environment: found)
    assert devices_of_ranks(2, None, {}) == found
    assert devices_of_ranks(3, "cuda:1", {}) == [found[1]] * 3
    for ranks, asked in ((3, None), (2, "cpu"), (2, "cuda:2")):
        assert devices_of_ranks(ranks, asked, {}) == []


def test_a_machine_with_files_that_tell_nothing_is_not_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_files, "accelerator_files", lambda: ["/dev/dri/renderD128"])
    monkeypatch.setattr(device_files, "visible_devices", lambda environment: None)
    assert device_files.device_names({}) is None
    monkeypatch.setattr(device_files, "visible_devices", lambda environment: [])  # CUDA_VISIBLE_DEVICES=""
    assert device_of_rank(0, None, device_files.device_names({})) == "cpu"
