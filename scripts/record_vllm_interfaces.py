"""Records vLLM's interfaces that the plugin uses from its wheels, whose Python sources are read and not run.

    python scripts/record_vllm_interfaces.py vllm-0.24.0-*.whl [FOLDER ...] -o tests/runtime/vllm/interfaces.json

A folder holds an unpacked wheel, `FOLDER/vllm`, and is given as VERSION=FOLDER. tests/runtime/vllm/test_interfaces.py
compares the plugin with each version that it supports.
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# What the plugin derives from, calls, or is called by: by module, the names of classes and functions in it.
SIGNATURES = {
    "v1/attention/backend": ["AttentionBackend", "AttentionImpl", "AttentionImplBase", "AttentionMetadataBuilder"],
    "v1/attention/backends/registry": ["register_backend"],
    "v1/attention/ops/merge_attn_states": ["merge_attn_states"],
    "vllm_flash_attn/flash_attn_interface": ["flash_attn_varlen_func"],
    "v1/attention/backends/fa_utils": ["get_flash_attn_version"],
    "model_executor/layers/quantization/__init__": ["register_quantization_config"],
    "model_executor/layers/quantization/base_config": ["QuantizationConfig", "QuantizeMethodBase"],
    "model_executor/layers/linear": [
        "LinearMethodBase", "UnquantizedLinearMethod", "LinearBase", "register_weight_loader_v2_supported_method",
    ],
    "model_executor/layers/vocab_parallel_embedding": ["ParallelLMHead", "UnquantizedEmbeddingMethod"],
    "forward_context": ["set_forward_context", "get_forward_context", "is_forward_context_available"],
    "distributed/parallel_state": [
        "graph_capture", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size",
    ],
    "config/vllm": ["get_current_vllm_config"],
}  # fmt: skip
# Classes whose names of fields or members the plugin uses.
MEMBERS = {
    "v1/attention/backend": ["AttentionCGSupport", "AttentionType", "CommonAttentionMetadata"],
    "v1/attention/backends/registry": ["AttentionBackendEnum"],
    "config/scheduler": ["SchedulerConfig"],
    "config/parallel": ["ParallelConfig"],
    "config/speculative": ["SpeculativeConfig"],
    "config/compilation": ["CompilationConfig"],
    "forward_context": ["ForwardContext"],
}
# Properties and assignments that are recorded as they are written.
SOURCES = {
    "v1/kv_cache_interface": ["AttentionSpec.page_size_bytes", "FullAttentionSpec.real_page_size_bytes"],
    "config/cache": ["CacheDType"],
    "v1/worker/gpu_model_runner": ["GPUModelRunner._copy_draft_token_ids_to_cpu"],
    "v1/core/sched/scheduler": ["Scheduler.update_draft_token_ids"],
    "model_executor/models/llama": [
        "LlamaMLP.forward", "LlamaAttention.forward", "LlamaDecoderLayer.forward", "LlamaModel.embed_input_ids",
    ],
    "model_executor/layers/rotary_embedding/base": ["RotaryEmbeddingBase._compute_cos_sin_cache"],
}  # fmt: skip
# Calls that vLLM makes of the plugin's objects, by the end of the called expression.
CALLS = {
    "v1/worker/gpu_model_runner": [
        "cast(Any, self.drafter).propose", "self.drafter.load_model", "attn_backend.get_kv_cache_shape",
        "builder.build", "builder.build_for_cudagraph_capture",
    ],
    "model_executor/layers/attention/attention": ["impl_cls", "self.impl.forward"],
    "model_executor/layers/linear": ["self.quant_method.create_weights", "self.quant_method.apply"],
    "model_executor/layers/logits_processor": ["lm_head.quant_method.apply"],
    "config/vllm": ["quant_config.maybe_update_config"],
}  # fmt: skip


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of parameters, with "=" behind those with a default, and stars."""
    spec = function.args
    positional = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
    first_default = len(positional) - len(spec.defaults)
    names = [name + "=" * (i >= first_default) for i, name in enumerate(positional)]
    names += [f"*{spec.vararg.arg}"] if spec.vararg else ["*"] if spec.kwonlyargs else []
    keyword_only = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    names += [arg.arg + "=" * (default is not None) for arg, default in keyword_only]
    return [*names, f"**{spec.kwarg.arg}"] if spec.kwarg else names


def described(node: ast.ClassDef | ast.FunctionDef) -> Any:
    """A function's parameters; of a class its bases, its methods, and those that are abstract."""
    if isinstance(node, ast.FunctionDef):
        return parameters(node)
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    abstract = [m.name for m in methods if "abstractmethod" in {ast.unparse(mark) for mark in m.decorator_list}]
    return {
        "bases": [ast.unparse(base) for base in node.bases],
        "methods": {method.name: parameters(method) for method in methods},
        "abstract": abstract,
    }


def members(node: ast.ClassDef) -> list[str]:
    """Names of a class's fields, members of an enumeration, and properties."""
    names = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.append(item.target.id)
        elif isinstance(item, ast.Assign):
            names += [target.id for target in item.targets if isinstance(target, ast.Name)]
        elif isinstance(item, ast.FunctionDef) and any("property" in ast.unparse(m) for m in item.decorator_list):
            names.append(item.name)
    return names


def find(tree: ast.AST, name: str) -> Any:
    """The class, function or assigned value with a name, which may have a class before a dot."""
    first, _, rest = name.partition(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == first:
            return find(ast.Module(node.body, []), rest) if rest else node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == first for t in node.targets):
            return node.value
    return None


def calls(tree: ast.AST, name: str) -> Iterator[dict[str, Any]]:
    """Every call of an expression: how many arguments by position, and the names of the others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            plain = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
            yield {"positional": len(plain), "named": sorted(k.arg for k in node.keywords if k.arg)}


def record(read: Callable[[str], str]) -> dict[str, Any]:
    """The interfaces of one version. read: the text of a module."""
    trees: dict[str, ast.AST] = {}

    def tree(module: str) -> ast.AST:
        if module not in trees:
            try:
                trees[module] = ast.parse(read(module))
            except KeyError:
                trees[module] = ast.Module([], [])  # no such module any more: all its names are missing
        return trees[module]

    def each(table: dict[str, list[str]], describe: Callable[[Any], Any]) -> dict[str, Any]:
        nodes = {f"{module}:{name}": find(tree(module), name) for module, names in table.items() for name in names}
        return {name: None if node is None else describe(node) for name, node in nodes.items()}

    return {
        "signatures": each(SIGNATURES, described),
        "members": each(MEMBERS, members),
        "sources": each(SOURCES, lambda node: ast.unparse(_without_docstring(node))),
        "calls": {f"{m}:{name}": list(calls(tree(m), name)) for m, names in CALLS.items() for name in names},
    }


def _without_docstring(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    return node


def reader(source: str) -> tuple[str, Callable[[str], str]]:
    """The version of a wheel, or of VERSION=FOLDER, and a function that reads its modules."""
    if "=" in source:
        version, folder = source.split("=", 1)

        def read(module: str) -> str:
            path = Path(folder, "vllm", f"{module}.py")
            if not path.exists():
                raise KeyError(module)
            return path.read_text(encoding="utf-8")

        return version, read
    wheel = zipfile.ZipFile(source)
    return Path(source).name.split("-")[1], lambda module: wheel.read(f"vllm/{module}.py").decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="wheels, or VERSION=FOLDER of unpacked ones")
    parser.add_argument("--output", "-o", type=Path, required=True)
    options = parser.parse_args()
    recorded = {version: record(read) for version, read in map(reader, options.sources)}
    options.output.write_text(text_of(recorded) + "\n", encoding="utf-8")


def text_of(recorded: dict[str, dict[str, dict[str, Any]]]) -> str:
    """JSON with a line for each name."""
    versions = []
    for version, tables in recorded.items():
        parts = []
        for what, entries in tables.items():
            lines = [f"   {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(entries.items())]
            parts.append(f"  {json.dumps(what)}: {{\n" + ",\n".join(lines) + "\n  }")
        versions.append(f" {json.dumps(version)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(versions) + "\n}"


if __name__ == "__main__":
    main()
