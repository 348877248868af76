"""Read and write options of ``phalanx run`` as a TOML file (``--config``, ``--save-config``).

A key is the long name of an option, and ``target`` and ``arguments`` are what follows the options::

    ranks = 4
    variables = ["OMP_NUM_THREADS=2"]
    target = "train.py"
    arguments = ["--lr", "0.1"]

The file's values become click's ``default_map``: an option that is typed replaces that of the file, which replaces the
environment; ``-x`` adds to those of the file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from phalanx.errors import LaunchError
from phalanx.words import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Those that say what this one call is to do. A file is for what every call is to do.
_NOT_IN_FILES = ("config", "save-config", "dry-run", "json")
# Options that replace each other: if one of a line is typed, the others of the line are not taken from the file.
_INSTEAD = (
    ("hosts", "hostfile", "rehearse"),
    ("ranks", "rehearse"),
    ("ppn", "rehearse"),
    ("placement", "ranks", "hosts", "hostfile"),
    ("starter", "mpi", "rehearse"),
    ("only", "tee"),
    ("target", "arguments", "module"),
)


def _keys(options: Sequence[click.Parameter]) -> dict[str, click.Parameter]:
    """Map keys of a file to options: a key is the long name, or what the value is if there is none (-x, -m)."""
    keys = {}
    for option in options:
        long = [name for name in option.opts if name.startswith("--")]
        keys[(long[-1].removeprefix("--") if long else option.name or "").replace("_", "-")] = option
    return {key: option for key, option in keys.items() if key not in _NOT_IN_FILES}


def read_config(path: str, options: Sequence[click.Parameter]) -> dict[str, Any]:
    """Read a file, and check that each key is one of the options and has a value of its kind.

    Paths in it are relative to the working directory, as on the command line.
    """
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise LaunchError(f"--config {path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"--config {path}: is not TOML: {error}") from error
    keys = _keys(options)
    checked = {}
    for written, value in content.items():
        key = written.replace("_", "-")
        if key not in keys:
            raise LaunchError(f"--config {path}: there is no option {written!r}; {_hint(key, keys)}")
        if wanted := _wanted(keys[key], value):
            raise LaunchError(f"--config {path}: {written} = {value!r}: is not {wanted}")
        checked[key] = value
    if "arguments" in checked and "target" not in checked:
        raise LaunchError(f'--config {path}: arguments are those of a target; add target = "train.py"')
    return checked


def _hint(key: str, keys: Mapping[str, click.Parameter]) -> str:
    if key in _NOT_IN_FILES:
        return f"--{key} belongs on the command line"
    by_letter = {name.lstrip("-"): own for own, option in keys.items() for name in option.opts}
    if key in by_letter:
        return f"its name in a file is {by_letter[key]}"
    meant = did_you_mean(key, keys)
    return f"{meant}The keys are the long options of phalanx run --help, and target, arguments, module and variables"


def _wanted(option: click.Parameter, value: Any) -> str:
    """Say what a value should be, if it is something else."""
    if isinstance(option, click.Option) and option.is_flag:
        return "" if isinstance(value, bool) else "true or false"
    if option.multiple or option.nargs == -1:
        words = isinstance(value, list) and all(isinstance(word, str) for word in value)
        return "" if words else 'a list of texts, as ["A=1", "B=2"]'
    number_or_text = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    return "" if number_or_text else "a text or a number"


def as_defaults(
    config: Mapping[str, Any], options: Sequence[click.Parameter], typed: Collection[str]
) -> dict[str, Any]:
    """Make a file's content click's ``default_map``, without what the options named in ``typed`` replace."""
    keys = _keys(options)
    replaced = {key for key, option in keys.items() if option.name in typed and not option.multiple}
    for group in _INSTEAD:
        if replaced.intersection(group):
            replaced = replaced.union(group)
    return {keys[key].name or "": value for key, value in config.items() if key not in replaced}


def format_config(ctx: click.Context) -> str:
    """Format the options of a call as a file for ``--config``; those left out keep their defaults."""
    lines = ["# phalanx run --config THIS_FILE\n"]
    for key, option in _keys(ctx.command.params).items():
        value, source = ctx.params[option.name or ""], ctx.get_parameter_source(option.name or "")
        if source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP) and value != () and value is not None:
            # JSON writes such values as TOML does, but for one character that it leaves as it is.
            written = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            lines.append(f"{key} = {written}\n")
    return "".join(lines)


def save_config(path: str, ctx: click.Context) -> None:
    """Write the options of a call to a file; see :func:`format_config`."""
    try:
        Path(path).write_bytes(format_config(ctx).encode())
    except UnicodeEncodeError as error:
        wrong = os.fsencode(error.object[error.start : error.end])
        raise LaunchError(f"--save-config: {wrong!r} is not UTF-8, which a TOML file has to be") from None
    except OSError as error:
        raise LaunchError(f"--save-config {path}: cannot be written: {error.strerror}") from error
