"""vLLM's kernels, as peers of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.linear.weights import MXFP4_GROUP
from ridgeplan.roofline.execution import fitting_group
from ridgeplan.validate.kernel_calls.case import PAGE_TOKENS, Call, Product, fresh, in_pages
from ridgeplan.validate.kernel_calls.sizes import GROUP, ExpertSize, StateSize
from ridgeplan.validate.timing import Bench

LAYERS = "vllm.model_executor.layers"
MARLIN = f"{LAYERS}.quantization.utils.marlin_utils"
FLASH_ATTENTION_SPLITS = 32  # vLLM's default under CUDA graphs
SCALE = 2**-7  # of all experts' codes
SYMMETRIC = MappingProxyType({4: "uint4b8", 8: "uint8b128"})  # scalar types, by bits


def prepared(make: Callable[..., Any], *inputs: Any) -> Callable[..., Any]:
    """The call that `make(*inputs)` returns, made when first called: it imports vLLM, which may fail, and packs."""
    call = cache(partial(make, *inputs))
    return lambda *arguments: call()(*arguments)


def vllm_products(codes: Tensor, scale: Tensor, bits: int, variants: int) -> dict[str, Product]:
    """vLLM's W4A16 and W8A16 products by (codes - 2^(bits - 1)) * scale, arguments as of `tinygemm`.

    GPTQ's order of codes, 8 or 4 along the inputs in a word, is what both repack at the first call. Their symmetric
    weights lack the zero of ours, 1/33 or 1/65 of the bytes. Of 4-bit weights Marlin multiplies x in 8 bits, too, with
    one scale per row that a kernel before it finds (W4A8).
    """
    products = {"vLLM Marlin": marlin, "vLLM Machete": machete}
    if bits == 4:
        products["vLLM Marlin, INT8 x"] = partial(marlin, x_dtype=torch.int8)
    return {name: prepared(product, codes, scale, bits, variants) for name, product in products.items()}


def _gptq_words(codes: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 32, bits, device=codes.device, dtype=torch.int32).view(1, -1, 1)
    return (codes.int().t().reshape(-1, 32 // bits, len(codes)) << shifts).sum(1, dtype=torch.int32)


def marlin(codes: Tensor, scale: Tensor, bits: int, variants: int, x_dtype: torch.dtype | None = None) -> Product:
    """Marlin's product, as in `vllm_products`. x_dtype: of x in the product, by default its own."""
    ops, utils, kind = import_module("vllm._custom_ops"), import_module(MARLIN), _scalar_type(SYMMETRIC[bits])
    outputs, inputs = codes.shape
    empty, scales = torch.empty(0, dtype=torch.int32, device=codes.device), scale.t().bfloat16().contiguous()
    weight = ops.gptq_marlin_repack(_gptq_words(codes, bits), empty, inputs, outputs, bits, x_dtype is not None)
    scales = utils.marlin_permute_scales(scales, inputs, outputs, inputs // len(scales), x_dtype is not None)
    options: dict[str, Any] = {"input_dtype": x_dtype}
    if x_dtype is not None:
        scales, options["input_global_scale"] = utils.marlin_act_int8_process_scales(scales)
    copies = [(weight.clone(), scales.clone()) for _ in range(variants)]
    fixed = empty, empty, empty, utils.marlin_make_workspace_new(codes.device), kind, outputs, inputs, True
    return lambda x, i: utils.apply_gptq_marlin_linear(x, *copies[i], *fixed, **options)


def machete(codes: Tensor, scale: Tensor, bits: int, variants: int) -> Product:
    """Machete's product, as in `vllm_products`."""
    ops, kind = import_module("vllm._custom_ops"), _scalar_type(SYMMETRIC[bits])
    by_input, scales = _gptq_words(codes, bits).t().contiguous().t(), scale.t().bfloat16().contiguous()
    types = {"a_type": torch.bfloat16, "b_type": kind, "group_scales_type": torch.bfloat16}
    weight, group = ops.machete_prepack_B(by_input, **types), codes.shape[1] // len(scales)
    copies = [{"b_q": weight.clone(), "b_group_scales": scales.clone()} for _ in range(variants)]
    return lambda x, i: ops.machete_mm(a=x, b_type=kind, b_group_size=group, **copies[i])


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Call:
    """fla's gated RMSNorm, as vLLM ships it, of x and gate [rows, channels]."""
    norm = import_module(f"{LAYERS}.fla.ops.layernorm_guard").rmsnorm_fn
    return lambda _: norm(x, weight, None, z=gate, eps=eps)


def delta_rule(bench: Bench, size: StateSize) -> Call:
    """fla's gated delta rule as vLLM decodes with it, without convolution. The state after each token is written."""
    update = import_module(f"{LAYERS}.fla.ops.fused_sigmoid_gating").fused_sigmoid_gating_delta_rule_update
    tokens, state = size.batch * size.queries, (size.value_heads, size.value_dim, size.key_dim)
    numbers = partial(torch.arange, dtype=torch.int32, device=bench.device)
    variants = bench.variants(4 * size.batch * size.value_heads * size.value_dim * size.key_dim)
    a, b = (fresh(bench, tokens, size.value_heads) for _ in "ab")
    q, k = (fresh(bench, 1, tokens, size.key_heads, size.key_dim) for _ in "qk")
    v, by_head = fresh(bench, 1, tokens, *state[:2]), torch.zeros(size.value_heads, device=bench.device)
    states = torch.zeros(1 + variants * tokens, *state, device=bench.device)  # vLLM's first one is for padding
    slots = numbers(1, len(states)).view(variants, size.batch, size.queries)
    options = {"initial_state": states, "cu_seqlens": numbers(0, tokens + 1, size.queries)}
    return lambda i: update(
        by_head, a, b, by_head, q, k, v, ssm_state_indices=slots[i], use_qk_l2norm_in_kernel=True, **options
    )


def chunked_delta_rule(bench: Bench, size: StateSize) -> Call:
    """fla's gated delta rule in chunks as vLLM runs prompts through it, without convolution, decays and step sizes."""
    rule = import_module(f"{LAYERS}.fla.ops.chunk").chunk_gated_delta_rule
    q, k = (fresh(bench, 1, size.queries, size.key_heads, size.key_dim) for _ in "qk")
    v = fresh(bench, 1, size.queries, size.value_heads, size.value_dim)
    state = torch.zeros(1, size.value_heads, size.value_dim, size.key_dim, device=bench.device)
    bounds = torch.tensor([0, size.queries], dtype=torch.int32, device=bench.device)
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": bounds}
    decays, steps = -v[..., 0].float().abs(), v[..., 1].sigmoid()
    return lambda _: rule(q, k, v, decays, steps, use_qk_l2norm_in_kernel=True, **options)


def flash_attention(q: Tensor, keys: Tensor, values: Tensor, dtype: torch.dtype) -> Call:
    """FlashAttention 3 of q [B, T, Hq, D] over keys, values [variants, B, Hkv, N, D], in whole pages.

    Called as vLLM decodes with it under CUDA graphs: by a schedule made before, and up to 32 splits. dtype: of queries,
    keys and values; FP8 without scales.
    """
    package = import_module("vllm.vllm_flash_attn")
    (batch, queries, q_heads, head_dim), (kv_heads, tokens) = q.shape, keys.shape[2:4]
    numbers = partial(torch.arange, dtype=torch.int32, device=q.device)
    pages, bounds = numbers(batch * tokens // PAGE_TOKENS).view(batch, -1), numbers(batch + 1) * queries
    lengths, options = torch.full_like(pages[:, 0], tokens), {"num_splits": FLASH_ATTENTION_SPLITS, "causal": True}
    schedule = package.get_scheduler_metadata(
        batch, queries, tokens, q_heads, kv_heads, head_dim, lengths, dtype, cu_seqlens_q=bounds,
        page_size=PAGE_TOKENS, **options,
    )  # fmt: skip
    rows, paged = q.flatten(0, 1).to(dtype), [in_pages(stored, dtype) for stored in (keys, values)]
    return lambda i: package.flash_attn_varlen_func(
        rows, *(stored[i] for stored in paged), queries, bounds, tokens, seqused_k=lengths, block_table=pages,
        scheduler_metadata=schedule, fa_version=3, **options,
    )  # fmt: skip


def flash_mla(q: Tensor, rows: Tensor, latent: int, scale: float) -> Call:
    """FlashMLA of q [batch, queries, heads, row] over rows [variants, batch, tokens, row], in whole pages."""
    ops = import_module("vllm.v1.attention.ops.flashmla")
    pages = torch.arange(rows[0, ..., 0].numel() // PAGE_TOKENS, dtype=torch.int32, device=q.device).view(len(q), -1)
    paged = rows.reshape(len(rows), -1, PAGE_TOKENS, 1, rows.shape[-1])
    lengths, schedule = torch.full_like(pages[:, 0], rows.shape[2]), ops.FlashMLASchedMeta()
    return lambda i: ops.flash_mla_with_kvcache(
        q, paged[i], pages, lengths, latent, schedule, softmax_scale=scale, causal=True
    )


def triton_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Call:
    """vLLM's experts in 16 bits; weights and chosen [choices, rows, per_token]."""
    run, ids = import_module(f"{LAYERS}.fused_moe.fused_moe").fused_experts, chosen.int()
    return lambda i: run(x, gate_up, down, weights[i], ids[i])


def marlin_experts(x: Tensor, size: ExpertSize, kind: str, weights: Tensor, chosen: Tensor) -> Call:
    """Marlin's experts of random codes, whose order is of no matter. kind: the name of a scalar type of vLLM."""
    run = import_module(f"{LAYERS}.fused_moe.experts.marlin_moe").fused_marlin_moe
    bits, ids, mxfp4 = 8 if kind == "uint8b128" else 4, chosen.int(), kind == "float4_e2m1f"
    words, scales = [], []
    for inputs, outputs in ((size.hidden, 2 * size.intermediate), (size.intermediate, size.hidden)):
        shape = size.experts, inputs // 16, outputs * bits // 2
        words.append(torch.randint(-1 << 31, 1 << 31, shape, dtype=torch.int32, device=x.device))
        group = fitting_group(inputs, MXFP4_GROUP if mxfp4 else GROUP) or inputs
        each = torch.full((size.experts, inputs // group, outputs), SCALE, dtype=x.dtype, device=x.device)
        scales.append(each.to(torch.float8_e8m0fnu) if mxfp4 else each)
    options = {"workspace": import_module(MARLIN).marlin_make_workspace_new(x.device, 4)}
    options["moe_sum"] = import_module("vllm._custom_ops").moe_sum
    return lambda i: run(x, *words, None, None, *scales, weights[i], ids[i], _scalar_type(kind).id, **options)


def _scalar_type(name: str) -> Any:
    return getattr(import_module("vllm.scalar_type").scalar_types, name)
