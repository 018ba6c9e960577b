"""How `make docs` builds these pages: Sphinx with MyST, every warning an error."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

project = "promptfed"
author = "the promptfed authors"
copyright = "Apache-2.0"
release = metadata.version("promptfed")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # so that page.md#heading works as it does on GitHub

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
napoleon_google_docstring = True

html_math_renderer = "mathml"  # which browsers draw by themselves: pages work without a network
html_theme = "furo"
html_title = f"promptfed {release}"
html_show_sourcelink = False


def read(app: Any, name: str, content: list[str]) -> None:
    """Links to files of the repository outside these pages lead nowhere in the built site: they become plain text."""
    here = Path(app.env.doc2path(name)).parent
    docs = Path(app.srcdir).resolve()

    def shown(match: re.Match[str]) -> str:
        target = (here / match.group(2).partition("#")[0]).resolve()
        return match.group(0) if docs in target.parents else match.group(1)

    content[0] = re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)", shown, content[0])


def inline_math(writer: Any, node: nodes.math) -> None:
    """An equation within a line, as MathML."""
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def math_block(writer: Any, node: nodes.math_block) -> None:
    """An equation by itself, as MathML."""
    writer.body.append(f'<div class="math" style="margin: 1em 0">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (inline_math, None), (math_block, None))
    app.connect("source-read", read)
