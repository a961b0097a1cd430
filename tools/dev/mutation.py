"""How many faults does the suite find? Lines drawn at random are broken one by one, and the tests near them are run.

    python tools/dev/mutation.py --lines 80 --seed 17 --json mutation.json
    python tools/dev/mutation.py --tree ../other-checkout --lines 80 --seed 17 --json before.json

A break swaps an operator, shifts a number, or negates a condition on one line of maths, algorithm, data or runtime. The
tests near a line are those whose file imports its module, then those that import a module which imports it. A break
counts as found when one of them fails. The JSON is rewritten after every break, and a run resumes where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("maths", "algorithm", "data", "runtime")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
MOST_FILES = 8  # test files run per break
LONGEST_S = 200  # for them together


def main(words: Sequence[str] | None = None) -> int:
    """Break, run, report; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to break, in a copy (default: this one)")
    parser.add_argument("--lines", type=int, default=80, help="how many lines are drawn")
    parser.add_argument("--seed", type=int, default=17, help="of the draw")
    parser.add_argument("--json", type=Path, required=True, help="where the results are written, and read to go on")
    asked = parser.parse_args(words)
    found: dict[str, dict[str, Any]] = json.loads(asked.json.read_text()) if asked.json.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(asked.tree, tree, ignore=shutil.ignore_patterns(".*", "outputs", "data.*", "__pycache__"))
        for file, line in draw(tree, asked.lines, asked.seed):
            name = f"{file}:{line}"
            if name not in found:
                found[name] = try_break(tree, file, line)
                asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
                print(f"{found[name]['result']:8s} {name}  {found[name]['change']}", flush=True)
    results = [entry["result"] for entry in found.values()]
    print(f"found {results.count('found')} of {len(results)}")
    return 0


def draw(tree: Path, count: int, seed: int) -> list[tuple[str, int]]:
    """Return `count` lines that can be broken, as (file, line)."""
    lines = []
    for room in ROOMS:
        for file in sorted((tree / "flow_grpo" / room).rglob("*.py")):
            numbers = {node.lineno for node in breakable(ast.parse(file.read_text(encoding="utf-8")))}
            lines += [(file.relative_to(tree).as_posix(), number) for number in sorted(numbers)]
    return random.Random(seed).sample(lines, count)


def breakable(tree: ast.Module) -> Iterator[Any]:
    """Yield the expressions that a break can change, outside annotations and default arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
            if not (isinstance(node.op, ast.Mod | ast.Add) and isinstance(getattr(node, "left", None), ast.JoinedStr)):
                yield node
        elif isinstance(node, ast.Compare):
            if type(node.ops[0]) in SWAPS:
                yield node
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield node
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test


def changed(source: str, line: int) -> tuple[str, str]:
    """Return the source with one expression mutated, the first that `breakable` finds on `line`, and "OLD -> NEW"."""
    tree = ast.parse(source)
    node = next(node for node in breakable(tree) if node.lineno == line)
    before = ast.unparse(node)
    if isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd() if isinstance(node.op, ast.USub) else ast.Not()
        if isinstance(node.op, ast.Not):
            node.operand = ast.UnaryOp(ast.Not(), copy.deepcopy(node.operand))
    else:
        replacement = ast.UnaryOp(ast.Not(), copy.deepcopy(node))
        for parent in ast.walk(tree):
            if getattr(parent, "test", None) is node:
                parent.test = replacement  # type: ignore[attr-defined]
        node = replacement
    return ast.unparse(ast.fix_missing_locations(tree)), f"{before} -> {ast.unparse(node)}"


def try_break(tree: Path, file: str, line: int) -> dict[str, Any]:
    """Mutate a line, run the tests near it and restore the file; return a record of the mutation and what found it."""
    path = tree / file
    source = path.read_text(encoding="utf-8")
    tests = near(tree, file)
    text, change = changed(source, line)
    path.write_text(text, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "120", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=LONGEST_S, check=False)
        result = "found" if done.returncode == 1 else "missed" if done.returncode == 0 else "found"
    except subprocess.TimeoutExpired:
        result = "missed"
    finally:
        path.write_text(source, encoding="utf-8")
    return {"result": result, "change": change, "tests": tests}


def near(tree: Path, file: str) -> list[str]:
    """Return the test files to run for a source file, those that import it first, small ones first."""
    module = file.removesuffix(".py").replace("/", ".")
    sources = {path: path.read_text(encoding="utf-8") for path in (tree / "flow_grpo").rglob("*.py")}
    users = [path for path, text in sources.items() if imports(text, module)]
    names = [module] + [user.relative_to(tree).as_posix().removesuffix(".py").replace("/", ".") for user in users]
    tests = {path: path.read_text(encoding="utf-8") for path in (tree / "tests").rglob("test_*.py")}

    def rank(path: Path) -> tuple[bool, int]:
        return not imports(tests[path], module), len(tests[path])

    close = [path for path, text in tests.items() if any(imports(text, name) for name in names)]
    return [path.relative_to(tree).as_posix() for path in sorted(close, key=rank)[:MOST_FILES]]


def imports(text: str, module: str) -> bool:
    """Return whether a source imports a module by either form of the statement."""
    package, _, name = module.rpartition(".")
    whole = rf"^\s*(from {re.escape(module)} import|import {re.escape(module)}\b)"
    return re.search(rf"{whole}|^\s*from {re.escape(package)} import [^\n]*\b{name}\b", text, re.M) is not None


if __name__ == "__main__":
    sys.exit(main())
