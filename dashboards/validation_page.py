"""A suite's results as a page: errors and their targets, largest errors, regret."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ridgeplan.dashboards.charts.suite import errors, hover, regrets, scatter
from ridgeplan.dashboards.html_page import figure_html, html_page, table

WORST = 40  # rows in the table of the largest errors


def page(report: Mapping[str, Any], summary: Sequence[Mapping[str, Any]]) -> str:
    """The HTML of a report's JSON and of the summaries' JSON."""
    return html_page(
        "ridgeplan: predicted and measured",
        (*_head(report), *_summary(summary), *_rows(report["rows"]), *_regret(report["regret"]), *_notes(report)),
    )


def _head(report: Mapping[str, Any]) -> list[str]:
    software = ", ".join(f"{name} {version}" for name, version in report["software"].items())
    told = f"{report['device']}, {report['date']}, {software}. Predicted by {report['profile']}."
    return [f"<h1>Predicted and measured: suite {escape(report['suite'])}</h1>", f"<p>{escape(told)}</p>"]


def _summary(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = ("", "rows", "signed median", "median", "p90", "worst", "mean", "target", "")
    names = ("signed_median", "median", "p90", "worst", "mean")
    rows = (
        (one["name"], one["count"], *(f"{one[name]:+.1%}" if name == "signed_median" else f"{one[name]:.1%}"
         for name in names), _target(one["limits"]), {None: "", True: "met", False: "missed"}[one["met"]])
        for one in summary
    )  # fmt: skip
    return ["<h2>Errors and their targets</h2>", table(columns, rows)]


def _target(limits: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {limit:.1%}" for name, limit in limits.items() if limit is not None)


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    units = dict.fromkeys(row["unit"] for row in rows)
    scatters = (figure_html(scatter([row for row in rows if row["unit"] == unit], unit)) for unit in units)
    worst = sorted(rows, key=lambda row: -abs(row["relative_error"]))[:WORST]
    cells = (
        (row["kind"], f"{row['predicted']:.4g}", f"{row['measured']:.4g}", row["unit"],
         f"{row['relative_error']:+.1%}", hover(row)) for row in worst
    )  # fmt: skip
    columns = ("", "predicted", "measured", "", "error", "case")
    return [
        "<h2>Predicted over measured</h2>", *scatters,
        "<h2>Errors by kind</h2>", figure_html(errors(rows)),
        "<h2>Largest errors</h2>", table(columns, cells),
    ]  # fmt: skip


def _regret(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    cells = (
        (f"{row['model']} {row['context']}x{row['batch']}", row["recommended"], f"{row['recommended_ms']:.4g}",
         row["best"], f"{row['best_ms']:.4g}", f"{row['regret']:.1%}", len(row["candidates"]), row["left_out"])
        for row in rows
    )  # fmt: skip
    columns = ("workload", "recommended", "ms", "best measured", "ms", "regret", "measured", "left out")
    return ["<h2>Regret of the recommended plans</h2>", figure_html(regrets(rows)), table(columns, cells)]


def _notes(report: Mapping[str, Any]) -> list[str]:
    how = [f"<p><b>{escape(section)}.</b> {escape(text)}</p>" for section, text in report["methods"].items()]
    skipped = [f"<li>{escape(text)}</li>" for text in report["skipped"]]
    listed = ["<h2>Not run</h2>", f"<ul>{''.join(skipped)}</ul>"] if skipped else []
    return ["<h2>How it was measured</h2>", *how, *listed]
