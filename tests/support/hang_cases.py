"""Scripts that hang, each for one reason, and the first sentence that a report must have about each."""

from __future__ import annotations

__all__ = ["FRAME", "HANGS", "USUAL"]

# What all begin with.
FRAME = """\
import ctypes, os, signal, sys, threading, time
import torch
import torch.distributed as dist
import phalanx

world = phalanx.init()
rank, x = world.rank, torch.ones(4)
pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
everybody = dist.new_group()
lock = threading.Lock()


def compute():
    while True:
        time.sleep(0.01)  # THERE


for step in range(2):
    world.step(step)
    world.all_reduce(x)  # LAST
"""

# Each: the body, and what the first sentence says. HERE stands for the place of this comment, WAIT for that of the
# others' call, ALSO for that of another call, LAST for that of the last one before, and THERE for that in compute().
# The line with BRANCH is to be looked at, as the end of the sentence says; without one the sentence has no such end.
HANGS = {
    "sleeping": (
        """
        if rank == 1:  # BRANCH
            time.sleep(300)  # HERE
        world.barrier()  # WAIT
        """,
        r"rank 1 is at HERE .*, in no operation; ranks 0, 2 wait for it in barrier #\d+ at WAIT",
    ),
    "a lock that another thread holds": (
        """
        if rank == 2:  # BRANCH
            lock.acquire()
            lock.acquire()  # HERE
        world.all_reduce(x)  # WAIT
        """,
        r"rank 2 is at HERE .*, in no operation; ranks 0-1 wait for it in all_reduce #\d+ at WAIT",
    ),
    "the interpreter's lock held in C": (
        """
        if rank == 0:  # BRANCH
            9 ** 10**8  # HERE
        world.all_reduce(x)  # WAIT
        """,
        r"rank 0 is at HERE .*, in no operation; ranks 1-2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "computing in C": (
        """
        if rank == 1:  # BRANCH
            for _ in range(10**9): torch.ones(2000, 2000) @ torch.ones(2000, 2000)  # HERE
        world.broadcast(x, src=1)  # WAIT
        """,
        r"rank 1 is at HERE .*, in no operation; ranks 0, 2 wait for it in broadcast #\d+ at WAIT",
    ),
    "stopped": (
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.all_reduce(x)  # WAIT
        """,
        r"rank 1 is stopped \(state T\), after all_reduce #\d+ at LAST; "
        r"ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "held by a debugger": (
        """
        if rank == 1:
            c = ctypes.CDLL(None)
            c.prctl(0x59616D61, -1, 0, 0, 0)  # PR_SET_PTRACER: any process may
            if os.fork() == 0:
                c.ptrace(16, os.getppid(), 0, 0)  # PTRACE_ATTACH
                time.sleep(300)
            time.sleep(300)
        world.all_reduce(x)  # WAIT
        """,
        r"rank 1 is held by a debugger \(state t\), after all_reduce #\d+ at LAST; "
        r"ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "uninterruptible in the kernel": (
        """
        if rank == 1:
            os.mkfifo("pipe")  # opened by the child, for which its parent waits in the kernel
            os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, "pipe", os.O_RDONLY, 0)])
        world.all_reduce(x)  # WAIT
        """,
        r"rank 1 is waiting for a disk or a driver \(state D\), after all_reduce #\d+ at LAST; "
        r"ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "stopped in the operation": (
        """
        from phalanx.watch import recorder, records
        pids = world.all_gather_object(os.getpid())
        def stop_in_it():
            while not any(record.under_way for record in records.read_memory(recorder.own_memory()).records):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1:
            threading.Thread(target=stop_in_it).start()
        while rank == 0 and open(f"/proc/{pids[1]}/stat").read().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        world.all_reduce(torch.ones(1 << 20))  # WAIT
        """,
        r"rank 1 is stopped \(state T\), in all_reduce #\d+ at WAIT; ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "one rank's loop is shorter": (
        """
        for _ in range(5 if rank else 4):  # BRANCH
            world.all_reduce(x)  # WAIT
        if rank == 0:
            compute()
        """,
        r"rank 0 is at THERE time\.sleep\(0\.01\)  # \w+, in no operation; "
        r"ranks 1-2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "the wrong group": (
        """
        if rank == 0:  # BRANCH
            dist.all_reduce(x, group=pairs[0])  # HERE
        else:
            dist.all_reduce(x, group=everybody)  # WAIT
        """,
        r"ranks 0-1 wait for each other: rank 0 is in all_reduce #1 of group '\S+' at HERE, "
        r"rank 1 is in all_reduce #1 of group '\S+' at WAIT",
    ),
    "swapped calls of two groups": (
        """
        if rank == 0:  # BRANCH
            dist.all_reduce(x, group=pairs[0])  # HERE
            dist.all_reduce(x, group=everybody)
        else:
            dist.all_reduce(x, group=everybody)  # WAIT
            if rank == 1: dist.all_reduce(x, group=pairs[0])
        """,
        r"ranks 0-1 wait for each other: rank 0 is in all_reduce #1 of group '\S+' at HERE, "
        r"rank 1 is in all_reduce #1 of group '\S+' at WAIT",
    ),
    "a circle of three": (
        """
        first, second = [(0, 2), (1, 0), (2, 1)][rank]
        dist.all_reduce(x, group=pairs[first])  # WAIT
        dist.all_reduce(x, group=pairs[second])
        """,
        r"ranks 0-2 wait for each other: rank 0 is in all_reduce #1 of group '\S+' at WAIT, rank 1 is in all_reduce #1 "
        r"of group '\S+' at WAIT, rank 2 is in all_reduce #1 of group '\S+' at WAIT",
    ),
    "a chain": (
        """
        if rank == 0:
            dist.all_reduce(x, group=pairs[0])  # WAIT
        if rank == 1:
            dist.all_reduce(x, group=pairs[1])  # ALSO
        if rank == 2:
            compute()
        """,
        r"rank 2 is at THERE time\.sleep\(0\.01\)  # \w+, in no operation; "
        r"ranks 0-1 wait for it in all_reduce #1 of group '\S+' at WAIT "
        r"and all_reduce #1 of group '\S+' at ALSO",
    ),
    "two that receive from each other": (
        """
        if rank < 2:
            dist.recv(x, 1 - rank)  # WAIT
            dist.send(x, 1 - rank)
        """,
        r"ranks 0-1 wait for each other: rank 0 is in recv from rank 1 at WAIT, rank 1 is in recv from rank 0 at WAIT",
    ),
    "a message that is never sent": (
        """
        if rank == 0:
            dist.recv(x, 2)  # WAIT
        if rank == 2:
            compute()
        """,
        r"rank 2 is at THERE .*, in no operation; rank 0 waits for it in recv from rank 2 at WAIT",
    ),
    "an asynchronous call that is waited for": (
        """
        if rank == 2:  # BRANCH
            compute()
        work = dist.all_reduce(x, async_op=True)  # WAIT
        work.wait()
        """,
        r"rank 2 is at THERE .*, in no operation; ranks 0-1 wait for it in all_reduce #\d+ at WAIT",
    ),
    "inside the evaluation": (
        """
        if rank == 1:  # BRANCH
            with phalanx.label("evaluation"):
                compute()
        world.reduce(x, dst=0)  # WAIT
        world.barrier()  # ALSO
        """,
        r"rank 1 is at THERE .*, in no operation; "
        r"ranks 0, 2 wait for it in reduce #\d+ at WAIT and barrier #\d+ at ALSO",
    ),
    "an input that nobody gives": (
        """
        if rank == 1:  # BRANCH
            os.read(os.pipe()[0], 1)  # HERE
        world.all_reduce(x)  # WAIT
        """,
        r"rank 1 is at HERE .*, in no operation; ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "a child process that does not end": (
        """
        import subprocess
        if rank == 1:  # BRANCH
            subprocess.run(["sleep", "300"])  # HERE
        world.all_reduce(x)  # WAIT
        """,
        r"rank 1 is at HERE .*, in no operation; ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "a thread that is never joined": (
        """
        if rank == 0:  # BRANCH
            thread = threading.Thread(target=time.sleep, args=(300,), daemon=True)
            thread.start()
            thread.join()  # HERE
        world.all_reduce(x)  # WAIT
        """,
        r"rank 0 is at HERE .*, in no operation; ranks 1-2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "a script that has ended, but for a thread": (
        """
        if rank == 1:
            threading.Thread(target=time.sleep, args=(300,), name="saver").start()
            sys.exit()
        world.all_reduce(x)  # WAIT
        """,
        r"rank 1 is at the end of its script, waiting for its other threads to end, in no operation; "
        r"ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "an exit handler that does not return": (
        """
        import atexit
        if rank == 2:
            atexit.register(compute)
            sys.exit()
        world.all_reduce(x)  # WAIT
        """,
        r"rank 2 is at THERE time\.sleep\(0\.01\)  # \w+, in no operation; "
        r"ranks 0-1 wait for it in all_reduce #\d+ at WAIT",
    ),
    "two that are missing": (
        """
        if rank:  # BRANCH
            time.sleep(300)  # HERE
        dist.all_gather([x] * 3, x)  # WAIT
        """,
        r"ranks 1-2 are at HERE .*, in no operation; rank 0 waits for them in all_gather #\d+ at WAIT",
    ),
    "a slow rank": (
        """
        rows = 10_000 if rank == 1 else 1
        for step in range(10):
            world.step(step)
            for _ in range(rows):  # BRANCH
                time.sleep(0.01)  # HERE
            world.all_reduce(x)  # WAIT
        """,
        r"rank 1 is at HERE .*, in no operation; ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "an exception's handler that waits": (
        """
        try:
            if rank == 1: raise ValueError("bad batch")
        except ValueError:
            time.sleep(300)  # HERE
        world.all_reduce(x)  # WAIT
        """,
        r"rank 1 is at HERE .*, in no operation; ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
}

# One of each kind of sentence; the others differ in what keeps the rank.
USUAL = (
    "the interpreter's lock held in C",
    "stopped",
    "swapped calls of two groups",
    "a chain",
    "a message that is never sent",
)
