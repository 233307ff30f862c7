"""The arguments that an engine's serve command takes, by version, and a parser of them.

`engine_arguments` writes the files from the engines' wheels.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.plan import PlanError, require

FOLDER = Path(__file__).with_name("schemas")
SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


class Rejected(ValueError):
    """A command that the engine's parser would not take."""


@dataclass(frozen=True)
class Schema:
    """Arguments of one version of an engine.

    arguments: the kind, and choices or bounds, of each argument by name. objects: the same for the fields of arguments
    that are JSON objects.
    """

    engine: str
    version: str
    source: str
    arguments: Mapping[str, Mapping[str, Any]]
    objects: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def allows(self, name: str, value: object = None) -> bool:
        """Whether the engine has this argument and, if it lists choices, this choice."""
        argument = self.arguments.get(name)
        return argument is not None and (value is None or value in argument.get("choices", [value]))

    def has_field(self, name: str, field: str) -> bool:
        """Whether an argument is an object with this field."""
        return field in self.objects.get(self.arguments.get(name, {}).get("object", ""), {})

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """The values of a serve command's words after the model. Raises Rejected, as the engine's parser would."""
        return vars(self._parser().parse_args(list(words)))

    def _parser(self) -> argparse.ArgumentParser:
        parser = _Parser(prog=self.engine, allow_abbrev=False, add_help=False)
        parser.add_argument("model_tag", nargs="?")
        added: set[str] = set()
        for argument in self.arguments.values():
            if argument["names"][0] not in added:
                added.add(argument["names"][0])
                parser.add_argument(*argument["names"], **self._options(argument))
        return parser

    def _options(self, argument: Mapping[str, Any]) -> dict[str, Any]:
        """What `add_argument` takes for a kind of argument."""
        kind = argument["kind"]
        if kind == "flag":
            return {"action": argparse.BooleanOptionalAction}
        if kind == "switch":
            return {"action": "store_true"}

        def read(text: str) -> Any:
            return self.checked(argument, _READERS.get(kind, str)(text))

        return {"type": read, "nargs": "+" if kind == "list" else None}

    def checked(self, argument: Mapping[str, Any], value: Any) -> Any:
        """The value, unchanged. Raises Rejected if it breaks the argument's choices, bounds or fields."""
        if "choices" in argument and value not in argument["choices"]:
            raise Rejected(f"{value!r} is not one of {argument['choices']}")
        broken = [f"{rule} {argument[rule]}" for rule, holds in _BOUNDS.items() if rule in argument
                  and not holds(value, argument[rule])]  # fmt: skip
        if broken:
            raise Rejected(f"{value!r} is not {' and '.join(broken)}")
        known = self.objects.get(argument.get("object", ""))
        if known is not None and isinstance(value, dict):
            for field, item in value.items():
                if field not in known:
                    raise Rejected(f"{field!r} is not a field of {argument['object']}")
                self.checked(known[field], item)
        return value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises instead of leaving the process."""
        raise Rejected(message)


def _size(text: str) -> int:
    """A whole number, `auto` as -1, or a number with a suffix: k is 1000, K is 1024."""
    match = SIZE.fullmatch(text)
    if match is None:
        return -1 if text == "auto" else int(text)
    base = 1000 if match[2].islower() else 1024
    return int(float(match[1]) * base ** ("kmgt".index(match[2].lower()) + 1))


_READERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "json": json.loads, "size": _size}
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "gt": lambda value, limit: value > limit,
    "ge": lambda value, limit: value >= limit,
    "lt": lambda value, limit: value < limit,
    "le": lambda value, limit: value <= limit,
}


def versions(engine: str) -> tuple[str, ...]:
    """The versions of an engine whose arguments are known, oldest first."""
    names = (path.stem.removeprefix(f"{engine}-") for path in FOLDER.glob(f"{engine}-*.json"))
    return tuple(sorted(names, key=ordered))


def schema_for(engine: str, version: str | None = None) -> Schema:
    """The arguments of a version, or of the nearest older one that is known; by default of the latest.

    Raises PlanError for a version older than all that are known, for one newer than the latest (another patch of that
    release has the same arguments), and for what is not a version.
    """
    known = versions(engine)
    if version is None:
        return _load(engine, known[-1])
    readable = re.fullmatch(r"\d+(\.\d+)*", version) is not None
    older = [candidate for candidate in known if ordered(candidate) <= ordered(version)] if readable else []
    newer = ordered(version)[:2] > ordered(known[-1])[:2]
    allowed = f"{known[0]} up to {known[-1]} (known: {', '.join(known)})"
    require(bool(older) and not newer, f"{engine} version {brief(version)} is not known; allowed: {allowed}")
    return _load(engine, older[-1])


def ordered(version: str) -> tuple[int, ...]:
    """`0.27.1` as (0, 27, 1), which sorts."""
    return tuple(map(int, re.findall(r"\d+", version)))


@cache
def _load(engine: str, version: str) -> Schema:
    document = json.loads((FOLDER / f"{engine}-{version}.json").read_text(encoding="utf-8"))
    arguments = {name: argument for argument in document["arguments"] for name in argument["names"]}
    return Schema(document["engine"], document["version"], document["source"], arguments, document["objects"])


__all__ = ["FOLDER", "PlanError", "Rejected", "Schema", "ordered", "schema_for", "versions"]
