"""Rules of CONTRIBUTING.md that ruff and import-linter cannot check, read from the source."""

import ast
import dataclasses
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from flow_grpo.settings.schema import Config

ROOT = Path(__file__).resolve().parents[1]

MAX_FILE_LINES = 500  # more wants a reason
MAX_FUNCTION_LINES = 60
MAX_NESTING = 4

MAY_NAME_DEVICES = {
    "flow_grpo/runtime/device.py",
    "flow_grpo/settings/schema.py",  # lists what a user may write for config.device
    # Read a vendor's wheel, and stand in for its device.
    "tools/dev/audit_npu.py",
    "tools/dev/audit/names.py",
    "tools/dev/audit/step.py",
    "tools/dev/audit/wheel.py",
}
CPU_MATHS = (
    # Poses, rewards and noise levels are on the CPU; sde.py and loss.py take tensors of the device.
    "flow_grpo/maths/advantages.py",
    "flow_grpo/maths/benchmarks.py",
    "flow_grpo/maths/path_errors.py",
    "flow_grpo/maths/poses.py",
    "flow_grpo/maths/reward_rules.py",
    "flow_grpo/maths/schedule.py",
    "flow_grpo/data/",  # poses, in metres
    "flow_grpo/rewards/",  # scored on the CPU
    "flow_grpo/algorithm/groups/",  # gathered rewards, on the CPU
)
# Keep float64 inputs as float64; only tests pass them, on the CPU.
KEEP_DOUBLES = {("flow_grpo/maths/sde.py", "_like"), ("flow_grpo/maths/sde.py", "_full_precision")}
UNREAD = {("sample", "num_image_per_prompt")}  # only compared with sample.k, by the checks


@dataclasses.dataclass(frozen=True)
class Source:
    path: str  # relative to the project, with forward slashes
    tree: ast.Module
    lines: int


@functools.cache
def sources(*places: str) -> tuple[Source, ...]:
    found = []
    for place in places or ("flow_grpo", "config", "tools", "train_grpo.py"):
        files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
        for file in filter(Path.is_file, files):
            text = file.read_text(encoding="utf-8")
            found.append(Source(file.relative_to(ROOT).as_posix(), ast.parse(text), len(text.splitlines())))
    return tuple(found)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every imported module, and "module.name" for names imported from one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and last_name(node.func) == "import_module":
            yield from (str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant))


def last_name(node: ast.AST) -> str:
    """Return the last name of `a`, `a.b` or `a.b(...)`."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def dotted_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def at(source: Source, node: ast.AST, what: str) -> str:
    return f"{source.path}:{getattr(node, 'lineno', 0)} {what}"


def _docstrings(tree: ast.AST) -> set[int]:
    return {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


def _imports_any(source: Source, *libraries: str) -> list[str]:
    wanted = re.compile(rf"^({'|'.join(map(re.escape, libraries))})(\.|$)")
    return [f"{source.path} imports {name}" for name in imports(source.tree) if wanted.match(name)]


def refuse(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


# --- the import rule


def test_programs_import_the_library_before_anything_that_imports_torch() -> None:
    """flow_grpo stops torch from loading device plug-ins on import, so it must be imported first."""
    without_torch = {*sys.stdlib_module_names, "__future__", "psutil", "tqdm"}
    places = ("train_grpo.py", "examples", "tools", "benchmarks", "tests/saboteur.py")
    programs = list(filter(_is_program, sources(*places)))
    assert len(programs) > 20
    wrong = []
    for program in [*programs, *sources("tools/common.py")]:  # which a program may import first
        names = [name for node in program.tree.body for name in imports(node)]
        first = next((name for name in names if name.split(".")[0] not in without_torch), "flow_grpo.")
        if not first.startswith(("flow_grpo", "train_grpo", "tools.common.")):
            wrong.append(f"{program.path} imports {first} before flow_grpo")
    refuse(wrong)


def test_programs_guard_the_model_libraries_that_they_and_their_helpers_import() -> None:
    """diffusers and transformers import torch_npu; flow_grpo.models loads it first, or hides one that cannot load."""
    guarded, wrong = 0, []
    for program in filter(_is_program, sources("tools")):
        names = [name for node in program.tree.body for name in imports(node)]
        reaching = [place for place, name in enumerate(names) if _reaches_model_libraries(name)]
        if reaching or any(map(_reaches_model_libraries, imports(program.tree))):
            guarded += 1
            if not any(name.startswith("flow_grpo.models") for name in names[: min(reaching, default=len(names))]):
                wrong.append(f"{program.path} reaches diffusers or transformers before flow_grpo.models")
    assert guarded >= 4
    refuse(wrong)


@functools.cache
def _reaches_model_libraries(name: str) -> bool:
    """Return whether an imported name is a model library's, or a module below tools/ that imports one."""
    if name.partition(".")[0] in ("diffusers", "transformers"):
        return True
    parts = name.split(".")
    if parts[0] != "tools" or len(parts) == 1:
        return False
    helpers = [f"{'/'.join(parts[:end])}.py" for end in range(2, len(parts) + 1)]
    return any(_reaches_model_libraries(other) for helper in sources(*helpers) for other in imports(helper.tree))


def _is_program(source: Source) -> bool:
    return any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in source.tree.body)


def test_the_library_imports_no_program_and_no_recipe() -> None:
    programs = ("config", "tools", "tests", "train_grpo")
    refuse([text for s in sources("flow_grpo") for text in _imports_any(s, *programs)])
    refuse([text for s in sources("train_grpo.py", "config") for text in _imports_any(s, "tools", "tests")])


def test_maths_needs_torch_and_scipy_only() -> None:
    known = {"torch", "scipy", "flow_grpo", *sys.stdlib_module_names}
    found = [f"{s.path} imports {name}" for s in sources("flow_grpo/maths") for name in imports(s.tree)]
    refuse([text for text in found if text.split()[-1].split(".")[0] not in known])


# --- vendors and number types


# Device strings also as the beginning of an f-string.
VENDOR_TEXT = re.compile(r"^(cuda|npu)(:\d*)?$|nccl|hccl|torch_npu|^(CUDA|CUBLAS|ASCEND|PYTORCH_NPU)_", re.IGNORECASE)
VENDOR_NAMES = ("torch.cuda", "torch.npu", "torch.backends.cuda", "torch.backends.cudnn", "torch.version.cuda")


def _vendor_words(source: Source) -> Iterator[str]:
    reader_texts = _docstrings(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and (
            dotted_name(node) in VENDOR_NAMES or node.attr in ("is_cuda", "is_npu")
        ):
            yield at(source, node, dotted_name(node) or node.attr)
        elif isinstance(node, ast.Name) and node.id == "torch_npu":
            yield at(source, node, node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("cuda", "npu"):
            yield at(source, node, f".{node.func.attr}()")
        elif isinstance(node, ast.Constant) and id(node) not in reader_texts and VENDOR_TEXT.search(str(node.value)):
            yield at(source, node, repr(node.value))


def test_vendor_words_stay_in_the_device_module() -> None:
    others = [source for source in sources() if source.path not in MAY_NAME_DEVICES]
    refuse([text for source in others for text in _vendor_words(source)])
    refuse([text for source in others for text in _imports_any(source, "torch_npu", *VENDOR_NAMES)])


CONSTRUCTORS = ("torch.tensor", "torch.zeros", "torch.ones", "torch.full", "torch.empty")
WIDE_TYPES = ("float64", "double", "complex64", "complex128")


def _doubles(source: Source) -> Iterator[str]:
    """Yield uses of float64 that may meet a device tensor: constructors without a device, and .cpu() first, may not."""
    on_cpu = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and (source.path, node.name) in KEEP_DOUBLES:
            on_cpu |= {id(inner) for inner in ast.walk(node)}
        if isinstance(node, ast.Call) and dotted_name(node.func) in CONSTRUCTORS:
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            on_cpu |= {id(named["dtype"])} if "dtype" in named and "device" not in named else set()
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and last_name(node.value.func) == "cpu"
        ):
            on_cpu.add(id(node))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in WIDE_TYPES and id(node) not in on_cpu:
            yield at(source, node, node.attr)


def test_what_may_use_float64_does() -> None:
    used = {text.split(":")[0] for source in sources() for text in _doubles(source)}
    refuse([place for place in CPU_MATHS if not any(path.startswith(place) for path in used)])
    functions = {(s.path, n.name) for s in sources() for n in ast.walk(s.tree) if isinstance(n, ast.FunctionDef)}
    refuse([str(kept) for kept in KEEP_DOUBLES - functions])


def test_float64_is_for_maths_on_the_cpu() -> None:
    others = [source for source in sources() if not source.path.startswith((*CPU_MATHS, "tools/"))]
    refuse([text for source in others for text in _doubles(source)])


@pytest.mark.parametrize(
    ("search", "line", "found"),
    [
        (_vendor_words, "torch.cuda.synchronize()", 1),
        (_vendor_words, "video.cuda()", 1),
        (_vendor_words, "video.to('cuda:1')", 1),
        (_vendor_words, "video.to(f'cuda:{rank}')", 1),
        (_vendor_words, "os.environ['ASCEND_RT_VISIBLE_DEVICES']", 1),
        (_vendor_words, "torch.backends.cudnn.allow_tf32 = False", 1),
        (_vendor_words, "video.is_cuda", 1),
        (_vendor_words, "init('cpu:gloo,npu:HCCL')", 1),
        (_vendor_words, "import torch_npu\ntorch_npu.npu", 1),
        (_vendor_words, "run('my_recam_8npu')", 0),
        (_vendor_words, "def f():\n    'cuda'", 0),
        (_doubles, "x.double()", 1),
        (_doubles, "x.double().cpu()", 1),
        (_doubles, "x.cpu().double()", 0),
        (_doubles, "x.to(torch.float64)", 1),
        (_doubles, "torch.zeros(3, dtype=torch.float64)", 0),
        (_doubles, "torch.zeros(3, dtype=torch.float64, device=device)", 1),
    ],
)
def test_searches_find_vendor_words_in_use_and_float64_that_may_meet_a_device(search, line: str, found: int) -> None:
    assert len(list(search(Source("x.py", ast.parse(line), 1)))) == found


# --- things that are not done


def test_objects_are_never_gathered() -> None:
    """They are pickled for everybody, and device tensors come back on the sender's device."""
    banned = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
    library = sources("flow_grpo", "config", "train_grpo.py")
    refuse([at(s, node, last_name(node)) for s in library for node in ast.walk(s.tree) if last_name(node) in banned])


# --- every knob is read


def _sections() -> dict[str, str]:
    return {name: hint.__name__ for name, hint in get_type_hints(Config).items() if dataclasses.is_dataclass(hint)}


def _fields() -> set[tuple[str, str]]:
    """Return every (section, field); the fields of Config itself are of section "config"."""
    hints = get_type_hints(Config)
    found = {("config", name) for name in hints if name not in _sections()}
    return found | {(section, field.name) for section in _sections() for field in dataclasses.fields(hints[section])}


def _reads(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (section, field) of every `sample.k`, `config.sample.k`, `sample_cfg.k`, or x.k where x: SampleConfig."""
    sections = {cls: name for name, cls in _sections().items()} | {"Config": "config"}
    aliases = {"config": {"config"}, "cfg": {"config"}} | {name: {name} for name in _sections()}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else last_name(node.target)
            words = re.findall(r"\w+", ast.unparse(node.annotation))
            aliases.setdefault(name, set()).update(sections[word] for word in words if word in sections)
        elif isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
            for target, value in pairs:
                if isinstance(value, ast.Attribute) and value.attr in _sections():
                    aliases.setdefault(last_name(target), set()).add(value.attr)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = last_name(node.value)
            for name in (owner, re.sub(r"^_|_(config|cfg)$", "", owner)):
                yield from ((section, node.attr) for section in aliases.get(name, ()))


def test_every_knob_is_read_outside_the_configuration() -> None:
    asks = ("flow_grpo/settings/objectives.py", "flow_grpo/settings/sampling.py")  # of the recipe, for several rooms
    readers = [
        s
        for s in sources("flow_grpo", "train_grpo.py")
        if s.path in asks or not s.path.startswith("flow_grpo/settings")
    ]
    read = {pair for source in readers for pair in _reads(source.tree)}
    unread = sorted(f"{section}.{field}" for section, field in _fields() - read - UNREAD)
    refuse(unread)


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("print(config.sample.k)", ("sample", "k")),
        ("print(self.sample.k)", ("sample", "k")),
        ("print(sample_cfg.k)", ("sample", "k")),
        ("def f(settings: SampleConfig | None): return settings.k", ("sample", "k")),
        ("class A:\n    s: 'SampleConfig'\n    def f(self): return self.s.k", ("sample", "k")),
        ("a, b = config.sample, config.train\nprint(a.k)", ("sample", "k")),
        ("def f(run: Config): return run.seed", ("config", "seed")),
    ],
)
def test_the_search_for_reads_follows_names_and_annotations(code: str, read: tuple[str, str]) -> None:
    assert read in set(_reads(ast.parse(code)))
    assert read not in set(_reads(ast.parse("print(other.k, other.seed)\nsample.k = 3\nconfig.seed = 1")))


# --- sizes


def test_files_stay_within_their_budget() -> None:
    refuse([f"{s.path}: {s.lines} lines" for s in sources() if s.lines > MAX_FILE_LINES])


def _function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines without its docstring."""
    first = function.body[0]
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if text else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def _nesting(statements: list[ast.stmt]) -> int:
    """Return the depth of nested blocks; an elif is as deep as its if, an inner function starts from 0."""
    deepest = 0
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [part.body for name in ("handlers", "cases") for part in getattr(statement, name, [])]
        for block in filter(None, blocks):
            elif_ = isinstance(statement, ast.If) and block is statement.orelse and isinstance(block[0], ast.If)
            deepest = max(deepest, _nesting(block) + (0 if elif_ and len(block) == 1 else 1))
    return deepest


def test_functions_stay_within_their_budget() -> None:
    wrong = []
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if _function_lines(node) > MAX_FUNCTION_LINES:
                    wrong.append(at(source, node, f"{node.name}: {_function_lines(node)} lines"))
                if _nesting(node.body) > MAX_NESTING:
                    wrong.append(at(source, node, f"{node.name}: {_nesting(node.body)} blocks deep"))
    refuse(wrong)


@pytest.mark.parametrize(
    ("code", "depth"),
    [
        ("x = 1", 0),
        ("if a:\n  b", 1),
        ("if a:\n  b\nelif c:\n  d\nelif e:\n  f", 1),
        ("for a in b:\n  try:\n    c\n  except d:\n    with e:\n      f", 3),
        ("match a:\n  case 1:\n    if b:\n      c", 2),
        ("if a:\n  def f():\n    if b:\n      c", 1),
    ],
)
def test_nesting_counts_blocks(code: str, depth: int) -> None:
    assert _nesting(ast.parse(code).body) == depth
