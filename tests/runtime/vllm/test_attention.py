"""The paged cache of codes: every query's attention is what the tokens alone define, however vLLM schedules them."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_batches import PAGE, Sequence, batch_of, config_of, flash_attn_varlen_func, merge_attn_states

from ridgeplan.kernels.kv_cache import dequantize, quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.runtime.vllm import api
from ridgeplan.runtime.vllm.attention import CodesAttention, CodesBackend, CodesMetadataBuilder, PromptRow
from ridgeplan.runtime.vllm.pages import OpenPages, codes_of, page_width

KV_HEADS, Q_HEADS, HEAD_DIM = 2, 4, 64
TOKENS = 700
WIDTH = 8


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's functions in plain torch, and a configuration of four sequences."""
    monkeypatch.setattr(api, "flash_attn_varlen_func", flash_attn_varlen_func)
    monkeypatch.setattr(api, "merge_attn_states", merge_attn_states)
    monkeypatch.setattr(api, "get_flash_attn_version", lambda head_size: 3)
    monkeypatch.setattr(api, "get_current_vllm_config", lambda: config_of(4))
    monkeypatch.setattr(api.AttentionMetadataBuilder, "_init_reorder_batch_threshold", noted, raising=False)


def noted(builder: Any, threshold: int, supports_spec_as_decode: bool) -> None:
    builder.reorder_batch_threshold = threshold if supports_spec_as_decode else None


class Layer:
    """A layer of vLLM's with the plugin's attention, and texts: what any sequence of a name computes at each place."""

    def __init__(self, pages: int = 40, sequences: int = 4, gamma: int = 0) -> None:
        self.gamma, config = gamma, config_of(sequences, speculative=own_drafts(gamma) if gamma else None)
        api.get_current_vllm_config = lambda: config  # which the fixture restores
        self.impl = CodesAttention(Q_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, kv_cache_dtype="int8_per_token_head")
        config.compilation_config.static_forward_context["layer"] = SimpleNamespace(impl=self.impl)
        self.builder = CodesMetadataBuilder(None, ["layer"], config, torch.device("cpu"))
        shape = CodesBackend.get_kv_cache_shape(pages, PAGE, KV_HEADS, HEAD_DIM, "int8_per_token_head")
        self.memory = torch.full(shape, 77, dtype=torch.int8)
        self.texts: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def text(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; texts that begin with the same letter share their first 300 tokens."""
        if name not in self.texts:
            parts = []
            for seed in (name[:1], name):
                generator = torch.Generator().manual_seed(sum(map(ord, seed)) * 31 + len(seed))
                parts.append([torch.randn(TOKENS, n, HEAD_DIM, generator=generator) for n in (Q_HEADS, 2, 2)])
            shared, private = parts
            self.texts[name] = tuple(torch.cat([s[:300], o[300:]]) for s, o in zip(shared, private, strict=True))  # type: ignore[assignment]
        return self.texts[name]

    def step(self, *rows: tuple[Sequence, int], padded: int = 0) -> list[Tensor]:
        """One pass; what each sequence's queries get."""
        batch = batch_of(list(rows), WIDTH, padded)
        metadata = self.builder.build(0, batch)
        pieces = [[x[s.context : s.context + count] for x in self.text(s.name)] for s, count in rows]
        spare = [
            torch.full((padded * batch.max_query_len, n, HEAD_DIM), torch.nan) for n in (Q_HEADS, KV_HEADS, KV_HEADS)
        ]
        query, key, value = (torch.cat(column) for column in zip(*pieces, spare, strict=True))
        out = torch.full((len(query), Q_HEADS * HEAD_DIM), torch.nan)
        self.impl.forward(SimpleNamespace(), query, key, value, self.memory, metadata, out)
        counts = [count for _, count in rows]
        for sequence, count in rows:
            sequence.context += count
        return list(out[: sum(counts)].view(-1, Q_HEADS, HEAD_DIM).split(counts))

    def expected(self, name: str, first: int, count: int) -> Tensor:
        """A query sees whole pages before its own as INT8, and its own page as it is; and with drafts, queries of a
        step see what a buffer held that their first query began with."""
        queries, keys, values = self.text(name)
        held = (first + count) // PAGE + 1
        codes = QuantizedKV.allocate(1, KV_HEADS, held, PAGE, HEAD_DIM, "cpu", lower=True)
        whole = (x[None, : held * PAGE].transpose(1, 2) for x in (keys, values))
        quantize(*whole, codes, torch.zeros(1, dtype=torch.int32))
        stored = [x[0].transpose(0, 1).double() for x in dequantize(codes, True)]
        out = torch.empty(count, Q_HEADS, HEAD_DIM, dtype=torch.float64)
        for i, place in enumerate(range(first, first + count)):
            start = (first if self.gamma and count <= 16 else place) // PAGE * PAGE
            private = (x[start : place + 1].double() for x in (keys, values))
            seen = [torch.cat([s[:start], x]) for s, x in zip(stored, private, strict=True)]
            k, v = (x.repeat_interleave(Q_HEADS // KV_HEADS, 1).transpose(0, 1) for x in seen)
            scores = HEAD_DIM**-0.5 * (k @ queries[place].double()[..., None]).squeeze(2)
            out[i] = (scores.softmax(1)[:, None] @ v).squeeze(1)
        return out

    def check(self, results: list[Tensor], rows: list[tuple[Sequence, int]]) -> None:
        for result, (sequence, count) in zip(results, rows, strict=True):
            want = self.expected(sequence.name, sequence.context - count, count)
            torch.testing.assert_close(result.double(), want, rtol=1e-4, atol=1e-5, msg=f"{sequence} by {count}")

    def checked(self, *rows: tuple[Sequence, int], padded: int = 0) -> None:
        self.check(self.step(*rows, padded=padded), list(rows))


def test_prompts_in_chunks_then_single_tokens() -> None:
    layer = Layer()
    a, b = Sequence("a", 500, [3, 9, 4, 5]), Sequence("b", 200, [7, 8])
    layer.checked((a, 123))
    layer.checked((b, 57), (a, 1))  # a prompt of another sequence beside a step
    layer.checked((a, 3))  # a short chunk that lies within the page, and one that fills it
    layer.checked((a, 1))
    layer.checked((a, 1), (b, 71))  # b's first page is full exactly
    for _ in range(3):  # a's page fills, and the next opens
        layer.checked((a, 1), (b, 1), padded=2)
    layer.checked((b, 1), (a, 255))  # rows change places; a chunk over three pages
    layer.checked((b, 1), (a, 1), padded=1)
    c = Sequence("c", 300, [10, 11])
    layer.checked((c, 120))
    layer.checked((c, 8), (b, 1))
    layer.checked((c, 1), (b, 1))


def test_a_page_that_a_step_fills_serves_others_in_the_same_pass() -> None:
    """vLLM's prefix cache hands out a page as soon as it has scheduled the page's last token."""
    layer = Layer()
    a, hit = Sequence("ab", 300, [3, 4]), Sequence("ac", 300, [3, 5], context=PAGE)
    layer.checked((a, 127))
    layer.checked((a, 1), (hit, 140))  # as a prompt
    other = Layer()
    a, hit = Sequence("ab", 300, [3, 4]), Sequence("ac", 300, [3, 5], context=PAGE)
    other.checked((a, 127))
    other.checked((a, 1), (hit, 1), padded=1)  # as a single token, in a graph
    prompts = Layer()
    a, hit = Sequence("ab", 300, [3, 4]), Sequence("ac", 300, [3, 5], context=PAGE)
    prompts.checked((a, 150), (hit, 30))  # both as prompts


def test_a_prefix_that_is_cached_changes_nothing_bit_by_bit() -> None:
    alone, shared = Layer(), Layer()
    first, second = Sequence("ab", 300, [3, 4, 6]), Sequence("ac", 300, [9, 5, 7])
    alone.step((first, 290))
    (whole,) = alone.step((second, 290))
    first, hit = Sequence("ab", 300, [3, 4, 6]), Sequence("ac", 300, [3, 4, 7], context=2 * PAGE)
    shared.step((first, 290))
    (part,) = shared.step((hit, 290 - 2 * PAGE))
    torch.testing.assert_close(part, whole[2 * PAGE :], rtol=0, atol=0)


def test_a_sequence_that_was_preempted_starts_again_in_other_pages() -> None:
    layer = Layer()
    a, b = Sequence("a", 300, [3, 4, 5]), Sequence("b", 300, [6, 7])
    layer.checked((a, 200))
    layer.checked((a, 1), (b, 100))
    again = Sequence("a", 300, [4, 8, 9])  # one of its old pages among them
    layer.checked((b, 1), (again, 201))
    layer.checked((again, 1), (b, 1))


def own_drafts(gamma: int) -> SimpleNamespace:
    return SimpleNamespace(method="custom_class", model="ridgeplan.x", num_speculative_tokens=gamma)


def verify(layer: Layer, rows: list[tuple[Sequence, int]], accepted: list[int], padded: int = 0) -> None:
    """A pass over drafts of which so many of each row are right, and others wrong."""
    wrong, right = layer.text("z"), {s.name: layer.text(s.name) for s, _ in rows}
    for (sequence, _), count in zip(rows, accepted, strict=True):
        end = sequence.context + 1 + count
        layer.texts[sequence.name] = tuple(  # type: ignore[assignment]
            torch.cat([r[:end], w[end:]]) for r, w in zip(right[sequence.name], wrong, strict=True)
        )
    layer.checked(*rows, padded=padded)
    layer.texts.update(right)
    for (sequence, drafted), count in zip(rows, accepted, strict=True):
        sequence.context -= drafted - 1 - count


def test_drafts_are_verified_and_rejected_ones_overwritten() -> None:
    layer = Layer(gamma=4)
    a, b = Sequence("a", 300, [3, 4, 5]), Sequence("b", 300, [6, 7, 8])
    layer.checked((a, 130), (b, 60))
    verify(layer, [(a, 5), (b, 1)], [0, 0])  # unlike numbers of drafts
    verify(layer, [(a, 3), (b, 4)], [2, 1])
    verify(layer, [(b, 5), (a, 5)], [4, 3], padded=2)  # in a graph
    layer.checked((b, 1), (a, 1), padded=1)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("start", [123, 125, 126, 127])
def test_drafts_pass_the_end_of_a_page(start: int, accepted: int) -> None:
    """However many are right: the next passes read what the accepted tokens are, from the buffer and as codes."""
    layer = Layer(gamma=4)
    a, b = Sequence("a", 300, [3, 4, 5]), Sequence("b", 300, [6, 7, 8])
    layer.checked((a, start), (b, 60))
    layer.builder.open.owner[5] = 4  # of a sequence that has ended, before `a` was given its page
    verify(layer, [(a, 5), (b, 5)], [accepted, 2], padded=1)
    verify(layer, [(b, 5), (a, 5)], [0, 4 - accepted])
    verify(layer, [(b, 3), (a, 2)], [2, 1])
    layer.checked((a, 20), (b, 1))  # as a prompt, for instance after a preemption
    verify(layer, [(b, 5), (a, 5)], [4, 4], padded=1)


def test_a_page_that_drafts_filled_serves_others_once_they_are_accepted() -> None:
    layer = Layer(gamma=4)
    a = Sequence("ab", 300, [3, 4, 5])
    layer.checked((a, 125))
    verify(layer, [(a, 5)], [4])
    hit = Sequence("ac", 300, [3, 9, 7], context=PAGE)
    verify(layer, [(hit, 5), (a, 5)], [1, 1])  # in the first pass that vLLM hands the page out in
    verify(layer, [(a, 5), (hit, 5)], [4, 4])
    layer.checked((hit, 30), (a, 1))


@pytest.mark.parametrize("seed", range(3))
def test_random_rounds_of_drafts(seed: int) -> None:
    chance, layer = random.Random(seed), Layer(gamma=4)
    rows = [Sequence(name, 690, [3 + 6 * i + j for j in range(6)]) for i, name in enumerate("abc")]
    for sequence in rows:
        layer.checked((sequence, chance.randint(100, 130)))
    for _ in range(24):
        chance.shuffle(rows)
        chosen = rows[: chance.randint(1, 3)] if chance.random() < 0.2 else rows
        uniform = chance.random() < 0.7
        counts = [5 if uniform else chance.randint(1, 5) for _ in chosen]
        verify(layer, list(zip(chosen, counts, strict=True)), [chance.randint(0, n - 1) for n in counts])


def test_drafts_read_the_upper_codes() -> None:
    layer = Layer()
    a = Sequence("a", 300, [3, 4])
    layer.step((a, 200))
    metadata = layer.builder.build(0, batch_of([(a, 1)], WIDTH))
    query, key, value = (x[200:201] for x in layer.text("a"))
    outs = []
    for draft in (False, True):
        out = torch.empty(1, Q_HEADS * HEAD_DIM)
        drafting = type(metadata)(**{**vars(metadata), "draft": draft})
        outs.append(layer.impl.forward(SimpleNamespace(), query, key, value, layer.memory, drafting, out).clone())
    assert 1e-3 < float((outs[0] - outs[1]).abs().max()) < 0.1


def test_buffers_of_sequences_that_ended_are_taken_again_oldest_first() -> None:
    pages = OpenPages(3, torch.device("cpu"))

    def assign(before: list[int], after: list[int]) -> list[int]:
        return pages.assign(*(torch.tensor(x, dtype=torch.int32) for x in (before, after)))[0].tolist()

    assert assign([-1, -1, 0], [11, 12, 0]) == [0, 1, 3]  # the third row pads the batch
    assert assign([12, -1], [12, 13]) == [1, 2]
    assert assign([13], [-1]) == [2]  # its page is full: the buffer is free again
    assert assign([-1, 12], [14, 12]) == [2, 1]
    assert assign([-1], [15]) == [0]  # page 11 was left behind longest
    assert assign([14, 12, 15], [14, 12, 15]) == [2, 1, 0]


@pytest.mark.parametrize("seed", range(3))
def test_running_sequences_keep_their_buffers(seed: int) -> None:
    """Random steps by vLLM's rule: running sequences in order until the tokens of a step are spent, and only then new
    ones. Sequences end and are preempted; their pages are handed out again at once."""
    chance, most, page = random.Random(seed), 4, 4
    pages, free = OpenPages(most + 1, torch.device("cpu")), list(range(1, 60))
    running: list[dict[str, Any]] = []
    for _ in range(250):
        left, rows = chance.choice([1, 2, 5, 12]), []
        for sequence in running:
            count = min(left, max(1, sequence["prompt"] - sequence["context"]))
            left -= count
            rows += [(sequence, count)] if count else []
        while left and len(running) < most:
            sequence = {"context": 0, "prompt": chance.randint(1, 15), "pages": [], "buffer": None}
            running.append(sequence)
            rows.append((sequence, min(left, sequence["prompt"])))
            left -= rows[-1][1]
        before, after = [], []
        for sequence, count in rows:
            end = sequence["context"] + count
            while len(sequence["pages"]) * page < end + 1:
                sequence["pages"].append(free.pop())
            before.append(sequence["pages"][sequence["context"] // page] if sequence["context"] % page else -1)
            after.append(sequence["pages"][end // page] if end % page else -1)
        given = pages.assign(*(torch.tensor(x, dtype=torch.int32) for x in (before, after)))[0].tolist()
        for (sequence, count), buffer in zip(rows, given, strict=True):
            assert sequence["buffer"] in (None, buffer), "a sequence lost the tokens of its open page"
            sequence["context"] += count
            sequence["buffer"] = buffer if sequence["context"] % page else None
        held = [sequence["buffer"] for sequence in running if sequence["buffer"] is not None]
        assert len(set(held)) == len(held) and most + 1 not in held
        for sequence in [s for s in running if chance.random() < 0.1] + running[-1:] * (chance.random() < 0.1):
            if sequence in running:
                running.remove(sequence)
                free += sequence["pages"]


def test_the_pages_of_a_prompt() -> None:
    spans = PromptRow(0, 7, tokens=300, context=100).spans
    assert (spans.query_starts, spans.own_starts) == ([0, 28, 156, 284, 300], [0, 128, 256, 384, 400])
    assert spans.later is not None
    assert (spans.later.first, spans.later.query_starts, spans.later.pages) == (28, [0, 128, 256, 272], [1, 2, 3])
    assert PromptRow(0, 0, tokens=128, context=0).spans.later is None
    whole = PromptRow(0, 0, tokens=130, context=256).spans.later
    assert whole is not None and (whole.first, whole.pages) == (0, [2, 3])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_codes_fit_the_bytes_that_vllm_counts(head_dim: int) -> None:
    memory = torch.zeros(3, 2, page_width(head_dim), dtype=torch.int8)
    codes = codes_of(memory, head_dim)
    assert (codes.batch, codes.kv_heads, codes.groups, codes.group, codes.head_dim) == (3, 2, 1, 128, head_dim)
    assert codes.bytes <= memory.nbytes
    assert codes.bytes == memory.nbytes or head_dim < 128
    with pytest.raises(ValueError, match="head_dim is 256"):
        codes_of(torch.zeros(3, 2, page_width(256), dtype=torch.int8), 256)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sliding_window": 128}, "sliding_window"),
        ({"alibi_slopes": [0.5], "logits_soft_cap": 30.0}, "alibi_slopes, logits_soft_cap"),
        ({"attn_type": "encoder"}, "attn_type"),
        ({"sinks": torch.zeros(4)}, "sinks"),
    ],
)
def test_attention_that_is_not_carried_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"attention with {named} is not carried by ridgeplan's cache"):
        CodesAttention(4, 64, 0.125, 2, **options)


def test_other_drafts_and_other_pages_are_refused() -> None:
    ngram = SimpleNamespace(method="ngram", model="ngram")
    with pytest.raises(ValueError, match="drafts by 'ngram' with ridgeplan's cache; allowed: ridgeplan's own"):
        CodesMetadataBuilder(None, [], config_of(4, speculative=ngram), torch.device("cpu"))
    with pytest.raises(ValueError, match="num_speculative_tokens is 16; allowed with ridgeplan's cache: 1 to 15"):
        CodesMetadataBuilder(None, [], config_of(4, speculative=own_drafts(16)), torch.device("cpu"))
    with pytest.raises(ValueError, match="--block-size is 256; allowed with ridgeplan's cache: 128"):
        CodesBackend.get_kv_cache_shape(10, 256, 8, 128)


def test_memory_is_taken_while_vllm_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    empty: Callable[..., Tensor] = torch.empty

    def counted(*sizes: int, **options: Any) -> Tensor:
        tensor = empty(*sizes, **options)
        taken.append(tensor.nbytes)
        return tensor

    impl = Layer().impl
    out, query = torch.ones(5, Q_HEADS * HEAD_DIM), torch.zeros(5, Q_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "empty", counted)
    impl.forward(None, query, query, query, torch.zeros(0), None, out)
    assert not out.any()
    pages = 4096 // PAGE
    assert taken == [2 * 2 * 4096 * KV_HEADS * HEAD_DIM, pages * KV_HEADS * page_width(HEAD_DIM)]
