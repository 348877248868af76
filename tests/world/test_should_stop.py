"""``world.should_stop()``: all ranks leave their loops after the same step, whoever asks and whenever."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch_support import Launcher, RunningJob, launcher
from tests.support.hosts import why_no_hosts
from tests.support.ranks import Member
from tests.support.remote import RemoteLauncher, hosts, remote
from tests.support.stop_training import TRAINING, check_chain
from tests.support.worlds import every_rank, join_world

from phalanx.system.host import machine_name

__all__ = ["hosts", "launcher", "remote"]  # fixtures

PLAIN = ("-q", "--no-prefix")
ON_HOSTS = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
# Rank 0 leaves the loop's first step when all have called it, and says so.
LOOP = """
    import os, sys, time, phalanx
    world = phalanx.init(quiet=True)
    forgets = sys.argv[1:] == ["forgets"] and world.rank == 1
    if not forgets:
        world.should_stop()
    world.barrier()
    print("ready", flush=True)
    step = 1
    while forgets or not world.should_stop():
        time.sleep(0.001)
        step += 1
    print("left", step, flush=True)
    if sys.argv[1:] == ["fails"]:
        raise ValueError("bad")
"""


def chain(launcher: Launcher, options: tuple[str, ...], ranks: int, stops: int, seed: int) -> int:
    script = launcher.script(TRAINING)

    def run(*words: str) -> tuple[int, str, str]:
        # torch makes this folder whatever it is used for; the others are to be empty afterwards.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(launcher.directory)}
        done = launcher.run(*PLAIN, *options, script, *words, environment=cache)
        return done.code, done.out.decode(), done.err_text

    return check_chain(run, launcher.directory, ranks, stops, seed)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        pytest.param(("-n", "1"), 1, id="1", marks=pytest.mark.long),
        pytest.param(("-n", "3"), 3, id="3", marks=pytest.mark.long),
        pytest.param(("--rehearse", "2x2"), 4, id="2x2"),
    ],
)
def test_stopped_training_goes_on_to_the_same_bits(launcher: Launcher, options: tuple[str, ...], ranks: int) -> None:
    assert chain(launcher, options, ranks, 1, seed=ranks) == 1


@pytest.mark.fault
@pytest.mark.parametrize(
    ("options", "ranks"), [(("-n", "1"), 1), (("-n", "4"), 4), (("--rehearse", "2x2"), 4)], ids=["1", "4", "2x2"]
)
def test_training_survives_many_stops(launcher: Launcher, options: tuple[str, ...], ranks: int) -> None:
    """As many as PHALANX_STOPS says, by default 200 for all three worlds together."""
    wanted = int(os.environ.get("PHALANX_STOPS", "200")) // 3 + 1
    made, seed = 0, 100 * ranks
    while made < wanted:
        made += chain(launcher, options, ranks, min(10, wanted - made), seed)
        for name in ("whole.pt", "parts.pt"):
            (launcher.directory / name).unlink()
        seed += 1


@ON_HOSTS
@pytest.mark.long
def test_ranks_of_two_hosts_stop_in_step(remote: RemoteLauncher) -> None:
    script = remote.script(TRAINING)

    def run(*words: str) -> tuple[int, str, str]:
        job = remote.run(*PLAIN, "-H", "h0:2,h1:2", script, *words)
        return job.process.returncode, job.out, job.err

    assert check_chain(run, remote.folder, 4, 2, seed=1, on_hosts=True) > 0


def start(
    launcher: Launcher, *options: str, how: tuple[str, ...] = (), environment: dict[str, str] | None = None
) -> RunningJob:
    job = launcher.start(*PLAIN, "-n", "2", *options, launcher.script(LOOP), *how, environment=environment)
    assert job.read_lines(2) == ["ready"] * 2
    return job


def stop(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "stop", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_job_stops_in_step_however_it_is_asked(launcher: Launcher) -> None:
    for how in ("launcher", "agent", "rank", "gently"):
        job = start(launcher, "--restarts", "2")
        if how == "gently":
            done = stop("--gently", str(job.pid))
            assert done.returncode == 0, done
            assert "has ended" in done.stdout
        else:
            named = {"launcher": job.pid, "agent": job.named("phalanx-agent"), "rank": job.ranks()[1]}
            os.kill(named[how], signal.SIGTERM)
        ended = job.finish()
        assert ended.code == 0, ended
        left = ended.out_lines
        assert len(set(left)) == 1
        assert len(left) == 2
        agent = f"SIGTERM at the agent on {machine_name()}"
        why = {"launcher": "SIGTERM", "agent": agent, "rank": "SIGTERM at rank 1", "gently": "phalanx stop --gently"}[
            how
        ]
        assert ended.err_text == f"phalanx: stopped after step {int(left[0].split()[1]) + 1} on request ({why})\n"


def test_time_limits_stop_a_job_and_slurm_queues_it_again(launcher: Launcher) -> None:
    script = launcher.script(LOOP)
    stand_in = launcher.directory / "scontrol"
    stand_in.write_text('#!/bin/sh\necho "$@" > "$0.called"\n')
    stand_in.chmod(0o755)
    slurm = {"PATH": f"{launcher.directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1"}
    ended = launcher.run(*PLAIN, "-n", "2", "--stop-before", "60", "--requeue", script, environment=slurm)
    assert "cannot stop" not in ended.err_text
    assert ended.code == 143  # the limit is over before a rank has asked
    assert "--stop-before 60: no rank has called world.should_stop(); the job is ended as by SIGTERM" in ended.err_text
    assert not Path(f"{stand_in}.called").exists()
    for scontrol, code in ((None, 0), ("#!/bin/sh\necho 'Requested operation not supported' >&2; exit 1\n", 1)):
        if scontrol is not None:
            stand_in.write_text(scontrol)
        job = start(launcher, "--max-hours", "100", "--requeue", environment=slurm)
        job.process.send_signal(signal.SIGUSR1)
        ended = job.finish()
        assert ended.code == code, ended
        assert "on request (SIGUSR1)" in ended.err_text
    assert Path(f"{stand_in}.called").read_text() == "requeue 7\n"
    assert "scontrol requeue 7 failed: Requested operation not supported; queue the job again by hand" in ended.err_text


def test_rank_that_never_asks_is_killed_after_the_grace_and_named(launcher: Launcher) -> None:
    job = start(launcher, "--grace", "1", "--restarts", "2", how=("forgets",))
    job.process.send_signal(signal.SIGUSR1)
    ended = job.finish()
    assert ended.code == 143
    assert ended.err_text == (
        "phalanx: a stop was requested (SIGUSR1): rank 1 never called world.should_stop(); after 1 s it was killed "
        "(--grace)\n"
    )


def test_job_that_fails_after_a_request_is_not_started_again(launcher: Launcher) -> None:
    job = start(launcher, "--restarts", "2", how=("fails",))
    job.process.send_signal(signal.SIGTERM)
    ended = job.finish()
    assert ended.code == 1
    assert "of 2 failed: ValueError: bad" in ended.err_text
    assert ended.err_text.endswith("phalanx: a stop was requested (SIGTERM), so nothing is started again\n")


def test_second_signal_ends_the_job(launcher: Launcher) -> None:
    job = start(launcher, how=("forgets",))
    job.process.send_signal(signal.SIGTERM)
    assert job.read_lines(1)[0].startswith("left")
    job.process.send_signal(signal.SIGTERM)
    ended = job.finish()
    assert ended.code == 143
    assert re.fullmatch(r"phalanx: SIGTERM: .* been ended\n", ended.err_text), ended


def test_job_that_does_not_ask_is_left_alone(launcher: Launcher) -> None:
    job = launcher.start(*PLAIN, "--no-preload", "-n", "2", launcher.script("""
        import signal, sys
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print("asked", flush=True)))
        print("ready", flush=True)
        while True:
            signal.pause()
    """))  # fmt: skip
    assert job.read_lines(2) == ["ready"] * 2
    done = stop("--gently", str(job.pid))
    assert done.returncode == 2
    assert "cannot stop in step: no rank has called world.should_stop()" in done.stderr
    job.process.send_signal(signal.SIGUSR1)
    ended = job.finish()
    assert (ended.code, ended.out_lines, ended.err_text) == (0, ["asked"] * 2, "")


def test_what_a_rank_starts_gets_its_signals_as_ever(launcher: Launcher) -> None:
    """A child that is terminated ends, a loader's worker survives, and the script's own handler is called."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(launcher.directory)}
    ended = launcher.run(*PLAIN, "-n", "2", launcher.script("""
        import multiprocessing, os, signal, sys, time, torch, phalanx
        rank = os.getpid()
        signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"own\\n" if os.getpid() == rank else b"worker\\n"))
        world = phalanx.init(quiet=True)
        world.should_stop()
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
        child.terminate()
        child.join()
        print(child.exitcode, flush=True)
        world.barrier()
        batches = iter(torch.utils.data.DataLoader(range(1 << 40), num_workers=1, batch_size=None))
        for step, _ in enumerate(batches):
            if step == 3 and world.rank == 1:
                for pid in (batches._workers[0].pid, os.getpid()):
                    os.kill(pid, signal.SIGUSR1)
            if world.should_stop():
                break
    """), environment=cache)  # fmt: skip
    assert ended.code == 0, ended
    assert sorted(ended.out_lines) == ["-15", "-15", "own", "worker"]
    assert "on request (SIGUSR1 at rank 1)" in ended.err_text


def test_rank_that_fails_ends_the_others_at_once(launcher: Launcher) -> None:
    """Ranks that handle SIGTERM end by it as before, once the job is ended: the grace would be 200 s."""
    ended = launcher.run(*PLAIN, "-n", "2", "--grace", "200", launcher.script("""
        import time, phalanx
        world = phalanx.init(quiet=True)
        world.should_stop()
        world.barrier()
        if world.rank == 0:
            raise ValueError("bad")
        time.sleep(1000)
    """))  # fmt: skip
    assert ended.code == 1
    assert "rank 0 of 2 failed: ValueError: bad" in ended.err_text
    assert "killed" not in ended.err_text


def test_calls_add_no_operation(launcher: Launcher) -> None:
    ended = launcher.run(*PLAIN, "-n", "2", launcher.script("""
        import phalanx
        from phalanx.diagnosis import reading, recorder
        world = phalanx.init(quiet=True)
        world.barrier()
        begun = [reading.copy_recorder(*recorder.own_place()).begun]
        for _ in range(1000):
            world.should_stop()
        begun.append(reading.copy_recorder(*recorder.own_place()).begun)
        world.barrier()
        begun.append(reading.copy_recorder(*recorder.own_place()).begun)
        print(begun[1] - begun[0], begun[2] - begun[0])
    """))  # fmt: skip
    assert ended.out_lines == ["0 1"] * 2, ended


def call_until_stopped(member: Member, every: int) -> int:
    world = join_world(member)
    calls = 0
    while True:
        calls += 1
        if calls == 5 and member.rank == member.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if world.should_stop(every=every):
            assert world.should_stop(every=every)
            return calls
        assert calls < 100


@pytest.mark.parametrize(("every", "expected"), [(1, 5), (4, 8)])
@every_rank(size=[1, 3], backend=["phalanx", "gloo", "mpi"])
def test_ranks_of_another_launcher_exchange_it(member: Member, every: int, expected: int) -> None:
    assert call_until_stopped(member, every) == expected


def test_ranks_of_torchrun_stop_in_step_over_gloo(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, signal, phalanx\n"
        "with phalanx.init('gloo', quiet=True) as world:\n"
        "    calls = 0\n"
        "    while not world.should_stop():\n"
        "        calls += 1\n"
        "        if calls == 5 and world.rank == 1:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "    with open(f'{world.rank}', 'w') as file:\n"
        "        file.write(f'{calls} {world.backend}')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["5 gloo"] * 2
