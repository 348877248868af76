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
NOT_NEEDED = re.compile(r"ruff|mypy|types-.*")


def releases() -> dict[str, float]:
    """Every release of the list, with the gigabytes that its environment takes."""
    lines = (REQUIREMENTS / "torch-versions.txt").read_text().splitlines()
    pairs = [line.split() for line in lines if line and not line.startswith("#")]
    return {version: float(size) for version, size in pairs}


def constraints(version: str) -> str:
    """The constraints of the main environment with another torch."""
    lines = (REQUIREMENTS / "constraints.txt").read_text()
    return re.sub(r"^torch==.*$", f"torch=={version}", lines, flags=re.MULTILINE)


def is_pinned(version: str) -> bool:
    return constraints(version) == (REQUIREMENTS / "constraints.txt").read_text()


def needed() -> list[str]:
    """The packages that the tests need."""
    lines = (REQUIREMENTS / "development.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("-") and not NOT_NEEDED.fullmatch(line)]


def install(version: str, size_gb: float, folder: Path) -> str:
    """Make the environment of a release, if it is not there; why it cannot be made, or nothing."""
    environment = folder / version
    stamp = environment / ".installed"
    if not stamp.exists():
        folder.mkdir(parents=True, exist_ok=True)
        free_gb = shutil.disk_usage(folder).free / 1e9
        print(f"torch {version}: installing {size_gb} GB into {environment} ({free_gb:.0f} GB are free)", flush=True)
        if free_gb < size_gb + SPARE_GB:
            return f"it takes {size_gb + SPARE_GB} GB while it is installed, and {free_gb:.1f} GB are free"
        steps = [[sys.executable, "-m", "venv", str(environment)]]
        listed = environment / "constraints.txt"
        pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        steps.append([*pip, "-c", str(listed), *needed()])
        for step in steps:
            if step[0] != sys.executable:
                listed.write_text(constraints(version))
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if line.strip()]
                return next((line for line in errors if "ERROR" in line), errors[-1] if errors else "pip failed")
        stamp.touch()
    # Quick, and anew each time: the entry points belong to what is installed.
    build = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    command = [
        str(environment / "bin/python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *build,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def test(python: Path, jobs: int, arguments: list[str]) -> tuple[int, str]:
    """Run the tests; pytest's exit status and its last line."""
    command = [
        str(python),
        "-m",
        "pytest",
        "-n",
        str(jobs),
        "--dist",
        "loadfile",
        "-m",
        "not long and not conformance",
        *arguments,
    ]
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
    listed = releases()
    results, failed = [], False
    for version in options.only or listed:
        if is_pinned(version):
            python, reason = Path(sys.executable), ""
        else:
            python = options.folder.absolute() / version / "bin/python"
            reason = install(version, listed[version], options.folder.absolute())
        print(f"torch {version}: {reason or python}", flush=True)
        status, line = (1, f"skipped, it could not be installed: {reason}") if reason else (0, "")
        if not reason:
            status, line = test(python, options.jobs, options.arguments)
        failed = failed or status != 0
        results.append(f"torch {version}: {line}")
    print("\n".join(["", *results]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
