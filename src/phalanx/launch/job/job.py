"""Decide everything about a job before a process is started, as plain values, so that a dry run can print it."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx import settings
from phalanx.errors import DeviceError, InitializationError, LaunchError
from phalanx.launch.job import memory as rank_memory
from phalanx.launch.job.binding import bind_ranks_here, cores_per_rank
from phalanx.launch.job.hosts import HostSlots, fill_hosts, is_here, launcher_addresses
from phalanx.launch.job.options import LaunchOptions, slurm_end_time
from phalanx.launch.job.spellings import count_after_target
from phalanx.launch.job.target import Target
from phalanx.system import interfaces
from phalanx.system.files import own_folder
from phalanx.system.host import machine_name
from phalanx.system.limits import memory_left, usable_cores
from phalanx.topology.device_files import count_devices, device_names, device_of_rank
from phalanx.topology.table import RankRow
from phalanx.wire.key import new_key
from phalanx.words import format_count

# After Ctrl-C somebody waits at the terminal. After SIGTERM or SIGHUP a batch system ends the job, and ranks may be
# writing a checkpoint. After a failure (None) the ranks are out of step, and most of them can only fail too.
_GRACE_S: dict[int | None, float] = {signal.SIGINT: 1.0, signal.SIGTERM: 30.0, signal.SIGHUP: 30.0, None: 5.0}


@dataclass(frozen=True, kw_only=True)
class Job(LaunchOptions):
    """The user's choices, and what follows from them. ``hosts`` are those that get a rank, with the number they get.

    Attributes:
        run_id: a name that no other job has; ``PHALANX_RUN_ID`` in the ranks.
        cores: how many all ranks together may use.
        threads: ``OMP_NUM_THREADS`` of each rank; empty if that depends on the cores of other hosts.
        addresses: those at which ranks may reach the launcher, and the store; an agent knows which one they can.
        cpus: the logical cores of each rank; empty if they are not bound.
        device: ``PHALANX_DEVICE`` of the ranks; None if nobody has chosen one.
        memory: variables of the ranks' allocator.
        key: a secret, by which a process proves that it is one of this job's ranks.
        counted: whether somebody chose the number of ranks.
        began_at: when the job began, its first attempt, as ``time.monotonic()``.
    """

    ranks: int
    target: Target
    run_id: str
    host: str
    cores: int
    threads: str
    addresses: tuple[str, ...] = (interfaces.LOOPBACK,)
    cpus: tuple[tuple[int, ...], ...] = ()
    memory: Mapping[str, str] = field(default_factory=dict)
    key: str = field(default="", repr=False)
    counted: bool = True
    began_at: float = field(default_factory=time.monotonic)

    @property
    def is_local(self) -> bool:
        """Tell whether all ranks are of this host, and no MPI launcher starts them: their agent is forked here."""
        return self.mpi is None and not self.hosts and self.nodes is None

    @property
    def keeps_agents(self) -> bool:
        """Tell whether its agents stay from one attempt to the next."""
        return self.is_local or self.nodes is not None

    def patience_s(self, signum: int | None) -> float:
        """Return how long ranks may take to end after this signal, or after the failure of a rank (None)."""
        return self.grace_s if self.grace_s is not None else _GRACE_S.get(signum, 0.0)

    def reads(self, rank: int, *, terminal: bool) -> bool:
        """Return whether a rank gets the launcher's standard input; ``terminal`` says whether that is a terminal."""
        named = self.debugged if self.debugged is not None else self.reader
        return rank == (named or 0) and (named is not None or self.ranks == 1 or not terminal)

    def keeps_terminal(self, rank: int) -> bool:
        """Tell whether a rank writes to the launcher's output and error itself, as an interactive program must."""
        alone = self.ranks == 1 and self.is_local and self.output.is_plain and all(map(os.isatty, range(3)))
        return rank == self.debugged or alone

    def title(self) -> str:
        command = "phalanx.launch" if self.target.kind == "function" else "phalanx run"
        parts = [f"{command}: {format_count(self.ranks, 'rank')} of {self.target.name}"]
        if self.rehearsal is not None:
            parts.append(f"rehearsed: {format_count(len(self.rehearsal.hosts), 'host')} on {self.host}")
        if self.replace:
            parts.append(f"{settings.BACKEND} in place of {' and '.join(self.replace)}")
        if rank_memory.MMAP_MAX in self.memory:
            parts.append("freed memory is kept")
        if self.attempt.number:
            parts.append(self.attempt.title)
        return ", ".join(parts)

    def target_of(self, local_rank: int) -> Target:
        if not self.pass_local_rank:
            return self.target
        first, *own = self.target.argv
        return dataclasses.replace(self.target, argv=(first, f"--local_rank={local_rank}", *own))

    def rows(self) -> list[RankRow]:
        """Return the rank table, as far as it is known before a rank has been started."""
        threads, devices = int(self.threads.partition(",")[0]) if self.threads else None, device_names(os.environ)
        if self.rehearsal is not None:
            placed = [(node, self.rehearsal.host(node), local) for node, local in self.rehearsal.placed()]
        else:
            hosts = self.hosts or [HostSlots(self.host, self.ranks)]
            placed = [(node, host.name, local) for node, host in enumerate(hosts) for local in range(host.slots or 0)]
        rows = []
        for rank, (node, host_name, local) in enumerate(placed):
            cpus = self.cpus[rank] if self.cpus else ()
            cores = len(cpus) or self.cores if self.is_local else None
            device = device_of_rank(local, self.device, devices)
            rows.append(RankRow(rank, node, host_name, local, device, None, cores, threads, cpus))
        return rows

    def device_of(self, local_rank: int) -> str:
        """Name the device of the rank on this host, as far as it can be known without torch; ``?`` if it cannot."""
        return device_of_rank(local_rank, self.device, device_names(os.environ))

    def environment(self, rank: int, *, port: int, rows: Sequence[RankRow] | None = None) -> dict[str, str]:
        """Return the variables added to the environment of ``rank``: all those that torchrun sets, and Phalanx's own.

        ``port`` is that of the store; if the target is not Python, there is none, and rank 0 may listen there.
        ``rows`` is the table of all ranks once their places are known.
        """
        rows = self.rows() if rows is None else rows
        node_rank = rows[rank].node_rank
        keeps_store = self.target.is_python or not self.is_local
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rows[rank].local_rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_WORLD_SIZE": sum(row.node_rank == node_rank for row in rows),
            "GROUP_RANK": node_rank,
            "GROUP_WORLD_SIZE": 1 + max(row.node_rank for row in rows),
            "ROLE_RANK": rank,
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": self.ranks,
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": port,
            settings.ATTEMPT: self.attempt.number,
            "TORCHELASTIC_RESTART_COUNT": self.attempt.number,
            "TORCHELASTIC_MAX_RESTARTS": self.attempt.restarts,
            "TORCHELASTIC_RUN_ID": self.run_id,
            # If the launcher hosts the store, every rank is a client of it, and rank 0 may end first.
            "TORCHELASTIC_USE_AGENT_STORE": keeps_store,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "OMP_NUM_THREADS": self.threads or rows[rank].threads or 1,
            settings.RUN_ID: self.run_id,
            settings.DIRECTORY: own_folder(),
            # With this variable phalanx.init() does not print the table a second time.
            settings.TABLE_SHOWN: "1",
        }
        if keeps_store:
            variables[settings.STORE_PORT] = port
        if not self.target.is_python:
            # A Python target's streams are set to line buffering directly; its own children are left alone.
            variables["PYTHONUNBUFFERED"] = "1"
        if self.interface:
            variables[settings.INTERFACE] = self.interface
            variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME") or self.interface
        if self.key:
            variables[settings.KEY] = self.key
        if self.diagnosis.strict:
            variables[settings.CALL_SITES] = "error"
        if self.device is not None:
            variables[settings.DEVICE] = self.device
        if self.rehearsal is not None:
            variables.update(self.rehearsal.environment(node_rank))
        return {name: str(value) for name, value in variables.items()} | self.before_torch()

    def before_torch(self) -> dict[str, str]:
        """Return the variables that must be set when torch is imported, which may be before there are ranks."""
        return {**self.memory, **({settings.REPLACE: ",".join(self.replace)} if self.replace else {})}

    def warnings(self) -> list[str]:
        """Return notes for the user before the job runs, one line each."""
        warnings = [] if self.rehearsal is None else [self.rehearsal.note()]
        if self.is_local and self.ranks > self.cores:
            warnings.append(
                f"{self.ranks} ranks share {self.cores} cores; they will take turns, and a timing says little about a "
                f"machine with a core for each"
            )
        if self.nodes is not None and not self.hosts:
            counts = sorted({self.nodes.least, self.nodes.most})
            warnings.append(
                f"{' to '.join(map(str, counts))} nodes are to run this command ({self.nodes.title}); these are the "
                f"ranks of this one, and node 0 at {self.nodes.where} numbers all"
            )
        warnings += filter(None, [self.output.note(self.ranks)])
        if self.counted:
            return warnings
        if misplaced := count_after_target(self.target.argv[1:]):
            meant = f"phalanx run {misplaced} {self.target.name} …"
            warnings.append(f"one rank runs, and {misplaced} is an argument of the program; did you mean {meant}?")
        if self.is_local and (devices := count_devices()) > 1 and self.device_of(0) != "cpu":
            warnings.append(
                f"this machine has {devices} accelerators, and one rank uses one of them: phalanx run -n {devices} …"
            )
        return warnings


def make_job(options: LaunchOptions, target: Target, environment: Mapping[str, str] = os.environ) -> Job:
    """Decide everything about a job, or raise LaunchError; the user's own settings are read in ``environment``."""
    _check_alone(options, environment)
    hosts = tuple(fill_hosts(options.hosts, options.ranks, options.ppn)) if options.hosts else ()
    here: list[str] = []
    if options.mpi is None:
        here = [host.name for host in hosts if is_here(host.name, starter=bool(options.starter))]
    elsewhere = options.mpi is not None or options.nodes is not None or len(here) < len(hosts)
    _check_hosts(options, here, elsewhere=elsewhere)
    rehearsal, ranks = options.rehearsal, options.ranks or 1
    if rehearsal is not None:
        ranks = rehearsal.ranks
    elif hosts:
        ranks = sum(host.slots or 0 for host in hosts)
    if options.nodes is None:  # else their number is known when all nodes have come
        for option, rank in (("--stdin", options.reader), ("--debug", options.debugged)):
            if rank is not None and not 0 <= rank < ranks:
                count = format_count(ranks, "rank")
                raise LaunchError(f"{option} {rank}: is not one of the {count}, which count from 0")
        options.output.check(ranks)
    cores = usable_cores()
    device = "cpu" if rehearsal else options.device or environment.get(settings.DEVICE) or None
    # On other hosts ranks are bound there, to the cores of those hosts.
    cpus = [] if elsewhere else bind_ranks_here(options.bind, ranks, cores, device, environment)
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads and not all(part.strip().isdigit() and int(part) > 0 for part in threads.split(",")):
        raise LaunchError(f"OMP_NUM_THREADS={threads!r} is not a number of threads; correct or unset it")
    if not threads and not elsewhere:
        threads = str(cores_per_rank(ranks, cores, cpus))
    hosts = hosts if elsewhere else ()
    addresses = options.addresses or launcher_addresses(options.mpi, hosts, options.interface, environment)
    memory = {}
    if target.is_python and device_of_rank(0, device, device_names(os.environ)) == "cpu":
        memory = rank_memory.variables(options.memory_mode, ranks, memory_left(), environment)
    decided = {
        "ranks": ranks,
        "target": target,
        "run_id": f"phalanx-{secrets.token_hex(6)}",
        "host": machine_name(),
        "cores": cores,
        "threads": threads,
        "output": dataclasses.replace(options.output, part=options.attempt.folder),
        "hosts": hosts,
        "addresses": tuple(addresses),
        "cpus": tuple(cpus),
        "device": device,
        "memory": memory,
        "key": new_key(),
        "counted": options.ranks is not None or bool(options.hosts) or rehearsal is not None,
    }
    return Job(**{**vars(options), **decided})


# What people call devices for which torch has another name.
_OTHER_DEVICE_NAMES = {
    "gpu": "cuda (NVIDIA and AMD), xpu (Intel), mps (Apple), or by its vendor's own name, such as npu",
    "nvidia": "cuda",
    **dict.fromkeys(("amd", "rocm", "hip"), "cuda, too"),
    "intel": "xpu",
    "ascend": "npu",
    "tpu": "xla",
}


def _check_alone(options: LaunchOptions, environment: Mapping[str, str]) -> None:
    """Refuse options that cannot be carried out, whatever the hosts are."""
    ranks, rehearsal, ppn = options.ranks, options.rehearsal, options.ppn
    device, said = options.device, f"--device {options.device}"
    if device is None:
        device = environment.get(settings.DEVICE) or None
        said = f"{settings.DEVICE}={device}"
    if device is not None:
        if not re.fullmatch(r"[a-z]+[0-9]?(:[0-9]+)?", device):
            raise LaunchError(DeviceError.not_a_device(said))
        if other := _OTHER_DEVICE_NAMES.get(device.partition(":")[0]):
            raise LaunchError(f"{said}: torch calls such a device {other}; write that")
    if options.mpi is not None and options.bind != "none":
        from phalanx.launch.job.mpi_launcher import how_to_bind

        how = how_to_bind(options.bind)
        raise LaunchError(f"--bind {options.bind}: an MPI launcher binds its ranks by options of its own: {how}")
    if rehearsal is not None:
        unreal = "--rehearse places ranks on hosts that do not exist"
        if options.hosts:
            raise LaunchError(f"{unreal}; leave --rehearse or the hosts out")
        if options.mpi is not None:
            raise LaunchError(f"{unreal}, which an MPI launcher cannot do; leave --rehearse or --mpi out")
        if ranks not in (None, rehearsal.ranks):
            given = f"--rehearse {rehearsal.given}, which is {rehearsal.ranks} ranks"
            raise LaunchError(f"-n {ranks} contradicts {given}; leave -n out")
        if options.device not in (None, "cpu"):
            computes = "a rehearsal computes on the CPU; leave --device or --rehearse out"
            raise LaunchError(f"--device {options.device}: {computes}")
    if ranks is not None and ranks < 1:
        raise LaunchError(f"-n {ranks}: a job has at least one rank")
    if options.requeue and not environment.get("SLURM_JOB_ID"):
        raise LaunchError("--requeue: queues a job of Slurm again, and this is none (SLURM_JOB_ID); leave it out")
    if options.stop_before_s is not None:
        slurm_end_time(environment)
    if ppn is not None and (ppn < 1 or not options.hosts):
        how = "at least 1; name the hosts, as in -H h1,h2, or leave it out"
        raise LaunchError(f"--ppn {ppn}: is the most ranks a host takes, {how}")


def _check_hosts(options: LaunchOptions, here: Sequence[str], *, elsewhere: bool) -> None:
    """Refuse options about other hosts that cannot be carried out; ``here`` lists the names of this host."""
    if elsewhere and options.debugged is not None:
        where = "of an MPI launcher" if options.mpi is not None else "on other hosts"
        raise LaunchError(f"--debug hands over this terminal, which ranks {where} do not have; leave it out")
    if options.starter and options.mpi is not None:
        raise LaunchError("--starter and --mpi both start processes on other hosts; give one of them")
    if options.starter and not options.hosts:
        raise LaunchError("--starter needs the hosts on which it is to start ranks: -H h1:4,h2:4")
    if options.addresses and options.nodes is not None:
        raise LaunchError("--address is for ranks that phalanx run starts on other hosts; nodes dial --master-addr")
    if options.addresses and not elsewhere:
        raise LaunchError("--address is for ranks on other hosts, and there are none; leave it out")
    if len(here) > 1:
        raise LaunchError(f"{' and '.join(here)} are one host, this one; list it once, with the number of its ranks")
    # This host need not have the interface if all ranks may be on other hosts.
    if options.interface and not elsewhere:
        try:
            interfaces.chosen_interface({settings.INTERFACE: options.interface})
        except InitializationError as error:
            raise LaunchError(f"--interface sets {error}") from None


def next_attempt(job: Job, key: str) -> Job:
    """Return the job once more, after a failed attempt, with a key of its own: no process of before can join."""
    attempt = job.attempt.next()
    output = dataclasses.replace(job.output, part=attempt.folder)
    return dataclasses.replace(job, attempt=attempt, output=output, key=key)
