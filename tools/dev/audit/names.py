"""Finds the torch_npu names that this project uses, and checks them and their arguments against a wheel.

Uses are found in the source: `torch_npu.x`, `torch.npu.x`, the vendor-neutral forms of `flow_grpo/runtime/device.py`
(`_module(kind).x`, `getattr(torch, kind).x`), and local variables bound to any of these. Where the vendor is chosen at
run time, the NPU is assumed.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.dev.audit.wheel import Definition, Wheel, signature_of

VENDOR = ("torch_npu", "torch.npu")
BACKEND = "hccl"
_WORDS = ("npu", "getattr(torch", "_module(")  # files without any of these are skipped


@dataclasses.dataclass(frozen=True)
class UnknownName:
    """One line of the report."""

    check: str  # "name", "environment", "operator" or "dtype"
    status: str  # "ok", "warn" or "fail"
    subject: str
    text: str  # what was found and, unless "ok", what to do


@dataclasses.dataclass(frozen=True)
class Use:
    """One place where a torch_npu name is used."""

    name: str  # dotted, starting with "torch_npu" or "torch.npu"
    place: str  # file:line
    arguments: int | None = None  # number of positional arguments, None if it is not called
    keywords: tuple[str, ...] = ()


def uses(sources: Sequence[Path], root: Path) -> list[Use]:
    """Return every use in files and below folders, in order, with places relative to `root`."""
    found = []
    for file in (file for source in sources for file in ([source] if source.suffix else sorted(source.rglob("*.py")))):
        text = file.read_text(encoding="utf-8")
        if not any(word in text for word in _WORDS):
            continue
        tree = ast.parse(text)
        place = file.relative_to(root).as_posix()
        for scope in ast.walk(tree):
            if isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
                found += _Scope(scope, place).uses()
    return found


def check_names(wheel: Wheel, found: Sequence[Use]) -> list[UnknownName]:
    """Return one finding per name and call signature, and one of the process group backend."""
    calls = {(use.name, use.arguments, use.keywords): use for use in reversed(found)}
    backend = UnknownName("name", "ok", BACKEND, "registered as a process group backend")
    if not wheel.calls("register_backend", BACKEND):
        text = "no such process group backend: change `process_group_backend`"
        backend = dataclasses.replace(backend, status="fail", text=text)
    return [*(_check(wheel, use) for use in reversed(calls.values())), backend]


def check_environment(wheel: Wheel, variables: Sequence[str]) -> list[UnknownName]:
    return [
        UnknownName("environment", "ok", variable, "found in a binary")
        if wheel.mentions(variable)
        else UnknownName("environment", "warn", variable, "not in the wheel: look for it in CANN's documents")
        for variable in variables
    ]


def _check(wheel: Wheel, use: Use) -> UnknownName:
    found = wheel.find(use.name)
    if found is None:
        text = f"not in {wheel.name}, used in {use.place}: use another name or leave it out for this version"
        return UnknownName("name", "fail", use.name, text)
    if use.arguments is None:
        return UnknownName("name", "ok", use.name, f"{found.kind} in {found.module}")
    return _check_call(use, found)


def _check_call(use: Use, found: Definition) -> UnknownName:
    called = f"{use.name}({', '.join(['_'] * (use.arguments or 0) + [f'{word}=_' for word in use.keywords])})"
    signature = signature_of(found)
    if signature is None:
        text = f"called in {use.place}, but its arguments cannot be read ({found.kind} in {found.module}): look at it"
        return UnknownName("name", "warn", called, text)
    try:
        signature.bind(*[None] * (use.arguments or 0), **dict.fromkeys(use.keywords))
    except TypeError as error:
        text = f"{error}: {found.module} has {signature}; change the call in {use.place}"
        return UnknownName("name", "fail", called, text)
    return UnknownName("name", "ok", called, f"{signature} in {found.module}")


class _Scope:
    """One module or function body, without nested functions, which are scopes of their own."""

    def __init__(self, scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef, place: str) -> None:
        self._body, self._place = scope.body, place
        self._known: dict[str, str] = {}
        for node in self._walk():
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                name = self._name(node.value)
                if isinstance(target, ast.Name) and name:
                    self._known[target.id] = name

    def uses(self) -> list[Use]:
        """Return the longest dotted names that start with a vendor module, and how they are called."""
        found: list[Use] = []
        inner: set[int] = set()  # ids of expressions inside a longer name
        for node in self._walk():
            name = self._name(node) if isinstance(node, ast.expr) and id(node) not in inner else ""
            if isinstance(node, ast.Call) and not name:
                called = self._name(node.func)
                if called.startswith(VENDOR):
                    words = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
                    found.append(Use(called, f"{self._place}:{node.lineno}", len(node.args), words))
                    inner |= {id(part) for part in ast.walk(node.func)}
            elif name.startswith(VENDOR):
                found.append(Use(name, f"{self._place}:{node.lineno}"))
                inner |= {id(part) for part in ast.walk(node)}
        return found

    def _walk(self) -> Iterator[ast.AST]:
        waiting: list[ast.AST] = list(reversed(self._body))
        while waiting:
            node = waiting.pop()
            yield node
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                waiting += reversed(list(ast.iter_child_nodes(node)))

    def _name(self, node: ast.expr) -> str:
        """Return the dotted name below torch or torch_npu that an expression refers to, resolving imports, or ""."""
        if isinstance(node, ast.Name):
            return node.id if node.id in ("torch", "torch_npu") else self._known.get(node.id, "")
        if isinstance(node, ast.Attribute):
            owner = self._name(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return self._named_by_call(node) if isinstance(node, ast.Call) and node.args else ""

    def _named_by_call(self, node: ast.Call) -> str:
        function, first = ast.unparse(node.func), node.args[0]
        if function in ("_module", "getattr"):
            owner, chosen = ("torch", first) if function == "_module" else (self._name(first), node.args[1])
            return f"{owner}.{_chosen(chosen)}" if owner and _chosen(chosen) else ""
        return _chosen(first) if function.endswith("import_module") else ""


def _chosen(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return "npu" if named in ("type", "kind") else ""
