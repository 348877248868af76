"""Where the jobs of a world run, and who starts them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent

from tests.mpi.environments import SETTINGS
from tests.support.hosts import why_no_hosts
from tests.support.ports import held_port
from tests.support.remote import RemoteLauncher, reachable_hosts

from faults.job import Job, World, named_pipe

__all__ = ["Place", "place"]

# An MPI launcher whose ranks have all failed takes a moment to end, and to remove what its library has in memory.
LEAVE_S = 20.0


class Place:
    """Jobs on this host, under ``phalanx run`` or an MPI launcher.

    Args:
        world: how many ranks there are, and who starts them.
        folder: a folder of its own.
    """

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self._folder = world, folder
        self._jobs = 0

    @contextlib.contextmanager
    def job(self, script: str) -> Iterator[Job]:
        """A job, of which nothing runs afterwards."""
        path = self._folder / "script.py"
        path.write_text(dedent(script))
        folder = self.new_folder()
        with named_pipe(folder) as (name, notes), open(folder / "err", "wb") as err:
            command = [*self._starting(), str(path), name, str(folder), self._backend]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err, env={**os.environ, **SETTINGS}
            )
            try:
                yield Job([process], folder, folder / "err", notes)
                if self.world.by == "mpiexec":
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(LEAVE_S)
            finally:
                process.kill()  # the kernel ends its ranks with it
                process.wait()

    def process(self, rank: int, pid: int) -> int:
        """The process of a rank, as this machine numbers it; ``pid`` is how its host does."""
        return pid

    def strike(self, fault: str, host: int) -> None:
        """Do to a host what the fault says."""
        raise ValueError(f"{fault} needs hosts")

    def new_folder(self) -> Path:
        """A folder for the next job."""
        folder = self._folder / f"of-{self._jobs}"
        folder.mkdir()
        self._jobs += 1
        return folder

    @property
    def _backend(self) -> str:
        return {"mpi": "mpi", "mpiexec": "mpi", "gloo": "gloo"}.get(self.world.by, "phalanx")

    def _starting(self) -> list[str]:
        """The words before the script and its arguments."""
        python, count = sys.executable, ["-n", str(self.world.size)]
        if self.world.by in ("run", "gloo"):
            return [python, "-m", "phalanx", "run", *count]
        mpiexec = shutil.which("mpiexec", path=f"{Path(python).parent}:{os.environ['PATH']}")
        if mpiexec is None:
            sys.exit("there is no mpiexec; start this by the Python of an environment with mpi4py and an MPI library")
        if self.world.by == "mpiexec":
            return [mpiexec, *count, python]
        return [python, "-m", "phalanx", "run", "--mpi", mpiexec, *count]


class ByHand(Place):
    """Jobs on this host whose ranks have their places from variables that somebody has set.

    Under ``torchrun`` these are its variables, and the ranks meet in a store that this process keeps as its agent does.
    """

    @contextlib.contextmanager
    def job(self, script: str, seats: Sequence[tuple[int, int]] | None = None) -> Iterator[Job]:
        """A job, of which nothing runs afterwards.

        Args:
            script: what each process runs; its number is the last argument.
            seats: the rank and the world size that each process is given; by default those of the world.
        """
        size = self.world.size
        path = self._folder / "script.py"
        path.write_text(dedent(script))
        folder = self.new_folder()
        with contextlib.ExitStack() as stack:
            name, notes = stack.enter_context(named_pipe(folder))
            err = stack.enter_context(open(folder / "err", "wb"))
            port = stack.enter_context(held_port())
            if self.world.by == "torchrun":
                from torch._C._distributed_c10d import TCPStore  # which takes a second to import

                _store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            processes: list[subprocess.Popen[bytes]] = []
            stack.callback(_end, processes)
            for number, (rank, told) in enumerate(seats or [(rank, size) for rank in range(size)]):
                command = [sys.executable, str(path), name, str(folder), "phalanx", str(number)]
                environment = {**os.environ, **self._variables(rank, told, port)}
                processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, env=environment))
            yield Job(processes, folder, folder / "err", notes)

    def _variables(self, rank: int, size: int, port: int) -> dict[str, str]:
        place: dict[str, object] = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if self.world.by == "torchrun":
            place |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
            place |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": True}
            place |= {"TORCHELASTIC_RESTART_COUNT": 0}
        return {name: str(value) for name, value in place.items()}


class Elsewhere(Place):
    """Jobs over test hosts.

    Args:
        launcher: starts them.
    """

    def __init__(self, world: World, folder: Path, launcher: RemoteLauncher) -> None:
        super().__init__(world, folder)
        self._launcher = launcher

    @contextlib.contextmanager
    def job(self, script: str) -> Iterator[Job]:
        """A job, of which nothing runs afterwards."""
        hosts = ",".join(f"h{host}:{self.world.ranks}" for host in range(self.world.hosts))
        folder = self.new_folder()
        with named_pipe(folder) as (name, notes):
            path = self._launcher.script(script)
            started = self._launcher.start("-H", hosts, path, name, str(folder), self._backend)
            try:
                yield Job([started.process], folder, started.folder / "err", notes)
            finally:
                self._launcher.clear()

    def process(self, rank: int, pid: int) -> int:
        """The process of a rank, as this machine numbers it; ``pid`` is how its host does."""
        for process in self._launcher.hosts.processes(rank // self.world.ranks):
            with contextlib.suppress(OSError):
                numbers = re.search(r"^NSpid:(.*)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
                if numbers and int(numbers[1].split()[-1]) == pid:
                    return process
        sys.exit(f"rank {rank} is not there any more")

    def strike(self, fault: str, host: int) -> None:
        """Do to a host what the fault says."""
        hosts = self._launcher.hosts
        if fault == "stopped-host":
            for pid in hosts.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            return
        hosts.cut(host)
        if fault == "gone-host":
            hosts.kill_all(host)


@contextlib.contextmanager
def place(world: World) -> Iterator[Place]:
    """Where the jobs of a world run."""
    if world.hosts and (world.by != "run" or (why := why_no_hosts())):
        sys.exit(f"{world}: {'only phalanx run is measured over hosts' if world.by != 'run' else why}")
    with tempfile.TemporaryDirectory(prefix="deaths-") as name:
        folder = Path(name)
        if world.by in ("hand", "torchrun"):
            yield ByHand(world, folder)
        elif not world.hosts:
            yield Place(world, folder)
        else:
            with reachable_hosts(world.hosts, folder) as hosts:
                yield Elsewhere(world, folder, RemoteLauncher(hosts, folder))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
