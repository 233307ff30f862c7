"""The plugin against vLLM's interfaces as they are recorded from its wheels (scripts/record_vllm_interfaces.py).

The same checks run for every recorded version. Those of a supported one must find nothing; what they find in a later
one is listed here, so that a release that moves a hook is noticed when it is recorded.
"""

import ast
import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ridgeplan.planner.export import plugin as exporting
from ridgeplan.runtime import vllm as plugin
from ridgeplan.runtime.vllm.attention import CACHE_DTYPE, CodesAttention, CodesBackend, CodesMetadataBuilder
from ridgeplan.runtime.vllm.proposer import DraftProposer
from ridgeplan.runtime.vllm.weights import CodedHead, CodedLinear, PlanWeights

RECORDED = json.loads(Path(__file__).with_name("interfaces.json").read_text(encoding="utf-8"))
FOLDER = Path(plugin.__file__).parent
BACKEND, LINEAR = "v1/attention/backend", "model_executor/layers/linear"
QUANTIZATION = "model_executor/layers/quantization/base_config"
# Our class for each of vLLM's that it derives from.
DERIVED = {
    f"{BACKEND}:AttentionBackend": CodesBackend,
    f"{BACKEND}:AttentionImpl": CodesAttention,
    f"{BACKEND}:AttentionMetadataBuilder": CodesMetadataBuilder,
    f"{QUANTIZATION}:QuantizationConfig": PlanWeights,
    f"{LINEAR}:LinearMethodBase": CodedLinear,
}
# Our functions for vLLM's calls; with `self` where vLLM calls a method of an object.
CALLED: dict[str, Callable[..., Any]] = {
    "v1/worker/gpu_model_runner:cast(Any, self.drafter).propose": DraftProposer.propose,
    "v1/worker/gpu_model_runner:self.drafter.load_model": DraftProposer.load_model,
    "v1/worker/gpu_model_runner:builder.build": CodesMetadataBuilder.build,
    "v1/worker/gpu_model_runner:attn_backend.get_kv_cache_shape": CodesBackend.get_kv_cache_shape,
    "model_executor/layers/attention/attention:impl_cls": CodesAttention,
    "model_executor/layers/attention/attention:self.impl.forward": CodesAttention.forward,
    f"{LINEAR}:self.quant_method.create_weights": CodedLinear.create_weights,
    f"{LINEAR}:self.quant_method.apply": CodedLinear.apply,
    "model_executor/layers/logits_processor:lm_head.quant_method.apply": CodedHead.apply,
    "config/vllm:quant_config.maybe_update_config": PlanWeights.maybe_update_config,
}
# What we call by its name in api.py, of functions and of methods.
USED = {
    "flash_attn_varlen_func": "vllm_flash_attn/flash_attn_interface:flash_attn_varlen_func",
    "get_flash_attn_version": "v1/attention/backends/fa_utils:get_flash_attn_version",
    "merge_attn_states": "v1/attention/ops/merge_attn_states:merge_attn_states",
    "set_forward_context": "forward_context:set_forward_context",
    "get_forward_context": "forward_context:get_forward_context",
    "is_forward_context_available": "forward_context:is_forward_context_available",
    "graph_capture": "distributed/parallel_state:graph_capture",
    "get_tensor_model_parallel_rank": "distributed/parallel_state:get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size": "distributed/parallel_state:get_tensor_model_parallel_world_size",
    "get_current_vllm_config": "config/vllm:get_current_vllm_config",
}
# Attributes of vLLM's objects that the plugin reads, by the class that has them.
ATTRIBUTES = {
    f"{BACKEND}:CommonAttentionMetadata": {
        "block_table_tensor", "num_reqs", "query_start_loc_cpu", "seq_lens_cpu_upper_bound", "max_query_len",
        "num_actual_tokens",
    },
    f"{BACKEND}:AttentionCGSupport": {"UNIFORM_BATCH"},
    f"{BACKEND}:AttentionType": {"DECODER"},
    "v1/attention/backends/registry:AttentionBackendEnum": {"CUSTOM"},
    "config/scheduler:SchedulerConfig": {"max_num_seqs"},
    "config/parallel:ParallelConfig": {"pipeline_parallel_size", "data_parallel_size"},
    "config/speculative:SpeculativeConfig": {"model", "method", "num_speculative_tokens", "draft_model_config"},
    "config/compilation:CompilationConfig": {"static_forward_context", "cudagraph_capture_sizes"},
    "forward_context:ForwardContext": {"attn_metadata"},
}  # fmt: skip

# What drafts in fused kernels (fused.py) run in place of vLLM's methods, and how vLLM takes drafts on the device.
ASSUMED = {
    "v1/worker/gpu_model_runner:GPUModelRunner._copy_draft_token_ids_to_cpu": [
        "if not torch.is_tensor(draft_token_ids):\n        return", "wait_stream(default_stream)",
    ],
    "v1/core/sched/scheduler:Scheduler.update_draft_token_ids": ["if request.is_prefill_chunk:"],
    "model_executor/models/llama:LlamaMLP.forward": [
        "x, _ = self.gate_up_proj(x)\n    x = self.act_fn(x)\n    x, _ = self.down_proj(x)\n    return x",
    ],
    "model_executor/models/llama:LlamaAttention.forward": [
        "q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)", "q, k = self.rotary_emb(positions,",
        "attn_output = self.attn(q, k, v)\n    output, _ = self.o_proj(attn_output)\n    return output",
    ],
    "model_executor/models/llama:LlamaDecoderLayer.forward": [
        "hidden_states, residual = self.input_layernorm(hidden_states, residual)", "hidden_states = self.self_attn(",
        "hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)\n"
        "    hidden_states = self.mlp(hidden_states)\n    return (hidden_states, residual)",
    ],
    "model_executor/models/llama:LlamaModel.embed_input_ids": ["return self.embed_tokens(input_ids)"],
    "model_executor/layers/rotary_embedding/base:RotaryEmbeddingBase._compute_cos_sin_cache": [
        "torch.cat((cos, sin), dim=-1)",
    ],
}  # fmt: skip


def signature(parameters: list[str]) -> inspect.Signature:
    """A recorded list of parameters."""
    kind, result = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for text in parameters:
        name, default = text.strip("*="), 0 if text.endswith("=") else inspect.Parameter.empty
        if text.startswith("**"):
            result.append(inspect.Parameter(name, inspect.Parameter.VAR_KEYWORD))
        elif text.startswith("*"):
            kind = inspect.Parameter.KEYWORD_ONLY
            if name:
                result.append(inspect.Parameter(name, inspect.Parameter.VAR_POSITIONAL))
        else:
            result.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(result)


@cache
def our_calls() -> dict[str, list[tuple[int, list[str]]]]:
    """The plugin's calls of each name of `api`: arguments by position, and the names of others. `_flash` hands on its
    callers' names."""
    calls: dict[str, list[tuple[int, list[str]]]] = {}
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                named = [keyword.arg for keyword in node.keywords if keyword.arg]
                positional = len([arg for arg in node.args if not isinstance(arg, ast.Starred)])
                calls.setdefault(ast.unparse(node.func).removeprefix("api."), []).append((positional, named))
    ((_, own),) = calls["flash_attn_varlen_func"]
    return calls | {"flash_attn_varlen_func": [(0, [*own, *handed]) for _, handed in calls["self._flash"]]}


def binds(function: inspect.Signature, positional: int, named: list[str], more: bool = False) -> bool:
    try:
        (function.bind_partial if more else function.bind)(*range(positional), **dict.fromkeys(named))
    except TypeError:
        return False
    return True


def problems(recorded: dict[str, Any]) -> Iterator[str]:
    """What of a version the plugin does not fit, one name each."""
    signatures, members = recorded["signatures"], recorded["members"]
    for name, ours in DERIVED.items():
        theirs = signatures[name]
        if theirs is None:
            yield f"{name} is gone"
            continue
        yield from (f"{name}.{m} is abstract" for m in theirs["abstract"] if m not in _defined(ours))
        for method in _defined(ours) & theirs["methods"].keys() - {"__init__"}:
            expected = [text for text in theirs["methods"][method] if text not in ("self", "cls")]
            required = [text for text in expected if "=" not in text and not text.startswith("*")]
            if not binds(_of(ours, method), len(required), []):
                yield f"{name}.{method} has other parameters"
    for name, ours in CALLED.items():
        theirs = recorded["calls"][name]
        extra = int(inspect.isfunction(ours) and "self" in inspect.signature(ours).parameters)
        if not theirs:
            yield f"{name} is not called"
        elif not all(binds(inspect.signature(ours), extra + c["positional"], c["named"], more=True) for c in theirs):
            yield f"{name} is called with other arguments"
    for name, module in USED.items():
        for positional, named in our_calls()[name]:
            if signatures[module] is None or not binds(signature(signatures[module]), positional, named):
                yield f"{module} takes other arguments"
    for name, attributes in ATTRIBUTES.items():
        yield from (f"{name} has no {attribute}" for attribute in attributes - set(members[name] or ()))
    if CACHE_DTYPE not in (recorded["sources"]["config/cache:CacheDType"] or ""):
        yield f"there is no cache dtype {CACHE_DTYPE}"
    sources = recorded["sources"]
    for name, lines in ASSUMED.items():
        if name not in sources:
            yield f"{name} is not recorded"
        elif any(line not in (sources[name] or "") for line in lines):
            yield f"{name} does something else"
    if not _counts_scales(recorded["sources"]):
        yield "pages of codes have another size"


def _defined(ours: type) -> set[str]:
    """Names that our class, or a base of ours, defines."""
    return {name for base in ours.__mro__ if base.__module__.startswith("ridgeplan.") for name in vars(base)}


def _of(ours: type, method: str) -> inspect.Signature:
    """The parameters that a caller gives."""
    held = inspect.getattr_static(ours, method)
    function = held.__func__ if isinstance(held, classmethod | staticmethod) else held
    given = [p for name, p in inspect.signature(function).parameters.items() if name not in ("self", "cls")]
    return inspect.Signature(given)


def _counts_scales(sources: dict[str, str | None]) -> bool:
    """Whether a page has two float32 per token and head beside as many bytes as numbers (`pages.SCALE_BYTES`)."""
    whole = sources["v1/kv_cache_interface:AttentionSpec.page_size_bytes"] or ""
    plain = sources["v1/kv_cache_interface:FullAttentionSpec.real_page_size_bytes"] or ""
    scales = "real_page_size += 2 * self.block_size * self.num_kv_heads * get_dtype_size(torch.float32)"
    numbers = "self.block_size * self.num_kv_heads * (self.head_size + self.head_size_v) * get_dtype_size(self.dtype)"
    return scales in whole and numbers in plain


@pytest.mark.parametrize("version", [version for version in RECORDED if plugin.supports(version)])
def test_a_supported_version_has_every_hook(version: str) -> None:
    assert [*problems(RECORDED[version])] == []


def test_every_supported_version_is_recorded_and_exported() -> None:
    assert {version.rpartition(".")[0] + "." for version in RECORDED if plugin.supports(version)} == {*plugin.SUPPORTED}
    assert plugin.supports(exporting.VERSION) and exporting.VERSION in RECORDED
    assert (exporting.METHOD, exporting.CACHE_DTYPE) == (plugin.METHOD, CACHE_DTYPE)
    assert CodesBackend.get_name() == exporting.BACKEND
    assert f"{DraftProposer.__module__}.{DraftProposer.__qualname__}" == exporting.PROPOSER
    assert f"{CodesBackend.__module__}.{CodesBackend.__qualname__}" == plugin.BACKEND


@pytest.mark.parametrize(
    ("version", "registered"),
    [("0.24.0", {plugin.METHOD, plugin.BACKEND}), ("0.33.0", {plugin.METHOD}), ("0.34.1", set())],
)
def test_what_is_registered(version: str, registered: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, as vLLM may call it again; nothing where another plugin has the backend."""
    names: list[str] = []
    taken = SimpleNamespace(is_overridden=lambda: plugin.BACKEND in names)
    registry = ModuleType("registry")
    vars(registry).update(
        AttentionBackendEnum=SimpleNamespace(CUSTOM=taken), register_backend=lambda member, path: names.append(path)
    )
    quantization = ModuleType("quantization")
    vars(quantization)["register_quantization_config"] = lambda name: lambda cls: names.append(name)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", registry)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.quantization", quantization)
    for package in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.model_executor",
                    "vllm.model_executor.layers"):  # fmt: skip
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setattr(plugin.metadata, "version", lambda name: version)
    for _ in range(2):
        with contextlib.nullcontext() if registered else pytest.warns(match=f"vLLM is {version}; allowed: 0.24"):
            plugin.register()
    assert set(names) == registered and names.count(plugin.BACKEND) <= 1


def test_what_moved_later() -> None:
    """In 0.33 pages have their layout from the spec that a backend customizes. What drafts assume was not recorded."""
    assert not plugin.supports("0.33.0")
    assert any(version.startswith(plugin.WEIGHTS_ONLY) for version in RECORDED)
    assert {*problems(RECORDED["0.33.0"])} == {
        "pages of codes have another size",
        "v1/worker/gpu_model_runner:attn_backend.get_kv_cache_shape is not called",
        "v1/worker/gpu_model_runner:builder.build is not called",
        *(f"{name} is not recorded" for name in ASSUMED),
    }


def test_the_checks_find_a_hook_that_moves() -> None:
    """The same record with a name, a parameter, a member or a keyword changed."""

    def broken(change: Callable[[dict[str, Any]], None]) -> list[str]:
        recorded = json.loads(json.dumps(RECORDED["0.24.0"]))
        change(recorded)
        return [*problems(recorded)]

    backend = f"{BACKEND}:AttentionBackend"
    assert broken(lambda r: r["signatures"][backend]["abstract"].append("new")) == [f"{backend}.new is abstract"]
    fields = f"{BACKEND}:CommonAttentionMetadata"
    assert broken(lambda r: r["members"][fields].remove("num_reqs")) == [f"{fields} has no num_reqs"]
    flash = "vllm_flash_attn/flash_attn_interface:flash_attn_varlen_func"
    assert f"{flash} takes other arguments" in broken(lambda r: r["signatures"][flash].remove("block_table="))
    propose = "v1/worker/gpu_model_runner:cast(Any, self.drafter).propose"
    assert broken(lambda r: r["calls"][propose][0]["named"].append("sampling_metadata")) == [
        f"{propose} is called with other arguments"
    ]
    sources = "v1/kv_cache_interface:AttentionSpec.page_size_bytes"
    assert broken(lambda r: r["sources"].update({sources: "return 0"})) == ["pages of codes have another size"]
    mlp = "model_executor/models/llama:LlamaMLP.forward"
    moved = broken(lambda r: r["sources"].update({mlp: "return self.fused(x)"}))
    assert moved == [f"{mlp} does something else"]


def test_every_name_that_the_plugin_takes_is_recorded() -> None:
    tree = ast.parse((FOLDER / "api.py").read_text(encoding="utf-8"))
    taken = {(n.module or "", a.name) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    names = {name for module, name in taken if module.startswith("vllm.")}
    recorded = {name.partition(":")[2] for table in ("signatures", "members") for name in RECORDED["0.24.0"][table]}
    assert names and names <= recorded
    missing = [
        n for t in ("signatures", "members", "sources") for n, held in RECORDED["0.24.0"][t].items() if held is None
    ]
    assert missing == []
