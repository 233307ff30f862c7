"""Tables of docs/traffic.md: what vLLM served on an H200 beside what was predicted, and its energy."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from readme_tables import result, table

from ridgeplan.dashboards.cli.output import number
from ridgeplan.planner.queries.cost import HOUR_S
from ridgeplan.roofline.catalog.hardware import load_hardware

# The runs are described by the program that measured them, which is outside the package.
sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from measure_traffic import ALL_AT_ONCE, LOADS, Arrivals, logged_s, predicted_rows, predicted_server

FITTED = "traffic_h200"
FIGURES = {
    "ttft_p50_ms": "TTFT p50, ms", "ttft_p99_ms": "TTFT p99, ms", "tpot_p50_ms": "TPOT p50, ms",
    "tpot_p99_ms": "TPOT p99, ms", "output_tokens_per_s": "output tokens/s",
}  # fmt: skip
# Targets by what they are for: the end of the figures' names, whether at the knee, and the largest error.
TARGETS = {
    "p50 of TTFT and TPOT": ("_p50_ms", False, 0.08),
    "p99 of TTFT and TPOT": ("_p99_ms", False, 0.20),
    "throughput": ("output_tokens_per_s", False, 0.05),
    "knee: throughput of all at once": ("output_tokens_per_s", True, 0.10),
}
PREDICTED = {
    True: {"written": "predicted before the fit", "now": "predicted after it"},
    False: {"written": "predicted before it was served"},
}


def traffic_served(name: str) -> str:
    """Percentiles and throughput of every load of a run: served, and each prediction with its error."""
    rows = []
    for row in _finished(name):
        rows.append((row["lengths"], _rate(row), "served", *(number(row["measured"][key]) for key in FIGURES)))
        for kind, title in PREDICTED[name == FITTED].items():
            cells = (_with_error(_predicted(name, row, kind)[key], row["measured"][key]) for key in FIGURES)
            rows.append(("", "", title, *cells))
    return table(("prompts", "requests/s", "", *FIGURES.values()), rows)


def traffic_targets(name: str) -> str:
    """How many figures of a run are within each target, and those that are not."""
    kind = [*PREDICTED[name == FITTED]][-1]
    rows = []
    for title, (ending, at_knee, limit) in TARGETS.items():
        errors = {
            f"{row['lengths']} {_rate(row)} {key.partition('_')[0].upper()}": _predicted(name, row, kind)[key]
            / row["measured"][key] - 1
            for row in _finished(name)
            for key in FIGURES
            if key.endswith(ending) and (row["rate"] == ALL_AT_ONCE) == at_knee
        }  # fmt: skip
        missed = [f"{case} {error:+.1%}" for case, error in errors.items() if abs(error) > limit]
        missed += [
            f"{row['lengths']}: not served in the time of the run"
            for row in result(name)["knees"]
            if at_knee and "measured" not in row
        ]
        largest = max(errors.values(), key=abs)
        met = sum(abs(error) <= limit for error in errors.values())
        rows.append((title, f"{limit:.0%}", f"{met} of {len(errors)}", f"{largest:+.1%}", "; ".join(missed)))
    return table(("figure", "target", "within it", "largest error", "missed"), rows)


def traffic_mixed() -> str:
    """Steps of chosen prompts beside decodes: between two readings of tokens, measured and predicted."""
    server, cells = predicted_server("h200"), {}
    for row in result(FITTED)["mixed"]:
        chunks = [tuple(chunk) for chunk in row["chunks"]]
        predicted_s = logged_s(server, row["decodes"], row["tokens"], chunks)
        column = cells.setdefault(row["decodes"], [])
        column.append(f"{number(row['measured_ms'])}, {_with_error(1e3 * predicted_s, row['measured_ms'])}")
    prompts = "512", "2048", "8000", "4 x 1024", "first of 16,000", "rest of 16,000"
    columns = ("prompt tokens", *(f"beside {decodes} decoding" for decodes in cells))
    return table(columns, zip(prompts, *cells.values(), strict=True))


def traffic_energy() -> str:
    """Watts, joules per output token and the price of the GPU's time: measured in the first run, and predicted."""
    price = load_hardware("h200").dollars_per_hour
    rows = []
    for row in _finished(FITTED):
        predicted, served = _predicted(FITTED, row, "now"), row["measured"]
        joules = _with_error(predicted["joules_per_output_token"], row["joules_per_output_token"])
        dollars = [number(1e6 * price / HOUR_S / figures["output_tokens_per_s"]) for figures in (served, predicted)]
        rows.append((row["lengths"], _rate(row), f"{row['watts']:.0f}", number(row["joules_per_output_token"]), joules,
                     *dollars))  # fmt: skip
    per_token, per_million = "J per output token", f"dollars per million output tokens at ${price:g}/h"
    columns = ("prompts", "requests/s", "watts", f"{per_token}, measured", "predicted", f"{per_million}, served",
               "predicted")  # fmt: skip
    return table(columns, rows)


def _finished(name: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a run that were served to their end."""
    document = result(name)
    return (row for row in (*document["rows"], *document["knees"]) if "measured" in row)


def _predicted(name: str, row: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A row's prediction: the one that was written before it was served, or the one of now."""
    return row["predicted"] if kind == "written" else _now(name)[row["lengths"], row["rate"]]


@cache
def _now(name: str) -> dict[tuple[str, float], Mapping[str, Any]]:
    arrivals = Arrivals(**result(name).get("arrivals", {}))
    return {(row["lengths"], row["rate"]): row["predicted"] for row in predicted_rows("h200", [*LOADS], arrivals)}


def _rate(row: Mapping[str, Any]) -> str:
    return "all at once" if row["rate"] == ALL_AT_ONCE else f"{row['rate']:.4g}/s"


def _with_error(predicted: float, measured: float) -> str:
    return f"{number(predicted)} ({predicted / measured - 1:+.1%})"
