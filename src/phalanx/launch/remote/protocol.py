"""What the head of a job and the agents on its hosts tell each other.

The *head* is the relay of a job on several hosts: it stands in the zygote's place towards the supervisor. On each host
an *agent* stands in the supervisor's place towards a zygote, which is the same one as on a single host. So neither the
supervisor nor the zygote knows that a network lies between them.

First comes the *invitation*, by the agent's standard input, so that no command line shows it: where the head listens,
the job's key, the user's environment and directory, and what the agent is to look at. If the head dies before it is
whole, the agent reads the end of its input and ends. If the agent dies, the program that has started it ends, and the
head says so. Everything else goes over one TCP connection, proven by the key, in frames of ``relay/channel.py``.

====================  ======  ==============================================================================
message               sender  meaning, and what follows if the sender dies right after it
====================  ======  ==============================================================================
``here``              agent   This is the host: its identity, versions and cores. The head waits for all of them.
``invite``            head    The hosts that this one is to start the agents of (``tree.py``).
``unstarted``         agent   It could not start one of them, and the head does.
``printed``           agent   A line that the program which starts one of them has printed.
``start``             head    The job and this host's share of it. The agent forks the zygote, and ends it again
                              as soon as the connection ends.
``started``           agent   The ranks' process ids.
frames OUT and ERR    agent   A block of output, behind the rank's number. What has been sent is printed.
frames IN, ``wants``  both    A block of input for the rank that reads; the request for the next one.
``reported``          agent   Why a rank has failed, and how long ago: clocks of two hosts are never compared.
``exited``            agent   A rank has ended, and all of its output was sent before.
``overdue``           agent   A rank was killed because it did not end within the grace.
``stacks``            both    The order to show where the ranks are, and the answer.
``waits``             agent   For how long a rank has been in one operation, again and again once that is long.
``examine``           head    What do the ranks do, and where are those that are named?
``examined``          agent   The answer (``relay/observer.py``). A host that sends none in time is named instead.
``end``, ``signal``   head    As the supervisor gives them to the zygote.
``ended elsewhere``   head    How a rank of another host has failed, for the errors of the ranks of this one.
``look``, ``owns``    both    Whether a connection to the job's store belongs to this user on that host.
``refused``           agent   No rank of this host can be started, and why.
``ended``             agent   No process of the job is left on this host. The connection may end now.
``leave``             head    Kill what is left, and end.
====================  ======  ==============================================================================

An agent is *joining* until it has said ``here``, *waiting* until ``start``, *running* until its zygote has ended, and
*ended* until ``leave``. In each of these states the end of its connection, or of what it depends on, has it kill all
processes of the job on its host and end itself. A connection whose other side is silent ends after about four seconds
(``relay/channel.py``), so a head that was killed, or a network that was cut, leaves nothing behind.

If an agent, its zygote and its ranks are all killed at once, processes that the ranks had started are left. So of a
host that is lost while ranks run the head starts a program by the same starter that kills what is left
(``sweep_host.py``), and waits for it for a few seconds; a host that cannot be reached is left alone.

A host is *starting* for the head until ``here``, then *here* until ``start``, *running* until ``ended``, and after that
*done*. A host whose connection ends before it is done is lost: its ranks count as failed for that reason.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx import settings
from phalanx.launch.job.binding import Bind
from phalanx.launch.job.hosts import HostSlots
from phalanx.launch.job.job import Job
from phalanx.launch.job.options import Attempt, Diagnosis
from phalanx.launch.job.target import Target

__all__ = [
    "OTHER_VERSION",
    "UNREACHABLE",
    "Invitation",
    "agent_name",
    "attempt_name",
    "job_as_sent",
    "received_job",
    "split_rank",
    "with_rank",
]

# The exit codes of an agent that cannot reach the head (EX_UNAVAILABLE), or would not understand it (EX_CONFIG). Its
# last line says why.
UNREACHABLE, OTHER_VERSION = 69, 78
_RANK_BYTES = 4


@dataclass(frozen=True)
class Invitation:
    """What an agent must know before it can join.

    Attributes:
        version: that of the head's Phalanx. An agent of another one only says so: it may understand nothing else.
        environment: the user's variables, as far as they are not the other host's own.
        directory: the working directory.
        door: where the head listens, with the key, as ``relay/channel.py`` takes it.
        host: the number of the host among those of the job.
        name: the host as the user wrote it.
        python: whether the ranks run Python.
        path: the script, module or folder, whose content has to be the same on all hosts; or the program, which only
            has to be there.
        ranks: how many ranks the host gets.
        interface: the network interface that the user chose; empty for none.
        bind: how ranks are bound to cores.
        device: the device on which the user wants the ranks to compute; None for none in particular.
        attempt: the job and the attempt, by a name that nothing else has.
    """

    version: str
    environment: Mapping[str, str]
    directory: str
    door: str
    host: int
    name: str
    python: bool
    path: str
    ranks: int
    interface: str
    bind: Bind
    device: str | None
    attempt: str

    @property
    def agent(self) -> str:
        """The agent's name, by which all that is started on its host can be found (``settings.AGENT``)."""
        return agent_name(self.attempt, self.host)

    def line(self) -> bytes:
        """As it is sent: one line."""
        environment = {**self.environment, settings.AGENT: self.agent}
        return json.dumps({**asdict(self), "environment": environment}).encode() + b"\n"


def attempt_name(job: Job) -> str:
    """The name of this attempt at a job."""
    return f"{job.run_id}/{job.attempt.number}"


def agent_name(attempt: str, host: int) -> str:
    """The name of the agent of a host.

    Args:
        attempt: as of :func:`attempt_name`.
        host: the number of the host among those of the job.
    """
    return f"{attempt}/{host}"


def job_as_sent(job: Job) -> dict[str, Any]:
    """A job without what only its head needs, and without its key, which the invitation has brought."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    for name in ("mpi", "rehearsal", "output", "starter", "named", "key", "cpus", "diagnosis", "svg"):
        del fields[name]
    hosts = [[host.name, host.slots] for host in job.hosts]
    plain = {"target": asdict(job.target), "memory": dict(job.memory), "attempt": asdict(job.attempt), "hosts": hosts}
    return {**fields, **plain, "strict": job.diagnosis.strict, "warn_after_s": job.diagnosis.warn_after_s}


def received_job(
    sent: Mapping[str, Any], *, address: str, key: str, cpus: tuple[tuple[int, ...], ...], threads: str
) -> Job:
    """The job as an agent and its zygote see it.

    Args:
        sent: what :func:`job_as_sent` has made.
        address: where this host reaches the head, and its ranks the store.
        key: the job's key.
        cpus: the cores to which the ranks of this host are bound, if they are.
        threads: how many threads each of them gets.
    """
    target = Target(**{**sent["target"], "argv": tuple(sent["target"]["argv"])})
    hosts = tuple(HostSlots(name, slots) for name, slots in sent["hosts"])
    own = {
        "target": target,
        "hosts": hosts,
        "attempt": Attempt(**sent["attempt"]),
        "diagnosis": Diagnosis(sent["warn_after_s"], strict=sent["strict"]),
        "replace": tuple(sent["replace"]),
        "addresses": (address,),
        "key": key,
        "cpus": cpus,
        "threads": threads,
    }
    return Job(**{name: value for name, value in {**sent, **own}.items() if name not in ("strict", "warn_after_s")})


def with_rank(rank: int, data: bytes) -> bytes:
    """A block of a rank's output, or of its input, as it is sent."""
    return rank.to_bytes(_RANK_BYTES, "big") + data


def split_rank(data: bytes) -> tuple[int, bytes]:
    """The rank, and the block."""
    return int.from_bytes(data[:_RANK_BYTES], "big"), data[_RANK_BYTES:]
