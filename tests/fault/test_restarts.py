"""``phalanx run --restarts K``: all ranks are started again after a failure, and share nothing with those before."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tests.launch_support import Launcher, launcher, wait_for

from phalanx.system.limits import FILES_BESIDE, FILES_PER_RANK

__all__ = ["launcher"]

PLAIN = ("-q", "--no-prefix")
QUICK = (*PLAIN, "--no-preload")  # nothing imports torch that the script does not import

# Rank 2 is killed after the first checkpoint; then rank 0 is in the middle of writing the second, twice: in the middle
# of the file, and before it takes its place.
KILLED = """
    import os, signal, torch, phalanx
    from pathlib import Path
    world = phalanx.init()
    (folder := Path("saved")).mkdir(exist_ok=True)
    total = torch.ones(())
    world.all_reduce(total)
    print(world.attempt, world.rank, int(total), os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    world.barrier()  # all have printed, before the launcher ends them

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
        if (world.attempt, world.rank, step) == (0, 2, 2):
            kill()
        if (world.attempt, world.rank, step) == (1, 0, 2):
            torch.save = half
        if (world.attempt, world.rank, step) == (2, 0, 2):
            Path.replace = kill
        world.save(folder / "run.pt", {"step": step, "weight": torch.ones(1 << 16)})
    if world.rank == 0:
        print(*sorted(os.listdir(folder)), flush=True)
    world.barrier()
"""


def test_ranks_are_started_again_after_one_was_killed(launcher: Launcher) -> None:
    """Nothing stays of a checkpoint whose rank was killed while it saved."""
    outcome = launcher.run("-n", "3", *PLAIN, "--restarts", "3", launcher.script(KILLED))
    assert outcome.code == 0, outcome.err_text
    # The lines of one attempt come before those of the next.
    *printed, left = outcome.out_lines
    assert [sorted(printed[at : at + 3]) for at in range(0, len(printed), 3)] == [
        [f"{attempt} {rank} 3 {attempt}" for rank in range(3)] for attempt in range(4)
    ]
    assert left == "run.pt"
    said = [line for line in outcome.err_text.splitlines() if line.startswith("phalanx:")]
    assert said == [
        "phalanx: rank 2 of 3 failed",
        "phalanx: attempt 1 of 4 failed; attempt 2 of 4 starts now",
        "phalanx: rank 0 of 3 failed",
        "phalanx: attempt 2 of 4 failed; attempt 3 of 4 starts now",
        "phalanx: rank 0 of 3 failed",
        "phalanx: attempt 3 of 4 failed; attempt 4 of 4 starts now",
    ]
    assert outcome.err_text.count(" after the start, ended by signal 9 (SIGKILL)") == 3


def test_attempts_are_counted_and_the_last_failure_is_the_jobs(launcher: Launcher) -> None:
    """Input is read on where the attempt before has stopped; success and signals end the job."""
    begins = "import os, sys, time\nattempt = int(os.environ['PHALANX_ATTEMPT'])\n"
    fails, reads, waits, floods, syntax = (
        launcher.script(begins + text, f"{number}.py")
        for number, text in enumerate(
            (
                "print(attempt, os.environ['TORCHELASTIC_MAX_RESTARTS'], flush=True)\nsys.exit(5 + attempt)",
                "print(attempt, os.read(0, 4).decode(), end='', flush=True)\nsys.exit(attempt == 0)",
                "print(attempt, flush=True)\nsys.exit(1) if attempt == 0 else time.sleep(300)",
                "print(attempt, os.getpid(), flush=True)\nraise ValueError('x' * 300_000)",
                "a syntax error",
            )
        )
    )
    again = ("-n", "1", *QUICK, "--restarts", "5")
    waiting, flooding = launcher.start(*again, waits), launcher.start(*again, floods)
    last, once, wrong, missing = launcher.run_all(
        ["-n", "1", *QUICK, "--restarts", "2", fails], ["-n", "1", *QUICK, fails], [*again, syntax], [*again, "no.py"]
    )
    assert (last.code, last.out_lines) == (7, ["0 2", "1 2", "2 2"])
    assert [line for line in last.err_text.splitlines() if "attempt" in line] == [
        "phalanx: attempt 1 of 3 failed; attempt 2 of 3 starts now",
        "phalanx: attempt 2 of 3 failed; attempt 3 of 3 starts now",
        "phalanx: attempt 3 of 3 failed, which was the last",
    ]
    assert re.findall("exit code (.)", last.err_text) == ["5", "6", "7"]
    assert (once.code, once.out_lines) == (5, ["0 0"])
    assert "attempt" not in once.err_text
    # What fails before any rank runs is not tried again.
    assert (wrong.code, missing.code, wrong.err_text.count("SyntaxError")) == (1, 2, 1)
    assert "attempt 1 of" not in wrong.err_text + missing.err_text
    # In torchrun's spelling.
    outcome = launcher.run("--nproc-per-node", "1", *QUICK, "--max-restarts=9", reads, data=b"one\ntwo\nthree\n")
    assert (outcome.code, outcome.out_lines) == (0, ["0 one", "1 two"]), outcome.err_text
    assert outcome.err_text.count("starts now") == 1
    assert waiting.read_lines(2) == ["0", "1"]
    waiting.process.send_signal(signal.SIGINT)
    outcome = waiting.finish()
    assert (outcome.code, outcome.out) == (130, b"")
    assert outcome.err_text.count("starts now") == 1
    assert "SIGINT: the rank has been ended" in outcome.err_text
    # Nobody reads standard error, so the launcher waits in the middle of the block about the first attempt.
    attempt, pid = flooding.read_lines(1)[0].split()
    assert attempt == "0"
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    flooding.process.send_signal(signal.SIGTERM)
    outcome = flooding.finish()
    assert (outcome.code, outcome.out) == (143, b"")


LEAVES = """
    import os, signal, subprocess, sys, time
    import torch.distributed as dist
    def links(pid):
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    def name(entry):
        try:
            return os.readlink(entry)
        except FileNotFoundError:  # it has been closed meanwhile
            return ""
    attempt = int(os.environ["PHALANX_ATTEMPT"])
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    kept = store.check(["left"])
    dist.barrier()
    if os.environ["RANK"] == "1":
        store.set("left", "here")
        zero = int(store.get("pid"))
        os.kill(os.getpid(), signal.SIGSTOP) if attempt == 1 else time.sleep(600 if attempt < 4 else 0)
        while os.path.exists(f"/proc/{zero}"):
            time.sleep(0.01)
        sys.exit(store.get("pid") != b"%d" % zero)  # rank 0 may leave first: the store is the launcher's
    store.set("pid", str(os.getpid()))
    # Each leaves the rank's session, and closes what it has inherited.
    known = open("left").read().split() if attempt else []
    alive = [pid for pid in known if os.path.exists("/proc/" + pid)]
    left = subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL)
    with open("left", "a") as file:
        print(left.pid, file=file)
    agent = os.getppid()
    # It has forked the last one.
    while sum("-rank-" in name(entry) for entry in links(agent)) < 2:
        time.sleep(0.01)
    supervisor = int(open(f"/proc/{agent}/stat").read().rpartition(")")[2].split()[1])
    print(os.environ["PHALANX_KEY"], os.environ["PHALANX_RUN_ID"], kept,
          len(alive), *(len(links(pid)) for pid in (agent, supervisor)), flush=True)
    sys.exit(attempt < 4)
"""


def test_attempt_leaves_nothing_to_the_next(launcher: Launcher, tmp_path: Path) -> None:
    """Each has its own key and store; no process stays, also of a stopped rank, and no descriptor."""
    outcome = launcher.run("-n", "2", *PLAIN, "--restarts", "4", launcher.script(LEAVES))
    assert outcome.code == 0, outcome.err_text
    keys, names, kept, alive, *descriptors = zip(*(line.split() for line in outcome.out_lines), strict=True)
    assert (len(set(keys)), len(set(names))) == (5, 1)
    assert kept == ("False",) * 5
    assert alive == ("0",) * 5
    # A leak would show in each of the attempts.
    for of_one in descriptors:
        assert max(map(int, of_one)) - min(map(int, of_one)) <= 2, outcome.out_lines
    # A job of many programs is started again with as many descriptors as it is let start with.
    ranks = (
        3 * FILES_BESIDE
    )  # more than one message has descriptors for, so that a file more for each rank is more than there is room for
    files = ranks * (FILES_PER_RANK + 1) + FILES_BESIDE
    program = 'echo $RANK; test "$PHALANX_ATTEMPT" != 0 || exit 3'
    options = ["-n", str(ranks), *PLAIN, "--restarts", "1", "--tee", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", *options, "sh", "-c", program],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "attempt 2 of 2 starts now" in done.stderr
    assert sorted(map(int, done.stdout.splitlines()[-ranks:])) == list(range(ranks))
