"""Pages of the site that lie elsewhere in the repository, and links between them.

README, CHANGELOG and the like are where people and other tools look for them, and are in no second place: they become
pages when the site is built. Their links work in a clone, and are turned into the site's own here.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "decisions.md": "DECISIONS.md",
    "changelog.md": "CHANGELOG.md",
    "cost.md": "benchmarks/results/cost.md",
    "diagnosis.md": "benchmarks/results/diagnosis.md",
}
"""Pages of the site, and the file of the repository that each is made of."""
RESULTS = "benchmarks/results/"
_NAMES = {source: page for page, source in PAGES.items()}
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files outside of ``docs/``."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(REPOSITORY / source).read_text()))
    for picture in sorted((REPOSITORY / RESULTS).glob("plots/*.png")):
        files.append(File.generated(config, f"plots/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages; names of other files lose theirs."""
    path = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda found: _link(found, posixpath.dirname(path)), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would ask the network for a script, a style, a font or a picture."""
    asked = re.findall(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""", output)
    if asked:
        raise PluginError(f"{page.file.src_uri} asks the network for {asked[0]}")
    return output


def _link(found: re.Match[str], folder: str) -> str:
    path = posixpath.normpath(posixpath.join(folder, found[1]))
    inside = next((path.removeprefix(root) for root in ("docs/", RESULTS) if path.startswith(root)), None)
    name = _NAMES.get(path) or inside
    if name is None:
        raise PluginError(f"{path} is no page of the site")
    return f"]({name}{found[2] or ''})"
