"""A helper on a host: it answers questions on its standard input, one JSON object on each line, until that ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["READY", "serve"]

READY = "phalanx-helper"  # its first line, so that what a login shell prints before it can be told apart


def serve(answers: Mapping[str, Callable[..., Mapping[str, Any]]]) -> None:
    """Answer until there are no more questions.

    A question is an object whose ``do`` names one of the answers; the rest of it are the arguments. An answer that is
    an error has ``error`` alone.

    Args:
        answers: what makes an answer, by the name of the question.
    """
    # Whatever a library prints must not be taken for an answer.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(READY, file=output, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer: Mapping[str, Any]
        try:
            answer = answers[question.pop("do")](**question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        try:
            print(json.dumps(answer), file=output, flush=True)
        except BrokenPipeError:  # who has asked is gone
            os.dup2(2, output.fileno())  # for what the interpreter writes when it ends
            return
