"""The tests on several releases of torch, each in an environment of its own: ``make torch-versions``.

``requirements/torch-versions.txt`` lists the releases. An environment that is there is used again; one that cannot be
made is reported, and the next release goes on. The environments differ in torch alone, but for what the tests do not
need (linters). The exit status is 1 if a test failed or a release could not be installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
SPARE_GB = 4.0  # the wheels are on the disk twice while pip installs them
# What is run of the tests without arguments: the backend, DDP, FSDP2, compiling, RPC, the launcher, and Gloo beside us.
CORE = [
    *(f"tests/world/test_{name}.py" for name in ("contract", "process_group", "values", "data_parallel", "call_forms")),
    *(f"tests/world/test_{name}.py" for name in ("training", "vendor", "torch_versions", "world", "stand_in")),
    *(f"tests/rpc/test_{name}.py" for name in ("calls", "gradients", "torch_api")),
    *(f"tests/fault/test_{name}.py" for name in ("launch_ends", "launch_ranks", "messages")),
    "tests/differential",
    "tests/unit/test_torch_names.py",
]
NOT_NEEDED = re.compile(r"ruff|mypy|types-.*")


def listed(name: str) -> list[str]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def install(version: str, size_gb: float, folder: Path) -> str:
    """Make the environment of a release, if it is not there; why it cannot be made, or nothing."""
    environment, constraints = folder / version, folder / f"{version}.constraints"
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = [[*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]]  # anew each time, and quick
    if not (environment / ".installed").exists():
        folder.mkdir(parents=True, exist_ok=True)
        free_gb = shutil.disk_usage(folder).free / 1e9
        print(f"torch {version}: installing {size_gb} GB into {environment} ({free_gb:.0f} GB are free)", flush=True)
        if free_gb < size_gb + SPARE_GB:
            return f"it takes {size_gb + SPARE_GB} GB while it is installed, and {free_gb:.1f} GB are free"
        pinned = [line for line in listed("constraints.txt") if not line.startswith(("torch==", "setuptools=="))]
        # torch 2.11 refuses the setuptools that is pinned, and Phalanx is not built by an older one than this.
        constraints.write_text("\n".join([*pinned, f"torch=={version}", "setuptools>=77\n"]))
        needed = [line for line in listed("development.txt") if not NOT_NEEDED.fullmatch(line)]
        steps[:0] = [[sys.executable, "-m", "venv", str(environment)], [*pip, "-c", str(constraints), *needed]]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.strip()]
            return next((line for line in errors if "ERROR" in line), errors[-1] if errors else "pip failed")
    (environment / ".installed").touch()
    return ""


def test(python: Path, jobs: int, arguments: list[str]) -> tuple[int, str]:
    """Run the tests; pytest's exit status and its last line."""
    marks = "not long and not conformance"
    command = [str(python), "-m", "pytest", "-n", str(jobs), "--dist", "loadfile", "-m", marks, *(arguments or CORE)]
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    last = ""
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return running.returncode, last.strip("= ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-torch", help="where the environments are")
    parser.add_argument("--jobs", type=int, default=2, help="tests side by side")
    parser.add_argument("--only", action="append", help="one release of the list; can be given again")
    parser.add_argument("arguments", nargs="*", help="pytest's own, after --")
    options = parser.parse_args()
    folder = options.folder.absolute()
    results, failed = [], False
    for line in listed("torch-versions.txt"):
        version, size_gb = line.split()
        if options.only and version not in options.only:
            continue
        is_own = f"torch=={version}" in listed("constraints.txt")
        reason = "" if is_own else install(version, float(size_gb), folder)
        python = Path(sys.executable) if is_own else folder / version / "bin/python"
        print(f"torch {version}: {reason or python}", flush=True)
        status, said = 1, f"skipped, it could not be installed: {reason}"
        if not reason:
            status, said = test(python, options.jobs, options.arguments)
        failed = failed or status != 0
        results.append(f"torch {version}: {said}")
    print("\n".join(["", *results]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
