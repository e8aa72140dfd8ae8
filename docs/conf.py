"""The documents as a site: `make docs` builds it into build/docs."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from memfit._version import __version__  # noqa: E402

project = "memfit"
author = "the memfit authors"
version = release = __version__
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "strategy_pages", "public_names", "command_pages",
    "card_pages", "languages",
]  # fmt: skip
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"memfit {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False

# Headings are link targets under the names GitHub gives them.
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

# Docstrings are written in Markdown: one backtick is code.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
