"""While ranks are given long to end, the launcher says why the job ends, for whom it waits, and how long."""

from __future__ import annotations

import platform
import re
import signal

import pytest
from tests.launch_support import Launcher, launcher

__all__ = ["launcher"]

FAILS = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: None)
    open({folder!r} + "/ready-" + os.environ["RANK"], "w").close()
    while len([name for name in os.listdir({folder!r}) if name.startswith("ready-")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)  # a rank without its handler would end at once
    if os.environ["RANK"] == "1":
        {how}
    while not os.path.exists({folder!r} + "/go"):
        time.sleep(0.01)
"""
HOW = {
    "raise ValueError('no data')": "rank 1 on {host} failed: ValueError: no data; ",
    "sys.exit(3)": "rank 1 on {host} failed: exit code 3; ",
    "os.kill(os.getpid(), signal.SIGKILL)": "rank 1 on {host} failed: ended by signal 9 (SIGKILL); ",
}


@pytest.mark.parametrize(("how", "size"), [*zip(HOW, (2, 3, 5), strict=True)])
def test_a_failure_is_said_while_others_take_long_to_end(launcher: Launcher, how: str, size: int) -> None:
    folder = launcher.directory
    script = launcher.script(FAILS.format(how=how, folder=str(folder)))
    job = launcher.start("-n", str(size), "-q", "--grace", "300", script)
    (line,) = job.read_lines(1, job.process.stderr)
    if size == 2:
        who = "rank 0 has <n> s more to end before it is killed (--grace)"
    else:
        who = f"ranks 0, 2{f'-{size - 1}' * (size > 3)} have <n> s more to end before they are killed (--grace)"
    expected = f"phalanx: {HOW[how].format(host=platform.node())}{who}"
    assert re.sub(r"\b\d+ s", "<n> s", line) == expected
    (folder / "go").touch()
    outcome = job.finish()
    assert outcome.err_text.startswith(f"phalanx: rank 1 of {size} failed"), outcome.err_text
    assert "to end before" not in outcome.err_text  # it is said once


@pytest.mark.parametrize("size", [1, 3])
def test_after_a_signal_it_is_said_for_whom_the_launcher_waits(launcher: Launcher, size: int) -> None:
    sleeps = ("sh", "-c", "trap '' TERM; echo up; exec sleep 300")
    job = launcher.start("-n", str(size), "-q", "--grace", "300", *sleeps)
    job.read_lines(size)
    job.process.send_signal(signal.SIGTERM)
    (line,) = job.read_lines(1, job.process.stderr)
    who = (
        "rank 0 has <n> s more to end before it is" if size == 1 else "ranks 0-2 have <n> s more to end before they are"
    )
    assert re.sub(r"\b\d+ s", "<n> s", line) == f"phalanx: SIGTERM: {who} killed (--grace)"
    job.process.send_signal(signal.SIGINT)  # the second signal kills
    assert job.finish().code == 128 + signal.SIGTERM
