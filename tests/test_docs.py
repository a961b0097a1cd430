"""The pages for readers: links lead somewhere, the README fits its budget."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.dev import docs

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_file_says_in_its_first_line_what_it_holds():
    silent = re.findall(r"^\| \S+ \|  \|$", docs.map_page(), re.MULTILINE)
    assert not silent


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    broken = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    rooms = [path.name for folder in (ROOT, ROOT / "flow_grpo") for path in folder.iterdir()]  # left out on some pages
    named = re.findall(rf"(?:`|(?=tests/))((?:{'|'.join(rooms)})/[\w/]+\.(?:py|md|png))\b", text)
    assert not [name for name in named if not (ROOT / name).exists() and not (ROOT / "flow_grpo" / name).exists()]


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert not [page.name for page in PAGES[3:] if page.name != "index.md" and f"({page.name})" not in index]


def test_the_readme_stays_within_200_lines():
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 200
