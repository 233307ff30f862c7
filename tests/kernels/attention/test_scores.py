"""Scores that decode attention leaves behind, against sums over queries and heads in float64."""

import pytest
import torch

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.attention.scores import Rows, ScoreRequest, What
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import dequantize, quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV

pytestmark = pytest.mark.usefixtures("poisoned_empty")
UNTOUCHED = 77.0


CASES: list[tuple[int, int, Rows, What]] = [
    *((bits, 5, "ends", "logits") for bits in (0, 4, 8)),
    *((bits, 5, "ends", "probabilities") for bits in (0, 8)),
    (4, 1, "ends", "logits"),
    (0, 2, "last", "logits"),
    (8, 2, "all", "probabilities"),
    (4, 5, "all", "logits"),
    (8, 5, "last", "probabilities"),
]


@pytest.mark.parametrize(("bits", "queries", "rows", "what"), CASES)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_scores(bits: int, queries: int, rows: Rows, what: What, backend: Backend, device: str) -> None:
    """Codes of 3 and 1 groups, or slots 2 to 30 and 0 to 9; the attention itself does not change.

    Probabilities refer to the log-sum-exps that were given, and the last query's are left.
    """
    generator = torch.Generator().manual_seed(bits + queries)
    q = torch.randn(2, queries, 6, 64, generator=generator).to(device)
    keys, values = (torch.randn(2, 2, 50, 64, generator=generator).to(device) for _ in range(2))
    begin, end, groups = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 0], [31, 10], [3, 1]))
    codes = None
    if bits:
        codes = QuantizedKV.allocate(2, 2, 4, 32, 64, device, lower=bits == 8)
        store = (torch.randn(2, 2, 128, 64, generator=generator).to(device) for _ in range(2))
        quantize(*store, codes, torch.zeros_like(groups), backend="reference")
    out = torch.full((2, 2, 130), UNTOUCHED, device=device)
    arguments = (q, keys, values, begin, end, codes, groups if bits else None)
    given = torch.randn(2, 6, generator=generator).to(device)
    request = ScoreRequest(out, rows, what, given.clone())
    found = decode_attention(*arguments, lower=bits == 8, splits=3, scores=request, backend=backend)
    plain = decode_attention(*arguments, lower=bits == 8, splits=3, backend=backend)
    assert torch.equal(found, plain)
    summed = {"ends": {0, queries - 1}, "last": {queries - 1}, "all": set(range(queries))}[rows]
    for b in range(2):
        count = int(groups[b]) * 32 if codes is not None else 0
        recent = slice(int(begin[b]), int(end[b]) + queries - 1)
        seen = keys[b, :, recent].double()
        if codes is not None:
            seen = torch.cat([dequantize(codes, bits == 8, backend="reference")[0][b, :, :count].double(), seen], 1)
        expected = torch.zeros(2, seen.shape[1], dtype=torch.float64, device=device)
        lse = given[b].double()
        for t in summed:
            logits = q[b, t].double().view(2, 3, 64) / 8 @ seen.mT
            if t == queries - 1:
                lse = logits.logsumexp(-1).flatten()
            expected += ((logits - given[b].view(2, 3, 1)).exp() if what == "probabilities" else logits).sum(1)
        written = slice(0, count) if codes is not None else slice(int(begin[b]), int(end[b]))
        earlier = expected[:, : written.stop - written.start]
        assert torch.allclose(out[b, :, written].double(), earlier, rtol=1e-3, atol=1e-4)
        out[b, :, written] = UNTOUCHED
        left = lse if what == "probabilities" else given[b].double()
        torch.testing.assert_close(request.lse[b].double(), left, rtol=1e-4, atol=1e-4)
    assert (out == UNTOUCHED).all()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_second_call_has_exact_probabilities(backend: Backend, device: str) -> None:
    """Of one query, those of a head add up to 1 over what it sees; a row that sees nothing leaves its log-sum-exps."""
    generator = torch.Generator().manual_seed(5)
    q, keys = (torch.randn(shape, generator=generator).to(device) for shape in ((2, 1, 4, 32), (2, 2, 20, 32)))
    begin, end = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([3, 5], [17, 5]))
    out, lse = (torch.zeros(shape, device=device) for shape in ((2, 2, 20), (2, 4)))
    request = ScoreRequest(out, "last", "probabilities", lse)
    for _ in range(2):
        decode_attention(q, keys, keys, begin, end, scores=request, backend=backend)
    torch.testing.assert_close(out.sum(2), torch.tensor([[2.0, 2.0], [0.0, 0.0]], device=device))
    assert (lse[1] == 0).all()


def test_what_is_not_allowed() -> None:
    q, keys, one = torch.zeros(1, 2, 2, 32), torch.zeros(1, 1, 8, 32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"\[1, 1, 8 or more\]"):
        decode_attention(q, keys, keys, one, one, scores=ScoreRequest(torch.zeros(1, 1, 7)))
    with pytest.raises(ValueError, match=r"lse \[1, 3\] does not fit; allowed: \[1, 2\]"):
        decode_attention(q, keys, keys, one, one, scores=ScoreRequest(torch.zeros(1, 1, 8), lse=torch.zeros(1, 3)))
    with pytest.raises(ValueError, match="need lse"):
        ScoreRequest(torch.zeros(1, 1, 8), what="probabilities")
    with pytest.raises(ValueError, match="float64"):
        ScoreRequest(torch.zeros(1, 1, 8), lse=torch.zeros(1, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="float32"):
        ScoreRequest(torch.zeros(1, 1, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="first"):
        ScoreRequest(torch.zeros(1, 1, 8), rows="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights"):
        ScoreRequest(torch.zeros(1, 1, 8), what="weights")  # type: ignore[arg-type]
