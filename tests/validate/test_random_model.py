"""Rounds on models with random weights: what is taken of their times, and that they run like an engine's."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeplan.planner.prediction import predict
from ridgeplan.roofline.catalog.layers import MLP, Attention, LayerGroup, State
from ridgeplan.roofline.catalog.model_shape import WeightBits
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.ops import activated_experts
from ridgeplan.roofline.plan.plan import KVFormat, Speculation, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.linear import Dense, Mxfp4
from ridgeplan.runtime.speculation.speculator import RoundResult, RowResult
from ridgeplan.validate import random_model as module
from ridgeplan.validate.random_model import BusyMachine, RandomModel, RoundTimes, fill, llama_like_shape, measured_round
from ridgeplan.validate.suite.sections import rows_of

SHAPE = llama_like_shape(2, 64, 96, 4, 2, 32)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(h200_profile: Any) -> RandomModel:
    return RandomModel.build(SHAPE, CPU, Machine.of(h200_profile))


def round_of(draft: float, verify: float, idle: float, tokens: int) -> RoundResult:
    row = RowResult(list(range(tokens)), tokens - 1, tokens - 1)
    return RoundResult([row, row], {"draft": draft, "verify": verify, "flush": 0.5, "idle": idle})


def test_times_are_medians_and_a_draft_step_is_its_share() -> None:
    times = RoundTimes.of(4, [round_of(8, 2, 1, 3), round_of(12, 3, 1, 4), round_of(80, 50, 9, 2)])
    assert (times.draft_s, times.verify_s, times.keep_s, times.idle_s) == (3, 3, 0.5, 1)
    assert times.total_s == 4 * 3 + 3 + 0.5 + 1
    assert times.grown == 9  # of each sequence, over the three rounds
    assert times.spread is None


def test_plain_rounds_have_no_draft() -> None:
    times = RoundTimes.of(0, [round_of(0, 2, 0, 1)] * 4)
    assert (times.draft_s, times.total_s, times.spread) == (0, 2.5, 0)


def test_rounds_of_a_hybrid_have_every_layer(h200_profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_busy", lambda spread: False)
    attention, mlp = Attention(q_heads=4, kv_heads=2, head_dim=32, gate_width=128), MLP(intermediate=96)
    state = State(rule="gated_delta", key_heads=2, value_heads=4, key_dim=16, value_dim=32)
    groups = (
        LayerGroup(count=2, indices=(0, 2), state=state, mlp=mlp),
        LayerGroup(count=1, indices=(1,), attention=attention, mlp=mlp),
    )
    shape = replace(SHAPE, layers=3, architecture="qwen3_5_text", groups=groups)
    model = RandomModel.build(shape, CPU, Machine.of(h200_profile))
    plan = preset("quantspec-weights", Workload("random", "h200", 700, 256, batch=2))
    assert measured_round(model, plan).verify_s > 0
    kinds = [type(layer.mixer).__name__ for layer in model.drafter(plan).layers]
    assert kinds == ["DeltaWeights", "AttentionWeights", "DeltaWeights"]
    matrices = sum(linear.bytes for layer in model.weights.layers for linear in layer.projections)
    assert matrices == 4 * (shape.mixer_params + shape.dense_params)


def test_rounds_of_routed_experts_run_behind_a_dense_layer(h200_profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_busy", lambda spread: False)
    sizes = {"experts": 6, "experts_per_token": 2, "expert_intermediate": 32, "shared_experts_intermediate": 32}
    shape = replace(SHAPE, dense_layers=1, **sizes)
    model = RandomModel.build(shape, CPU, Machine.of(h200_profile))
    plan = preset("quantspec-weights", Workload("random", "h200", 700, 256, batch=2))
    assert measured_round(model, plan).verify_s > 0
    assert [type(layer.mlp).__name__ for layer in model.target(plan).layers] == ["GatedMLP", "RoutedMLP"]
    matrices = sum(linear.bytes for layer in model.weights.layers for linear in layer.projections)
    routers = sum(layer.mlp.router.nbytes for layer in model.weights.layers[1:])
    assert matrices + routers == 4 * (
        shape.mixer_params + shape.dense_params + shape.expert_params + shape.router_params
    )


def test_rows_with_random_codes_hit_as_many_experts_as_trained_ones_would(
    h200_profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes whose outputs repeat make the rows of later layers alike, so that they choose the same experts."""
    monkeypatch.setattr(module, "is_busy", lambda spread: False)
    shape = replace(
        llama_like_shape(6, 256, 512, 4, 2, 64, 1024), experts=64, experts_per_token=4, expert_intermediate=64
    )
    model = RandomModel.build(shape, CPU, Machine.of(h200_profile))
    hits, route = [], module.RoutedMLP.route

    def recorded(self: Any, rows: torch.Tensor) -> Any:
        chosen, weights = route(self, rows)
        hits.append(len(chosen.unique()))
        return chosen, weights

    monkeypatch.setattr(module.RoutedMLP, "route", recorded)
    measured_round(model, preset("int4-weights", Workload("random", "h200", 256, 256, batch=8)))
    last_steps = hits[-3 * shape.layers :]
    expected = float(activated_experts(64, 4, 8))
    assert sum(last_steps) / len(last_steps) > 0.8 * expected


def test_rounds_over_latent_rows_run(h200_profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_busy", lambda spread: False)
    latent = {"latent_rank": 32, "q_lora_rank": 64, "rope_head_dim": 16, "nope_head_dim": 32, "v_head_dim": 32}
    shape = replace(SHAPE, kv_heads=4, head_dim=48, **latent)
    model = RandomModel.build(shape, CPU, Machine.of(h200_profile))
    plan = preset("int8-weights", Workload("random", "h200", 700, 256, batch=2))
    drafting = replace(plan, kv=replace(plan.kv, format=KVFormat.FULL), speculation=Speculation(2))
    assert measured_round(model, drafting).draft_s > 0
    cache = module.random_cache(model, drafting)
    assert (cache.keys.shape[2:], cache.values.shape[2:]) == ((1, 700 + 256 + 3, 32), (1, 700 + 256 + 3, 16))
    coded = preset("quantspec", Workload("random", "h200", 700, 256, batch=2))
    assert measured_round(model, coded).draft_s > 0


def test_rounds_with_windows_sinks_and_shared_layers_run(h200_profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_busy", lambda spread: False)
    sizes = {"experts": 6, "experts_per_token": 2, "expert_intermediate": 32}
    sizes |= {"weight_bits": WeightBits(experts=4.25, format="mxfp4")}
    sizes |= {"traits": ("attention sinks", "other activation")}
    shape = replace(SHAPE, architecture="gpt_oss", layers=3, window_tokens=128, window_layers=2, **sizes)
    small = replace(Machine.of(h200_profile), memory_bytes=4 * shape.parameters - 1)
    model = RandomModel.build(shape, CPU, small)
    first, *others = model.weights.layers
    assert isinstance(first.mlp.down.layer, Mxfp4)
    assert others[0].mixer.sinks is not None and [layer is first for layer in others] == [True, False]
    assert [layer.window for layer in model.decoder.config.layers].count(128) == 2
    plan = preset("quantspec-int8", Workload("random", "h200", 700, 256, batch=2))
    assert measured_round(model, plan).draft_s > 0
    cache = module.random_cache(model, plan)
    assert sum(store.keys.nbytes for store in cache.stores) < 4 * 3 * 2 * 2 * 32 * 700


@pytest.mark.parametrize(
    "name", ["autoregressive", "int8", "quantspec", "quantspec-exact", "quantspec-weights", "int4-weights"]
)
def test_a_round_of_every_format_runs(model: RandomModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_busy", lambda spread: False)  # whatever else runs here
    plan = preset(name, Workload("random", "h200", 700, 256, batch=2))
    times = measured_round(model, plan)
    gamma = plan.speculation.gamma
    assert times.passes == gamma
    assert times.verify_s > 0 and (times.draft_s > 0) == (gamma > 0)
    count = module.TIMED_ROUNDS["cpu"]
    assert count <= times.grown <= count * (gamma + 1)


def test_drafts_share_the_embedding_and_their_layers_have_memory_of_their_own(model: RandomModel) -> None:
    workload = Workload("random", "h200", 700, 256)
    drafter = model.drafter(preset("quantspec", workload))
    assert drafter is model.drafter(preset("quantspec-weights", workload))
    assert drafter.embedding is model.weights.embedding
    packed = [layer.mixer.qkv.weight.packed.data_ptr() for layer in drafter.layers]  # type: ignore[attr-defined]
    assert len(set(packed)) == SHAPE.layers
    assert model.drafter(preset("quantspec-kv", workload)) is model.weights


def test_4_bit_targets_have_a_dense_head_and_their_drafts_the_same_weights(model: RandomModel) -> None:
    plan = preset("int4-weights", Workload("random", "h200", 700, 256))
    target = model.target(plan)
    assert (target.format.group, target.head) == (64, model.weights.head)  # groups of all 64 channels
    drafting = replace(plan, speculation=Speculation(gamma=2))
    assert [type(weights.head) for weights in (model.target(drafting), model.drafter(drafting))] == [Dense, Dense]
    assert model.drafter(drafting).layers is target.layers
    assert model.target(preset("quantspec", plan.workload)) is model.weights


def test_norms_of_heads_and_biases_run_where_a_shape_has_them(
    h200_profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_busy", lambda spread: False)  # whatever else runs here
    full = RandomModel.build(replace(SHAPE, qk_norm=True, attention_bias=True), CPU, Machine.of(h200_profile))
    layer = full.weights.layers[0]
    assert layer.mixer.qk_norm is not None and layer.mixer.qk_norm.weight.shape == (4 + 2, 32)
    assert layer.mixer.qkv.bias is not None and layer.mixer.qkv.bias.shape == ((4 + 2 * 2) * 32,)  # type: ignore[attr-defined]
    assert measured_round(full, preset("quantspec", Workload("random", "h200", 300, 256))).verify_s > 0


@pytest.mark.parametrize("name", ["autoregressive", "quantspec", "quantspec-exact"])
def test_a_filled_cache_holds_what_a_prompt_would_leave(name: str) -> None:
    plan = preset(name, Workload("random", "h200", 700, 256, batch=2))
    cache = Cache(SHAPE, KVCacheConfig.of(plan, SHAPE.layers), CPU, torch.float32)
    fill(cache, 700)
    assert cache.lengths.tolist() == [700, 700]
    assert bool(cache.active().all())
    assert cache.keys.std() == pytest.approx(1, abs=0.05)
    if cache.stores[0].coded:
        # Groups of 128, of which the last whole one stays in full precision: 700 // 128 - 1 = 4.
        metadata = AttentionMetadataBuilder(cache).draft_metadata(0)
        assert metadata.groups is not None and metadata.groups.tolist() == [4, 4]


def test_a_machine_that_stays_busy_is_told(model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, quiet = preset("int8", Workload("random", "h200", 700, 256)), [round_of(0, 1, 0, 1)] * 5
    noisy = [round_of(0, seconds, 0, 1) for seconds in (1, 1, 2, 4, 8)]
    tries = [noisy, noisy, quiet, noisy, noisy, noisy]
    monkeypatch.setattr(module, "_round_times", lambda *_: RoundTimes.of(0, tries.pop(0)))
    assert measured_round(model, plan).spread == 0
    with pytest.raises(BusyMachine, match="machine busy, spread"):
        measured_round(model, plan)
    assert not tries


def test_rows_compare_with_the_prediction_at_the_lengths_that_were_there(model: RandomModel, h200_profile: Any) -> None:
    plan = preset("quantspec", Workload("random", "h200", 700, 256))
    times = RoundTimes(4, 1e-3, 2e-3, 0.0, 0.0, 10, 0.0)
    rows = {row.kind: row for row in rows_of(plan, model, h200_profile, times)}
    assert set(rows) == {"draft step", "verification"}
    assert (rows["draft step"].measured, rows["verification"].measured) == (1.0, 2.0)
    ran = predict(preset("quantspec", Workload("random", "h200", 700, 10)), SHAPE, h200_profile)
    assert rows["draft step"].predicted == ran.draft_step_ms
    assert rows["verification"].predicted == pytest.approx(ran.verify_ms + 1e3 * ran.round_s["acceptance"])
    plain = preset("autoregressive", Workload("random", "h200", 700, 256))
    assert [row.kind for row in rows_of(plain, model, h200_profile, RoundTimes(0, 0, 1, 0, 0, 5, 0))] == ["plain step"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["autoregressive", "int8", "quantspec", "quantspec-exact", "quantspec-weights"])
def test_on_a_gpu_a_round_is_the_captured_graph(name: str, h200_profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_busy", lambda spread: False)
    model = RandomModel.build(load_shape("Qwen2.5-0.5B"), torch.device("cuda"), Machine.of(h200_profile))
    plan = preset(name, Workload("Qwen2.5-0.5B", "h200", 3000, 256, batch=2))
    held = torch.cuda.memory_allocated()
    times = measured_round(model, plan)
    assert 0 < times.verify_s < 1
    assert times.grown >= module.TIMED_ROUNDS["cuda"]
    codes = sum(tensor.nbytes for weight in model.quantized.values() for tensor in weight.tensors())
    assert torch.cuda.memory_allocated() <= held + codes + (64 << 20)  # its cache and graph are gone
