"""DapQ's premise: queries depend on position more than on content, so pseudo queries find what will be read.

Measured as in the paper: similarity of queries under the same or another content and position (Table 1), over offsets
(Figure 2b), recall of the prompt tokens that the true continuation reads most (Equations 1 to 3, Figure 3), similarity
of attention (Table 8), and recall by content and position of the pseudo queries (Figures 4a and 4c), with the scorer
that evicts. The true continuation is the text's own, as greedy text of small models repeats
itself; scores are means over the query heads of a KV head (docs/papers.md, DapQ-1).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ridgeplan.roofline.plan.plan import MAX_TOKENS, Workload, require_within
from ridgeplan.roofline.plan.policies.dense import autoregressive
from ridgeplan.roofline.plan.policies.evictions import DapQEviction
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.policies.evictions import DapQScorer
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.validate.acceptance import named_shape
from ridgeplan.validate.prompts import prompt_batch
from ridgeplan.validate.studies.recorded import RecordedPrompt, Recording

PSEUDO_TOKENS = 32  # queries that are compared, section 3.1
SINKS = 4
OFFSETS = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
PREFIX_SHARE = 8  # of a window, one token in eight is the prompt's first: 4 of 32, section 5.1
RECALL_WINDOWS, BUDGETS = (8, 16, 32, 64), (64, 128, 256)
ATTENTION_WINDOWS = (1, 2, 4, 8, 16, 32, 64)
DAPQ, DAPQ_RANDOM, SNAPKV, STREAMING = "dapq", "dapq-random", "snapkv", "streamingllm"
NONSENSE = "Sorry, I don't know. "  # the paper's other content, A.1

# Choices of pseudo queries by the figure that compares them: hyperparameters that differ from the plan's.
CONTENT, POSITION, HEADS = "content", "position", "heads"
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    CONTENT: {  # Figure 4a, Table 10
        "first 4, last 28": {}, "first 2, last 30": {"prefix": 2, "suffix": 30}, "last 32": {"prefix": 0, "suffix": 32},
        "first 8, last 24": {"prefix": 8, "suffix": 24}, "sampled": {"content": "sampled"}, "span": {"content": "span"},
        "vocabulary": {"content": "vocabulary"}, "fixed": {"content": "fixed"},
    },
    POSITION: {  # Figure 4c
        "right after the prompt": {}, **{f"after {share:.0%} of it": {"insert": share} for share in (0.17, 0.5, 0.83)},
        **{f"{offset} further back": {"offset": offset} for offset in (32, 128, 512, 2048)},
    },
    HEADS: {"mean": {}, "maximum": {"heads": "maximum"}},
}  # fmt: skip

Figures = dict[tuple[Any, ...], float]  # by kind and what it depends on


@dataclass(frozen=True)
class DapqSizes:
    """Tokens of a prompt and of its continuation, and how many of them. Raises PlanError for values out of range."""

    context: int = 4096
    response: int = 128
    passages: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        require_within("context", self.context, 2 * max(BUDGETS), MAX_TOKENS)
        require_within("response", self.response, PSEUDO_TOKENS, 1 << 12)
        require_within("passages", self.passages, 1, 1 << 12)


@dataclass(frozen=True)
class DapqPassage:
    """Token ids of a prompt and of the text's own continuation; other: those of another content."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    other: tuple[int, ...]
    noise: tuple[int, ...]  # drawn from the vocabulary
    starts: tuple[tuple[str, int], ...] = ()  # drawn positions by their range (Figure 2a)


@dataclass(frozen=True)
class Claim:
    """A finding of the paper, and whether it holds here."""

    text: str
    holds: bool
    detail: str


def study_passage(engine: Engine, passage: DapqPassage) -> Figures:
    """All figures of one passage, by ("similarity", content, position, when), ("offset", tokens), and so on."""
    recorded = RecordedPrompt(engine, passage.prompt)
    truth = recorded.ask(passage.response, recorded.length, attention=True)
    windows = dict(_windows(recorded, passage))
    return {
        **_similarities(recorded, passage, truth),
        **_offsets(recorded, passage, truth),
        **_recalls(truth, windows, recorded.length),
        **_attentions(truth, windows),
        **_choices(recorded, passage, truth),
    }


def study(
    model: str,
    text: str,
    sizes: DapqSizes,
    device: str | None = None,
    on_progress: OnProgress = silent,
) -> list[Figures]:
    """The figures of every passage. Raises what `ridgeplan.runtime.load` raises, and PromptError for a short text."""
    workload = Workload(named_shape(model).name, "this machine", sizes.context, sizes.response + max(RECALL_WINDOWS))
    engine = load(autoregressive(workload), model, device=device)
    batches = prompt_batch(engine.tokenizer, sizes.context + sizes.response, sizes.passages, text)
    other, vocab = engine.tokenizer.encode(NONSENSE, add_special_tokens=False), engine.config.shape.vocab
    figures = []
    for index, passage in enumerate(passages(batches, sizes.response, other, vocab, sizes.seed)):
        on_progress(f"passage {index + 1}", index, sizes.passages)
        figures.append(study_passage(engine, passage))
    engine.close()
    return figures


def similarity(queries: Tensor, others: Tensor) -> float:
    """Mean cosine of queries [layers, tokens, q_heads, head_dim] and others, each with its counterpart."""
    return float(cosine_similarity(queries.float(), others.float(), dim=-1).mean())


def top(attention: Tensor, budget: int) -> Tensor:
    """Whether a prompt token is among the `budget` with the highest sums over tokens: bool [layers, kv_heads, prompt].

    attention: [layers, tokens, kv_heads, prompt] (Equations 1 and 2).
    """
    scores = attention.sum(1)
    kept = scores.topk(min(budget, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, kept, value=True)


def recall(gold: Tensor, kept: Tensor) -> float:
    """Share of the gold tokens that are kept, both bool [layers, kv_heads, prompt] (Equation 3)."""
    return float((gold & kept).sum() / gold.sum())


def streaming(gold: Tensor, budget: int) -> Tensor:
    """The first few and the latest tokens, `budget` in all, in the shape of `gold`."""
    kept = torch.zeros_like(gold)
    kept[..., :SINKS] = True
    kept[..., gold.shape[-1] - (budget - SINKS) :] = True
    return kept


def pseudo_tokens(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The prompt's first and last tokens, `count` in all."""
    first = count // PREFIX_SHARE
    return (*prompt[:first], *prompt[len(prompt) - (count - first) :])


def passages(
    batches: Iterable[Sequence[int]], response: int, other: Sequence[int], vocab: int, seed: int
) -> Iterator[DapqPassage]:
    """Each batch of token ids, with a response of `response` tokens at its end."""
    for index, ids in enumerate(batches):
        drawn = random.Random(f"{seed} {index}")
        noise = drawn.choices(range(vocab), k=max(RECALL_WINDOWS))
        ranges = {"in the prompt": len(ids) - response, "in its first 100": 100}
        starts = tuple((name, drawn.randrange(tokens - PSEUDO_TOKENS)) for name, tokens in ranges.items())
        repeated = (tuple(other) * PSEUDO_TOKENS)[:PSEUDO_TOKENS]
        yield DapqPassage(tuple(ids[:-response]), tuple(ids[-response:]), repeated, tuple(noise), starts)


def summary(by_passage: Sequence[Figures]) -> list[dict[str, Any]]:
    """Mean and standard deviation over passages of every figure, as JSON values."""
    return [
        {
            "figure": list(key),
            "mean": statistics.fmean(figures[key] for figures in by_passage),
            "deviation": statistics.pstdev(figures[key] for figures in by_passage),
        }
        for key in by_passage[0]
    ]


def claims(by_passage: Sequence[Figures]) -> list[Claim]:
    """The paper's findings, each true or false of the means over passages."""
    mean = {key: statistics.fmean(figures[key] for figures in by_passage) for key in by_passage[0]}
    pairs = ((DAPQ, SNAPKV), (SNAPKV, STREAMING), (DAPQ_RANDOM, SNAPKV))
    recalls = [_everywhere("recall", better, worse, "Figure 3", mean) for better, worse in pairs]
    attention = _everywhere("attention", DAPQ, SNAPKV, "Table 8", mean)
    drawn, moved = "all that is drawn (Figure 4a)", "every other (Figure 4c)"
    choices = _first_choice(CONTENT, drawn, mean), _first_choice(POSITION, moved, mean)
    return [*_similarity_claims(mean), *recalls, attention, *choices]


def _similarities(recorded: RecordedPrompt, passage: DapqPassage, truth: Recording) -> Figures:
    contents = {
        "same": passage.response[:PSEUDO_TOKENS],
        "other": passage.other,
        "random": passage.noise[:PSEUDO_TOKENS],
    }
    decoder = recorded.engine.decoder
    expected = _first(truth, PSEUDO_TOKENS)
    figures = {}
    for content, tokens in contents.items():
        for position, start in (("same", recorded.length), ("other", 0), *passage.starts):
            recording = recorded.ask(tokens, start)
            pairs = {"after": (expected.queries, recording.queries),
                     "before": (expected.before_rope(decoder), recording.before_rope(decoder))}  # fmt: skip
            for when, (queries, others) in pairs.items():
                figures["similarity", content, position, when] = similarity(queries, others)
    return figures


def _offsets(recorded: RecordedPrompt, passage: DapqPassage, truth: Recording) -> Figures:
    """The true tokens, `offset` positions before their own."""
    expected, tokens = _first(truth, PSEUDO_TOKENS).queries, passage.response[:PSEUDO_TOKENS]
    return {
        ("offset", offset): similarity(expected, recorded.ask(tokens, recorded.length - offset).queries)
        for offset in OFFSETS
        if offset <= recorded.length
    }


def _windows(recorded: RecordedPrompt, passage: DapqPassage) -> Iterator[tuple[tuple[str, int], Tensor]]:
    """Attention [layers, window, kv_heads, prompt] of each method's observation window."""
    last = recorded.last(max(ATTENTION_WINDOWS), passage.prompt).prompt_attention
    noise = recorded.ask(passage.noise, recorded.length, attention=True).prompt_attention
    for window in ATTENTION_WINDOWS:
        yield (SNAPKV, window), last[:, -window:]
        yield (DAPQ_RANDOM, window), noise[:, :window]
        pseudo = recorded.ask(pseudo_tokens(passage.prompt, window), recorded.length, attention=True)
        yield (DAPQ, window), pseudo.prompt_attention


def _recalls(truth: Recording, windows: dict[tuple[str, int], Tensor], prompt: int) -> Figures:
    figures: Figures = {}
    for budget in (tokens for tokens in BUDGETS if tokens < prompt):
        gold = top(truth.prompt_attention, budget)
        for (method, window), attention in windows.items():
            if window in RECALL_WINDOWS:
                figures["recall", method, window, budget] = recall(gold, top(attention, budget))
        for window in RECALL_WINDOWS:
            figures["recall", STREAMING, window, budget] = recall(gold, streaming(gold, budget))
    return figures


def _attentions(truth: Recording, windows: dict[tuple[str, int], Tensor]) -> Figures:
    expected = truth.prompt_attention.mean(1)
    return {
        ("attention", method, window): similarity(expected, attention.mean(1))
        for (method, window), attention in windows.items()
    }


def _choices(recorded: RecordedPrompt, passage: DapqPassage, truth: Recording) -> Figures:
    """Recall of every choice of pseudo queries with the eviction's own scorer, by ("choice", axis, name, budget)."""
    golds = {budget: top(truth.prompt_attention, budget) for budget in BUDGETS if budget < recorded.length}
    figures: Figures = {}
    for axis, by_name in CHOICES.items():
        for name, changes in by_name.items():
            scores = recorded.eviction_scores(DapQScorer(DapQEviction(**changes)), passage.prompt)
            for budget, gold in golds.items():
                figures["choice", axis, name, budget] = recall(gold, top(scores[:, None], budget))
    return figures


def _first(recording: Recording, count: int) -> Recording:
    return Recording(recording.queries[:, :count], recording.positions[:count])


def _similarity_claims(mean: Figures) -> Iterator[Claim]:
    position, content = mean["similarity", "other", "same", "after"], mean["similarity", "same", "other", "after"]
    yield Claim("after RoPE, the position alone makes queries more alike than the content alone (Table 1)",
                position > content, f"{position:.4f} and {content:.4f}")  # fmt: skip
    curve = [value for (kind, *_), value in mean.items() if kind == "offset"]
    falls = all(value >= other for value, other in pairwise(curve))
    yield Claim(
        "similarity falls with every larger offset (Figure 2b)", falls, " ".join(f"{value:.3f}" for value in curve)
    )


def _first_choice(axis: str, others: str, mean: Figures) -> Claim:
    """Whether an axis's first choice has a higher recall than others at every budget, and how much recall varies.

    Other lengths of the prompt's ends count as the same kind.
    """
    by_budget: dict[int, dict[str, float]] = {}
    for kind, *key in mean:
        if kind == "choice" and key[0] == axis and "suffix" not in CHOICES[axis][key[1]]:
            by_budget.setdefault(key[2], {})[key[1]] = mean[(kind, *key)]
    first = next(iter(CHOICES[axis]))
    won = [budget for budget, recalls in by_budget.items() if recalls[first] >= max(recalls.values())]
    spread = max(statistics.pstdev(recalls.values()) / statistics.fmean(recalls.values())
                 for recalls in by_budget.values())  # fmt: skip
    detail = f"at {len(won)} of {len(by_budget)} budgets, coefficient of variation up to {spread:.1%}"
    return Claim(f"recall: {axis} {first!r} above {others}", len(won) == len(by_budget), detail)


def _everywhere(kind: str, better: str, worse: str, where: str, mean: Figures) -> Claim:
    """Whether one method's figure is above another's in every case."""
    cases = [key[2:] for key in mean if key[:2] == (kind, better)]
    won = [case for case in cases if mean[(kind, better, *case)] > mean[(kind, worse, *case)]]
    return Claim(
        f"{kind}: {better} above {worse} ({where})", len(won) == len(cases), f"in {len(won)} of {len(cases)} cases"
    )
