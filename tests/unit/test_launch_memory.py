"""``phalanx run --memory``: which variables the ranks get, and what they do to a rank's memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher

from phalanx.launch.job import memory
from phalanx.launch.job.job import make_job
from phalanx.launch.job.target import Target

__all__ = ["launcher"]  # the fixture

MIB = 1 << 20
SCRIPT = Target("script", "train.py", "/home/user/train.py", ("train.py",))
HUGE = {memory.HUGE: "1"}


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for the kernel's file about huge pages, which says that programs may ask for them."""
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never\n")
    monkeypatch.setattr(memory, "_ENABLED", str(file))
    return file


def chosen(mode: memory.Memory, **environment: str) -> dict[str, str]:
    return memory.variables(mode, ranks=4, memory_nbytes=1600 * MIB, environment=environment)


@pytest.mark.usefixtures("offered")
def test_each_mode_sets_the_variables_that_torch_and_glibc_read() -> None:
    assert chosen("huge") == HUGE
    # All four ranks together keep at most a quarter of the 1,600 MiB that are left.
    assert chosen("keep") == HUGE | {memory.MMAP_MAX: "0", memory.TRIM_THRESHOLD: str(100 * MIB)}
    assert chosen("return") == {}
    # An allocator that the user has set up is left alone.
    for name, value in (("MALLOC_TOP_PAD_", "4096"), (memory.HUGE, "0"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")):
        assert chosen("huge", **{name: value}) == chosen("keep", **{name: value}) == {}


def test_kernel_without_huge_pages_is_not_asked_for_them(offered: Path) -> None:
    offered.write_text("always madvise [never]\n")
    assert chosen("huge") == {}
    assert memory.HUGE not in chosen("keep")
    offered.unlink()
    assert chosen("huge") == {}


def test_ranks_on_an_accelerator_and_other_programs_get_none_of_them() -> None:
    assert make_job(2, SCRIPT, device="cuda", memory="keep", environment={}).memory == {}
    program = Target("program", "true", "/bin/true", ("true",))
    assert make_job(2, program, device="cpu", memory="keep", environment={}).memory == {}
    assert make_job(2, SCRIPT, device="cpu", memory="keep", environment={}).memory[memory.MMAP_MAX] == "0"


PROGRAM = """
    import json, os, torch

    def resident_mib():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    before = resident_mib()
    tensor = torch.ones(256 << 18)
    held = resident_mib()
    del tensor
    print(json.dumps([held - before, resident_mib() - before, os.environ.get("MALLOC_MMAP_MAX_")]))
"""


@pytest.mark.long
def test_freed_tensor_stays_in_the_rank_only_if_that_was_asked_for(launcher: Launcher) -> None:
    script = launcher.script(PROGRAM)
    modes = ("keep", "huge", "return")
    plain = ["--device", "cpu", "-q", "--no-prefix", "-n", "2", script]
    for mode, outcome in zip(modes, launcher.run_all(*(["--memory", mode, *plain] for mode in modes)), strict=True):
        assert outcome.code == 0, outcome.err_text
        assert len(outcome.out_lines) == 2
        for line in outcome.out_lines:
            held_mib, left_mib, mmap_max = json.loads(line)
            assert 256 <= held_mib <= 264  # the tensor, and no more than some pages beside it
            assert left_mib >= 256 if mode == "keep" else left_mib <= 8
            assert mmap_max == ("0" if mode == "keep" else None)
