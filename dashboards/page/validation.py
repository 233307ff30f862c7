"""The tab Validation: a report of `ridgeplan validate --suite`, predicted against measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from ridgeplan.dashboards.charts import results
from ridgeplan.dashboards.page.inputs import escaped
from ridgeplan.dashboards.rows import grouped
from ridgeplan.validate.suite.report import SuiteError, SuiteReport, summaries

MAX_MB = 16
WORST = 20  # rows in the table of the largest errors


def show() -> None:
    """An upload, and the report's errors."""
    st.caption("Measure this machine with `ridgeplan validate --suite smoke --output report.json`, then load the file.")
    upload = st.file_uploader("Report", "json", key="report", max_upload_size=MAX_MB)
    if upload is None:
        return
    try:
        report = SuiteReport.from_json(upload.getvalue())
    except SuiteError as error:
        st.error(escaped(str(error)))
        return
    _show_report(report)


def _show_report(report: SuiteReport) -> None:
    st.markdown(escaped(f"{report.device}, {report.date}, predicted by {report.profile}"))
    st.dataframe([_summary_row(summary.to_dict()) for summary in summaries(report)], hide_index=True, key="summary")
    rows = [row.to_dict() for row in report.rows]
    for unit, alike in grouped(rows, "unit").items():
        st.plotly_chart(results.scatter(alike, unit), key=f"scatter_{unit}", alt="Predicted over measured")
    if rows:
        st.plotly_chart(results.errors(rows), key="errors", alt="Errors by kind")
        st.dataframe([_worst_row(row.to_dict()) for row in report.worst_rows(WORST)], hide_index=True, key="worst")
    if report.regret:
        st.plotly_chart(results.regrets([regret.to_dict() for regret in report.regret]), key="regret", alt="Regret")


def _summary_row(summary: Mapping[str, Any]) -> dict[str, object]:
    shares = {name: f"{summary[name]:.1%}" for name in ("median", "p90", "worst")}
    met = {None: "", True: "met", False: "missed"}[summary["met"]]
    return {"figures": summary["name"], "rows": summary["count"], **shares, "target": met}


def _worst_row(row: Mapping[str, Any]) -> dict[str, object]:
    kept = {name: row[name] for name in ("kind", "model", "case", "predicted", "measured", "unit")}
    return {**kept, "error": f"{row['relative_error']:+.1%}"}
