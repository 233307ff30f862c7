"""Attention of long prompts, few heads at a time."""

import pytest
import torch

from ridgeplan.runtime.model.prefill import attend_in_place, causal_attention


def test_heads_may_attend_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(50, 6, 16, generator=generator)
    keys, values = torch.randn(2, 3, 50, 16, generator=generator)
    expected = causal_attention(queries.transpose(0, 1), keys, values, None).transpose(0, 1)
    for tokens in (1, 100, 1000):
        monkeypatch.setattr("ridgeplan.runtime.model.prefill.PREFILL_ATTENDED_TOKENS", tokens)
        attended = queries.clone()
        attend_in_place(attended, keys, values, None)
        torch.testing.assert_close(attended, expected)
