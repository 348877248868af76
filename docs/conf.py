"""Settings of Sphinx for the site; docs/build.py builds it in both languages."""

import re

from sphinx.application import Sphinx

from phalanx.settings import VERSION

project = "Phalanx"
version = release = VERSION
copyright = "the Phalanx contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["locale", "templates"]
root_doc = "index"
language = "en"
locale_dirs = ["locale"]
gettext_compact = False  # a catalogue for each page
gettext_location = False
myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"Phalanx {VERSION}"
templates_path = ["templates"]
_SIDEBAR = (
    "brand",
    "search",
    "scroll-start",
    "navigation",
    "scroll-end",
)  # furo's, and the other language between them
html_sidebars = {
    "**": [
        *(f"sidebar/{part}.html" for part in _SIDEBAR[:2]),
        "language.html",
        *(f"sidebar/{part}.html" for part in _SIDEBAR[2:]),
    ]
}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["llms.txt", "../AGENTS.md"]
html_copy_source = False
html_show_sphinx = False
# The same contrast of at least 4.5 in both schemes as the pictures.
pygments_style = "a11y-light"
pygments_dark_style = "a11y-dark"
autodoc_member_order = "bysource"
napoleon_custom_sections = ["What to do"]  # of the classes of errors
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"


def plain_text(_app: object, _context: object, lines: list[str]) -> None:
    """Keep the help of a command as it is printed: it is no reStructuredText, and its examples stand in columns."""
    found: list[str] = []
    for line in lines:
        if line.startswith("| "):
            begins = not found or not found[-1].startswith("   ")
            found += [*([".. code-block:: text", ""] if begins else []), f"   {line[2:].strip()}"]
        elif line.startswith((".. ", "   :")):  # a directive, and its fields
            found.append(line)
        else:
            found.append(re.sub(r"([\\*`]|(?<=\w)[_|](?!\w))", r"\\\1", line))
    lines[:] = found


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("sphinx-click-process-description", plain_text)
    app.connect("sphinx-click-process-options", plain_text)
