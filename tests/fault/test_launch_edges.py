"""The launcher at its edges: checkpoints at the end, terminals, full disks, stopped helpers."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher, wait_for
from tests.support.waiting import stop

from phalanx.system import processes

__all__ = ["launcher"]


def read_until(source: int, wanted: bytes) -> bytes:
    """Read a terminal until some text has come."""
    seen = b""
    while wanted not in seen:
        try:
            seen += os.read(source, 4096)
        except OSError as error:  # nobody has the terminal any more
            raise AssertionError(f"no {wanted!r} in {seen!r}") from error
    return seen


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_checkpoint_that_takes_long_is_finished_after_sigterm(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script(f"""
        import os, signal, sys, time
        def save(*_):
            with open(os.path.join({str(tmp_path)!r}, 'saved-' + os.environ['RANK']), 'w') as file:
                file.write('first half, ')
                file.flush()
                time.sleep(3)
                file.write('second half')
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print('up', flush=True)
        while True:
            time.sleep(300)
    """)
    job = launcher.start("-n", "2", "-q", script)
    job.read_lines(2)
    job.process.send_signal(signal.SIGTERM)
    wait_for(lambda: len(list(tmp_path.glob("saved-*"))) == 2)
    # A batch system may ask twice; only a second Ctrl-C means at once.
    job.process.send_signal(signal.SIGTERM)
    outcome = job.finish()
    assert outcome.code == 143
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["first half, second half"] * 2
    assert outcome.err_text == "phalanx: SIGTERM: all 2 ranks have been ended\n"


@pytest.mark.parametrize("signum", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=pytest.mark.long)])
def test_user_signals_are_passed_on_to_the_ranks_and_to_no_worker(launcher: Launcher, signum: int) -> None:
    script = launcher.script(f"""
        import os, signal, subprocess, time
        got = []
        signal.signal({int(signum)}, lambda *_: got.append(1))
        helper = subprocess.Popen(['sleep', '300'])
        print('up', flush=True)
        while not got:
            time.sleep(0.01)
        print('got it; helper runs:', helper.poll() is None)
    """)
    job = launcher.start("-n", "2", "-q", script)
    job.read_lines(2)
    job.process.send_signal(signum)
    outcome = job.finish()
    assert outcome.code == 0, outcome.err_text
    assert sorted(outcome.out_lines) == [f"[rank {rank}] got it; helper runs: True" for rank in (0, 1)]


def test_a_user_signal_that_no_script_handles_is_explained(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "-q", "sh", "-c", "echo up; exec sleep 300")
    job.read_lines(2)
    job.process.send_signal(signal.SIGUSR1)
    outcome = job.finish()
    assert outcome.code == 128 + signal.SIGUSR1
    assert "which the launcher passes on" in outcome.err_text


def test_a_full_disk_is_said_and_has_an_exit_code_of_its_own(launcher: Launcher) -> None:
    with open("/dev/full", "wb") as full:
        job = launcher.start("-n", "2", "-q", "yes", stdout=full)
        outcome = job.finish()
    assert outcome.code == 74
    assert outcome.err_text == (
        "phalanx: standard output cannot be written: No space left on device; the job was ended\n"
    )
    with open("/dev/full", "wb") as full:
        job = launcher.start("-n", "2", "--dry-run", "true", stdout=full)
        outcome = job.finish()
    assert (outcome.code, outcome.err_text) == (74, "phalanx: the output cannot be written: No space left on device\n")


def test_the_text_of_sys_exit_is_in_the_block(launcher: Launcher) -> None:
    script = launcher.script("import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no data'); time.sleep(300)")
    outcome = launcher.run("-n", "2", "-q", script)
    assert outcome.code == 1
    assert "phalanx: rank 1 of 2 failed: no data\n" in outcome.err_text


def test_a_keyboard_interrupt_in_a_rank_gives_130(launcher: Launcher) -> None:
    script = launcher.script("import os, time; os.environ['RANK'] == '1' or time.sleep(300); raise KeyboardInterrupt")
    assert launcher.run("-n", "2", "-q", script).code == 130


def test_a_stopped_zygote_obeys_signals(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "-q", "sh", "-c", "echo up; exec sleep 300")
    job.read_lines(2)
    zygote = job.named("phalanx-zygote")
    os.kill(zygote, signal.SIGSTOP)
    wait_for(lambda: state(zygote) == "T")
    job.process.send_signal(signal.SIGINT)
    assert job.finish().code == 130


def test_a_stopped_zygote_ends_with_a_killed_launcher(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "-q", "sh", "-c", "setsid sleep 300 & echo up; exec sleep 300")
    job.read_lines(2)
    zygote = job.named("phalanx-zygote")
    os.kill(zygote, signal.SIGSTOP)
    wait_for(lambda: state(zygote) == "T")
    job.process.kill()
    job.process.wait()
    job.wait_until_gone(30.0)


JOINS = {
    "alone": ("import torch\nprint(torch.ones(2).sum())", True),
    "without torch": ("print('x')", False),
    "torch": (
        "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\nd.destroy_process_group()",
        False,
    ),
    "phalanx": ("import phalanx\nphalanx.init()\nphalanx.close()", False),
    "phalanx's RPC": ("from phalanx import rpc\nrpc.init()\nassert len(rpc.workers()) == 2\nrpc.shutdown()", False),
    "torch's RPC": (
        "import os, torch.distributed.rpc as rpc\nrank = int(os.environ['RANK'])\n"
        "rpc.init_rpc(str(rank), rank=rank, world_size=2)\nrpc.shutdown()",
        False,
    ),
    "a store": (
        "import os, torch.distributed as d\nrank = int(os.environ['RANK'])\n"
        "d.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), 2, False).set(f'{rank}', '')",
        False,
    ),
}


@pytest.mark.parametrize("kind", JOINS)
def test_ranks_that_never_joined_are_noticed(launcher: Launcher, kind: str) -> None:
    text, noted = JOINS[kind]
    script = launcher.script(text)
    outcome = launcher.run("-n", "2", script)
    assert outcome.code == 0, outcome.err_text
    assert ("none of the 2 ranks joined" in outcome.err_text) is noted
    assert ("--pass-local-rank" in outcome.err_text) is noted
    if noted:
        assert "ranks joined" not in launcher.run("-n", "1", script).err_text
        assert "none of the 2 ranks joined" in launcher.run("-n", "2", sys.executable, "-u", script).err_text
        assert launcher.run("-n", "2", "-q", script).err_text == ""


VARIABLES = """
import os, sys
os.environ.update(OMP_NUM_THREADS='2', TORCH_DISTRIBUTED_DEBUG='DETAIL', OMP_PROC_BIND='true')
before = 'torch' in sys.modules
import torch.nn as nn
import torch, torch.distributed as dist
print(before, torch.get_num_threads(), dist.get_debug_level().name, nn is torch.nn, torch.__spec__.name)
"""


@pytest.mark.parametrize("option", ["--quiet", "--no-preload"])
def test_variables_that_a_script_sets_before_it_imports_torch(launcher: Launcher, option: str) -> None:
    outcome = launcher.run("-n", "2", option, launcher.script(VARIABLES), environment={"OMP_NUM_THREADS": "1"})
    assert outcome.code == 0, outcome.err_text
    assert sorted(outcome.out_lines) == [f"[rank {rank}] False 2 DETAIL True torch" for rank in (0, 1)]
    assert "OMP_PROC_BIND" not in outcome.err_text


def test_what_comes_too_late_for_torch_is_said_once(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "2", launcher.script(VARIABLES))
    (line,) = [line for line in outcome.err_text.splitlines() if "OMP_PROC_BIND" in line]
    assert line.startswith("[rank 0] phalanx: note: the script sets OMP_PROC_BIND before it imports torch")
    assert "--no-preload" in line


@pytest.mark.parametrize("call", ["dist.init_process_group('nccl')", "phalanx.init(backend='nccl')"])
def test_a_backend_that_does_not_fit_names_one_that_does(launcher: Launcher, call: str) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    outcome = launcher.run("-n", "2", "-q", launcher.script(f"import torch.distributed as dist, phalanx\n{call}\n"))
    block = outcome.err_text.partition("of 2 failed")[2]
    assert outcome.code == 1
    assert "the backend nccl serves cuda devices, and this process sees no accelerator; phalanx fits the CPU" in block


def test_a_module_of_a_namespace_package(launcher: Launcher) -> None:
    launcher.script("import sys; print(__name__, __package__, __spec__.name, sys.argv[1:])", "ns/inner/train.py")
    launcher.script("print('main of', __package__)", "ns/inner/__main__.py")
    outcome = launcher.run("-q", "-m", "ns.inner.train", "-x")
    assert outcome.out_lines == ["[rank 0] __main__ ns.inner ns.inner.train ['-x']"], outcome.err_text
    assert launcher.run("-q", "-m", "ns.inner").out_lines == ["[rank 0] main of ns.inner"]
    missing = launcher.run("-q", "-m", "ns.inner.missing")
    assert (missing.code, missing.err_text.count("\n")) == (2, 1)


def test_a_module_that_only_a_finder_on_the_meta_path_finds(launcher: Launcher, tmp_path: Path) -> None:
    """As ``pip install -e`` may install a project: the path of its sources is known to its finder alone."""
    launcher.script("print('the train of', __package__)", "elsewhere/src/project/train.py")
    launcher.script("", "elsewhere/src/project/__init__.py")
    launcher.script(
        f"""
        import sys
        from importlib.machinery import PathFinder
        class Editable:
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                if name == 'project':
                    return PathFinder.find_spec(name, [{str(tmp_path / "elsewhere/src")!r}])
        sys.meta_path.append(Editable)
        """,
        "site/sitecustomize.py",
    )
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    outcome = launcher.run("-q", "-m", "project.train", environment=environment)
    assert outcome.out_lines == ["[rank 0] the train of project"], outcome.err_text


ASKS = """
import os, sys
if os.environ['RANK'] == os.environ['ASKS']:
    print('terminal', sys.stdin.isatty(), sys.stdout.isatty(), flush=True)
    print('answer', input('what? '), flush=True)
else:
    print('other', sys.stdin.read() == '', flush=True)
"""


@pytest.mark.parametrize("options", [["-n", "1"], ["-n", "3", "--debug", "2"]])
def test_a_rank_has_the_terminal(launcher: Launcher, options: list[str]) -> None:
    master, slave = pty.openpty()
    job = launcher.start(
        *options, "-q", launcher.script(ASKS), stdin=slave, stdout=slave, stderr=slave,
        environment={"ASKS": options[-1] if "--debug" in options else "0", "TERM": "xterm"},
    )  # fmt: skip
    os.close(slave)
    seen = read_until(master, b"what? ")
    assert b"terminal True True" in seen
    os.write(master, b"forty-two\n")
    read_until(master, b"answer forty-two")
    assert job.process.wait(60) == 0
    os.close(master)


def test_stdin_goes_to_the_rank_that_is_named(launcher: Launcher) -> None:
    job = launcher.start(
        "-n", "3", "-q", "--stdin", "1", "sh", "-c", "read line; echo $RANK $line", stdin=subprocess.PIPE
    )
    out, _ = job.process.communicate(b"hello\n", timeout=60)
    assert sorted(line.strip() for line in out.splitlines()) == [b"[rank 0] 0", b"[rank 1] 1 hello", b"[rank 2] 2"]
    outcome = launcher.run("-n", "2", "--stdin", "2", "true")
    assert (outcome.code, "--stdin 2" in outcome.err_text) == (2, True)


@pytest.mark.parametrize(("statement", "option"), [("breakpoint()", "--debug 1"), ("input()", "--stdin 1")])
def test_a_rank_that_wants_a_terminal_it_does_not_have_says_how_to_get_it(
    launcher: Launcher, statement: str, option: str
) -> None:
    script = launcher.script(f"import os, time\nif os.environ['RANK'] == '1':\n    {statement}\ntime.sleep(300)\n")
    outcome = launcher.run("-n", "2", "-q", script)
    assert f"phalanx run {option} " in outcome.err_text


def test_a_second_ctrl_c_does_not_wait_for_a_debugged_rank(launcher: Launcher) -> None:
    master, slave = pty.openpty()
    script = launcher.script("import time\nwhile True:\n    try: input('in ')\n    except KeyboardInterrupt: pass\n")
    job = launcher.start("-n", "1", "-q", "--grace", "250", script, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    read_until(master, b"in ")
    job.process.send_signal(signal.SIGINT)
    read_until(master, b"in ")
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(60) == 130
    os.close(master)


def test_ranks_that_run_get_the_interrupt_though_the_launcher_has_not_heard_that_they_do(launcher: Launcher) -> None:
    place = launcher.directory
    script = launcher.script(f"""
        import os, sys, time
        rank = os.environ["RANK"]
        try:
            open({str(place)!r} + f"/runs-{{rank}}", "w").close()
            time.sleep(300)
        except KeyboardInterrupt:
            open({str(place)!r} + f"/saved-{{rank}}", "w").close()
    """)
    job = launcher.start("-n", "2", "-q", "--grace", "250", script)

    def imports_torch() -> bool:
        with contextlib.suppress(OSError):
            return any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in processes.children_of(job.pid))
        return False

    wait_for(imports_torch)  # so the launcher has told it to start
    stop(job.pid)  # before it can read that the ranks have been started
    wait_for(lambda: len(list(place.glob("runs-*"))) == 2)
    job.process.send_signal(signal.SIGINT)
    os.kill(job.pid, signal.SIGCONT)
    assert job.finish().code == 130
    assert {path.name for path in place.glob("saved-*")} == {"saved-0", "saved-1"}


def test_a_working_directory_that_was_deleted_is_said(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("print('x')")
    gone = tmp_path / "gone"
    shell = f"mkdir {gone} && cd {gone} && rmdir {gone} && exec {sys.executable} -m phalanx run -q "
    for target in (script, "-m json.tool", "script.py"):
        done = subprocess.run(["sh", "-c", shell + target], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == "phalanx: the working directory has been deleted; change to one that exists\n"


@pytest.mark.parametrize(
    "module", ["phalanx.commands.main", "click", "phalanx.launch.supervisor", "phalanx.commands.run"]
)
def test_an_interrupt_while_the_launcher_is_loaded_is_answered_without_a_traceback(
    launcher: Launcher, module: str
) -> None:
    launcher.script(
        f"""
        import os, signal, sys
        class Interrupts:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupts)
        """,
        "sitecustomize.py",
    )
    outcome = launcher.run("-n", "2", "true", environment={"PYTHONPATH": str(launcher.directory)})
    assert outcome.code in (130, -signal.SIGINT)
    assert outcome.err_text.strip() == ""


def test_loopback_that_is_down_is_said_before_any_rank_waits(launcher: Launcher) -> None:
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not make a network namespace")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "phalanx", "run", "-n", "2", "true"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "could not reach each other at 127.0.0.1" in done.stderr
