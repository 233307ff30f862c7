"""The `ridgeplan` command: one file per subcommand, and the options, tables and errors that they share.

Subcommands import what they need when they run, so that the command starts fast. Not here: computations (planner,
validate), the page and its figures (dashboards/app.py, dashboards/charts.py).
"""

from __future__ import annotations

import os

import click

from ridgeplan.dashboards.cli import bench, bench_decode, machine, quality, run
from ridgeplan.dashboards.cli.acceptance.command import acceptance
from ridgeplan.dashboards.cli.acceptance.tune import tune
from ridgeplan.dashboards.cli.catalog import models_and_gpus, papers
from ridgeplan.dashboards.cli.errors import OneLineGroup
from ridgeplan.dashboards.cli.planning import estimate, fit, gamma, recommend
from ridgeplan.dashboards.cli.retrieval import distill, import_head
from ridgeplan.dashboards.cli.study import dapq, drafts, retrieval, study
from ridgeplan.dashboards.cli.validation import demo, validate


@click.group(cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="ridgeplan")
def main() -> None:
    """Predict, plan, run and validate long-context LLM inference.

    Exit codes: 0 success, 2 bad input, 3 nothing fits, 4 the machine is too busy to be measured.
    """
    # OpenMP's threads wait for each other in busy loops, which are very slow when another process occupies a core.
    # Shorter loops cost nothing on idle cores. OpenMP reads this when torch loads, which has not happened yet.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")


for command in (
    recommend.recommend,
    estimate.estimate,
    fit.fit,
    gamma.gamma,
    run.run,
    validate.validate,
    machine.calibrate,
    acceptance,
    study,
    tune,
    quality.quality,
    distill.distill,
    import_head.import_head,
    bench.bench,
    models_and_gpus.models,
    models_and_gpus.gpus,
    papers.papers,
    machine.dashboard,
    demo.demo,
):
    main.add_command(command)

for one_study in (drafts.drafts, dapq.dapq, retrieval.retrieval):
    study.add_command(one_study)
for benchmark in (bench_decode.decode, bench_decode.suite):
    bench.bench.add_command(benchmark)
