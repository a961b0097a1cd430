"""Reads names, signatures and operators from a torch_npu wheel, without installing or importing it.

Python sources are parsed, the ATen operators with an NPU kernel come from `npu_native_functions*.yaml`, and binaries
are only searched for strings.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = "torch_npu"
OPERATOR_LISTS = re.compile(r"torch_npu/csrc/aten/npu_native_functions\w*\.yaml")
OPERATOR = re.compile(r"(?:- (?:func: )?|func: )([A-Za-z_][\w.]*)\s*(?:\(|$)")
_DEPTH = 20  # limit on re-export chains


@dataclasses.dataclass(frozen=True)
class Definition:
    """What a name in the wheel refers to."""

    kind: str  # "module", "function", "class", "instance" (of class `node`) or "value"
    node: ast.AST | None  # its syntax tree, if it has one
    module: str  # dotted name of the module that defines it


class Wheel:
    """A torch_npu wheel; raises ValueError if the file is something else."""

    def __init__(self, path: Path) -> None:
        try:
            self._archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} cannot be opened as a wheel ({error}); download it again") from error
        self._files = frozenset(self._archive.namelist())
        if f"{ROOT}/__init__.py" not in self._files:
            raise ValueError(f"{path} holds no package {ROOT}; pass a wheel of torch_npu")
        self.name = path.name

    @functools.cached_property
    def operators(self) -> frozenset[str]:
        """Names of the ATen operators with an NPU kernel, such as "add.Tensor"; "add" is the default overload."""
        lists = sorted(file for file in self._files if OPERATOR_LISTS.fullmatch(file))
        found = frozenset(name for file in lists for name in _supported(self._text(file)))
        if not found:
            raise ValueError(f"{self.name} lists no operators in torch_npu/csrc/aten; audit another version")
        return found

    def mentions(self, text: str) -> bool:
        return any(text.encode() in binary for binary in self._binaries)

    def find(self, dotted: str) -> Definition | None:
        """Resolve a name such as "torch.npu.set_device" or "torch_npu.profiler"; None if it does not exist."""
        if dotted.split(".")[:2] == ["torch", "npu"]:
            if not self.calls("_register_device_module", "npu"):
                return None
            dotted = dotted.replace("torch.npu", f"{ROOT}.npu", 1)
        first, *rest = dotted.split(".")
        return self._walk(Definition("module", None, first) if first == ROOT else None, rest)

    @functools.cached_property
    def _binaries(self) -> list[bytes]:
        return [self._archive.read(file) for file in sorted(self._files) if file.endswith(".so")]

    @functools.cached_property
    def _sources(self) -> dict[str, str]:
        modules = {file[:-3].replace("/", "."): file for file in self._files if file.endswith(".py")}
        return {name.removesuffix(".__init__"): file for name, file in modules.items() if name.startswith(ROOT)}

    def _text(self, file: str) -> str:
        return self._archive.read(file).decode("utf-8")

    @functools.cache  # noqa: B019
    def calls(self, function: str, first_argument: str) -> bool:
        pattern = re.compile(rf"""\b{function}\(\s*["']{first_argument}["']""")
        return any(pattern.search(self._text(file)) for file in self._sources.values())

    @functools.cache  # noqa: B019 - one wheel lives as long as the program
    def _definitions(self, module: str) -> tuple[ast.stmt, ...]:
        return tuple(_flat(ast.parse(self._text(self._sources[module])).body)) if module in self._sources else ()

    def _walk(self, found: Definition | None, parts: list[str]) -> Definition | None:
        for part in parts:
            found = None if found is None else self._member(found, part)
        return found

    def _member(self, owner: Definition, name: str) -> Definition | None:
        if owner.kind == "module":
            return self._in_module(owner.module, name, _DEPTH)
        # The attributes of `torch.npu.config` and the like are those that the class's `__setattr__` knows.
        for method in owner.node.body if isinstance(owner.node, ast.ClassDef) else ():
            known = {n.value for n in ast.walk(method) if isinstance(n, ast.Constant)}
            if isinstance(method, ast.FunctionDef) and method.name == "__setattr__" and name in known:
                return Definition("value", method, owner.module)
        return None

    def _in_module(self, module: str, name: str, depth: int) -> Definition | None:
        """Return what `name` is bound to once a module has been executed."""
        for statement in reversed(self._definitions(module)) if depth else ():
            found = self._by_statement(module, statement, name, depth)
            if found is not None:
                return found
        return Definition("module", None, f"{module}.{name}") if f"{module}.{name}" in self._sources else None

    def _by_statement(self, module: str, statement: ast.stmt, name: str, depth: int) -> Definition | None:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
            kind = "class" if isinstance(statement, ast.ClassDef) else "function"
            return Definition(kind, statement, module)
        if isinstance(statement, ast.ImportFrom):
            return self._imported(module, statement, name, depth)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return self._assigned(module, statement.value, depth)
        return None

    def _imported(self, module: str, statement: ast.ImportFrom, name: str, depth: int) -> Definition | None:
        package = module if self._sources[module].endswith("__init__.py") else module.rpartition(".")[0]
        source = importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
        names = {alias.asname or alias.name: alias.name for alias in statement.names}
        if name not in names:  # a star stands for what `__all__` lists, or without that for names without underscore
            assigned = [one for one in self._definitions(source) if isinstance(one, ast.Assign)]
            listed = [one.value for one in assigned if ast.unparse(one.targets[0]) == "__all__"]
            public = {n.value for one in listed for n in ast.walk(one) if isinstance(n, ast.Constant)}
            if "*" not in names or (name not in public if listed else name.startswith("_")):
                return None
        return self._in_module(source, names.get(name, name), depth - 1)

    def _assigned(self, module: str, value: ast.expr, depth: int) -> Definition:
        """Resolve the value of `name = value`: another name's definition, an instance of a class, or a plain value."""
        called = value.func if isinstance(value, ast.Call) else value
        found: Definition | None = None
        if isinstance(called, ast.Name | ast.Attribute) and depth:
            first, *rest = ast.unparse(called).split(".")
            found = self._walk(self._in_module(module, first, depth - 1), rest)
        if found is None or (isinstance(value, ast.Call) and found.kind != "class"):
            return Definition("value", value, module)
        return dataclasses.replace(found, kind="instance") if isinstance(value, ast.Call) else found


def _supported(text: str) -> Iterator[str]:
    """Yield the operator names below `supported:`; entries are `- name` or mappings with a `func`."""
    section = ""
    for line in text.splitlines():
        if line and line[0].isalpha():
            section = line.partition(":")[0]
        elif section == "supported" and (match := OPERATOR.match(line.strip())):
            yield match[1]


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for block in (statement.body, getattr(statement, "orelse", []), getattr(statement, "finalbody", [])):
                yield from _flat(block)


class _Source(str):
    """Source text of a default value; its repr is the text itself."""

    __slots__ = ()
    __repr__ = str.__str__


def signature_of(found: Definition) -> inspect.Signature | None:
    """Return the signature of a function, with the source text of each default in place of its value; else None."""
    if not isinstance(found.node, ast.FunctionDef):
        return None
    given, kind = found.node.args, inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    optional = [*zip(positional[::-1], given.defaults[::-1]), *zip(given.kwonlyargs, given.kw_defaults)]  # noqa: B905
    defaults = {argument: _Source(ast.unparse(default)) for argument, default in optional if default is not None}
    rows = (
        (kind.POSITIONAL_ONLY, given.posonlyargs),
        (kind.POSITIONAL_OR_KEYWORD, given.args),
        (kind.VAR_POSITIONAL, [given.vararg]),
        (kind.KEYWORD_ONLY, given.kwonlyargs),
        (kind.VAR_KEYWORD, [given.kwarg]),
    )
    named = [(which, argument) for which, arguments in rows for argument in arguments if argument]
    return inspect.Signature([kind(one.arg, which, default=defaults.get(one, kind.empty)) for which, one in named])
