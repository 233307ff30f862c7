"""Acceptance: own measurements first, near rows before far ones, and how disagreements combine."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeplan.planner.acceptance import AcceptanceModel, AcceptanceRow, ratio_factor, same_model, shipped_rows
from ridgeplan.planner.plan import PlanError, Workload
from ridgeplan.planner.presets import preset
from ridgeplan.roofline.catalog.models import load_shape


def known(model, name, context=4096, own=()):
    return AcceptanceModel.for_model(load_shape(model), context, own).of(preset(name, Workload(model, "h200", context)))


def test_a_measured_model_at_a_measured_context_says_so():
    found = known("SmolLM2-135M", "quantspec-kv")
    assert found.source == "measured"
    assert found.best == pytest.approx(0.961, abs=0.01)
    assert found.low < found.best < found.high


@pytest.mark.parametrize("model, context, acceptance", [("SmolLM2-135M", 4096, 0.82), ("Qwen2.5-0.5B", 4096, 0.83)])
def test_drafts_with_4_bit_weights_have_the_quantizers_own_figures(model, context, acceptance):
    found = known(model, "quantspec", context)
    assert found.source == "measured"
    assert "float32" in found.where
    assert found.best == pytest.approx(acceptance, abs=0.01)


def test_an_unknown_model_takes_the_figures_of_the_nearest_in_size():
    small, large = known("Llama-3.2-1B", "quantspec"), known("Llama-3.1-8B", "quantspec")
    assert small.source == large.source == "transferred"
    assert small.best < large.best  # the small models' rows against the 7B models'


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Llama-2-7B-32K", "Qwen2.5-0.5B", "Llama-3.2-1B"])
@pytest.mark.parametrize("context", [4096, 32768, 131072])
def test_a_part_agrees_at_least_as_often_as_both(model, context):
    known_of = AcceptanceModel.for_model(replace(load_shape("Llama-3.1-8B"), name=model), context).by_kind
    assert min(known_of["w4"].best, known_of["kv4"].best) >= known_of["w4kv4"].best


def test_a_part_that_was_measured_stays():
    row = {"model": "Llama-3.1-8B", "parameters": 8.03, "context": 4096, "source": "measured", "where": "here"}
    own = [{**row, "draft": "w4", "acceptance": 0.7}]
    assert known("Llama-3.1-8B", "quantspec-weights", own=own).best == pytest.approx(0.7)


def test_own_rows_of_the_same_model_come_first():
    row = {
        "draft": "w4kv4",
        "model": "Llama-3.1-8B",
        "parameters": 8.03,
        "context": 4096,
        "ratio": 1.0,
        "acceptance": 0.99,
        "source": "measured",
        "where": "this machine",
    }
    found = known("Llama-3.1-8B", "quantspec", own=[row])
    assert (found.best, found.source) == (pytest.approx(0.99), "measured")


def own_rows(*entries):
    """Rows of one model whose every factor of 2 in size is another weight: (draft, context, billions, acceptance)."""
    common = {"model": "Llama-3.1-8B", "source": "measured", "where": "here"}
    names = ("draft", "context", "parameters", "acceptance")
    return [{**common, **dict(zip(names, entry, strict=True))} for entry in entries]


@pytest.mark.parametrize(
    "context, parameters, disagreement",
    [
        (4096, 8.03, 0.1),
        (8192, 8.03, (0.1 / 4 + 0.3 / 4) / (1 / 4 + 1 / 4)),  # between both, each a quarter for a factor of 2
        (16384, 8.03, (0.1 / 16 + 0.3) / (1 / 16 + 1)),
        (16384, 16.06, (0.1 / 16 + 0.3 / 2) / (1 / 16 + 1 / 2)),  # half for a factor of 2 in size
    ],
)
def test_near_rows_weigh_more(context, parameters, disagreement):
    """Disagreement 0.1 at 4096 tokens, and of a model of `parameters` billions 0.3 at 16384; 0.9 far away."""
    rows = own_rows(("kv4", 4096, 8.03, 0.9), ("kv4", 16384, parameters, 0.7), ("kv4", 1 << 20, 8.03, 0.1))
    rows = rows[:1] if context == 4096 else rows
    found = known("Llama-3.1-8B", "quantspec-kv", context, own=rows)
    assert 1 - found.best == pytest.approx(disagreement, rel=1e-3)


def test_acceptance_at_another_ratio():
    """ln(1/ratio) / ln 4 times the disagreement at a quarter of the tokens."""
    assert ratio_factor(0.0625) == pytest.approx(2)
    assert ratio_factor(0.5) == pytest.approx(0.5)
    rows = own_rows(("streamingllm", 4096, 8.03, 0.8))
    rows[0]["ratio"] = 0.0625
    assert known("Llama-3.1-8B", "magicdec-streaming", own=rows).best == pytest.approx(0.9)


def test_acceptance_is_never_negative():
    rows = own_rows(("streamingllm", 4096, 8.03, 0.2))
    rows[0]["ratio"] = 0.25
    shape, plan = load_shape("Llama-3.1-8B"), preset("magicdec-streaming", Workload("Llama-3.1-8B", "h200", 4096))
    found = AcceptanceModel.for_model(shape, 4096, rows).best(plan, np.array([0.02, 0.25]))
    assert found == pytest.approx([0, 0.2])


@pytest.mark.parametrize(
    "name, source", [("specattn", "published"), ("quantspec", "transferred"), ("specattn-int4", "published")]
)
def test_the_weakest_of_two_sources_speaks_for_both(name, source):
    """Of Qwen3-8B SpecAttn's figure is published, that of 4-bit drafts measured on other models."""
    assert known("Qwen3-8B", name, 110592).source == source


def test_a_part_measured_below_both_stays_and_one_of_other_models_does_not():
    both = own_rows(("w4kv4", 4096, 8.03, 0.99))
    assert known("Llama-3.1-8B", "quantspec-weights", own=both).best == pytest.approx(0.99)
    measured = own_rows(("w4kv4", 4096, 8.03, 0.99), ("w4", 4096, 8.03, 0.7))
    assert known("Llama-3.1-8B", "quantspec-weights", own=measured).best == pytest.approx(0.7)


def test_plain_decoding_and_identical_reads_are_certain():
    for name in ("autoregressive", "int8"):
        assert known("Llama-3.1-8B", name).best == 1


def test_fewer_tokens_and_fewer_bits_multiply():
    both, tokens = known("Llama-3.1-8B", "specattn-int4"), known("Llama-3.1-8B", "specattn")
    codes = known("Llama-3.1-8B", "quantspec")
    assert both.best == pytest.approx(tokens.best * codes.best)
    assert both.low < both.best < both.high


def test_grid_and_single_agree():
    shape, workload = load_shape("Llama-3.1-8B"), Workload("m", "h200", 32768)
    acceptance, plan = AcceptanceModel.for_model(shape, 32768), preset("specattn", workload)
    ratios = np.array([0.02, 0.1, 0.5])
    single = [
        acceptance.of(replace(plan, speculation=replace(plan.speculation, ratio=float(ratio)))).best for ratio in ratios
    ]
    assert acceptance.best(plan, ratios) == pytest.approx(single)
    assert list(single) == sorted(single)


def test_ratio_factor_meets_the_measured_pairs_on_average():
    """Rows at 25% and at 7% of the same model and context."""
    pairs = {}
    for row in shipped_rows():
        if row.draft == "streamingllm" and row.source == "measured":
            pairs.setdefault((row.model, row.context), {})[row.ratio] = 1 - row.acceptance
    quotients = [pair[0.07] / pair[0.25] for pair in pairs.values()]
    assert np.mean(quotients) == pytest.approx(ratio_factor(0.07), rel=0.2)
    assert ratio_factor(1.0) == 0


def test_unpublished_policies_lie_between_their_bounds_and_are_priors():
    quest, streaming, specattn = (known("Qwen3-8B", f"{name}", 110592) for name in (
        "magicdec-quest", "magicdec-streaming", "specattn"))  # fmt: skip
    assert quest.source == "prior"
    assert specattn.source == "published"
    assert streaming.source == "transferred"


def test_names_of_one_model():
    assert same_model("SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert same_model("SmolLM2-135M", "SmolLM2-135M-Instruct.Q4_1")
    assert not same_model("Qwen2.5-0.5B", "Qwen2.5-7B")


ROW = {
    "draft": "kv4",
    "model": "m",
    "parameters": 1.0,
    "context": 10,
    "acceptance": 0.9,
    "source": "measured",
    "where": "x",
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"acceptance": 1.2}, "acceptance is 1.2"),
        ({"acceptance": float("nan")}, "acceptance is nan"),
        ({"context": 0}, "context is 0; allowed: a whole number from 1 to 16777216"),
        ({"ratio": 0}, "ratio is 0"),
        ({"draft": "kv3"}, "draft is 'kv3'; allowed: kv8, kv4"),
        ({"source": "guessed"}, "source is 'guessed'; allowed: measured"),
        ({"model": 7}, "model is 7; allowed: a text of 1 to 4096 characters"),
        ({"batch": 1}, "batch is not a field; allowed: draft, model, parameters, context"),
    ],
)
def test_rows_from_a_profile_are_validated(change, message):
    assert AcceptanceRow.read(ROW).ratio == 1
    with pytest.raises(PlanError, match=f"acceptance row: {message}"):
        AcceptanceRow.read({**ROW, **change})


def test_rows_from_a_profile_name_what_is_missing():
    with pytest.raises(PlanError, match=r"acceptance row: 2 mistakes: \(1\) source is missing; \(2\) where is missing"):
        AcceptanceRow.read({name: value for name, value in ROW.items() if name not in ("source", "where")})
