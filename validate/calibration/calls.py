"""The kernel calls that calibration and the suite measure, by kernel class, on views of the bench's random data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from ridgeplan.kernels.attention import merge_cost
from ridgeplan.kernels.device.cuda import is_on_hopper
from ridgeplan.kernels.linear import linear_dense, linear_quantized
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.execution import GATHER_ROW_BYTES, runs_integers
from ridgeplan.roofline.latency import (
    INTEGER_CLASSES,
    SCANS,
    STORED_LINEAR,
    WIDE,
    WIDE_SCANS,
    experts_kind,
    linear_kind,
)
from ridgeplan.roofline.passes import weight_bytes
from ridgeplan.runtime.heap import keep_freed_memory
from ridgeplan.runtime.model.linear import Dense
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization.calibration import fitting_group, quantized_linear
from ridgeplan.validate.calibration.sizes import Shapes, Suite
from ridgeplan.validate.kernel_calls.attention import DecodeSize, Heads, prefill_attention, random_decode
from ridgeplan.validate.kernel_calls.experts import RoutedExperts
from ridgeplan.validate.kernel_calls.kv_cache import quantize_call
from ridgeplan.validate.kernel_calls.latent import LatentDecode
from ridgeplan.validate.kernel_calls.layer import norm_call, rope_call, swiglu_call
from ridgeplan.validate.kernel_calls.linear import STORED_TYPES, LinearVariants, linear_call
from ridgeplan.validate.kernel_calls.sampling import RejectionSampling, draw_call, rejection_call, uniform_numbers
from ridgeplan.validate.kernel_calls.sizes import ExpertSize, LatentSize, LinearSize, SamplingSize
from ridgeplan.validate.kernel_calls.sparse import RATIO, SparseAttention, SparseDraft, chosen_tokens, top_k_call
from ridgeplan.validate.kernel_calls.state import delta_step_call
from ridgeplan.validate.machine import last_cache_bytes
from ridgeplan.validate.timing import CUDA_ROTATE_BYTES, Bench, KernelCall

WEIGHT_GROUP = 128
MAX_VARIANTS = 600  # so that even products of a megabyte find their weights cold, as in a step
SPARSE_CLASSES = (*SCANS, *WIDE_SCANS, "sparse_attention", "sparse_attention_full")


def bench_for(device: torch.device, suite: Suite) -> Bench:
    """A bench whose data exceeds the device's caches. A CPU's calls allocate as those of the runtime do."""
    if device.type == "cpu":
        keep_freed_memory()
    cold_bytes = CUDA_ROTATE_BYTES if device.type == "cuda" else 2 * last_cache_bytes()
    bench = Bench.build(device, suite.pool_bytes, min(suite.pool_bytes, cold_bytes), suite.trial_s)
    return replace(bench, max_variants=MAX_VARIANTS)


def class_calls(bench: Bench, suite: Suite, num_sms: int) -> Mapping[str, Iterable[KernelCall]]:
    """The calls of every class, created lazily, so that only one call's inputs are in memory."""
    low_bits = (*suite.linear_shapes, *suite.head_shapes), suite.quantized_rows
    integers = INTEGER_CLASSES.items() if is_on_hopper(bench.pool) else ()
    return {
        "linear": dense_calls(bench, "linear", suite.linear_shapes, suite.linear_rows),
        "head": dense_calls(bench, "head", suite.head_shapes, suite.head_rows),
        **{linear_kind(bits): quantized_calls(bench, bits, *low_bits) for bits in (4, 8)},
        **{kind: quantized_calls(bench, bits, *low_bits, kind) for kind, bits in integers},
        STORED_LINEAR: stored_calls(bench, suite.stored_shapes, suite.quantized_rows),
        **{
            experts_kind(bits): expert_calls(bench, bits, suite.expert_sizes, suite.quantized_rows)
            for bits in (16, 8, 4)
            if suite.expert_sizes
        },
        **({"attention_mla": latent_calls(bench, suite.latent_sizes, num_sms)} if suite.latent_sizes else {}),
        **{kind: decode_calls(bench, sizes, num_sms) for kind, sizes in suite.decode_sizes().items()},
        **({"state": (delta_step_call(bench, size) for size in suite.state_sizes)} if suite.state_sizes else {}),
        "elementwise": _elementwise_calls(bench, suite.elementwise, suite.elementwise_rows),
        "rope": _rope_calls(bench, suite.elementwise, suite.elementwise_rows),
        "sampling": _sampling_calls(bench, suite.vocabs[:2], suite.batches, suite.queries),
        "quantize": _quantize_calls(bench, suite.heads, suite.quantize_tokens),
        "gather": _gather_calls(bench, GATHER_ROW_BYTES // bench.element_bytes, suite.gather_rows),
        **{
            kind: _sparse_calls(bench, kind, sizes, num_sms)
            for kind, sizes in suite.sparse_sizes(SPARSE_CLASSES).items()
        },
        "top_k": _top_k_calls(bench, suite.draft_sizes),
        "prefill_linear": dense_calls(bench, "prefill_linear", suite.prefill_shapes, suite.prefill_rows),
        **{
            kind: (prefill_attention(bench, *size) for size in product(heads, suite.prefill_tokens))
            for kind, heads in suite.prefill_heads().items()
        },
    }


def portable_calls(bench: Bench, suite: Suite, num_sms: int) -> Iterator[KernelCall]:
    """Calls of Triton's and the library's kernels, as GPUs older than Hopper run them, at some of the suite's sizes."""
    rows = suite.quantized_rows[::3]
    for outputs, inputs in suite.linear_shapes[::4]:
        dense = [partial(linear_dense, weight=weight, backend="reference") for weight in bench.randoms(outputs, inputs)]
        for count in rows:
            yield linear_call("linear", bench.random(1, count, inputs), dense, outputs, bench.element_bytes)
        for bits in (4, 8):
            yield from quantized_calls(bench, bits, ((outputs, inputs),), rows, portable=True)
    for bits in (8, 4):
        yield from expert_calls(bench, bits, suite.expert_sizes[:1], rows, portable=True)
    for sizes in suite.decode_sizes().values():
        few = [size for size in sizes if size.batch != suite.batches[-1] and size.queries in suite.queries[::2]]
        yield from (random_decode(bench, size, num_sms, "triton") for size in few[::7])


def dense_calls(bench: Bench, kind: str, shapes: Shapes, rows: Iterable[int]) -> Iterator[KernelCall]:
    """Full-precision products of `rows` tokens."""
    for outputs, inputs in shapes:
        weights = [Dense(weight) for weight in bench.randoms(outputs, inputs)]
        for count in rows:
            yield linear_call(kind, bench.random(1, count, inputs), weights, outputs, bench.element_bytes)


def quantized_calls(
    bench: Bench, bits: int, shapes: Shapes, rows: Iterable[int], kind: str = "", portable: bool = False
) -> Iterator[KernelCall]:
    """Products with 4-bit or 8-bit weights: those of the class `kind` of INTEGER_CLASSES, or by default the others.

    portable: all of them, of Triton's kernel. Packing is slow, so variants are copies of one weight.
    """
    kind, apart = kind or linear_kind(bits), is_on_hopper(bench.pool) and not portable
    for outputs, inputs in shapes:
        counts = [n for n in rows if (apart and runs_integers(bits, n, inputs)) == (kind in INTEGER_CLASSES)]
        if not counts:
            continue
        packed = quantized_linear(Dense(bench.random(outputs, inputs)), WeightFormat(bits, WEIGHT_GROUP))
        products: list[Any] = [packed]
        if portable:
            assert isinstance(packed.weight, Int4Weight | Int8Weight), "the layouts of GPUs"
            products = [partial(linear_quantized, weight=packed.weight, backend="triton")]
        products = [copy.deepcopy(products[0]) for _ in range(bench.variants(packed.bytes))]
        per_parameter = weight_bytes(bits, fitting_group(inputs, WEIGHT_GROUP), bench.element_bytes)
        for count in counts:
            yield linear_call(kind, bench.random(1, count, inputs), products, outputs, per_parameter)


def stored_calls(bench: Bench, shapes: Shapes, rows: Iterable[int]) -> Iterator[KernelCall]:
    """Products with weights of GGUF files as they are stored, of the types that Q4_K_M mixes."""
    for kind, (outputs, inputs) in product(STORED_TYPES, shapes):
        weights = LinearVariants.draw(bench, kind, LinearSize(outputs, inputs, ()))
        for count in rows:
            x = bench.random(1, count, inputs)
            yield linear_call(STORED_LINEAR, x, weights.products, outputs, weights.weight_bytes)


def expert_calls(
    bench: Bench, bits: int, sizes: Iterable[ExpertSize], rows: Iterable[int], portable: bool = False
) -> Iterator[KernelCall]:
    """Routed experts of few rows, under uniform routing; of Triton's kernels if `portable`."""
    for size, count in product(sizes, rows):
        experts = RoutedExperts.draw(bench, bits, size, count)
        call = (replace(experts, backend="triton") if portable else experts).call()
        yield replace(call, kind=experts_kind(bits))


def latent_calls(bench: Bench, sizes: Iterable[LatentSize], num_sms: int) -> Iterator[KernelCall]:
    """Decode attention over latent rows."""
    return (LatentDecode.draw(bench, size).call(num_sms) for size in sizes)


def decode_calls(bench: Bench, sizes: Iterable[DecodeSize], num_sms: int) -> Iterator[KernelCall]:
    """Decode attention as the runtime calls it, with each layer's KV cache cold."""
    return (random_decode(bench, size, num_sms) for size in sizes)


def _elementwise_calls(bench: Bench, shapes: Iterable[ModelShape], rows: Iterable[int]) -> Iterator[KernelCall]:
    """Norm and activation of one layer on `rows` tokens of one sequence."""
    for shape, count in product(shapes, rows):
        inputs = bench.random(1, 2, 1, count, shape.hidden)
        yield norm_call(f"norm, {count} rows", inputs, bench.random(shape.hidden))
        yield swiglu_call(f"swiglu, {count} rows", bench.random(1, 1, count, 2 * shape.intermediate))


def _rope_calls(bench: Bench, shapes: Iterable[ModelShape], rows: Iterable[int]) -> Iterator[KernelCall]:
    """Rotary embedding and cache append of one layer on `rows` tokens of one sequence."""
    for shape, count in product(shapes, rows):
        inputs = bench.random(1, 1, count, shape.q_width + 2 * shape.kv_width)
        yield rope_call(f"rope, {count} rows", inputs, Heads(shape.q_heads, shape.kv_heads, shape.head_dim))


def _sampling_calls(
    bench: Bench, vocabs: Iterable[int], batches: Iterable[int], queries: Iterable[int]
) -> Iterator[KernelCall]:
    """A draft step's draw from logits, and a verification's rejection sampling of the target's own likeliest tokens.

    Most of these are accepted.
    """
    for vocab, batch, count in product(vocabs, batches, queries):
        size = SamplingSize(vocab, count - 1, batch, 1.0, None, None)
        logits, uniform = bench.random(batch, count, vocab), uniform_numbers(bench, batch, count)
        if count == 1:
            yield draw_call(f"{batch} draws from {vocab}", size, logits[None, :, 0], uniform[:, 0])
        else:
            drafts = logits[:, :-1].transpose(0, 1).contiguous()
            sampling = RejectionSampling(size, logits, drafts, logits[:, :-1].argmax(-1), uniform)
            yield rejection_call(f"rejection sampling of {batch} x {count} x {vocab}", [sampling])


def _quantize_calls(bench: Bench, heads: Iterable[Heads], tokens: Iterable[int]) -> Iterator[KernelCall]:
    """Quantization of whole groups of one layer into both planes."""
    for size, count in product(heads, tokens):
        caches = bench.randoms(2, size.kv_heads, count, size.head_dim)
        yield quantize_call(f"{size.kv_heads} x {size.head_dim}, {count} tokens", caches[:, 0], caches[:, 1])


def _gather_calls(bench: Bench, row_elements: int, rows: Iterable[int]) -> Iterator[KernelCall]:
    """Gathers of scattered rows from a large table, as a sparse draft reads single tokens' keys."""
    table = bench.random(bench.pool.numel() // row_elements, row_elements)
    for count in rows:
        cost = ops.copy(count * row_elements, bench.element_bytes)
        index = torch.randint(len(table), (bench.variants(cost.read_bytes), count), device=bench.device)
        yield KernelCall("gather", f"{count} rows", cost, partial(_gather, table, index), len(index))


def _gather(table: torch.Tensor, index: torch.Tensor, variant: int) -> torch.Tensor:
    return table.index_select(0, index[variant])


def _sparse_calls(bench: Bench, kind: str, sizes: Iterable[DecodeSize], num_sms: int) -> Iterator[KernelCall]:
    """The calls of class `kind`, one of `SPARSE_CLASSES`."""
    for size in sizes:
        draft = SparseDraft.random(bench, replace(size, name=f"{size.name}, {RATIO:.0%} chosen"))
        splits = max(1, num_sms // (size.batch * size.heads.kv_heads))
        match kind.removesuffix(WIDE):
            case "two_bit_scan":
                yield draft.choice_call()
            case "progressive_attention":
                yield draft.progressive_call(splits)
            case "sparse_attention":
                yield _sparse_attention_call(SparseAttention.draw(draft), splits)
            case "sparse_attention_full":
                yield _sparse_attention_call(SparseAttention.draw(draft, full=_full_precision(bench, size)), splits)


def _sparse_attention_call(attention: SparseAttention, splits: int) -> KernelCall:
    """Attention to chosen tokens, priced with the merge of its splits."""
    return attention.call(attention.cost(splits) + merge_cost(attention.draft.q, splits))


def _full_precision(bench: Bench, size: DecodeSize) -> torch.Tensor:
    """Keys and values of all tokens, [variants, 2, B, Hkv, tokens, D]."""
    return bench.randoms(
        2, size.batch, size.heads.kv_heads, size.quantized_tokens + size.full_tokens, size.heads.head_dim
    )


def _top_k_calls(bench: Bench, sizes: Iterable[DecodeSize]) -> Iterator[KernelCall]:
    """The choice of every KV head's best tokens; scores have just been written, so they are cached."""
    for size in sizes:
        scores = torch.randn(1, size.batch * size.heads.kv_heads, size.quantized_tokens, device=bench.device)
        yield top_k_call(size.name, scores, chosen_tokens(RATIO, size.quantized_tokens))
