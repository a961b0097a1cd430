"""What mkdocs asks for when it builds the site: README and its like as pages, generated pages, and links that lead on.

`make docs` builds site/, where three pages exist that no file of docs/ holds: the map of all files, the records that
travel through a run, and the commands with their options.

On a code host `../README.md` and `../flow_grpo/records.py` lead somewhere. In the site the former is a page; a source
file is none, so that only its name stays.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import posixpath
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mkdocs takes it back once this file is loaded

from flow_grpo import records
from flow_grpo.algorithm.groups.compare import Chosen, Gathered
from flow_grpo.maths.advantages import CombinedAdvantages
from flow_grpo.maths.loss import LossTerms
from flow_grpo.maths.sde import Transition
from tools.common import markdown_table

ROOT = Path(__file__).resolve().parents[2]
# Lower case: mkdocs takes a README.md for the index of its folder.
PAGES = {name: name.lower() for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md")}
# A block of code, which stays as it is, or a link.
BLOCK_OR_LINK = re.compile(r"^```.*?^```|\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)", re.DOTALL | re.MULTILINE)
TABLE_ROW, CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]*`")
MOST_LETTERS = 60  # of a default
# In the order in which a sample meets them.
RECORDS: tuple[type[Any], ...] = (
    *(records.Condition, records.Guidance, records.Conditioning, Transition, records.Trajectory, records.Samples),
    *(records.RewardResult, records.ScoredBatch, Gathered, CombinedAdvantages, Chosen, records.TrainingBatch),
    LossTerms,
)
RECORDS_HEAD = """# Records

They stand in the order in which a sample meets them ([walk.md](walk.md)). n is the number of a rank's samples, N that
of all ranks, G that of groups.
"""
COMMANDS_HEAD = """# Commands

`--help` of a command prints the same. Where a command takes `--config FILE:RECIPE`, any knob of [config.md](config.md)
may follow as `--config.section.knob=value`. Programs of `tools/dev/` are for those who change this project:
[map.md](map.md).
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and those that lie outside docs/; called by mkdocs."""
    pages = {uri: (ROOT / name).read_text(encoding="utf-8") for name, uri in PAGES.items()}
    pages |= {"map.md": map_page(), "records.md": records_page(), "commands.md": commands_page()}
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Return a page's text with its links rewritten; called by mkdocs with these names."""
    return rewrite(markdown, "" if page.file.src_uri in PAGES.values() else "docs")


def rewrite(markdown: str, folder: str) -> str:
    """Return the text of a page in `folder`, relative to the project, as mkdocs needs it: links, and `|` in tables."""

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        if target is None or "://" in target:
            return found.group()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path not in PAGES and not path.startswith("docs/"):
            return text
        return f"[{text}]({PAGES.get(path) or path.removeprefix('docs/')}{anchor or ''})"

    def row(found: re.Match[str]) -> str:  # a code host asks for the backslash, mkdocs would show it
        return CODE.sub(lambda code: code.group().replace(r"\|", "|"), found.group())

    return TABLE_ROW.sub(row, BLOCK_OR_LINK.sub(link, markdown))


def map_page() -> str:
    lines = ["# Map of the project", "", "How a sample passes through these files is in [walk.md](walk.md)."]
    source = [ROOT / "train_grpo.py"]
    for place in ("config", "examples", "flow_grpo", "tools"):
        source += sorted((ROOT / place).rglob("*.py"), key=lambda file: (file.parent.as_posix(), file.name))
    for folder, files in itertools.groupby(source, key=lambda file: file.parent):
        first_lines = {}
        for file in files:
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            first_lines[file.name] = text.partition("\n")[0]
        lines += ["", f"## {folder.relative_to(ROOT).as_posix()}" if folder != ROOT else "## Top level", ""]
        lines += [first_lines.pop("__init__.py", ""), ""]
        lines += markdown_table(("file", "what it holds"), list(first_lines.items())) if first_lines else []
    return "\n".join(lines)


def records_page() -> str:
    letters = " ".join((records.__doc__ or "").split("\n\n", 1)[1].split())
    lines = [RECORDS_HEAD, letters, ""]
    for record in RECORDS:
        text, _, listed = (inspect.getdoc(record) or "").partition("\nAttributes:\n")
        entries = re.split(r"\n(?=    \w+: )", listed)  # lines that go on are indented further
        meanings = {
            name.strip(): " ".join(message.split()) for name, _, message in (one.partition(": ") for one in entries)
        }
        rows = [(f"`{field.name}`", f"`{field.type}`", meanings[field.name]) for field in dataclasses.fields(record)]
        lines += [f"## {record.__name__}", "", f"`{record.__module__}`. {text.strip()}", ""]
        lines += [*markdown_table(("field", "type", "what it is"), rows), ""]
    return "\n".join(lines)


def commands_page() -> str:
    lines, names = [COMMANDS_HEAD], ("train_grpo", *sorted(f"tools.{file.stem}" for file in ROOT.glob("tools/*.py")))
    with mock.patch.object(sys, "path", [str(ROOT), *sys.path]):
        modules = {name: importlib.import_module(name) for name in names}
    for name, module in modules.items():
        if not hasattr(module, "main"):  # what commands share
            continue
        parser = module.PARSER if hasattr(module, "PARSER") else module.command_line(module.__doc__)
        lines += [f"## {name.replace('.', '/')}.py", "", _as_markdown(module.__doc__ or ""), ""]
        for caption, part in _with_subcommands(parser):
            rows = [_row(action) for action in _shown(part)]
            lines += [f"{caption}\n"] if caption else []
            lines += [*markdown_table(("option", "default", "meaning"), rows), ""]
    return "\n".join(lines)


def _with_subcommands(parser: argparse.ArgumentParser, caption: str = "") -> Iterator[tuple[str, Any]]:
    if _shown(parser):
        yield caption, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from _with_subcommands(sub, f"{caption} `{name}`".strip())


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    no_row = (argparse._HelpAction, argparse._SubParsersAction)
    return [a for a in parser._actions if not isinstance(a, no_row) and a.help != argparse.SUPPRESS]


def _row(action: argparse.Action) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    choices = " `" + "|".join(map(str, action.choices)) + "`" if action.choices else ""
    value = action.default
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = " ".join(map(str, value))
    text = str(value).replace(f"{ROOT.as_posix()}/", "")
    if action.required:
        default = "required"
    elif isinstance(value, bool) or value in (None, ""):
        default = "on" if value is True and len(action.option_strings) > 1 else ""
    else:
        default = f"`{text}`" if len(text) <= MOST_LETTERS else f"`{text[:MOST_LETTERS]}...`"
    return names + choices, default, (action.help or "") % vars(action)


def _as_markdown(doc: str) -> str:
    """Return a docstring with its indented blocks and its bare command lines fenced, and names of pages as links."""
    blocks = []
    for block in doc.strip().split("\n\n"):
        if block.startswith("    ") or all(line.startswith(("python ", "torchrun ")) for line in block.splitlines()):
            blocks.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            text = re.sub(r"`?docs/(\w+\.md)`?", r"[\1](\1)", block)
            blocks.append(re.sub(r"(`[^`]*`)|<", lambda found: found[1] or "&lt;", text))
    return "\n\n".join(blocks)
