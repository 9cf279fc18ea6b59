"""How Sphinx builds the site: `sphinx-build -W -c docs . site` in the root of the repository, offline.

The source folder is the whole repository, so that the pages of results/ and the models' cards belong to the site,
and a relative link means the same there and in the repository.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

import dflash_bench

project = "dflash-bench"
version = release = dflash_bench.__version__
extensions = ["myst_parser", "sphinx_copybutton"]
RESULTS = [f"results/{folder}/*.md" for folder in ("speed", "servers", "exactness", "drafts")]
include_patterns = [
    "docs/*.md",
    "results/index.md",
    *RESULTS,
    "dflash_bench/*/*/README.md",
    "results/drafts/*/*/README.md",
]
root_doc = "docs/index"
myst_heading_anchors = 3
html_theme = "furo"
html_title = "dflash-bench"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["wide.css"]
nitpicky = True

REDIRECT = (
    '<!doctype html><meta charset="utf-8"><title>dflash-bench</title><meta http-equiv="refresh" content="0; url={0}">'
)


def publish(app: Sphinx, error: Exception | None) -> None:
    """Beside the pages: a way in at the root, and for language models llms.txt with the Markdown that it lists."""
    if error is not None or app.builder.format != "html":
        return
    root, site = Path(app.srcdir), Path(app.outdir)
    (site / "index.html").write_text(REDIRECT.format("docs/index.html"), encoding="utf-8")
    shutil.copy(root / "docs" / "llms.txt", site)
    for page in root.glob("docs/*.md"):
        shutil.copy(page, site / "docs")


def setup(app: Sphinx) -> None:
    app.connect("build-finished", publish)
