"""The serve command of vLLM with this package's plugin, which carries a plan as it is (docs/vllm.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ridgeplan.planner.export.carry import Carried
from ridgeplan.planner.export.export import Command, EngineTimes, Exported, check_models, yarn_parameters
from ridgeplan.planner.export.options import ServeCommandOptions
from ridgeplan.planner.export.rules import Rule
from ridgeplan.planner.prediction import predict_all
from ridgeplan.planner.quantities import three_digits
from ridgeplan.roofline.catalog.parallel import SINGLE
from ridgeplan.roofline.execution import MAX_QUANTIZED_ROWS
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import KVFormat, Plan, Speculation, require
from ridgeplan.roofline.plan.presets import autoregressive, preset_name
from ridgeplan.roofline.plan.support import PLUGIN_GROUP, not_carried

# The plugin's names, as ridgeplan.runtime.vllm has them; the planner does not import the runtime.
VERSION = "0.24.0"  # the newest of vLLM that the plugin runs with
METHOD, CACHE_DTYPE, BACKEND = "ridgeplan", "int8_per_token_head", "CUSTOM"
PROPOSER = "ridgeplan.runtime.vllm.proposer.DraftProposer"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER=0"  # proposer classes and the plugin's metadata are of the first model runner
CODED = (KVFormat.INT8, KVFormat.HIERARCHICAL)
WIDE = Rule(
    "wide-verification", ("vllm",), {},
    f"a verification of more than {MAX_QUANTIZED_ROWS} tokens, (1 + gamma) x sequences, writes a dense copy of all "
    "weights first: at 80 tokens 8.4 of 28.8 ms for which the device is busy (Llama-3.1-8B, H200)",
    ("validate/results/plugin_h200.json",),
)  # fmt: skip


def export_with_plugin(options: ServeCommandOptions) -> Exported:
    """A plan as vLLM's serve command with the plugin.

    Raises PlanError for what the plugin does not carry, and for options that only plain exports have.
    """
    plan, shape = options.plan, options.shape
    check_models(options)
    require(options.engine.name == "vllm", f"--plugin is for vLLM, not {options.engine.title}; allowed: --to vllm")
    version = options.schema.version
    require(version == VERSION, f"--plugin does not know vLLM {version}; allowed: --engine-version {VERSION}")
    given = {
        "--draft-model": options.draft_model,
        "--kv-cache-dtype": options.kv_cache_dtype,
        "--host-cache": options.host_cache_gib,
    }
    names = [name for name, value in given.items() if value]
    require(not names, f"{', '.join(names)} with --plugin; allowed: none of them, as the plan is carried as it is")
    reason = not_carried(plan, shape)
    never = not_carried(autoregressive(plan.workload), shape)  # of this model
    other = "" if never else ", or a plan that `plan --backend vllm+plugin` recommends"
    require(reason is None, f"{preset_name(plan)}: {reason}; allowed: export without --plugin{other}")
    serve = ("env", RUNNER, *options.engine.serve, options.model)
    command = Command(serve, tuple(_arguments(options)))
    times, unpredicted = _times(options)
    coded_rows = plan.workload.rank_batch * (1 + plan.speculation.gamma) if plan.weights.target_bits < 16 else 0
    rules = (WIDE,) if plan.speculation.active and coded_rows > MAX_QUANTIZED_ROWS else ()
    return Exported(
        f"ridgeplan's plugin of {options.engine.title}", options.schema.version, command, tuple(_axes(plan)), rules,
        times, unpredicted,
    )  # fmt: skip


def fastest_with_plugin(options: ServeCommandOptions) -> Exported:
    """`export_with_plugin`, without the plan's drafts where plain decoding is predicted to be faster."""
    exported = export_with_plugin(options)
    times, gamma = exported.times, options.plan.speculation.gamma
    if times is None or times.plain_ms >= times.tpot_ms:
        return exported
    plain = export_with_plugin(replace(options, plan=_without_drafts(options.plan)))
    slower = f"none, as with them a token takes {three_digits(times.tpot_ms)} ms; --keep-drafts keeps them"
    return replace(plain, carried=(*plain.carried, Carried("drafts", f"gamma {gamma}", slower, False)))


def weights_config(plan: Plan) -> dict[str, Any]:
    """What vLLM's `quantization_config` is told of the plan's weights."""
    bits, group, hierarchical, _ = plan.weights.target_format
    return {"quant_method": METHOD, "bits": bits, "group": group, "hierarchical": hierarchical}


def graphs(plan: Plan) -> dict[str, Any]:
    """The CUDA graphs with which the plugin was timed: full ones of whole steps or rounds, without torch.compile."""
    batch = plan.workload.rank_batch
    rows = sorted({*(2**power for power in range(batch.bit_length())), batch})
    sizes = [(1 + plan.speculation.gamma) * count for count in rows]
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}


def _arguments(options: ServeCommandOptions) -> Iterator[tuple[str, Any]]:
    engine, plan = options.engine, options.plan
    drafts, coded = plan.speculation.active, plan.kv.format in CODED
    tokens = options.max_model_len
    yield engine.max_model_len, -(-tokens // PLUGIN_GROUP) * PLUGIN_GROUP if drafts else tokens
    yield engine.max_num_seqs, plan.workload.rank_batch
    yield engine.memory, options.memory_utilization
    yield from engine.parallel_arguments(plan.parallel, options.shape.is_moe)
    overrides: dict[str, Any] = {}
    if plan.weights.target_bits < 16:
        overrides["quantization_config"] = weights_config(plan)
    if plan.workload.yarn_factor > 1:
        overrides["rope_parameters"] = yarn_parameters(options)
    if overrides:
        yield engine.overrides, overrides
    if coded:
        yield engine.kv_cache_dtype, CACHE_DTYPE
        yield "--attention-backend", BACKEND
        yield "--block-size", PLUGIN_GROUP
        yield "--compilation-config", graphs(plan)
    if drafts:
        yield (
            "--speculative-config",
            {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": plan.speculation.gamma},
        )


def _without_drafts(plan: Plan) -> Plan:
    weights = replace(plan.weights, draft_bits=plan.weights.target_bits)
    return replace(plan, speculation=Speculation(), weights=weights)


def _axes(plan: Plan) -> Iterator[Carried]:
    weights, kv, speculation = plan.weights, plan.kv, plan.speculation
    if weights.target_bits == 16:
        yield Carried("weights", "the checkpoint", "the checkpoint", True)
    else:
        loaded = "as `ridgeplan run PLAN --model` saved them, else rounded to nearest"
        yield Carried("weights", f"{weights.target_bits} bits, groups of {weights.group}, fitted", loaded, False)
    if kv.format in CODED:
        recent = f"{kv.group} to {2 * kv.group - 1} recent tokens in full precision"
        yield Carried(
            "KV cache", f"INT8 codes, {recent}", "INT8 codes; in full precision, the tokens of a page that is not full",
            False,
        )  # fmt: skip
    else:
        yield Carried("KV cache", "the model's own type", "the model's own type", True)
    if speculation.active:
        drafts = f"gamma {speculation.gamma} on upper codes"
        yield Carried("drafts", drafts, f"{drafts}; at a temperature the most likely token, not a sample", False)


def _times(options: ServeCommandOptions) -> tuple[EngineTimes | None, str]:
    """As `plan --backend vllm+plugin` predicts them."""
    plan, shape = options.plan, options.shape
    if plan.parallel != SINGLE:
        return None, "times on several GPUs are not predicted"
    machine = options.speed.with_overhead(plan.workload, shape, Machine.of(options.profile))
    predicted, baseline = predict_all([plan, _without_drafts(plan)], shape, options.profile, machine)
    low, best, high = (figures.tpot_ms for figures in (predicted.low, predicted.best, predicted.high))
    return EngineTimes(low, best, high, baseline.best.tpot_ms, predicted.source), ""
