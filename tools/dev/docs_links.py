"""Let mkdocs show README and its like as pages, and read pages that are written for a code host.

On a code host `../README.md` and `../flow_grpo/records.py` lead somewhere. In the site the former is a page; a source
file is none, so that only its name stays.
"""

from __future__ import annotations

import functools
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Lower case: mkdocs takes a README.md for the index of its folder.
PAGES = {name: name.lower() for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md")}
# A block of code, which stays as it is, or a link.
BLOCK_OR_LINK = re.compile(r"^```.*?^```|\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)", re.DOTALL | re.MULTILINE)
TABLE_ROW, CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]*`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/; called by mkdocs."""
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Return a page's text with its links rewritten; called by mkdocs with these names."""
    return rewrite(markdown, "" if page.file.src_uri in PAGES.values() else "docs")


def rewrite(markdown: str, folder: str) -> str:
    """Return the text of a page in `folder`, relative to the project, as mkdocs needs it: links, and `|` in tables."""
    text = BLOCK_OR_LINK.sub(functools.partial(_rewritten, folder), markdown)
    return TABLE_ROW.sub(lambda row: CODE.sub(_plain_pipes, row.group()), text)


def _plain_pipes(code: re.Match[str]) -> str:
    r"""Return code of a table with `\|` as `|`: a code host asks for the backslash, mkdocs would show it."""
    return code.group().replace(r"\|", "|")


def _rewritten(folder: str, found: re.Match[str]) -> str:
    """Return a link as the site has it, or its text where it leads to no page; anything else unchanged.

    Args:
        folder: of the page, relative to the project.
        found: by BLOCK_OR_LINK.
    """
    text, target, anchor = found.groups()
    if target is None or "://" in target:
        return found.group()
    path = posixpath.normpath(posixpath.join(folder, target))
    if path not in PAGES and not path.startswith("docs/"):
        return text
    return f"[{text}]({PAGES.get(path) or path.removeprefix('docs/')}{anchor or ''})"
