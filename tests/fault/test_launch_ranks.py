"""The environment and the interpreter that a rank's script finds when it starts to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.launch_support import Launcher, Outcome, launcher

__all__ = ["launcher"]


def payload(line: str) -> object:
    return json.loads(line.partition("] ")[2])


def test_everything_torchrun_sets_is_set(launcher: Launcher) -> None:
    script = launcher.script("import json, os; print(json.dumps(dict(os.environ)))\n")
    base = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    reference = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", script],
        env=base, capture_output=True, check=True, timeout=600,
    )  # fmt: skip
    theirs = json.loads(reference.stdout.splitlines()[-1])
    outcome = launcher.run("-n", "2", "-q", "--no-preload", script, environment={"OMP_NUM_THREADS": "3"})
    ours = [payload(line) for line in sorted(outcome.out_lines)]
    for rank, environment in enumerate(ours):
        assert isinstance(environment, dict)
        assert set(theirs) - set(base) - set(environment) == set()
        assert environment["RANK"] == environment["LOCAL_RANK"] == environment["ROLE_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["PHALANX_RUN_ID"] == environment["TORCHELASTIC_RUN_ID"]
        assert environment["PHALANX_TABLE_SHOWN"] == "1"
        assert environment["OMP_NUM_THREADS"] == "3"  # the user's own wins


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


def facts(outcome: Outcome) -> list[dict[str, object]]:
    assert outcome.code == 0, outcome.err_text
    found = [payload(line) for line in sorted(outcome.out_lines)]
    return [fact for fact in found if isinstance(fact, dict)]


def test_script_runs_as_under_python(launcher: Launcher) -> None:
    script = launcher.script(FACTS)
    ranks = facts(launcher.run("-q", "-n", "3", script, "--lr", "0.1", "--help"))
    assert len(ranks) == 3
    for fact in ranks:
        # Standard streams, the report, the trace, and the listing itself; no pipe of another rank.
        descriptors = fact.pop("descriptors")
        assert isinstance(descriptors, list)
        assert len(descriptors) == 6
        yes = dict.fromkeys(("main", "pickles", "sigint", "sigterm", "group", "buffered"), True)
        assert fact == yes | {
            "name": "__main__", "file": script, "package": None, "spec": None, "path0": str(launcher.directory),
            "argv": [script, "--lr", "0.1", "--help"], "orig_argv": [sys.executable, script, "--lr", "0.1", "--help"],
            "blocked": [], "wakeup": -1, "threads": 1,
        }  # fmt: skip


def test_modules_and_folders_run_as_under_python(launcher: Launcher, tmp_path: Path) -> None:
    """Also of a namespace package, and of a project whose sources only a finder of ``pip install -e`` knows."""
    launcher.script("print_nothing = 1\n", "pack/__init__.py")
    quick = FACTS.replace("import torch\n", "")
    path = launcher.script("from . import print_nothing\n" + quick, "pack/train.py")
    main = launcher.script(quick, "ns/inner/__main__.py")
    launcher.script(quick, "elsewhere/src/project/train.py")
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
    launcher.script("raise ValueError('in the parent')\n", "broken/__init__.py")
    launcher.script("", "broken/train.py")
    targets = [
        "-m pack.train -x",
        "ns/inner",
        "-m ns.inner",
        "-m project.train",
        "-m ns.inner.missing",
        "-m broken.train",
    ]
    pack, folder, package, project, missing, broken = launcher.run_all(
        *(["-q", "--no-preload", *target.split()] for target in targets),
        environment={"PYTHONPATH": str(tmp_path / "site")},
    )
    (fact,) = facts(pack)
    assert (fact["name"], fact["file"], fact["package"], fact["spec"]) == ("__main__", path, "pack", "pack.train")
    assert fact["argv"] == [path, "-x"]
    assert fact["orig_argv"] == [sys.executable, "-m", "pack.train", "-x"]
    assert fact["path0"] == str(launcher.directory)
    (fact,) = facts(folder)
    assert (fact["file"], fact["path0"], fact["package"]) == (main, str(Path(main).parent), "")
    (fact,) = facts(package)
    assert (fact["file"], fact["package"], fact["spec"]) == (main, "ns.inner", "ns.inner.__main__")
    assert facts(project)[0]["package"] == "project"
    assert (missing.code, missing.err_text.count("\n")) == (2, 1)
    assert broken.err_text.count("ValueError: in the parent") == 2
    assert "importlib" not in broken.err_text


def test_gloo_meets_and_rank_0_may_leave_first(launcher: Launcher) -> None:
    """So does a program that is not Python, which finds its place in its environment."""
    script = launcher.script("""
        import os, torch, torch.distributed as dist
        dist.init_process_group('gloo')
        x = torch.ones(3) * (dist.get_rank() + 1)
        dist.all_reduce(x)
        print(int(x[0]), flush=True)
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0 and os.environ['TORCHELASTIC_USE_AGENT_STORE'] == 'True': os._exit(0)
        store.set('after', 'x'); assert store.get('after') == b'x'
        dist.barrier() if os.environ['TORCHELASTIC_USE_AGENT_STORE'] == 'False' else None
    """)
    shell = f"echo $RANK/$WORLD_SIZE; exec {sys.executable} {script}"
    ranks, programs = launcher.run_all(["-n", "3", "-q", script], ["-n", "3", "-q", "sh", "-c", shell])
    for outcome in (ranks, programs):
        assert outcome.code == 0, outcome.err_text
    assert sorted(ranks.out_lines) == [f"[rank {rank}] 6" for rank in range(3)]
    assert sorted(programs.out_lines) == sorted(
        [f"[rank {rank}] {text}" for rank in range(3) for text in ("6", f"{rank}/3")]
    )


def test_worker_processes_return_objects_of_the_scripts_classes(launcher: Launcher) -> None:
    """However they are started, from a script and from a module: they know the script under a name of their own."""
    text = """
        import dataclasses, inspect, multiprocessing, sys, torch, typing
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
            for method in sys.argv[1:]:
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
    methods = dict.fromkeys(("fork", "forkserver", "spawn"), "[0, 1, 2, 3, 4, 3]")
    by_path, by_module = launcher.run_all(["-q", script, *methods], ["-q", "-m", "script", "spawn"])
    assert by_path.out_lines == [f"[rank 0] {method} {found}" for method, found in methods.items()], by_path.err_text
    assert by_module.out_lines == [f"[rank 0] spawn {methods['spawn']}"], by_module.err_text


def test_dry_run_describes_and_starts_nothing(launcher: Launcher) -> None:
    made = launcher.directory / "made"
    script = launcher.script(f"open({str(made)!r}, 'w')")
    described, shown = launcher.run_all(
        ["-n", "2", "--dry-run", "--json", script],
        ["-n", "2", "--dry-run", script],
    )
    told = json.loads(described.out)
    assert told["world_size"] == 2
    assert [row["rank"] for row in told["ranks"]] == [0, 1]
    assert told["target"]["path"] == script
    assert len(shown.out_lines) == 4
    assert not made.exists()
