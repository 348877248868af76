"""The environment and the interpreter that a rank's script finds when it starts to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher

__all__ = ["launcher"]

SHOW_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))\n"


def payload(line: str) -> object:
    return json.loads(line.partition("] ")[2])


def test_everything_torchrun_sets_is_set(launcher: Launcher) -> None:
    script = launcher.script(SHOW_ENVIRONMENT)
    base = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    reference = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", script],
        env=base, capture_output=True, check=True, timeout=600,
    )  # fmt: skip
    theirs = json.loads(reference.stdout.splitlines()[-1])
    outcome = launcher.run("-n", "2", "-q", script)
    ours = [payload(line) for line in sorted(outcome.out_lines)]
    for rank, environment in enumerate(ours):
        assert isinstance(environment, dict)
        assert set(theirs) - set(base) - set(environment) == set()
        assert environment["RANK"] == environment["LOCAL_RANK"] == environment["ROLE_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["PHALANX_RUN_ID"] == environment["TORCHELASTIC_RUN_ID"]
        assert environment["PHALANX_TABLE_SHOWN"] == "1"


def test_the_users_own_number_of_threads_wins(launcher: Launcher) -> None:
    script = launcher.script("import os; print(os.environ['OMP_NUM_THREADS'])")
    outcome = launcher.run("-n", "2", "-q", script, environment={"OMP_NUM_THREADS": "3"})
    assert sorted(outcome.out_lines) == ["[rank 0] 3", "[rank 1] 3"]


FACTS = """
import json, os, pickle, signal, sys, threading
import torch
def function(): pass
print(json.dumps({
    "name": __name__, "file": __file__, "package": __package__, "spec": __spec__ and __spec__.name,
    "argv": sys.argv, "path0": sys.path[0], "main": sys.modules["__main__"].__dict__ is globals(),
    "pickles": pickle.loads(pickle.dumps(function)) is function,
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "wakeup": signal.set_wakeup_fd(-1),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "threads": len(os.listdir("/proc/self/task")), "orig_argv": sys.orig_argv,
    "group": os.getpgrp() == os.getsid(0) == os.getpid(),
    "buffered": sys.stdout.line_buffering,
}))
"""


def facts(launcher: Launcher, *arguments: str) -> list[dict[str, object]]:
    outcome = launcher.run("-q", *arguments)
    assert outcome.code == 0, outcome.err_text
    found = [payload(line) for line in sorted(outcome.out_lines)]
    return [fact for fact in found if isinstance(fact, dict)]


def test_a_script_runs_as_under_python(launcher: Launcher) -> None:
    script = launcher.script(FACTS)
    ranks = facts(launcher, "-n", "3", script, "--lr", "0.1", "--help")
    for fact in ranks:
        assert (fact["name"], fact["file"], fact["package"], fact["spec"]) == ("__main__", script, None, None)
        assert fact["argv"] == [script, "--lr", "0.1", "--help"]
        assert fact["path0"] == str(launcher.directory)
        assert fact["main"]
        assert fact["pickles"]
        assert fact["sigint"]
        assert fact["sigterm"]
        assert (fact["blocked"], fact["wakeup"]) == ([], -1)
        # Standard streams, the report, the trace, and the listing itself; no pipe of another rank.
        assert isinstance(fact["descriptors"], list)
        assert len(fact["descriptors"]) == 6
        assert fact["threads"] == 1
        assert fact["group"]
        assert fact["buffered"]
        assert fact["orig_argv"] == [sys.executable, script, "--lr", "0.1", "--help"]


def test_a_module_runs_as_under_python(launcher: Launcher) -> None:
    launcher.script("print_nothing = 1\n", "pack/__init__.py")
    path = launcher.script("from . import print_nothing\n" + FACTS, "pack/train.py")
    (fact,) = facts(launcher, "-m", "pack.train", "-x")
    assert (fact["name"], fact["file"], fact["package"], fact["spec"]) == ("__main__", path, "pack", "pack.train")
    assert fact["argv"] == [path, "-x"]
    assert fact["orig_argv"] == [sys.executable, "-m", "pack.train", "-x"]
    assert fact["path0"] == str(launcher.directory)
    launcher.script("raise ValueError('in the parent')\n", "broken/__init__.py")
    launcher.script("", "broken/train.py")
    outcome = launcher.run("-q", "-m", "broken.train")
    assert outcome.err_text.count("ValueError: in the parent") == 2
    assert "importlib" not in outcome.err_text


def test_a_directory_runs_as_under_python(launcher: Launcher) -> None:
    path = launcher.script(FACTS, "app/__main__.py")
    (fact,) = facts(launcher, str(launcher.directory / "app"))
    assert (fact["file"], fact["path0"], fact["package"]) == (path, str(Path(path).parent), "")


@pytest.mark.parametrize("world", [1, 2, 5])
def test_gloo_meets_and_rank_0_may_leave_first(launcher: Launcher, world: int) -> None:
    script = launcher.script("""
        import os, torch, torch.distributed as dist
        dist.init_process_group('gloo')
        x = torch.ones(3) * (dist.get_rank() + 1)
        dist.all_reduce(x)
        print(int(x[0]))
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0: os._exit(0)
        dist.TCPStore
        store.set('after', 'x'); assert store.get('after') == b'x'
    """)
    outcome = launcher.run("-n", str(world), "-q", script)
    assert outcome.code == 0, outcome.err_text
    total = world * (world + 1) // 2
    assert sorted(outcome.out_lines) == [f"[rank {rank}] {total}" for rank in range(world)]


def test_worker_processes_return_objects_of_the_scripts_classes(launcher: Launcher) -> None:
    """However they are started, from a script and from a module: they know the script under a name of their own."""
    text = """
        import dataclasses, inspect, multiprocessing, torch, typing
        from concurrent.futures import ProcessPoolExecutor
        from torch.utils.data import DataLoader
        @dataclasses.dataclass
        class Item:
            number: int
        class Items(torch.utils.data.Dataset):
            def __len__(self): return 3
            def __getitem__(self, i): return Item(i)
        def put(queue): queue.put(Item(3))
        def first(items): return items[0]
        if __name__ == '__main__':
            assert typing.get_type_hints(Item) == {'number': int} and 'number: int' in inspect.getsource(Item)
            for method in ('fork', 'spawn', 'forkserver'):
                context = multiprocessing.get_context(method)
                loader = DataLoader(Items(), batch_size=1, num_workers=1, collate_fn=first,
                                    multiprocessing_context=context)
                with ProcessPoolExecutor(1, context) as executor, context.Pool(1) as pool:
                    found = [*loader, *executor.map(Item, [3]), *pool.map(Item, [4])]
                queue = context.SimpleQueue()
                process = context.Process(target=put, args=(queue,))
                process.start()
                found.append(queue.get())
                process.join()
                print(method, [item.number for item in found if type(item) is Item])
    """
    script = launcher.script(text)
    for target in ([script], ["-m", "script"]):
        outcome = launcher.run("-n", "2", "-q", *target)
        assert outcome.code == 0, outcome.err_text
        methods = ("fork", "spawn", "forkserver")
        expected = [f"[rank {rank}] {method} [0, 1, 2, 3, 4, 3]" for rank in (0, 1) for method in methods]
        assert sorted(outcome.out_lines) == sorted(expected)


def test_a_program_finds_its_place_too(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "3", "-q", "sh", "-c", "echo $RANK/$WORLD_SIZE $TORCHELASTIC_USE_AGENT_STORE")
    assert sorted(outcome.out_lines) == [f"[rank {rank}] {rank}/3 False" for rank in range(3)]
    outcome = launcher.run("-q", "sh", "-c", "yes | head -n 1")
    assert outcome.out == b"[rank 0] y\n"
    assert outcome.err == b""


def test_a_program_can_meet_through_the_port_it_was_given(launcher: Launcher) -> None:
    script = launcher.script("""
        import torch.distributed as dist
        dist.init_process_group('gloo')
        dist.barrier()
        print('met')
    """)
    outcome = launcher.run("-n", "2", "-q", "sh", "-c", f"exec {sys.executable} {script}")
    assert outcome.code == 0, outcome.err_text
    assert sorted(outcome.out_lines) == ["[rank 0] met", "[rank 1] met"]


def test_dry_run_describes_and_starts_nothing(launcher: Launcher) -> None:
    made = launcher.directory / "made"
    script = launcher.script(f"open({str(made)!r}, 'w')")
    outcome = launcher.run("-n", "2", "--dry-run", "--json", script)
    described = json.loads(outcome.out)
    assert described["world_size"] == 2
    assert [row["rank"] for row in described["ranks"]] == [0, 1]
    assert described["target"]["path"] == script
    text = launcher.run("-n", "2", "--dry-run", script).out.decode()
    assert len(text.splitlines()) == 4
    assert not made.exists()


LEAVES_CLOSED = """
import atexit, os, weakref
import torch, phalanx
class Thing:
    pass
thing = Thing()
weakref.finalize(thing, print, "own finaliser")
library = torch.library.Library("phalanx_test", "DEF")
weakref.finalize(library, print, "library finaliser")
atexit.register(lambda: print(len(os.listdir("/proc/self/task")), "thread"))
unfinished = open(os.environ["LEFT"] + os.environ["RANK"], "w")
unfinished.write("written at the end")
world = phalanx.init()
world.all_reduce(torch.ones(3))
inner = world.subgroup(range(world.size))
inner.barrier()
phalanx.close()
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_closed_world_leaves_no_thread_and_the_script_still_ends_as_always(
    launcher: Launcher, tmp_path: Path, ranks: int
) -> None:
    """Modules that were imported before the fork are then left to the kernel; the script's own are emptied."""
    script = launcher.script(LEAVES_CLOSED)
    left = tmp_path / "left-"
    outcome = launcher.run("-q", "--no-prefix", "-n", str(ranks), script, environment={"LEFT": str(left)})
    assert outcome.code == 0, outcome.err_text
    assert sorted(outcome.out_lines) == sorted(["own finaliser", "library finaliser", "1 thread"] * ranks)
    assert [Path(f"{left}{rank}").read_text() for rank in range(ranks)] == ["written at the end"] * ranks
