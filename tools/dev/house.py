"""How much house is there? Lines, small functions, doors, and what one epoch of the demo walks through, as JSON.

    python tools/dev/house.py
    python tools/dev/house.py --root ../other-checkout --epoch

**Lines** are those of the Python files: of the source (`flow_grpo`, `config`, `tools`, `train_grpo.py`, `examples`) and
of the tests. **Functions** are the `def`s of the source, methods and nested ones included. One has **one caller** if no
other function bears its name, and the source reads that name exactly once outside the function's own body, as a name or
an attribute (an import is no reading), and calls it there; names that begin with two underscores are left out. It is
**small** if its body, its docstring aside, spans at most four lines. **Doors** are the files and folders of a room of
`flow_grpo`, `__init__.py` aside; `maths` may have as many as it likes.

**The epoch** is `train_epoch`, wherever it stands, of `tiny_recam` on one rank with one batch of 16 samples, from its
entry to its return. Counted are calls of the checkout's own code in `flow_grpo` and `train_grpo.py`, as
`sys.setprofile` reports them: a comprehension is a call (before Python 3.12), and a generator is entered once for each
item; functions leave comprehensions, generator expressions and lambdas out. The other threads, which draw and write,
differ a little from run to run. The depth of `velocity` is the number of such frames below `train_epoch`, `velocity`
included: the least and the most of all calls.

benchmarks/house_34686a4.json holds the figures of commit 34686a4. Counted by hand it had 584 functions with one caller,
151 of them small, and an epoch that entered 601 code objects of 80 files in 6,036 calls, velocity 9 frames deep:
compare figures of this program with one another only.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = ("config", "flow_grpo", "tools", "train_grpo.py", "examples")
SMALL, MOST = 4, 14  # lines of a small function's body, doors of a room
# One batch of 16 samples, and as little as possible before and after it.
EPOCH = ["num_epochs=1", "doctor=off", "device=cpu", "sample.num_batches_per_epoch=1", "eval.every=0"]
EPOCH += ["eval.num_conditions=8", "run_name=house"]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="checkout (default: this one)")
    parser.add_argument("--epoch", action="store_true", help="run one epoch of the demo as well, a minute or two")
    asked = parser.parse_args(words)
    root = asked.root.resolve()
    print(json.dumps(count(root) | (run_epoch(root) if asked.epoch else {}), indent=1))
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


def run_epoch(root: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "trace.json"
        program = "import sys, house; house.trace(*sys.argv[1:3], sys.argv[3:])"
        command = [sys.executable, "-c", program, str(root), str(result), "--config", "config/grpo.py:tiny_recam"]
        paths = os.pathsep.join([str(root), str(Path(__file__).resolve().parent)])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command += [f"--config.{knob}" for knob in (*EPOCH, f"data.root={folder}/world", f"output_root={folder}/runs")]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not result.exists():
            raise RuntimeError(f"the demo ended with code {done.returncode}, traced: {result.exists()}\n{done.stderr}")
        return dict(json.loads(result.read_text(encoding="utf-8")))


def trace(root: str, result: str, words: Sequence[str]) -> None:
    """Run a checkout's train_grpo.py in this process, and write what its epoch enters as JSON."""
    ours, main_thread = (f"{root}/flow_grpo/", f"{root}/train_grpo.py"), threading.get_ident()
    entered, in_main, depths, epoch = Counter[Any](), Counter[Any](), set[int](), list[FrameType]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "return" and frame in epoch:
            epoch.clear()
        if event != "call" or not code.co_filename.startswith(ours):
            return
        if code.co_name == "train_epoch":
            epoch.append(frame)
        if epoch:
            entered[code] += 1
            in_main[code] += threading.get_ident() == main_thread
            if code.co_name == "velocity" and threading.get_ident() == main_thread:
                above = [one for one, _ in traceback.walk_stack(frame)]
                depths.add(sum(one.f_code.co_filename.startswith(ours) for one in above[: above.index(epoch[0])]))

    sys.argv = [f"{root}/train_grpo.py", *words]
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.setprofile(None)
        figures: dict[str, Any] = {}
        for where, counter in {"epoch": entered, "epoch, main thread": +in_main}.items():
            files = {code.co_filename for code in counter}
            named = sum(code.co_name[0] != "<" for code in counter)
            figures |= {f"{where}: code objects": len(counter), f"{where}: functions": named}
            figures[f"{where}: files"] = len(files)
            figures |= {f"{where}: calls": sum(counter.values())}
        if entered:
            figures["epoch: depth of velocity"] = [min(depths), max(depths)] if depths else []
            Path(result).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
