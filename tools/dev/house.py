"""How much house is there? Lines, small functions and doors, as JSON.

    python tools/dev/house.py
    python tools/dev/house.py --root ../other-checkout

**Lines** are those of the Python files: of the source (`flow_grpo`, `config`, `tools`, `train_grpo.py`, `examples`) and
of the tests. **Functions** are the `def`s of the source, methods and nested ones included. One has **one caller** if no
other function bears its name, and the source reads that name exactly once outside the function's own body, as a name or
an attribute (an import is no reading), and calls it there; names that begin with two underscores are left out. It is
**small** if its body, its docstring aside, spans at most four lines. **Doors** are the files and folders of a room of
`flow_grpo`, `__init__.py` aside; `maths` may have as many as it likes.

benchmarks/house_34686a4.json holds the figures of commit 34686a4. Counted by hand it had 584 functions with one caller,
151 of them small: compare figures of this program with one another only.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = ("config", "flow_grpo", "tools", "train_grpo.py", "examples")
SMALL, MOST = 4, 14  # lines of a small function's body, doors of a room


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="checkout (default: this one)")
    print(json.dumps(count(parser.parse_args(words).root.resolve()), indent=1))
    return 0


def count(root: Path) -> dict[str, Any]:
    texts = {path: path.read_text(encoding="utf-8") for path in python_files(root, SOURCE)}
    functions, single = one_caller([ast.parse(text) for text in texts.values()])
    small = 0
    for one in single:
        body = one.body[1:] if ast.get_docstring(one, clean=False) is not None else one.body
        small += not body or (body[-1].end_lineno or 0) - body[0].lineno < SMALL
    rooms = [path.parent for path in sorted((root / "flow_grpo").glob("*/__init__.py"))]
    doors = {
        room.name: len([*room.glob("*.py"), *room.glob("*/__init__.py")]) - 1 for room in rooms if room.name != "maths"
    }
    return {
        "lines of source": sum(len(text.splitlines()) for text in texts.values()),
        "lines of tests": sum(len(path.read_text("utf-8").splitlines()) for path in python_files(root, ("tests",))),
        "lines of train_grpo.py": len(texts.get(root / "train_grpo.py", "").splitlines()),
        "functions": functions,
        "functions with one caller": len(single),
        "small functions with one caller": small,
        "rooms with more than 14 doors": {room: found for room, found in doors.items() if found > MOST},
    }


def python_files(root: Path, names: Sequence[str]) -> list[Path]:
    paths = [path for name in names for path in (root / name, *sorted((root / name).rglob("*.py")))]
    return [path for path in paths if path.suffix == ".py" and path.is_file()]


def one_caller(trees: Sequence[ast.Module]) -> tuple[int, list[ast.FunctionDef]]:
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    bearers = Counter(function.name for function in functions if not function.name.startswith("__"))
    read = Counter(name for tree in trees for name in names_in(tree, called=False))
    called = Counter(name for tree in trees for name in names_in(tree, called=True))
    for function in functions:  # leave out what calls itself
        read[function.name] -= names_in(function, called=False).count(function.name)
        called[function.name] -= names_in(function, called=True).count(function.name)
    return len(functions), [one for one in functions if bearers[one.name] == read[one.name] == called[one.name] == 1]


def names_in(tree: ast.AST, *, called: bool) -> list[str]:
    nodes = list(ast.walk(tree))
    nodes = [node.func for node in nodes if isinstance(node, ast.Call)] if called else nodes
    return [getattr(node, "attr", None) or node.id for node in nodes if isinstance(node, ast.Attribute | ast.Name)]


if __name__ == "__main__":
    sys.exit(main())
