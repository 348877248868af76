"""The result of `pip install .`: one wheel for every Python 3 on the platform, from the checkout or the sdist."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOOK = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(what: str, source: Path, into: Path) -> Path:
    """Run a build hook of PEP 517 in ``source``, as pip does."""
    command = [sys.executable, "-c", HOOK, what, str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.strip().splitlines()[-1]


@pytest.mark.long
def test_sdist_holds_all_it_takes_to_build_the_wheel(tmp_path: Path) -> None:
    # A copy, so that what a build leaves in the tree neither helps nor stays.
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    checkout = tmp_path / "checkout"
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_bytes((ROOT / name).read_bytes())
    sdist = build("build_sdist", checkout, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = build("build_wheel", unpacked, tmp_path)
    assert wheel.name.startswith("phalanx-")
    assert "-py3-none-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    # Both libraries, under names that every Python from 3.10 on looks for.
    assert "phalanx/native/libphalanx.so" in names
    assert "phalanx/native/entry.abi3.so" in names
    assert {"phalanx/py.typed", "phalanx/diagnosis/templates/page.html"} <= set(names)
    assert not [name for name in names if name.endswith((".c", ".h"))]


def test_core_exports_only_its_own_names() -> None:
    library = ROOT / "src/phalanx/native/libphalanx.so"
    assert os.access(library, os.R_OK), "the core is not built; run make"
    done = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    assert names
    assert all(name.startswith("phx_") for name in names)


def test_entry_needs_nothing_but_the_stable_abi() -> None:
    """No library but the system's, and no name of Python's that 3.10 did not promise to keep."""
    module = ROOT / "src/phalanx/native/entry.abi3.so"
    assert os.access(module, os.R_OK), "the entry is not built; run make"
    needed = subprocess.run(["readelf", "-d", str(module)], capture_output=True, text=True, check=True).stdout
    assert not [line for line in needed.splitlines() if "NEEDED" in line and ("torch" in line or "python" in line)]
    listed = subprocess.run(["nm", "-D", str(module)], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert "PyInit_entry" in names
    private = {name for name in names if name.startswith(("_Py", "PyUnstable"))}
    # What macros of the limited API expand to, and so is in the stable ABI.
    singletons = {f"_Py_{name}Struct" for name in ("None", "True", "False", "NotImplemented")}
    assert {name for name in private if not name.endswith("_SizeT")} <= singletons | {"_Py_Dealloc"}
