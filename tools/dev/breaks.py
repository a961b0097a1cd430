"""How many of eighty planted faults does the suite find? Compare a checkout's tests with those of another.

    python tools/dev/breaks.py --json breaks.json
    python tools/dev/breaks.py --root ../other-checkout --json before.json --only 3,17
    python tools/dev/breaks.py --check

`breaks.json` beside this file lists the breaks: off by one, a wrong sign, a dropped mask, another rank's rows, noise
without its seed, a missing sort, a wrong place to resume from. A break is a list of forms, each (function, expression,
replacement); a checkout takes the first form that fits. A form fits where the expression stands exactly once in the
bodies of the functions of that qualified name in `flow_grpo`, wherever the file is and however the line is broken.
Where no form fits, the code has changed: carry the break over by hand, by another form at the end of its list.

Each break is made in a temporary copy, and the test files near it are run, at most eight, until one fails: those named
like the broken module, then those that import it, then those that import a module that does; of these first those that
name the function. A failure counts once the same test passes without the break. The JSON is rewritten
after every break, and a run resumes where it stopped; what ran out of time is unclear, and tried again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BREAKS = Path(__file__).with_suffix(".json")
MOST_FILES, FARTHEST = 8, 2  # test files run for a break, and imports between one and the broken module
LONGEST_S, LONGEST_TEST_S = 7200, 1200  # for the tests of a break, and for one of them: a break may hang
MOST_UNSOUND = 3  # tests that fail without the break as well and are left out, before a break is given up


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="checkout (default: this one)")
    parser.add_argument("--only", help="numbers of breaks, from 1, such as 3,17")
    parser.add_argument("--json", type=Path, help="where the results are written, and read to go on")
    parser.add_argument("--check", action="store_true", help="only say which breaks must be carried over by hand")
    asked = parser.parse_args(words)
    breaks = dict(enumerate(json.loads(BREAKS.read_text(encoding="utf-8")), 1))
    numbers = [int(number) for number in asked.only.split(",")] if asked.only else list(breaks)
    if asked.check:
        lost = [number for number in numbers if planted(asked.root, breaks[number]) is None]
        print("\n".join(f"carry over {number:2d} {breaks[number]}" for number in lost))
        return 1 if lost else 0
    known = json.loads(asked.json.read_text(encoding="utf-8")) if asked.json and asked.json.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(asked.root, tree, ignore=shutil.ignore_patterns(".*", "outputs", "wandb", "__pycache__"))
        for number in numbers:
            if known.get(str(number), {}).get("result") in ("found", "survived"):
                continue
            known[str(number)] = record = try_break(tree, breaks[number])
            print(f"{record['result']:10s} {number:2d} {record['break'][0]}  {record.get('by', '')}", flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    results = [known[str(number)]["result"] for number in numbers]
    print(f"found {results.count('found')} of {len(results)}, survived {results.count('survived')}")
    return 0


def planted(tree: Path, forms: Sequence[Sequence[str]]) -> tuple[Path, str, Sequence[str]] | None:
    """Return the file to break, its broken text and the form that fits, or None."""
    for form in forms:
        name, expression, replacement = form
        hits = []
        for path in sorted((tree / "flow_grpo").rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for begin, end in bodies(text, name):
                found = pattern(expression).finditer(text, begin, end)
                hits += [(path, text[: hit.start()] + replacement + text[hit.end() :]) for hit in found]
        if len(hits) == 1:
            ast.parse(hits[0][1])  # a replacement that cannot be read is a slip in the list
            return *hits[0], form
    return None


def bodies(text: str, name: str) -> list[tuple[int, int]]:
    """Return where the bodies of the functions of a qualified name begin and end in a text, docstrings left out."""
    if name.rpartition(".")[2] not in text:
        return []
    starts = [*itertools.accumulate((len(line) + 1 for line in text.split("\n")), initial=0)]
    scopes: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    found = []
    for prefix, scope in scopes:  # grows
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, ast.FunctionDef) and prefix + node.name == name:
                skipped = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
                found.append((starts[skipped or 0], starts[node.end_lineno or 0]))
            elif isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}{node.name}.", node))
    return found


def pattern(expression: str) -> re.Pattern[str]:
    words = re.findall(r"\w+|\S", expression)
    text = r"\s*".join(rf"(?:,\s*)?{re.escape(word)}" if word in ")]}" else re.escape(word) for word in words)
    return re.compile(rf"(?<!\w){text}" if words[0].isidentifier() else text)


def try_break(tree: Path, forms: Sequence[Sequence[str]]) -> dict[str, Any]:
    found = planted(tree, forms)
    if found is None:
        return {"result": "carry over", "break": forms[-1]}
    (path, broken, form), begun = found, time.monotonic()
    sound = path.read_text(encoding="utf-8")
    chosen = near(tree, path, form[0])
    record: dict[str, Any] = {"result": "unclear", "break": form, "tests": chosen, "unsound": []}
    while chosen and len(record["unsound"]) <= MOST_UNSOUND:
        path.write_text(broken, encoding="utf-8")
        try:
            code, output = run_tests(tree, [*chosen, *(f"--deselect={name}" for name in record["unsound"])])
        finally:
            path.write_text(sound, encoding="utf-8")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\S+)?)", output, re.MULTILINE)
        if code in (0, 5):  # passed, or nothing to run
            record["result"] = "survived"
            break
        if code is None or failed is None:
            record["output"] = output[-1500:]
            break
        if run_tests(tree, [failed[1]])[0] == 0:
            record |= {"result": "found", "by": failed[1], "by_timeout": "from pytest-timeout" in output}
            break
        record["unsound"].append(failed[1])
    return record | {"seconds": round(time.monotonic() - begun)}


def run_tests(tree: Path, arguments: Sequence[str]) -> tuple[int | None, str]:
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", str(LONGEST_TEST_S)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        # A file and a session of its own: a process that a broken test leaves behind must not keep a pipe open.
        process = subprocess.Popen(
            [*command, *arguments], cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return code, output.read()


def near(tree: Path, broken: Path, function: str) -> list[str]:
    texts, importers = imports(tree)
    distance, latest = {broken: 0}, {broken}
    for steps in range(1, FARTHEST + 1):
        latest = {path for one in latest for path in importers[one]} - distance.keys()
        distance |= dict.fromkeys(latest, steps)
    owner, _, name = function.rpartition(".")
    named = re.compile(rf"\b(?:{owner or name}|{name})\b")

    def likelihood(path: Path) -> tuple[bool, int, bool, int]:
        subject = path.stem.removeprefix("test_")
        related = subject.startswith(broken.stem) or broken.stem.startswith(subject)
        return not related, distance[path], not named.search(texts[path]), len(texts[path])

    tests = sorted((path for path in distance if path.name.startswith("test_")), key=likelihood)
    return [path.relative_to(tree).as_posix() for path in tests[:MOST_FILES]]


@functools.cache
def imports(tree: Path) -> tuple[dict[Path, str], dict[Path, set[Path]]]:
    files = [file for pattern in ("flow_grpo/**/*.py", "tests/**/*.py", "*.py") for file in tree.glob(pattern)]
    module = {path.relative_to(tree).with_suffix("").as_posix().replace("/", "."): path for path in files}
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    importers: dict[Path, set[Path]] = {path: set() for path in files}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names] + [node.module or ""]
            for name in set(names) & module.keys():
                importers[module[name]].add(path)
    return texts, importers


if __name__ == "__main__":
    sys.exit(main())
