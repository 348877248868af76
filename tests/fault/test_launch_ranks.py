"""The environment and the interpreter that a rank's script finds when it starts to run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.launch_support import Launcher, Outcome, launcher

__all__ = ["launcher"]


def payload(line: str) -> object:
    return json.loads(line.partition("] ")[2])


# What torchrun of torch 2.14 sets.
TORCHRUN = """GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS RANK
ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE TORCHELASTIC_ERROR_FILE TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RESTART_COUNT
TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCH_NCCL_ASYNC_ERROR_HANDLING WORLD_SIZE"""
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
    "buffered": sys.stdout.line_buffering, "environment": dict(os.environ),
}))
"""


def facts(outcome: Outcome) -> list[dict[str, object]]:
    assert outcome.code == 0, outcome.err_text
    found = [payload(line) for line in sorted(outcome.out_lines)]
    return [fact for fact in found if isinstance(fact, dict)]


def test_script_runs_as_under_python_with_what_torchrun_sets(launcher: Launcher) -> None:
    script = launcher.script(FACTS)
    environment = {"OMP_NUM_THREADS": "3"}
    ranks = facts(launcher.run("-q", "-n", "3", script, "--lr", "0.1", "--help", environment=environment))
    assert len(ranks) == 3
    for rank, fact in enumerate(ranks):
        # Standard streams, the report, the trace, and the listing itself; no pipe of another rank.
        descriptors, own = fact.pop("descriptors"), fact.pop("environment")
        assert isinstance(descriptors, list)
        assert isinstance(own, dict)
        assert len(descriptors) == 6
        assert set(TORCHRUN.split()) <= own.keys()
        assert own["RANK"] == own["LOCAL_RANK"] == own["ROLE_RANK"] == str(rank)
        assert own["WORLD_SIZE"] == own["LOCAL_WORLD_SIZE"] == "3"
        assert own["MASTER_ADDR"] == "127.0.0.1"
        assert own["PHALANX_RUN_ID"] == own["TORCHELASTIC_RUN_ID"]
        assert own["PHALANX_TABLE_SHOWN"] == "1"
        assert own["OMP_NUM_THREADS"] == "3"  # the user's own wins
        yes = dict.fromkeys(("main", "pickles", "sigint", "sigterm", "group", "buffered"), True)
        assert fact == yes | {
            "name": "__main__", "file": script, "package": None, "spec": None, "path0": str(launcher.directory),
            "argv": [script, "--lr", "0.1", "--help"], "orig_argv": [sys.executable, script, "--lr", "0.1", "--help"],
            "blocked": [], "wakeup": -1, "threads": 1,
        }  # fmt: skip


EDITABLE = """
    import sys
    from importlib.machinery import PathFinder
    class Editable:
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name == 'project':
                return PathFinder.find_spec(name, [{!r}])
    sys.meta_path.append(Editable)
"""


ITEMS = """
    import dataclasses, inspect, multiprocessing, sys, typing
    from concurrent.futures import ProcessPoolExecutor
    @dataclasses.dataclass
    class Item:
        number: int
    class Items:
        def __len__(self): return 3
        def __getitem__(self, i): return Item(i)
    def first(items): return items[0]
    def put(queue): queue.put(Item(3))
    if __name__ == '__main__':
        assert typing.get_type_hints(Item) == {'number': int} and 'number: int' in inspect.getsource(Item)
        context, found = multiprocessing.get_context(sys.argv[1]), []
        if 'loader' in sys.argv:
            from torch.utils.data import DataLoader
            found += DataLoader(Items(), collate_fn=first, num_workers=1, multiprocessing_context=context)
        with ProcessPoolExecutor(1, context) as executor, context.Pool(1) as pool:
            found += [*executor.map(Item, [3]), *pool.map(Item, [4])]
        queue = context.SimpleQueue()
        process = context.Process(target=put, args=(queue,))
        process.start()
        found.append(queue.get())
        process.join()
        print([item.number for item in found if type(item) is Item])
"""


def test_modules_folders_and_worker_processes_run_as_under_python(launcher: Launcher, tmp_path: Path) -> None:
    """Also of a namespace package, and of a project whose sources only a finder of ``pip install -e`` knows."""
    launcher.script("print_nothing = 1\n", "pack/__init__.py")
    quick = FACTS.replace("import torch\n", "")
    path = launcher.script("from . import print_nothing\n" + quick, "pack/train.py")
    main = launcher.script(quick, "ns/inner/__main__.py")
    launcher.script(quick, "elsewhere/src/project/train.py")
    launcher.script("", "elsewhere/src/project/__init__.py")
    launcher.script(EDITABLE.format(str(tmp_path / "elsewhere/src")), "site/sitecustomize.py")
    launcher.script("raise ValueError('in the parent')\n", "broken/__init__.py")
    launcher.script("", "broken/train.py")
    makes = launcher.script(f"open({str(tmp_path / 'made')!r}, 'w')", "makes.py")
    targets = ["-m pack.train -x", "ns/inner", "-m ns.inner", "-m project.train", "-m broken.train"]
    targets += ["-n 2 --dry-run --json makes.py"]
    pack, folder, package, project, broken, described = launcher.run_all(
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
    assert broken.err_text.count("ValueError: in the parent") == 2
    assert "importlib" not in broken.err_text
    told = json.loads(described.out)
    assert ([row["rank"] for row in told["ranks"]], told["target"]["path"]) == ([0, 1], makes)
    assert not (tmp_path / "made").exists()
    script = launcher.script(ITEMS)
    by_path, by_module = launcher.run_all(
        ["-q", "--no-preload", script, "spawn"], ["-q", "--no-preload", "-m", "script", "forkserver"]
    )
    for done in (by_path, by_module):
        assert done.out_lines == ["[rank 0] [3, 4, 3]"], done.err_text


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_a_loader_return_objects_of_the_scripts_classes(launcher: Launcher, method: str) -> None:
    done = launcher.run("-q", launcher.script(ITEMS), method, "loader")
    assert done.out_lines == ["[rank 0] [0, 1, 2, 3, 4, 3]"], done.err_text
