"""Show what an error means and what to do about it: the docstring of its class, for a terminal."""

from __future__ import annotations

import inspect
import re
from typing import Any

from phalanx import errors, rpc
from phalanx.rpc.autograd.passes import BackwardError

_SECTION = re.compile(r"^(Example|What to do|Attributes):$", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?([^`]*)`")


def error_classes() -> dict[str, type[BaseException]]:
    """Find the public exceptions, by their names."""
    public = [getattr(module, name) for module in (errors, rpc) for name in module.__all__]
    found = [each for each in public if isinstance(each, type) and issubclass(each, BaseException)]
    return {each.__name__: each for each in [*found, BackwardError] if each is not rpc.RemoteTraceback}


def summary(error: type[BaseException]) -> str:
    """Return its first sentence."""
    return re.split(r"(?<=\.)\s", _plain(inspect.getdoc(error) or ""), maxsplit=1)[0].replace("\n", " ")


def error_as_text(name: str) -> str:
    """Say all that is known about an error."""
    error = error_classes()[name]
    parts = _SECTION.split(_plain(inspect.getdoc(error) or ""))
    meaning, sections = parts[0].strip(), list(zip(parts[1::2], parts[2::2], strict=True))
    lines = [f"{error.__module__}.{name}", "", "What it means", *_indented(meaning)]
    for title, text in sections:
        lines += ["", title, *_indented(inspect.cleandoc(text))]
    classes = error_classes()
    bases = [base.__name__ for base in error.__mro__[1:] if base.__name__ in classes]
    below = sorted(each for each, its in classes.items() if error in its.__mro__[1:])
    if bases:
        lines += ["", f"Caught by except {name}, and by except {' or '.join(bases)}"]
    if below:
        lines += ["", f"except {name} catches {', '.join(below)} as well"]
    return "\n".join(lines) + "\n"


def error_as_json(name: str) -> dict[str, Any]:
    """Say the same for programs."""
    return {"name": name, "summary": summary(error_classes()[name]), "text": error_as_text(name)}


def _plain(text: str) -> str:
    """Remove the marks of code and of links."""
    return _ROLE.sub(lambda found: found[1].rpartition(".")[2], text).replace("``", "")


def _indented(text: str) -> list[str]:
    return [f"  {line}".rstrip() for line in text.strip("\n").splitlines()]
