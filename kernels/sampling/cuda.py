"""CUDA C++ kernel of temperature, top-k and top-p (csrc/top_k_top_p.cu), compiled at first use.

docs/kernels/sampling.md explains how it works and what was measured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.device.cuda import (
    KernelParams,
    compile_kernel,
    config_options,
    is_on_hopper,
    launch_with_pdl,
    program,
)
from ridgeplan.kernels.sampling.reference import LOG2_E, Distribution

SOURCE, ENTRY = "sampling/csrc/top_k_top_p.cu", "filter"
THREADS = 512
CLUSTERS = (4, 8)  # CTAs per row; 8 is the largest portable cluster size
PACK_BYTES = 16  # bytes that a thread reads at a time
# Packs per thread that fit the shared memory of a Hopper SM beside the histograms, with two CTAs and with one.
TWO_CTA_LOADS, MAX_LOADS = 12, 24
ELEMENTS: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})


class FilterParams(KernelParams):
    """See csrc/top_k_top_p.cu."""

    constants = MappingProxyType({"THREADS": THREADS})

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "peaks", "cutoffs", "masses")),
        ("vocab", ctypes.c_int),
        ("loads", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("top_k", ctypes.c_int),
        ("top_p", ctypes.c_double),
    )


@dataclass(frozen=True)
class TopKVariant:
    """Specialization of a compiled kernel. aligned: rows begin at multiples of 16 bytes, as cp.async needs."""

    dtype: torch.dtype
    aligned: bool
    cluster: int

    @property
    def options(self) -> list[str]:
        """The compiled variant: `Config` in csrc/top_k_top_p.cu."""
        return config_options(ELEMENT=ELEMENTS[self.dtype], CLUSTER=self.cluster, ALIGNED=self.aligned)

    def loads(self, vocab: int) -> int:
        """Packs that each thread of the cluster holds of a row."""
        return -(-vocab * self.dtype.itemsize // (self.cluster * THREADS * PACK_BYTES))


@dataclass(frozen=True)
class TopKTopPKernel:
    """The kernel compiled for a variant."""

    compiled: Any
    variant: TopKVariant

    def run(self, logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Distribution:
        """See `ridgeplan.kernels.sampling.filter_logits`; at a temperature above 0."""
        lead, vocab = logits.shape[:-1], logits.shape[-1]
        peak, cutoff, mass = torch.empty(3, *lead, dtype=torch.float32, device=logits.device)
        loads = self.variant.loads(vocab)
        params = FilterParams(
            logits=logits,
            peaks=peak,
            cutoffs=cutoff,
            masses=mass,
            vocab=vocab,
            loads=loads,
            scale=LOG2_E / temperature,
            top_k=0 if top_k is None or top_k >= vocab else top_k,
            top_p=1.0 if top_p is None else top_p,
        )
        grid = (self.variant.cluster * peak.numel(), 1, 1)
        with torch.cuda.device(logits.device):
            launch_with_pdl(self.compiled, grid, (THREADS, 1, 1), params, loads * THREADS * PACK_BYTES)
        return Distribution(logits, temperature, peak, cutoff, mass)


def find_filter_kernel(logits: Tensor) -> TopKTopPKernel | None:
    """The kernel for these logits, or None if plain torch and Triton's softmax must run.

    It needs Hopper or newer, contiguous logits of a known dtype, and rows that fit a cluster.
    """
    if not is_on_hopper(logits) or logits.dtype not in ELEMENTS or not logits.is_contiguous():
        return None
    variant = variant_of(logits)
    return _compiled(variant, logits.device) if variant.loads(logits.shape[-1]) <= MAX_LOADS else None


def variant_of(logits: Tensor) -> TopKVariant:
    """The variant for logits [..., vocab]."""
    vocab, dtype = logits.shape[-1], logits.dtype
    aligned = vocab * dtype.itemsize % PACK_BYTES == 0 and logits.data_ptr() % PACK_BYTES == 0
    small, large = (TopKVariant(dtype, aligned, cluster) for cluster in CLUSTERS)
    return small if small.loads(vocab) <= TWO_CTA_LOADS else large


@cache
def _compiled(variant: TopKVariant, device: torch.device) -> TopKTopPKernel | None:
    """None, with one warning, if the kernel does not compile."""
    fallback = "top-k and top-p run in plain torch, as their CUDA kernel does not compile"
    shared_bytes = MAX_LOADS * THREADS * PACK_BYTES
    text = program(SOURCE, FilterParams)
    kernel = compile_kernel(text, ENTRY, variant.options, device, shared_bytes=shared_bytes, fallback=fallback)
    return None if kernel is None else TopKTopPKernel(kernel, variant)
