"""A report of the validation suite that is made up: one step and one workload's regret."""

from ridgeplan.validate.suite.report import RegretRow, SuiteReport, SuiteRow

ROW = SuiteRow(
    section="steps", kind="plain step", model="a model", case="2304 tokens, batch 1", unit="ms", predicted=1.1,
    measured=1.0, source="calibrated",
)  # fmt: skip
REGRET = RegretRow(
    model="a model", context=3000, batch=2, recommended="int8", recommended_ms=1.2, best="quantspec, gamma 3",
    best_ms=1.0, left_out=3,
    candidates=({"plan": "int8", "gamma": 0, "acceptance": 1.0, "predicted_ms": 1.1, "measured_ms": 1.2},),
)  # fmt: skip
REPORT = SuiteReport(
    suite="full", device="a GPU", date="2026-11-21", software={"torch": "2.9"}, profile="h200: calibrated",
    methods={"steps": "by the clock", "regret": "by rounds"}, rows=(ROW,), regret=(REGRET,), skipped=("a case: why",),
)  # fmt: skip
