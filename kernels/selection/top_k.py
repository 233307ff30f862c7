"""The k largest scores of each row, chosen on the device."""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache import require_rows


def top_k(
    scores: Tensor, lengths: Tensor, k: Tensor, max_k: int, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """The numbers of each row's k largest scores, in ascending order -> index int32 [R, max_k], count int32 [R].

    scores: float32 [R, N]; row r holds lengths[r] of them (int32 [R]). k: int32 [R], how many to choose; count[r] is
    the smallest of k[r], lengths[r] and max_k, and index[r, count[r]:] is undefined. All three are on the device, so
    the choice follows a growing context inside a captured CUDA graph. Of equal scores the lower numbers are chosen, so
    the result is deterministic. Scores may be infinite; a NaN counts as the lowest.

    Raises ValueError for other dtypes or shapes, and for max_k below 1.
    """
    if scores.dtype != torch.float32 or scores.dim() != 2 or max_k < 1:
        raise ValueError(
            f"scores are {scores.dtype} {list(scores.shape)} with max_k {max_k}; allowed: float32 [rows, n], from 1"
        )
    require_rows(len(scores), torch.int32, lengths=lengths, k=k)
    if not uses_gpu_kernel(backend, scores):
        return top_k_reference(scores, lengths, k, max_k)
    from ridgeplan.kernels.selection.top_k_triton import top_k_triton

    return top_k_triton(scores, lengths, k, max_k)


def top_k_reference(scores: Tensor, lengths: Tensor, k: Tensor, max_k: int) -> tuple[Tensor, Tensor]:
    """The same in plain torch: a stable sort in descending order."""
    rows, width = scores.shape
    places = torch.arange(width, device=scores.device)
    known = scores.masked_fill(scores.isnan(), -torch.inf)
    # Sorted by (outside the row, score), so that even a score of -inf comes before what lies beyond the row.
    order = known.sort(dim=1, descending=True, stable=True).indices
    outside = (order >= lengths[:, None]).int()
    order = order.gather(1, outside.sort(dim=1, stable=True).indices)
    count = torch.minimum(lengths, k).clamp(0, min(max_k, width)).int()
    chosen = order.masked_fill(places >= count[:, None], width).sort(dim=1).values[:, :max_k]
    index = torch.zeros(rows, max_k, dtype=torch.int32, device=scores.device)
    index[:, : chosen.shape[1]] = chosen
    return index, count
