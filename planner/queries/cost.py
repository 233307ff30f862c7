"""Cost of serving: dollars per million tokens, and which batches meet latency limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ridgeplan.planner.feasibility import fewest_gpus
from ridgeplan.planner.parallelism import divided
from ridgeplan.planner.quantities import tokens
from ridgeplan.planner.queries.maps import PlanMap, degree_map
from ridgeplan.planner.question import SearchOptions, ask
from ridgeplan.planner.recommendation import READING_TPOT_MS
from ridgeplan.planner.render.tables import Lines, Table
from ridgeplan.roofline.plan.plan import Plan, require
from ridgeplan.roofline.plan.presets import divided_name

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HOUR_S = 3600.0


@dataclass(frozen=True)
class LatencyLimits:
    """The longest latencies that are allowed, of one request; None for any."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def excess(self, row: CostRow) -> float:
        """How many times the limits the row's latencies are, at worst; 1 where it meets them."""
        pairs = ((row.ttft_request_ms, self.ttft_s), (row.tpot_ms, self.tpot_s))
        return max([1.0, *(taken_ms / 1e3 / limit_s for taken_ms, limit_s in pairs if limit_s is not None)])


@dataclass(frozen=True)
class CostRow:
    """One GPU and batch with its recommended plan.

    ttft_request_ms, ttft_ms: as in `Figures`; limits hold for the former. tokens_per_s: output tokens of the whole
    batch, with the time of all its prompts. dollars_per_million: of output tokens, prompts included. misses: which
    limits are not met. gpus: that the plan spans; several degrees of parallelism compete by dollars.
    """

    gpu: str
    batch: int
    plan: Plan
    name: str
    fits: bool
    gpus: int
    ttft_request_ms: float
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    dollars_per_million: float
    peak_memory_bytes: float
    host_bytes: float
    misses: tuple[str, ...]

    @property
    def serves(self) -> bool:
        """Whether it fits and meets every limit."""
        return self.fits and not self.misses

    @property
    def caveats(self) -> tuple[str, ...]:
        """What keeps `recommend` from recommending a plan that fits: layers on the host, or more than reading takes."""
        return ("offloaded",) * (self.host_bytes > 0) + ("slow",) * (self.tpot_ms > READING_TPOT_MS)

    def to_dict(self) -> dict[str, Any]:
        """Flat JSON values, without the plan; the number of GPUs where it is not 1."""
        skipped = ("plan", "gpus") if self.gpus == 1 else ("plan",)
        return {name: value for name, value in asdict(self).items() if name not in skipped} | {"serves": self.serves}


@dataclass(frozen=True, repr=False)
class ServingCost(Table):
    """Rows by GPU and batch, the limits that they were held to, and caveats."""

    model: str
    context: int
    new_tokens: int
    limits: LatencyLimits
    rows: tuple[CostRow, ...]
    notes: tuple[str, ...] = ()

    chart = Lines(("batch",), "dollars_per_million", "dollars per million tokens", ("gpu",))

    def summary(self) -> str:
        """The cheapest row in one line."""
        best = self.cheapest
        cheapest = f"${best.dollars_per_million:.3g} per million on {best.gpu}, batch {best.batch}" if best else "none"
        return f"{self.model}, {self.context} tokens; the cheapest within the limits: {cheapest}"

    @property
    def cheapest(self) -> CostRow | None:
        """The row with the fewest dollars per token that fits and meets the limits."""
        return min((row for row in self.rows if row.serves), key=lambda row: row.dollars_per_million, default=None)

    def table(self) -> list[dict[str, Any]]:
        """A flat row per GPU and batch."""
        return [row.to_dict() for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        best = self.cheapest
        return {
            "model": self.model, "context": self.context, "new_tokens": self.new_tokens, "limits": asdict(self.limits),
            "rows": self.table(), "cheapest": best.to_dict() if best else None, "notes": list(self.notes),
        }  # fmt: skip


def serving_cost(
    model: str,
    prices: Mapping[str, float],
    context: int | str,
    *,
    batches: Sequence[int] = (),
    limits: LatencyLimits = LatencyLimits(),
    preset: str | None = None,
    options: SearchOptions | None = None,
    **changes: Any,
) -> ServingCost:
    """The cost on every GPU of `prices`, which holds dollars per hour, at every batch.

    A batch is served at a time: its prompts one after another, then all its tokens. Batches default to the powers of 2
    up to the last that fits the GPU alone. Options and errors are those of `recommend`.
    """
    for gpu, price in prices.items():
        require(0 < price < 1e6, f"the price of {gpu} is {price}; allowed: dollars per hour above 0")
    options, prompt_tokens = SearchOptions.of(options, changes), tokens(context)
    questions = {gpu: ask(model, gpu, prompt_tokens, options) for gpu in prices}
    rows: list[CostRow] = []
    notes = dict.fromkeys(note for question in questions.values() for note in question.notes())
    for gpu, question in questions.items():
        contexts, at_degrees = (prompt_tokens,), divided(question)[0].values()
        by_degrees = [degree_map(sharded, contexts, batches or BATCHES, preset) for sharded in at_degrees]
        # The first ones fit, as memory grows with the batch.
        fitting = max(int((sizes.fits & (sizes.host_bytes == 0)).sum()) for sizes in by_degrees)
        name = question.profile.hardware.name
        smallest = question.resized(prompt_tokens, min(batches, default=1))
        if not any(sizes.fits.any() for sizes in by_degrees) and (several := fewest_gpus(smallest, preset)):
            gpus = options.least_gpus if options.least_gpus > 1 else "one"
            notes[f"no batch fits {gpus} {name}; `gpus={several}` fits batch {smallest.workload.batch}"] = None
        for column in range(len(batches) or max(fitting, 1)):
            choices = [_row(sizes, column, name, prices[gpu], limits) for sizes in by_degrees]
            rows.append(min(choices, key=lambda row: (not row.fits, limits.excess(row), row.dollars_per_million)))
    model = next(iter(questions.values())).shape.name
    return ServingCost(model, prompt_tokens, options.new_tokens, limits, tuple(rows), tuple(notes))


def _row(sizes: PlanMap, column: int, gpu: str, price: float, limits: LatencyLimits) -> CostRow:
    batch, at = sizes.batches[column], (0, column)
    request_s, tpot_s = float(sizes.request_ttft_s[at]), float(sizes.tpot_s[at])
    tokens_per_s = float(sizes.served_tokens_per_s[at])
    checks = {"TTFT": (request_s, limits.ttft_s), "TPOT": (tpot_s, limits.tpot_s)}
    return CostRow(
        gpu=gpu,
        batch=batch,
        plan=sizes.plan(*at),
        name=divided_name(str(sizes.names[at]), sizes.plan(*at)),
        fits=bool(sizes.fits[at]),
        gpus=sizes.gpus(*at),
        ttft_request_ms=1e3 * request_s,
        ttft_ms=1e3 * float(sizes.ttft_s[at]),
        tpot_ms=1e3 * tpot_s,
        tokens_per_s=tokens_per_s,
        dollars_per_million=sizes.gpus(*at) * price / HOUR_S / tokens_per_s * 1e6,
        peak_memory_bytes=float(sizes.peak_bytes[at]),
        host_bytes=float(sizes.host_bytes[at]),
        misses=tuple(name for name, (seconds, limit) in checks.items() if limit is not None and seconds > limit),
    )
