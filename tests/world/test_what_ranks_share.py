"""What a rank has of its own and what it has in common with the others, however it was started: as under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launch_support import Launcher, launcher
from tests.support.remote import hosts, remote

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

if __name__ == "__main__":
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
        "locale": locale.setlocale(locale.LC_ALL), "temporary folder": tempfile.gettempdir(),
        "logging": [repr(logging.root.handlers), logging.root.level],
        "warnings": [repr(entry) for entry in warnings.filters], "umask": os.umask(0o22),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.main_thread().name],
        "collector": [gc.get_threshold(), gc.isenabled()], "recursion": sys.getrecursionlimit(),
        "default": str(torch.get_default_dtype()), "start method": multiprocessing.get_start_method(),
        "main": sys.modules["__mp_main__"] is main and main.drawn is drawn,
    }
    import phalanx
    world = phalanx.init(quiet=True)
    world.seed(7)
    seeded = torch.initial_seed(), numpy.random.rand()
    numpy.random.seed(7 + world.rank)
    common["world.seed"] = seeded == (7 + world.rank, numpy.random.rand())
    with open(f"{sys.argv[1]}/{world.attempt}-{world.rank}", "w") as file:
        json.dump([own, common], file)
    world.barrier()
    sys.exit(world.attempt == 0)
"""


def test_ranks_draw_numbers_of_their_own_and_agree_in_the_rest(launcher: Launcher, tmp_path: Path) -> None:
    """Also after a restart."""
    folder = tmp_path / "found"
    folder.mkdir()
    script = launcher.script(PROBE)
    outcome = launcher.run("-n", "3", "-x", "TZ=Asia/Tokyo", "--restarts", "1", script, str(folder))
    assert outcome.code == 0, outcome.err_text
    own, common = zip(*(json.loads(path.read_text()) for path in folder.iterdir()), strict=True)
    assert len(own) == 6
    for name in own[0]:
        values = [json.dumps(each[name]) for each in own]
        assert len(set(values)) == 6, f"{name} is not each rank's own: {values}"
    assert all(each == common[0] for each in common), common
    assert common[0]["time zone"] == "JST"
    assert (common[0]["temporary folder"], common[0]["main"], common[0]["world.seed"]) == ("/var/tmp", True, True)
