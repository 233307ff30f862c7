"""The serve command of vLLM with this package's plugin, which carries a plan as it is (docs/vllm.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ridgeplan.planner.export.carry import Carried
from ridgeplan.planner.export.export import Command, EngineTimes, Exported, check_models, yarn_parameters
from ridgeplan.planner.export.options import ServeCommandOptions
from ridgeplan.planner.prediction import predict_all
from ridgeplan.roofline.catalog.parallel import SINGLE
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import KVFormat, Plan, Speculation, require
from ridgeplan.roofline.plan.presets import preset_name
from ridgeplan.roofline.plan.support import PLUGIN_GROUP, not_carried

# The plugin's names, as ridgeplan.runtime.vllm has them; the planner does not import the runtime.
VERSION = "0.24.0"  # the newest of vLLM that the plugin runs with
METHOD, CACHE_DTYPE, BACKEND = "ridgeplan", "int8_per_token_head", "CUSTOM"
PROPOSER = "ridgeplan.runtime.vllm.proposer.DraftProposer"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER=0"  # proposer classes and the plugin's metadata are of the first model runner
CODED = (KVFormat.INT8, KVFormat.HIERARCHICAL)


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
    allowed = "export without --plugin, or a plan that `plan --backend vllm+plugin` recommends"
    require(reason is None, f"{preset_name(plan)}: {reason}; allowed: {allowed}")
    serve = ("env", RUNNER, *options.engine.serve, options.model)
    command = Command(serve, tuple(_arguments(options)))
    times, unpredicted = _times(options)
    return Exported(
        f"ridgeplan's plugin of {options.engine.title}", options.schema.version, command, tuple(_axes(plan)), (),
        times, unpredicted,
    )  # fmt: skip


def weights_config(plan: Plan) -> dict[str, Any]:
    """What vLLM's `quantization_config` is told of the plan's weights."""
    bits, group, hierarchical = plan.weights.target_format
    return {"quant_method": METHOD, "bits": bits, "group": group, "hierarchical": hierarchical}


def _arguments(options: ServeCommandOptions) -> Iterator[tuple[str, Any]]:
    engine, plan = options.engine, options.plan
    drafts, coded = plan.speculation.active, plan.kv.format in CODED
    tokens = options.max_model_len
    yield engine.max_model_len, -(-tokens // PLUGIN_GROUP) * PLUGIN_GROUP if drafts else tokens
    yield engine.max_num_seqs, plan.workload.rank_batch
    yield engine.memory, options.memory_utilization
    yield from engine.parallel(plan.parallel, options.shape.is_moe)
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
    if drafts:
        yield (
            "--speculative-config",
            {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": plan.speculation.gamma},
        )


def _axes(plan: Plan) -> Iterator[Carried]:
    weights, kv, speculation = plan.weights, plan.kv, plan.speculation
    held = "the checkpoint" if weights.target_bits == 16 else f"{weights.target_bits} bits, groups of {weights.group}"
    yield Carried("weights", held, held, True)
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
    weights = replace(plan.weights, draft_bits=plan.weights.target_bits)
    plain = replace(plan, speculation=Speculation(), weights=weights)
    predicted, baseline = predict_all([plan, plain], shape, options.profile, machine)
    low, best, high = (figures.tpot_ms for figures in (predicted.low, predicted.best, predicted.high))
    return EngineTimes(low, best, high, baseline.best.tpot_ms, predicted.source), ""
