"""Scores of a retrieval head: the largest attention probability of each group of query heads."""

import pytest
import torch

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.selection.head_scores import head_scores

BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


@BACKENDS
def test_scores_of_a_group_are_the_maximum_of_its_heads(backend: Backend, device: str) -> None:
    """Two heads of one KV head attend to (0.7, 0.2, 0.1) and (0.1, 0.3, 0.6) of three visible tokens."""
    expected_scores = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    keys = torch.zeros(1, 1, 5, 4)
    keys[0, 0, :3, :3] = torch.eye(3)
    keys[0, 0, 3:] = 100.0  # not visible
    queries = torch.zeros(1, 2, 4)
    queries[0, :, :3] = expected_scores.log() * 2  # the scale is 1 / sqrt(4)
    visible = torch.tensor([3], dtype=torch.int32, device=device)
    expected = {1: [[0.7, 0.3, 0.6]], 2: [[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]}  # MQA, and MHA
    for groups, scores in expected.items():
        result = head_scores(queries.to(device), keys.to(device), visible, groups, backend=backend)
        torch.testing.assert_close(result[..., :3].cpu(), torch.tensor([scores]))


@pytest.mark.parametrize(
    "q_heads, kv_heads, groups, head_dim, slots, dtype",
    [
        (8, 2, 2, 64, 1100, torch.bfloat16),
        (12, 4, 2, 40, 513, torch.float32),
        (6, 6, 6, 16, 65, torch.float32),
        (20, 1, 4, 32, 2100, torch.float16),
    ],
)
def test_kernels_score_what_rows_hold(
    q_heads: int, kv_heads: int, groups: int, head_dim: int, slots: int, dtype: torch.dtype, device: str
) -> None:
    """Rows end within a block, at the end of one, before any, and where the slots do."""
    generator = torch.Generator().manual_seed(slots)
    lengths = torch.tensor([slots, 1, 0, min(slots, 512), slots - 1], dtype=torch.int32)
    q = (3 * torch.randn(len(lengths), q_heads, head_dim, generator=generator)).to(dtype)
    keys = torch.randn(len(lengths), kv_heads, slots, head_dim, generator=generator).to(dtype)
    for row, length in enumerate(lengths.tolist()):
        keys[row, :, length:] = float("nan")  # never read, or without effect
    expected = head_scores(q.float(), keys.float().nan_to_num(0.0), lengths, groups, backend="reference")
    scores = head_scores(q.to(device), keys.to(device), lengths.to(device), groups, backend="triton").cpu()
    assert scores.shape == (len(lengths), groups, slots)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(scores[row, :, :length], expected[row, :, :length], rtol=2e-3, atol=1e-6)


def test_shapes_that_disagree_are_refused() -> None:
    q, keys, lengths = torch.zeros(2, 6, 8), torch.zeros(2, 3, 10, 8), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="4 groups disagree"):
        head_scores(q, keys, lengths, 4)
    with pytest.raises(ValueError, match="disagree"):
        head_scores(q, keys[:1], lengths, 3)
    with pytest.raises(ValueError, match="lengths"):
        head_scores(q, keys, lengths.long(), 3)
