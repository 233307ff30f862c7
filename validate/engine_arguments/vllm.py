"""The arguments of `vllm serve`: EngineArgs takes them from the fields of config classes, FrontendArgs from its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from ridgeplan.validate.engine_arguments.kinds import of_call, of_field
from ridgeplan.validate.engine_arguments.syntax import Sources, calls, last_name

PREFIXES = (
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


def arguments(sources: Sources) -> Iterator[dict[str, Any]]:
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
    found = {}
    for node in ast.walk(engine):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            if last_name(node.value.func) == "get_kwargs" and isinstance(target, ast.Name):
                found[target.id] = last_name(node.value.args[0])
    return found


def _kind(sources: Sources, owners: dict[str, str], call: ast.Call) -> dict[str, Any]:
    """From `**x_kwargs["field"]`, which may stand in a dict with other values, else from the call's own arguments."""
    unpacked = (node for item in call.keywords if item.arg is None for node in ast.walk(item.value))
    for node in (node for node in unpacked if isinstance(node, ast.Subscript)):
        field, owner = sources.value(node.slice), owners.get(last_name(node.value), "")
        known = sources.fields(owner).get(field)
        if known is not None:
            found = of_field(sources, known)
            return found | ({"kind": "size"} if field in SIZES and found["kind"] == "int" else {})
    return of_call(sources, call) or {"kind": "any"}
