"""What a rank has of its own and what it has in common with the others, however it was started: as under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.remote import RemoteLauncher, hosts, remote

__all__ = ["hosts", "launcher", "remote"]

PROBE = """
import gc, json, locale, logging, multiprocessing, os, random, resource, signal, sys, tempfile, threading, time
import uuid, warnings
import numpy, torch

class Seeds(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return index, torch.initial_seed(), float(numpy.random.rand())

def drawn():
    loader = torch.utils.data.DataLoader(Seeds(), shuffle=True, batch_size=64, num_workers=1)
    (order, seeds, numbers), = loader
    return {
        "CPU generator": [torch.initial_seed(), torch.rand(4).tolist()],
        "shuffled order": order.tolist(), "seed of workers": seeds[0].item(), "numpy of workers": numbers[0].item(),
        "dropout": torch.nn.functional.dropout(torch.ones(64)).tolist(),
        "weights": torch.nn.Linear(2, 2).weight.tolist(),
    }

def probe(folder):
    os.environ["TMPDIR"] = "/var/tmp"  # in time: nobody has asked for it. Short, for the sockets of the workers
    own = {
        **drawn(), "Python": random.random(), "numpy legacy": numpy.random.rand(),
        "numpy new": numpy.random.default_rng().random(), "uuid": str(uuid.uuid1()),
        "temporary name": tempfile.mktemp(), "key of children": multiprocessing.current_process().authkey.hex(),
    }
    torch.manual_seed(1)
    numpy.random.seed(1)
    main = sys.modules["__main__"]
    common = {
        "seeded": drawn(), "numpy seeded": numpy.random.rand(), "time zone": time.localtime().tm_zone,
        "locale": locale.setlocale(locale.LC_ALL), "temporary folder": tempfile.gettempdir() == "/var/tmp",
        "logging": [repr(logging.root.handlers), logging.root.level],
        "warnings": [repr(entry) for entry in warnings.filters],
        "handlers": [repr(signal.getsignal(one)).partition(" at ")[0] for one in (signal.SIGINT, signal.SIGTERM)],
        "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "umask": os.umask(0o22),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.main_thread().name],
        "collector": [gc.get_threshold(), gc.isenabled()], "stack": threading.stack_size(),
        "recursion": sys.getrecursionlimit(), "default": str(torch.get_default_dtype()),
        "start method": multiprocessing.get_start_method(), "children": multiprocessing.active_children(),
        "main": sys.modules["__mp_main__"] is main and main.probe is probe,
    }
    import phalanx
    world = phalanx.init(quiet=True)
    world.seed(7)
    seeded = torch.initial_seed(), numpy.random.rand()
    numpy.random.seed(7 + world.rank)
    common["world.seed"] = seeded == (7 + world.rank, numpy.random.rand())
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with open(f"{folder}/{attempt}-{world.rank}", "w") as file:
        json.dump([own, common], file)
    world.barrier()
    phalanx.close()
    return attempt

if __name__ == "__main__":
    if sys.argv[2:] == ["launch"]:
        import phalanx
        torch.manual_seed(5)  # in a notebook, say: the ranks begin anew
        phalanx.launch(probe, (sys.argv[1],), n=3, variables={"TZ": os.environ["TZ"]})
    elif probe(sys.argv[1]) == "0" and sys.argv[2:] == ["fail once"]:
        sys.exit(1)
"""


VARIABLES = {"TZ": "Asia/Tokyo", "OMP_NUM_THREADS": "1"}
SET = [word for name, value in VARIABLES.items() for word in ("-x", f"{name}={value}")]


def found(folder: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def compare(ranks: dict[str, list[list[dict[str, Any]]]]) -> None:
    """What is a rank's own differs from that of every other; the rest is the same for all."""
    everywhere = [(way, own) for way, seen in ranks.items() for own, _ in seen]
    for name in everywhere[0][1]:
        values = [(way, json.dumps(own[name])) for way, own in everywhere]
        assert len({value for _, value in values}) == len(values), f"{name} is not each rank's own: {values}"
    (_, expected), *_ = next(iter(ranks.values()))
    for way, seen in ranks.items():
        for rank, (_, common) in enumerate(seen):
            assert common == expected, f"rank {rank} of {way}"


def run(launcher: Launcher, folder: Path, *options: str, last: str = "") -> list[list[dict[str, Any]]]:
    folder.mkdir()
    arguments = [launcher.script(PROBE), str(folder), *([last] if last else [])]
    outcome = launcher.run("-n", "3", *SET, *options, *arguments)
    assert outcome.code == 0, outcome.err_text
    return found(folder)


def test_ranks_draw_numbers_of_their_own_also_after_a_restart(launcher: Launcher, tmp_path: Path) -> None:
    seen = run(launcher, tmp_path / "run", "--restarts", "1", last="fail once")
    assert len(seen) == 6
    compare({"restart": seen})
    assert seen[0][1]["time zone"] == "JST"
    assert seen[0][1]["temporary folder"]
    assert seen[0][1]["main"]
    assert seen[0][1]["world.seed"]


@pytest.mark.long
def test_ranks_agree_in_the_rest_however_they_were_started(
    launcher: Launcher, remote: RemoteLauncher, tmp_path: Path
) -> None:
    script = launcher.script(PROBE)
    ranks = {}
    for way, command, last in (
        ("torchrun", ["-m", "torch.distributed.run", "--nproc-per-node", "3"], []),
        ("launch", [], ["launch"]),
    ):
        (tmp_path / way).mkdir()
        words = [sys.executable, *command, script, str(tmp_path / way), *last]
        done = subprocess.run(words, env={**os.environ, **VARIABLES}, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{way}: {done.stderr}"
        ranks[way] = found(tmp_path / way)
    ranks["run"] = run(launcher, tmp_path / "run")
    ranks["no preload"] = run(launcher, tmp_path / "no-preload", "--no-preload")
    (tmp_path / "hosts").mkdir()
    job = remote.run("-H", "h0:2,h1:1", script, str(tmp_path / "hosts"), environment=VARIABLES)
    assert job.process.returncode == 0, job.said()
    ranks["hosts"] = found(tmp_path / "hosts")
    assert {way: len(seen) for way, seen in ranks.items()} == dict.fromkeys(ranks, 3)
    compare(ranks)
