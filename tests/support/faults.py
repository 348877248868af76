"""Programs with the mistakes and faults of which every rank has to say what happened, for golden texts.

Each takes a folder as its argument, in which every rank leaves its pid, and what its user would read of an error: in
``ROW-RANK`` for each mistake or fault.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

__all__ = [
    "CUT",
    "CUT_OVER_TORCHS",
    "ENDS",
    "KILLED_WITHIN",
    "LATE",
    "LEAVES",
    "MISSING",
    "MISTAKES",
    "MISTAKES_FOR_ALL",
    "PASSES",
    "PASSES_RIGHTLY",
    "UNUSED",
    "known_of",
    "others",
    "told_by",
]

_BEGIN = dedent("""
    import os, select, signal, sys, time
    from datetime import timedelta
    from pathlib import Path
    import torch
    import torch.distributed as dist
    import phalanx

    folder = Path(sys.argv[1])
    world = phalanx.init()
    rank, size = world.rank, world.world_size
    (folder / f"pid-{rank}").write_text(str(os.getpid()))

    def tell(row, error):
        whole = folder / f"{row}-{rank}"
        whole.with_suffix(".part").write_text(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
        whole.with_suffix(".part").rename(whole)

    def wait_for(*names):
        until = time.monotonic() + 200
        while not all((folder / name).exists() for name in names):  # checks
            assert time.monotonic() < until, names  # asserts
            time.sleep(0.01)  # sleeps
""").removeprefix("\n")
_JOINED_BY_TORCH = _BEGIN.replace(
    "world = phalanx.init()\nrank, size = world.rank, world.world_size",
    "dist.init_process_group(sys.argv[2])\nrank, size = dist.get_rank(), dist.get_world_size()",
)

# One after the other, each in a group of its own, so that one job shows them all. Rank 1 is the one that differs.
MISTAKES_FOR_ALL = ("size", "shape", "dtype", "operation", "root", "kind", "batches")
MISTAKES = _BEGIN + dedent("""
    four, eight = torch.ones(4), torch.ones(8)
    odd = rank == 1
    survivors = [other for other in range(size) if other != 1]

    def size_differs(group):
        dist.all_reduce(eight if odd else four, group=group)  # size

    def shape_differs(group):
        dist.all_reduce(torch.ones(3, 2) if odd else torch.ones(2, 3), group=group)  # shape

    def dtype_differs(group):
        dist.all_reduce(four.int() if odd else four, group=group)  # dtype

    def operation_differs(group):
        dist.all_reduce(four, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group)  # operation

    def root_differs(group):
        dist.broadcast(four, 1 if odd else 0, group=group)  # root

    def kind_differs(group):
        if odd:
            dist.broadcast(four, 0, group=group)  # kind of rank 1
        else:
            dist.all_reduce(four, group=group)  # kind

    def batches_are_uneven(group):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")  # which torch makes with DDP
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
        for _ in range(3 if odd else 2):
            model(torch.ones(8, 4)).sum().backward()  # batches of rank 1
        dist.barrier(group=group)  # batches

    def does_not_come(group):
        if odd:
            wait_for(*[f"late-{other}" for other in survivors])  # late of rank 1
        dist.all_reduce(four, group=group)  # late

    ROWS = {
        "size": size_differs,
        "shape": shape_differs,
        "dtype": dtype_differs,
        "operation": operation_differs,
        "root": root_differs,
        "kind": kind_differs,
        "batches": batches_are_uneven,
        "late": does_not_come,
    }
    for row, mistake in ROWS.items():
        group = dist.new_group(timeout=timedelta(seconds=60))
        try:
            if row == "late":
                dist.barrier(group=group)  # joined
                group.set_timeout(timedelta(seconds=3))  # now: connecting the ranks takes longer on a busy machine
            (folder / f"made-{row}-{rank}").touch()
            wait_for(*[f"made-{row}-{other}" for other in range(size)])  # one that comes later would be left out
            mistake(group)
            dist.barrier(group=group)  # after
        except Exception as error:
            tell(row, error)
        dist.barrier()  # between
        dist.destroy_process_group(group)
""")

# The second argument is the backend. Rank 1 leaves out a head of the model, as its data happen to have it.
UNUSED = _JOINED_BY_TORCH + dedent("""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")  # which torch makes with DDP

    class TwoHeads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.other_head = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x, both):
            x = self.body(x)
            return (self.head(x) + self.other_head(x)).sum() if both else self.head(x).sum()

    if sys.argv[2] != "mpi":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # see below
    model = torch.nn.parallel.DistributedDataParallel(TwoHeads())  # model
    (folder / f"made-{rank}").touch()
    wait_for(*[f"made-{other}" for other in range(size)])  # none is in the broadcast of its parameters any more
    try:
        for step in range(2):
            loss = model(torch.ones(2, 4), rank != 1)  # forward
            loss.backward()  # backward
    except Exception as error:
        tell("unused", error)
        raise
""")

# The second argument is the backend, and the third says how rank 1 ends while the others wait for it.
ENDS = _JOINED_BY_TORCH + dedent("""
    if sys.argv[2] != "mpi":  # whose ranks cannot notice an end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a survivor on a busy machine has the time to say what it found
    x = torch.ones(4)
    dist.all_reduce(x)  # before
    if sys.argv[3] in ("late", "absent", "stopped"):
        dist.group.WORLD.set_timeout(timedelta(seconds=5 if sys.argv[3] == "stopped" else 1))
    (folder / f"done-{rank}").touch()
    wait_for(*[f"done-{other}" for other in range(size)])  # none is in the call before any more
    try:
        if rank == 1:
            if sys.argv[3] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[3] == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if sys.argv[3] == "raises":
                # raise:
                raise ValueError("no item 12 in data.bin")
            if sys.argv[3] == "size":
                x = torch.ones(8)
            if sys.argv[3] == "absent":
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(600)
            if sys.argv[3] == "late":
                # Until they have ended: rank 1 has not come when they say for the launcher how they failed.
                ends = [os.pidfd_open(int((folder / f"pid-{other}").read_text())) for other in (0, 2)]
                wait_for("late-0", "late-2")
                assert all(select.select([end], [], [], 200)[0] for end in ends)
        # call:
        dist.all_reduce(x)
    except Exception as error:
        tell(sys.argv[3], error)
        raise
""")

# The second argument is the backend. Rank 1 is killed while it waits within the second all_reduce. So does rank 2, if
# there is one; rank 0 comes when rank 1 has ended, whose end frees a lock. A small tensor would be in the segment by
# then, and the others would have no need of rank 1 any more.
KILLED_WITHIN = _JOINED_BY_TORCH + dedent("""
    import contextlib, fcntl, threading
    from phalanx.watch import recorder, records

    def notice_and_kill():
        inside = False
        while not inside:
            time.sleep(0.001)
            with contextlib.suppress(Exception):  # the record may be being written
                found = records.read_memory(recorder.own_memory()).records
                inside = any(one.kind == "all_reduce" and one.in_group == 2 and not one.left_ns for one in found)
        (folder / f"inside-{rank}").touch()
        if rank == 1:
            wait_for(*[f"inside-{other}" for other in range(1, size)])
            os.kill(os.getpid(), signal.SIGKILL)

    if sys.argv[2] != "mpi":  # whose ranks cannot notice an end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # see above
    x = torch.ones(1 << 22)
    dist.all_reduce(x)  # before
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    if rank == 1:
        fcntl.flock(lock, fcntl.LOCK_EX)
    if rank:
        threading.Thread(target=notice_and_kill, daemon=True).start()
    else:
        wait_for("inside-1")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        # call:
        dist.all_reduce(x)
    except Exception as error:
        tell("within", error)
        raise
""")

# Rank 1 computes until the others have been named, and then stops; the job goes on after both.
LATE = _JOINED_BY_TORCH + dedent("""
    x = torch.ones(4)
    dist.all_reduce(x)  # before
    if rank == 1:  # branch
        while not (folder / "go").exists():  # looks
            time.sleep(0.02)  # here
    dist.all_reduce(x)  # call
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(x)  # last call
""")


# Rank 2 joins only when a file "go" exists. The second argument says how all ranks join: "init" means phalanx.init(),
# and any other word names a backend for init_process_group. The third argument is their timeout in seconds.
MISSING = _BEGIN.replace(
    "world = phalanx.init()\nrank, size = world.rank, world.world_size",
    'rank = int(os.environ["RANK"])',
) + dedent("""
    from functools import partial

    timeout_s = float(sys.argv[3])
    join = partial(phalanx.init, timeout_s=timeout_s)
    if sys.argv[2] != "init":
        join = partial(dist.init_process_group, sys.argv[2], timeout=timedelta(seconds=timeout_s))
    if rank != 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # see above
    wait_for("pid-0", "pid-1")  # of two that come none is late
    if rank == 2:  # branch
        while not (folder / "go").exists():  # looks
            time.sleep(0.02)  # here
    try:
        # join:
        join()
    except Exception as error:
        tell("missing", error)
        raise
""")


# The second argument is the backend; the third says what rank 1 does otherwise than the others. Gloo notices nothing.
PASSES = _JOINED_BY_TORCH + dedent("""
    four = torch.ones(4)
    odd = rank == 1
    dist.all_reduce(four)  # before

    def first(tensor):
        dist.all_reduce(tensor)  # first

    def second(tensor):
        dist.all_reduce(tensor)  # second

    match sys.argv[3]:
        case "dtype":
            dist.all_reduce(four.int() if odd else four)  # dtype
        case "shape":
            dist.all_reduce(torch.ones(3, 2) if odd else torch.ones(2, 3))  # shape
        case "operation":
            dist.all_reduce(four, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)  # operation
        case "gathered":
            gathered = [torch.empty(4) for _ in range(size)] if rank == 0 else None
            dist.gather(four[:2] if odd else four, gathered)  # gathered
        case "scattered":
            dist.scatter(torch.empty(8) if odd else four, [four] * size if rank == 0 else None)  # scattered
        case "swapped":
            for task in (second, first) if odd else (first, second):
                task(four)  # tasks
        case "skipped":
            for step in range(4):
                if step != 2 or not odd:
                    dist.all_reduce(four)  # often
                dist.all_reduce(four)  # always
            if odd:
                dist.all_reduce(four)  # once
        case "root":
            dist.broadcast(four, 1 if odd else 0)  # root
        case "kind":
            if odd:  # branch of kinds
                dist.broadcast(four, 0)  # kind of rank 1
            else:
                dist.all_reduce(four)  # kind
        case "batches":
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")  # which torch makes with DDP
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
            for _ in range(3 if odd else 2):  # steps
                model(torch.ones(8, 4)).sum().backward()  # batches
    dist.barrier()  # last
""")


# Calls that differ between ranks and belong together all the same.
PASSES_RIGHTLY = dedent("""
    import os, sys
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]  # which torch makes with DDP
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    x, parts, objects, lengths = torch.ones(4), [torch.empty(4) for _ in range(size)], [None] * size, range(1, size + 1)

    def log():
        dist.reduce(x, 0)

    for step in range(10):
        if step % size == rank:
            dist.broadcast(x, rank)
        else:
            dist.broadcast(x, step % size)
        dist.reduce(x, step % size)
        first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(x, async_op=True)
        second.wait()
        first.wait()
        dist.gather(x, parts if rank == 0 else None, 0)
        dist.scatter(x, parts if rank == 1 else None, 1)
        dist.all_gather_object(objects, "x" * rank)
        dist.gather_object(rank, objects if rank == 0 else None, 0)
        dist.broadcast_object_list([step] if rank == 0 else [None], 0)
        ours = [rank + 1] * size  # of all_to_all: to each as many as this rank's number says
        # Of a reduce_scatter each rank keeps as many as its number says.
        dist.reduce_scatter(torch.empty(rank + 1), [torch.ones(length) for length in lengths])
        dist.all_to_all_single(torch.empty(sum(lengths)), torch.ones(sum(ours)), [*lengths], ours)
        dist.monitored_barrier()
        dist.all_reduce((torch.ones(6), torch.ones(2, 3), torch.ones(1, 2, 3))[rank])
        halves = (torch.ones(2, 3), torch.ones(3, 2), torch.ones(6))
        dist.reduce_scatter(torch.empty_like(halves[rank]), [*halves])
        if rank == 0:
            log()
        else:
            dist.reduce(x, 0)
    few, others = dist.new_group([0, 2]), dist.new_group([1, 2])
    if rank != 1:
        dist.all_reduce(x, group=few)
    if rank != 0:
        dist.all_reduce(x.double(), group=others)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    with Join([model]):
        for _ in range(2 + rank):
            model(torch.ones(3, 4)).sum().backward()
    dist.barrier()
    # Else Gloo's threads let go of the last gradients while the interpreter ends, which aborts the process.
    del model
    dist.destroy_process_group()
""").removeprefix("\n")


# Rank 1 ends and leaves a process of a session of its own, which holds its output.
LEAVES = dedent("""
    import os, signal, sys, time
    from pathlib import Path

    folder = Path(sys.argv[1])
    if os.environ["RANK"] == "1":
        ready, done = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path("/proc/self/comm").write_text("left-behind")
                os.write(done, b"x")
                signal.pause()
            os._exit(0)
        os.wait()
        os.read(ready, 1)
        (folder / "left").touch()
    while os.environ["RANK"] == "0" and not (folder / "gone").exists():
        time.sleep(0.02)
""").removeprefix("\n")


# All ranks are in one operation after another when the link between their hosts is cut.
CUT = _BEGIN + dedent("""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # see above
    dist.barrier()
    (folder / f"ready-{rank}").touch()
    try:
        while True:
            # call:
            dist.all_reduce(torch.ones(4))
    except Exception as error:
        tell("cut", error)
        raise
""")

# The same over torch's backend, the second argument; the launcher alone can say what has happened.
CUT_OVER_TORCHS = _JOINED_BY_TORCH + dedent("""
    dist.barrier()
    (folder / f"ready-{rank}").touch()
    while True:
        dist.all_reduce(torch.ones(4))
""")


def told_by(folder: Path, row: str, ranks: list[int]) -> list[str]:
    """What these ranks have told, each about this row; nothing of one that has told nothing, which no text allows."""
    files = [folder / f"{row}-{rank}" for rank in ranks]
    return [file.read_text() if file.exists() else "" for file in files]


def known_of(folder: Path, script: str, text: str, size: int) -> dict[str, object]:
    """What the placeholders of golden texts stand for in a job: its pids, the script, its lines, and who is not rank 1.

    Args:
        folder: where the ranks have left their pids.
        script: the script's path.
        text: what is in it.
        size: the world size.
    """
    marks = {}
    for number, line in enumerate(text.splitlines(), 1):
        code, sign, mark = line.rpartition("# ")
        if sign:  # with a colon it marks the next line, which tracebacks show without it
            marks[f"line {mark.removesuffix(':')}"] = number + (not code.strip())
    pids = {f"pid {path.name.partition('-')[2]}": path.read_text() for path in folder.glob("pid-*")}
    return {"script": script, "size": size, "others": others(size), **marks, **pids}


def others(size: int) -> str:
    """All ranks but rank 1, as Phalanx names them."""
    if size == 2:
        return "rank 0"
    return "ranks 0, 2" if size == 3 else f"ranks 0, 2-{size - 1}"
