"""SpeContext's system on this machine's GPU: selection, elastic loading and layers that leave one by one, in one run.

python scripts/specontext_bench.py results.json

With `--tiny` small shapes and lengths, which also run without a GPU: to see that every section runs, not for its times.

Sections (`--only` names some; minutes of an H200 in brackets):

generation [3.5]: 32 sequences of 2048 tokens generate 32768 more without a limit, and with room for 70% of the cache,
so that layers leave on the way. The tokens must be equal. Median times of every 2048 steps, or fewer where a layer
leaves, beside predictions at their overlap; tpot_ms has the time in which layers leave, as its prediction does.
placed [4.8]: the same with 4 of the 16 layers, and two placements decided before the generation: the layers that must
be on the host at its end are there from its beginning (static), or all layers are.
codes [0.5]: the first two with 4096 new tokens and INT8 codes.
placements [1.5]: a step of the same plan over the length, with as many layers on the host as must be, with those of the
end from the beginning (static), and with all of them; and of full attention that streams layers.
table3 [1]: the settings of SpeContext's Table 3 in 80 GB, against full attention, which has the batch that fits there.

All but the last have the shape of Llama-3.2-1B, whose cache of 37 GB fits the host's memory, the last that of
Llama-3.1-8B (DeepSeek-R1-Distill-Llama-8B's), of which up to 80 GB are on the host. Weights are random. The retrieval
head's queries have a common part, so that adjacent steps choose about 80% alike, as trained heads do; rounds outside of
generations have the overlap set (elastic_rounds.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from elastic_rounds import DriftingCache, chosen_tokens
from results_file import ResultsFile, Rows, free
from torch import Tensor

from ridgeplan.planner.capacity import departure_lengths, offloaded_layers
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.prediction import predict
from ridgeplan.planner.resolution import resolve, this_machine
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import offload_layers
from ridgeplan.roofline.plan.plan import KVCache, KVFormat, Placement, Plan, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import round_at, round_rates
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.memory import MemoryMeter
from ridgeplan.runtime.model.decoder import DecoderConfig
from ridgeplan.runtime.retrieval.head import Head
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.validate.random_model import RandomModel, llama_like_shape, measured_round, random_head

KEPT_SHARE = 0.7  # of the cache, for which the limit has room
SLOTS_SHARE = 0.1  # of the cache, in which no layer has room, but what steps choose of all layers has
OVERLAP = 0.8  # of a set for each KV head; see planner's policy
STEADY = 9.0  # scale of the common part of a head's queries, beside 1 of each token's own
THIRDS = (1 / 6, 1 / 2, 5 / 6)  # of the generated tokens


def steady_head(shape: ModelShape, embedding: Tensor) -> Head:
    """A random head whose queries share a large part, so that adjacent steps choose mostly the same tokens."""
    head = random_head(shape, embedding)
    bias = torch.randn(shape.q_heads * shape.head_dim, generator=torch.Generator().manual_seed(1))
    return replace(head, weights=replace(head.weights, q_bias=STEADY * bias))


@dataclass(frozen=True)
class Sizes:
    """Lengths and batches. window: steps of which a time is the median. budget: tokens that a step reads, 0 for the
    preset's. table3: prompt and new tokens, sequences of SpeContext and of FlashInfer's full attention, in table3_bytes
    (DeepSeek-Distill-Llama-8B). placed_layers: of the model whose placements generate side by side.
    """

    context: int = 2048
    new_tokens: int = 32768
    batch: int = 32
    window: int = 2048
    budget: int = 0
    codes_tokens: int = 4096  # new tokens with codes
    lengths: tuple[int, ...] = (4096, 12288, 20480, 24576, 28672, 34000)
    table3_bytes: int = int(0.9 * 80e9)
    table3: tuple[tuple[int, int, int, int], ...] = (
        (2048, 16384, 32, 16), (2048, 32768, 32, 8), (16384, 2048, 16, 8), (32768, 2048, 16, 8)
    )  # fmt: skip
    placed_layers: int = 4


TINY = Sizes(512, 256, 2, 64, 320, 256, (704,), 30_000_000, ((640, 32, 2, 1),), 3)


@dataclass(frozen=True, eq=False)
class Setting:
    """A model of a shape with random weights on this machine."""

    shape: ModelShape
    profile: Profile
    device: torch.device
    steady: bool  # times count

    @cached_property
    def machine(self) -> Machine:
        """The machine that the profile describes."""
        return Machine.of(self.profile)

    @cached_property
    def random(self) -> RandomModel:
        """The model."""
        return RandomModel.build(self.shape, self.device, self.machine)

    def engine(self, plan: Plan) -> Engine:
        """An engine of the plan."""
        meter, config = MemoryMeter(self.device), DecoderConfig.plain(self.shape)
        offloaded, weights = offloaded_layers(plan, self.shape, self.machine), self.random.weights
        head = steady_head(self.shape, weights.embedding) if plan.attention.active else None
        return Engine(
            plan, "", config, weights, self.device, meter, profile=self.profile, head=head, offloaded=offloaded
        )

    def layers_at(self, plan: Plan, length: int) -> int:
        """Layers on the host over sequences of `length` tokens."""
        strategy = strategy_of(plan, self.shape, self.machine, 1.0)
        return int(offload_layers(self.shape, self.machine, strategy).host_at(length).layers)

    def predicted_step_ms(self, plan: Plan, length: int, layers: float, overlap: float = OVERLAP) -> float:
        """Predicted milliseconds of a step over sequences of `length` tokens, with `layers` layers on the host."""
        strategy = strategy_of(plan, self.shape, self.machine, 1.0).with_terms(offload_overlap=overlap)
        rates = round_rates(self.shape, self.machine, strategy, rates_of(plan, self.shape, self.machine))
        host = replace(offload_layers(self.shape, self.machine, strategy).host, layers=layers)
        return 1e3 * float(round_at(self.shape, self.machine, strategy, rates, length, host).total_s)

    def measured_step_ms(self, plan: Plan, length: int, layers: int) -> float:
        """Milliseconds of a step over sequences of `length` random tokens, with `layers` layers on the host."""
        free()
        placement = replace(plan.placement, adaptive=False) if layers else Placement()
        plan = replace(plan, workload=replace(plan.workload, context=length, new_tokens=1), placement=placement)
        placed = PlacedModel(**vars(self.random), host_layers=layers)
        if not plan.attention.active or not layers:
            return 1e3 * measured_round(placed, plan, steady=self.steady).total_s
        cache = DriftingCache(placed, plan)
        cache.drift(round((1 - OVERLAP) * chosen_tokens(plan)))
        return 1e3 * measured_round(placed, plan, cache, self.steady).total_s


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedModel(RandomModel):
    """The model with its last `host_layers` layers on the host, whatever memory there is."""

    host_layers: int

    def cache_config(self, plan: Plan) -> KVCacheConfig:
        return KVCacheConfig.of(plan, self.shape.layers, self.host_layers)


@dataclass(frozen=True, eq=False)
class SpeContextBench:
    """Sections of the benchmark, each a method that returns rows."""

    small: Setting
    large: Setting
    sizes: Sizes

    @cached_property
    def plan(self) -> Plan:
        """2048 tokens in, 32768 out, batch 32, in memory that has room for most of the cache."""
        return self._whole(self.small)

    def setting(self, section: str) -> Setting:
        """The model of a section's generations."""
        small = self.small
        shape = replace(small.shape, layers=self.sizes.placed_layers)
        return replace(small, shape=shape) if section == "placed" else small

    def _whole(self, setting: Setting) -> Plan:
        sizes = self.sizes
        return limited(setting, self.selecting(setting, sizes.context, sizes.new_tokens, sizes.batch))

    def selecting(self, setting: Setting, context: int, new_tokens: int, batch: int) -> Plan:
        """SpeContext's plan."""
        plan = preset("specontext", Workload(setting.shape.name, "here", context, new_tokens, batch))
        if not self.sizes.budget:
            return plan
        attention = replace(plan.attention, budget=self.sizes.budget)
        return replace(plan, attention=attention, placement=replace(plan.placement, budget=self.sizes.budget))

    def plans(self, section: str) -> dict[str, Plan]:
        """The plans of a section's generations, by row, the one without a limit first."""
        setting = self.setting(section)
        plan = self._whole(setting)
        if section == "codes":
            workload = replace(plan.workload, new_tokens=self.sizes.codes_tokens)
            plan = limited(setting, replace(plan, workload=workload, kv=KVCache(KVFormat.INT8)))
        static = _placed(plan, adaptive=False)
        decided = {"static": static, "all on the host": limited(setting, static, SLOTS_SHARE)}
        leaving = {"without a limit": _placed(plan, memory_bytes=0), "adaptive": plan}
        return leaving | (decided if section == "placed" else {})

    def generation(self) -> Rows:
        """The generation without the limit and with it; the second says whether its tokens are those of the first."""
        return self._generations("generation")

    def placed(self) -> Rows:
        """The same of fewer layers, also with layers on the host from the beginning."""
        return self._generations("placed")

    def codes(self) -> Rows:
        """A shorter one with INT8 codes."""
        return self._generations("codes")

    def _generations(self, section: str) -> Rows:
        setting, tokens = self.setting(section), dict[str, list[list[int]]]()
        return {
            name: partial(self._generated, setting, name, plan, tokens) for name, plan in self.plans(section).items()
        }

    def _generated(self, setting: Setting, name: str, plan: Plan, tokens: dict[str, list[list[int]]]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(2)
        sizes = self.sizes
        prompts = torch.randint(setting.shape.vocab, (sizes.batch, sizes.context), generator=generator).tolist()
        engine = setting.engine(plan)
        assert engine.cache is not None, "it is open"
        windows, rows = [], [[] for _ in prompts]  # type: ignore[var-annotated]
        for window in _windows(engine, prompts, rows, sizes.window):
            length = sizes.context + window["first"] + window["steps"] // 2
            predicted_ms = setting.predicted_step_ms(plan, length, window["layers_on_host"], window["overlap"] or 0.0)
            windows.append({**window, "predicted_step_ms": predicted_ms, "error": window["step_ms"] / predicted_ms - 1})
        counts = engine.statistics
        tokens[name] = rows
        engine.close()
        first, *others = tokens.values()
        return {
            "limit": plan.placement.memory_bytes,
            "layers": setting.shape.layers,
            "thresholds": departure_lengths(plan, setting.shape, setting.machine),
            "moved_at": counts.moved_at,
            "layers_on_host": counts.host_layers,
            "tokens_equal": first == others[-1] if others else None,
            "tpot_ms": counts.tpot_ms,
            "predicted_tpot_ms": predict(plan, setting.shape, setting.profile, counts.overlap or None).best.tpot_ms,
            "overlap": counts.overlap,
            "offload_s": counts.offload_s,
            "capture_s": counts.capture_s,
            "peak_memory_bytes": counts.peak_memory_bytes,
            "predicted_peak_bytes": predict(plan, setting.shape, setting.profile).best.peak_memory_bytes,
            "windows": windows,
        }

    @property
    def full_attention(self) -> Plan:
        """The plan of full attention in the same memory."""
        return Plan(self.plan.workload, placement=replace(self.plan.placement, prefetch=1))

    def placements(self) -> Rows:
        """A step over the length: adaptive, static, everything on the host; and full attention that streams layers."""
        return {str(length): partial(self._placed, length) for length in self.sizes.lengths}

    def _placed(self, length: int) -> dict[str, Any]:
        small, plan, full = self.small, self.plan, self.full_attention
        row: dict[str, Any] = {"context": length}
        for name, of, layers in (
            ("adaptive", plan, small.layers_at(plan, length)),
            ("static", plan, small.layers_at(plan, plan.workload.final_context)),
            ("all", plan, small.shape.layers),
            ("full_attention", full, small.layers_at(full, length)),
        ):
            row |= {
                f"{name}_layers": layers,
                f"{name}_ms": small.measured_step_ms(of, length, layers),
                f"predicted_{name}_ms": small.predicted_step_ms(of, length, layers),
            }
        return row

    def table3(self) -> Rows:
        """The paper's settings: decoding speed of SpeContext and of full attention, each at its batch."""
        return {_lengths(setting): partial(self._compared, _lengths(setting)) for setting in self.sizes.table3}

    def compared(self, row: str) -> dict[str, Plan]:
        """The plans of one of the paper's settings, each with its batch: of SpeContext, and of full attention."""
        (setting,) = (setting for setting in self.sizes.table3 if _lengths(setting) == row)
        context, new_tokens, batch, full_batch = setting
        selecting = self.selecting(self.large, context, new_tokens, batch)
        placement = replace(selecting.placement, memory_bytes=self.sizes.table3_bytes)
        full = Plan(replace(selecting.workload, batch=full_batch))
        return {"specontext": replace(selecting, placement=placement), "full attention": full}

    def _compared(self, setting: str) -> dict[str, Any]:
        large = self.large
        row: dict[str, Any] = {}
        for name, plan in self.compared(setting).items():
            context, new_tokens = plan.workload.context, plan.workload.new_tokens
            steps = [self._step(plan, round(context + share * new_tokens)) for share in THIRDS]
            measured, predicted = (
                statistics.mean(step[kind] for step in steps) for kind in ("step_ms", "predicted_step_ms")
            )
            row[name] = {
                "batch": plan.workload.batch,
                "tokens_per_s": 1e3 * plan.workload.batch / measured,
                "predicted_tokens_per_s": 1e3 * plan.workload.batch / predicted,
                "planned_tokens_per_s": predict(plan, large.shape, large.profile, OVERLAP).best.tokens_per_s,
                "steps": steps,
            }
        return {**row, "speedup": row["specontext"]["tokens_per_s"] / row["full attention"]["tokens_per_s"]}

    def _step(self, plan: Plan, length: int) -> dict[str, Any]:
        layers = self.large.layers_at(plan, length)
        step_ms = self.large.measured_step_ms(plan, length, layers)
        predicted_ms = self.large.predicted_step_ms(plan, length, layers)
        return {
            "length": length,
            "layers_on_host": layers,
            "step_ms": step_ms,
            "predicted_step_ms": predicted_ms,
            "error": step_ms / predicted_ms - 1,
        }


def limited(setting: Setting, plan: Plan, kept_share: float = KEPT_SHARE) -> Plan:
    """The plan in memory that has room for a share of its cache."""
    whole = predict(_placed(plan, memory_bytes=0), setting.shape, setting.profile)
    limit = whole.best.peak_memory_bytes - (1 - kept_share) * whole.memory_bytes["kv"]
    return _placed(plan, memory_bytes=int(limit))


def _placed(plan: Plan, **placement: Any) -> Plan:
    return replace(plan, placement=replace(plan.placement, **placement))


def _lengths(setting: tuple[int, int, int, int]) -> str:
    """The name of a setting of the paper's Table 3."""
    context, new_tokens, *_ = setting
    return f"[{context // 1024}k, {new_tokens // 1024}k]"


def _windows(engine: Engine, prompts: list[list[int]], rows: list[list[int]], longest: int) -> Iterator[dict[str, Any]]:
    """Generates with the engine; adds tokens to `rows`, and yields the median step of each window.

    A window has up to `longest` steps, all with the same layers on the host; one in which a layer leaves is in none.
    """
    cache, sampling = engine.cache, SamplingParams(temperature=1.0, seed=3)
    assert cache is not None, "it is open"
    gaps: list[float] = []
    before, first, layers, last = (0, 0), 0, -1, 0.0

    def window() -> dict[str, Any]:
        requested, loaded = (new - old for new, old in zip(cache.loads(), before, strict=True))
        return {
            "first": first,
            "steps": len(gaps),
            "layers_on_host": layers,
            "step_ms": 1e3 * statistics.median(gaps),
            "mean_step_ms": 1e3 * statistics.mean(gaps),
            "overlap": 1 - loaded / requested if layers else None,
        }

    for step, tokens in enumerate(engine.stream_batch(prompts, engine.plan.workload.new_tokens, sampling)):
        for row, more in zip(rows, tokens, strict=True):
            row.extend(more)
        on_host = cache.layers - cache.first_on_host
        if on_host == layers:
            gaps.append(time.perf_counter() - last)
        if on_host != layers or len(gaps) == longest:
            if gaps:
                yield window()
            gaps, before, first, layers = [], cache.loads(), step, on_host
        last = time.perf_counter()
    if gaps:
        yield window()


def _settings(tiny: bool) -> tuple[Setting, Setting]:
    """The small and the large model on this machine's GPU; tiny: one of sizes that run anywhere."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if tiny:
        shape, profile = resolve(llama_like_shape(4, 128, 256, 4, 2, 32), "h200")
        return Setting(shape, profile, device, False), Setting(shape, profile, device, False)
    if device.type != "cuda":
        raise SystemExit("needs a GPU; allowed without: --tiny")
    profile = this_machine()
    small, large = (Setting(load_shape(name), profile, device, True) for name in ("Llama-3.2-1B", "Llama-3.1-8B"))
    return small, large


def main() -> None:
    """Runs the sections and saves each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    sections = ("generation", "placed", "codes", "placements", "table3")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    parser.add_argument("--rows", nargs="+", default=(), help="Names of rows.")
    parser.add_argument("--tiny", action="store_true", help="Small sizes, which also run without a GPU.")
    options = parser.parse_args()
    bench = SpeContextBench(*_settings(options.tiny), TINY if options.tiny else Sizes())
    results = ResultsFile.at(options.results)
    for name in options.only:
        section: Rows = getattr(bench, name)()
        results.measure(name, section, options.rows)


if __name__ == "__main__":
    main()
