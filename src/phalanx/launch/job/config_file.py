"""``--config FILE`` and ``--save-config FILE``: the options of ``phalanx run`` in a TOML file.

TOML, because people write and comment such files, and because Python reads it: by itself since 3.11, before that by
``tomli``, from which its own reader comes. A key is the long name of an option, and ``target`` and ``arguments`` are
what follows the options::

    ranks = 4
    log-dir = "logs"
    tee = true
    variables = ["OMP_NUM_THREADS=2"]
    target = "train.py"
    arguments = ["--lr", "0.1"]

The file becomes words of a command line, and those that the user has typed come after them. So an option that was
typed replaces that of the file, by click's own rule that the last one counts; ``-x`` adds to those of the file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from phalanx.errors import LaunchError
from phalanx.launch.job.hang_options import KEPT
from phalanx.words import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["format_config", "read_config", "words_of_config"]

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
    """What may stand in a file, by the key: an option's long name, or what its value is if it has none (-x, -m)."""
    keys = {}
    for option in options:
        long = [name for name in option.opts if name.startswith("--")]
        key = (long[-1].removeprefix("--") if long else option.name or "").replace("_", "-")
        if key not in _NOT_IN_FILES:
            keys[key] = option
    return keys


def read_config(path: str, options: Sequence[click.Parameter]) -> dict[str, Any]:
    """Read a file, and check that each key is an option and has a value of its kind.

    Args:
        path: the file. Paths in it are relative to the working directory, as on the command line.
        options: the parameters of ``phalanx run``.

    Raises:
        LaunchError: the file cannot be read, a key is unknown, or a value is of another kind. The message names it.
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
        wanted = _wanted(keys[key], value)
        if wanted:
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
    """What a value should be, if it is something else; empty if it is right."""
    if isinstance(option, click.Option) and option.is_flag:
        return "" if isinstance(value, bool) else "true or false"
    if option.multiple or option.nargs == -1:
        words = isinstance(value, list) and all(isinstance(word, str) for word in value)
        return "" if words else 'a list of texts, as ["A=1", "B=2"]'
    number_or_text = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    return "" if number_or_text else "a text or a number"


def words_of_config(
    config: Mapping[str, Any], options: Sequence[click.Parameter], typed: set[str]
) -> tuple[list[str], list[str]]:
    """A file's content as words of a command line.

    Args:
        config: what :func:`read_config` has returned.
        options: the parameters of ``phalanx run``.
        typed: the names, in Python, of those that the user has typed.

    Returns:
        The words that come before what the user has typed, and those that come after it: the target.
    """
    keys = _keys(options)
    replaced = {key for key, option in keys.items() if option.name in typed and not option.multiple}
    for group in _INSTEAD:
        if replaced.intersection(group):
            replaced = replaced.union(group)
    before: list[str] = []
    for key, value in config.items():
        option = keys[key]
        if key in replaced or not isinstance(option, click.Option) or value is False:
            continue
        if value is True:
            before.append(option.opts[0])
        elif isinstance(value, list):
            before += [word for each in value for word in (option.opts[0], each)]
        else:
            before += [option.opts[0], str(value)]
    if "target" in replaced or "target" not in config:
        return before, []
    return before, ["--", str(config["target"]), *config.get("arguments", [])]


def format_config(ctx: click.Context) -> str:
    """The options of a call as the content of a file, which ``--config`` reads; those left out keep their defaults.

    Raises:
        LaunchError: a word is not text that TOML can hold.
    """
    lines = []
    values = {**ctx.params, **ctx.meta.get(KEPT, {})}
    for key, option in _keys(ctx.command.params).items():
        value = values[option.name or ""]
        source = ctx.get_parameter_source(option.name or "")
        if source is click.core.ParameterSource.COMMANDLINE and value != () and value is not None:
            lines.append(f"{key} = {_toml(value)}\n")
    return "".join(["# phalanx run --config THIS_FILE\n", *lines])


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise LaunchError(f"--save-config: {os.fsencode(value)!r} is not UTF-8, which a TOML file has to be") from None
    # JSON writes texts as TOML does, but for one character that it leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
