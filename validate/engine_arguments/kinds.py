"""What a field's annotation makes of an argument: its kind, choices and bounds."""

from __future__ import annotations

import ast
from typing import Any

from ridgeplan.validate.engine_arguments.syntax import Sources, keywords, last_name

COLLECTIONS = ("list", "List", "tuple", "Tuple", "set", "Set")
NUMBERS = ("int", "float")
PARSERS = {
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size",
    "loads": "json",
    "int": "int",
    "float": "float",
    "str": "text",
}
BOUNDS = ("gt", "ge", "lt", "le")


def of_annotation(sources: Sources, annotation: ast.expr) -> dict[str, Any]:
    """The kind of a value by vLLM's rules (EngineArgs' `_compute_kwargs`), which SGLang's agree with.

    The kinds are flag, choice, list, size, int, float, json and text. An object with known fields names its class.
    """
    parts = list(sources.alternatives(annotation))
    names = [last_name(part.value) if isinstance(part, ast.Subscript) else last_name(part) for part in parts]
    objects = [name for name in names if name in sources.classes and sources.fields(name)]
    if objects:
        return {"kind": "json", "object": objects[0]}
    if "bool" in names:
        return {"kind": "flag"}
    if "Literal" in names:  # beside `str` too: then plugins may add values, and all others fail later
        values = [value for part in parts for value in sources.literals(part)]
        return {"kind": "choice", "choices": [value for value in values if value is not None]}
    if any(name in COLLECTIONS for name in names):
        return {"kind": "list"}
    for name in NUMBERS:
        if name in names:
            return {"kind": name}
    return {"kind": "json" if set(names) & {"dict", "Dict"} and "str" not in names else "text"}


def bounds(sources: Sources, default: ast.expr | None) -> dict[str, Any]:
    """The limits that pydantic's Field sets, if a field's default is one."""
    if not isinstance(default, ast.Call) or last_name(default.func) != "Field":
        return {}
    given = {name: sources.value(node) for name, node in keywords(default).items() if name in BOUNDS}
    return {name: value for name, value in given.items() if value is not None}


def of_field(sources: Sources, item: ast.AnnAssign) -> dict[str, Any]:
    """The kind of a dataclass's field, with its bounds."""
    return of_annotation(sources, item.annotation) | bounds(sources, item.value)


def of_call(sources: Sources, call: ast.Call) -> dict[str, Any]:
    """The kind that the named arguments of `add_argument`, or of SGLang's `Arg`, say; empty where they say none."""
    given = keywords(call)
    action = given.get("action")
    if action is not None:
        name = sources.value(action) or last_name(action)
        if name in ("store_true", "store_false") or "StoreTrue" in name or "StoreConst" in name:
            return {"kind": "switch"}
        return {"kind": "flag" if name == "BooleanOptionalAction" else "any"}
    choices = sources.value(given.get("choices"))
    if choices:
        return {"kind": "choice", "choices": choices}
    parser = given.get("type_parser") or given.get("type")
    if parser is not None:
        return {"kind": PARSERS.get(last_name(parser), "text")}
    return {"kind": "any"} if "nargs" in given or "choices" in given else {}
