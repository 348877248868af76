"""torch's autograd engine in a forked process.

A fork makes torch take its engine for a stale one, since the engine's threads are the parent's. Whoever asks for it
first destroys it and makes another, without a lock: torch trusts that only one thread at a time asks for it. But an
operation on a tensor that requires gradients asks for it too, with the interpreter released. So two threads of a fork
whose first such operations coincide both destroy the engine, and the process dies by SIGSEGV. A program that its
launcher starts by exec cannot get there, and the ranks that are forked here must not either.
"""

from __future__ import annotations

import sys

__all__ = ["renew_engine"]


def renew_engine() -> None:
    """Have torch make its autograd engine anew, if this process is a fork that has not used the engine yet.

    It must be called before another thread computes: in a new rank, and wherever threads are about to begin that run
    functions of the program. Only the first call in a fork does anything. If torch has not been imported, none does:
    the engine of what is imported later is new.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        # Of all that asks for the engine, this does nothing else.
        torch.autograd.Variable._execution_engine.is_checkpoint_valid()
