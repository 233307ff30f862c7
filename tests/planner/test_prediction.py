"""Predictions: how figures, bands, sources and the breakdown follow from each other."""

from dataclasses import asdict, replace
from statistics import NormalDist

import numpy as np
import pytest

from ridgeplan.planner.acceptance import Acceptance, AcceptanceModel, AcceptanceRow
from ridgeplan.planner.acceptance.model import CERTAIN
from ridgeplan.planner.prediction import BAND_DEVIATIONS, predict, predict_all, sampled_tpot_ms, sampled_ttft_ms
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Rates, shipped_profiles
from ridgeplan.roofline.plan.plan import KVFormat, Placement, Workload
from ridgeplan.roofline.plan.presets import preset

LLAMA = load_shape("Llama-3.1-8B")


def plan_of(name, **changes):
    return preset(name, Workload("Llama-3.1-8B", "h200", **{"context": 32768, "batch": 4, **changes}))


def with_classes(profile, **classes):
    return replace(profile, classes={**profile.classes, **classes})


@pytest.mark.parametrize("name", ["autoregressive", "quantspec", "specattn"])
def test_headline_figures_agree_with_the_round(h200_profile, name):
    prediction = predict(plan_of(name), LLAMA, h200_profile)
    assert prediction.best.tpot_ms == pytest.approx(prediction.round_ms / prediction.tokens_per_round)
    assert prediction.best.tokens_per_s == pytest.approx(4 * 1000 / prediction.best.tpot_ms)  # of 4 sequences
    assert prediction.round_s["draft"] == pytest.approx(prediction.gamma * prediction.draft_step_ms / 1e3)
    assert prediction.round_s["verification"] == pytest.approx(prediction.verify_ms / 1e3)
    assert prediction.round_ms == pytest.approx(1e3 * sum(prediction.round_s.values()))
    assert prediction.gamma == {"autoregressive": 0, "quantspec": 4, "specattn": 7}[name]


def test_peak_memory_is_the_larger_of_prefills_and_decodings(h200_profile):
    prediction = predict(plan_of("quantspec"), LLAMA, h200_profile)
    assert prediction.best.peak_memory_bytes == max(prediction.prefill_peak_bytes, prediction.decode_peak_bytes)
    kept = sum(prediction.memory_bytes[name] for name in ("weights", "draft_weights", "kv", "buffers", "libraries"))
    assert prediction.prefill_peak_bytes == pytest.approx(kept + prediction.memory_bytes["prefill_workspace"])
    # The workspace may be half as large or larger by half.
    half = (prediction.best.peak_memory_bytes - kept) / 2
    assert prediction.low.peak_memory_bytes == pytest.approx(kept + half)
    assert prediction.high.peak_memory_bytes == pytest.approx(kept + 3 * half)


def test_speedup_is_the_baselines_time_over_the_plans(h200_profile):
    plain, fast = predict_all([plan_of("autoregressive"), plan_of("quantspec")], LLAMA, h200_profile)
    assert fast.best.tpot_ms < plain.best.tpot_ms
    assert fast.against(plain).speedup == pytest.approx(plain.best.tpot_ms / fast.best.tpot_ms)
    assert plain.against(plain).speedup == 1


def test_the_band_of_plain_decoding_is_the_spread_of_its_classes(h200_profile):
    """Every class of the test profile has a spread of 5%; only linear layers of 30% count by their time."""
    prediction = predict(plan_of("autoregressive"), LLAMA, h200_profile)
    assert prediction.high.tpot_ms / prediction.best.tpot_ms == pytest.approx(1.05)
    assert prediction.best.ttft_ms / prediction.low.ttft_ms == pytest.approx(1.05)
    uneven = with_classes(h200_profile, linear=replace(h200_profile.classes["linear"], spread=0.3))
    prediction = predict(plan_of("autoregressive"), LLAMA, uneven)
    target = [op for op in prediction.breakdown if op.part == "target"]
    share = sum(op.seconds for op in target if op.kind == "linear") / sum(op.seconds for op in target)
    assert 0.2 < share < 0.9
    assert prediction.high.tpot_ms / prediction.best.tpot_ms == pytest.approx(1 + 0.3 * share + 0.05 * (1 - share))


def test_drafts_widen_the_band_by_their_share_of_the_round(h200_profile, monkeypatch):
    """Drafts on 4-bit weights whose class is fitted to 50%; all else to 0, and acceptance 1 leaves no band itself."""
    exact = {name: replace(rates, spread=0.0) for name, rates in h200_profile.classes.items()}
    monkeypatch.setattr(AcceptanceModel, "of", lambda *_: CERTAIN)
    profile = replace(h200_profile, classes={**exact, "linear_int4": replace(exact["linear_int4"], spread=0.5)})
    prediction = predict(plan_of("quantspec-weights"), LLAMA, profile)
    draft = [op for op in prediction.breakdown if op.part == "draft"]
    of_draft = sum(op.seconds for op in draft if op.kind == "linear_int4") / sum(op.seconds for op in draft)
    drafted = prediction.round_s["draft"] / sum(prediction.round_s.values())
    assert prediction.high.tpot_ms / prediction.best.tpot_ms == pytest.approx(1 + 0.5 * of_draft * drafted)


def test_throughput_is_low_where_time_is_high(h200_profile):
    prediction = predict(plan_of("quantspec"), LLAMA, h200_profile)
    assert prediction.low.tokens_per_s == pytest.approx(4 * 1000 / prediction.high.tpot_ms)
    assert prediction.high.tokens_per_s == pytest.approx(4 * 1000 / prediction.low.tpot_ms)


@pytest.mark.parametrize(
    "name, sources, expected",
    [
        ("autoregressive", {}, "calibrated"),
        ("autoregressive", {"attention": "transferred"}, "transferred"),
        ("autoregressive", {"linear_int4": "prior"}, "calibrated"),  # which plain decoding does not run
        ("quantspec-kv", {}, "transferred"),  # acceptance of other models
        ("quantspec-kv", {"attention_int4": "published"}, "published"),  # drafts' class
        ("quantspec-kv", {"linear": "prior"}, "prior"),
        ("quest", {}, "prior"),  # scans of page bounds were not timed
        ("magicdec-quest", {}, "prior"),
        ("specattn-weights", {}, "extrapolated"),
        ("specattn-weights", {"top_k": "prior"}, "prior"),
        ("magicdec-streaming", {"top_k": "prior"}, "transferred"),  # nothing is ranked
        ("specattn-weights", {"sparse_attention_full": "prior"}, "prior"),
        ("specattn-weights", {"gather": "prior"}, "extrapolated"),  # its attention was calibrated by itself
        ("progressive", {"top_k": "prior", "two_bit_scan": "prior"}, "extrapolated"),  # within its attention
        ("progressive", {"progressive_attention": "prior"}, "prior"),
        ("progressive-target", {}, "calibrated"),
        ("progressive-target", {"two_bit_scan": "published"}, "published"),
        ("progressive-target", {"progressive_attention": "prior"}, "calibrated"),  # of drafts
    ],
)
def test_the_weakest_source_speaks_for_the_prediction(h200_profile, name, sources, expected):
    classes = {kind: replace(h200_profile.classes[kind], source=source) for kind, source in sources.items()}
    assert predict(plan_of(name), LLAMA, with_classes(h200_profile, **classes)).source == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("openai/gpt-oss-20b", "calibrated"),  # experts in MXFP4, which the runtime reads as they are stored
        ("Qwen/Qwen3.5-9B", "calibrated"),
        ("deepseek-ai/DeepSeek-V2-Lite", "calibrated"),
        ("deepseek-ai/DeepSeek-V3", "prior"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "prior"),  # Mamba-2, and experts without a gate
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "prior"),  # states that decay by channel
        ("zai-org/GLM-5", "prior"),  # a sparse indexer
    ],
)  # fmt: skip
def test_layers_without_kernels_of_their_own_rest_on_priors(model, expected):
    (profile,) = (each for each in shipped_profiles() if each.hardware.name == "h200")
    plan, shape = preset("autoregressive", Workload(model, "h200", 8192)), load_shape(model)
    predicted = predict(plan, shape, profile)
    assert predicted.source == expected
    assert (predicted.high.tpot_ms > 1.2 * predicted.best.tpot_ms) == (expected == "prior")


@pytest.mark.parametrize("kind", ["state", "attention_mla"])
def test_states_and_latents_count_among_the_kernels_of_a_pass(kind):
    (profile,) = (each for each in shipped_profiles() if each.hardware.name == "h200")
    shape = load_shape({"state": "Qwen/Qwen3.5-9B", "attention_mla": "deepseek-ai/DeepSeek-V2-Lite"}[kind])
    unknown = replace(profile, classes={name: rates for name, rates in profile.classes.items() if name != kind})
    assert predict(preset("autoregressive", Workload(shape.name, "h200", 8192)), shape, unknown).source == "prior"


def test_offloading_rests_on_a_prior(h200_profile):
    offloading = replace(plan_of("autoregressive"), placement=Placement(True, 2048))
    assert predict(offloading, LLAMA, h200_profile).source == "prior"


def test_measured_acceptance_leaves_the_calibration_as_the_weakest_source(h200_profile):
    plan, shape = preset("quantspec-kv", Workload("SmolLM2-135M", "h200", 4096)), load_shape("SmolLM2-135M")
    row = AcceptanceRow("kv4", shape.name, 0.135, 4096, 0.97, "measured", "here")
    assert predict(plan, shape, h200_profile).source == "transferred"  # from its instruction-tuned version
    assert predict(plan, shape, replace(h200_profile, acceptance=(asdict(row),))).source == "calibrated"


def test_the_breakdown_names_the_classes_whose_rates_apply():
    """Of 3 drafts of 1 sequence 4 rows are verified, of 2 sequences 8, and 4-bit drafts with 4 rows take 14336 inputs
    in bfloat16."""
    (profile,) = shipped_profiles()
    kinds, plans = {}, [plan_of("quantspec-int8", batch=batch) for batch in (1, 2, 4)]
    plans = [replace(plan, speculation=plan.speculation.with_gamma(3)) for plan in plans]
    for plan, predicted in zip(plans, predict_all(plans, LLAMA, profile), strict=True):
        kinds[plan.workload.batch] = {(op.part, op.op): op.kind for op in predicted.breakdown}
    rows = ("draft", "qkv projection"), ("draft", "mlp down"), ("target", "mlp down"), ("target", "lm head")
    names = {batch: [kinds[batch][row].removeprefix("linear_") for row in rows] for batch in kinds}
    assert names == {
        1: ["int4_integer", "int4_integer", "int8_integer", "int8_integer"],
        2: ["int4_integer", "int4_integer", "int8", "int8"],
        4: ["int4_integer", "int4", "int8", "int8"],
    }


def test_the_breakdown_holds_what_a_plan_launches(h200_profile):
    plain, drafting = predict_all([plan_of("autoregressive"), plan_of("quantspec")], LLAMA, h200_profile)
    assert {op.part for op in plain.breakdown} == {"prefill", "target"}
    assert {op.part for op in drafting.breakdown} == {"prefill", "draft", "target"}
    launches = {(op.part, op.op): op.launches for op in drafting.breakdown}
    assert launches["draft", "attention"] == launches["target", "attention"] == 32
    # 4 rows activate in the product itself, the 20 rows of a verification in a kernel of their own.
    assert ("draft", "mlp swiglu") not in launches
    assert launches["target", "mlp swiglu"] == 32


def test_operations_add_up_to_the_pass(h200_profile):
    """A device that works by itself hides the host's dispatch; drafts also draw a token, which no pass holds."""
    prediction = predict(plan_of("autoregressive", new_tokens=1), LLAMA, h200_profile)
    assert 1e3 * sum(op.seconds for op in prediction.breakdown if op.part == "target") == pytest.approx(
        prediction.verify_ms
    )
    attention = next(op for op in prediction.breakdown if (op.part, op.op) == ("target", "attention"))
    rates = h200_profile.classes["attention"]
    assert attention.seconds == pytest.approx(32 * rates.launch_s + attention.bytes / (0.85 * 4.8e12))
    assert attention.intensity == attention.flops / attention.bytes


def test_time_between_kernels_is_an_operation_of_decode_passes(h200_profile):
    """2 us of each of 32 layers, and what each pass takes beside them; it moves nothing, so has no intensity."""
    profile = replace(h200_profile, draft_gap_s=10e-6, target_gap_s=30e-6)
    prediction = predict(plan_of("quantspec", new_tokens=1), LLAMA, profile)
    gaps = {op.part: op for op in prediction.breakdown if op.kind == "gap"}
    assert {part: op.seconds for part, op in gaps.items()} == pytest.approx({"draft": 74e-6, "target": 94e-6})
    assert {(op.op, op.flops, op.bytes, op.intensity) for op in gaps.values()} == {("between kernels", 0, 0, 0)}
    target_s = sum(op.seconds for op in prediction.breakdown if op.part == "target")
    assert 1e3 * target_s == pytest.approx(prediction.verify_ms)
    none = replace(h200_profile, classes={name: r for name, r in h200_profile.classes.items() if name != "gap"})
    assert not any(op.kind == "gap" for op in predict(plan_of("quantspec"), LLAMA, none).breakdown)


def test_an_error_of_the_gaps_widens_the_band_by_their_share(h200_profile):
    profile = with_classes(h200_profile, **{name: replace(r, spread=0.0) for name, r in h200_profile.classes.items()})
    profile = with_classes(profile, gap=replace(profile.classes["gap"], spread=0.5))
    prediction = predict(plan_of("autoregressive", new_tokens=1), LLAMA, profile)
    assert prediction.high.tpot_ms / prediction.best.tpot_ms == pytest.approx(1 + 0.5 * 64e-3 / prediction.verify_ms)


def test_one_plan_and_many_are_predicted_alike(h200_profile):
    names = ["autoregressive", "quantspec", "specattn", "dapq"]
    together = predict_all([plan_of(name) for name in names], LLAMA, h200_profile)
    for name, row in zip(names, together, strict=True):
        prediction = predict(plan_of(name), LLAMA, h200_profile)
        for figures in ("best", "low", "high"):
            assert vars(getattr(row, figures)) == pytest.approx(vars(getattr(prediction, figures)))
        assert row.round_s == pytest.approx(prediction.round_s)
        assert row.memory_bytes == pytest.approx(prediction.memory_bytes)
        times = [{(op.part, op.op): op.seconds for op in prediction.breakdown} for prediction in (row, prediction)]
        assert times[0] == pytest.approx(times[1])


def test_slower_rates_take_longer(h200_profile):
    slow = with_classes(h200_profile, attention=Rates(0.425, 0.35, 4e-6, 0.05))  # half as fast in every respect
    fast, halved = (predict(plan_of("autoregressive"), LLAMA, profile) for profile in (h200_profile, slow))
    times = [sum(op.seconds for op in profile.breakdown if op.kind == "attention") for profile in (fast, halved)]
    assert times[1] == pytest.approx(2 * times[0])


# Times under shared errors: what is shared cancels, what differs is told apart by its spread.


def predictions(profile, *names, context=32768):
    workload = Workload("Llama-3.1-8B", "h200", context)
    return predict_all([preset(name, workload) for name in names], LLAMA, profile)


def with_spreads(profile, default, **spreads):
    classes = {name: replace(rates, spread=spreads.get(name, default)) for name, rates in profile.classes.items()}
    return replace(profile, classes=classes)


def certain(predicted):
    known = predicted.acceptance
    return replace(predicted, acceptance=Acceptance(known.best, known.best, known.best, known.source, known.where))


@pytest.mark.parametrize("name", ["autoregressive", "quantspec", "specattn"])
def test_without_errors_every_sample_is_the_prediction(h200_profile, name):
    exact = replace(with_spreads(h200_profile, 0.0), target_gap_s=3e-5, draft_gap_s=2e-5, round_s=6e-5)
    (prediction,) = predictions(exact, name)
    tpot_ms, ttft_ms = sampled_tpot_ms([certain(prediction)], exact), sampled_ttft_ms([prediction], exact)
    assert tpot_ms == pytest.approx(prediction.best.tpot_ms)
    assert ttft_ms == pytest.approx(prediction.best.ttft_ms)


def test_an_error_that_all_classes_share_alike_scales_both_plans_alike(h200_profile):
    """If only linear layers err, a plan's time moves by their share of it and no more."""
    linear = with_spreads(h200_profile, 0.0, linear=0.2)
    (plain,) = predictions(linear, "autoregressive")
    target = [op for op in plain.breakdown if op.part == "target"]
    share = sum(op.seconds for op in target if op.kind == "linear") / sum(op.seconds for op in target)
    passes = plain.round_s["verification"] / sum(plain.round_s.values())
    (samples,) = sampled_tpot_ms([plain], linear)
    # One standard deviation is a factor of 1.2: the quantiles of a log-normal error of that share of the time.
    for deviations in (-1, 0, 1):
        expected = plain.best.tpot_ms * (1 + passes * share * (1.2**deviations - 1))
        assert np.quantile(samples, NormalDist().cdf(deviations)) == pytest.approx(expected, rel=0.01)


def test_equal_plans_are_equal_in_every_sample(h200_profile):
    prediction, other = predictions(h200_profile, "quantspec", "quantspec")
    first, second = sampled_tpot_ms([prediction, other], h200_profile)
    assert (first == second).all()


def test_what_two_plans_share_does_not_tell_them_apart(h200_profile):
    """Both read the same weights and differ in the cache: an error of linear layers leaves their order as it is."""
    noisy = with_spreads(h200_profile, 0.0, linear=0.5)
    plain, int8 = sampled_tpot_ms(predictions(noisy, "autoregressive", "int8", context=65536), noisy)
    assert plain.std() > 0.1 * plain.mean()
    assert (int8 < plain).all()


def test_acceptances_spread_to_the_ends_of_their_bands(h200_profile):
    """Their bands hold 90%: a twentieth of all samples is below the low end, and another above the high one."""
    exact = with_spreads(h200_profile, 0.0)
    (prediction,) = predictions(exact, "quantspec")
    prediction = replace(prediction, acceptance=Acceptance(0.6, 0.8, 0.9, "prior", "a test"))
    (samples,) = sampled_tpot_ms([prediction], exact)
    best = 1 + sum(0.8**power for power in range(1, prediction.gamma + 1))
    for acceptance, quantile in ((0.9, 0.05), (0.8, 0.5), (0.6, 0.95)):
        tokens = 1 + sum(acceptance**power for power in range(1, prediction.gamma + 1))
        assert np.quantile(samples, quantile) == pytest.approx(prediction.best.tpot_ms * best / tokens, rel=0.03)
    assert NormalDist().cdf(BAND_DEVIATIONS) == pytest.approx(0.95, abs=1e-4)


def test_samples_are_the_same_in_every_run(h200_profile):
    prediction = predictions(h200_profile, "quantspec")
    assert (sampled_tpot_ms(prediction, h200_profile) == sampled_tpot_ms(prediction, h200_profile)).all()
    assert len(np.unique(sampled_tpot_ms(prediction, h200_profile))) > 1000


@pytest.mark.parametrize(("context", "kind"), [(32_768, "attention_d64"), (64, "attention_int4_d64")])
def test_windows_that_hide_tokens_are_priced_in_full_precision(h200_profile, context, kind):
    """gpt-oss's window is 128 tokens, and its heads have 64 channels; shorter texts are codes in all layers."""
    shape = load_shape("gpt-oss-20b")
    plan = preset("quantspec", Workload(shape.name, "h200", context, new_tokens=32))

    def window_of(profile):
        parts = predict(plan, shape, profile).breakdown
        return next(op for op in parts if (op.part, op.op) == ("draft", "attention (window)"))

    window = window_of(h200_profile)
    assert window.kind == kind
    for changed in ("attention_d64", "attention_int4_d64"):
        slow = replace(h200_profile.classes[changed], launch_s=1e-3)
        seconds = window_of(with_classes(h200_profile, **{changed: slow})).seconds
        assert (seconds > 2 * window.seconds) == (changed == kind)


@pytest.mark.parametrize(("context", "batch", "added_ms"), [(32768, 1, 0.55), (120_000, 1, 1.17), (32768, 8, 2.54)])
def test_int8_latents_take_longer_than_16_bit_ones(context, batch, added_ms):
    """By what they added to steps with 8-bit weights on an H200, to which the factor was fitted.

    Of eight sequences by the kernel before today's tiles; the others are in models_h200.json.
    """
    shape = load_shape("deepseek-ai/DeepSeek-V2-Lite")
    plain = preset("int8-weights", Workload(shape.name, "h200", context, 256, batch))
    coded = replace(plain, kv=replace(plain.kv, format=KVFormat.INT8))
    h200 = next(profile for profile in shipped_profiles() if profile.hardware.name == "h200")
    times = [predict(plan, shape, h200).best.tpot_ms for plan in (plain, coded)]
    assert times[1] - times[0] == pytest.approx(added_ms, abs=0.16)
