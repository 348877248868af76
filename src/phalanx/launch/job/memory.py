"""Choose how ranks that compute on the CPU get memory, and whether they give back what they free.

glibc returns each block above 32 MiB to the kernel, so a training step that allocates its large tensors again pays for
every page anew. ``huge``, the default, has torch's allocator ask for pages of 2 MiB: a tenth of the page faults.
``keep`` also has malloc keep large blocks in its heap: if sizes change from step to step, the heap is fragmented, and
the peak grows by a third. ``benchmarks/memory.py`` measures both.

Both are variables, so that a program that a rank starts has them as well. glibc reads its own when a program starts; to
the allocator of a forked rank :func:`apply_to_this_process` says the same.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from typing import Literal

Mode = Literal["huge", "keep", "return"]

HUGE = "THP_MEM_ALLOC_ENABLE"
MMAP_MAX = "MALLOC_MMAP_MAX_"
TRIM_THRESHOLD = "MALLOC_TRIM_THRESHOLD_"
_MALLOPT = {MMAP_MAX: -4, TRIM_THRESHOLD: -1}  # their numbers in glibc
# Variables by which the user has set up malloc or torch's allocator already; then none of them is touched.
_USERS_OWN = (HUGE, MMAP_MAX, TRIM_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_ENABLED = "/sys/kernel/mm/transparent_hugepage/enabled"
_LARGEST = (1 << 31) - 1  # mallopt() takes an int


def variables(mode: Mode, ranks: int, left_nbytes: int | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the ranks get; none if the user has set one of them, or another one of malloc's.

    With ``keep``, all ranks together keep at most a quarter of the memory that is left on this machine at the top of
    their heaps (``left_nbytes``; None if unknown); the rest goes back to the kernel.
    """
    set_up = any(environment.get(name) for name in _USERS_OWN)
    if mode == "return" or set_up or "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return {}
    huge = {}
    with contextlib.suppress(OSError), open(_ENABLED) as file:
        huge = {} if "[never]" in file.read() else {HUGE: "1"}
    if mode == "huge":
        return huge
    kept_nbytes = _LARGEST if left_nbytes is None else min(_LARGEST, left_nbytes // (4 * ranks))
    return {**huge, MMAP_MAX: "0", TRIM_THRESHOLD: str(kept_nbytes)}


def apply_to_this_process(environment: Mapping[str, str]) -> None:
    """Give the running allocator the settings it would have read at its start; nothing happens without glibc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    for name, number in _MALLOPT.items():
        value = environment.get(name, "")
        if value.isdigit() and int(value) <= _LARGEST:
            libc.mallopt(ctypes.c_int(number), ctypes.c_int(int(value)))
