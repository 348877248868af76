"""How ranks that compute on the CPU get memory, and whether they give back what they free.

A training step frees and allocates the same large tensors again and again. glibc returns each block above 32 MiB to the
kernel when it is freed, so the next step pays for every page of it anew: the kernel interrupts the rank, finds a page
and clears it. On virtual machines these page faults cost several times what copying the data costs.

There are two ways to pay less, both with the allocator that torch uses anyway:

- *Huge pages* (``huge``, the default): torch's CPU allocator asks for pages of 2 MiB in place of 4 KiB for large
  tensors (its variable ``THP_MEM_ALLOC_ENABLE``), so there are about ten times fewer faults. Freed memory still goes
  back.
- *Keeping it* (``keep``): huge pages, and malloc serves large blocks from its heap and keeps them when they are freed
  (glibc's variables ``MALLOC_MMAP_MAX_`` and ``MALLOC_TRIM_THRESHOLD_``). A rank whose tensors change their sizes
  from step to step then fragments its heap, and its peak resident size grows by a third, so this is not the default.

``benchmarks/memory.py`` measures both. Both are variables in the environment of the ranks, so a program that a rank
starts has them as well. glibc reads its own when a program starts, and a forked rank has started long ago; there
:func:`apply_to_this_process` says the same to the running allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from typing import Literal, get_args

__all__ = ["MODES", "Memory", "apply_to_this_process", "variables"]

Memory = Literal["huge", "keep", "return"]
MODES: tuple[Memory, ...] = get_args(Memory)

HUGE = "THP_MEM_ALLOC_ENABLE"
MMAP_MAX = "MALLOC_MMAP_MAX_"
TRIM_THRESHOLD = "MALLOC_TRIM_THRESHOLD_"
# Their numbers in glibc, for mallopt().
_OPTIONS = {MMAP_MAX: -4, TRIM_THRESHOLD: -1}
# Variables by which the user has set up malloc or torch's allocator already; then none of them is touched.
_USERS_OWN = (HUGE, MMAP_MAX, TRIM_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_ENABLED = "/sys/kernel/mm/transparent_hugepage/enabled"
# mallopt() takes an int.
_LARGEST = (1 << 31) - 1


def huge_pages_offered() -> bool:
    """Whether this kernel gives huge pages to programs that ask for them."""
    with contextlib.suppress(OSError), open(_ENABLED) as file:
        return "[never]" not in file.read()
    return False


def variables(
    memory: Memory, *, ranks: int, memory_nbytes: int | None, environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables that the ranks get; none if the user has set one of them, or another one of malloc's.

    Args:
        memory: ``huge``, ``keep`` or ``return``.
        ranks: how many ranks share this machine.
        memory_nbytes: how much memory is left on it, in bytes; None if unknown. With ``keep``, all ranks together keep
            at most a quarter of it at the top of their heaps; the rest goes back to the kernel.
        environment: the user's environment.
    """
    set_up = any(environment.get(name) for name in _USERS_OWN)
    if memory == "return" or set_up or "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return {}
    huge = {HUGE: "1"} if huge_pages_offered() else {}
    if memory == "huge":
        return huge
    kept_nbytes = _LARGEST if memory_nbytes is None else min(_LARGEST, memory_nbytes // (4 * ranks))
    return {**huge, MMAP_MAX: "0", TRIM_THRESHOLD: str(kept_nbytes)}


def apply_to_this_process(environment: Mapping[str, str]) -> None:
    """Give glibc's allocator, in a process that runs already, the settings it would have read at its start.

    It changes nothing where the C library is not glibc, which has no ``mallopt``, or one that does nothing.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    for name, option in _OPTIONS.items():
        value = environment.get(name, "")
        if value.isdigit() and int(value) <= _LARGEST:
            libc.mallopt(ctypes.c_int(option), ctypes.c_int(int(value)))
