"""Cost of serving: dollars per million tokens, and which batches meet latency limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ridgeplan.planner.quantities import tokens
from ridgeplan.planner.queries.maps import PlanMap, plan_map
from ridgeplan.planner.question import ask
from ridgeplan.planner.render.tables import Lines, Table
from ridgeplan.roofline.plan.plan import Plan, require

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HOUR_S = 3600.0


@dataclass(frozen=True)
class Limits:
    """The longest latencies that are allowed, of one request; None for any."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True)
class CostRow:
    """One GPU and batch with its fastest plan.

    ttft_ms: of one request, its own prompt alone. tokens_per_s: output tokens of the whole batch, with the time of all
    its prompts. dollars_per_million: of output tokens, prompts included. misses: which limits are not met.
    """

    gpu: str
    batch: int
    plan: Plan
    name: str
    fits: bool
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    dollars_per_million: float
    peak_memory_bytes: float
    misses: tuple[str, ...]

    @property
    def serves(self) -> bool:
        """Whether it fits and meets every limit."""
        return self.fits and not self.misses

    def to_dict(self) -> dict[str, Any]:
        """Flat JSON values, without the plan."""
        return {name: value for name, value in asdict(self).items() if name != "plan"} | {"serves": self.serves}


@dataclass(frozen=True, repr=False)
class ServingCost(Table):
    """Rows by GPU and batch, the limits that they were held to, and caveats."""

    model: str
    context: int
    new_tokens: int
    limits: Limits
    rows: tuple[CostRow, ...]
    notes: tuple[str, ...] = ()

    chart = Lines(("batch",), "dollars_per_million", "dollars per million tokens", ("gpu",))

    def summary(self) -> str:
        """The cheapest row in one line."""
        best = self.cheapest
        found = f"${best.dollars_per_million:.3g} per million on {best.gpu}, batch {best.batch}" if best else "none"
        return f"{self.model}, {self.context} tokens; the cheapest within the limits: {found}"

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
    batches: Sequence[int] = BATCHES,
    limits: Limits = Limits(),
    preset: str | None = None,
    **options: Any,
) -> ServingCost:
    """The cost on every GPU of `prices`, which holds dollars per hour, at every batch. options: those of `recommend`.

    A batch is served at a time: its prompts one after another, then all its tokens. Raises as `recommend` does.
    """
    for gpu, price in prices.items():
        require(0 < price < 1e6, f"the price of {gpu} is {price}; allowed: dollars per hour above 0")
    rows: list[CostRow] = []
    size = tokens(context)
    notes: list[str] = []
    for gpu, price in prices.items():
        question = ask(model, gpu, size, **options)
        found = plan_map(question, (size,), batches, preset)
        new_tokens, name = question.workload.new_tokens, question.profile.hardware.name
        notes += question.notes()
        rows += [_row(found, place, name, price, limits) for place in range(len(batches))]
    told = tuple(dict.fromkeys(notes))
    return ServingCost(question.shape.name, size, new_tokens, limits, tuple(rows), told)


def _row(found: PlanMap, place: int, gpu: str, price: float, limits: Limits) -> CostRow:
    batch, at = found.batches[place], (0, place)
    first_s, tpot_s = float(found.ttft_s[at]) / batch, float(found.tpot_s[at])
    per_second = float(found.served_tokens_per_s[at])
    checks = {"TTFT": (first_s, limits.ttft_s), "TPOT": (tpot_s, limits.tpot_s)}
    return CostRow(
        gpu=gpu,
        batch=batch,
        plan=found.plan(*at),
        name=str(found.names[at]),
        fits=bool(found.fits[at]),
        ttft_ms=1e3 * first_s,
        tpot_ms=1e3 * tpot_s,
        tokens_per_s=per_second,
        dollars_per_million=price / HOUR_S / per_second * 1e6,
        peak_memory_bytes=float(found.peak_bytes[at]),
        misses=tuple(name for name, (took, most) in checks.items() if most is not None and took > most),
    )
