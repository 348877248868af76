"""The doctor's helper on a host.

It talks to the doctor through the pipe of the program that started it (ssh, for one), so that it can say what is wrong
with the network between the hosts even where nothing else passes.

Questions, by their ``do``: ``examine`` (``directory``, ``ranks``, ``several_hosts``), ``devices``, ``time``,
``listen``, and ``probe`` (``name``, ``port``, ``token``, ``rate``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from phalanx.doctor.device_probe import probe_devices
from phalanx.doctor.local import examine
from phalanx.doctor.probe import Listener, probe
from phalanx.launch.starters.helping import serve
from phalanx.system.host import this_host

__all__: list[str] = []


def _examine(directory: str, ranks: int | None, several_hosts: bool) -> dict[str, Any]:
    try:
        os.chdir(directory)
        lacking = ""
    except OSError as error:
        lacking = error.strerror or str(error)
    return {
        "host": asdict(this_host()),
        "directory": lacking,
        "findings": [asdict(finding) for finding in examine(ranks, several_hosts=several_hosts)],
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
    "devices": probe_devices,
    "time": _time,
    "listen": _listen,
    "probe": _probe,
}

if __name__ == "__main__":
    serve(_ANSWERS)
