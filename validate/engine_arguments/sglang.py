"""The arguments of `sglang serve`: annotated fields of the classes in arg_groups/fields, and a few by hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from ridgeplan.validate.engine_arguments.kinds import of_annotation, of_call
from ridgeplan.validate.engine_arguments.syntax import Sources, calls, keywords, last_name, parameters

PREFIXES = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/")
FIELDS = "sglang/srt/arg_groups/fields/"


def arguments(sources: Sources) -> Iterator[dict[str, Any]]:
    """Every argument: its names, kind and choices."""
    for path, tree in sources.trees.items():
        if path.startswith(FIELDS):
            for item in (item for item in ast.walk(tree) if isinstance(item, ast.AnnAssign)):
                yield from _of_field(sources, item)
    for call in calls(sources.classes["ServerArgs"], "add_argument"):
        names = [node.value for node in call.args if isinstance(node, ast.Constant)]
        yield {"names": names, **(of_call(sources, call) or {"kind": "text"})}


def _of_field(sources: Sources, item: ast.AnnAssign) -> Iterator[dict[str, Any]]:
    """The argument of `name: A[type, "help"]` or `name: A[type, Arg(...)]`; none of other fields."""
    annotation = item.annotation
    if not (isinstance(annotation, ast.Subscript) and last_name(annotation.value) == "A"):
        return
    details = [part for part in parameters(annotation)[1:] if isinstance(part, ast.Call)]
    told = keywords(details[0]) if details else {}
    if sources.value(told.get("no_cli")):
        return
    name = sources.value(told.get("cli_name")) or f"--{last_name(item.target).replace('_', '-')}"
    kind = of_annotation(sources, annotation)
    kind = {"kind": "switch"} if kind == {"kind": "flag"} else kind
    given = of_call(sources, details[0]) if details else {}
    yield {"names": [name, *(sources.value(told.get("aliases")) or [])], **kind, **given}
