"""Sphinx settings of the manual."""

project = "alpa_lite"
author = "the alpa_lite authors"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "sphinx_book_theme"
exclude_patterns = ["_build"]
