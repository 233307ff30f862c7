"""Python sources of a wheel as syntax trees: their classes, constants and annotations. Nothing is imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

UNIONS = ("Optional", "Union")
WRAPPERS = ("A", "Annotated", "SkipValidation", "ClassVar")  # the type is their first parameter


@dataclass(frozen=True)
class Sources:
    """The modules of a wheel whose paths start with one of some prefixes."""

    trees: Mapping[str, ast.Module]

    @classmethod
    def of_wheel(cls, wheel: Path, prefixes: tuple[str, ...]) -> Sources:
        """The modules of a wheel. Raises OSError or zipfile.BadZipFile."""
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py") and name.startswith(prefixes)]
            return cls({name: ast.parse(archive.read(name)) for name in names})

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Every class by its name."""
        nodes = (node for tree in self.trees.values() for node in tree.body)
        return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """Every module-level value by its name, such as a list of choices or an alias of a type."""
        found = {}
        for node in (node for tree in self.trees.values() for node in tree.body):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                found[node.target.id] = node.value
        return found

    def fields(self, name: str) -> dict[str, ast.AnnAssign]:
        """The annotated fields of a class, those of its bases first."""
        node = self.classes.get(name)
        if node is None:
            return {}
        inherited: dict[str, ast.AnnAssign] = {}
        for base in node.bases:
            inherited |= self.fields(last_name(base))
        own = (item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name))
        return inherited | {item.target.id: item for item in own}  # type: ignore[union-attr]

    def alternatives(self, annotation: ast.expr) -> Iterator[ast.expr]:
        """The parts of a union, with aliases, wrappers and Optional resolved; None among them is a Constant."""
        if isinstance(annotation, ast.BinOp):
            yield from self.alternatives(annotation.left)
            yield from self.alternatives(annotation.right)
        elif isinstance(annotation, ast.Subscript) and last_name(annotation.value) in (*UNIONS, *WRAPPERS):
            wrapped = last_name(annotation.value) in WRAPPERS
            for part in parameters(annotation)[: 1 if wrapped else None]:
                yield from self.alternatives(part)
        elif (alias := self.constants.get(last_name(annotation))) is not None and is_type(alias):
            yield from self.alternatives(alias)
        else:
            yield annotation

    def literals(self, annotation: ast.expr) -> list[Any]:
        """The values of a Literal, those of the Literals that it names included."""
        found: list[Any] = []
        for part in parameters(annotation):
            if isinstance(part, ast.Constant):
                found.append(part.value)
            elif (alias := self.constants.get(last_name(part))) is not None:
                found += self.literals(alias)
        return found

    def value(self, node: ast.expr | None) -> Any:
        """A literal value, or that of a constant; None where it is computed."""
        if isinstance(node, ast.Name):
            node = self.constants.get(node.id)
        try:
            return None if node is None else ast.literal_eval(node)
        except ValueError:
            return None


def is_type(node: ast.expr) -> bool:
    """Whether a constant's value is an alias of a type."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value) in ("Literal", "list", "List", "dict", "Dict", "tuple", *UNIONS, *WRAPPERS)
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


def last_name(node: ast.expr) -> str:
    """`Literal` of `typing.Literal` and of `Literal`; "" of anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def parameters(node: ast.expr) -> list[ast.expr]:
    """The parameters of a subscripted type."""
    if not isinstance(node, ast.Subscript):
        return []
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def keywords(call: ast.Call) -> dict[str, ast.expr]:
    """The named arguments of a call."""
    return {item.arg: item.value for item in call.keywords if item.arg}


def calls(node: ast.AST, name: str) -> Iterable[ast.Call]:
    """All calls of a function or method of that name."""
    return (item for item in ast.walk(node) if isinstance(item, ast.Call) and last_name(item.func) == name)
