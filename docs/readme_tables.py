"""README's tables of what was measured: one for each capability, from the files in validate/results.

Decoding is read from every `decode_*h200.json`, so that a new file of `ridgeplan bench suite` there shows up by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeplan.planner.engines.measurements import shipped_measurements
from ridgeplan.planner.quality import FIDELITY, Quality, QualityRow, load_rows, quality_of, ruler_average
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset, short_name
from ridgeplan.validate.suite.report import SuiteReport, summaries

RESULTS = Path(__file__).parents[1] / "validate" / "results"
DECODING = "decode_*h200.json"
ABLATION = "decode_ablation_h200"  # of an older version: docs/benchmarks/h200.md alone shows it
PLAIN = "autoregressive"
EVICTIONS = ("dapq", "snapkv", "pyramidkv", "h2o", "streamingllm", "lacache", "expected-attention")
KERNELS = {
    "kernels_attention_h200": (
        ("attention", "32/8 x 128, B1, 131072 tokens, INT8"),
        ("attention", "32/8 x 128, B1, 131072 tokens, INT4"),
        ("attention", "32/8 x 128, B8, 32768 tokens, INT4"),
    ),
    "kernels_codes_h200": (
        ("linear_int4", "1 x 4096 -> 4096"),
        ("linear_int4", "1 x 4096 -> 28672"),
        ("linear_int4", "16 x 4096 -> 28672"),
        ("linear_int8", "1 x 4096 -> 28672"),
        ("linear_int8", "8 x 4096 -> 28672"),
    ),
    "kernels_h200": (("linear_dense", "1 x 4096 -> 28672"),),
    "kernels_sparse_h200": (("progressive", "32/8 x 128, B1, 131072 tokens, 7%"),),
}
PREDICTED = {
    "steps": "a draft, verification or plain step",
    "TPOT at the measured acceptance": "time per token, at the measured acceptance",
    "TPOT at another text's acceptance": "time per token, at the acceptance of another text",
    "peak memory": "peak memory",
    "regret": "the recommended plan's time over the fastest one's, minus 1, at the predicted acceptance",
    "regret at measured acceptance": "the same, both at the acceptance measured of a 0.5B model",
}


@dataclass(frozen=True)
class Decoding:
    """One row of a file of `ridgeplan bench suite`. file: its name. date: the day of its run, YYYY-MM-DD."""

    file: str
    date: str
    row: dict[str, Any]

    @property
    def plan(self) -> Plan:
        """The preset's plan, or the one whose file was run."""
        values = self.row.get("given")
        return Plan.from_json(json.dumps(values)) if values else preset(self.row["preset"], Workload("any", "any", 1))

    @property
    def name(self) -> str:
        """The preset, with the share of the prompt that it keeps where that is not its own budget."""
        share = self.row.get("share")
        return f"`{short_name(self.row['preset'])}`" + (f", {share:.0%} kept" if share else "")

    @property
    def size(self) -> tuple[int, int]:
        """Context and batch."""
        return self.row["context"], self.row["batch"]

    @property
    def tpot_ms(self) -> float:
        """Time per output token."""
        return float(self.row["measured"]["tpot_ms"])

    @property
    def peak_gb(self) -> float:
        """What torch had allocated at most."""
        return float(self.row["measured"]["peak_memory_bytes"]) / 1e9

    @property
    def over_plain(self) -> str:
        """Speed-up over plain decoding in the same run, or why there is none."""
        measured = {figure["name"]: figure["measured"] for figure in self.row["comparison"]}
        speedup = measured["speed-up over plain decoding"]
        missing = "not run" if self.row.get("busy") is False else "busy"  # of which older rows say nothing
        return missing if speedup is None else f"{speedup:.2f}x"

    def over_vllm(self, weights: str, kv: str) -> str:
        """Speed-up over vLLM's plain decoding with these formats, as text; empty where that was not measured."""
        engine_ms = shipped_measurements().tpot_ms("meta-llama/Llama-3.1-8B", *self.size, weights, kv)
        return "" if engine_ms is None else f"{engine_ms / self.tpot_ms:.2f}x"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def result(name: str) -> Any:
    """A file of validate/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def fastest() -> str:
    """The fastest plan of every workload, of those that are at least near lossless."""
    best: dict[tuple[int, int], Decoding] = {}
    for decoding in _newest(row for row in _decoding() if quality_of(row.plan) is not Quality.LOSSY):
        best[decoding.size] = min(best.get(decoding.size, decoding), decoding, key=lambda row: row.tpot_ms)
    rows = (
        (
            _workload(size),
            f"{decoding.name}, gamma {decoding.row['gamma']}",
            f"{decoding.tpot_ms:.2f}",
            decoding.over_plain,
            decoding.over_vllm("auto", "auto"),
            decoding.over_vllm("fp8", "fp8"),
            f"{decoding.peak_gb:.1f}",
        )
        for size, decoding in sorted(best.items())
    )
    columns = (
        "context x batch", "fastest plan", "ms per token", "over plain decoding", "over vLLM, bf16", "over vLLM, fp8",
        "peak GB",
    )  # fmt: skip
    return table(columns, rows)


def speeds(capability: str) -> str:
    """Time per token of a capability's plans, each with its best gamma, and in brackets over plain decoding."""
    results: dict[str, dict[tuple[int, int], Decoding]] = {}
    for decoding in _newest(CAPABILITIES[capability](_decoding())):
        results.setdefault(decoding.name, {})[decoding.size] = decoding
    sizes = sorted({size for row in results.values() for size in row})
    cells = ((name, *map(_speed, map(row.get, sizes))) for name, row in results.items())
    return table(("ms per token", *map(_workload, sizes)), cells)


def _newest(rows: Iterable[Decoding]) -> Iterable[Decoding]:
    """Of each plan and workload the run of the newest day, and of that day's runs the fastest: kernels change."""
    newest: dict[tuple[str, tuple[int, int]], Decoding] = {}
    for row in rows:
        key = row.name, row.size
        newest[key] = max(newest.get(key, row), row, key=lambda run: (run.date, -run.tpot_ms))
    return newest.values()


def _reads_all(plan: Plan) -> bool:
    """Whether drafts and target read all tokens of the prompt."""
    return not (plan.speculation.sparse or plan.attention.active or plan.eviction.active)


def _full_weights(rows: list[Decoding]) -> list[Decoding]:
    """Plans of 16-bit target weights that read all tokens."""
    return [row for row in rows if row.plan.weights.target_bits == 16 and _reads_all(row.plan)]


def _coded_weights(rows: list[Decoding]) -> list[Decoding]:
    """The same of 8-bit and 4-bit target weights."""
    return [row for row in rows if row.plan.weights.target_bits != 16 and _reads_all(row.plan)]


def _sparse_drafts(rows: list[Decoding]) -> list[Decoding]:
    """Plans of sparse drafts, and those of the same file and workload whose drafts read all tokens."""
    measured = {(row.file, row.size) for row in rows if row.plan.speculation.sparse}
    drafting = (row for row in rows if row.plan.speculation.active and not row.plan.eviction.active)
    return [row for row in drafting if (row.file, row.size) in measured]


def _evictions(rows: list[Decoding]) -> list[Decoding]:
    return [row for row in rows if row.plan.eviction.active]


CAPABILITIES: dict[str, Callable[[list[Decoding]], list[Decoding]]] = {
    "full-weights": _full_weights,
    "coded-weights": _coded_weights,
    "sparse-drafts": _sparse_drafts,
    "evictions": _evictions,
}


def decoding_files() -> list[str]:
    """The names of all files of `ridgeplan bench suite`."""
    return sorted(path.stem for path in RESULTS.glob(DECODING))


def _decoding() -> list[Decoding]:
    """Every row but plain decoding's."""
    reports = {name: result(name) for name in decoding_files() if name != ABLATION}
    rows = (Decoding(name, report["date"], row) for name, report in reports.items() for row in report["rows"])
    return [row for row in rows if row.row["preset"] != PLAIN]


def _workload(size: tuple[int, int]) -> str:
    context, batch = size
    return f"{context // 1024}k x {batch}"


def _speed(decoding: Decoding | None) -> str:
    return "" if decoding is None else f"{decoding.tpot_ms:.2f} ({decoding.over_plain})"


def fast_kernels() -> str:
    """Some kernels beside the fastest of other projects'."""
    rows = []
    for file, kernels in KERNELS.items():
        measured = {(row["kernel"], row["shape"]): row for row in result(file)["rows"]}
        for kernel in kernels:
            row = measured[kernel]
            peers = row["peers_us"]
            peer = min(peers, key=peers.__getitem__)
            times = f"{row['ours_us']:.1f}", f"{peers[peer]:.1f}", f"{peers[peer] / row['ours_us']:.2f}x"
            rows.append((" ".join(kernel), *times, peer))
    return table(("kernel", "us", "peer, us", "ratio", "fastest peer"), rows)


def cliff() -> str:
    """Time per token where layers leave for the host: as many as must, or all once one must."""
    rows = (
        (
            f"{row['context'] // 1024}k",
            str(row["host_layers"]),
            f"{row['adaptive_ms']:.1f}",
            f"{row['static_ms']:.1f}",
        )
        for row in result("offload_h200")["cliff"]
    )
    return table(("context", "layers that must leave", "ms per token", "if all left as soon as one must"), rows)


def evictions(name: str, context: str) -> str:
    """Fidelity and RULER's mean of every eviction, by the tokens that it keeps, and of the whole cache."""
    rows = [row for row in load_rows(RESULTS / f"{name}.json") if row.context == int(context)]
    budgets = sorted({_budget(row) for row in rows if _budget(row)})
    lines = [(policy, *(_quality(rows, f"{policy} {budget}") for budget in budgets)) for policy in EVICTIONS]
    lines.insert(0, ("all tokens", *[_quality(rows, PLAIN)] * len(budgets)))
    return table(("fidelity, RULER", *(f"{budget} of {context} tokens kept" for budget in budgets)), lines)


def _budget(row: QualityRow) -> int:
    return int(row.target.get("eviction.budget", 0))


def _quality(rows: Sequence[QualityRow], plan: str) -> str:
    rows_of_plan = [row for row in rows if row.plan == plan]
    fidelity = next(row.value for row in rows_of_plan if row.measure == FIDELITY)
    ruler = ruler_average(rows_of_plan)
    return f"{fidelity:.3f}" + (f", {100 * ruler[0]:.0f}" if ruler else "")


def errors(name: str) -> str:
    """How far predictions were off, by what was predicted."""
    by_name = {summary.name: summary for summary in summaries(SuiteReport.read(RESULTS / f"{name}.json"))}
    rows = []
    for key, label in PREDICTED.items():
        shares = (by_name[key].median, by_name[key].p90, by_name[key].worst)
        rows.append((label, str(by_name[key].count), *(f"{share:.1%}" for share in shares)))
    return table(("predicted", "cases", "median error", "90% below", "worst"), rows)
