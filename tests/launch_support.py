"""Start ``phalanx run`` as a user does, and check that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

MARK = "PHALANX_TEST_MARK"
PATIENCE_S = 300.0  # no busy machine needs as long


@dataclass
class Outcome:
    """How a launch ended."""

    code: int
    out: bytes
    err: bytes
    elapsed_s: float

    @property
    def out_lines(self) -> list[str]:
        return self.out.decode().splitlines()

    @property
    def err_text(self) -> str:
        return self.err.decode()


@dataclass
class RunningJob:
    """A launch under way."""

    process: subprocess.Popen[bytes]
    mark: str
    temporary: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_lines(self, count: int, stream: IO[bytes] | None = None) -> list[str]:
        """Wait until the launcher has printed ``count`` lines, and return them in order."""
        source = stream or self.process.stdout
        assert source is not None
        return sorted(source.readline().decode().rstrip("\n") for _ in range(count))

    def finish(self, timeout_s: float = PATIENCE_S, data: bytes | None = None) -> Outcome:
        out, err = self.process.communicate(data, timeout=timeout_s)
        return Outcome(self.process.returncode, out, err, time.monotonic() - self.started)

    def processes(self) -> list[int]:
        """Every process of this launch that is alive: a fork shows the environment its ancestor started with."""
        return [pid for pid in marked(self.mark) if pid != self.pid or self.process.poll() is None]

    def ranks(self) -> list[int]:
        """The ranks' process ids, in order of rank."""
        named = {comm(pid): pid for pid in self.processes()}
        return [named[name] for name in sorted(named, key=lambda name: (len(name), name)) if name.startswith("rank-")]

    def all_named(self, name: str) -> list[int]:
        return [pid for pid in self.processes() if comm(pid) == name]

    def named(self, name: str) -> int:
        """The one process of that name, once there is one: a fork bears its parent's name until it has its own."""
        wait_for(lambda: len(self.all_named(name)) == 1, complaint=lambda: f"{name}: {describe(self.processes())}")
        return self.all_named(name)[0]

    def wait_until_gone(self, timeout_s: float) -> None:
        """Wait until no process of this launch is left."""
        wait_for(lambda: not self.processes(), timeout_s, lambda: f"still alive: {describe(self.processes())}")


def comm(pid: int) -> str:
    """The name of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def marked(mark: str) -> list[int]:
    """The processes of this mark; a zombie has no environment any more, so it is not counted."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def describe(pids: list[int]) -> str:
    return "; ".join(f"{pid} {comm(pid)}" for pid in pids)


def wait_for(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, complaint: Callable[[], str] = lambda: ""
) -> None:
    """Poll a condition for which the kernel offers no event."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s; {complaint()}")
        time.sleep(0.01)


def ask_until(process: subprocess.Popen[bytes], said: Callable[[], str], expected: str) -> None:
    """Ask a launch where its ranks are (SIGQUIT) until an answer among what it has ``said`` has this pattern."""

    def says() -> bool:
        before = len(said())
        process.send_signal(signal.SIGQUIT)
        wait_for(lambda: re.search(r" at\n|did not say where|no stacks\n", said()[before:]), complaint=said)
        return re.search(expected, said()[before:]) is not None

    wait_for(says, complaint=said)


def changed(folder: Path, text: str) -> dict[str, str]:
    """The environment of a launch whose processes run this text before anything else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(textwrap.dedent(text))
    return {"PYTHONPATH": str(folder)}


def time_for_stacks(folder: Path) -> dict[str, str]:
    """The environment of a launch that gives its ranks longer to say where they are when it is interrupted.

    By design those that are late are left out, as any rank may be on a busy machine.
    """
    return changed(folder, "from phalanx.launch import agent\n\nagent._STACKS_S = 100.0\n")


class Launcher:
    """Starts launches: scripts are written and launches run in ``directory``, by ``python`` with these ``options``."""

    def __init__(self, directory: Path, python: str = sys.executable, options: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self.python = python
        self.options = options
        self.jobs: list[RunningJob] = []

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script into the launcher's directory; the text may be a block that is indented with its test."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).removeprefix("\n"))
        return str(path)

    def start(
        self,
        *arguments: str,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.PIPE,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> RunningJob:
        mark = secrets.token_hex(8)
        # Short, because multiprocessing puts sockets there, whose paths have at most 107 bytes.
        temporary = Path(tempfile.mkdtemp(prefix="phx-"))
        own = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "NO_COLOR")}
        process = subprocess.Popen(
            [self.python, "-m", "phalanx", "run", *self.options, *arguments],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd or self.directory,
            env={**own, MARK: mark, "TMPDIR": str(temporary), **(environment or {})},
        )
        job = RunningJob(process, mark, temporary)
        self.jobs.append(job)
        return job

    def run(self, *arguments: str, data: bytes | None = None, environment: dict[str, str] | None = None) -> Outcome:
        """Start, wait for the end, and return how it went."""
        stdin = subprocess.DEVNULL if data is None else subprocess.PIPE
        return self.start(*arguments, environment=environment, stdin=stdin).finish(data=data)

    def run_all(self, *commands: Sequence[str], environment: dict[str, str] | None = None) -> list[Outcome]:
        """Start all of them at once, and return how each went."""
        return [job.finish() for job in [self.start(*words, environment=environment) for words in commands]]

    def check(self) -> None:
        """After a launch has ended, however it did: no process, no temporary file, no shared memory."""
        for job in self.jobs:
            if job.process.poll() is None:
                continue
            job.wait_until_gone(20.0)
            left = sorted(str(path.relative_to(job.temporary)) for path in job.temporary.rglob("*"))
            assert left == [], left
        assert [name for name in os.listdir("/dev/shm") if "phalanx" in name] == []

    def close(self) -> None:
        for job in self.jobs:
            for pid in marked(job.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for stream in (job.process.stdin, job.process.stdout, job.process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            job.process.wait()
            shutil.rmtree(job.temporary)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    try:
        yield made
        made.check()
    finally:
        made.close()
