"""2-bit keys and token-major values of draft planes, and scores from them."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import dequantize, quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.reference import unpack
from ridgeplan.kernels.selection import two_bit_logits, two_bit_scores, two_bit_top_k
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys, pack_draft_planes, unpack_two_bit

pytestmark = pytest.mark.usefixtures("poisoned_empty")
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


@dataclass(frozen=True)
class Store:
    """Random codes of `groups` groups, with their planes."""

    codes: QuantizedKV
    planes: DraftPlanes

    @classmethod
    def build(cls, batch: int, kv_heads: int, groups: int, group: int, head_dim: int, device: str) -> "Store":
        generator = torch.Generator().manual_seed(head_dim + groups)
        codes = QuantizedKV.allocate(batch, kv_heads, groups, group, head_dim, device, lower=True)
        shape = (batch, kv_heads, groups * group, head_dim)
        first = torch.zeros(batch, dtype=torch.int32, device=device)
        keys, values = (torch.randn(shape, generator=generator).to(device) + shift for shift in (2, 0))
        quantize(keys, values, codes, first, backend="reference")
        planes = DraftPlanes.allocate(codes)
        pack_draft_planes(codes, planes, first, groups, backend="reference")
        return cls(codes, planes)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_planes_hold_the_upper_codes(head_dim: int, device: str) -> None:
    store = Store.build(2, 3, 2, 32, head_dim, device)
    upper = torch.cat(unpack(store.codes.key_upper, None), dim=-1)
    assert torch.equal(unpack_two_bit(store.planes.key_two_bit), (upper / 4).floor())
    by_channel = torch.cat(unpack(store.codes.value_upper, None), dim=-1)
    assert torch.equal(torch.cat(unpack(store.planes.value_rows, None), dim=-1), by_channel.mT)
    assert store.planes.bytes == 2 * 3 * 2 * 32 * head_dim * 3 // 4


@pytest.mark.parametrize("group", [32, 128])
@BACKENDS
def test_packing_writes_only_what_it_is_told(backend: Backend, group: int, device: str) -> None:
    """One group of row 0, none of the masked row 1; the rest stays as it was."""
    store = Store.build(2, 2, 3, group, 64, device)
    out = DraftPlanes.allocate(store.codes)
    first = torch.tensor([1, 0], dtype=torch.int32, device=device)
    mask = torch.tensor([True, False], device=device)
    pack_draft_planes(store.codes, out, first, 1, mask, backend=backend)
    for plane, expected in ((out.key_two_bit, store.planes.key_two_bit), (out.value_rows, store.planes.value_rows)):
        assert torch.equal(plane[0, :, 1], expected[0, :, 1])
        plane[0, :, 1] = 0
        assert not plane.any()
    pack_draft_planes(store.codes, out, torch.zeros_like(first), 3, backend=backend)
    assert torch.equal(out.key_two_bit, store.planes.key_two_bit)
    assert torch.equal(out.value_rows, store.planes.value_rows)


def exact_logits(store: Store, q: Tensor) -> Tensor:
    """q . k in float64 [B, Hkv, heads, tokens], keys decoded one by one: the middle of four upper codes."""
    upper = torch.cat(unpack(store.codes.key_upper, None), dim=-1).double()
    middle = 4 * (upper // 4) + 1.5
    keys = middle * store.codes.key_scale.double()[..., None, :] + store.codes.key_min.double()[..., None, :]
    heads = q[:, 0].double().unflatten(1, (store.codes.kv_heads, -1)) * q.shape[-1] ** -0.5
    return heads @ keys.flatten(2, 3).mT


@pytest.mark.parametrize(
    ("kv_heads", "ratio", "head_dim", "group"), [(2, 4, 128, 128), (1, 7, 64, 128), (2, 1, 64, 32)]
)
@BACKENDS
def test_scores_are_the_log_of_summed_probabilities(
    kv_heads: int, ratio: int, head_dim: int, group: int, backend: Backend, device: str
) -> None:
    """Of rows that are sampled as a whole, exp(score) sums to the number of query heads."""
    store = Store.build(2, kv_heads, 4, group, head_dim, device)
    q = torch.randn(2, 1, kv_heads * ratio, head_dim, generator=torch.Generator().manual_seed(1)).to(device)
    groups = torch.tensor([4, 1], dtype=torch.int32, device=device)
    scores = two_bit_scores(q, TwoBitKeys.of(store.codes, store.planes), groups, backend=backend)
    logits = exact_logits(store, q)
    for b, tokens in enumerate([4 * group, group]):
        total = scores[b, :, :tokens].double().exp().sum(-1)
        assert torch.allclose(total, torch.full_like(total, ratio), rtol=1e-3)
        expected = logits[b, ..., :tokens].softmax(-1).sum(1).log()
        assert torch.allclose(scores[b, :, :tokens].double(), expected, atol=1e-3)


@BACKENDS
def test_heads_of_long_rows_are_weighed_by_a_sample(backend: Backend, device: str) -> None:
    """Eight groups of 20 or of 9, the first and the last among them."""
    store = Store.build(2, 2, 20, 32, 64, device)
    q = 4 * torch.randn(2, 1, 8, 64, generator=torch.Generator().manual_seed(2)).to(device)
    groups = torch.tensor([20, 9], dtype=torch.int32, device=device)
    scores = two_bit_scores(q, TwoBitKeys.of(store.codes, store.planes), groups, backend=backend)
    logits = exact_logits(store, q)
    for b, sample in enumerate(([0, 2, 5, 8, 10, 13, 16, 19], [0, 1, 2, 3, 4, 5, 6, 8])):
        tokens = 32 * int(groups[b])
        lse = logits[b].unflatten(-1, (20, 32))[:, :, sample].flatten(2).logsumexp(-1, keepdim=True)
        expected = (logits[b, ..., :tokens] - lse).logsumexp(1)
        assert torch.allclose(scores[b, :, :tokens].double(), expected, atol=1e-3)


def test_bfloat16_queries(device: str) -> None:
    """The offset of the codes cancels although scaled queries are rounded: errors stay at bfloat16's own."""
    store = Store.build(1, 2, 4, 128, 128, device)
    q = torch.randn(1, 1, 8, 128, generator=torch.Generator().manual_seed(1)).to(device).bfloat16()
    groups = torch.full((1,), 4, dtype=torch.int32, device=device)
    scores = two_bit_scores(q, TwoBitKeys.of(store.codes, store.planes), groups, backend="triton")
    expected = exact_logits(store, q).softmax(-1).sum(2).log()
    assert (scores.double() - expected).abs().max() < 0.05


def test_two_bit_keys_are_nearer_than_the_spacing_of_four_codes(device: str) -> None:
    """An upper code is at most 1.5 codes from the middle of its four, and rounding to it costs half a code more."""
    store = Store.build(1, 1, 2, 32, 64, device)
    exact = dequantize(store.codes, lower=True, backend="reference")[0].view(1, 1, 2, 32, 64)
    middle = unpack_two_bit(store.planes.key_two_bit) * 4 + 1.5
    rough = middle * store.codes.key_scale[..., None, :] + store.codes.key_min[..., None, :]
    assert ((rough - exact).abs() <= 2.01 * store.codes.key_scale[..., None, :].float()).all()


def test_what_is_not_allowed(device: str) -> None:
    store = Store.build(1, 2, 1, 32, 64, device)
    groups = torch.ones(1, dtype=torch.int32, device=device)
    keys = TwoBitKeys.of(store.codes, store.planes)
    with pytest.raises(ValueError, match="one query"):
        two_bit_scores(torch.zeros(1, 2, 4, 64, device=device), keys, groups)
    with pytest.raises(ValueError, match="groups is"):
        two_bit_scores(torch.zeros(1, 1, 4, 64, device=device), keys, groups.long())
    other = Store.build(1, 2, 2, 32, 64, device).planes
    with pytest.raises(ValueError, match=r"2-bit keys of .* do not fit scales"):
        TwoBitKeys.of(store.codes, other)


# The choice by 2-bit keys, from scores by its twin or Triton's kernels.


def random_keys(batch: int, kv_heads: int, groups: int, device: str, head_dim: int = 64) -> TwoBitKeys:
    """Random codes in groups of 32, whose scales differ by channel."""
    generator = torch.Generator().manual_seed(groups)
    sizes = (batch, kv_heads, groups)
    codes = torch.randint(0, 256, (*sizes, 32, head_dim // 4), generator=generator, dtype=torch.uint8)
    scale, minimum = (torch.randn(*sizes, head_dim, generator=generator).half() for _ in range(2))
    return TwoBitKeys(*(x.to(device) for x in (codes, scale.abs(), minimum)))


def integers(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@BACKENDS
def test_the_best_of_each_rows_own_groups_in_order(backend: Backend, device: str) -> None:
    """As a sort of the scores has them, sinks before all; a row of fewer tokens than k lists what it has."""
    keys = random_keys(3, 2, 4, device)
    q = torch.randn(3, 1, 4, 64, generator=torch.Generator().manual_seed(5)).to(device)
    groups, k = integers([4, 1, 0], device), integers([10, 40, 5], device)
    scores = two_bit_scores(q, keys, groups, backend="reference")
    index, count = two_bit_top_k(q, keys, groups, k, max_k=64, sinks=3, backend=backend)
    assert index.shape == (3, 2, 64)
    assert count.tolist() == [[10, 10], [32, 32], [0, 0]]
    for b, tokens in enumerate((128, 32)):
        for h in range(2):
            ranked = sorted(range(tokens), key=lambda n: (n >= 3, -float(scores[b, h, n])))
            num_chosen = int(count[b, h])
            assert index[b, h, :num_chosen].tolist() == sorted(ranked[:num_chosen])


@BACKENDS
def test_what_is_common_to_all_keys_changes_no_choice(backend: Backend, device: str) -> None:
    """Logits of hundreds, as biases of keys cause them, are far beyond what exp holds."""
    keys = random_keys(1, 2, 12, device)
    q = torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(5)).to(device)
    groups, k = integers([12], device), integers([40], device)
    moved = TwoBitKeys(keys.codes, keys.scale, keys.minimum + 32 * q[:, 0].sum(1)[:, None, None].half())
    assert two_bit_logits(q, moved, 64**-0.5).abs().max() > 300
    index, expected = (two_bit_top_k(q, x, groups, k, max_k=40, backend=backend)[0] for x in (moved, keys))
    agreeing = (index[..., None] == expected[..., None, :]).any(-1).float().mean()
    assert agreeing > 0.9  # minima are rounded to half precision


def test_two_bit_top_k_refuses(device: str) -> None:
    keys, q = random_keys(2, 1, 2, device), torch.zeros(2, 1, 2, 64, device=device)
    groups = integers([2, 2], device)
    with pytest.raises(ValueError, match="k is"):
        two_bit_top_k(q, keys, groups, groups.long(), max_k=9)
    with pytest.raises(ValueError, match="max_k is 0; allowed: from 1"):
        two_bit_top_k(q, keys, groups, groups, max_k=0)
