"""`ridgeplan demo`: recommends a plan for the embedded model, runs it and checks it.

A machine that is neither calibrated nor in the catalog is calibrated first. That calibration is not kept where other
programs disturbed it, or where plain decoding then takes another time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.calibrate import machine_profile
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.model_inputs import EMBEDDED_MODEL, embedded_or, opening_tokens
from ridgeplan.dashboards.cli.output import echo, print_bars, print_json, runs_progress, wrapped
from ridgeplan.dashboards.cli.plan import answer_lines
from ridgeplan.dashboards.cli.run import report_misfit, statistics_dict
from ridgeplan.dashboards.cli.validate import note_order, print_comparison
from ridgeplan.planner import Plan, Recommendation
from ridgeplan.planner.quantities import time_text
from ridgeplan.roofline.catalog.profile import Profile

if TYPE_CHECKING:
    from ridgeplan.validate.comparison import Comparison
    from ridgeplan.validate.validation import PlanRun, PlanRuns

CALIBRATE = (
    "  ridgeplan calibrate --quick                            measure this machine once other programs have ended\n"
)
NEXT = f"""\
  ridgeplan chat {EMBEDDED_MODEL:<39} talk with this model
  ridgeplan plan MODEL --gpu auto --ctx 8k -o plan.json  plan your own: a hub id, a folder or a GGUF file
  ridgeplan plan MODEL --gpu auto --ctx 8k --all         every plan, its band, and why it lost
  ridgeplan dashboard                                    what if, as a page"""


@command()
@click.option("--context", type=opt.POSITIVE_TOKENS, default=1024, help="Prompt length in tokens.")
@click.option("--new-tokens", type=opt.POSITIVE_TOKENS, default=64, help="Tokens to generate.")
@opt.as_json
def demo(context: int, new_tokens: int, as_json: bool) -> None:
    """Recommend, run and check plans for the embedded SmolLM2-135M-Instruct on this machine.

    Examples:
      ridgeplan demo
      ridgeplan demo --context 4k --new-tokens 128
      ridgeplan demo --json
    """
    source = embedded_or(None)
    profile, measured = machine_profile()
    recommendation = planner.recommend(EMBEDDED_MODEL, "auto", context, new_tokens=new_tokens, profile=profile)
    if not as_json:
        shown = f"`ridgeplan plan {EMBEDDED_MODEL} --gpu auto --ctx {context} --all` shows the source"
        echo("\n".join(map(wrapped, answer_lines(recommendation, shown))) + "\n")
    plans = plans_to_run(recommendation)
    results = execute(plans, source, profile)
    titled = list(zip(plans.values(), results.runs, strict=True))
    if as_json:
        runs = [run_dict(title, run) for title, run in titled]
        print_json({"recommendation": recommendation.to_dict(), "runs": runs, "in_turns": results.in_turns})
    else:
        for title, run in titled:
            echo(f"{title} continues the prompt:\n{run.texts[0].strip()}\n")
        for title, run in titled:
            print_comparison(title, run.comparison)
        print_bars("Time per token", time_bars([(title, run.comparison) for title, run in titled]))
        note_order(results.in_turns)
    dropped = report_misfit(results.runs[0].comparison, profile, measured) or profile.disturbed
    if not as_json:
        echo(f"\nNext:\n{CALIBRATE if dropped else ''}{NEXT}")


def time_bars(compared: Iterable[tuple[str, Comparison]]) -> Iterator[tuple[str, str, float, str]]:
    """A bar for the predicted and one for the measured time per token of each plan, as `print_bars` takes them."""
    for title, comparison in compared:
        tpot = comparison.row("tpot")
        yield title, "predicted", tpot.predicted, time_text(tpot.predicted)
        if tpot.measured is not None:
            yield "", "measured", tpot.measured, time_text(tpot.measured)


def plans_to_run(recommendation: Recommendation) -> dict[Plan, str]:
    """Plain decoding, the recommended plan and QuantSpec's, each once, with their titles."""
    workload = recommendation.plan.workload
    titled = (
        ("plain decoding", planner.preset("autoregressive", workload)), ("recommended", recommendation.plan),
        ("preset quantspec", planner.preset("quantspec", workload)),
    )  # fmt: skip
    titles: dict[Plan, str] = {}
    for title, plan in titled:
        titles[plan] = f"{titles[plan]}, {title}" if plan in titles else title
    return titles


def execute(plans: dict[Plan, str], source: str, profile: Profile) -> PlanRuns:
    """Runs the plans on the same prompt and weights. The first one is the baseline of speed-ups."""
    from ridgeplan.validate import RunOptions, run_plans

    workload = next(iter(plans)).workload
    prompt = opening_tokens(source, None, workload.context)
    with runs_progress([*plans.values()], workload.new_tokens) as advance:
        options = RunOptions(source, [prompt], workload.new_tokens, profile=profile, on_progress=advance)
        return run_plans(list(plans), options)


def run_dict(title: str, run: PlanRun) -> dict[str, Any]:
    """A run as plain JSON values."""
    statistics = statistics_dict(run.measured.statistics)
    return {"title": title, "text": run.texts[0], "statistics": statistics, "comparison": run.comparison.to_dict()}
