"""The `ridgeplan` command: one file a subcommand, and the options, tables and errors that they share.

Each subcommand imports what it needs when it runs, so that answers come at once. Not here: what is computed
(planner, validate), the page and its figures (dashboards/app.py, dashboards/charts.py).
"""

from __future__ import annotations

import os

import click

from ridgeplan.dashboards.cli import bench, bench_decode, catalog, demo, machine, plan, run, validate
from ridgeplan.dashboards.cli.errors import OneLineGroup


@click.group(cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="ridgeplan")
def main() -> None:
    """Predict, plan, run and validate long-context LLM inference.

    Exit codes: 0 success, 2 bad input, 3 nothing fits.
    """
    # OpenMP's threads wait for each other in a busy loop, which collapses when another process holds a core. Short
    # loops cost nothing on quiet cores. It is read when torch loads, which no command has done yet.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")


for command in (
    plan.recommend,
    plan.estimate,
    run.run,
    validate.validate,
    machine.calibrate,
    bench.bench,
    catalog.models,
    catalog.gpus,
    machine.dashboard,
    demo.demo,
):
    main.add_command(command)

for benchmark in (bench_decode.decode, bench_decode.suite):
    bench.bench.add_command(benchmark)
