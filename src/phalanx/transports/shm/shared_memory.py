"""Memory that the ranks of one host share beside their segment.

It is a memfd, as the segment is (``segment.py``), and as that it has no name and is gone with the last process that has
it. When it is used is for the collectives of the ranks to say: what one writes before a collective others may read
after it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.shm.segment import own_pid

__all__ = ["share_memory", "share_parts"]


def share_memory(local: Communicator, nbytes: int) -> torch.Tensor:
    """Memory of so many bytes, all of them zero, which every rank of a host makes at the same point of its program.

    Args:
        local: a communicator of these ranks.
        nbytes: how much; equal on all of them.

    Returns:
        The memory, as bytes. It stays as long as any rank has a tensor of it.

    Raises:
        OSError, RuntimeError: the kernel gives no memory, or no descriptor: make fewer groups.
        PeerLost: a rank has gone.
    """
    if local.size == 1:
        return torch.zeros(nbytes, dtype=torch.uint8)
    offer = torch.zeros(2, dtype=torch.int64)
    descriptor, refused = -1, None
    try:
        if local.rank == 0:
            descriptor = os.memfd_create("phalanx-shared", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
            offer[0], offer[1] = own_pid(), descriptor
        local.broadcast(offer, 0)
        if local.rank != 0:
            pid, number = offer.tolist()
            try:
                descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                refused = error
        # If rank 0 has died, so that there is nothing to open, this says so.
        local.barrier()
        if isinstance(refused, FileNotFoundError):
            local.barrier()  # rank 0 was killed after it had come to the barrier above: this names it
        if refused is not None:
            raise refused
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def share_parts(local: Communicator, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory in which each rank of a host has a part, which it alone writes.

    Args:
        local: a communicator of these ranks; each of them calls this at the same point of its program.
        nbytes: how much this rank wants.

    Returns:
        All of the memory, alike on every rank, and this rank's part. Once no tensor of the part is left its pages are
        given back, and its addresses stay taken as long as the whole memory is there.
    """
    wanted = [torch.zeros(1, dtype=torch.int64) for _ in range(local.size)]
    local.all_gather(wanted, torch.tensor([nbytes]))
    each = -(-max(1, *map(int, wanted)) // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = share_memory(local, each * local.size)
    begin = whole.data_ptr() + each * local.rank
    part = memoryview((ctypes.c_ubyte * each).from_address(begin))
    # With the whole memory as an argument, which is thereby there until this is done.
    weakref.finalize(part, _give_back, whole, begin, each).atexit = False
    return whole, torch.frombuffer(part, dtype=torch.uint8)[:nbytes]


def _give_back(whole: torch.Tensor, begin: int, nbytes: int) -> None:
    """Free the pages of a part of shared memory; it reads as zeros afterwards."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), mmap.MADV_REMOVE)
