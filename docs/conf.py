"""Settings of Sphinx for the site; docs/build.py builds it in both languages."""

from phalanx.settings import VERSION

project = "Phalanx"
version = release = VERSION
copyright = "the Phalanx contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["images/*.py", "locale"]
root_doc = "index"
language = "en"
locale_dirs = ["locale"]
gettext_compact = False  # a catalogue for each page
gettext_uuid = False
gettext_location = False
myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
html_theme = "furo"
html_title = f"Phalanx {VERSION}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
# The same contrast of at least 4.5 in both schemes as the pictures.
pygments_style = "a11y-light"
pygments_dark_style = "a11y-dark"
autodoc_member_order = "bysource"
napoleon_custom_sections = ["What to do"]  # of the classes of errors
autodoc_typehints = "description"
autodoc_mock_imports = ["torch_npu"]
nitpicky = False
