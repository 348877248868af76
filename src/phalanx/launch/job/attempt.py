"""Which attempt at a job this is: with ``--restarts K`` all ranks are started again after a failure, up to K times.

Prior art: torchrun's ``--max-restarts``. As there, a script finds the number in TORCHELASTIC_RESTART_COUNT.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx import settings

__all__ = ["Attempt"]


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job.

    Attributes:
        number: how often the ranks have been started before: 0 for the first attempt.
        restarts: how often they may be started again in all.
    """

    number: int = 0
    restarts: int = 0

    @property
    def is_last(self) -> bool:
        """Whether a failure of this attempt is the job's."""
        return self.number >= self.restarts

    @property
    def title(self) -> str:
        """For people, who count from 1: ``attempt 2 of 4``."""
        return f"attempt {self.number + 1} of {self.restarts + 1}"

    @property
    def folder(self) -> str:
        """The folder of this attempt's files in that of the job's; empty if the job has but one attempt."""
        return f"attempt-{self.number}" if self.restarts else ""

    def next(self) -> Attempt:
        """The attempt after this one."""
        return Attempt(self.number + 1, self.restarts)

    def environment(self) -> dict[str, str]:
        """The variables that say it to the ranks: our own and torchrun's."""
        return {
            settings.ATTEMPT: str(self.number),
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
            "TORCHELASTIC_MAX_RESTARTS": str(self.restarts),
        }
