"""``phalanx run --restarts K``: all ranks are started again after a failure, and share nothing with those before."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher, wait_for
from tests.support.faults import known_of
from tests.support.golden import block_of, check_told

from phalanx.system.host import machine_name

__all__ = ["launcher"]

PLAIN = ("-q", "--no-prefix")
# Nothing imports torch that the script does not import.
QUICK = (*PLAIN, "--no-preload")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_are_started_again_after_one_was_killed(launcher: Launcher, ranks: int) -> None:
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
    outcome = launcher.run("-n", str(ranks), *PLAIN, "--restarts", "3", script)
    assert outcome.code == 0, outcome.err_text
    expected = [f"{attempt} {rank} {ranks} {attempt}" for attempt in range(3) for rank in range(ranks)]
    # The lines of one attempt come before those of the next.
    printed = outcome.out_lines
    assert [sorted(printed[at : at + ranks]) for at in range(0, len(printed), ranks)] == [
        expected[at : at + ranks] for at in range(0, len(expected), ranks)
    ]
    said = [line for line in outcome.err_text.splitlines() if line.startswith("phalanx:")]
    failed = f"phalanx: rank {ranks - 1} of {ranks} failed"
    assert said == [
        failed,
        "phalanx: attempt 1 of 4 failed; attempt 2 of 4 starts now",
        failed,
        "phalanx: attempt 2 of 4 failed; attempt 3 of 4 starts now",
    ]
    assert outcome.err_text.count(" after the start, ended by signal 9 (SIGKILL)") == 2


@pytest.mark.parametrize("moment", ["in the middle of the file", "before it takes its place"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nothing_stays_of_a_checkpoint_whose_rank_was_killed_in_it(launcher: Launcher, ranks: int, moment: str) -> None:
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
    outcome = launcher.run("-n", str(ranks), *PLAIN, "--restarts", "3", script)
    assert outcome.code == 0, outcome.err_text
    assert outcome.err_text.count(" after the start, ended by signal 9 (SIGKILL)") == 2
    assert outcome.out_lines == ["2 run.pt"]


def test_the_last_attempts_failure_is_the_jobs(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, sys
        attempt = int(os.environ["PHALANX_ATTEMPT"])
        print(attempt, os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
        sys.exit(5 + attempt)
    """)
    outcome = launcher.run("-n", "1", *QUICK, "--restarts", "2", script)
    assert outcome.code == 7
    assert outcome.out_lines == ["0 2", "1 2", "2 2"]
    blocks = [line for line in outcome.err_text.splitlines() if not line.startswith("  it called sys.exit")]
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


def test_without_the_option_a_job_is_started_once(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, sys
        print(os.environ["PHALANX_ATTEMPT"], os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
        sys.exit(3)
    """)
    outcome = launcher.run("-n", "1", *QUICK, script)
    assert (outcome.code, outcome.out_lines) == (3, ["0 0"])
    assert "attempt" not in outcome.err_text


def test_success_ends_a_job_that_could_be_started_again(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "2", *PLAIN, "--restarts", "9", launcher.script("print('up')"))
    assert (outcome.code, outcome.out_lines, outcome.err_text) == (0, ["up", "up"], "")


def test_torchruns_spelling_means_the_same(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, sys
        sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
    """)
    outcome = launcher.run("--nproc-per-node", "1", *QUICK, "--max-restarts=1", script)
    assert outcome.code == 0, outcome.err_text
    assert "attempt 2 of 2 starts now" in outcome.err_text


def test_an_attempt_has_its_own_port_key_and_store(launcher: Launcher) -> None:
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


def test_nothing_that_an_attempt_has_started_is_left_when_the_next_begins(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, subprocess, sys
        if os.environ["PHALANX_ATTEMPT"] == "0":
            # It leaves the rank's session, and closes what it has inherited.
            left = subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL)
            with open("left", "w") as file:
                file.write(str(left.pid))
            os._exit(1)
        print(os.path.exists("/proc/" + open("left").read()), flush=True)
    """)
    outcome = launcher.run("-n", "1", *QUICK, "--restarts", "1", script)
    assert outcome.code == 0, outcome.err_text
    assert outcome.out_lines == ["False"]


def test_attempts_do_not_pile_up_descriptors(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, sys, time
        def links(pid):
            return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        def name(entry):
            try:
                return os.readlink(entry)
            except FileNotFoundError:  # it has been closed meanwhile
                return ""
        attempt = int(os.environ["PHALANX_ATTEMPT"])
        if os.environ["RANK"] == "0":
            zygote = os.getppid()
            # It closes its copies of the ranks' ends when it has forked the last one.
            while any("-rank-" in name(entry) for entry in links(zygote)):
                time.sleep(0.01)
            supervisor = int(open(f"/proc/{zygote}/stat").read().rpartition(")")[2].split()[1])
            print(*(len(links(pid)) for pid in (os.getpid(), zygote, supervisor)), flush=True)
            sys.exit(attempt < 4)
    """)
    outcome = launcher.run("-n", "2", *QUICK, "--restarts", "4", script)
    assert outcome.code == 0, outcome.err_text
    counts = [tuple(map(int, line.split())) for line in outcome.out_lines]
    assert len(counts) == 5
    # The zygote opens a pipe of two ends when it has forked the ranks; a leak would show in each of the attempts.
    for of_one in zip(*counts, strict=True):
        assert max(of_one) - min(of_one) <= 2, counts


def test_ctrl_c_ends_the_job_and_no_attempt_follows(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, sys, time
        print(os.environ["PHALANX_ATTEMPT"], flush=True)
        if os.environ["PHALANX_ATTEMPT"] == "0":
            sys.exit(1)
        time.sleep(300)
    """)
    job = launcher.start("-n", "1", *QUICK, "--restarts", "5", script)
    assert job.read_lines(2) == ["0", "1"]
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish()
    assert outcome.code == 130
    assert outcome.out == b""
    assert outcome.err_text.count("starts now") == 1
    assert "SIGINT: the rank has been ended" in outcome.err_text


def test_a_signal_while_the_reason_is_printed_ends_the_job(launcher: Launcher) -> None:
    # Nobody reads standard error, so the launcher waits in the middle of the block about the first attempt.
    script = launcher.script("""
        import os, time
        print(os.environ["PHALANX_ATTEMPT"], os.getpid(), flush=True)
        raise ValueError("x" * 300_000)
    """)
    job = launcher.start("-n", "1", *QUICK, "--restarts", "5", script)
    attempt, pid = job.read_lines(1)[0].split()
    assert attempt == "0"
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    wait_for(lambda: "phalanx-zygote" in names_of(job.processes()))
    job.process.send_signal(signal.SIGTERM)
    outcome = job.finish()
    assert outcome.code == 143
    assert outcome.out == b""


def names_of(pids: list[int]) -> list[str]:
    return [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids if Path(f"/proc/{pid}/comm").exists()]


@pytest.mark.parametrize(("text", "code"), [("a syntax error", 1), (None, 2)])
def test_what_fails_before_any_rank_runs_is_not_tried_again(launcher: Launcher, text: str | None, code: int) -> None:
    script = launcher.script(text) if text else "nowhere.py"
    outcome = launcher.run("-n", "2", *QUICK, "--restarts", "3", script)
    assert outcome.code == code
    assert "attempt" not in outcome.err_text


def test_the_end_of_the_zygote_is_the_end_of_the_job(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, time
        print("up", flush=True)
        time.sleep(300)
    """)
    job = launcher.start("-n", "2", *QUICK, "--restarts", "3", script)
    job.read_lines(2)
    os.kill(job.named("phalanx-zygote"), signal.SIGKILL)
    outcome = job.finish()
    assert outcome.code == 137
    assert "the process that starts and watches the ranks was ended by signal 9" in outcome.err_text
    assert "attempt" not in outcome.err_text


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
    assert sorted(path.name for path in logs.iterdir()) == ["attempt-0", "attempt-1"]
    for attempt in (0, 1):
        for rank in (0, 1):
            written = (logs / f"attempt-{attempt}" / f"rank-{rank}.log").read_text()
            assert f"stdout this is {attempt}\n" in written
            assert f"this is {1 - attempt}" not in written


def test_a_program_that_is_not_python_is_started_again(launcher: Launcher) -> None:
    # The launcher ends the other rank when the first has failed, so each waits until both have printed.
    program = (
        "echo $PHALANX_ATTEMPT; touch printed-$PHALANX_ATTEMPT-$RANK; "
        "while [ $(ls | grep -c printed-$PHALANX_ATTEMPT-) -lt 2 ]; do sleep 0.05; done; test $PHALANX_ATTEMPT = 1"
    )
    outcome = launcher.run("-n", "2", *PLAIN, "--restarts", "2", "sh", "-c", program)
    assert outcome.code == 0, outcome.err_text
    assert sorted(outcome.out_lines) == ["0", "0", "1", "1"]


def test_more_ranks_than_one_message_has_descriptors_for(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "90", *PLAIN, "--restarts", "1", "sh", "-c", "echo $RANK; test $PHALANX_ATTEMPT = 1")
    assert outcome.code == 0, outcome.err_text
    assert sorted(map(int, outcome.out_lines[-90:])) == list(range(90))


def test_a_later_attempt_reads_on_where_the_one_before_has_stopped(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, sys
        print(os.environ["PHALANX_ATTEMPT"], os.read(0, 4).decode(), end="", flush=True)
        sys.exit(os.environ["PHALANX_ATTEMPT"] == "0")
    """)
    outcome = launcher.run("-n", "1", *QUICK, "--restarts", "1", script, data=b"one\ntwo\n")
    assert outcome.code == 0, outcome.err_text
    assert outcome.out_lines == ["0 one", "1 two"]


def test_a_stopped_rank_does_not_keep_the_next_attempt_from_starting(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, signal, sys, time
        if os.environ["PHALANX_ATTEMPT"] == "1":
            sys.exit(0)
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(300)
        with open(f"/proc/{os.getppid()}/task/{os.getppid()}/children") as file:
            others = set(map(int, file.read().split())) - {os.getpid()}
        def stopped(pid):
            with open(f"/proc/{pid}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] == "T"
        while not any(map(stopped, others)):
            time.sleep(0.01)
        os._exit(1)
    """)
    outcome = launcher.run("-n", "2", *QUICK, "--restarts", "1", script)
    assert outcome.code == 0, outcome.err_text
    assert "attempt 2 of 2 starts now" in outcome.err_text
