"""CUDA C++ kernel of temperature, top-k and top-p, for Hopper and newer: filter.cu, compiled at first use.

How it works. A cluster of four or eight blocks holds a row in shared memory, so that logits are read from memory
once, whatever the filters. A cutoff is found by descending through the order-preserving bits of logits: blocks
histogram their logits in shared memory, in 2048 bins that just cover what may hold the cut, and add their tables up
in the first block's; it sums the bins from the top until the wanted weight is reached. Where a bin holds more than
one value the next level divides it, until values are resolved: 16-bit logits mostly take one level, at most two,
float32 ones three. For top-k a logit weighs 1. For top-p it weighs its probability in units of 2^-31: unsigned
integers, for which shared memory has native atomics (float and 64-bit ones are loops of compare-and-swap), whose
sums do not depend on their order and cannot overflow, as a row weighs 2^31. Logits that surely are cut off stay out
of the tables: for top-k those below the peaks of k threads, for top-p those that, were all logits as small, would
weigh half of what may go.

Log on one H200 (288 rows of 128256 bf16 logits, std 3; top-k 50 / top-p 0.9 / both, us; one reading takes 17):
- a launch for every level of 12 bits, tables in global memory: 122 / 147 / 220. Levels without atomics took as long
  as those with them, so the loop over logits was the cost, not the histogram.
- floors that keep most logits out of the tables: predicted 1.5 times faster, measured 112 / 125 / 188.
- one launch, rows in the registers of a cluster: predicted 80 for both filters, measured 107 / 120 / 164. A level
  took 5 us of a single row's 24; the unrolled code runs about 57 instructions a logit, counted over all levels.
- rows in shared memory, a rolled loop that passes over 8 logits by their packed maximum: predicted 7 instructions a
  logit where few are kept, measured 81 / 134 / 114. A level still takes 2.6 us of a single row's 18.
- bins that cover only the keys from the floor to the peak, so that one level mostly suffices: predicted 85 for both,
  measured 66 / 96 / 84; for 32 rows 15 / 23 / 18. Flat rows (std 1) pay for their atomics: 139 for top-p.
- started early, in a chain of one graph (validate/kernels_h200.json; std 4): both filters and a verdict on 288 rows 93,
  and a draw from 32 rows 25.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.device.launch import launch_with_pdl
from ridgeplan.kernels.device.nvrtc import compiled, joined
from ridgeplan.kernels.sampling.distribution import Distribution

THREADS = 512
CLUSTERS = (4, 8)  # blocks that share a row; 8 is the most that every such GPU allows
PACK_BYTES = 16  # that a thread reads at a time
# Packs of a thread that fit the shared memory of a Hopper multiprocessor, beside the tables: of two blocks, of one.
EASY_LOADS, MOST_LOADS = 12, 24
LOG2_E = 1.4426950408889634
ELEMENTS: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is specialized for; wide where rows are aligned, so that copies move 16 bytes."""

    dtype: torch.dtype
    wide: bool
    cluster: int

    @property
    def options(self) -> list[str]:
        """Macros of the source."""
        macros = {"ELEMENT": ELEMENTS[self.dtype], "CLUSTER": self.cluster, "WIDE": int(self.wide)}
        return [f"-D{name}={value}" for name, value in macros.items()]

    def loads(self, vocab: int) -> int:
        """Packs that each thread of the cluster holds of a row."""
        return -(-vocab * self.dtype.itemsize // (self.cluster * THREADS * PACK_BYTES))


def variant_of(logits: Tensor) -> Variant:
    """The kernel that logits [..., vocab] take."""
    vocab, dtype = logits.shape[-1], logits.dtype
    wide = vocab * dtype.itemsize % PACK_BYTES == 0 and logits.data_ptr() % PACK_BYTES == 0
    small, large = (Variant(dtype, wide, cluster) for cluster in CLUSTERS)
    return small if small.loads(vocab) <= EASY_LOADS else large


def fits(logits: Tensor) -> bool:
    """Whether the CUDA kernel takes these logits: contiguous, of a known type, rows that a cluster can hold."""
    if not logits.is_cuda or torch.version.cuda is None or logits.dtype not in ELEMENTS or not logits.is_contiguous():
        return False
    variant = variant_of(logits)
    if torch.cuda.get_device_capability(logits.device) < (9, 0) or variant.loads(logits.shape[-1]) > MOST_LOADS:
        return False
    return _kernel(variant, logits.device) is not None


def source() -> str:
    """All of the CUDA C++."""
    return joined("sampling", "radix_select.cuh", "top_k_top_p.cu")


@cache
def _kernel(variant: Variant, device: torch.device) -> Any | None:
    """Compiles a variant, or None (with a warning, once) where that fails."""
    failing = "top-k and top-p run in plain torch, as their CUDA kernel does not compile"
    shared_bytes = MOST_LOADS * THREADS * PACK_BYTES
    return compiled(source(), "filter", variant.options, device, shared_bytes=shared_bytes, failing=failing)


def filter_cuda(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Distribution:
    """See `ridgeplan.kernels.sampling.filter_logits`; only for logits that `fits`, at a temperature above 0."""
    variant = variant_of(logits)
    kernel = _kernel(variant, logits.device)
    assert kernel is not None
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    peak, cutoff, mass = torch.empty(3, *lead, dtype=torch.float32, device=logits.device)
    loads = variant.loads(vocab)
    k = 0 if top_k is None or top_k >= vocab else top_k
    p = 1.0 if top_p is None else float(top_p)
    with torch.cuda.device(logits.device):
        launch_with_pdl(
            kernel,
            (variant.cluster * peak.numel(), 1, 1),
            (THREADS, 1, 1),
            [logits, peak, cutoff, mass, vocab, loads, LOG2_E / temperature, k, p],
            loads * THREADS * PACK_BYTES,
        )
    return Distribution(logits, temperature, peak, cutoff, mass)
