"""Builds the C core as a plain shared library, and the module of the stable ABI that makes its usual calls quick.

The core is loaded with ctypes and knows nothing of Python: it carries no ABI suffix. The module is built for the
limited API of Python 3.10, so that one file serves every later Python, and is optional: an interpreter that cannot load
it (a free-threaded one) uses the core by ctypes alone. So one wheel serves every interpreter, and its tag is
``py3-none-<platform>``; ``cp310-abi3`` would keep it from those. Everything else is in pyproject.toml.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/phalanx/native")
CSRC = NATIVE / "csrc"
ENTRY = NATIVE / "csrc_entry"
CORE = "phalanx.native.libphalanx"


class BuildNative(build_ext):
    """The core is a shared library without a Python suffix and without a Python init function."""

    def get_ext_filename(self, fullname: str) -> str:
        """Name the core so that ``native/core.py`` finds it whatever interpreter built it."""
        if fullname.rpartition(".")[2] != CORE.rpartition(".")[2]:  # setuptools asks for either form
            return str(super().get_ext_filename(fullname))  # type: ignore[no-untyped-call]
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: object) -> list[str]:
        """Leave the exports to the C headers; there is no ``PyInit_…`` to add."""
        return []


class AnyPythonWheel(bdist_wheel):
    """A wheel bound to the platform, not to an interpreter."""

    def get_tag(self) -> tuple[str, str, str]:
        """Replace the interpreter and ABI tags, keep the platform's."""
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            CORE,
            sources=sorted(str(path) for path in CSRC.rglob("*.c")),
            depends=sorted(str(path) for path in CSRC.rglob("*.h")),
            include_dirs=[str(CSRC)],
            # -ffp-contract=off: a fused multiply-add would round differently from CPU to CPU, and the
            # core promises the same bits everywhere. -march is absent on purpose: dispatch is at run time.
            extra_compile_args=[
                "-std=gnu11",
                "-O3",
                "-ffp-contract=off",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
        ),
        Extension(
            "phalanx.native.entry",
            sources=sorted(str(path) for path in ENTRY.glob("*.c")),
            depends=[*sorted(str(path) for path in ENTRY.glob("*.h")), str(CSRC / "phalanx.h")],
            include_dirs=[str(ENTRY), str(CSRC)],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            py_limited_api=True,
            optional=True,
            extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"],
        ),
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPythonWheel},
)
