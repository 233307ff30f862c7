"""The engine: a plan bound to a model on a device, ready to generate."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from ridgeplan.planner.capacity import Offloaded
from ridgeplan.planner.lowering import round_costs
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.execution import PREFILL_CHUNK_TOKENS
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.runtime.chat_template import Messages, TemplateProcess, chat_text
from ridgeplan.runtime.decode_loop import DecodeLoop
from ridgeplan.runtime.draft_swap import SwappableWeights, draft_weights_for, prompt_arena
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.heap import call_with_separate_heap
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.memory import MemoryMeter, readable_out_of_memory
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.model.decoder import Decoder, DecoderConfig
from ridgeplan.runtime.model.prefill import Destination, prefill_all
from ridgeplan.runtime.model.prefill_layer import plan_attention
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.offload.layer_mover import layer_mover
from ridgeplan.runtime.policies import scorer_for, token_selector
from ridgeplan.runtime.policies.base import SparseSelector, TokenSelector
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.runtime.quantization.calibration import CalibrationText, quantized_draft
from ridgeplan.runtime.quantization.saved import saved_weights
from ridgeplan.runtime.request import Prompts, Request
from ridgeplan.runtime.retrieval.head import Head
from ridgeplan.runtime.sampling import SamplingParams, all_finite, require_finite
from ridgeplan.runtime.speculation.draft_head import HeadCheckpoint
from ridgeplan.runtime.speculation.gamma_control import AdaptiveGamma, FixedGamma, GammaSchedule
from ridgeplan.runtime.speculation.mtp_head import MTPCheckpoint
from ridgeplan.runtime.speculation.proposer import make_proposer
from ridgeplan.runtime.speculation.rounds import EagerRounds, GraphedStep, GraphRounds, Rounds
from ridgeplan.runtime.speculation.sparse_target import SparseTargetAttention
from ridgeplan.runtime.speculation.speculator import Speculator
from ridgeplan.runtime.statistics import Statistics, Stopwatch
from ridgeplan.runtime.text import before_stop, encoded, require_stop_words, stop_tokens, text_decoder, text_pieces

# Rows, layers on the device, and the sampling parameters.
GraphKey = tuple[int, int, tuple[float, int | None, float | None]]
# Kinds of rounds whose graphs are kept. Each holds a round's workspace; a plan's predicted memory counts one.
KEPT_GRAPHS = 8
FIRST_USE_TOKENS = PREFILL_CHUNK_TOKENS  # of prompts, in the pass that compiles or loads kernels; sizes have their own
TEACHER_FORCED_TOKENS = 8  # of a pass; the attention kernels take them with up to 8 query heads a KV head
# A pass that appends to the cache takes as long as a prefill of about so many: 14 on a CPU, 40 on an H200 (predicted).
PREFILL_TOKENS_PER_PASS = 32


@dataclass(frozen=True)
class Generation:
    """The new tokens of each prompt, a stop token included, and the statistics of generating them."""

    tokens: list[list[int]]
    statistics: Statistics


class FilledPrompts(NamedTuple):
    """Prompts that are in an engine's cache, and the logits [rows, vocab] that follow each."""

    prompts: tuple[tuple[int, ...], ...]
    logits: Tensor


def longest_pass(cache: Cache) -> int:
    """Tokens of each row that a pass of the target takes beside verifications."""
    return TEACHER_FORCED_TOKENS if cache.states is None else min(TEACHER_FORCED_TOKENS, cache.states.queries)


@dataclass(frozen=True, eq=False)
class DraftParts:
    """What a plan's drafts need beside the target's weights.

    weights: of drafts that have a copy of their own, by default quantized from the target's and `text`, by default one
    of the model's own. If prompts use their memory, swappable weights of another engine are shared, and others copied.
    path: file that the quantized weights are read from, or saved to; by default they are not saved. checkpoint: of a
    drafter with weights. on_progress: as for `load`.
    """

    weights: DecoderWeights | None = None
    text: CalibrationText | None = None
    path: Path | None = None
    checkpoint: HeadCheckpoint | MTPCheckpoint | None = None
    on_progress: OnProgress = silent


class Engine:
    """Executes one plan. The cache is allocated here, for `plan.workload`; one generation runs at a time."""

    def __init__(
        self, plan: Plan, source: str, config: DecoderConfig, weights: DecoderWeights, device: torch.device,
        meter: MemoryMeter, *, drafts: DraftParts | None = None, profile: Profile | None = None,
        head: Head | None = None, offloaded: Offloaded | None = None,
    ) -> None:  # fmt: skip
        """weights: the target's, in the plan's format. profile: the device's rates, by default this machine's, from
        which an adaptive gamma knows what rounds take. head: a retrieval head for plans that choose by one.

        Raises ModelError for a head of another model, and WorkloadError without one.
        """
        drafts, offloaded = drafts or DraftParts(), offloaded or Offloaded()
        self.plan, self.source, self.config, self.device = plan, source, config, device
        self.weights = weights
        self.decoder = Decoder(config, device)
        self.draft_weights = weights
        if plan.weights.hierarchical:
            self.draft_weights = weights.upper
        elif plan.weights.draft_copy:
            self.draft_weights = self._drafts(drafts)
        self.scorer = scorer_for(plan)
        sizes = config.shape.kv_layers, *offloaded
        cache_config = KVCacheConfig.of(plan, *sizes, config.attention_windows)
        embedding = weights.embedding
        head = head and head.for_model(config.shape, embedding)
        self.cache: Cache | None = Cache(config.shape, cache_config, device, embedding.dtype)
        self._mover = layer_mover(self.cache)
        builder = AttentionMetadataBuilder(self.cache)
        self._selector: TokenSelector | None = token_selector(plan.speculation.selection.among_all, builder, head)
        self._sparse_target = SparseTargetAttention.of(plan.attention.chosen, self.cache, head)
        drafter = plan.speculation.drafter
        trained = None if drafts.checkpoint is None else drafts.checkpoint.head(weights, drafter.window)
        self._proposer = make_proposer(drafter, self.cache, trained)
        self._meter = meter
        self._statistics: Statistics | None = None
        self._running = False
        self._first_use_tokens = FIRST_USE_TOKENS if device.type == "cuda" else 0  # 0 once it was used
        self._templates = TemplateProcess()
        self._filled: FilledPrompts | None = None
        self._cached: tuple[int, ...] = ()  # the text that the last generation left in the cache, if of one sequence
        self._seed = torch.zeros((), dtype=torch.int64, device=device)
        self._profile = profile
        self._graphs: dict[GraphKey, GraphRounds] = {}
        if device.type == "cuda":
            with prompt_arena(plan, self.draft_weights, device) as arena:
                if not self._chunk:  # FlashAttention, which all chunks but the first take, plans nothing
                    appended = self.scorer.settings.appended_tokens if self.scorer is not None else 0
                    plan_attention(self.decoder, weights, arena, plan.workload.context, appended)
            torch.cuda.empty_cache()  # what loading took is no generation's memory

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded on first use. Raises ModelError."""
        return load_tokenizer(self.source)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text of the model. Raises ModelError."""
        return stop_tokens(self.tokenizer, self.source)

    @cached_property
    def profile(self) -> Profile:
        """The rates of the device. Raises ProfileError where none are known."""
        return self._profile or this_machine()

    @property
    def statistics(self) -> Statistics:
        """Figures of the last generation. Raises WorkloadError before there is one."""
        if self._statistics is None:
            raise WorkloadError("no statistics yet; generate first")
        return self._statistics

    def generate(
        self, prompts: Prompts, max_new_tokens: int, sampling: SamplingParams | None = None, *,
        on_progress: Callable[[int], None] | None = None,
    ) -> Generation:  # fmt: skip
        """Continues each prompt of token ids by up to `max_new_tokens`, greedily without `sampling`.

        on_progress is called after prefill and after each round with the tokens delivered so far.
        Raises WorkloadError for a request that the plan, the model or the vocabulary does not allow.
        """
        request = Request.build(prompts, max_new_tokens, sampling)
        results: list[list[int]] = [[] for _ in request.prompts]
        for step in self._run(request):
            for result, tokens in zip(results, step, strict=True):
                result.extend(tokens)
            if on_progress is not None:
                on_progress(sum(map(len, results)))
        return Generation(results, self.statistics)

    @overload
    def stream(
        self, prompt: str, max_new_tokens: int | None = None, sampling: SamplingParams | None = None, *,
        stop: Sequence[str] = (), reuse_prefix: bool = False,
    ) -> Generator[str, None, None]: ...  # fmt: skip

    @overload
    def stream(
        self, prompt: Prompts, max_new_tokens: int | None = None, sampling: SamplingParams | None = None, *,
        reuse_prefix: bool = False,
    ) -> Generator[int, None, None]: ...  # fmt: skip

    def stream(
        self, prompt: Prompts | str, max_new_tokens: int | None = None, sampling: SamplingParams | None = None, *,
        stop: Sequence[str] = (), reuse_prefix: bool = False,
    ) -> Generator[str, None, None] | Generator[int, None, None]:  # fmt: skip
        """Like `generate` for one prompt, but yields each token as its round finishes; of a text, pieces of text.

        max_new_tokens: by default the plan's. stop: words before which a text ends; it also ends at the end of text,
        unless `sampling` has stop tokens. reuse_prefix: a prompt that begins like the text in the cache, as the next
        turn of a chat does, continues it where that is faster than a prefill. The tokens after the common ones then go
        through the target as if it had generated them. `statistics.reused_tokens` counts the common ones; it is 0
        for plans that evict, whose target selects, or whose drafts keep all generated tokens or are a head's.
        Raises what `generate` raises, and WorkloadError for stop words of token ids.
        """
        if isinstance(prompt, str):
            return self._stream_text(encoded(self.tokenizer, prompt), max_new_tokens, sampling, stop, reuse_prefix)
        if stop:
            raise WorkloadError("stop words were given with token ids; allowed: with a text")
        return self._stream_tokens(prompt, max_new_tokens, sampling, reuse_prefix)

    def chat(
        self, messages: Messages, max_new_tokens: int | None = None, sampling: SamplingParams | None = None, *,
        stop: Sequence[str] = (), reuse_prefix: bool = False,
    ) -> Generator[str, None, None]:  # fmt: skip
        """Yields the answer to a conversation, in the model's chat template, as `stream` yields a text.

        messages: `{"role": "system" | "user" | "assistant", "content": text}`. Each call takes all of them;
        with `reuse_prefix` the cache of the turns before is kept, as for `stream`.
        Raises ChatTemplateError, and what `stream` raises.
        """
        ids = encoded(self.tokenizer, chat_text(self.tokenizer, messages, self._templates), special_tokens=False)
        return self._stream_text(ids, max_new_tokens, sampling, stop, reuse_prefix)

    def _stream_text(
        self, ids: list[int], max_new_tokens: int | None, sampling: SamplingParams | None, stop: Sequence[str],
        reuse_prefix: bool,
    ) -> Generator[str, None, None]:  # fmt: skip
        require_stop_words(stop)
        sampling = sampling or SamplingParams()
        if not sampling.stop_token_ids:
            sampling = replace(sampling, stop_token_ids=self.stop_token_ids)
        with closing(self._stream_tokens(ids, max_new_tokens, sampling, reuse_prefix)) as tokens:
            yield from before_stop(text_pieces(tokens, text_decoder(self.tokenizer)), stop)

    def _stream_tokens(
        self, prompt_ids: Prompts, max_new_tokens: int | None, sampling: SamplingParams | None, reuse_prefix: bool
    ) -> Generator[int, None, None]:
        limit = self.plan.workload.new_tokens if max_new_tokens is None else max_new_tokens
        request = Request.build(prompt_ids, limit, sampling)
        if len(request.prompts) != 1:
            raise WorkloadError(f"stream got {len(request.prompts)} prompts; allowed: 1")
        with closing(self._run(request, reuse_prefix)) as steps:
            for step in steps:
                yield from step[0]

    def stream_batch(
        self, prompts: Prompts, max_new_tokens: int, sampling: SamplingParams | None = None
    ) -> Iterator[list[list[int]]]:
        """Like `stream` for several prompts: the new tokens of each, first from prefill, then from every round."""
        return self._run(Request.build(prompts, max_new_tokens, sampling))

    @torch.inference_mode()
    def teacher_forced_logits(self, prompts: Prompts, tokens: Sequence[Sequence[int]]) -> Tensor:
        """The target's logits [rows, len(tokens[0]) + 1, vocab] after each prompt and after each of its `tokens`.

        The prompts' cache is the one that `generate` decodes with. Passes of the target are without drafts: over one
        token on a GPU, where they are replays of a graph, and where the target selects what it reads; else over a few.
        tokens: equally many for each prompt.
        Raises what `generate` raises, for a generation of one token more.
        """
        return self._teacher_forced(prompts, tokens, lambda logits: logits)

    @torch.inference_mode()
    def teacher_forced_choices(self, prompts: Prompts, tokens: Sequence[Sequence[int]]) -> Tensor:
        """The target's greedy tokens int64 [rows, len(tokens[0]) + 1] after each prompt and each of its `tokens`.

        As `teacher_forced_logits`, without holding the logits of all passes.
        """
        return self._teacher_forced(prompts, tokens, lambda logits: logits.argmax(-1))

    def _teacher_forced(
        self, prompts: Prompts, tokens: Sequence[Sequence[int]], kept: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """What `kept` keeps of the logits [rows, queries, vocab] of each pass, one after the other."""
        ids = torch.tensor([list(row) for row in tokens], dtype=torch.int64, device=self.device)
        request = Request.build(prompts, ids.shape[1] + 1, None)
        with self._exclusive(request) as cache:
            speculator = self._speculator(cache, request.sampling)
            self._begin(request, speculator, request.longest)
            first = self._prompt_logits(request, speculator)[:, None]
            results, finite = [kept(first)], [all_finite(first).all(dim=1)]
            step = self._teacher_forced_step(speculator)
            stored = [cache.config.stored(len(prompt)) for prompt in request.prompts]
            one_by_one = self._sparse_target is not None or isinstance(step, GraphedStep)
            queries = 1 if one_by_one else longest_pass(cache)
            passes = cache.config.passes(stored, ids.shape[1], queries)
            for part in passes:
                logits = step(ids[:, part])
                results.append(kept(logits))
                finite.append(all_finite(logits).all(dim=1))
        require_finite(torch.stack(finite).all(dim=0).tolist())
        return torch.cat(results, dim=1)

    def _teacher_forced_step(self, speculator: Speculator) -> Callable[[Tensor], Tensor]:
        """A pass of the target: of tokens [rows, queries], which are then in the cache, logits [rows, queries, vocab].

        On CUDA of one query.
        """
        cache = speculator.cache

        def step(tokens: Tensor) -> Tensor:
            queries = tokens.shape[1]
            cache.begin_streaming()
            if self._sparse_target is None:
                metadata = AttentionMetadataBuilder(cache).target_metadata(queries)
                logits = self.decoder.step(self.weights, cache, tokens, metadata)
            else:
                logits = speculator.target_logits(tokens)
            cache.advance(cache.active().int() * queries)
            return logits

        return GraphedStep(step, cache) if self.device.type == "cuda" else step

    @torch.inference_mode()
    def prefill_with(self, others: Sequence[Engine], prompts: Prompts, max_new_tokens: int) -> None:
        """Processes prompts once, for this engine and others of the same weights, which keep different parts of them.

        The next `generate` or `teacher_forced_logits` of each over just these prompts, by up to `max_new_tokens`,
        starts from its filled cache; its statistics have no time of prefill. Raises WorkloadError as `generate` does,
        for other weights and for evictions in chunks; ValueError for evictions that append different tokens.
        """
        request, engines = Request.build(prompts, max_new_tokens, None), [self, *others]
        if any(each.weights is not self.weights for each in others):
            raise WorkloadError("the engines have weights of their own; allowed: engines that share weights")
        if any(each._chunk for each in engines):
            raise WorkloadError("an engine evicts after each chunk of a prompt, which others then read as it left it")
        with ExitStack() as running:
            caches = [running.enter_context(each._exclusive(request)) for each in engines]
            into = [
                (each, each._speculator(cache, request.sampling)) for each, cache in zip(engines, caches, strict=True)
            ]
            for engine, speculator in into:
                engine._begin(request, speculator, request.longest)
            logits = self._prefill(request, into)
        for each in engines:
            each._filled = FilledPrompts(request.prompts, logits)

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak since the last generation began, also while it runs; see `MemoryMeter`."""
        return self._meter.peak_bytes()

    def close(self) -> None:
        """Releases the caches and captured graphs. The weights are freed with their last reference."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # rounds of an abandoned generation may still read the host's memory
        self._templates.close()
        self.cache = self._selector = self._sparse_target = self._mover = self._filled = None
        self._graphs.clear()

    def _drafts(self, parts: DraftParts) -> DecoderWeights:
        if isinstance(parts.weights, SwappableWeights):
            return parts.weights

        def fit() -> DecoderWeights:
            fitted = parts.text or CalibrationText.of_model(self.decoder, self.weights)
            return quantized_draft(self.decoder, self.weights, self.plan.weights.group, fitted, parts.on_progress)

        def load() -> DecoderWeights:
            if parts.weights is not None:
                return parts.weights
            return saved_weights(
                parts.path, self.device, lambda: call_with_separate_heap(fit, self.device), self.weights
            )

        return draft_weights_for(self.plan, self.weights, load)

    @contextmanager
    def _exclusive(self, request: Request) -> Iterator[Cache]:
        """The cache, for one checked request at a time."""
        request.check(self.plan.workload, self.config.shape.vocab)
        if self.cache is None:
            raise WorkloadError("the engine is closed; load it again")
        if self._running:
            raise WorkloadError("a generation is still running on this engine; finish or close it first")
        self._running = True
        try:
            with readable_out_of_memory(self.device):
                yield self.cache
        except WorkloadError:
            self._graphs.clear()  # what ran out of memory leaves room for a smaller generation
            torch.cuda.empty_cache()
            raise
        finally:
            self._running = False

    def _run(self, request: Request, reuse_prefix: bool = False) -> Generator[list[list[int]], None, None]:
        """New tokens of every sequence, first from prefill, then from each round."""
        with self._exclusive(request) as cache:
            self._meter.restart()
            speculator, stopwatch = self._speculator(cache, request.sampling), Stopwatch(self.device)
            reused = self._reusable(request, cache) if reuse_prefix else 0
            schedule = self._schedule(request)
            loop = DecodeLoop(request, speculator, schedule, self._mover, self._rounds, stopwatch, reused)
            if self._first_use_tokens:
                self._use_first(request, speculator, stopwatch)
            try:
                yield from loop.steps(self._first_tokens(request, speculator, stopwatch, reused))
            finally:
                self._cached = loop.cached_tokens()
                self._statistics = loop.statistics(self._meter.peak())

    def _schedule(self, request: Request) -> GammaSchedule:
        """The gammas of a generation. An adaptive one is fit for the request's own lengths and batch."""
        if not self.plan.speculation.adaptive:
            return FixedGamma(self.plan.speculation.round_kind)
        planned, rows = self.plan.workload, len(request.prompts)
        context = max(1, sum(map(len, request.prompts)) // rows)
        actual = replace(planned, context=context, new_tokens=request.max_new_tokens, batch=rows)
        shape = replace(self.config.shape, name=planned.model)  # rows of acceptance are found by it
        evicting = self.plan.eviction  # to the tokens that the cache was allocated for
        eviction = replace(evicting, budget=evicting.tokens(planned.context), share=0.0)
        costs = round_costs(replace(self.plan, workload=actual, eviction=eviction), shape, self.profile)
        return AdaptiveGamma(costs, request.max_new_tokens)

    def _reusable(self, request: Request, cache: Cache) -> int:
        """Tokens of the prompt that the cache holds from the last generation, and keeps; 0 if it is to be read anew."""
        cached, self._cached = self._cached, ()
        assert self._selector is not None, "an engine with a cache has a selector"
        follows = self._selector.follows_cache and self._sparse_target is None
        follows = follows and (self._proposer is None or self._proposer.free)
        if not follows or self.scorer is not None or self._mover is not None or len(request.prompts) > 1:
            return 0
        prompt = request.prompts[0]
        pairs = enumerate(zip(cached, prompt, strict=False))
        common = next((index for index, (left, right) in pairs if left != right), min(len(cached), len(prompt)))
        common = min(common, len(prompt) - 1)  # the last token goes through the model again, for its logits
        passes = len(self._appending_passes(len(prompt), common))
        return common if PREFILL_TOKENS_PER_PASS * passes <= len(prompt) and cache.resume(common) else 0

    def _appending_passes(self, tokens: int, reused: int) -> list[slice]:
        """The passes that append the rest of a prompt of `tokens` tokens, as parts of the rest.

        A selector may score by the queries of a pass, which are then at most those of a verification.
        """
        assert self.cache is not None, "the engine is open"
        queries = self.cache.config.gamma + 1
        if not isinstance(self._selector, SparseSelector):
            queries = max(queries, longest_pass(self.cache))
        return list(self.cache.config.passes([reused], tokens - reused, queries))

    def _begin(self, request: Request, speculator: Speculator, longest: int) -> None:
        """Empties the cache for a request, and forgets what drafts chose by; unless it holds the request's prompts.

        longest: tokens that it has room for.
        """
        if self._filled is not None and self._filled.prompts == request.prompts:
            return
        self._filled, self._cached = None, ()
        speculator.cache.reset(len(request.prompts))
        if self._mover is not None:
            self._mover.start(longest)
        for selector in speculator.selectors:
            selector.start()

    def _speculator(self, cache: Cache, sampling: SamplingParams) -> Speculator:
        assert self._selector is not None, "an engine with a cache has a selector"
        return Speculator(
            decoder=self.decoder, target=self.weights, drafter=self.draft_weights, cache=cache,
            selector=self._selector, sampling=sampling, seed=self._seed, sparse_target=self._sparse_target,
            proposer=self._proposer, depth=self.plan.speculation.drafter.depth,
        )  # fmt: skip

    def _rounds(self, speculator: Speculator, stopwatch: Stopwatch) -> Rounds:
        """Rounds for this number of rows and these sampling parameters; on CUDA their graphs are captured once."""
        if self.device.type != "cuda":
            return EagerRounds(speculator)
        resident = speculator.cache.first_on_host
        if self._mover is not None:  # graphs of other placements hold memory that these layers may need
            self._graphs = {kind: rounds for kind, rounds in self._graphs.items() if kind[1] == resident}
        kind = speculator.cache.rows, resident, speculator.sampling.graph_key
        rounds = self._graphs.pop(kind, None)
        if rounds is None:
            with stopwatch.measure_wall("capture"):
                rounds = GraphRounds(speculator, self.plan.speculation.round_kinds)
        self._graphs[kind] = rounds
        if len(self._graphs) > KEPT_GRAPHS:
            del self._graphs[next(iter(self._graphs))]  # least recently used; the capture waited for its last replay
        return rounds

    def _use_first(self, request: Request, speculator: Speculator, stopwatch: Stopwatch) -> None:
        """Runs the beginning of the prompts once: kernels are compiled and libraries started before the prefill.

        Whoever filled the cache before has used them.
        """
        tokens, self._first_use_tokens = max(1, self._first_use_tokens // len(request.prompts)), 0
        if self._filled is None:
            short = replace(request, prompts=tuple(prompt[:tokens] for prompt in request.prompts))
            with stopwatch.measure_wall("first use"):
                self._first_tokens(short, speculator, Stopwatch(self.device)).tolist()  # waits for the device

    @torch.inference_mode()
    def _first_tokens(self, request: Request, speculator: Speculator, stopwatch: Stopwatch, reused: int = 0) -> Tensor:
        """Fills the cache, which holds the first `reused` tokens; returns each sequence's first token, int64 [rows]."""
        if not reused:
            self._begin(request, speculator, max(map(len, request.prompts)))
        self._seed.fill_(request.sampling.seed)
        with stopwatch.measure("prefill"):
            fill = partial(self._appended_logits, reused=reused) if reused else self._prompt_logits
            logits = fill(request, speculator)
            require_finite(all_finite(logits).tolist())
            return speculator.first(logits)

    def _appended_logits(self, request: Request, speculator: Speculator, reused: int) -> Tensor:
        """Appends the prompt's tokens after the first `reused` to the cache; returns logits [1, vocab]."""
        prompt = torch.tensor(request.prompts[0], device=self.device)
        if speculator.proposer is not None:
            speculator.proposer.before_prefill(0, prompt)
        logits = rest = prompt[None, reused:]
        for part in self._appending_passes(len(prompt), reused):
            logits = speculator.append(rest[:, part])
        return logits

    def _prompt_logits(self, request: Request, speculator: Speculator) -> Tensor:
        """Fills the cache, unless it holds the prompts; returns the logits [rows, vocab] that follow each."""
        filled, self._filled = self._filled, None
        return self._prefill(request, [(self, speculator)]) if filled is None else filled.logits

    def _prefill(self, request: Request, into: Sequence[tuple[Engine, Speculator]]) -> Tensor:
        """Fills the caches of engines that share weights; returns the logits [rows, vocab] that follow each prompt."""
        logits = []
        with prompt_arena(self.plan, self.draft_weights, self.device) as arena:
            for row, tokens in enumerate(request.prompts):
                destinations = [engine._destination(speculator, row) for engine, speculator in into]
                prompt = torch.tensor(tokens, device=self.device)
                model = self.decoder, self.weights
                logits.append(prefill_all(*model, destinations, prompt, arena=arena, evict_every=self._chunk))
            return torch.stack(logits)

    @property
    def _chunk(self) -> int:
        """Most tokens of a prompt that go through the model together; 0: all of them."""
        return self.plan.eviction.chunk_at(self.plan.workload.context)

    def _destination(self, speculator: Speculator, row: int) -> Destination:
        return Destination(speculator.cache, row, self.scorer, speculator.observers)
