"""The messages between the supervisor and its agents, over one link to each agent (``link.py``).

An *agent* is the parent of the ranks of one host. An *order* goes from the supervisor to an agent, an *event* the other
way. Beside them go blocks of bytes: what a rank prints, and what one reads.

Times are seconds of ``time.monotonic()`` of the agent's host. The supervisor converts them (``AgentLink.own_time``).

====================  ============================================================================================
what                  and what follows if the sender dies right after it
====================  ============================================================================================
``Here``              The agent has come. The supervisor starts nothing before all have.
``Start``             The agent prepares the target and forks its ranks. It ends them when its link ends.
``Started``           The ranks' process ids.
output                What has been sent is printed.
``Exited``            A rank has ended; all of its output was sent before. A rank of an agent that is lost counts as
                      killed.
``Over``              No process of the job is left there.
``Leave``             The agent kills what is left, and ends.
====================  ============================================================================================

An agent whose link ends kills all processes of the job on its host, and ends. A link whose other side is silent ends
after about four seconds (``link.py``).
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from phalanx.launch.job.target import Target

__all__ = [
    "EVENTS",
    "ORDERS",
    "EndOrder",
    "EndedElsewhere",
    "Event",
    "Examine",
    "Examined",
    "Exited",
    "Here",
    "Leave",
    "Look",
    "LookUp",
    "Looked",
    "Order",
    "Over",
    "Overdue",
    "Owns",
    "Ping",
    "RankPlan",
    "Refused",
    "Reported",
    "SignalOrder",
    "Stacks",
    "StacksOrder",
    "Start",
    "Started",
    "Unstarted",
    "Waits",
    "WantsInput",
    "decode_event",
    "decode_order",
    "encode",
]


class Order(msgspec.Struct, tag=True, kw_only=True):
    """A message from the supervisor to an agent."""


class Event(msgspec.Struct, tag=True, kw_only=True):
    """A message from an agent to the supervisor.

    Attributes:
        now: the time there when it was sent.
    """

    now: float = 0.0


class RankPlan(msgspec.Struct, kw_only=True):
    """A rank that an agent forks.

    Attributes:
        rank, local_rank: its number in the world, and on its host.
        environment: what is added to the agent's environment.
        argv: ``sys.argv``.
        cpus: the logical cores it is bound to; empty for those of the agent.
        reads: whether it gets the launcher's standard input.
        terminal: whether it keeps the agent's standard output and error, as a debugger wants.
    """

    rank: int
    local_rank: int
    environment: dict[str, str]
    argv: tuple[str, ...]
    cpus: tuple[int, ...] = ()
    reads: bool = False
    terminal: bool = False


class Start(Order):
    """Fork these ranks.

    Attributes:
        run_id: the job.
        target: what they run.
        ranks: they.
        before_import: variables that must be set when torch is imported.
        preload: import torch once, before the ranks are forked.
        quiet: print no notes.
        feeds_input: whether the rank that reads gets its input by blocks over the link, and not by inheriting it.
        watch_after_s: say which ranks wait once one has for so long; 0 for never.
        records: how many of its last operations a rank leaves when it ends.
        carried: the environment of ``phalanx run``, of which an agent that MPI started takes what is not its own.
        directory: the working directory.
        grace_s: how long a rank may take to end when MPI's launcher ends it.
        is_last: whether no further attempt follows.
    """

    run_id: str
    target: Target
    ranks: list[RankPlan]
    before_import: dict[str, str]
    preload: bool
    quiet: bool
    feeds_input: bool
    watch_after_s: float
    records: int
    carried: dict[str, str]
    directory: str
    grace_s: float
    is_last: bool


class EndOrder(Order):
    """End the ranks.

    Attributes:
        signal: with which they are asked; SIGKILL for at once.
        grace_s: how long they may take before they are killed.
        spare: ranks that are not asked, because their scripts have failed by themselves.
        where: let them write their stacks first, for the user.
    """

    signal: int
    grace_s: float
    spare: list[int]
    where: bool


class SignalOrder(Order):
    """Hand a signal of the user's on to the ranks."""

    signal: int


class StacksOrder(Order):
    """Send the stacks of all ranks, for the user."""


class Examine(Order):
    """Say what the ranks do.

    Attributes:
        number: the question's.
        of: the ranks that are to write their stacks.
        records: how many operations of each rank are wanted.
    """

    number: int
    of: list[int]
    records: int


class Look(Order):
    """Say how the ranks get on, for ``phalanx top``."""

    number: int


class EndedElsewhere(Order):
    """A rank of another host has failed; for the errors of the ranks of this one."""

    known: dict[str, Any]


class LookUp(Order):
    """Does this user have a connection with these ends on that host?"""

    number: int
    end: list[Any]
    other_end: list[Any]


class Ping(Order):
    """Nothing. That something comes continues an agent that is stopped (:meth:`Link.continue_when_called`)."""


class Leave(Order):
    """Kill what is left, and end."""


class Here(Event):
    """The agent has come.

    Attributes:
        agent: which one: the number of a host, or of a rank that MPI started.
        name, machine: the host's name, and what distinguishes it from another of the same name.
        pid: the agent's process.
        cores: how many cores the ranks may use.
        cpus: of each rank, the logical cores to which it is to be bound; of an agent that MPI started, its own.
        accelerators: the accelerators that ranks may use.
        problems: why no rank can run there.
        same: what has to be the same on all hosts.
        size: the number of ranks in the world, as MPI says.
    """

    agent: int
    name: str
    machine: str
    pid: int
    cores: int = 0
    cpus: list[tuple[int, ...]] = []
    accelerators: list[str] = []
    problems: list[str] = []
    same: dict[str, str] = {}
    size: int = 0


class Started(Event):
    """The ranks have been forked, in the order of their plans."""

    pids: list[int]


class Reported(Event):
    """A rank's own words about its failure."""

    rank: int
    report: dict[str, Any]


class Exited(Event):
    """A rank has ended.

    Attributes:
        rank: which one.
        status: its exit code, or minus the signal that ended it.
        at: when.
        out_of_memory: whether the kernel killed it because its cgroup had no memory left.
        stage: how far it had come (``rank/trace.py``).
        asked: what it had asked another process for, and waited for.
        operation: its last operation, in words, if it failed.
        call: the same for the errors of other ranks.
        stack: where it was, if it was asked.
        recording: its last operations.
        by_others: MPI's launcher wanted it to end.
        by_itself: it had begun to end before its agent asked it to.
    """

    rank: int
    status: int
    at: float
    out_of_memory: bool = False
    stage: int = 0
    asked: str = ""
    operation: str = ""
    call: dict[str, Any] = {}
    stack: str = ""
    recording: Any = None
    by_others: bool = False
    by_itself: bool = False


class Overdue(Event):
    """A rank did not end within so many seconds, and was killed."""

    rank: int
    grace_s: float


class Stacks(Event):
    """The stacks that ranks have written, by rank, and the ranks that have not."""

    stacks: dict[int, str]
    late: list[int]


class Waits(Event):
    """For how long a rank has been in one operation, and none has moved; and which are stopped."""

    waited_s: float
    still_s: float
    stopped: list[int]


class Examined(Event):
    """The answer to :class:`Examine`: of each rank that runs its state, what it asked for, and its operations."""

    number: int
    waited_s: float
    still_s: float
    ranks: dict[int, dict[str, Any]]
    stacks: dict[int, str]


class Looked(Event):
    """The answer to :class:`Look`: a ``RankLook`` of each rank as plain values, and how long to wait until the next."""

    number: int
    pause_s: float
    looks: list[dict[str, Any]]


class Owns(Event):
    """The connection of :class:`LookUp` is this user's."""

    number: int


class Unstarted(Event):
    """This agent could not start that of another host."""

    agent: int


class WantsInput(Event):
    """The rank that reads takes the next block."""


class Refused(Event):
    """No rank can run here: why, as it is printed, and the exit code."""

    text: str
    code: int


class Over(Event):
    """No process of the job is left."""


ORDERS = Start | EndOrder | SignalOrder | StacksOrder | Examine | Look | EndedElsewhere | LookUp | Ping | Leave
EVENTS = (
    Here
    | Started
    | Reported
    | Exited
    | Overdue
    | Stacks
    | Waits
    | Examined
    | Looked
    | Owns
    | Unstarted
    | WantsInput
    | Refused
    | Over
)


def encode(message: Order | Event) -> bytes:
    """A message as bytes. By JSON, in which a file name that is no valid UTF-8 survives."""
    return json.dumps(msgspec.to_builtins(message, str_keys=True)).encode()


def decode_order(data: bytes) -> ORDERS:
    """An order, of :func:`encode`'s bytes.

    Raises:
        ValueError: it is none.
    """
    order: ORDERS = msgspec.convert(json.loads(data), ORDERS, str_keys=True)
    return order


def decode_event(data: bytes) -> EVENTS:
    """An event; see :func:`decode_order`."""
    event: EVENTS = msgspec.convert(json.loads(data), EVENTS, str_keys=True)
    return event
