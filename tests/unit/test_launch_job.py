"""The job before it is started: target, threads, environments, limits, the rank table."""

from __future__ import annotations

import os
import py_compile
import sys
import zipfile
from pathlib import Path

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.job import make_job
from phalanx.launch.job.target import Target, compile_target, find_target
from phalanx.system.limits import Limit, Resource, check_limits, usable_cores
from phalanx.topology.table import RankRow, format_rank_table


def executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_python_file_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").write_text("x = 1")
    link = tmp_path / "train.py"
    link.symlink_to(tmp_path / "real" / "train.py")
    target = find_target(str(link), ("--lr", "0.1"))
    assert target.kind == "script"
    assert target.argv == (str(link), "--lr", "0.1")
    # python finds a linked script's neighbours beside the real file.
    assert target.search_path == str(tmp_path / "real")


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
def test_the_first_line_decides_for_other_names(tmp_path: Path, first_line: str, kind: str) -> None:
    assert find_target(executable(tmp_path / "tool", first_line + "\n")).kind == kind


def test_directories_and_archives_need_a_main(tmp_path: Path) -> None:
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


def test_what_this_python_would_run_is_forked(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    python = sys.executable
    assert find_target(python, (str(script), "a")) == find_target(str(script), ("a",))
    assert find_target(python, ("-m", "json.tool", "-n")) == find_target("json.tool", ("-n",), module=True)
    for words in ((), ("-c", "1"), ("-m",), ("-O", str(script))):
        assert find_target(python, words).kind == "program"
    assert find_target(executable(tmp_path / "python", "#!/bin/sh\n"), (str(script),)).kind == "program"


def test_programs_are_found_on_the_path() -> None:
    target = find_target("sh", ("-c", "true"))
    assert target.kind == "program"
    assert os.path.isabs(target.path)
    assert target.argv == ("sh", "-c", "true")


def test_what_cannot_be_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"missing\.py: no such file.*no program"):
        find_target("missing.py")
    with pytest.raises(LaunchError, match=r"/nowhere/x: no such file$"):
        find_target("/nowhere/x")
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(LaunchError, match=r"neither Python .* nor executable"):
        find_target(str(text))


def test_scripts_are_compiled(tmp_path: Path) -> None:
    path = tmp_path / "s.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1"))
    code, spec = compile_target(find_target(str(path)))
    assert code is not None
    assert spec is None
    scope: dict[str, object] = {}
    exec(code, scope)
    assert scope["x"] == "é"
    compiled = py_compile.compile(str(path), cfile=str(tmp_path / "s.pyc"))
    code, _ = compile_target(find_target(str(compiled)))
    assert code is not None
    (tmp_path / "old.pyc").write_bytes(b"0" * 32)
    with pytest.raises(LaunchError, match="another version"):
        compile_target(find_target(str(tmp_path / "old.pyc")))


def target_of(kind: str = "script") -> Target:
    return Target(kind, "t", "/t", ("t",))  # type: ignore[arg-type]


def test_threads_are_the_ranks_share_of_the_cores_or_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(ranks: int, **environment: str) -> str:
        return make_job(ranks, target_of(), environment=environment).threads

    monkeypatch.setattr("phalanx.launch.job.job.usable_cores", lambda: 8)
    assert threads(3) == "2"
    assert threads(64) == "1"
    assert threads(3, OMP_NUM_THREADS="3") == "3"
    assert threads(3, OMP_NUM_THREADS="4,2") == "4,2"
    for wrong in ("many", "0", "-1", "2,"):
        with pytest.raises(LaunchError, match=f"OMP_NUM_THREADS='{wrong}' is not a number of threads"):
            threads(1, OMP_NUM_THREADS=wrong)


def test_an_interface_that_this_host_has_not_is_refused_with_those_it_has() -> None:
    with pytest.raises(
        LaunchError, match=r"^--interface sets PHALANX_INTERFACE=none0: .* no interface .* are .*lo 127"
    ):
        make_job(1, target_of(), interface="none0")
    assert make_job(1, target_of(), interface="lo").environment(0, port=1)["PHALANX_INTERFACE"] == "lo"


def test_more_ranks_than_cores_is_said() -> None:
    cores = usable_cores()
    assert make_job(cores, target_of()).warnings() == []
    (warning,) = make_job(cores + 1, target_of()).warnings()
    assert f"{cores + 1} ranks share {cores} cores" in warning


def test_a_limit_says_how_many_would_fit() -> None:
    limit = Limit(Resource.FILES, "raise it", available=132, per_rank=5, beside=32)
    assert limit.fits == 20
    check_limits(20, [limit])
    with pytest.raises(LaunchError, match=r"21 ranks need about 137 open files.*enough for 20 ranks; raise it"):
        check_limits(21, [limit])
    memory = Limit(Resource.MEMORY, "free memory", available=1 << 30, per_rank=1 << 28, beside=0)
    with pytest.raises(LaunchError, match=r"1\.2 GiB of memory, and 1\.0 GiB of memory are left"):
        check_limits(5, [memory])


def rows(count: int, nodes: int = 1, pid: int | None = None) -> list[RankRow]:
    each = count // nodes
    return [RankRow(r, r // each, f"host{r // each}", r % each, "cpu", pid, 8, 2) for r in range(count)]


def test_table_has_a_line_a_rank() -> None:
    text = format_rank_table(rows(3), title="the title", backend="phalanx")
    lines = text.splitlines()
    assert lines[0] == "the title, phalanx"
    assert lines[1].split() == ["rank", "node", "host", "local", "rank", "device", "cores", "threads"]
    assert [line.split() for line in lines[2:]] == [[str(r), "0", "host0", str(r), "cpu", "8", "2"] for r in range(3)]
    assert "\x1b" not in text
    assert text.endswith("\n")


def test_table_of_many_ranks_has_a_line_a_node() -> None:
    lines = format_rank_table(rows(32, nodes=2), title="t").splitlines()
    assert [line.split()[:6] for line in lines[2:]] == [
        ["0", "host0", "0-15", "16", "cpu", "8"],
        ["1", "host1", "16-31", "16", "cpu", "8"],
    ]
    row = RankRow(0, 0, "[red]host", 0, "cpu", None, 1, 1)
    assert "[red]host" in format_rank_table([row], title="[bold]t")
    assert "\x1b[" in format_rank_table([row], title="t", color=True)


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_shortens_the_host_and_keeps_rank_and_node(count: int, width: int) -> None:
    name = "gpu-a100-rack17-node0042.cluster.example.org"
    rows = [RankRow(rank, rank % 2, f"{name}{rank % 2}", rank // 2, "cuda:0", None, 64, 16) for rank in range(count)]
    lines = format_rank_table(rows, title="t", width=width).splitlines()[1:]
    assert max(map(len, lines)) <= width
    header = lines[0].split()
    assert header[:2] == (["rank", "node"] if count == 2 else ["node", "host"])
    for index, line in enumerate(lines[1:]):
        words = line.split()
        assert words[0] == str(index)
        assert "…" in words[2 if count == 2 else 1]
        assert words[2 if count == 2 else 1].startswith("gpu-")
        assert words[2 if count == 2 else 1].endswith(f"org{index}")
    wide = format_rank_table(rows, title="t", width=200)
    assert name in wide
    assert "threads" in wide


@pytest.mark.parametrize("device", ["gpu:1", "tpu"])
def test_another_name_of_a_device_is_translated(device: str) -> None:
    for given in ({"device": device, "environment": {}}, {"environment": {"PHALANX_DEVICE": device}}):
        with pytest.raises(LaunchError, match=f"{device}: torch calls such a device"):
            make_job(1, target_of(), **given)


def test_one_rank_on_a_machine_with_several_devices_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.job.job.count_devices", lambda: 8)
    monkeypatch.setattr("phalanx.launch.job.job.accelerator_files", lambda: ["/dev/nvidia0"])
    (note,) = make_job(None, target_of(), environment={}).warnings()
    assert note == "this machine has 8 accelerators, and one rank uses one of them: phalanx run -n 8 …"
    assert make_job(1, target_of(), environment={}).warnings() == []
    assert make_job(None, target_of(), device="cpu", environment={}).warnings() == []
