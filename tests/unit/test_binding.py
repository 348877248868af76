"""Ranks of ``--bind`` get the cores next to their devices, on the machines of ``tests/data/machines``."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.binding import bind_ranks, cpus_near, parse_cpu_list, usable_cpus
from phalanx.topology.device_files import FoundDevice, visible_devices
from phalanx.words import format_spans

MACHINES = Path(__file__).parents[1] / "data" / "machines"

Binding = Callable[..., list[str]]


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def write_machine(machine: dict[str, Any], root: Path) -> None:
    """The files of the kernel and the driver."""
    for node, cpulist in machine["nodes"].items():
        write(root / f"sys/devices/system/node/node{node}/cpulist", f"{cpulist}\n")
        for cpu in parse_cpu_list(cpulist) if machine["sibling"] else ():
            core = cpu % machine["sibling"]
            siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            write(siblings, f"{core},{core + machine['sibling']}\n")
    addresses = [address for address, *_ in machine["devices"]]
    for number, (address, numa_node, cpulist) in enumerate(machine["devices"]):
        write(root / f"sys/bus/pci/devices/{address}/numa_node", f"{numa_node}\n")
        write(root / f"sys/bus/pci/devices/{address}/local_cpulist", f"{cpulist}\n")
        if machine["kind"] == "nvidia":
            write(root / f"proc/driver/nvidia/gpus/{address}/information", f"Device Minor: \t {number}\n")
            write(root / f"dev/nvidia{number}", "")
        else:
            domain, bus = (int(part, 16) for part in address.split(":")[:2])
            part = number - addresses.index(address)
            properties = f"simd_count 40\nlocation_id {part << 28 | bus << 8}\ndomain {domain}\n"
            write(root / f"sys/class/kfd/kfd/topology/nodes/{len(machine['nodes']) + number}/properties", properties)


@pytest.fixture
def bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Binding:
    """The cores of each rank on a machine."""

    def bind(name: str, how: Any, ranks: int, allowed: str = "", one: bool = False, **changed: Any) -> list[str]:
        machine = json.loads((MACHINES / f"{name}.json").read_text())
        for place, values in changed.pop("devices", {}).items():
            machine["devices"][place][1:] = values
        write_machine(machine, tmp_path)
        cpus = parse_cpu_list(allowed or ",".join(machine["nodes"].values()))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
        devices = visible_devices({}, str(tmp_path)) or []
        near = cpus_near([devices[0 if one else rank] for rank in range(ranks)], str(tmp_path / "sys/bus/pci/devices"))
        found = bind_ranks(how, ranks, usable_cpus(str(tmp_path / "sys/devices/system")), near=near, **changed)
        return [format_spans(own) for own in found]

    return bind


def test_ranks_share_the_cores_of_their_devices_node(bound: Binding) -> None:
    """Two sockets, four devices each: 14 whole physical cores for each rank."""
    spans = [f"{14 * rank}-{14 * rank + 13}, {112 + 14 * rank}-{125 + 14 * rank}" for rank in range(8)]
    assert bound("dgx-h100", "core", 8) == spans
    assert bound("dgx-h100", "numa", 8) == ["0-55, 112-167"] * 4 + ["56-111, 168-223"] * 4


def test_ranks_follow_devices_that_are_not_in_the_order_of_the_nodes(bound: Binding) -> None:
    nodes = ["48-63, 176-191", "16-31, 144-159", "112-127, 240-255", "80-95, 208-223"]
    assert bound("dgx-a100", "numa", 8) == [node for node in nodes for _ in range(2)]
    assert bound("dgx-a100", "core", 4) == ["48-55, 176-183", "56-63, 184-191", "16-23, 144-151", "24-31, 152-159"]


def test_parts_of_a_divided_device_are_near_the_same_cores(bound: Binding) -> None:
    spans = [f"{4 * rank}-{4 * rank + 3}, {96 + 4 * rank}-{99 + 4 * rank}" for rank in range(24)]
    assert bound("mi300a-cpx", "core", 24) == spans


def test_firmware_that_does_not_know_binds_as_without_devices(bound: Binding) -> None:
    assert bound("vm-unknown", "core", 8) == [f"{16 * rank}-{16 * rank + 15}" for rank in range(8)]
    assert bound("vm-unknown", "numa", 8) == ["0-63"] * 4 + ["64-127"] * 4
    assert cpus_near([FoundDevice("npu")] * 4) == []  # its address is not known either


def test_no_core_is_given_twice_if_firmware_knows_only_some(bound: Binding) -> None:
    spans = [f"{14 * rank}-{14 * rank + 13}, {112 + 14 * rank}-{125 + 14 * rank}" for rank in range(8)]
    assert bound("dgx-h100", "core", 8, devices={5: [-1, "0-223"]}) == spans


def test_only_allowed_cores_are_taken_as_long_as_all_ranks_have_some_near(bound: Binding) -> None:
    assert bound("dgx-a100", "core", 4, allowed="0-19,62-63") == ["62", "63", "16-17", "18-19"]
    assert bound("dgx-a100", "numa", 4, allowed="0-15,62-63") == ["0-15"] * 4
    assert bound("dgx-a100", "core", 4, allowed="0-16,62-63") == ["0-3", "4-8", "9-13", "14-16, 62-63"]


def test_ranks_of_one_device_share_what_is_near(bound: Binding) -> None:
    assert bound("dgx-a100", "core", 16, one=True) == [f"{cpu}, {cpu + 128}" for cpu in range(48, 64)]
    assert bound("dgx-a100", "numa", 40, one=True) == ["48-63, 176-191"] * 40


def test_a_quota_counts_for_all_devices_together(bound: Binding) -> None:
    with pytest.raises(LaunchError, match="8 ranks need a core each, and this process may use 4"):
        bound("dgx-h100", "core", 8, most=4)
