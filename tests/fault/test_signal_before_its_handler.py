"""A signal that the user sends to the launcher before ranks have a handler for it: at the start, and at a restart."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.hydra import write_mpiexec

__all__ = ["launcher"]

# Says so before it has a handler and goes on when the signal was sent, and ends well only if its handler was called.
SLOW = """
    import os, signal, sys, time
    got = []
    if os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') == '{attempt}':
        print('no handler yet', flush=True)
        while not os.path.exists('{sent}'):
            time.sleep(0.01)
        time.sleep(0.5)  # a signal that is passed on at once comes now, and ends it
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        while not got:
            time.sleep(0.01)
        print('got it')
    else:
        sys.exit(3)
"""


@pytest.fixture(params=["here", "mpi"])
def under(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The options by which the launcher starts the ranks itself, and by which an MPI launcher does."""
    return ["--mpi", write_mpiexec(tmp_path)] if request.param == "mpi" else []


@pytest.mark.parametrize("attempt", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_signal_waits_for_the_handler_of_a_rank(
    launcher: Launcher, tmp_path: Path, under: list[str], attempt: int
) -> None:
    sent = tmp_path / "sent"
    script = launcher.script(SLOW.format(attempt=attempt, sent=sent))
    job = launcher.start(*under, "-n", "2", "-q", "--restarts", str(attempt), script)
    job.read_lines(2)
    job.process.send_signal(signal.SIGUSR1)
    sent.touch()
    outcome = job.finish()
    assert outcome.code == 0, outcome.err_text
    assert sorted(outcome.out_lines)[-2:] == ["[rank 0] got it", "[rank 1] got it"]


def test_a_signal_waits_for_the_handler_of_a_program(launcher: Launcher, tmp_path: Path, under: list[str]) -> None:
    sent = tmp_path / "sent"
    program = f"""
        echo up
        while [ ! -e {sent} ]; do sleep 0.1; done
        sleep 0.5
        trap 'echo got it; exit 0' USR1
        while :; do sleep 0.1; done
    """
    job = launcher.start(*under, "-n", "2", "-q", "sh", "-c", program)
    job.read_lines(2)
    job.process.send_signal(signal.SIGUSR1)
    sent.touch()
    outcome = job.finish()
    assert outcome.code == 0, outcome.err_text
    assert sorted(outcome.out_lines) == ["[rank 0] got it", "[rank 1] got it"]


def test_a_signal_of_the_mpi_launcher_waits_for_the_rank_and_its_handler(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("""
        import os, signal, sys, time
        got = []
        time.sleep(0.5)  # a signal that is passed on at once comes now, and ends it
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        until = time.monotonic() + 100.0
        while os.environ['RANK'] == '0' and not got:
            time.sleep(0.01)
            if time.monotonic() > until:
                sys.exit('no signal has come')
        print(len(got))
    """)
    environment = {"EARLY": str(int(signal.SIGUSR1))}
    outcome = launcher.run("--mpi", write_mpiexec(tmp_path), "-n", "2", "-q", script, environment=environment)
    assert outcome.code == 0, outcome.err_text
    assert sorted(outcome.out_lines) == ["[rank 0] 1", "[rank 1] 0"]
