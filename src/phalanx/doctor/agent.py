"""The doctor's helper on a host: it answers questions on its standard input, one JSON object on each line.

It talks to the doctor through the pipe of the program that started it (ssh, for one), so that it can say what is wrong
with the network between the hosts even where nothing else passes. It ends when its input does.

Questions, by their ``do``: ``examine`` (``directory``, ``ranks``), ``time``, ``listen``, and ``probe`` (``name``,
``port``, ``token``, ``rate``). An answer that is an error has ``error`` alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from phalanx.doctor.local import examine
from phalanx.doctor.probe import Listener, probe
from phalanx.system.host import this_host

__all__ = ["READY", "serve"]

READY = "phalanx-doctor-agent"  # its first line, so that what a login shell prints before it can be told apart


def serve() -> None:
    """Answer until there are no more questions."""
    # Whatever a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = _ANSWERS[question.pop("do")](**question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _examine(directory: str, ranks: int | None) -> dict[str, Any]:
    try:
        os.chdir(directory)
        lacking = ""
    except OSError as error:
        lacking = error.strerror or str(error)
    return {
        "host": asdict(this_host()),
        "directory": lacking,
        "findings": [asdict(finding) for finding in examine(ranks, several_hosts=True)],
    }


def _time() -> dict[str, float]:
    return {"now": time.time()}


def _listen() -> dict[str, Any]:
    listener = Listener()  # for as long as this process lives
    return {"port": listener.port, "token": listener.token}


def _probe(name: str, port: int, token: str, rate: bool) -> dict[str, Any]:
    return asdict(probe(name, port, token, rate=rate))


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "examine": _examine,
    "time": _time,
    "listen": _listen,
    "probe": _probe,
}

if __name__ == "__main__":
    serve()
