"""The arguments of an engine's serve command, extracted from its wheel without importing it.

pip download --no-deps --dest /tmp/wheels vllm==0.33.0
    python scripts/engine_arguments.py wheels/vllm-0.33.0-*.whl

writes planner/export/schemas/vllm-0.33.0.json, which exported commands are checked against.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ridgeplan.planner.export.schema import FOLDER

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
        constants = {}
        for node in (node for tree in self.trees.values() for node in tree.body):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                constants[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                constants[node.target.id] = node.value
        return constants

    def fields(self, name: str) -> dict[str, ast.AnnAssign]:
        """The annotated fields of a class, those of its bases first."""
        node = self.classes.get(name)
        if node is None:
            return {}
        inherited: dict[str, ast.AnnAssign] = {}
        for base in node.bases:
            inherited |= self.fields(last_name(base))
        fields = (item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name))
        return inherited | {item.target.id: item for item in fields}  # type: ignore[union-attr]

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
        literals: list[Any] = []
        for part in parameters(annotation):
            if isinstance(part, ast.Constant):
                literals.append(part.value)
            elif (alias := self.constants.get(last_name(part))) is not None:
                literals += self.literals(alias)
        return literals

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
    bounds_of_field = {name: sources.value(node) for name, node in keywords(default).items() if name in BOUNDS}
    return {name: value for name, value in bounds_of_field.items() if value is not None}


def of_field(sources: Sources, item: ast.AnnAssign) -> dict[str, Any]:
    """The kind of a dataclass's field, with its bounds."""
    return of_annotation(sources, item.annotation) | bounds(sources, item.value)


def of_call(sources: Sources, call: ast.Call) -> dict[str, Any]:
    """The kind that the named arguments of `add_argument`, or of SGLang's `Arg`, say; empty where they say none."""
    arguments_of_call = keywords(call)
    action = arguments_of_call.get("action")
    if action is not None:
        name = sources.value(action) or last_name(action)
        if name in ("store_true", "store_false") or "StoreTrue" in name or "StoreConst" in name:
            return {"kind": "switch"}
        return {"kind": "flag" if name == "BooleanOptionalAction" else "any"}
    choices = sources.value(arguments_of_call.get("choices"))
    if choices:
        return {"kind": "choice", "choices": choices}
    parser = arguments_of_call.get("type_parser") or arguments_of_call.get("type")
    if parser is not None:
        return {"kind": PARSERS.get(last_name(parser), "text")}
    return {"kind": "any"} if "nargs" in arguments_of_call or "choices" in arguments_of_call else {}


VLLM_PREFIXES = (
    "vllm/config/",
    "vllm/engine/arg_utils.py",
    "vllm/entrypoints/",
    "vllm/model_executor/layers/quantization/__init__.py",
)
# Fields whose text may have a suffix: EngineArgs' `human_readable_int_args`.
SIZES = {
    "max_model_len", "max_num_batched_tokens", "max_num_scheduled_tokens", "kv_cache_memory_bytes",
    "safetensors_prefetch_block_size", "max_num_queued_tokens",
}  # fmt: skip
FRONTEND = "FrontendArgs"


def vllm_arguments(sources: Sources) -> Iterator[dict[str, Any]]:
    """Every argument: its names, kind, choices and bounds."""
    for name in ("EngineArgs", "AsyncEngineArgs"):
        yield from _engine_arguments(sources, sources.classes[name])
    for name, item in sources.fields(FRONTEND).items():
        yield {"names": [f"--{name.replace('_', '-')}"], **of_field(sources, item)}
    yield {"names": ["--config"], "kind": "text"}


def _engine_arguments(sources: Sources, engine: ast.ClassDef) -> Iterator[dict[str, Any]]:
    owners = _owners(engine)
    for call in calls(engine, "add_argument"):
        names = [node.value for node in call.args if isinstance(node, ast.Constant)]
        yield {"names": names, **_kind(sources, owners, call)}


def _owners(engine: ast.ClassDef) -> dict[str, str]:
    """The config class of every `x_kwargs = get_kwargs(XConfig)`."""
    aliases = {}
    for node in ast.walk(engine):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            if last_name(node.value.func) == "get_kwargs" and isinstance(target, ast.Name):
                aliases[target.id] = last_name(node.value.args[0])
    return aliases


def _kind(sources: Sources, owners: dict[str, str], call: ast.Call) -> dict[str, Any]:
    """From `**x_kwargs["field"]`, which may stand in a dict with other values, else from the call's own arguments."""
    unpacked = (node for item in call.keywords if item.arg is None for node in ast.walk(item.value))
    for node in (node for node in unpacked if isinstance(node, ast.Subscript)):
        field, owner = sources.value(node.slice), owners.get(last_name(node.value), "")
        known = sources.fields(owner).get(field)
        if known is not None:
            described = of_field(sources, known)
            return described | ({"kind": "size"} if field in SIZES and described["kind"] == "int" else {})
    return of_call(sources, call) or {"kind": "any"}


SGLANG_PREFIXES = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/")
FIELDS = "sglang/srt/arg_groups/fields/"


def sglang_arguments(sources: Sources) -> Iterator[dict[str, Any]]:
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
    options = keywords(details[0]) if details else {}
    if sources.value(options.get("no_cli")):
        return
    name = sources.value(options.get("cli_name")) or f"--{last_name(item.target).replace('_', '-')}"
    kind = of_annotation(sources, annotation)
    kind = {"kind": "switch"} if kind == {"kind": "flag"} else kind
    details_of_field = of_call(sources, details[0]) if details else {}
    yield {"names": [name, *(sources.value(options.get("aliases")) or [])], **kind, **details_of_field}


ENGINES = {"vllm": (VLLM_PREFIXES, vllm_arguments), "sglang": (SGLANG_PREFIXES, sglang_arguments)}
# Objects whose fields are recorded too: what exports write into JSON arguments.
OBJECTS = ("SpeculativeConfig",)


def extract(wheel: Path) -> dict[str, Any]:
    """The arguments of the engine in a wheel, as plain JSON values."""
    name, version = wheel.name.split("-")[:2]
    prefixes, arguments = ENGINES[name]
    sources = Sources.of_wheel(wheel, prefixes)
    return {
        "engine": name,
        "version": version,
        "source": f"PyPI, {wheel.name}",
        "arguments": _merged(arguments(sources)),
        "objects": {
            kind: {field: of_field(sources, item) for field, item in sources.fields(kind).items()}
            for kind in OBJECTS
            if kind in sources.classes
        },
    }


def _merged(arguments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each argument once: where it is registered twice (`--model`), the last one counts, as in argparse."""
    by_name = {argument["names"][0]: argument for argument in arguments}
    return [by_name[name] for name in sorted(by_name)]


def to_text(extracted: dict[str, Any]) -> str:
    """JSON with one argument a line."""
    lines = ",\n".join(f"  {json.dumps(argument)}" for argument in extracted["arguments"])
    head = {key: value for key, value in extracted.items() if key not in ("arguments", "objects")}
    objects = json.dumps(extracted["objects"], indent=1)
    return f'{json.dumps(head)[:-1]},\n"objects": {objects},\n"arguments": [\n{lines}\n]}}\n'


def main() -> None:
    """Extracts the wheels that are named as arguments."""
    for name in sys.argv[1:]:
        extracted = extract(Path(name))
        target = FOLDER / f"{extracted['engine']}-{extracted['version']}.json"
        target.write_text(to_text(extracted), encoding="utf-8")
        print(f"{target}: {len(extracted['arguments'])} arguments")


if __name__ == "__main__":
    main()
