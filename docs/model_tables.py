"""Tables of models: what is executed, priced or refused for each family, and the recent models of the catalog."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from readme_tables import result, table

from ridgeplan.planner.engines.measurements import shipped_measurements
from ridgeplan.planner.prediction import Prediction, predict_all
from ridgeplan.planner.recommend import recommend
from ridgeplan.planner.resolution import resolve
from ridgeplan.roofline.catalog.config_json import shape_from_config
from ridgeplan.roofline.catalog.families import families
from ridgeplan.roofline.catalog.gguf import ARCHITECTURES
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import list_models
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.ops import activated_experts
from ridgeplan.roofline.passes import category
from ridgeplan.roofline.plan.plan import Placement, Plan, Workload
from ridgeplan.roofline.plan.presets import preset, short_name
from ridgeplan.roofline.plan.support import (
    as_loaded,
    layer_needs,
    missing_architecture,
    missing_cost_model,
    missing_execution,
)

COLUMNS = ("autoregressive", "quantspec", "progressive", "snapkv", "int8-weights", "int4-weights")
CONTEXT = 4096  # within the trained context and the window of all models that are executed
LONGER = 32768  # beyond these windows
GIGA, KIB = 1e9, 1024
# Of a family that the catalog has no model of: those of Llama-3.1-8B, and a window for layers that have one.
GENERIC = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072, "sliding_window": 2048,
}  # fmt: skip
WITH_EXPERTS = ("ernie4_5_moe", "granitemoe", "afmoe", "hy_v3")
GENERIC_EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024}
TARGET = 0.08  # of predictions for models that no calibration has seen
MISS = 0.06  # from which a prediction is listed

# Names of the catalog's models that were published up to 2024, and of those that only repeat one's shape.
OLDER = (
    "meta-llama/", "togethercomputer/", "LargeWorldModel/", "Qwen/Qwen2.5", "mistralai/Mi", "HuggingFaceTB/SmolLM2",
    "deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-R1-Distill", "CohereLabs/c4ai-command-r7b-12-2024",
    "ibm-granite/granite-3.1", "allenai/OLMo-2",
)  # fmt: skip
RECENT_TOO = ("mistralai/Ministral",)
CODE_BITS = {"near-lossless": 8, "4-bit": 4.25}  # the fewest bits of a weight that a quality allows, by its name
STRETCH = 2  # at most, by YaRN
DEVICE_SHARE = 0.9  # of a GPU's memory that plans may take (`--memory-utilization`)


def supported_families() -> str:
    """What the runtime executes and what is only priced, by family and plan, and what its layers need."""
    models = {shape.architecture: shape for shape in reversed(list_models())}
    read = {name for stored in ARCHITECTURES.values() for name in (stored.family, stored.also)}
    rows = []
    for name in families():
        generic = {**GENERIC, **(GENERIC_EXPERTS if name in WITH_EXPERTS else {}), "model_type": name}
        shape = models.get(name) or shape_from_config(generic, name, "generic sizes")
        held = as_loaded(shape)
        plans, longer = (_plans(shape, context) for context in (CONTEXT, min(LONGER, shape.max_context)))
        cells = (_status(plan, held) for plan in plans)
        rows.append((f"`{name}`", *cells, "yes" if name in read else "no", _missing([*plans, *longer], held)))
    headers = (
        "family", "plain", "quantspec", "progressive", "snapkv", "offload", "8-bit", "4-bit", "from GGUF",
        "not executed",
    )  # fmt: skip
    without = ", ".join(f"`{name}`" for name in families() if name not in models)
    return f"{table(headers, rows)}\n\nThe catalog has no model of {without}: their rows are of generic sizes."


def _plans(shape: ModelShape, context: int) -> list[Plan]:
    """A plan of each column, of a prompt and new tokens that together are `context`."""
    workload = Workload(shape.name, "h200", context - 1024, new_tokens=1024)
    plans = [preset(plan, workload) for plan in COLUMNS]
    plans.insert(4, replace(plans[0], placement=Placement(offload=True, budget=1024)))
    return plans


def _status(plan: Plan, shape: ModelShape) -> str:
    if missing_cost_model(plan, shape):
        return "refused"
    missing = missing_architecture(shape, load_hardware("h200")) or missing_execution(plan, shape)
    return "priced" if missing else "executed"


def _missing(plans: list[Plan], shape: ModelShape) -> str:
    """What the runtime lacks for the model, or else for those of the plans that it does not execute."""
    missing = missing_architecture(shape, load_hardware("h200"))
    if missing:
        return ", ".join(layer_needs(shape)) or missing.partition(" (")[0]
    plans = [plan for plan in plans if not missing_cost_model(plan, shape)]
    return ", ".join(dict.fromkeys(reason for plan in plans for reason in missing_execution(plan, shape))) or "-"


def described_models() -> str:
    """Models that are described by the keys of their config.json: parameters, layers with a cache or a state, KV."""
    rows = []
    for shape in list_models():
        if not shape.groups:
            continue
        kv_bytes = sum(
            count * (2 * attention.cached_elements + attention.index_key_bytes) for attention, count in shape.attentions
        )
        state_bytes = sum(count * state.elements * state.bytes_per_element for state, count in shape.states)
        rows.append((
            shape.name, f"{shape.parameters / GIGA:.4g}", f"{shape.active_parameters / GIGA:.3g}",
            f"{shape.kv_layers} of {shape.layers}", f"{kv_bytes / KIB:.4g}", f"{state_bytes / KIB**2:.4g}",
        ))  # fmt: skip
    headers = (
        "model",
        "parameters, 10^9",
        "active, 10^9",
        "layers with a cache",
        "KV, KiB a token",
        "state, MiB a sequence",
    )
    return table(headers, rows)


EXPERTS, DENSE, SKEW, GAMMAS = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-4B", 1.0, range(1, MAX_GAMMA + 1)
CONTEXTS, BATCHES = (4096, 32768), (1, 2, 4, 8, 16, 32)


def measured_models(name: str) -> str:
    """Measured plain decoding and best plans of models of true size, their predictions' errors, and vLLM's times."""
    lines, errors, engines = [], [], shipped_measurements()
    for model, rows in result(name).items():
        if "/" not in model:
            continue  # where and when
        measured = {row["row"]: row for row in rows if "round_ms" in row}
        for size in dict.fromkeys(row.partition(",")[0] for row in measured):
            plain, best = (measured.get(f"{size}, {case}") for case in ("plain", "best"))
            if plain or best:
                errors += [_error(row) for row in (plain, best) if row]
                engine_ms = engines.tpot_ms(model, *map(int, size.split(" x ")), "auto", "auto")
                lines.append(
                    (model.partition("/")[2], size, _cell(plain), _cell(best),
                     f"{engine_ms:.2f}" if engine_ms else "", _ratio(engine_ms, plain), _ratio(engine_ms, best),
                     _name(best["plan"]) if best else "")
                )  # fmt: skip
    columns = (
        "model", "context x batch", "plain ms", "best ms", "vLLM ms", "vLLM / plain", "vLLM / best", "best plan",
    )  # fmt: skip
    sizes = [abs(error) for error in errors]
    summary = (
        f"Of {len(sizes)} predictions {sum(size <= TARGET for size in sizes)} are within {TARGET:.0%}; "
        f"the median is off by {median(sizes):.1%}, the worst by {max(sizes):.1%}."
    )
    return f"{table(columns, lines)}\n\n{summary}"


def measured_misses(name: str) -> str:
    """Every measured row of models of true size whose prediction is off by MISS or more, the worst first."""
    rows = [
        (model.partition("/")[2], row)
        for model, rows in result(name).items()
        if "/" in model
        for row in rows
        if "round_ms" in row
    ]
    within = sum(abs(_error(row)) <= TARGET for _, row in rows)
    missed = sorted((row for row in rows if abs(_error(row[1])) >= MISS), key=lambda row: -abs(_error(row[1])))
    lines = [
        (model, row["row"].partition(",")[0], _name(row["plan"]), f"{row['tpot_ms']:.2f}", f"{_error(row):+.1%}")
        for model, row in missed
    ]
    columns = ("model", "context x batch", "plan", "measured ms", "prediction off by")
    return f"{table(columns, lines)}\n\nOf all {len(rows)} rows {within} are within {TARGET:.0%}."


def measured_parts(name: str) -> str:
    """The errors of draft steps and verifications of models of true size: all in short, and those beyond TARGET."""
    errors: dict[str, list[tuple[float, tuple[str, ...]]]] = {"draft step": [], "verification": []}
    for model, rows in result(name).items():
        for row in rows if "/" in model else ():
            for kind, part in row.get("parts", {}).items():
                if kind in errors:
                    error = part["predicted_ms"] / part["ms"] - 1
                    size = row["row"].partition(",")[0]
                    cells = (
                        model.partition("/")[2],
                        size,
                        _name(row["plan"]),
                        kind,
                        f"{part['ms']:.2f}",
                        f"{error:+.1%}",
                    )
                    errors[kind].append((error, cells))
    summaries = []
    for kind, each in errors.items():
        sizes = [abs(error) for error, _ in each]
        summaries.append(
            f"Of {len(sizes)} {kind}s {sum(size <= TARGET for size in sizes)} are within {TARGET:.0%}; "
            f"the median is off by {median(sizes):.1%}, the worst by {max(sizes):.1%}."
        )
    missed = sorted(
        (row for each in errors.values() for row in each if abs(row[0]) > TARGET), key=lambda row: -abs(row[0])
    )
    columns = ("model", "context x batch", "plan", "part", "measured ms", "prediction off by")
    return f"{table(columns, [cells for _, cells in missed])}\n\n{' '.join(summaries)}"


def _error(row: dict[str, Any]) -> float:
    return float(row["predicted_tpot_ms"] / row["tpot_ms"] - 1)


def _name(plan: str) -> str:
    """The short name of a plan and its drafts, without its workload."""
    name, *settings = plan.split(", ")
    return ", ".join((short_name(name), *(each for each in settings if each.startswith("gamma"))))


def _ratio(engine_ms: float | None, row: dict[str, Any] | None) -> str:
    return f"{engine_ms / row['tpot_ms']:.2f}" if engine_ms and row else ""


def _cell(row: dict[str, Any] | None) -> str:
    return f"{row['tpot_ms']:.2f} ({_error(row):+.0%})" if row else ""


def experts_and_drafts() -> str:
    """Experts that verifications hit, and the best gamma of `quantspec` on an H200, by context and batch."""
    (routed, profile), (dense, _) = resolve(EXPERTS, "h200"), resolve(DENSE, "h200")
    skewed = replace(routed, routing_skew=SKEW)
    rows = []
    for batch in BATCHES:
        hit = [
            " / ".join(
                f"{activated_experts(shape.experts, shape.experts_per_token, tokens * batch, shape.routing_skew):.0f}"
                for tokens in (1, 2, 4)
            )
            for shape in (routed, skewed)
        ]
        best = [
            _best_gamma(shape, profile, context, batch) for context in CONTEXTS for shape in (routed, skewed, dense)
        ]
        rows.append((str(batch), *hit, *best))
    dense_name = DENSE.partition("/")[2]
    gammas = [
        f"{context // 1024}k: {name}" for context in CONTEXTS for name in ("best gamma, uniform", "skewed", dense_name)
    ]
    headers = ("batch", "experts hit by 0 / 1 / 3 drafts, uniform", "skewed", *gammas)
    return table(headers, rows)


def _best_gamma(shape: ModelShape, profile: Profile, context: int, batch: int) -> str:
    """The gamma of the fewest milliseconds per token, and its speed against plain decoding."""
    workload = Workload(shape.name, "h200", context, new_tokens=1024, batch=batch)
    plain, drafting = preset("autoregressive", workload), preset("quantspec", workload)
    plans = [replace(drafting, speculation=replace(drafting.speculation, gamma=gamma)) for gamma in GAMMAS]
    plain_ms, *times_ms = (each.best.tpot_ms for each in predict_all([plain, *plans], shape, profile))
    return f"{GAMMAS[times_ms.index(min(times_ms))]} ({plain_ms / min(times_ms):.2f}x)"


def experts_and_plans() -> str:
    """What `plan` recommends for the same models, with its speed against plain decoding, by context and batch."""
    cells = [(model, context) for context in CONTEXTS for model in (EXPERTS, DENSE)]
    rows = [(str(batch), *(_recommended(*each, batch) for each in cells)) for batch in BATCHES]
    return table(("batch", *(f"{context // 1024}k: {model.partition('/')[2]}" for model, context in cells)), rows)


def _recommended(model: str, context: int, batch: int) -> str:
    answer = recommend(model, "h200", context, batch=batch)
    gamma = answer.plan.speculation.gamma
    drafts = f", gamma {gamma}" if gamma else ""
    return f"{short_name(answer.name)}{drafts} ({answer.predicted.speedup:.2f}x)"


def recent_models(gpu: str) -> str:
    """The best plan of each recent model at 32k x 1, by kinds of layers, then by the share of KV."""
    room = DEVICE_SHARE * load_hardware(gpu).memory_bytes
    rows = []
    for shape in list_models():
        older = shape.name.startswith(OLDER) and not shape.name.startswith(RECENT_TOO)
        if not older and shape.max_context * STRETCH >= LONGER:
            rows.append(_recent_row(shape, gpu, room))
    rows.sort(key=lambda row: (row[1][1], row[0]))
    lines = [(name, layers, f"{share:.0%}", *cells) for share, (name, layers, *cells) in rows]
    columns = ("model", "layers", "KV, share of bytes", "best plan", "ms per token", "over plain", "")
    return table(columns, lines)


def _recent_row(shape: ModelShape, gpu: str, room: float) -> tuple[float, tuple[str, ...]]:
    """The share of KV in the bytes of a plain step, and the other cells."""
    name, layers = shape.name.partition("/")[2], _layer_kinds(shape)
    quality = next((name for name, bits in CODE_BITS.items() if shape.parameters * bits / 8 <= room), None)
    if quality is None:
        _, profile = resolve(shape.name, gpu)
        (plain,) = predict_all([preset("autoregressive", Workload(shape.name, gpu, LONGER))], shape, profile)
        return _kv_share(plain), (name, layers, "", "", "", f"{shape.parameters / GIGA:.0f} GB in 8 bits: too large")
    answer = recommend(shape.name, gpu, LONGER, quality=quality, yarn=shape.max_context < LONGER)
    gamma = answer.plan.speculation.gamma
    drafts = f", gamma {gamma}" if gamma else ""
    speedup = f"{answer.predicted.speedup:.2f}x{'' if answer.baseline_fits else ' *'}"
    cells = (
        f"{short_name(answer.name)}{drafts}", f"{answer.predicted.best.tpot_ms:.2f}", speedup,
        "runs" if answer.model_runs else "priced only",
    )  # fmt: skip
    return _kv_share(answer.baseline), (name, layers, *cells)


def _kv_share(plain: Prediction) -> float:
    """The share of a plain step's bytes that attention reads."""
    steps = [op for op in plain.breakdown if op.part == "target"]
    return sum(op.bytes for op in steps if category(op.kind) == "attention") / sum(op.bytes for op in steps)


def _layer_kinds(shape: ModelShape) -> str:
    """What layers have beside attention over all tokens and a dense MLP."""
    kinds = {
        "states": shape.state_layers, "latents": shape.is_mla, "windows": shape.window_layers, "experts": shape.is_moe,
    }  # fmt: skip
    return ", ".join(kind for kind, present in kinds.items() if present) or "dense"
