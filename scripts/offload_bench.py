"""Decoding with layers on the host, measured on this machine's GPU beside predictions.

Plans whose target reads everything must generate the same tokens, wherever its KV lies.

python scripts/offload_bench.py results.json --model small.gguf --text book.txt

Sections (`--only` names some): link (copies, gathers), rounds (a round of each plan with random weights and caches, at
128k x 4 under 40 GB), elastic (the same of targets that read a selection, with elastic loading and without), tokens (a
real generation with and without the limit), real (the same of the small model as it is), fits (what the machinery costs
where everything fits), crossing (a layer leaves while tokens are generated), cliff (static against adaptive placement
over the context), soak (5,000 rounds without growth of memory). Every row is saved when it is measured, and rows that
the file has are not measured again; `--rows` names some.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from elastic_rounds import elastic_round, round_without_limit_ms
from results_file import ResultsFile, Rows, free

from ridgeplan.planner.capacity import offloaded_layers, peak_bytes
from ridgeplan.planner.prediction import predict
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import Device, Machine
from ridgeplan.roofline.plan.plan import HostPart, KVCache, KVFormat, Placement, Plan, Speculation, Workload
from ridgeplan.roofline.plan.policies.selections import RetrievalHead
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.plan.support import as_loaded
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.memory import MemoryMeter
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.model.decoder import DecoderConfig
from ridgeplan.runtime.model.source import model_source
from ridgeplan.validate.calibration.link import measured_link, run_times
from ridgeplan.validate.decode_bench.inflated_model import InflatedModel
from ridgeplan.validate.prompts import prompt_batch
from ridgeplan.validate.random_model import RandomModel, measured_round, random_cache, random_head

STEPS = 1000  # of a limit on memory, as shares of what a plan takes without one


@torch.inference_mode()
def streaming_seconds(cache: Cache) -> tuple[float, int]:
    """Seconds to bring all layers on the host to the device once, without any computation, and the bytes moved."""
    stream = cache.stream
    if stream is None:
        return 0.0, 0
    old = cache.quantized(cache.lengths)
    entries = old // cache.config.group if cache.config.format.quantized else old

    def once() -> None:
        stream.begin(entries)
        for layer in range(len(stream.layers)):
            stream.fetch(layer)
            stream.release(layer)

    seconds = statistics.median(run_times(cache.lengths.device, once))
    held = sum(part.nbytes for parts in stream.layers for part in parts)
    return seconds, int(held * float(entries.float().mean()) / stream.layers[0][0].shape[2])


@dataclass(frozen=True)
class RealText:
    """A model, prompts from a text, and where they run. new_tokens: generated after each of `batch` prompts."""

    model: str
    shape: ModelShape
    text: str | None
    device: Device
    context: int = 16384
    batch: int = 4
    new_tokens: int = 96

    def rows(self) -> Rows:
        """Each plan with half of the layers on the host beside the same without a limit."""
        prompts = prompt_batch(load_tokenizer(model_source(self.model)), self.context, self.batch, text=self.text)
        return {name: partial(self._compared, plan, prompts) for name, plan in self.plans().items()}

    def plans(self) -> dict[str, Plan]:
        """Plans whose target reads everything, without a limit."""
        workload = Workload(self.shape.name, "here", self.context, self.new_tokens, self.batch)
        placement, lower = Placement(True, self.context // 8), Placement(True, part=HostPart.LOWER)
        drafting = preset("quantspec-kv", workload)
        return {
            "bf16": Plan(workload, placement=placement),
            "int8": Plan(workload, kv=KVCache(KVFormat.INT8), placement=placement),
            "int8, leaving one by one": Plan(
                workload, kv=KVCache(KVFormat.INT8), placement=replace(placement, adaptive=True)
            ),
            "8-bit codes, drafts, whole layers": replace(drafting, placement=placement),
            "8-bit codes, drafts, lower codes": replace(drafting, placement=lower),
        }

    def limited(self, plan: Plan) -> Plan:
        """The plan with the most memory with which half of its layers must leave."""
        peak = peak_bytes(plan, self.shape, self.device)
        for step in range(STEPS):
            memory_bytes = int(peak * (STEPS - step) / STEPS)
            placed = replace(plan, placement=replace(plan.placement, memory_bytes=memory_bytes))
            if offloaded_layers(placed, self.shape, self.device)[0] >= self.shape.layers // 2:
                return placed
        raise ValueError("no limit offloads half of the layers")

    def _compared(self, plan: Plan, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Figures of both, and how many tokens of each row agree from the first one on."""
        roomy = load(plan, self.model, device=self._kind)
        expected = _generated(roomy, prompts, self.new_tokens)
        generation = _generated(
            load(self.limited(plan), self.model, device=self._kind, weights=roomy.weights), prompts, self.new_tokens
        )
        free()
        tokens = generation.pop("tokens"), expected.pop("tokens")
        agree = [_agreeing(*rows) for rows in zip(*tokens, strict=True)]
        return {"equal": tokens[0] == tokens[1], "agreeing_tokens": agree, "limited": generation, "unlimited": expected}

    @property
    def _kind(self) -> str:
        return "cuda" if self.device.asynchronous and torch.cuda.is_available() else "cpu"


def _generated(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
    """Tokens of a generation and its figures; the engine is closed."""
    tokens, statistics = engine.generate(prompts, new_tokens).tokens, engine.statistics
    assert engine.cache is not None, "it is open"
    layers = engine.cache.layers - engine.cache.first_on_host
    engine.close()
    figures = {name: getattr(statistics, name) for name in ("tpot_ms", "tokens_per_round", "peak_memory_bytes")}
    return {"tokens": tokens, "layers_on_host": layers, **figures}


def _agreeing(tokens: Sequence[int], other: Sequence[int]) -> int:
    """Tokens of both up to the first that differs."""
    return next((place for place, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b), len(tokens))


LIMIT_BYTES, CONTEXT, BATCH = 40 * 10**9, 131072, 4
GAMMAS = (8, 12)
TOKENS = 96  # generated where real text is
SOAK_ROUNDS = 5000
CLIFF_BYTES = 24 * 10**9
CLIFF_CONTEXTS = (24576, 25600, 26624, 28672, 32768, 36864, 40960, 49152, 65536)

ROWS = ("rounds", "elastic", "fits", "cliff", "tokens", "real")  # sections that have some


@dataclass(frozen=True, eq=False)
class OffloadBench:
    """Sections of the benchmark, each a method that returns JSON values."""

    shape: ModelShape
    profile: Profile
    device: torch.device
    model: str | None
    text: str | None

    @cached_property
    def random(self) -> RandomModel:
        """A model of the shape with random weights."""
        return RandomModel.build(self.shape, self.device, Machine.of(self.profile))

    def link(self) -> Any:
        """Copies and gathers over the link, in GB/s."""
        return {kind: times.bytes_per_s / 1e9 for kind, times in measured_link(self.device).items()}

    def rounds(self) -> Rows:
        """Rounds of each plan with random weights: time, its prediction, and what the copies alone take."""
        return {name: partial(self._round, plan) for name, plan in limited_plans(self.shape.name).items()}

    def elastic(self) -> Rows:
        """Rounds of targets that read a selection: by a retrieval head or 2-bit keys, with elastic loading and without.

        And without a limit.
        """
        plans = selecting_plans(self.shape.name)
        rows: Rows = {name: partial(elastic_round, self.random, plan, self.profile) for name, plan in plans.items()}
        for name, plan in plans.items():
            if plan.placement.elastic:
                rows[f"{name}, without a limit"] = partial(self._without_limit, plan)
        return rows

    def _without_limit(self, plan: Plan) -> dict[str, Any]:
        roomy = predict(replace(plan, placement=Placement()), self.shape, self.profile)
        measured = round_without_limit_ms(self.random, plan)
        return {"tpot_ms": measured, "predicted_tpot_ms": roomy.best.tpot_ms}

    def _round(self, plan: Plan) -> dict[str, Any]:
        predicted = predict(plan, self.shape, self.profile)
        times = measured_round(self.random, plan)
        free()
        cache = random_cache(self.random, plan)
        copies_s, copied = streaming_seconds(cache)
        del cache
        free()
        roomy = replace(plan, placement=Placement())
        without_limit = measured_round(self.random, roomy) if self.random.fitting([roomy]) else None
        return {
            "host_layers": predicted.offloaded_layers,
            "round_ms": 1e3 * times.total_s,
            "predicted_round_ms": predicted.round_ms,
            "tokens_per_round": predicted.tokens_per_round,
            "tpot_ms_at_predicted_acceptance": 1e3 * times.total_s / predicted.tokens_per_round,
            "verify_ms": 1e3 * times.verify_s,
            "draft_ms": 1e3 * times.draft_s,
            "copies_alone_ms": 1e3 * copies_s,
            "copied_gb": copied / 1e9,
            "link_gb_s": copied / copies_s / 1e9 if copied else None,
            "link_gb_s_in_round": copied / times.verify_s / 1e9 if copied else None,
            "round_without_limit_ms": 1e3 * without_limit.total_s if without_limit else None,
            "hidden_share": _hidden(times.total_s, copies_s, without_limit.total_s)
            if without_limit and copied
            else None,
        }

    def tokens(self) -> Rows:
        """A real generation with the limit and without: equal greedy tokens, time per token, acceptance, memory."""
        if self.model is None:
            return {}
        plans = limited_plans(self.shape.name, TOKENS, yarn=4.0) | selecting_plans(self.shape.name, TOKENS, yarn=4.0)
        return {name: partial(self._tokens, plan) for name, plan in plans.items() if not name.startswith("plain")}

    def real(self) -> Rows:
        """The small model as it is: greedy tokens with half of its layers on the host, and without a limit."""
        if self.model is None:
            return {}
        shape = as_loaded(load_shape(self.model))
        return RealText(self.model, shape, self.text, Machine.of(self.profile)).rows()

    @cached_property
    def inflated(self) -> InflatedModel:
        """The small model inside the shape."""
        assert self.model is not None, "sections that need it say so"
        return InflatedModel.load(self.model, self.shape)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Parts of the text."""
        return prompt_batch(self.inflated.tokenizer, CONTEXT, BATCH, text=self.text)

    def _tokens(self, plan: Plan) -> dict[str, Any]:
        results = {}
        for kind, plan_of_kind in (("limited", plan), ("unlimited", _unlimited(plan))):
            with self.inflated.shared_engine(plan_of_kind, {}, profile=self.profile, make_head=random_head) as engine:
                results[kind] = engine.generate(self.prompts, TOKENS)
            free()
        equal = results["limited"].tokens == results["unlimited"].tokens
        return {"equal": equal} | {kind: _figures(generation.statistics) for kind, generation in results.items()}

    def fits(self) -> Rows:
        """Where everything fits: rounds of plans that may offload over those of plans that may not."""
        results: Rows = {}
        for kv, gamma, placement in (
            (KVFormat.INT8, 0, Placement(True, 2048)),
            (KVFormat.INT8, 0, Placement(True, 2048, adaptive=True)),
            (KVFormat.HIERARCHICAL, 8, Placement(True, part=HostPart.LOWER)),
            (KVFormat.FULL, 0, Placement(True, 2048)),
        ):
            context = CONTEXT // 4 if kv is KVFormat.FULL else CONTEXT
            plan = _plan(self.shape.name, context, kv, gamma, Placement())
            name = f"{kv.value}, gamma {gamma}{', adaptive' if placement.adaptive else ''}"
            results[name] = partial(self._cost, plan, replace(plan, placement=placement))
        for name, plan in selecting_plans(self.shape.name).items():
            if plan.placement.elastic:
                short = replace(plan, workload=replace(plan.workload, context=CONTEXT // 4))
                results[name] = partial(self._cost, replace(short, placement=Placement()), _unlimited(short))
        return results

    def _cost(self, plan: Plan, offering: Plan) -> dict[str, Any]:
        """What a round of `offering` takes beyond one of `plan`, as a share."""
        plain = measured_round(self.random, plan)
        free()
        return {"cost": measured_round(self.random, offering).total_s / plain.total_s - 1}

    def crossing(self, context: int = 32768, new_tokens: int = 768) -> dict[str, Any]:
        """The times of rounds while layers leave, one by one; the excess over the median is what crossings cost."""
        placement = Placement(True, 2048, adaptive=True)
        plan = _plan(self.shape.name, context, KVFormat.INT8, 0, placement, new_tokens)
        plan = replace(plan, placement=replace(plan.placement, memory_bytes=self._just_below(plan)))
        meter, config = MemoryMeter(self.device), DecoderConfig.plain(self.shape)
        offloaded = offloaded_layers(plan, self.shape, Machine.of(self.profile))
        weights = self.random.weights
        engine = Engine(plan, "", config, weights, self.device, meter, profile=self.profile, offloaded=offloaded)
        prompts = [[1 + row] * context for row in range(BATCH)]
        gaps, placements, last = [], [], time.perf_counter()
        for _ in engine.stream_batch(prompts, new_tokens):
            now = time.perf_counter()
            gaps.append(now - last)
            assert engine.cache is not None
            placements.append(engine.cache.first_on_host)
            last = now
        engine.close()
        steps = gaps[2:]
        median = statistics.median(steps)
        moved = [index for index in range(3, len(placements)) if placements[index] != placements[index - 1]]
        excess = {index: sum(gap - median for gap in gaps[max(2, index - 4) : index + 4]) for index in moved}
        return {
            "host_layers_at_end": offloaded.layers,
            "moved": engine.statistics.moved_layers,
            "median_step_ms": 1e3 * median,
            "crossings": [{"step": at, "steps_lost": lost / median} for at, lost in excess.items()],
            "predicted_peak": predict(plan, self.shape, self.profile).best.peak_memory_bytes,
            "measured_peak": engine.statistics.peak_memory_bytes,
            "limit": plan.placement.memory_bytes,
        }

    def cliff(self) -> Rows:
        """Steps over the context: with just as many layers on the host as needed, and with all once not all fit."""
        return {str(context): partial(self._cliff, context) for context in CLIFF_CONTEXTS}

    def _cliff(self, context: int) -> dict[str, Any]:
        adaptive, static = cliff_plans(self.shape, self.profile, context)
        predicted = predict(adaptive, self.shape, self.profile)
        figures = {
            "context": context,
            "host_layers": predicted.offloaded_layers,
            "predicted_adaptive_ms": predicted.best.tpot_ms,
            "predicted_static_ms": predict(static, self.shape, self.profile).best.tpot_ms,
            "adaptive_ms": 1e3 * measured_round(self.random, adaptive).total_s,
        }
        free()
        return figures | {"static_ms": 1e3 * measured_round(self.random, static).total_s}

    def soak(self) -> dict[str, Any]:
        """Rounds of a small model with lower codes on the host: no growth of device or host memory."""
        shape = replace(self.shape, layers=4, vocab=32000)
        small = RandomModel.build(shape, self.device, Machine.of(self.profile))
        lower = Placement(True, part=HostPart.LOWER)
        plan = _plan(shape.name, 4096, KVFormat.HIERARCHICAL, 4, lower, 5 * SOAK_ROUNDS)
        needed = predict(replace(plan, placement=Placement()), shape, self.profile).best.peak_memory_bytes
        plan = replace(plan, placement=replace(plan.placement, memory_bytes=int(0.999 * needed)))
        offloaded = offloaded_layers(plan, shape, small.machine)
        meter, config = MemoryMeter(self.device), DecoderConfig.plain(shape)
        engine = Engine(plan, "", config, small.weights, self.device, meter, profile=self.profile, offloaded=offloaded)
        marks = []
        for index, _ in enumerate(engine.stream_batch([[1] * 4000] * BATCH, plan.workload.new_tokens)):
            if index == SOAK_ROUNDS:
                break
            if index % 500 == 10:
                rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                marks.append({"round": index, "allocated": torch.cuda.memory_allocated(), "rss_kb": rss})
        engine.close()
        return {"host_layers": offloaded.layers, "marks": marks}

    def _just_below(self, plan: Plan) -> int:
        """Memory in which all layers have room for the prompt and a few groups, but not for what is generated."""
        grown = 2 * plan.workload.new_tokens // 3
        early = replace(plan, workload=replace(plan.workload, new_tokens=grown), placement=Placement())
        return int(predict(early, self.shape, self.profile).best.peak_memory_bytes)


def limited_plans(model: str, new_tokens: int = 1024, yarn: float = 1.0) -> dict[str, Plan]:
    """Plans whose target reads everything, under LIMIT_BYTES."""

    def plan(kv: KVFormat, gamma: int, part: HostPart, budget: int) -> Plan:
        placement = _plan(model, CONTEXT, kv, gamma, Placement(True, budget, part, LIMIT_BYTES), new_tokens)
        return replace(placement, workload=replace(placement.workload, yarn_factor=yarn))

    return {
        **{f"lossless, lower codes, gamma {g}": plan(KVFormat.HIERARCHICAL, g, HostPart.LOWER, 0) for g in GAMMAS},
        "lossless, whole layers, gamma 6": plan(KVFormat.HIERARCHICAL, 6, HostPart.ALL, 2048),
        "plain, int8": plan(KVFormat.INT8, 0, HostPart.ALL, 2048),
        "plain, bf16: everything is fetched at each step": plan(KVFormat.FULL, 0, HostPart.ALL, 2048),
    }


def selecting_plans(model: str, new_tokens: int = 1024, yarn: float = 1.0) -> dict[str, Plan]:
    """Plans whose target reads 2048 tokens, under LIMIT_BYTES, with elastic loading and without.

    By the retrieval head for each KV head or, so that a token's keys and values of all heads are one piece, for all.
    """
    workload = Workload(model, "here", CONTEXT, new_tokens, BATCH, yarn)
    results = {}
    head, two_bit = (preset(name, workload) for name in ("specontext", "specontext-two-bit"))
    shared = replace(head, attention=replace(head.attention, selection=RetrievalHead(level="batch")))
    for kind, plan in (("retrieval head", head), ("one set for all heads", shared), ("2-bit keys", two_bit)):
        placement = replace(plan.placement, memory_bytes=LIMIT_BYTES)
        results[kind] = replace(plan, placement=placement)
        results[f"{kind}, not elastic"] = replace(plan, placement=replace(placement, elastic=False))
    return results


def cliff_plans(shape: ModelShape, profile: Profile, context: int) -> tuple[Plan, Plan]:
    """INT8 KV within CLIFF_BYTES: as many layers on the host as must be, and all of them as soon as one must."""
    limit, machine = Placement(True, 2048, memory_bytes=CLIFF_BYTES), Machine.of(profile)
    plan = _plan(shape.name, context, KVFormat.INT8, 0, limit, 64)
    if not offloaded_layers(plan, shape, machine)[0]:
        return plan, plan
    low, high = 0, CLIFF_BYTES
    while high - low > 10**6:
        middle = (low + high) // 2
        placed = replace(plan, placement=replace(limit, memory_bytes=middle))
        every = offloaded_layers(placed, shape, machine)[0] == shape.layers
        low, high = (middle, high) if every else (low, middle)
    return plan, replace(plan, placement=replace(limit, memory_bytes=low))


def _plan(model: str, context: int, kv: KVFormat, gamma: int, placement: Placement, new_tokens: int = 1024) -> Plan:
    workload = Workload(model, "here", context, new_tokens, BATCH)
    plan = preset("quantspec-kv", workload) if gamma else Plan(workload, kv=KVCache(kv))
    speculation = replace(plan.speculation, gamma=gamma) if gamma else Speculation()
    return replace(plan, kv=KVCache(kv), speculation=speculation, placement=placement)


def _unlimited(plan: Plan) -> Plan:
    return replace(plan, placement=replace(plan.placement, memory_bytes=0))


def _hidden(round_s: float, copies_s: float, alone_s: float) -> float:
    """Share of the shorter of copies and computation that ran beside the longer one."""
    return (copies_s + alone_s - round_s) / min(copies_s, alone_s)


def _figures(statistics: Any) -> dict[str, Any]:
    names = ("tpot_ms", "ttft_ms", "acceptance", "tokens_per_round", "overlap", "peak_memory_bytes", "verify_s")
    return {name: getattr(statistics, name) for name in names}


def main() -> None:
    """Runs the sections and saves each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", help="A small model, for the sections real and tokens.")
    parser.add_argument("--text", type=Path, help="A long text for its prompts.")
    sections = ("link", "rounds", "elastic", "fits", "crossing", "cliff", "soak", "real", "tokens")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    parser.add_argument("--rows", nargs="+", default=(), help="Names of rows, of sections that have some.")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    text = options.text.read_text(encoding="utf-8") if options.text else None
    device, shape = torch.device("cuda"), load_shape("Llama-3.1-8B")
    bench = OffloadBench(shape, this_machine(), device, options.model, text)
    results = ResultsFile.at(options.results)
    for name in options.only:
        section: Rows | dict[str, Any] = getattr(bench, name)()
        if name in ROWS:
            results.measure(name, section, options.rows)
        else:
            results.save(name, section)
            print(name, json.dumps(section), flush=True)


if __name__ == "__main__":
    main()
