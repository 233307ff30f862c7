"""Perplexity by axes of quantization: rounding by hand, and the runtime's own codes as one of the cases."""

import pytest
import torch

from ridgeplan.roofline.plan.plan import KVCache, KVFormat, Plan, PlanError, Workload
from ridgeplan.roofline.plan.policies.dense import autoregressive
from ridgeplan.runtime import load
from ridgeplan.validate.quality.fidelity import ForcedPassage, next_logits
from ridgeplan.validate.studies.quantspec import CASES, QuantSpecSizes, rounded, rounded_logits, study

GROUP, TOKENS = 32, 20


def test_rounding_has_a_scale_for_each_token_or_for_each_channel_of_a_group():
    states = torch.arange(8.0)[:, None] * torch.tensor([1.0, 10.0])  # [8 tokens, 2 channels]
    by_channel = rounded(states[None], "channel", 4, 4)[0]
    # 15 steps of 1/5 and of 2 hold 0..3 and 0..30 exactly, up to the scale's 16 bits.
    torch.testing.assert_close(by_channel, states, rtol=1e-3, atol=1e-2)
    noisy = states + torch.tensor([0.04, 0.0])
    by_token = rounded(noisy[None], "token", 4, 4)[0]
    torch.testing.assert_close(by_token, noisy, rtol=1e-2, atol=1e-2)  # two values are a range's ends
    wide = torch.arange(8.0).repeat(4, 1)[None]
    assert rounded(wide, "token", 4, 4).unique().numel() <= 8
    outlier = wide.clone()
    outlier[0, 0, 0] = 1000
    assert rounded(outlier, "token", 4, 4)[0, 0, 4:].tolist() == pytest.approx([4, 5, 6, 7], abs=1e-2)


def test_eight_bits_err_less_than_four():
    states = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    for axis in ("token", "channel"):
        errors = [(rounded(states, axis, GROUP, bits) - states).abs().mean() for bits in (8, 4)]
        assert 10 * errors[0] < errors[1]


@pytest.fixture(scope="module")
def ids(tiny_folder, long_text):
    engine = load(autoregressive(Workload("tiny", "cpu", 16)), str(tiny_folder), device="cpu")
    return engine.tokenizer.encode(long_text)[:160]


def test_the_papers_axes_are_what_the_runtime_stores(tiny_folder, ids):
    """8 bits, keys by channel and values by token: logits of an INT8 engine's teacher-forced passes."""
    passage, workload = ForcedPassage.split(ids, TOKENS), Workload("tiny", "cpu", len(ids), TOKENS + 1)
    plain = load(autoregressive(workload), str(tiny_folder), device="cpu")
    int8 = load(Plan(workload, kv=KVCache(KVFormat.INT8, GROUP)), str(tiny_folder), device="cpu")
    expected = {case: next_logits(engine, [passage])[0] for case, engine in
                {CASES[0]: plain, ("channel", "token", 8): int8}.items()}  # fmt: skip
    results = dict(rounded_logits(plain, passage, GROUP))
    assert list(results) == CASES
    for case, logits in expected.items():
        torch.testing.assert_close(results[case], logits, rtol=1e-3, atol=1e-3)
    off = {case: float((logits - results[CASES[0]]).abs().max()) for case, logits in results.items()}
    assert off["channel", "token", 4] > 3 * off["channel", "token", 8] > 0


def test_a_study_of_a_tiny_model(tiny_folder, long_text):
    sizes, seen = QuantSpecSizes(context=96, tokens=8, passages=2, group=GROUP), []
    rows = study(str(tiny_folder), long_text, sizes, "cpu", lambda *w: seen.append(w))
    assert [(row.keys, row.values, row.bits) for row in rows] == CASES
    assert [done for _, done, _ in seen] == [0, 1]
    plain = rows[0].perplexity
    assert all(row.perplexity == pytest.approx(plain, rel=0.05 if row.bits == 8 else 1) for row in rows)
    assert len({row.perplexity for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context": 300}, "context is 300; allowed: 347 to"),
        ({"tokens": 0}, "tokens is 0; allowed: 1 to 4096"),
        ({"passages": 0}, "passages is 0; allowed: 1 to"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes, message):
    with pytest.raises(PlanError, match=message):
        QuantSpecSizes(**sizes)
