"""Builds the C core as a plain shared library and tags the wheel for any Python 3 on this platform.

The core is loaded with ctypes and knows nothing of Python, so one wheel serves every interpreter: the
library carries no ABI suffix, and the tag is ``py3-none-<platform>``. Everything else is in pyproject.toml.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("src/phalanx/native/csrc")


class BuildCore(build_ext):
    """A shared library without a Python suffix and without a Python init function."""

    def get_ext_filename(self, fullname: str) -> str:
        """Name the library so that ``native/core.py`` finds it whatever interpreter built it."""
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
            "phalanx.native.libphalanx",
            sources=sorted(str(path) for path in CSRC.glob("*.c")),
            depends=sorted(str(path) for path in CSRC.glob("*.h")),
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
        )
    ],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": AnyPythonWheel},
)
