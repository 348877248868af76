"""``phalanx run --bind``: the rank table tells which cores each rank has, on this host and on others."""

from __future__ import annotations

import os
import re
import shlex
import sys

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

from phalanx.words import format_spans

__all__ = ["hosts", "launcher", "remote"]

# In a mount namespace of its own: two devices, the first of which is near core 1 and the second near core 0.
DEVICES = """
    set -e
    mount --make-rprivate /
    mkdir -p dev
    mount --rbind /dev dev
    mount -t tmpfs none /dev
    ln -s "$PWD"/dev/* /dev/
    mount -t tmpfs none /proc/driver
    mount -t tmpfs none /sys/bus/pci/devices
    for device in 0 1; do
        gpu=/proc/driver/nvidia/gpus/0000:0$device:00.0 pci=/sys/bus/pci/devices/0000:0$device:00.0
        touch /dev/nvidia$device
        mkdir -p $gpu $pci
        printf 'Model: \\t NVIDIA H200\\nDevice Minor: \\t %s\\n' $device > $gpu/information
        echo $((1 - device)) > $pci/local_cpulist
    done
    exec "$@"
"""
SCRIPT = """
    import os, torch
    torch.ones(500, 500) @ torch.ones(500, 500)
    cores = {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in os.listdir("/proc/self/task")}
    policies = {line.split()[1] for line in open("/proc/self/numa_maps")}
    print(os.environ["RANK"], *cores, *policies)
"""
pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


@pytest.mark.skipif(not os.sched_getaffinity(0) >= {0, 1}, reason="needs cores 0 and 1")
def test_ranks_threads_and_memory_are_next_to_their_devices(launcher: Launcher) -> None:
    program = launcher.directory / "python"
    words = ["unshare", "--mount", "sh", "-c", DEVICES, "sh", sys.executable]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    launcher.python = str(program)
    several = {"OMP_NUM_THREADS": "2"}  # threads of torch, and of numpy in the process that forks the ranks
    outcome = launcher.run("-n", "2", "--no-prefix", "--bind", "core", launcher.script(SCRIPT), environment=several)
    assert sorted(outcome.out_lines) == ["0 (1,) local", "1 (0,) local"], outcome.err_text
    rows = [line.split()[4:] for line in outcome.err_text.splitlines()[2:4]]
    assert rows == [["cuda:0", "H200", "1", "(1)", "2"], ["cuda:1", "H200", "1", "(0)", "2"]]


def test_table_tells_the_cores_of_ranks_on_other_hosts(remote: RemoteLauncher) -> None:
    shared = min(2, len(os.sched_getaffinity(0)))
    script = remote.script('import os; print(os.environ["RANK"], *sorted(os.sched_getaffinity(0)))')
    job = remote.run("-H", f"h0:{shared},h1:1", "--no-preload", "--no-prefix", "--bind", "core", script)
    assert job.process.returncode == 0, job.said()
    cores = {int(rank): list(map(int, cpus)) for rank, *cpus in map(str.split, job.out.splitlines())}
    assert sorted(cpu for rank in range(shared) for cpu in cores[rank]) == cores[shared], job.said()
    cells = [f"{len(cores[rank])} ({format_spans(cores[rank])})" for rank in sorted(cores)]
    threads = [len(cores[shared]) // shared] * shared + [len(cores[shared])]
    told = re.findall(r"(\d+ \(.*\)) +(\d+)$", job.err, re.MULTILINE)
    assert told == [(cell, str(count)) for cell, count in zip(cells, threads, strict=True)], job.said()
