"""Long outputs: which spans are asked for, how choices are scored, and what rows of a run say."""

import itertools

import pytest
import torch

from ridgeplan.planner.quality import AGREEMENT, EARLY_RECALL, LATE_RECALL, OUTPUT_MEASURES, ruler_average
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import PlanError
from ridgeplan.runtime import load
from ridgeplan.validate.quality.long_output import ANSWER, CUE, MIN_LONG_OUTPUT, QUESTIONS, LongOutput, question_spans
from ridgeplan.validate.quality.measure import is_requested, measure_quality
from ridgeplan.validate.quality.options import QualityOptions, named_plan
from ridgeplan.validate.quality.ruler import material

TEXT = "The quick brown fox jumps over the lazy dog. " * 80


def right_choices(output, spans):
    """Choices of a model that knows every next token, of the output and of the answers."""
    asked = [token for start in spans for token in output[start : start + CUE + ANSWER]]
    return [*output, *asked, 0]


def test_choices_are_scored_by_share():
    output = tuple(range(100, 356))
    spans = question_spans((1, 2, 3), output)
    assert len(spans) == QUESTIONS and spans[0] == 0 and spans[-1] <= 256 - CUE - ANSWER
    long_output = LongOutput((1, 2, 3), output, spans, choices=output[1:])
    chosen = right_choices(output, spans)
    assert len(long_output.forced) + 1 == len(chosen)
    assert long_output.scores(chosen) == dict.fromkeys(OUTPUT_MEASURES, 1.0)
    chosen[1:52] = [0] * 51  # a fifth of the 255 choices
    chosen[256 + CUE] = 0  # the first token of the first answer, one of 32 in the first half
    chosen[256 + 6 * (CUE + ANSWER) + CUE - 1] = 0  # within a cue
    scores = long_output.scores(chosen)
    assert scores == {AGREEMENT: pytest.approx(0.8), EARLY_RECALL: pytest.approx(31 / 32), LATE_RECALL: 1.0}


def test_cues_stand_once_where_that_is_possible():
    """The first 30 tokens repeat the prompt, so that the first cue is the one that crosses their end."""
    prompt, output = tuple(range(30)), tuple(range(30)) + tuple(range(60, 342))
    spans = question_spans(prompt, output)
    assert spans[0] == 30 - CUE + 1
    text = (*prompt, *output)
    cues = list(zip(*(text[at:] for at in range(CUE)), strict=False))
    for span in spans[1:]:
        assert cues.count(tuple(output[span : span + CUE])) == 1
    assert question_spans(prompt, (7,) * 300) == tuple(range(0, 8 * 35, 35))  # nothing stands once
    assert all(b > a for a, b in itertools.pairwise(spans))


def test_choices_are_the_likeliest_tokens_of_the_logits(tiny_folder):
    (plan,) = options(tiny_folder, ["quest"]).families_at(1000)[1]
    engine = load(plan, str(tiny_folder), device="cpu")
    prompt, after = list(range(40, 140)), [list(range(20, 60))]
    logits, chosen = (of([prompt], after) for of in (engine.teacher_forced_logits, engine.teacher_forced_choices))
    assert torch.equal(chosen, logits.argmax(-1))


def options(folder, plans, **changes):
    sizes = {"passages": 1, "tokens": 16, "samples": 1, "long_output": MIN_LONG_OUTPUT, "device": "cpu"}
    makers = tuple(named_plan(name, 48) for name in plans)
    return QualityOptions(
        str(folder), load_shape(str(folder)), makers, (500,), TEXT, "foxes", **sizes | changes
    )  # fmt: skip


def test_rows_of_a_run(tiny_folder):
    """Of 115 tokens of prompt and 256 of output targets read 48; Quest keeps all that is generated."""
    run = options(tiny_folder, ["quest", "streamingllm-target"])
    rows = [row for part in measure_quality(run, material(TEXT)) for row in part]
    values = {(row.plan, row.measure): row for row in rows if row.measure in OUTPUT_MEASURES}
    assert len(values) == 3 * 3
    for row in values.values():
        assert (row.tokens, row.samples) == (MIN_LONG_OUTPUT, 1) and is_requested(run, row)
    plain = {measure: values["autoregressive", measure].value for measure in OUTPUT_MEASURES}
    assert plain[AGREEMENT] == 1.0
    assert values["quest 48", EARLY_RECALL].plain == plain[EARLY_RECALL]
    quest, streaming = (values[f"{name} 48", AGREEMENT].value for name in ("quest", "streamingllm-target"))
    assert streaming < 1.0 and quest > streaming
    assert ruler_average(values.values()) is None
    known = [row for part in measure_quality(run, material(TEXT), rows) for row in part]
    assert known == []


@pytest.mark.parametrize("long_output", [MIN_LONG_OUTPUT - 1, 1 << 20])
def test_lengths_that_are_refused(long_output, tiny_folder):
    with pytest.raises(PlanError, match=f"long_output is {long_output}; allowed: 0, or 256 to 65536"):
        options(tiny_folder, ["quest"], long_output=long_output)
