"""Predicted acceptance: own measurements first, how differences combine, sources, bands, and what never rises."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from cross_validation import HeldOut, predicted_from
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.acceptance.rows import SPARSE_SELECTIONS, AcceptanceRow, core_name, shipped_rows
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.policy import SPARSE_RATIO, make_selection
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import tokens_per_round

LLAMA = "Llama-3.1-8B"
OWN = AcceptanceRow(
    "w4kv4", "meta-llama/Llama-3.1-8B", 8.03, 32768, 0.9, "measured", "here", gamma=8, quantizer="gptq",
    dtype="bfloat16", tokens=256, text="my text",
)  # fmt: skip


def changed(plan, selection=None, ratio=None, **speculation):
    """The plan with another gamma, another selection or another ratio."""
    speculation_of_plan = replace(plan.speculation, **speculation)
    if selection is not None:
        speculation_of_plan = replace(
            speculation_of_plan,
            selection=make_selection(
                selection, ratio=speculation_of_plan.ratio if speculation_of_plan.sparse else SPARSE_RATIO
            ),
        )
    return replace(plan, speculation=speculation_of_plan if ratio is None else speculation_of_plan.with_ratio(ratio))


def known(model, name, context=4096, own_rows=(), **speculation):
    plan = changed(preset(name, Workload(model, "h200", context)), **speculation)
    return AcceptanceModel.for_model(load_shape(model), context, [asdict(row) for row in own_rows]).of(plan)


def width(prediction):
    return np.log((1 - prediction.low) / (1 - prediction.high))


def test_spellings_of_a_model_count_once():
    """LWM, Llama-2-7B-32K, Qwen2.5-1.5B, Qwen2.5-Coder-0.5B and SmolLM2, the last two also by their GGUFs' names."""
    assert "of w4kv4 from 5 models" in known(LLAMA, "quantspec").where


def test_a_models_own_row_is_measured_and_narrow():
    before, after = known(LLAMA, "quantspec", 32768), known(LLAMA, "quantspec", 32768, [OWN])
    assert (before.source, after.source) == ("transferred", "measured")
    assert "here" in after.where
    assert after.best == pytest.approx(0.9, abs=0.01)
    assert width(after) < width(before) / 2


def test_more_measurements_weigh_more():
    """Of one row the prediction stays a little towards other models; of eight texts it is where they are."""
    many = [replace(OWN, text=f"text {number}") for number in range(8)]
    single, eight = (known(LLAMA, "quantspec", 32768, rows) for rows in ([OWN], many))
    prior = known(LLAMA, "quantspec", 32768).best
    assert 0.9 < single.best < prior
    assert abs(eight.best - 0.9) <= abs(known(LLAMA, "quantspec", 32768, many[:2]).best - 0.9)


def test_rows_of_several_texts_predict_another_one_less_surely():
    several = [OWN, replace(OWN, text="another")]
    assert width(known(LLAMA, "quantspec", 32768, several)) > width(known(LLAMA, "quantspec", 32768, [OWN]))


def test_a_measurement_is_less_certain_at_another_context():
    near, far = (known(LLAMA, "quantspec", context, [OWN]) for context in (32768, 524288))
    assert width(far) > width(near)
    assert (near.source, far.source) == ("measured", "extrapolated")


def test_a_measured_whole_moves_its_parts():
    low = [replace(OWN, acceptance=0.7)]
    assert known(LLAMA, "quantspec-weights", 32768, low).best < known(LLAMA, "quantspec-weights", 32768).best - 0.1


def test_a_measured_part_moves_the_whole_and_not_the_other_part():
    low = [replace(OWN, draft="w4", acceptance=0.7)]
    assert known(LLAMA, "quantspec", 32768, low).best < 0.75
    assert known(LLAMA, "quantspec-kv", 32768, low).best == pytest.approx(
        known(LLAMA, "quantspec-kv", 32768).best, abs=0.005
    )


@pytest.mark.parametrize(
    "full, parts",
    [
        # A 1.5B Qwen2.5 at 30k and 120k tokens: 2-bit keys choose 7% or 3%, alone and with 4-bit KV and weights. The
        # regression has no row of them.
        (0.898, (0.950, 0.912)),
        (0.876, (0.919, 0.912)),
        (0.902, (0.956, 0.911)),
        (0.890, (0.930, 0.911)),
    ],
)
def test_disagreements_combine_as_they_were_measured_to(full, parts):
    assert 1 - np.hypot(*(1 - part for part in parts)) == pytest.approx(full, abs=0.005)


def test_fewer_tokens_and_fewer_bits_combine_like_standard_deviations():
    both, tokens = known(LLAMA, "specattn-int4"), known(LLAMA, "specattn-weights", gamma=4)
    codes = known(LLAMA, "quantspec")
    # bfloat16's rounding is in each of the two, and once in both.
    assert 1 - both.best == pytest.approx(np.hypot(1 - tokens.best, 1 - codes.best), rel=0.02)


@pytest.mark.parametrize(
    "model, name, context, source",
    [
        ("Qwen3-8B", "specattn", 110592, "published"),
        ("Qwen3-8B", "specattn", 100000, "published"),
        ("Qwen3-8B", "specattn", 32768, "transferred"),  # of its own rows, too far
        (LLAMA, "quantspec", 4096, "transferred"),
        (LLAMA, "quantspec", 4194304, "extrapolated"),
        ("meta-llama/Llama-3.1-70B", "quantspec", 4096, "extrapolated"),
        ("Qwen2.5-0.5B", "quantspec", 4096, "transferred"),  # the rows are of Coder, instruction-tuned
        ("Llama-2-7B-32K", "quantspec", 8192, "published"),
        ("Llama-2-7B-32K", "quantspec-kv", 8192, "transferred"),  # only both parts together are published
    ],
)
def test_sources(model, name, context, source):
    acceptance = known(model, name, context)
    assert acceptance.source == source
    assert ("no row has" in acceptance.where) == (source == "extrapolated")


def test_a_ratio_beyond_all_rows_is_extrapolated():
    acceptance = known(LLAMA, "magicdec-streaming", context=65536, ratio=0.01)
    assert acceptance.source == "extrapolated"
    assert "no row has such a share" in acceptance.where
    assert known(LLAMA, "magicdec-streaming", context=65536, ratio=0.04).source == "transferred"


def test_drafts_that_read_their_floor_are_accepted_as_often_as_with_that_ratio():
    """256 of 4096 tokens are 6.25%."""
    low, same, more = (known(LLAMA, "magicdec-streaming", ratio=ratio) for ratio in (0.01, 0.0625, 0.25))
    assert low == same
    assert low.best < more.best
    plan = changed(preset("magicdec-streaming", Workload(LLAMA, "h200", 4096)))
    bare = replace(plan, speculation=replace(plan.speculation, selection=replace(plan.speculation.selection, floor=0)))
    gamma, ratio = np.array([3, 3]), np.array([0.01, 0.0625])
    (floored, free) = AcceptanceModel.for_model(load_shape(LLAMA), 4096).competing_of_all(
        [plan, bare], [(gamma, ratio)] * 2
    )
    assert floored[0] == floored[1] == free[1] > free[0]


def test_a_policy_without_rows_is_a_prior_with_a_wider_band():
    head, streaming = (
        known(LLAMA, "magicdec-streaming", selection=name) for name in ("retrieval-head", "streamingllm")
    )
    assert head.source == "prior"
    assert 0 < head.best < 1
    assert width(head) > width(streaming)


def test_a_policy_without_rows_competes_at_the_low_end_and_one_with_rows_at_the_best():
    model = AcceptanceModel.for_model(load_shape(LLAMA), 32768)
    base = preset("specattn-int4", Workload("m", "h200", 32768))
    gamma, ratio = np.array([1, 1]), np.array([0.07, 0.25])
    for selection, end in (("retrieval-head", "low"), ("specextend", "best")):
        plan = changed(base, selection=selection, gamma=1)
        at_end = [getattr(model.of(changed(plan, ratio=share)), end) for share in ratio]
        assert model.competing(plan, gamma, ratio) == pytest.approx(at_end)
        assert (model.competing(plan, gamma, ratio) < model.best(plan, gamma, ratio)).all() == (end == "low")


def test_the_measured_acceptance_is_the_nearest_rows_of_the_model():
    rows = [OWN, replace(OWN, context=16384, acceptance=0.8)]
    model = AcceptanceModel.for_model(load_shape(LLAMA), 32768, list(map(asdict, rows)))
    names = ("quantspec", "quantspec-int8", "quantspec-kv", "int8", "progressive")
    plans = [preset(name, Workload("m", "h200", 32768)) for name in names]
    assert [model.measured(plan) for plan in plans] == [0.9, 0.9, None, 1.0, None]
    assert AcceptanceModel.for_model(load_shape("Llama-2-7B-32K"), 8192).measured(plans[0]) is None  # published only


def test_figures_published_of_full_precision_weights_are_not_those_of_8_bit_ones():
    sources = [known("Llama-2-7B-32K", name, 8192).source for name in ("quantspec", "quantspec-int8")]
    assert sources == ["published", "extrapolated"]


def test_the_weakest_of_two_sources_speaks_for_both():
    assert known("Qwen3-8B", "specattn", 110592).source == "published"
    assert known("Qwen3-8B", "specattn-int4", 110592, ratio=0.07).source == "extrapolated"  # weaker than published


def test_plain_decoding_and_identical_reads_are_certain():
    for name in ("autoregressive", "int8"):
        assert known(LLAMA, name).best == 1


def test_cpus_and_gpus_have_the_arithmetic_and_the_quantizer_of_their_own():
    shape, plan = load_shape("SmolLM2-135M"), preset("quantspec-kv", Workload("m", "h200", 4096))
    gpu, cpu = (AcceptanceModel.for_model(shape, 4096, kind=kind).of(plan).best for kind in ("gpu", "cpu"))
    assert cpu > gpu + 0.002  # bfloat16 rounds
    weights = preset("quantspec-weights", Workload("m", "h200", 4096))
    gpu, cpu = (AcceptanceModel.for_model(shape, 4096, kind=kind).of(weights).best for kind in ("gpu", "cpu"))
    assert gpu > cpu  # GPTQ over the whole Hessian


def test_grid_and_single_agree():
    acceptance, plan = (
        AcceptanceModel.for_model(load_shape(LLAMA), 32768),
        preset("specattn", Workload("m", "h200", 32768)),
    )
    grid = [(gamma, ratio) for gamma in (1, 4, 15) for ratio in (0.02, 0.1, 0.5)]
    single = [
        acceptance.of(replace(plan, speculation=replace(plan.speculation, gamma=gamma).with_ratio(ratio))).best
        for gamma, ratio in grid
    ]
    gamma, ratio = (np.array(axis) for axis in zip(*grid, strict=True))
    assert acceptance.best(plan, gamma, ratio) == pytest.approx(single)
    weights = preset("quantspec-weights", Workload("m", "h200", 32768))
    assert acceptance.best(weights, gamma, np.ones(9)).shape == (9,)
    assert list(acceptance.best(preset("autoregressive", Workload("m", "h200", 8)), gamma, ratio)) == [1.0] * 9


MODELS = st.sampled_from(
    [LLAMA, "Qwen3-8B", "Llama-2-7B-32K", "SmolLM2-135M", "Qwen2.5-0.5B", "meta-llama/Llama-3.1-70B"]
)
SELECTIONS = st.sampled_from(SPARSE_SELECTIONS)
CONTEXTS = st.integers(512, 4_000_000)


@settings(deadline=None, max_examples=60)
@given(model=MODELS, selection=SELECTIONS, context=CONTEXTS, gamma=st.integers(1, 14), ratio=st.floats(0.001, 0.9))
def test_drafts_that_read_less_or_stand_later_never_agree_more(model, selection, context, gamma, ratio):
    model_of = AcceptanceModel.for_model(load_shape(model), context)
    workload = Workload("m", "h200", context)

    def best(name, **changes):
        plan = preset(name, workload)
        return model_of.of(changed(plan, gamma=gamma, **changes)).best

    sparse = {"selection": selection, "ratio": ratio}
    everything = best("quantspec")
    assert everything <= min(best("quantspec-kv"), best("quantspec-weights")) + 1e-12
    assert best("quantspec", **sparse) <= everything + 1e-12
    if selection != "progressive":  # which needs a cache of codes
        assert best("quantspec", **sparse) <= best("quantspec-weights", **sparse) + 1e-12
    base = "specattn-int4"  # its cache holds codes, which some policies choose by
    assert best(base, selection=selection, ratio=ratio) <= best(base, selection=selection, ratio=1.1 * ratio)
    plan = preset(base, workload)
    later = changed(plan, gamma=gamma + 1, selection=selection, ratio=ratio)
    assert model_of.of(later).best <= best(base, **sparse) + 1e-12


@pytest.mark.parametrize("name", ["quantspec", "quantspec-kv", "quantspec-weights", "magicdec-streaming", "specattn"])
@pytest.mark.parametrize(
    "model, first", [(LLAMA, 512), ("Qwen3-4B", 512), ("Qwen2.5-0.5B", 122880), ("SmolLM2-135M", 32768)]
)
def test_acceptance_never_rises_with_context_beyond_the_models_own_rows(model, first, name):
    values = [known(model, name, first << octaves).best for octaves in range(6)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("name", ["specattn", "magicdec-snapkv"])
def test_a_rise_that_was_measured_with_one_selection_is_not_predicted_of_another(name):
    """StreamingLLM's rows of SmolLM2 rise there, by 0.02 to 0.13; nothing was measured of the others."""
    before, after = (known("SmolLM2-135M", "magicdec-streaming", context).best for context in (4096, 8192))
    assert before < after
    values = [known("SmolLM2-135M", name, 512 << octaves).best for octaves in range(12)]
    assert values == sorted(values, reverse=True)


def test_bands_widen_beyond_the_rows():
    widths = [width(known("Llama-3.1-8B", "quantspec-kv", context)) for context in (122880, 1 << 20, 1 << 22)]
    assert widths == sorted(widths)
    sizes = [width(known(model, "quantspec", 8192)) for model in (LLAMA, "meta-llama/Llama-3.1-70B")]
    assert sizes == sorted(sizes)


def test_a_1_5b_model_on_a_novel_lies_in_the_band():
    """Measured elsewhere on another such model and novel, as 0.837 to 0.901 at 6k to 24k tokens, 0.869 in the middle.

    There are no rows of it, as it is not recorded which draft each figure was of.
    """
    shape = replace(load_shape("Qwen2.5-0.5B"), name="another-1.5B", hidden=1536, layers=28, intermediate=8960,
                    q_heads=12, kv_heads=2, head_dim=128)  # fmt: skip
    acceptance = AcceptanceModel.for_model(shape, 24576).of(preset("quantspec", Workload("m", "h200", 24576)))
    assert acceptance.low < 0.869 < acceptance.high


@pytest.mark.parametrize("model", ["Qwen3-8B", "openai/gpt-oss-20b"])
def test_quests_published_gain_over_streamingllm_lies_in_the_bands(model):
    """SpecAttn, section 2: 22% more tokens a round than StreamingLLM at gamma 5. No row, as neither is given alone."""
    quest, streaming = (
        known(model, name, 110592, gamma=5, ratio=0.07) for name in ("magicdec-quest", "magicdec-streaming")
    )
    gain = tokens_per_round(quest.best, 5) / tokens_per_round(streaming.best, 5)
    assert 1.0 < gain < 1.22 < tokens_per_round(quest.high, 5) / tokens_per_round(streaming.low, 5)


def test_later_drafts_of_a_round_are_predicted_to_agree_less_where_the_rows_say_so():
    """SpecAttn's set ages within a round: measured 0.90 at the first draft, 0.74 at the fifth."""
    few, many = (known("Qwen3-8B", "specattn", 110592, gamma=gamma).best for gamma in (2, 12))
    assert many < few - 0.01
    assert known(LLAMA, "quantspec", gamma=12).best == pytest.approx(known(LLAMA, "quantspec", gamma=2).best, abs=0.01)


# Predictions of rows that the regression has not seen: neither their model, in any tuning, nor their text.

BITS = ("kv8", "kv4", "w4", "w4kv4")


@pytest.fixture(scope="module")
def held_out() -> list[HeldOut]:
    rows = shipped_rows()
    return [
        row_left
        for model, text in sorted({(core_name(row.model), row.text) for row in rows})
        for row_left in predicted_from(
            [row for row in rows if core_name(row.model) != model and row.text != text],
            [row for row in rows if core_name(row.model) == model and row.text == text],
        )
    ]


def nearest(row: AcceptanceRow) -> AcceptanceRow:
    """The nearest row of this draft, in octaves of size and context, of another model and another text."""
    others = [
        other
        for other in shipped_rows()
        if other.draft == row.draft and core_name(other.model) != core_name(row.model) and other.text != row.text
    ]
    return min(
        others,
        key=lambda other: abs(np.log(other.parameters / row.parameters)) + abs(np.log(other.context / row.context)),
    )


def test_drafts_of_fewer_bits_are_predicted_better_than_by_the_nearest_row(held_out):
    """These are the drafts that the runtime executes. Texts alone move QuantSpec's rows of one model by up to 0.05."""
    bits = [row for row in held_out if row.row.draft in BITS]
    error = np.mean([abs(value.error) for value in bits])
    by_nearest = np.mean([abs(nearest(value.row).acceptance - value.row.acceptance) for value in bits])
    assert error <= 0.025
    assert error < 0.8 * by_nearest
