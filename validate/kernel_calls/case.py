"""A case of the kernel bench: a call, its target, and the kernels of other projects that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ridgeplan.validate.timing import Bench, KernelCall

H200_BYTES_PER_S = 4.3e12  # a device copy, read and write, from which time targets are derived
Call = Callable[[int], object]
Peers = Mapping[str, Call]


@dataclass(frozen=True)
class SpeedUp:
    """At least `factor` times as fast as the peer."""

    factor: float

    def limit_s(self, peer_s: float, roof_s: float) -> float:
        """The longest time that meets the target."""
        return peer_s / self.factor


@dataclass(frozen=True)
class RoofShare:
    """At least `share` of the machine's roofline."""

    share: float

    def limit_s(self, peer_s: float, roof_s: float) -> float:
        """The longest time that meets the target."""
        return roof_s / self.share


@dataclass(frozen=True)
class Within:
    """At most `seconds`."""

    seconds: float

    def limit_s(self, peer_s: float, roof_s: float) -> float:
        """The longest time that meets the target."""
        return self.seconds


Target = SpeedUp | RoofShare | Within


@dataclass(frozen=True)
class BenchCase:
    """A call that the bench measures against a target.

    kernel: its name in `ridgeplan bench kernels --only`. over: the peers of which the target refers to the fastest, by
    default all. Consecutive cases may share their calls' peers.
    """

    kernel: str
    call: KernelCall
    target: Target
    over: tuple[str, ...] = ()


def fresh(bench: Bench, *shape: int) -> Tensor:
    """Normal random numbers in the bench's dtype. Unlike views of its pool, they never share data."""
    return torch.randn(shape, dtype=bench.pool.dtype, device=bench.device)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """|result - reference| / |reference| (Euclidean norms, float32)."""
    reference = reference.float()
    return float((result.float() - reference).norm() / reference.norm())


PAGE_TOKENS = 64
WORKSPACE_BYTES = 128 << 20
Product = Callable[[Tensor, int], Tensor]  # (x, variant of the weight) -> product
BACKENDS = {"SDPA cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA flash": SDPBackend.FLASH_ATTENTION}


def attention_peers(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, Call]:
    """Full-precision attention: torch's kernels, and FlashInfer's for one query if it is installed.

    q: [B, T, Hq, D]; keys, values: [variants, B, Hkv, N, D], all of them visible to every query.
    """
    queries = q.transpose(1, 2)
    peers: dict[str, Call] = {name: partial(_sdpa, kind, queries, keys, values) for name, kind in BACKENDS.items()}
    return peers | flashinfer_peers(q, keys, values, {"FlashInfer": q.dtype})


def flashinfer_peers(q: Tensor, keys: Tensor, values: Tensor, formats: Mapping[str, torch.dtype]) -> dict[str, Call]:
    """FlashInfer's attention of one query to a cache in each of `formats`, none where it does not run."""
    if not (q.is_cuda and q.shape[1] == 1 and find_spec("flashinfer")):
        return {}
    return {name: FlashInfer(q[:, 0].contiguous(), keys, values, dtype) for name, dtype in formats.items()}


def _sdpa(backend: SDPBackend, q: Tensor, keys: Tensor, values: Tensor, variant: int) -> Tensor:
    grouped = q.shape[1] != keys.shape[2]
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, keys[variant], values[variant], enable_gqa=grouped)


def in_pages(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [variants, B, Hkv, N, D] as pages [variants, pages, PAGE_TOKENS, Hkv, D] of `dtype`."""
    variants, _, kv_heads, _, head_dim = stored.shape
    return stored.to(dtype).transpose(2, 3).reshape(variants, -1, PAGE_TOKENS, kv_heads, head_dim)


@dataclass(frozen=True, eq=False)
class FlashInfer:
    """FlashInfer's paged decode attention: q [B, Hq, D] over keys, values [variants, B, Hkv, N, D], in whole pages.

    dtype: of the pages, FP8 without scales too. With four or more queries to a KV head it multiplies on tensor cores.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    dtype: torch.dtype

    def __call__(self, variant: int) -> Tensor:
        return self._wrapper.run(self.q, self._pages[variant])

    @cached_property
    def _pages(self) -> Tensor:
        """KV pages, [variants, pages, 2, PAGE_TOKENS, Hkv, D]."""
        return torch.stack([in_pages(stored, self.dtype) for stored in (self.keys, self.values)], dim=2)

    @cached_property
    def _wrapper(self) -> Any:
        """The wrapper, compiled and planned at the first call."""
        (_, batch, kv_heads, tokens, head_dim), q_heads = self.keys.shape, self.q.shape[1]
        pages, numbers = tokens // PAGE_TOKENS, partial(torch.arange, dtype=torch.int32, device=self.q.device)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.q.device)
        make = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
        wrapper = make(workspace, "NHD", use_tensor_cores=q_heads >= 4 * kv_heads)
        last = torch.full((batch,), PAGE_TOKENS, dtype=torch.int32, device=self.q.device)
        sizes = (q_heads, kv_heads, head_dim, PAGE_TOKENS)
        types = {"q_data_type": self.q.dtype, "kv_data_type": self.dtype}
        wrapper.plan(numbers(batch + 1) * pages, numbers(batch * pages), last, *sizes, **types)
        return wrapper


def tinygemm(codes: Tensor, scale: Tensor, zero: Tensor, variants: int = 1) -> Product:
    """torch's own product with 4-bit weights: codes [outputs, inputs], scale and zero [outputs, inputs / group].

    Variants are copies. It packs at the first call, so that GPUs without this kernel fail there, like other peers.
    """
    ops = torch.ops.aten
    group = codes.shape[1] // scale.shape[1]

    @cache
    def packed() -> list[tuple[Tensor, Tensor]]:
        pairs = torch.stack([scale.t(), zero.t()], dim=2).bfloat16().contiguous()
        weight = ops._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8), 8)
        return [(weight.clone(), pairs.clone()) for _ in range(variants)]

    def product(x: Tensor, variant: int) -> Tensor:
        weight, pairs = packed()[variant]
        return ops._weight_int4pack_mm(x.bfloat16(), weight, group, pairs)

    return product
