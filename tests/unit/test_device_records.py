"""``phalanx doctor --gpu``: what it says of records of accelerators, which are made up here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from phalanx.doctor.accelerators import DeviceRecord, device_findings, devices_as_text, parse_xids
from phalanx.doctor.variables import device_variables
from phalanx.topology.device_files import accelerator_files

WELL = DeviceRecord(
    "cuda:0",
    "H200",
    lanes=16,
    most_lanes=16,
    gigatransfers=32,
    most_gigatransfers=32,
    peers=3,
    teraflops=700,
    to_bytes_per_s=55e9,
    from_bytes_per_s=55e9,
)


@pytest.mark.parametrize(
    ("changed", "level", "text"),
    [
        ({}, 0, ""),
        ({"teraflops": 300}, 1, "product TFLOP/s: 43% of the median"),
        ({"from_bytes_per_s": 10e9}, 1, "from it GB/s: 18% of the median"),
        ({"lanes": 8}, 1, "8 of 16 lanes, at 32 of 32 GT/s"),
        ({"gigatransfers": 2.5}, 1, "16 of 16 lanes, at 2.5 of 32 GT/s"),
        ({"lanes": 0, "gigatransfers": 0}, 0, ""),  # not known
        ({"ecc_corrected": 7, "ecc_uncorrected": 0}, 0, ""),
        ({"ecc_corrected": 7, "ecc_uncorrected": 2}, 2, "2 uncorrected ECC errors"),
        ({"xids": [79, 31, 79]}, 1, "Xid 31 and 79"),
        ({"xids": None}, 0, ""),
        ({"peers": 1}, 1, "1 devices of this host directly"),
        ({"teraflops": 0, "error": "out of memory"}, 2, "could not be measured: out of memory"),
    ],
)
def test_each_fault_of_a_device_is_one_finding(changed: dict[str, object], level: int, text: str) -> None:
    ill = replace(WELL, device="cuda:3", **changed)  # type: ignore[arg-type]
    found = device_findings({"h1": [WELL, WELL, WELL, ill], "h2": [WELL]})
    assert [(one.host, one.subject, int(one.level)) for one in found] == [("h1", "cuda:3", level)] * bool(level)
    assert all(text in one.said and one.remedy for one in found)


def test_table_marks_the_slow_device() -> None:
    slow = replace(WELL, device="cuda:3", teraflops=300, xids=None)
    other = replace(WELL, device="cuda:4", name="A2", teraflops=9)  # slower by design
    text = devices_as_text({"h1": [WELL, WELL, slow, other], "h2": [replace(WELL, teraflops=300)]})
    assert [line.split()[:2] for line in text.splitlines() if "slow" in line] == [["h1", "cuda:3"]]
    assert "300 slow" in text
    assert "unreadable" in text
    assert devices_as_text({"": []}) == ""


def test_variables_with_values_that_they_cannot_have() -> None:
    right = {"NCCL_DEBUG": "warn", "CUDA_VISIBLE_DEVICES": "0,GPU-1f", "NCCL_P2P_LEVEL": "NVL", "NCCL_IB_DISABLE": "0"}
    assert list(device_variables(right)) == []
    wrong = {"NCCL_DEBUG": "loud", "CUDA_VISIBLE_DEVICES": "0;1", "NCCL_P2P_DISABLE": "true"}
    assert sorted(one.said.split("=")[0] for one in device_variables(wrong)) == sorted(wrong)


def test_xids_are_counted_by_device() -> None:
    log = "[1.2] NVRM: Xid (PCI:0000:19:00): 79, pid=1, GPU has fallen off the bus.\n[1.3] eth0: up\n"
    assert parse_xids(log) == {"0000:19:00.0": [79]}


@pytest.mark.skipif(bool(accelerator_files()), reason="there is an accelerator")
def test_host_without_accelerator_gets_one_line() -> None:
    command = [sys.executable, "-m", "phalanx", "doctor", "--gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "no accelerator on this machine\n"), done.stderr
