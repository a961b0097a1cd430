"""The pages for readers: links lead somewhere, the site builds and needs no network, Chinese pages keep step."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools.dev import docs

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]
TWINS = sorted(ROOT.glob("*.zh.md")) + sorted((ROOT / "docs").glob("*.zh.md"))
# Elements that make a browser load what they name, and the attribute that names it.
LOADS = {"script": "src", "img": "src", "iframe": "src", "video": "src", "source": "src", "link": "href"}


def test_every_file_says_in_its_first_line_what_it_holds():
    assert not re.findall(r"^\| \S+ \|  \|$", docs.map_page(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere_and_files_that_it_names_exist(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    assert not [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    rooms = [path.name for folder in (ROOT, ROOT / "flow_grpo") for path in folder.iterdir()]  # left out on some pages
    rooms = [name for name in rooms if name != "outputs"]  # of a reader's own runs
    named = re.findall(rf"(?:`|(?=tests/))((?:{'|'.join(rooms)})/[\w/]+\.(?:py|md|png))\b", text)
    assert not [name for name in named if not (ROOT / name).exists() and not (ROOT / "flow_grpo" / name).exists()]


def test_the_index_names_every_page_and_the_readme_stays_within_200_lines():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert not [page.name for page in PAGES[3:] if page.name != "index.md" and f"({page.name})" not in index]
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 200


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's notice about its successor
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class _Loads(HTMLParser):
    """Collects what a page makes a browser load, and where its links lead."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loaded += [values.get(LOADS.get(tag, "")) or ""]
        self.links += [values.get("href") or ""] if tag == "a" else []


def _pages(site: Path) -> Iterator[tuple[str, _Loads]]:
    for file in site.glob("*.html"):
        if file.name != "404.html":  # shown by servers, from whose root its links begin
            yield file.name, _Loads(file.read_text(encoding="utf-8"))


def test_no_page_style_sheet_or_diagram_loads_anything_from_the_network(site: Path):
    assert not [(name, place) for name, page in _pages(site) for place in page.loaded if "//" in place]
    sheets = list(site.rglob("*.css"))
    assert sheets
    assert not [s.name for s in sheets if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", s.read_text("utf-8"))]
    # For a diagram, the theme fetches its drawing library.
    assert not [file.name for file in site.glob("*.html") if 'class="mermaid"' in file.read_text(encoding="utf-8")]


def test_every_page_is_in_the_site_linked_inside_it_and_searched_from_disk(site: Path):
    assert len(list(site.glob("*.html"))) >= len(list((ROOT / "docs").glob("*.md"))) + len(docs.PAGES) + 3  # generated
    places = [(name, place.partition("#")[0]) for name, page in _pages(site) for place in page.links]
    assert not [(name, place) for name, place in places if "//" not in place and not (site / place).exists()]
    assert "var __index" in (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "site/iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("folder", "text", "rewritten"),
    [
        ("docs", "[a](../README.md)", "[a](readme.md)"),
        ("docs", "[a](../README.md#install)", "[a](readme.md#install)"),
        ("docs", "[a](npu.md)", "[a](npu.md)"),
        ("docs", "[file.py](../flow_grpo/file.py)", "file.py"),
        ("", "![a](docs/demo.png)", "![a](demo.png)"),
        ("", "[a](CONTRIBUTING.md)", "[a](contributing.md)"),
        ("", "[a](https://host/x.md)", "[a](https://host/x.md)"),
        ("docs", r"| `a\|b` | c\|d |", r"| `a|b` | c\|d |"),
        ("", "```\n[a](docs/x.md)\n```", "```\n[a](docs/x.md)\n```"),
    ],
)
def test_links_and_pipes_are_written_as_the_site_needs_them(folder: str, text: str, rewritten: str):
    assert docs.rewrite(text, folder) == rewritten


def _headings_and_code(file: Path) -> tuple[list[int], list[str]]:
    """Return the levels of a page's headings in order, and the lines of its code blocks, with their fences."""
    levels, code, inside = [], [], False
    for line in file.read_text(encoding="utf-8").splitlines():
        fence = line.startswith("```")
        if fence or inside:
            code.append(line)
        elif line.startswith("#"):
            levels.append(len(line) - len(line.lstrip("#")))
        inside ^= fence
    return levels, code


def test_there_are_chinese_pages():
    assert {page.name for page in TWINS} >= {"README.zh.md", "tutorial.zh.md", "npu.zh.md"}


@pytest.mark.parametrize("page", TWINS, ids=lambda page: page.name)
def test_a_chinese_page_has_headings_and_code_blocks_of_its_english_twin_and_they_link_to_each_other(page: Path):
    twin = page.with_name(page.name.replace(".zh.md", ".md"))
    assert _headings_and_code(page) == _headings_and_code(twin)
    for here, there in ((page, twin), (twin, page)):
        assert f"]({there.name})" in "\n".join(here.read_text(encoding="utf-8").splitlines()[:4])
