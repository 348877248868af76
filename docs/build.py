"""Build the site in English and Chinese: ``python docs/build.py build/docs``.

A warning of Sphinx fails the build. So does a page of the tutorial (``index.md``, ``start.md``, ``learn/``) of which a
sentence has no translation, or one of an older English sentence. Of other pages it is said how much is translated.

``python docs/build.py --update`` brings the catalogues in ``docs/locale`` up to date with the English pages. To
translate another page, make an empty catalogue of its name first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from babel.messages.pofile import read_po

DOCS = Path(__file__).parent
LANGUAGE = "zh_CN"
TUTORIAL = ("index", "start", "learn/")


def main() -> int:
    """Build the site, or update its catalogues, and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/docs"), help="where the site goes")
    parser.add_argument("--update", action="store_true", help="update the catalogues, and build nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        templates = Path(name)
        _sphinx("gettext", templates, "-q")
        if options.update:
            for template in templates.rglob("*.pot"):
                page = str(template.relative_to(templates).with_suffix(""))
                if not page.startswith(TUTORIAL) and not _catalogue(page).exists():
                    template.unlink()
            words = ["sphinx-intl", "update", "-p", name, "-d", str(DOCS / "locale"), "-l", LANGUAGE, "-w", "120"]
            return subprocess.run([Path(sys.executable).with_name(words[0]), *words[1:]], check=True).returncode
        missing = _untranslated(templates)
    _sphinx("html", options.folder, "-q", "-W", "--keep-going")
    _sphinx("html", options.folder / "zh", "-q", "-W", "--keep-going", "-D", f"language={LANGUAGE}")
    for page, (lacking, of) in sorted(missing.items()):
        print(f"{page}: {of - lacking} of {of} sentences in Chinese")
    failed = [page for page in missing if page.startswith(TUTORIAL)]
    if failed:
        print(
            f"Pages of the tutorial are not translated: {', '.join(failed)}; see docs/build.py --update",
            file=sys.stderr,
        )
    print(f"The site is in {options.folder}/index.html, in Chinese in {options.folder}/zh/index.html")
    return bool(failed)


def _sphinx(builder: str, folder: Path, *options: str) -> None:
    subprocess.run([sys.executable, "-m", "sphinx", "-b", builder, "-j", "auto", *options, DOCS, folder], check=True)


def _untranslated(templates: Path) -> dict[str, tuple[int, int]]:
    """Count, for each page that is not wholly translated, the sentences that are not, and all."""
    counts = {}
    for template in templates.rglob("*.pot"):
        page = str(template.relative_to(templates).with_suffix(""))
        with template.open("rb") as file:
            wanted = {message.id for message in read_po(file) if message.id}
        done = set()
        if _catalogue(page).exists():
            with _catalogue(page).open("rb") as file:
                done = {message.id for message in read_po(file) if message.string and not message.fuzzy}
        if wanted - done:
            counts[page] = (len(wanted - done), len(wanted))
    return counts


def _catalogue(page: str) -> Path:
    return DOCS / "locale" / LANGUAGE / "LC_MESSAGES" / f"{page}.po"


if __name__ == "__main__":
    sys.exit(main())
