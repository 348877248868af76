"""A rank of three that does not go on as the others do; how, is the argument.

Says when, in seconds since the epoch, and which files of /dev/shm the ranks have mapped.
"""

from __future__ import annotations

import sys
import threading
import time

import torch
import torch.distributed as dist
from tests.support.leaks import mapped_by


def leave(how: str) -> None:
    print(f"at {time.time()}", flush=True)
    if how == "raise":
        raise ValueError("rank one broke")
    if how == "raise with a thread":
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise ValueError("rank one broke")
    if how == "raise and clean up":
        try:
            raise ValueError("rank one broke")
        finally:
            dist.destroy_process_group()
    if how == "exit 3":
        sys.exit(3)
    if how == "destroy":
        dist.destroy_process_group()
    sys.exit(0)


def main() -> None:
    dist.init_process_group("mpi")
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    print(f"mapped {' '.join(mapped_by('self'))}", flush=True)
    dist.barrier()
    if dist.get_rank() == 1:
        leave(sys.argv[1])
    dist.all_reduce(tensor)


if __name__ == "__main__":
    main()
