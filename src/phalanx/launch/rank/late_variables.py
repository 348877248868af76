"""Variables that a script sets before it imports torch, in a rank that was forked with torch imported.

Under ``python script`` such a variable (``OMP_NUM_THREADS``) is read while torch is imported. So torch is hidden until
the script's own ``import torch``. Then what has changed since the rank's start is applied where it can be, and rank 0
says of the rest that it has no effect.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from phalanx import settings
from phalanx.words import format_list, tell

__all__ = ["apply_threads", "hide_torch", "restore_torch"]

# Variables that libraries read while they are loaded, and that cannot be changed afterwards.
_TOO_LATE = {
    "ATEN_CPU_CAPABILITY",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_JIT",
    "TORCH_COMPILE_DEBUG",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_DISABLE_NATIVE_JIT",
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS",
    "TORCH_USE_RTLD_GLOBAL",
}
_TOO_LATE_FAMILIES = ("OMP_", "GOMP_", "KMP_", "NPY_", "NUMPY_")


def hide_torch(quiet: bool, imported: Callable[[], None]) -> None:
    """Have ``imported`` called at the next import of torch, if there is one; ``quiet`` has no note printed."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
    if "torch" in modules:
        sys.meta_path.insert(0, _HiddenTorch(modules, quiet, imported))
        for name in modules:
            del sys.modules[name]


def restore_torch() -> None:
    """Put torch back where a script that never imported it did not; for what runs at the end of a rank."""
    for finder in list(sys.meta_path):
        if isinstance(finder, _HiddenTorch):
            finder.restore()


class _HiddenTorch(importlib.abc.Loader):
    """Finds torch among the modules that were imported before the fork, and leaves it as it is."""

    def __init__(self, modules: dict[str, ModuleType], quiet: bool, imported: Callable[[], None]) -> None:
        self._modules, self._spec = modules, modules["torch"].__spec__
        self._quiet, self._imported = quiet, imported
        self._before = dict(os.environ)

    def restore(self) -> None:
        """Undo the hiding."""
        with contextlib.suppress(ValueError):  # another thread was quicker
            sys.meta_path.remove(self)
        for name, module in self._modules.items():
            sys.modules.setdefault(name, module)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Torch itself comes first, because a part imports the whole.
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._modules["torch"]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has given it that of this import
        self.restore()
        self._imported()
        _apply(self._before, self._quiet)


def _apply(before: dict[str, str], quiet: bool) -> None:
    """Apply what the script has set since ``before``; say what cannot be applied."""
    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    for names, apply in _APPLIED.items():
        if changed & set(names):
            apply()
    families = {name for name in changed if name.startswith(_TOO_LATE_FAMILIES)}
    late = sorted((changed & _TOO_LATE | families) - set(_THREADS))
    if late and not quiet:
        tell(
            f"note: the script sets {format_list(late)} before it imports torch, but phalanx run had imported torch "
            f"before it started the script; set it before phalanx run, or use phalanx run --no-preload"
        )


def apply_threads() -> None:
    """Give a torch that has been imported before the number of threads that the variables of this process ask for."""
    import torch

    for name in _THREADS:
        first = os.environ.get(name, "").partition(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            torch.set_num_threads(int(first))
            return


def _apply_debug_level() -> None:
    from torch._C._distributed_c10d import set_debug_level_from_env

    set_debug_level_from_env()


def _apply_logs() -> None:
    from torch._logging import _internal

    _internal._init_logs()


def _apply_replacement() -> None:
    from phalanx.c10d.register import replace_as_asked

    replace_as_asked()


_THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # in the order of at::get_num_threads
_APPLIED: dict[tuple[str, ...], Callable[[], None]] = {
    _THREADS: apply_threads,
    ("TORCH_DISTRIBUTED_DEBUG",): _apply_debug_level,
    ("TORCH_LOGS", "TORCH_LOGS_OUT"): _apply_logs,
    (settings.REPLACE,): _apply_replacement,
}
