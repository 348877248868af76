"""The job: everything that is decided before a process is started, as plain values, so that a dry run can print it."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx import settings
from phalanx.errors import InitializationError, LaunchError
from phalanx.launch.job import memory as rank_memory
from phalanx.launch.job.attempt import Attempt
from phalanx.launch.job.binding import Bind, bind_ranks_here, cores_per_rank
from phalanx.launch.job.contradictions import check_together
from phalanx.launch.job.diagnosis import Diagnosis
from phalanx.launch.job.host_slots import HostSlots, fill_hosts
from phalanx.launch.job.output_options import PLAIN_OUTPUT, OutputOptions
from phalanx.launch.job.reach import LOOPBACK, check_hosts, launcher_addresses, reach_other_hosts
from phalanx.launch.job.rehearsal import Rehearsal
from phalanx.launch.job.spellings import count_after_target
from phalanx.launch.job.target import Target
from phalanx.system import interfaces
from phalanx.system.device_files import count_devices, device_names, device_of_rank
from phalanx.system.folder import own_folder
from phalanx.system.host import machine_name
from phalanx.system.limits import memory_left, usable_cores
from phalanx.topology.table import RankRow
from phalanx.wire.key import new_key
from phalanx.words import format_count

if TYPE_CHECKING:
    from phalanx.launch.job.mpi_launcher import MpiLauncher

__all__ = ["MOST_S", "Job", "make_job", "next_attempt"]

# See Job.patience_s.
GRACE_S: dict[int, float] = {signal.SIGINT: 1.0, signal.SIGTERM: 30.0, signal.SIGHUP: 30.0}
GRACE_AFTER_FAILURE_S = 5.0
# The longest time that may be given for something: poll() takes milliseconds as an int, so it knows no 25 days.
MOST_S = 1_000_000.0


@dataclass(frozen=True)
class Job:
    """A job: on this host, on hosts that the launcher reaches by ssh or another starter, or started by MPI.

    Attributes:
        ranks: the number of processes to start.
        target: the script, module or program that each of them runs.
        run_id: a name that no other job has; ``PHALANX_RUN_ID`` in the ranks.
        host: this machine's name.
        cores: the number of cores that all ranks together may use.
        threads: ``OMP_NUM_THREADS`` of each rank. It is empty if it depends on the cores of the rank's host, which are
            not known yet.
        grace_s: how many seconds a rank that was asked to end may take before it is killed; None for the defaults of
            :meth:`patience_s`.
        quiet: print neither the rank table nor notes.
        prefix: write ``[rank 3]`` before each line of output.
        svg: the file for a picture of where the ranks run; empty for none.
        output: which ranks' output goes to files, and which is shown.
        mpi: the MPI launcher that starts the ranks; None for the built-in launcher.
        hosts: the hosts of the ranks, each with its number of ranks; empty if all run here, or if the MPI launcher
            chooses.
        starter: the program that starts a command on another host, and its arguments; empty for ssh.
        named: the variables that the user has named, which go to other hosts whatever they are.
        addresses: those at which ranks may reach the launcher, and the store; an agent knows which one they can.
        rehearsal: the hosts that the ranks report in place of their real one; None if they report that.
        bind: how ranks are bound to cores.
        cpus: the logical cores of each rank; empty if they are not bound.
        device: ``PHALANX_DEVICE`` of the ranks; None to leave the user's environment, or else the machine, to decide.
        pass_local_rank: give the target ``--local_rank``, before its own arguments.
        replace: the backends that the backend ``phalanx`` replaces.
        interface: the network interface that ranks use; empty for the one that routes to the others.
        memory: variables that say how the ranks' allocator gets memory, and whether it gives it back.
        key: a secret, by which a process proves that it is one of this job's ranks.
        preload: import torch once, before the ranks are forked.
        reader: the rank that reads the launcher's standard input, a terminal included; None if the user named none.
        debugged: the rank that gets the launcher's terminal for itself; None for none.
        counted: whether somebody chose the number of ranks.
        diagnosis: what is said of ranks that wait for each other for long.
        attempt: which attempt at the job this is, and how many there may be.
    """

    ranks: int
    target: Target
    run_id: str
    host: str
    cores: int
    threads: str
    grace_s: float | None = None
    quiet: bool = False
    prefix: bool = True
    svg: str = ""
    output: OutputOptions = PLAIN_OUTPUT
    mpi: MpiLauncher | None = None
    hosts: tuple[HostSlots, ...] = ()
    starter: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    addresses: tuple[str, ...] = (LOOPBACK,)
    rehearsal: Rehearsal | None = None
    bind: Bind = "none"
    cpus: tuple[tuple[int, ...], ...] = ()
    device: str | None = None
    pass_local_rank: bool = False
    replace: tuple[str, ...] = ()
    interface: str = ""
    memory: Mapping[str, str] = field(default_factory=dict)
    key: str = field(default="", repr=False)
    preload: bool = True
    reader: int | None = None
    debugged: int | None = None
    counted: bool = True
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    attempt: Attempt = field(default_factory=Attempt)

    @property
    def is_local(self) -> bool:
        """Whether all ranks are of this host, and no MPI launcher starts them: their agent is forked here."""
        return self.mpi is None and not self.hosts

    def patience_s(self, signum: int | None) -> float:
        """How long ranks may take to end after this signal, or after the failure of another rank if it is None.

        After Ctrl-C somebody waits at the terminal. After SIGTERM or SIGHUP a batch system ends the job, and ranks may
        be writing a checkpoint. After a failure the ranks are out of step, and most of them can only fail too.
        """
        if self.grace_s is not None:
            return self.grace_s
        return GRACE_AFTER_FAILURE_S if signum is None else GRACE_S.get(signum, 0.0)

    def reads(self, rank: int, *, terminal: bool) -> bool:
        """Whether a rank gets the launcher's standard input; ``terminal`` says whether that is a terminal."""
        named = self.debugged if self.debugged is not None else self.reader
        return rank == (named or 0) and (named is not None or self.ranks == 1 or not terminal)

    def keeps_terminal(self, rank: int) -> bool:
        """Whether a rank writes to the launcher's standard output and error itself, as an interactive program must."""
        alone = self.ranks == 1 and self.is_local and self.output.is_plain and all(map(os.isatty, range(3)))
        return rank == self.debugged or alone

    def title(self) -> str:
        """The line above the rank table."""
        command = "phalanx.launch" if self.target.kind == "function" else "phalanx run"
        parts = [f"{command}: {format_count(self.ranks, 'rank')} of {self.target.name}"]
        if self.rehearsal is not None:
            parts.append(self.rehearsal.title(self.host))
        if self.replace:
            parts.append(f"{settings.BACKEND} in place of {' and '.join(self.replace)}")
        if rank_memory.MMAP_MAX in self.memory:
            parts.append("freed memory is kept")
        if self.attempt.number:
            parts.append(self.attempt.title)
        return ", ".join(parts)

    def target_of(self, local_rank: int) -> Target:
        """The target of the rank with this local rank."""
        if not self.pass_local_rank:
            return self.target
        first, *own = self.target.argv
        return dataclasses.replace(self.target, argv=(first, f"--local_rank={local_rank}", *own))

    def rows(self) -> list[RankRow]:
        """The rank table of this job, as far as it is known before a rank has been started."""
        threads, devices = int(self.threads.partition(",")[0]) if self.threads else None, device_names(os.environ)
        if not self.is_local:
            placed_ranks = [
                (node, host.name, local)
                for node, host in enumerate(self.hosts or [HostSlots(self.host, self.ranks)])
                for local in range(host.slots or 0)
            ]
            return [
                RankRow(rank, node, name, local, device_of_rank(local, self.device, devices), None, None, threads)
                for rank, (node, name, local) in enumerate(placed_ranks)
            ]
        bound = self.cpus or [()] * self.ranks
        cores = [len(cpus) or self.cores for cpus in bound]
        if self.rehearsal is not None:
            return [
                RankRow(
                    rank,
                    placed.node_rank,
                    self.rehearsal.host(placed.node_rank),
                    placed.local_rank,
                    "cpu",
                    None,
                    cores[rank],
                    threads,
                    bound[rank],
                )
                for rank, placed in enumerate(self.rehearsal.placed())
            ]
        names = [device_of_rank(rank, self.device, devices) for rank in range(self.ranks)]
        return [
            RankRow(rank, 0, self.host, rank, names[rank], None, cores[rank], threads, bound[rank])
            for rank in range(self.ranks)
        ]

    def device_of(self, local_rank: int) -> str:
        """The device of the rank on this host, as far as it can be known without torch; ``?`` if it cannot."""
        return device_of_rank(local_rank, self.device, device_names(os.environ))

    def environment(self, rank: int, *, port: int, rows: Sequence[RankRow] | None = None) -> dict[str, str]:
        """The variables added to the environment of ``rank``: all those that torchrun sets, and Phalanx's own.

        Args:
            rank: the process, from 0 to ``ranks - 1``.
            port: the port of the store. If the target is not Python, there is no store, and rank 0 may listen there.
            rows: the rank table; by default that of :meth:`rows`.
        """
        if rows is None and self.is_local:
            rows = self.rows()
        world = str(self.ranks)
        local_rank, node_rank, beside, nodes, threads = rank, 0, self.ranks, 1, self.threads
        if rows is not None:
            local_rank, node_rank = rows[rank].local_rank, rows[rank].node_rank
            beside = sum(row.node_rank == node_rank for row in rows)
            nodes = 1 + max(row.node_rank for row in rows)
            threads = self.threads or str(rows[rank].threads or 1)
        # A Python target's streams are set to line buffering directly; its own children are left alone.
        unbuffered = {} if self.target.is_python else {"PYTHONUNBUFFERED": "1"}
        keeps_store = self.target.is_python or not self.is_local
        own: dict[str, str] = {}
        if self.interface:
            own[settings.INTERFACE] = self.interface
            own["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME") or self.interface
        if self.key:
            own[settings.KEY] = self.key
        return {
            **unbuffered,
            **own,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(beside),
            "GROUP_RANK": str(node_rank),
            "GROUP_WORLD_SIZE": str(nodes),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": world,
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(port),
            **self.attempt.environment(),
            "TORCHELASTIC_RUN_ID": self.run_id,
            # If the launcher hosts the store, every rank is a client of it, and rank 0 may end first.
            "TORCHELASTIC_USE_AGENT_STORE": str(keeps_store),
            **({settings.STORE_PORT: str(port)} if keeps_store else {}),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "OMP_NUM_THREADS": threads,
            settings.RUN_ID: self.run_id,
            settings.DIRECTORY: own_folder(),
            # With this variable phalanx.init() does not print the table a second time.
            settings.TABLE_SHOWN: "1",
            **({settings.CALL_SITES: "error"} if self.diagnosis.strict else {}),
            **({} if self.device is None else {settings.DEVICE: self.device}),
            **({} if self.rehearsal is None else self.rehearsal.environment(node_rank)),
            **self.before_torch(),
        }

    def before_torch(self) -> dict[str, str]:
        """The variables that must be set when torch is imported, which may be before there are ranks."""
        return {**self.memory, **({settings.REPLACE: ",".join(self.replace)} if self.replace else {})}

    def warnings(self) -> list[str]:
        """Notes for the user before the job runs, one line each."""
        warnings = [] if self.rehearsal is None else [self.rehearsal.note()]
        if self.is_local and self.ranks > self.cores:
            warnings.append(
                f"{self.ranks} ranks share {self.cores} cores; they will take turns, "
                f"and a timing says little about a machine with a core for each"
            )
        warnings += filter(None, [self.output.note(self.ranks)])
        if (misplaced := count_after_target(self.target.argv[1:])) and not self.counted:
            meant = f"phalanx run {misplaced} {self.target.name} …"
            warnings.append(f"one rank runs, and {misplaced} is an argument of the program; did you mean {meant}?")
        devices = count_devices()
        if not self.counted and self.is_local and devices > 1 and self.device_of(0) != "cpu":
            warnings.append(
                f"this machine has {devices} accelerators, and one rank uses one of them: phalanx run -n {devices} …"
            )
        return warnings


def _threads_per_rank(cores: int, environment: Mapping[str, str]) -> str:
    """``OMP_NUM_THREADS`` for each rank: the user's own value, or as many as the rank has cores.

    Raises:
        LaunchError: the user's value is not a number of threads, or a list of such numbers.
    """
    own = environment.get("OMP_NUM_THREADS", "")
    if not own:
        return str(cores)
    if not all(part.strip().isdigit() and int(part) > 0 for part in own.split(",")):
        raise LaunchError(f"OMP_NUM_THREADS={own!r} is not a number of threads; correct or unset it")
    return own


def make_job(
    ranks: int | None,
    target: Target,
    *,
    grace_s: float | None = None,
    quiet: bool = False,
    prefix: bool = True,
    output: OutputOptions = PLAIN_OUTPUT,
    mpi: MpiLauncher | None = None,
    hosts: Sequence[HostSlots] = (),
    ppn: int | None = None,
    starter: Sequence[str] = (),
    named: Sequence[str] = (),
    address: str | None = None,
    rehearsal: Rehearsal | None = None,
    bind: Bind = "none",
    device: str | None = None,
    pass_local_rank: bool = False,
    replace: Sequence[str] = (),
    interface: str | None = None,
    preload: bool = True,
    reader: int | None = None,
    debugged: int | None = None,
    memory: rank_memory.Memory = "huge",
    restarts: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Decide everything about a job of ``ranks`` processes.

    Args:
        ranks: the number of ranks, at least 1. None for one, or for as many as the hosts take.
        target: the script, module or program that each rank runs.
        grace_s: how many seconds a rank that was asked to end may take before it is killed; by default 1 after Ctrl-C,
            30 after SIGTERM and SIGHUP, 5 after the failure of another rank.
        quiet: print neither the rank table nor notes.
        prefix: write ``[rank 3]`` before each line of output.
        output: which ranks' output goes to files, and which is shown.
        mpi: the MPI launcher that starts them; None for the built-in launcher, on this host.
        hosts: the hosts on which they may run; empty for this one, or for those that the MPI launcher chooses.
        ppn: the most ranks that a host takes.
        starter: the program that starts a command on another host, and its arguments; by default ssh.
        named: the variables that the user has named, which go to other hosts whatever they are.
        address: the address at which ranks on other hosts reach this one; by default it is found out.
        rehearsal: the hosts that the ranks report in place of their real one. The number of ranks follows from it.
        bind: how ranks are bound to cores.
        device: the device on which they compute: ``cpu``, ``cuda``, ``cuda:1``, …
        pass_local_rank: give the target ``--local_rank``.
        replace: the backends that the backend ``phalanx`` replaces.
        interface: the network interface that ranks use; by default the one that routes to the others.
        preload: import torch once, before the ranks are forked.
        reader: the rank that reads the launcher's standard input; by default rank 0, if that is not a terminal.
        debugged: the rank that gets the launcher's terminal for itself.
        memory: ``huge`` (pages), ``keep`` what is freed, or ``return`` it, as ``phalanx.launch.job.memory`` explains.
            It changes nothing for ranks that compute on an accelerator, and for programs that are not Python.
        restarts: how often all ranks are started again after the failure of one.
        environment: the variables in which the user's own settings are read; ``os.environ`` by default.

    Raises:
        LaunchError: the number of ranks or of threads is not possible, the hosts do not take so many ranks, there are
            fewer cores than ranks to bind, or two options contradict each other.
    """
    if environment is None:
        environment = os.environ
    check_together(ranks, mpi, hosts, rehearsal, bind, device, environment)
    if ranks is not None and ranks < 1:
        raise LaunchError(f"-n {ranks}: a job has at least one rank")
    if ppn is not None and (ppn < 1 or not hosts):
        raise LaunchError(
            f"--ppn {ppn}: is the most ranks a host takes, at least 1; name the hosts, as in -H h1,h2, or leave it out"
        )
    filled = tuple(fill_hosts(hosts, ranks, ppn)) if hosts else ()
    elsewhere = mpi is not None or reach_other_hosts(filled, starter)
    check_hosts(hosts, filled, starter, mpi, elsewhere=elsewhere, address=address, debugged=debugged)
    # This host need not have the interface if all ranks may be on other hosts.
    if interface is not None and not elsewhere:
        try:
            interfaces.chosen_interface({settings.INTERFACE: interface})
        except InitializationError as error:
            raise LaunchError(f"--interface sets {error}") from None
    if grace_s is not None and not 0.0 <= grace_s <= MOST_S:
        raise LaunchError(f"grace_s={grace_s}: give a number of seconds from 0 to {MOST_S:,.0f}, which is 11 days")
    count = sum(host.slots or 0 for host in filled) if filled else ranks or 1
    count = count if rehearsal is None else rehearsal.ranks
    for option, rank in (("--stdin", reader), ("--debug", debugged)):
        if rank is not None and not 0 <= rank < count:
            raise LaunchError(f"{option} {rank}: is not one of the {format_count(count, 'rank')}, which count from 0")
    output.check(count)
    cores = usable_cores()
    computes_on = device or ("cpu" if rehearsal is not None else environment.get(settings.DEVICE) or None)
    # On other hosts ranks are bound there, to the cores of those hosts.
    cpus = [] if elsewhere else bind_ranks_here(bind, count, cores, computes_on, environment)
    threads = _threads_per_rank(cores_per_rank(count, cores, cpus), environment)
    if elsewhere and not environment.get("OMP_NUM_THREADS"):
        threads = ""
    found = [address] if address else launcher_addresses(mpi, filled if elsewhere else (), interface, environment)
    attempt = Attempt(restarts=restarts)
    job = Job(
        ranks=count,
        target=target,
        run_id=f"phalanx-{secrets.token_hex(6)}",
        host=machine_name(),
        cores=cores,
        threads=threads,
        grace_s=grace_s,
        quiet=quiet,
        prefix=prefix,
        output=dataclasses.replace(output, part=attempt.folder),
        mpi=mpi,
        hosts=filled if elsewhere else (),
        starter=tuple(starter),
        named=tuple(named),
        addresses=tuple(found),
        rehearsal=rehearsal,
        bind=bind,
        cpus=tuple(cpus),
        device=computes_on,
        pass_local_rank=pass_local_rank,
        replace=tuple(replace),
        interface=interface or "",
        key=new_key(),
        preload=preload,
        reader=reader,
        debugged=debugged,
        counted=ranks is not None or bool(filled) or rehearsal is not None,
        attempt=attempt,
    )
    if not target.is_python or job.device_of(0) != "cpu":
        return job
    chosen = rank_memory.variables(memory, ranks=count, memory_nbytes=memory_left(), environment=environment)
    return dataclasses.replace(job, memory=chosen)


def next_attempt(job: Job, key: str) -> Job:
    """The job once more, after an attempt that has failed.

    Args:
        job: the job as it was.
        key: its key from now on, so that no process of an earlier attempt can join.
    """
    attempt = job.attempt.next()
    output = dataclasses.replace(job.output, part=attempt.folder)
    return dataclasses.replace(job, attempt=attempt, output=output, key=key)
