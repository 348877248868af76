"""The contract between the supervisor and what starts its agents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.launch.output.failure import RankState
    from phalanx.launch.roster import AgentState

__all__ = ["Starter"]


class Starter(ABC):
    """Starts the agents of one attempt, and sees them out.

    A starter gives the supervisor each agent's link (``Links.admit``); one that does not know beforehand where the
    ranks are calls ``Supervisor.all_here`` when all agents have come. ``agents`` are in the order of their ranks.
    """

    agents: Sequence[AgentState]

    @abstractmethod
    def begin(self) -> None:
        """Start the agents.

        Raises:
            Refusal: they cannot be started.
        """

    def start_after_all(self, agent: AgentState) -> None:  # noqa: B027 - optional
        """Start an agent that another one could not start."""

    def due_at(self) -> float | None:
        """Return when :meth:`act` has something to do; None for never."""
        return None

    def act(self, now: float) -> Sequence[str]:
        """Do what is due; the lines to be printed.

        Raises:
            Refusal: an agent cannot come.
        """
        return ()

    def has_ranks(self) -> bool:
        """Tell whether there may be ranks although no agent has said so yet."""
        return False

    def is_gone(self) -> bool:
        """Tell whether what has started the agents has ended, so that their loss is no fault of their own."""
        return False

    @abstractmethod
    def describe_lost(self, agent: AgentState, *, silent: bool) -> tuple[str, int]:
        """Say why an agent is lost, with the exit code if the job ends for that and not for its ranks; else 0.

        Args:
            agent: the agent.
            silent: whether its host does not answer any more.
        """

    @abstractmethod
    def give_up(self, agent: AgentState) -> None:
        """End an agent that did not end its ranks in time."""

    def explain(self, failures: Sequence[RankState]) -> tuple[str, int] | None:
        """Say why the job ended, as it is printed, with the exit code, if no rank is the cause; else None."""
        return None

    @abstractmethod
    def dismiss(self, turn: Callable[[], None]) -> None:
        """Have the agents leave, wait for them and for the programs that have started them, and end what stays.

        Args:
            turn: one turn of the supervisor's loop.
        """

    def farewell(self, code: int, why: str) -> None:  # noqa: B027 - optional
        """Tell agents that have not left how the job ended: with which exit code, and why, in a line."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all programs: the user wants no more waiting."""
