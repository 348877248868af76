"""The job before it is started: target, threads, environments, limits, the rank table."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.job import make_job
from phalanx.launch.job.options import LaunchOptions
from phalanx.launch.job.target import Target, compile_target, find_target
from phalanx.system.limits import Limit, Resource, check_limits, usable_cores
from phalanx.topology.table import RankRow, format_rank_table


def executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_python_file_is_a_script_and_what_this_python_would_run_is_forked(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").write_text("x = 1")
    script = tmp_path / "train.py"
    script.symlink_to(tmp_path / "real" / "train.py")
    target = find_target(str(script), ("--lr", "0.1"))
    assert (target.kind, target.argv) == ("script", (str(script), "--lr", "0.1"))
    # python finds a linked script's neighbours beside the real file.
    assert target.search_path == str(tmp_path / "real")
    python = sys.executable
    assert find_target(python, (str(script), "a")) == find_target(str(script), ("a",))
    assert find_target(python, ("-m", "json.tool", "-n")) == find_target("json.tool", ("-n",), module=True)
    for words in ((), ("-c", "1"), ("-m",), ("-O", str(script))):
        assert find_target(python, words).kind == "program"
    assert find_target(executable(tmp_path / "python", "#!/bin/sh\n"), (str(script),)).kind == "program"
    target = find_target("sh", ("-c", "true"))
    assert (target.kind, os.path.isabs(target.path), target.argv) == ("program", True, ("sh", "-c", "true"))


@pytest.mark.parametrize(
    ("first_line", "kind"),
    [
        ("#!/usr/bin/env python3", "script"),
        ("#!/usr/bin/env -S python3 -u", "script"),
        (f"#!{sys.executable}", "script"),
        ("#!/opt/another/bin/python3", "program"),
        ("#!/bin/sh", "program"),
    ],
)
def test_first_line_decides_for_other_names(tmp_path: Path, first_line: str, kind: str) -> None:
    assert find_target(executable(tmp_path / "tool", first_line + "\n")).kind == kind


def test_folders_archives_and_scripts_are_compiled(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"without a __main__\.py"):
        find_target(str(tmp_path))
    (tmp_path / "__main__.py").write_text("")
    assert find_target(str(tmp_path)).kind == "archive"
    bundle = tmp_path / "app.pyz"
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr("__main__.py", "print(1)")
    target = find_target(str(bundle))
    assert (target.kind, target.search_path) == ("archive", str(bundle))
    code, spec = compile_target(target)
    assert code is not None
    assert spec is not None
    assert spec.name == "__main__"
    path = tmp_path / "s.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1"))
    code, spec = compile_target(find_target(str(path)))
    assert code is not None
    assert spec is None
    scope: dict[str, object] = {}
    exec(code, scope)
    assert scope["x"] == "é"


TARGET = Target("script", "t", "/t", ("t",))


def test_threads_are_the_ranks_share_of_the_cores_or_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(ranks: int, **environment: str) -> str:
        return make_job(LaunchOptions(ranks=ranks), TARGET, environment).threads

    monkeypatch.setattr("phalanx.launch.job.job.usable_cores", lambda: 8)
    assert [threads(3), threads(64), threads(3, OMP_NUM_THREADS="3")] == ["2", "1", "3"]
    assert threads(3, OMP_NUM_THREADS="4,2") == "4,2"
    for wrong in ("many", "0", "-1", "2,"):
        with pytest.raises(LaunchError, match=f"OMP_NUM_THREADS='{wrong}' is not a number of threads"):
            threads(1, OMP_NUM_THREADS=wrong)


def test_interfaces_devices_and_cores_that_are_not_there_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        LaunchError, match=r"^--interface sets PHALANX_INTERFACE=none0: .* no interface .* are .*lo 127"
    ):
        make_job(LaunchOptions(interface="none0"), TARGET)
    assert make_job(LaunchOptions(interface="lo"), TARGET).environment(0, port=1)["PHALANX_INTERFACE"] == "lo"
    for device in ("gpu:1", "tpu"):
        with pytest.raises(LaunchError, match=f"{device}: torch calls such a device"):
            make_job(LaunchOptions(device=device), TARGET, {})
        with pytest.raises(LaunchError, match=f"{device}: torch calls such a device"):
            make_job(LaunchOptions(), TARGET, {"PHALANX_DEVICE": device})
    cores = usable_cores()
    assert make_job(LaunchOptions(ranks=cores), TARGET).warnings() == []
    (warning,) = make_job(LaunchOptions(ranks=cores + 1), TARGET).warnings()
    assert f"{cores + 1} ranks share {cores} cores" in warning
    monkeypatch.setattr("phalanx.launch.job.job.count_devices", lambda: 8)
    monkeypatch.setattr("phalanx.launch.job.job.device_names", lambda environment: None)
    (note,) = make_job(LaunchOptions(), TARGET, {}).warnings()
    assert note == "this machine has 8 accelerators, and one rank uses one of them: phalanx run -n 8 …"
    assert make_job(LaunchOptions(ranks=1), TARGET, {}).warnings() == []


def test_limit_says_how_many_would_fit() -> None:
    limit = Limit(Resource.FILES, "raise it", available=132, per_rank=5, beside=32)
    check_limits(20, [limit])
    with pytest.raises(LaunchError, match=r"21 ranks need about 137 open files.*enough for 20 ranks; raise it"):
        check_limits(21, [limit])
    memory = Limit(Resource.MEMORY, "free memory", available=1 << 30, per_rank=1 << 28, beside=0)
    with pytest.raises(LaunchError, match=r"1\.2 GiB of memory, and 1\.0 GiB of memory are left"):
        check_limits(5, [memory])


def test_table_has_a_line_a_rank_or_a_node_and_fits_the_terminal() -> None:
    name = "gpu-a100-rack17-node0042.cluster.example.org"
    rows = [RankRow(rank, rank // 16, f"{name}{rank // 16}", rank % 16, "cpu", None, 8, 2) for rank in range(32)]
    lines = format_rank_table(rows[15:17], title="the title", backend="phalanx", width=200).splitlines()
    assert lines[0] == "the title, phalanx"
    assert lines[1].split() == ["rank", "node", "host", "local", "rank", "device", "cores", "threads"]
    assert [line.split() for line in lines[2:]] == [
        ["15", "0", f"{name}0", "15", "cpu", "8", "2"], ["16", "1", f"{name}1", "0", "cpu", "8", "2"],
    ]  # fmt: skip
    for width, many in ((40, rows[:2]), (80, rows[:2]), (40, rows), (80, rows)):
        header, *shown = format_rank_table(many, title="t", width=width).splitlines()[1:]
        assert max(map(len, shown)) <= width
        assert header.split()[:2] == (["rank", "node"] if many != rows else ["node", "host"])
        for index, line in enumerate(shown):
            host = line.split()[2 if many != rows else 1]
            assert line.split()[0] == str(index)
            assert (host[:4], "…" in host, host[-4:]) == ("gpu-", True, "org0" if many != rows else f"org{index}")
    wide = format_rank_table(rows, title="t", width=200).splitlines()
    assert [line.split()[2:6] for line in wide[2:]] == [["0-15", "16", "cpu", "8"], ["16-31", "16", "cpu", "8"]]
    assert "\x1b[" in format_rank_table(rows, title="t", color=True)
