"""The messages between the supervisor and its agents, over one link to each agent (``link.py``).

An *agent* is the parent of the ranks of one host. An *order* goes from the supervisor to an agent, an *event* the other
way. Beside them go blocks of bytes: what a rank prints, and what one reads.

Times are seconds of ``time.monotonic()`` of the agent's host. The supervisor converts them (``AgentState.own_time``).

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
    "Asked",
    "AskedToStop",
    "CallsShouldStop",
    "EndOrder",
    "EndedElsewhere",
    "Event",
    "Examine",
    "Examined",
    "Exited",
    "Held",
    "Here",
    "Hold",
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
    "Start",
    "Started",
    "StopAt",
    "Tell",
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
    """A message from an agent to the supervisor."""

    now: float = 0.0  # the time there when it was sent


class RankPlan(msgspec.Struct, kw_only=True):
    """A rank that an agent forks."""

    # rank, local_rank: its number in the world, and on its host
    rank: int
    local_rank: int
    environment: dict[str, str]  # what is added to the agent's environment
    argv: tuple[str, ...]  # ``sys.argv``
    cpus: tuple[int, ...] = ()  # the logical cores it is bound to; empty for those of the agent
    reads: bool = False  # whether it gets the launcher's standard input
    terminal: bool = False  # whether it keeps the agent's standard output and error, as a debugger wants


class Start(Order):
    """Fork these ranks."""

    run_id: str  # the job
    target: Target
    ranks: list[RankPlan]
    before_import: dict[str, str]  # variables that must be set when torch is imported
    preload: bool  # import torch once, before the ranks are forked
    quiet: bool  # print no notes
    feeds_input: bool  # whether the rank that reads gets its input by blocks over the link, and not by inheriting it
    watch_after_s: float  # say which ranks wait once one has for so long; 0 for never
    records: int  # how many of its last operations a rank leaves when it ends
    # the environment of ``phalanx run``, of which an agent that MPI started takes what is not its own
    carried: dict[str, str]
    directory: str  # the working directory
    grace_s: float  # how long a rank may take to end when MPI's launcher ends it
    is_last: bool  # whether no further attempt follows
    stop_on: tuple[int, ...]  # the signals that ask for a stop in step (``stop_in_step.py``)


class EndOrder(Order):
    """End the ranks."""

    signal: int  # with which they are asked; SIGKILL for at once
    grace_s: float  # how long they may take before they are killed
    spare: list[int]  # ranks that are not asked, because their scripts have failed by themselves
    where: bool  # let them write their stacks first, for the user


class SignalOrder(Order):
    """Hand a signal of the user's on to the ranks."""

    signal: int


class Hold(Order):
    """Have the ranks wait in their next call of ``should_stop``, and answer by :class:`Held`."""


class StopAt(Order):
    """Have the ranks stop at this call of ``should_stop``."""

    call: int


class Examine(Order):
    """Say what the ranks do."""

    number: int
    stacks: bool  # whether the ranks are to write their stacks
    records: int  # how many operations of each rank are wanted


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


class Tell(Order):
    """Print a line of the supervisor's, on a node that was started by itself."""

    text: str


class Leave(Order):
    """Kill what is left, and end.

    Attributes:
        code, why: the exit code, and a line that says why, on a node that was started by itself.
    """

    code: int = 0
    why: str = ""


class Here(Event):
    """The agent has come."""

    agent: int  # which one: the number of a host, or of a rank that MPI started
    # name, machine: the host's name, and what distinguishes it from another of the same name
    name: str
    machine: str
    pid: int  # the agent's process
    cores: int = 0  # how many cores the ranks may use
    # of each rank, the logical cores to which it is to be bound; of an agent that MPI started, its own
    cpus: list[tuple[int, ...]] = []
    accelerators: list[str] = []  # the accelerators that ranks may use
    problems: list[str] = []  # why no rank can run there
    same: dict[str, str] = {}  # what has to be the same on all hosts
    # the number of ranks in the world, as MPI says; of a node that was started by itself, how many it takes
    size: int = 0


class Started(Event):
    """The ranks have been forked, in the order of their plans."""

    pids: list[int]


class Reported(Event):
    """A rank's own words about its failure."""

    rank: int
    report: dict[str, Any]


class Exited(Event):
    """A rank has ended."""

    rank: int
    status: int  # its exit code, or minus the signal that ended it
    at: float
    out_of_memory: bool = False  # whether the kernel killed it because its cgroup had no memory left
    stage: int = 0  # how far it had come (``rank/trace.py``)
    asked: str = ""  # what it had asked another process for, and waited for
    stack: str = ""  # where it was, if it was asked
    recording: Any = None  # its last operations
    by_others: bool = False  # MPI's launcher wanted it to end
    by_itself: bool = False  # it had begun to end before its agent asked it to
    calls: int = 0  # how often it has called ``should_stop``


class CallsShouldStop(Event):
    """A rank has called ``should_stop``, so the job can be stopped in step."""


class AskedToStop(Event):
    """A signal that asks for a stop has come to a process beside the launcher."""

    signal: int
    where: str


class Held(Event):
    """The answer to :class:`Hold`: of each rank, ended ones too, the number of the last call that it has begun."""

    calls: dict[int, int]


class Overdue(Event):
    """A rank did not end within so many seconds, and was killed."""

    rank: int
    grace_s: float


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


class Asked(Event):
    """Somebody has asked a node that was started by itself to end, by this signal."""

    signal: int


class Over(Event):
    """No process of the job is left."""


ORDERS = Start | EndOrder | SignalOrder | Hold | StopAt | Examine | Look | EndedElsewhere | LookUp | Ping | Tell | Leave
EVENTS = (
    Here
    | Started
    | Reported
    | Exited
    | CallsShouldStop
    | AskedToStop
    | Held
    | Overdue
    | Waits
    | Examined
    | Looked
    | Owns
    | Unstarted
    | WantsInput
    | Refused
    | Asked
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
