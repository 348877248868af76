"""Files that a docstring, a comment or a document names exist under that name, and links lead somewhere."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
ENDING = r"\.(?:pyi?|c|h|md|toml|txt)"
# In a document every name; in a source those in the marks of code, and paths from the root.
IN_DOCUMENT = re.compile(rf"(?<![\w/.<*{{$~@-])((?:[\w.-]+/)*[\w-]+{ENDING})\b(?![\w*{{])")
IN_SOURCE = re.compile(rf"``([\w/-]+{ENDING})``|\b((?:docs|tests|src/phalanx|examples|benchmarks)/[\w./-]+{ENDING})\b")
# What examples call the program that somebody starts, and what a job writes.
OF_A_USER = {"train.py", "script.py", "ddp.py", "job.toml", "failure.txt"}
CODE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.DOTALL | re.MULTILINE)
WRITTEN = re.compile(rf"^```\w+\n# ([\w./-]+{ENDING})$", re.MULTILINE)  # by a block of a document, for its other ones
LINK = re.compile(r"\]\(([^)\s#]*)#?([^)\s]*)\)")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings: small letters, hyphens for spaces, no punctuation."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    dead, seen = [], 0
    for page in PAGES:
        text = re.sub(r"`[^`\n]+`", "", CODE.sub("", page.read_text()))
        for target, anchor in LINK.findall(text):
            if target.startswith(("http:", "https:", "mailto:")):
                continue
            seen += 1
            to = (page.parent / target).resolve() if target else page
            if not to.exists() or (anchor and anchor not in anchors(to)):
                dead.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert seen > 100
    assert not dead


def test_llms_txt_names_pages_that_exist() -> None:
    text = (ROOT / "docs" / "llms.txt").read_text()
    pages = [name.replace(".html", ".md") for name, _ in LINK.findall(text)]
    assert len(pages) > 10
    assert not [name for name in pages if not any((folder / name).exists() for folder in (ROOT, ROOT / "docs"))]


def test_every_file_that_is_named_exists() -> None:
    listed = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [name for name in listed if (ROOT / name).exists()]
    named = []
    for file in files:
        if file.endswith(".md"):
            page = (ROOT / file).read_text()
            own = WRITTEN.findall(page)
            named += [(file, name) for name in IN_DOCUMENT.findall(CODE.sub("", page)) if name not in own]
        elif file.endswith((".py", ".c", ".h")):
            named += [(file, one or other) for one, other in IN_SOURCE.findall((ROOT / file).read_text())]
    assert len(named) > 100
    ends = {"/".join(file.split("/")[at:]) for file in files for at in range(file.count("/") + 1)}
    assert not [each for each in named if each[1].split("../")[-1] not in ends | OF_A_USER]


def test_readmes_are_short_and_in_step() -> None:
    english, chinese = [(ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md")]
    assert max(english.count("\n"), chinese.count("\n")) <= 120
    for part in (r"^(?:#+|-|\||```\w*)", r"\]\(((?:docs|examples|C)[^)]*)\)", r"[\d.,]+ [µm]?s\b|[\d.]+×"):
        assert re.findall(part, english, re.MULTILINE) == re.findall(part, chinese, re.MULTILINE)
