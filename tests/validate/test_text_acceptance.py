"""Rows measured on a text: what they say, and that a model is loaded and quantized once."""

import pytest

from ridgeplan.roofline.plan.plan import PlanError
from ridgeplan.validate import acceptance as module
from ridgeplan.validate.acceptance import Draft, Passage, measure_acceptance
from ridgeplan.validate.prompts import PromptError

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
DRAFTS = [Draft("w4"), Draft("streamingllm", 0.25)]


def rows(folder, contexts=(260,), tokens=16, text=TEXT, **options):
    return list(measure_acceptance(str(folder), Passage(text, "foxes", contexts, tokens, **options), DRAFTS, "cpu"))


def test_rows_say_what_was_measured(tiny_folder):
    weights, window = (one.row for one in rows(tiny_folder))
    assert (weights.draft, weights.context, weights.gamma, weights.tokens) == ("w4", 260, 8, 16)
    assert (weights.source, weights.text, weights.dtype, weights.quantizer) == (
        "measured",
        "foxes",
        "float32",
        "diagonal",
    )
    assert (window.draft, window.ratio, window.model) == ("streamingllm", 0.25, tiny_folder.name)
    assert "16 tokens of foxes" in weights.where
    assert weights.checkpoint == ""
    assert len(weights.date) == 10


def test_a_row_is_the_mean_of_its_positions(tiny_folder):
    for one in rows(tiny_folder):
        assert one.row.acceptance == pytest.approx(sum(one.by_position) / 8)


def test_weights_fitted_to_a_text_are_gptqs(tiny_folder):
    found = rows(tiny_folder, calibration=list(TEXT[:1000].encode()))
    assert found[0].row.quantizer == "gptq"


def test_a_model_is_loaded_and_quantized_once_for_all_contexts(tiny_folder, monkeypatch):
    made = []
    for name in ("load", "quantized_draft"):
        original = getattr(module, name)

        def counted(*given, original=original, name=name, **named):
            made.append((name, named.get("weights") is not None))
            return original(*given, **named)

        monkeypatch.setattr(module, name, counted)
    found = rows(tiny_folder, (260, 280, 300))
    assert [one.row.context for one in found] == [260, 260, 280, 280, 300, 300]
    assert made == [("load", False), ("quantized_draft", False), ("load", True), ("load", True)]


def test_progress_counts_the_rounds_of_all_contexts(tiny_folder):
    seen = []
    passage = Passage(TEXT, "foxes", (260, 300), 16)
    list(measure_acceptance(str(tiny_folder), passage, DRAFTS[1:], "cpu", lambda *what: seen.append(what)))
    assert [done for _, done, _ in seen] == [0, 1, 2, 2, 3, 4]
    assert {total for *_, total in seen} == {4}


@pytest.mark.parametrize(
    "contexts, tokens, message",
    [
        ((260,), 12, "tokens is 12; allowed: a multiple of 8"),
        ((260,), 0, "tokens is 0; allowed"),
        ((0,), 16, "context is 0"),
        ((16384,), 16, "16384 [+] 16 tokens are beyond the model's limit of 16384"),
    ],
)
def test_lengths_that_cannot_be_measured_are_refused_before_loading(
    tiny_folder, monkeypatch, contexts, tokens, message
):
    monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(PlanError, match=message):
        rows(tiny_folder, contexts, tokens)


def test_yarn_reaches_beyond_the_limit(tiny_folder):
    plan = next(Passage(TEXT, "foxes", (16384,), 16, yarn=True).plans(module.load_shape(str(tiny_folder))))
    assert plan.workload.yarn_factor == 1.5


def test_a_text_that_is_too_short_is_refused(tiny_folder):
    with pytest.raises(PromptError, match="the text has 45 tokens; needed: 276"):
        rows(tiny_folder, text=TEXT[:45])
