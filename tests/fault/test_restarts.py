"""``phalanx run --restarts K``: all ranks are started again after a failure, and share nothing with those before."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher, wait_for
from tests.support.faults import known_of
from tests.support.golden import block_of, check_told

from phalanx.system.host import machine_name
from phalanx.system.limits import FILES_BESIDE, FILES_PER_RANK

__all__ = ["launcher"]

PLAIN = ("-q", "--no-prefix")
# Nothing imports torch that the script does not import.
QUICK = (*PLAIN, "--no-preload")


def test_ranks_are_started_again_after_one_was_killed(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, signal, torch, phalanx
        world = phalanx.init()
        total = torch.ones(())
        world.all_reduce(total)
        print(world.attempt, world.rank, int(total), os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        world.barrier()  # all have printed, before the launcher ends them
        if world.attempt < 2 and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
    """)
    outcome = launcher.run("-n", "3", *PLAIN, "--restarts", "3", script)
    assert outcome.code == 0, outcome.err_text
    # The lines of one attempt come before those of the next.
    printed = outcome.out_lines
    assert [sorted(printed[at : at + 3]) for at in range(0, len(printed), 3)] == [
        [f"{attempt} {rank} 3 {attempt}" for rank in range(3)] for attempt in range(3)
    ]
    assert [line for line in outcome.err_text.splitlines() if line.startswith("phalanx:")] == [
        "phalanx: rank 2 of 3 failed",
        "phalanx: attempt 1 of 4 failed; attempt 2 of 4 starts now",
        "phalanx: rank 2 of 3 failed",
        "phalanx: attempt 2 of 4 failed; attempt 3 of 4 starts now",
    ]
    assert outcome.err_text.count(" after the start, ended by signal 9 (SIGKILL)") == 2


@pytest.mark.parametrize("moment", ["in the middle of the file", "before it takes its place"])
def test_nothing_stays_of_a_checkpoint_whose_rank_was_killed_in_it(launcher: Launcher, moment: str) -> None:
    """Rank 0 is, in the second of three saves and again in the second attempt."""
    script = launcher.script(f"""
        import os, signal, torch, phalanx
        from pathlib import Path
        world = phalanx.init()
        (folder := Path("saved")).mkdir(exist_ok=True)

        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        save = torch.save

        def half(contents, file, **how):
            if not isinstance(contents, dict):  # a tensor of an object that goes to another rank
                return save(contents, file, **how)
            file.write(bytes(1 << 16))
            file.flush()
            kill()

        held = world.load(folder / "run.pt")["step"] if world.attempt else 0
        for step in range(held + 1, 4):
            dies = step == 2 and world.attempt < 2 and world.rank == 0
            if dies and {moment.startswith("before")}:
                Path.replace = kill
            elif dies:
                torch.save = half
            world.save(folder / "run.pt", {{"step": step, "weight": torch.ones(1 << 16)}})
        if world.rank == 0:
            print(world.attempt, *sorted(os.listdir(folder)), flush=True)
        world.barrier()
    """)
    outcome = launcher.run("-n", "2", *PLAIN, "--restarts", "3", script)
    assert outcome.code == 0, outcome.err_text
    assert outcome.err_text.count(" after the start, ended by signal 9 (SIGKILL)") == 2
    assert outcome.out_lines == ["2 run.pt"]


def test_attempts_are_counted_and_the_last_failure_is_the_jobs(launcher: Launcher) -> None:
    """Input is read on where the attempt before has stopped, and success ends the job."""
    fails = launcher.script("""
        import os, sys
        attempt = int(os.environ["PHALANX_ATTEMPT"])
        print(attempt, os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
        sys.exit(5 + attempt)
    """)
    last, once = launcher.run_all(["-n", "1", *QUICK, "--restarts", "2", fails], ["-n", "1", *QUICK, fails])
    assert (last.code, last.out_lines) == (7, ["0 2", "1 2", "2 2"])
    blocks = [line for line in last.err_text.splitlines() if not line.startswith("  it called sys.exit")]
    assert [re.sub("host .*, ", "", line.strip()) for line in blocks] == [
        "phalanx: rank 0 of 1 failed",
        "exit code 5",
        "phalanx: attempt 1 of 3 failed; attempt 2 of 3 starts now",
        "phalanx: rank 0 of 1 failed",
        "exit code 6",
        "phalanx: attempt 2 of 3 failed; attempt 3 of 3 starts now",
        "phalanx: rank 0 of 1 failed",
        "exit code 7",
        "phalanx: attempt 3 of 3 failed, which was the last",
    ]
    assert (once.code, once.out_lines) == (5, ["0 0"])
    assert "attempt" not in once.err_text
    reads = launcher.script("""
        import os, sys
        print(os.environ["PHALANX_ATTEMPT"], os.read(0, 4).decode(), end="", flush=True)
        sys.exit(os.environ["PHALANX_ATTEMPT"] == "0")
    """)
    # In torchrun's spelling.
    outcome = launcher.run("--nproc-per-node", "1", *QUICK, "--max-restarts=9", reads, data=b"one\ntwo\nthree\n")
    assert (outcome.code, outcome.out_lines) == (0, ["0 one", "1 two"]), outcome.err_text
    assert outcome.err_text.count("starts now") == 1
    for target, code in ((launcher.script("a syntax error"), 1), ("nowhere.py", 2)):
        outcome = launcher.run("-n", "2", *QUICK, "--restarts", "3", target)
        assert (outcome.code, outcome.out) == (code, b"")
        assert outcome.err_text.count("SyntaxError") == (code == 1)
        assert "attempt 1 of" not in outcome.err_text  # what fails before any rank runs is not tried again


def test_attempt_has_its_own_port_key_and_store(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, sys
        import torch.distributed as dist
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            print(os.environ["MASTER_PORT"], os.environ["PHALANX_KEY"], os.environ["PHALANX_RUN_ID"],
                  store.check(["left"]), flush=True)
            store.set("left", "here")
        dist.barrier()  # all have come
        attempt = os.environ["PHALANX_ATTEMPT"]
        if attempt != "2" and dist.get_rank() == 1:
            with open("pid-" + attempt, "w") as file:
                file.write(str(os.getpid()))
            os._exit(3)
        dist.barrier()
    """)
    outcome = launcher.run("-n", "2", *PLAIN, "--restarts", "2", script)
    assert outcome.code == 0, outcome.err_text
    facts = known_of(launcher.directory, script, Path(script).read_text(), 2)
    check_told("restarts.gloo.launcher", block_of(outcome.err_text), {**facts, "host": machine_name()})
    ports, keys, names, kept = zip(*(line.split() for line in outcome.out_lines), strict=True)
    assert (len(set(ports)), len(set(keys)), len(set(names))) == (3, 3, 1)
    assert kept == ("False",) * 3


def test_attempt_leaves_no_process_and_no_descriptor_to_the_next(launcher: Launcher) -> None:
    """Also if a rank of it is stopped."""
    script = launcher.script("""
        import os, signal, subprocess, sys, time
        def links(pid):
            return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        def name(entry):
            try:
                return os.readlink(entry)
            except FileNotFoundError:  # it has been closed meanwhile
                return ""
        attempt = int(os.environ["PHALANX_ATTEMPT"])
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP) if attempt == 1 else time.sleep(600 if attempt < 4 else 0)
            sys.exit()
        # Each leaves the rank's session, and closes what it has inherited.
        known = open("left").read().split() if attempt else []
        alive = [pid for pid in known if os.path.exists("/proc/" + pid)]
        left = subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL)
        with open("left", "a") as file:
            print(left.pid, file=file)
        zygote = os.getppid()
        # It closes its copies of the ranks' ends when it has forked the last one.
        while any("-rank-" in name(entry) for entry in links(zygote)):
            time.sleep(0.01)
        supervisor = int(open(f"/proc/{zygote}/stat").read().rpartition(")")[2].split()[1])
        print(len(alive), *(len(links(pid)) for pid in (os.getpid(), zygote, supervisor)), flush=True)
        sys.exit(attempt < 4)
    """)
    outcome = launcher.run("-n", "2", *QUICK, "--restarts", "4", script)
    assert outcome.code == 0, outcome.err_text
    counts = [tuple(map(int, line.split())) for line in outcome.out_lines]
    assert len(counts) == 5
    alive, *descriptors = zip(*counts, strict=True)
    assert set(alive) == {0}
    # The zygote opens a pipe of two ends when it has forked the ranks; a leak would show in each of the attempts.
    for of_one in descriptors:
        assert max(of_one) - min(of_one) <= 2, counts


def test_signal_ends_the_job_and_no_attempt_follows(launcher: Launcher) -> None:
    waits = launcher.script("""
        import os, sys, time
        print(os.environ["PHALANX_ATTEMPT"], flush=True)
        if os.environ["PHALANX_ATTEMPT"] == "0":
            sys.exit(1)
        time.sleep(300)
    """)
    job = launcher.start("-n", "1", *QUICK, "--restarts", "5", waits)
    assert job.read_lines(2) == ["0", "1"]
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish()
    assert (outcome.code, outcome.out) == (130, b"")
    assert outcome.err_text.count("starts now") == 1
    assert "SIGINT: the rank has been ended" in outcome.err_text
    # Nobody reads standard error, so the launcher waits in the middle of the block about the first attempt.
    floods = launcher.script("""
        import os, time
        print(os.environ["PHALANX_ATTEMPT"], os.getpid(), flush=True)
        raise ValueError("x" * 300_000)
    """)
    job = launcher.start("-n", "1", *QUICK, "--restarts", "5", floods)
    attempt, pid = job.read_lines(1)[0].split()
    assert attempt == "0"
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    job.process.send_signal(signal.SIGTERM)
    outcome = job.finish()
    assert (outcome.code, outcome.out) == (143, b"")


def test_each_attempt_has_its_own_files(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, sys, time
        attempt = os.environ["PHALANX_ATTEMPT"]
        print("this is", attempt)
        open(f"printed-{attempt}-{os.environ['RANK']}", "w").close()
        while not all(os.path.exists(f"printed-{attempt}-{rank}") for rank in range(2)):
            time.sleep(0.01)  # the launcher ends the other when the first has failed
        sys.exit(attempt == "0" and "some reason")
    """)
    outcome = launcher.run("-n", "2", "--no-preload", "--restarts", "1", "--log-dir", "logs", script)
    assert outcome.code == 0, outcome.err_text
    assert "output goes to logs/attempt-0/rank-0.log to rank-1.log" in outcome.err_text
    assert "its output is in logs/attempt-0/rank-" in outcome.err_text
    logs = launcher.directory / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["attempt-0", "attempt-1", "failure.txt"]
    for attempt in (0, 1):
        for rank in (0, 1):
            written = (logs / f"attempt-{attempt}" / f"rank-{rank}.log").read_text()
            assert f"stdout this is {attempt}\n" in written
            assert f"this is {1 - attempt}" not in written


def test_restart_of_many_programs_needs_no_more_descriptors_than_a_start(tmp_path: Path) -> None:
    """With as many as a job of so many ranks is let start with: more ranks than one message has descriptors for."""
    ranks = 3 * FILES_BESIDE  # so that a file more for each rank is more than there is room for
    files = ranks * (FILES_PER_RANK + 1) + FILES_BESIDE

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    program = 'echo $RANK; test "$PHALANX_ATTEMPT" != 0 || exit 3'
    options = ["-n", str(ranks), *PLAIN, "--restarts", "1", "--tee", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", *options, "sh", "-c", program],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "attempt 2 of 2 starts now" in done.stderr
    assert sorted(map(int, done.stdout.splitlines()[-ranks:])) == list(range(ranks))
