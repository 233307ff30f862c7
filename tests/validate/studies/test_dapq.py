"""The study's statistics on constructed queries and attention, and a whole study of a tiny model."""

import pytest
import torch

from ridgeplan.roofline.plan.plan import PlanError
from ridgeplan.validate.prompts import PromptError
from ridgeplan.validate.studies.dapq import (
    CHOICES,
    DapqSizes,
    claims,
    passages,
    pseudo_tokens,
    recall,
    similarity,
    streaming,
    study,
    summary,
    top,
)


def test_similarity_is_the_mean_cosine_of_counterparts():
    queries = torch.tensor([[[[1.0, 0.0], [2.0, 0.0]]]])
    others = torch.tensor([[[[0.0, 5.0], [3.0, 3.0]]]])
    assert similarity(queries, others) == pytest.approx((0 + 0.5**0.5) / 2)
    assert similarity(queries, 7 * queries) == pytest.approx(1)


def attention(*rows):
    """[1 layer, tokens, 1 head, prompt]."""
    return torch.tensor(rows)[None, :, None]


def test_the_gold_tokens_are_those_with_the_highest_sums():
    weights = attention([0.5, 0.1, 0.4, 0.0], [0.0, 0.7, 0.3, 0.0])
    # Sums 0.5, 0.8, 0.7, 0: the first token's own maximum does not count.
    assert top(weights, 2)[0, 0].tolist() == [False, True, True, False]
    assert top(weights, 9).all()


def test_recall_is_the_share_of_gold_that_is_kept():
    gold = torch.tensor([[[True, True, False, False], [True, False, False, True]]])
    kept = torch.tensor([[[True, False, True, False], [True, False, False, True]]])
    assert recall(gold, kept) == 3 / 4
    assert recall(gold, gold) == 1


def test_streaming_keeps_the_first_and_the_latest():
    kept = streaming(torch.zeros(1, 1, 20, dtype=torch.bool), 10)[0, 0]
    assert kept.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 14, 15, 16, 17, 18, 19]


def test_pseudo_tokens_are_the_prompts_first_and_last():
    assert pseudo_tokens(range(100), 32) == (0, 1, 2, 3, *range(72, 100))  # 4 + 28, as in section 5.1
    assert pseudo_tokens(range(100), 4) == (96, 97, 98, 99)


def test_passages_split_into_prompt_and_continuation_and_noise_is_seeded():
    ids = [list(range(100, 200)), list(range(300, 400))]
    first, two = passages(ids, 40, [1, 2, 3], 256, seed=5)
    assert (first.prompt, first.response) == (tuple(range(100, 160)), tuple(range(160, 200)))
    assert first.other == (1, 2, 3) * 10 + (1, 2)
    assert len(first.noise) == 64 and first.noise != two.noise
    assert [again.noise for again in passages(ids, 40, [1], 256, seed=5)] == [first.noise, two.noise]
    assert next(passages(ids, 40, [1], 256, seed=6)).noise != first.noise


def figures(changes=()):
    values = {
        ("similarity", "other", "same", "after"): 0.7, ("similarity", "same", "other", "after"): 0.4,
        ("offset", 0): 1.0, ("offset", 4): 0.9, ("offset", 64): 0.5,
        **{("recall", method, 8, 64): value for method, value in
           (("dapq", 0.8), ("dapq-random", 0.75), ("snapkv", 0.7), ("streamingllm", 0.3))},
        ("attention", "dapq", 8): 0.97, ("attention", "snapkv", 8): 0.94,
        **{("choice", "content", name, 64): value for name, value in
           (("first 4, last 28", 0.8), ("first 8, last 24", 0.9), ("span", 0.7), ("fixed", 0.6))},
        **{("choice", "position", name, budget): 0.8 - 0.3 * bool(place) - budget / 1000 for budget in (64, 128)
           for place, name in enumerate(("right after the prompt", "512 further back"))},
    }  # fmt: skip
    return values | dict(changes)


def test_claims_hold_or_differ():
    assert [claim.holds for claim in claims([figures()])] == [True] * 8
    worse = figures(
        {
            ("similarity", "same", "other", "after"): 0.71, ("offset", 64): 0.95,
            ("recall", "snapkv", 8, 64): 0.81, ("attention", "snapkv", 8): 0.98,
            ("choice", "content", "span", 64): 0.81, ("choice", "position", "512 further back", 128): 0.7,
        }
    )  # fmt: skip
    # SnapKV stays above StreamingLLM; all else is turned around.
    assert [claim.holds for claim in claims([worse])] == [False, False, False, True, False, False, False, False]
    assert claims([worse])[-1].detail.startswith("at 1 of 2 budgets")
    # Of the means over passages, not of each.
    assert claims([figures(), figures({("offset", 64): 0.92})])[1].holds


def test_a_summary_has_means_and_deviations_over_passages():
    rows = {tuple(row["figure"]): row for row in summary([figures(), figures({("offset", 4): 0.7})])}
    assert rows["offset", 4]["mean"] == pytest.approx(0.8)
    assert rows["offset", 4]["deviation"] == pytest.approx(0.1)
    assert rows["offset", 0]["deviation"] == 0


def test_a_study_of_a_tiny_model(tiny_folder, long_text):
    sizes = DapqSizes(context=512, response=32, passages=2)
    seen = []
    report = study(str(tiny_folder), long_text, sizes, "cpu", lambda *w: seen.append(w))
    assert [done for _, done, _ in seen] == [0, 1]
    figure = report[0]
    assert figure["offset", 0] == pytest.approx(1, abs=1e-5)
    assert figure["similarity", "same", "same", "after"] == pytest.approx(1, abs=1e-5)
    for content in ("other", "random"):  # at the same positions both are rotated alike
        after, before = (figure["similarity", content, "same", when] for when in ("after", "before"))
        assert after == pytest.approx(before, abs=1e-4)
        assert -1 < after < 0.99
    methods = {key[1] for key in figure if key[0] == "recall"}
    assert methods == {"dapq", "dapq-random", "snapkv", "streamingllm"}
    assert {key[2:] for key in figure if key[0] == "recall"} == {
        (w, b) for w in (8, 16, 32, 64) for b in (64, 128, 256)
    }
    assert all(0 < value <= 1 for key, value in figure.items() if key[0] == "recall")
    choices = {key[1:]: value for key, value in figure.items() if key[0] == "choice"}
    assert len(choices) == 3 * sum(map(len, CHOICES.values()))
    for budget in (64, 128, 256):  # the eviction's scorer keeps what the study's own window does, heads alike
        kept = figure["recall", "dapq", 32, budget]
        for axis, by_name in CHOICES.items():
            assert choices[axis, next(iter(by_name)), budget] == pytest.approx(kept, abs=0.02)
    assert choices["position", "after 17% of it", 256] < choices["position", "after 83% of it", 256]
    assert [claim.text for claim in claims(report)] == [claim.text for claim in claims([figures()])]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context": 511}, "context is 511; allowed: 512 to"),
        ({"response": 31}, "response is 31; allowed: 32 to 4096"),
        ({"passages": 0}, "passages is 0; allowed: 1 to"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes, message):
    with pytest.raises(PlanError, match=message):
        DapqSizes(**sizes)


def test_a_text_that_is_too_short_is_refused(tiny_folder):
    with pytest.raises(PromptError, match="needed: 659"):
        study(str(tiny_folder), "short " * 20, DapqSizes(512), "cpu")
