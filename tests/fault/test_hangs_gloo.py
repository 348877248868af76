"""Jobs over torch's own Gloo that hang, or only seem to; and that the recorder changes nothing of what they do."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher, wait_for

__all__ = ["launcher"]

FRAME = """\
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size, x = dist.get_rank(), dist.get_world_size(), torch.ones(4)
group = dist.new_group([0, 1])
for step in range(2):
    dist.all_reduce(x)
"""

CALLS = {
    "asynchronous": "dist.all_reduce(x, async_op=True).wait()",
    "objects": "dist.all_gather_object([None] * size, rank)",
    "barrier": "dist.barrier()",
}
KINDS = {"asynchronous": "all_reduce", "objects": "all_gather"}


def place(script: str, mark: str) -> str:
    (line,) = [number for number, line in enumerate(script.splitlines(), 1) if line.endswith(f"# {mark}")]
    return rf"script\.py:{line}"


@pytest.mark.parametrize("name", ["asynchronous", "objects", pytest.param("barrier", marks=pytest.mark.long)])
def test_the_line_and_the_report_name_the_rank_that_does_not_come(launcher: Launcher, name: str) -> None:
    script = FRAME + f"if rank == size - 1:\n    time.sleep(600)  # HERE\n{CALLS[name]}  # WAIT\n"
    folder = launcher.directory / "reports"
    options = ("--warn-after", "0.8", "--report-after", "1.5", "--report-dir", str(folder))
    errors = launcher.directory / "errors"
    with open(errors, "wb") as file:
        job = launcher.start("-n", "3", *options, launcher.script(script), stderr=file)
    expected = (
        rf"rank 2 is at {place(script, 'HERE')} .*, in no operation; "
        rf"ranks 0-1 wait for it in {KINDS.get(name, name)} #\d+ at {place(script, 'WAIT')}"
    )
    branch = script.splitlines().index("if rank == size - 1:") + 1
    line = rf"phalanx: {expected}, for \d+ s now; look at the `if` in line {branch}\n"

    def is_said() -> bool:
        # On a busy machine the first line may name one more that is late; the next one comes after the report.
        reported = any(re.fullmatch(expected, report["verdict"]) for report in reports(folder))
        return reported and re.search(line, errors.read_text()) is not None

    wait_for(is_said, complaint=lambda: f"{verdicts(folder)}\n{errors.read_text()}")
    job.process.send_signal(signal.SIGINT)
    job.finish()


def reports(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("hang-*.json"))]


def verdicts(folder: Path) -> str:
    return "\n".join(report["verdict"] for report in reports(folder))


# Calls of C++: what prepares for them, the call, and the bytes that it reduces. DDP does more in its first two steps.
CALLS_OF_CPP = {
    "ddp": (
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))",
        "model(torch.ones(2, 8)).sum().backward()",
        288,
    ),
    "functional": (
        "import torch.distributed._functional_collectives as functional",
        "functional.all_reduce(torch.ones(16), 'sum', dist.group.WORLD).sum().item()",
        64,
    ),
}


@pytest.mark.parametrize("name", ["ddp", pytest.param("functional", marks=pytest.mark.long)])
def test_a_call_of_cpp_that_stalls_is_named_and_counts_for_no_later_call(launcher: Launcher, name: str) -> None:
    prepared, call, nbytes = CALLS_OF_CPP[name]
    go_on, folder = launcher.directory / "go_on", launcher.directory / "reports"
    script = (
        FRAME
        + f"{prepared}\nfor step in range(3):\n    {call}\n"
        + f"if rank == 0:\n    time.sleep(4)\n{call}\n"  # the others stall, and go on
        + f"while rank == size - 1 and not os.path.exists({str(go_on)!r}):\n    time.sleep(0.05)  # HERE\n"
        + f"{call}  # WAIT\ndist.all_reduce(x)\n"
        + "if rank == 0:\n    time.sleep(600)  # LATER\ndist.broadcast(x, 0)  # LATER WAIT\n"
    )
    options = ("--warn-after", "0.8", "--report-after", "2", "--report-dir", str(folder))
    torch_makes = {"TORCHINDUCTOR_CACHE_DIR": str(launcher.directory / "cache")}
    job = launcher.start("-n", "3", *options, launcher.script(script), environment=torch_makes)

    def says(expected: str) -> bool:
        return any(re.fullmatch(expected, report["verdict"]) for report in reports(folder))

    first = (
        rf"rank 2 is at {place(script, 'HERE')} .*, in no operation; "
        rf"ranks 0-1 wait for it in all_reduce #3 at {place(script, 'WAIT')}"
    )
    wait_for(lambda: says(first), complaint=lambda: verdicts(folder))
    report = next(report for report in reports(folder) if re.fullmatch(first, report["verdict"]))
    recording = next(rank["recording"] for rank in report["ranks"] if rank["rank"] == 0)
    assert recording["records"][-1][recording["fields"].index("nbytes")] == nbytes
    go_on.touch()
    second = (
        rf"rank 0 is at {place(script, 'LATER')} .*, in no operation; "
        rf"ranks 1-2 wait for it in broadcast #4 at {place(script, 'LATER WAIT')}"
    )
    wait_for(lambda: says(second), complaint=lambda: verdicts(folder))
    job.process.send_signal(signal.SIGINT)
    job.finish()


def test_a_message_that_never_comes_and_a_group_of_some_ranks_are_named(launcher: Launcher) -> None:
    script = (
        FRAME
        + """
if rank == 0:
    dist.irecv(x, 1).wait()  # FIRST
if rank == 1:
    time.sleep(600)  # HERE
dist.all_reduce(x)
"""
    )
    job = launcher.start("-n", "2", "--warn-after", "0.8", launcher.script(script))
    expected = re.compile(
        rf"rank 1 is at {place(script, 'HERE')} .*, in no operation; "
        rf"rank 0 waits for it in recv from rank 1 at {place(script, 'FIRST')}, for"
    )
    assert job.process.stderr is not None
    for line in iter(job.process.stderr.readline, b""):
        if expected.search(line.decode()):
            break
    else:
        pytest.fail("no line names it")
    job.process.send_signal(signal.SIGINT)
    job.finish()


def test_operations_that_nobody_waits_for_keep_no_rank(launcher: Launcher) -> None:
    """They are over, though no rank has asked: neither line may say that ranks are in them.

    Before all have issued them, and when they wait again, a rank that a busy machine holds up is rightly named.
    """
    body = f"""
import glob
def all_are(where):
    open(os.path.join({str(launcher.directory)!r}, f"{{where}}-{{rank}}"), "w").close()
    while len(glob.glob(os.path.join({str(launcher.directory)!r}, f"{{where}}-*"))) < size:
        time.sleep(0.01)

works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
message = dist.isend(x, (rank + 1) % size)
all_are("issued")
if rank == 0:
    print("QUIET", file=sys.stderr, flush=True)
until = time.monotonic() + 3
while time.monotonic() < until:
    time.sleep(0.01)
all_are("over")
if rank == 0:
    print("OVER", file=sys.stderr, flush=True)
all_are("told")
dist.recv(torch.empty(4), (rank - 1) % size)
message.wait()
for work in works:
    work.wait()
"""
    done = launcher.run("-n", "3", "--warn-after", "1.2", launcher.script(FRAME + body))
    assert done.code == 0, done.err_text
    lines = done.err_text.splitlines()
    quiet = lines[lines.index("[rank 0] QUIET") : lines.index("[rank 0] OVER")]
    assert not [line for line in quiet if " wait" in line or "all have come" in line], done.err_text


RESULTS = """
import json
found = {}
x = torch.arange(4.0) + rank
dist.all_reduce(x, op=dist.ReduceOp.MAX)
found["max"] = x.tolist()
parts = [torch.empty(2) for _ in range(size)]
dist.all_gather(parts, torch.tensor([rank, 1.0]))
found["gathered"] = torch.stack(parts).tolist()
out = torch.empty(2)
dist.reduce_scatter_tensor(out, torch.arange(2.0 * size) * (rank + 1))
found["scattered"] = out.tolist()
work = dist.all_reduce(x, async_op=True)
work.wait()
found["state"] = [work.is_completed(), work.get_future().done()]
try:
    dist.all_reduce(x, op="sum")
except Exception as error:
    found["error"] = type(error).__name__
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
torch.nn.init.constant_(model.module.weight, 0.3)
model(torch.full((1, 3), rank + 1.0)).sum().backward()
found["gradient"] = model.module.weight.grad.tolist()
print("RESULT", json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
BROKEN = """
from phalanx.watch import recorder
def broken(*arguments):
    raise RuntimeError("the recorder is broken")
recorder.begin = recorder.group = broken
"""


@pytest.mark.parametrize("before", ["", BROKEN], ids=["recorded", "with a recorder that fails"])
def test_results_and_errors_are_those_of_torch(launcher: Launcher, before: str) -> None:
    ranks = 3
    cache = f"os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(launcher.directory / 'cache')!r}\n"  # DDP makes it
    script = "import os\n" + cache + before + FRAME + RESULTS
    done = launcher.run("-n", str(ranks), launcher.script(script))
    assert done.code == 0, done.err_text
    found = [json.loads(line.partition("RESULT ")[2]) for line in done.out.decode().splitlines() if "RESULT " in line]
    assert len(found) == ranks
    top = [i + ranks - 1.0 for i in range(4)]
    weights = ranks * (ranks + 1) / 2
    for rank in range(ranks):
        own = [weights * (2 * rank + i) for i in range(2)]
        expected = {
            "max": top,
            "gathered": [[float(r), 1.0] for r in range(ranks)],
            "scattered": own,
            "state": [True, True],
            "error": "TypeError",
            "gradient": [[pytest.approx(weights / ranks)] * 3] * 2,
        }
        assert any(one == expected for one in found), (expected, found)


def test_a_program_on_phalanx_keeps_torchs_own_methods(launcher: Launcher) -> None:
    body = """
import torch.distributed as dist
own = dist.Work.wait, dist.ProcessGroup.allreduce
import phalanx
world = phalanx.init()
world.barrier()
print("kept", own == (dist.Work.wait, dist.ProcessGroup.allreduce))
"""
    done = launcher.run("-n", "2", launcher.script(body))
    assert done.out.decode().count("kept True") == 2, done.out.decode() + done.err_text
