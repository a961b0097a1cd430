"""What a torch_npu wheel offers, read without installing or importing it: names, signatures, operators.

A wheel is a zip archive. Its Python sources are parsed; its `npu_native_functions*.yaml` list the ATen operators that
have a kernel; of its binaries only the texts in them are looked at.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = "torch_npu"
OPERATOR_LISTS = re.compile(r"torch_npu/csrc/aten/npu_native_functions\w*\.yaml")
OPERATOR = re.compile(r"(?:- (?:func: )?|func: )([A-Za-z_][\w.]*)\s*(?:\(|$)")
_DEPTH = 20  # of imports that hand a name on


class UnreadableWheelError(ValueError):
    """The file is not a wheel of torch_npu, or lacks what is looked for in one."""


@dataclasses.dataclass(frozen=True)
class Definition:
    """What a name stands for in the wheel.

    Attributes:
        kind: "module", "function", "class", "instance" (of `node`), "value", or "binary": inside a compiled module.
        node: the syntax that defines it, where there is any.
        module: dotted name of the module it was found in.
    """

    kind: str
    node: ast.AST | None
    module: str


class Wheel:
    """One wheel of torch_npu.

    Raises:
        UnreadableWheelError: not a zip archive, or without a package torch_npu.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise UnreadableWheelError(f"{path} cannot be opened as a wheel ({error}); download it again") from error
        self._files = frozenset(self._archive.namelist())
        if f"{ROOT}/__init__.py" not in self._files:
            raise UnreadableWheelError(f"{path} holds no package {ROOT}; pass a wheel of torch_npu")
        self.name = path.name

    @functools.cached_property
    def operators(self) -> frozenset[str]:
        """Names of the ATen operators with a kernel for the NPU, such as "add.Tensor"; "add" is its default overload.

        Raises:
            UnreadableWheelError: the wheel ships no list of them.
        """
        lists = sorted(file for file in self._files if OPERATOR_LISTS.fullmatch(file))
        found = frozenset(name for file in lists for name in _supported(self._text(file)))
        if not found:
            raise UnreadableWheelError(f"{self.name} lists no operators in torch_npu/csrc/aten; audit another version")
        return found

    def mentions(self, text: str) -> bool:
        """Return whether the text stands in one of the wheel's binaries."""
        return any(text.encode() in binary for binary in self._binaries)

    def registers_backend(self, name: str) -> bool:
        """Return whether the wheel's sources register this process group backend with torch."""
        return self._calls("register_backend", name)

    def find(self, dotted: str) -> Definition | None:
        """Return what a name such as "torch.npu.set_device" or "torch_npu.profiler" stands for, or None."""
        if dotted.split(".")[:2] == ["torch", "npu"]:
            if not self._calls("_register_device_module", "npu"):
                return None
            dotted = dotted.replace("torch.npu", f"{ROOT}.npu", 1)
        first, *rest = dotted.split(".")
        found = Definition("module", None, first) if first == ROOT else None
        for part in rest:
            found = None if found is None else self._member(found, part)
        return found

    def signature(self, found: Definition) -> inspect.Signature | None:
        """Return how a function or class is called, or None where the sources do not tell."""
        node = found.node
        if found.kind == "class" and isinstance(node, ast.ClassDef):
            made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
            return _signature(made[0].args, skip=1) if made else None
        return _signature(node.args) if isinstance(node, ast.FunctionDef) else None

    @functools.cached_property
    def _binaries(self) -> list[bytes]:
        return [self._archive.read(file) for file in sorted(self._files) if file.endswith(".so")]

    @functools.cached_property
    def _sources(self) -> dict[str, str]:
        """Where each module is."""
        modules = {file[:-3].replace("/", "."): file for file in self._files if file.endswith(".py")}
        return {name.removesuffix(".__init__"): file for name, file in modules.items() if name.startswith(ROOT)}

    def _text(self, file: str) -> str:
        return self._archive.read(file).decode("utf-8")

    @functools.cache  # noqa: B019
    def _calls(self, function: str, first_argument: str) -> bool:
        pattern = re.compile(rf"""\b{function}\(\s*["']{first_argument}["']""")
        return any(pattern.search(self._text(file)) for file in self._sources.values())

    @functools.cache  # noqa: B019 - one wheel lives as long as the program
    def _definitions(self, module: str) -> tuple[ast.stmt, ...]:
        return tuple(_flat(ast.parse(self._text(self._sources[module])).body))

    def _member(self, owner: Definition, name: str) -> Definition | None:
        if owner.kind == "binary":
            return owner if self.mentions(name) else None
        if owner.kind == "module":
            return self._in_module(owner.module, name, _DEPTH)
        if isinstance(owner.node, ast.ClassDef):
            return _in_class(owner, owner.node, name)
        return None

    def _in_module(self, module: str, name: str, depth: int) -> Definition | None:
        """Return what `name` stands for at the end of a module's top level."""
        for statement in reversed(self._definitions(module)) if module in self._sources and depth else ():
            found = self._by_statement(module, statement, name, depth)
            if found is not None:
                return found
        return self._module(f"{module}.{name}")

    def _module(self, dotted: str) -> Definition | None:
        if dotted in self._sources:
            return Definition("module", None, dotted)
        stem = dotted.replace(".", "/")
        compiled = any(file.startswith(f"{stem}.") and file.endswith(".so") for file in self._files)
        return Definition("binary", None, dotted) if compiled else None

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
        source = self._source_of(module, statement)
        names = {alias.asname or alias.name: alias.name for alias in statement.names}
        if name not in names and not ("*" in names and self._is_public(source, name)):
            return None
        original = names.get(name, name)
        compiled = self._module(source) or self._module(source.rpartition(".")[0])  # one binary may hold many modules
        if compiled is None or compiled.kind == "module":
            return self._in_module(source, original, depth - 1)
        return self._member(compiled, original)

    def _source_of(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the dotted name of the module that `from ... import` reads."""
        if not statement.level:
            return statement.module or ""
        package = module if self._sources[module].endswith("__init__.py") else module.rpartition(".")[0]
        parents = package.split(".")[: len(package.split(".")) + 1 - statement.level]
        return ".".join([*parents, *filter(None, [statement.module])])

    def _is_public(self, module: str, name: str) -> bool:
        """Return whether `from module import *` brings the name, as `__all__` has it or else by its spelling."""
        for statement in self._definitions(module) if module in self._sources else ():
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
                return any(isinstance(n, ast.Constant) and n.value == name for n in ast.walk(statement.value))
        return not name.startswith("_")

    def _assigned(self, module: str, value: ast.expr, depth: int) -> Definition:
        """Return what `name = value` makes of a name: another name's meaning, an instance, or a plain value."""
        called = value.func if isinstance(value, ast.Call) else value
        found: Definition | None = None
        if isinstance(called, ast.Name | ast.Attribute) and depth:
            first, *rest = ast.unparse(called).split(".")
            found = self._in_module(module, first, depth - 1)
            for part in rest:
                found = None if found is None else self._member(found, part)
        if found is None or (isinstance(value, ast.Call) and found.kind != "class"):
            return Definition("value", value, module)
        return dataclasses.replace(found, kind="instance") if isinstance(value, ast.Call) else found


def _supported(text: str) -> Iterator[str]:
    """Yield the names below `supported:`, whose entries are `- name` or mappings with a `func`."""
    section = ""
    for line in text.splitlines():
        if line and line[0].isalpha():
            section = line.partition(":")[0]
        elif section == "supported" and (match := OPERATOR.match(line.strip())):
            yield match[1]


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those under `if`, `try` and `with` too."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for block in (statement.body, getattr(statement, "orelse", []), getattr(statement, "finalbody", [])):
                yield from _flat(block)


def _in_class(owner: Definition, node: ast.ClassDef, name: str) -> Definition | None:
    """Return a method, or an attribute: assigned in the body, or known to `__setattr__`."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return Definition("method", statement, owner.module)
        if isinstance(statement, ast.FunctionDef) and statement.name == "__setattr__":
            known = {n.value for n in ast.walk(statement) if isinstance(n, ast.Constant)}
            if name in known:
                return Definition("value", statement, owner.module)
        if isinstance(statement, ast.Assign) and any(ast.unparse(target) == name for target in statement.targets):
            return Definition("value", statement, owner.module)
    return None


class _Text(str):
    """A default value as its source spells it."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(arguments: ast.arguments, skip: int = 0) -> inspect.Signature:
    kinds = inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    optional = len(plain) - len(arguments.defaults)
    made = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_ONLY if place < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if place < optional else _Text(ast.unparse(arguments.defaults[place - optional])),
        )
        for place, argument in enumerate(plain)
    ][skip:]
    made += [kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL)] if arguments.vararg else []
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shown = kinds.empty if default is None else _Text(ast.unparse(default))
        made.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=shown))
    made += [kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD)] if arguments.kwarg else []
    return inspect.Signature(made)
