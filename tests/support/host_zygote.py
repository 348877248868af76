"""A process on a test host that has imported torch once and forks ranks, so that a rank starts in milliseconds.

It reads orders from its standard input and reports ends on its standard output, one JSON object a line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import selectors
import signal
import sys

import torch

import phalanx.world  # noqa: F401 - what every rank would import


def main() -> str:
    """Serve until the standard input closes, then return an empty text; in a rank, return the path of its script."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # into the standard error of the rank that is asked
    ended_read, ended_write = os.pipe()
    os.set_blocking(ended_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.set_blocking(ended_read, False)
    signal.set_wakeup_fd(ended_write)
    children: dict[int, int] = {}
    report({"ready": True})
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(ended_read, selectors.EVENT_READ)
        pending = b""
        while True:
            for key, _ in selector.select():
                if key.fd == ended_read:
                    os.read(ended_read, 4096)
                    reap(children)
                    continue
                data = os.read(0, 1 << 16)
                if not data:
                    return ""
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    order = json.loads(line)
                    if "script" in order:
                        pid = os.fork()
                        if not pid:
                            signal.set_wakeup_fd(-1)
                            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                            become(order)
                            return str(order["script"])
                        children[pid] = order["number"]
                    elif "stacks" in order:
                        for pid in children:
                            os.kill(pid, signal.SIGUSR1)
                    else:
                        end_others(children)
                        report({"cleaned": True})


def become(order: dict[str, str]) -> None:
    """In the child: take on the environment and the output of the rank."""
    os.environ.clear()
    os.environ.update(order["environment"])  # type: ignore[arg-type]
    for descriptor, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = [order["script"]]


def reap(children: dict[int, int]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            report({"number": children.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def end_others(children: dict[int, int]) -> None:
    """Kill every process of this host but this one and the one that holds the host."""
    while others := [int(name) for name in os.listdir("/proc") if name.isdigit() and alive(int(name))]:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap(children)


def alive(pid: int) -> bool:
    """Whether a process still holds anything, such as a port: one whose first thread is a zombie may have others."""
    if pid in (1, os.getpid()):
        return False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        state = file.read().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    return False


def report(what: dict[str, object]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if script := main():
    runpy.run_path(script, run_name="__main__")
