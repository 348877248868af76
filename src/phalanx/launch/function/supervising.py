"""The process between an interpreter and the ranks that call a function for it: the supervisor of their job.

It is a process of its own, because a supervisor takes over signals, adopts processes and ends all its descendants,
none of which may happen to somebody's notebook.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from phalanx.errors import LaunchError, PhalanxError
from phalanx.launch.attempts import launch
from phalanx.launch.job.job import Job
from phalanx.launch.rank.function import call_and_end
from phalanx.launch.rank.start import RankStart
from phalanx.system import processes

__all__ = ["supervise"]


def supervise(job: Job, call: Callable[[], Any], results: Sequence[int], reason: int, parent: int) -> NoReturn:
    """Run a job of a function; in each rank, call it.

    Args:
        job: the job.
        call: the function, with its arguments.
        results: the descriptors of the files for the ranks' results.
        reason: the descriptor of the file for the reason of a failure.
        parent: the process id of the interpreter. When it ends, this process is killed, and with it the ranks.
    """
    processes.die_with_parent(parent)
    processes.set_name("phalanx-launch")

    def hand_over(rank: int, text: str, code: int) -> None:
        os.pwrite(reason, json.dumps({"rank": rank, "text": text, "code": code}).encode(), 0)

    code = 130
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        outcome = launch(job, hand_over)
        if isinstance(outcome, RankStart):
            call_and_end(outcome, call, results)
        code = outcome
    except (LaunchError, PhalanxError) as error:
        hand_over(-1, str(error), 2)
        code = 2
    except KeyboardInterrupt:
        pass  # nothing had been started
    finally:
        os._exit(code)
