"""Another user of this machine, who attacks a job."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - another user may not be able to read it when it is first needed
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["NOBODY", "as_another_user", "needs_another_user"]

NOBODY = 65534

needs_another_user = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user, which attacks the job here"
)


def as_another_user(attack: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a child process of another user, and return its result, or raise its exception."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            try:
                answer = pickle.dumps((attack(*arguments), None))
            except BaseException as error:
                answer = pickle.dumps((None, error))
            with os.fdopen(write, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    result, failure = pickle.loads(answer)
    if failure is not None:
        raise failure
    return result
