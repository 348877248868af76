"""Scripts of jobs in which something breaks, and what a test knows of such a job for golden texts.

Each takes as its first argument a folder, in which every rank leaves its pid, and as its second a backend.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

__all__ = ["ENDS", "HANGS_LATE", "known_of", "told_by"]

# Of all of them.
BEGIN = dedent("""
    import os, select, signal, sys, threading, time
    from datetime import timedelta
    from pathlib import Path
    import torch
    import torch.distributed as dist

    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    backend, how = [*sys.argv[2:], "", ""][:2]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))

    def wait_for(*names):
        while not all((folder / name).exists() for name in names):  # looks
            time.sleep(0.01)  # sleeps

    def all_come_to(name):
        (folder / f"{name}-{rank}").touch()
        wait_for(*(f"{name}-{other}" for other in range(3)))

    def tell(error):
        (folder / f"part-{rank}").write_text(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
        (folder / f"part-{rank}").rename(folder / f"told-{rank}")
""").removeprefix("\n")

# The third argument says how rank 1 ends, or differs, while the others wait for it in the second all_reduce.
ENDS = BEGIN + dedent("""
    def kill_within():
        from phalanx.diagnosis import reading, recorder
        while not any(record.under_way for record in reading.read_memory(recorder.own_memory()).records):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def is_stopped(pid):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    dist.init_process_group(backend)
    if backend != "mpi":  # whose ranks cannot notice an end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a survivor on a busy machine has the time to say what it found
    x = torch.ones(8 if how == "size" and rank == 1 else 4)
    dist.all_reduce(torch.ones(4))  # before
    if how == "stopped":
        dist.group.WORLD.set_timeout(timedelta(seconds=2))
    all_come_to("done")  # none is in the call before any more
    of_1 = int((folder / "pid-1").read_text())
    try:
        if rank == 1 and how == "killed":
            wait_for("go")
            os.kill(os.getpid(), signal.SIGKILL)
        elif rank == 1 and how == "raises":
            # raise:
            raise ValueError("no item 12 in data.bin")
        elif rank == 1 and how == "leaves":
            sys.exit()
        elif rank == 1 and how == "within":
            threading.Thread(target=kill_within, daemon=True).start()
        elif rank == 1 and how == "stopped":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif rank == 0 and how == "within":
            select.select([os.pidfd_open(of_1)], [], [])
        elif how == "stopped":
            while not is_stopped(of_1):
                time.sleep(0.01)
        # call:
        dist.all_reduce(x)
    except Exception as error:
        tell(error)
        raise
""")

# Rank 2 is late: in joining, and before a call, until there are the files "join" and "go". Then it is stopped.
HANGS_LATE = BEGIN + dedent("""
    all_come_to("up")
    if rank == 2:  # branch of join
        wait_for("join")
    dist.init_process_group(backend)  # join
    dist.all_reduce(torch.ones(4))  # before
    if rank == 2:  # branch
        wait_for("go")
    dist.all_reduce(torch.ones(4))  # call
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4))  # last call
""")

# The third argument says in what rank 1 differs; torch's backends notice nothing, and ours no swap.


def told_by(folder: Path, ranks: list[int]) -> list[str]:
    """The errors of these ranks; nothing of one that has told nothing, which no test allows."""
    files = [folder / f"told-{rank}" for rank in ranks]
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
    others = {2: "rank 0", 3: "ranks 0, 2"}.get(size, f"ranks 0, 2-{size - 1}")
    return {"script": script, "size": size, "others": others, **marks, **pids}
