"""`ridgeplan demo`: calibrates this machine, recommends a plan for the embedded model, runs and checks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.machine import calibrate_with_progress
from ridgeplan.dashboards.cli.model_inputs import EMBEDDED_MODEL, embedded_or, prompt_tokens
from ridgeplan.dashboards.cli.options import as_json, options
from ridgeplan.dashboards.cli.output import print_json, progress, warnings_as_notes
from ridgeplan.dashboards.cli.run import statistics_dict, text_decoder
from ridgeplan.dashboards.cli.validate import print_comparison
from ridgeplan.planner import Plan, Recommendation
from ridgeplan.planner.plan import MAX_TOKENS
from ridgeplan.roofline.catalog.named_tables import existing_path
from ridgeplan.roofline.catalog.profile import Profile, load_profile
from ridgeplan.roofline.catalog.profile_lookup import user_profile_path

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ridgeplan.runtime import Statistics
    from ridgeplan.validate import Comparison

COUNT = click.IntRange(1, MAX_TOKENS)  # refused before a calibration of a minute


@dataclass(frozen=True)
class DemoRun:
    """One plan, its text, and its prediction against the measurement."""

    title: str
    text: str
    statistics: Statistics
    comparison: Comparison

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        took = {"statistics": statistics_dict(self.statistics), "comparison": self.comparison.to_dict()}
        return {"title": self.title, "text": self.text, **took}


@click.command()
@options(
    click.option("--context", type=COUNT, default=1024, show_default=True, help="Tokens of the prompt."),
    click.option("--new-tokens", type=COUNT, default=64, show_default=True, help="Tokens to generate."),
    as_json,
)
def demo(context: int, new_tokens: int, as_json: bool) -> None:
    """Recommend, run and check plans for the embedded SmolLM2-135M-Instruct on this machine."""
    source = embedded_or(None)
    profile = own_profile()
    recommendation = planner.recommend(EMBEDDED_MODEL, "auto", context, new_tokens=new_tokens, profile=profile)
    if not as_json:
        click.echo(recommendation.explain() + "\n")
    with warnings_as_notes(), progress() as bars:
        runs = list(execute(plans_to_run(recommendation), source, profile, bars))
    if as_json:
        print_json({"recommendation": recommendation.to_dict(), "runs": [run.to_dict() for run in runs]})
        return
    for run in runs:
        click.echo(f"{run.title} continues the prompt:\n{run.text.strip()}\n")
    for run in runs:
        print_comparison(run.title, run.comparison)


def own_profile() -> Profile:
    """This machine's saved profile; measured now if there is none."""
    path = existing_path(str(user_profile_path()))
    return load_profile(path) if path else calibrate_with_progress(quick=True, output=None)


def plans_to_run(recommendation: Recommendation) -> dict[Plan, str]:
    """Plain decoding, the recommended plan and QuantSpec's, with their titles; each once."""
    workload = recommendation.plan.workload
    titled = (
        ("plain decoding", planner.preset("autoregressive", workload)),
        ("recommended", recommendation.plan),
        ("preset quantspec", planner.preset("quantspec", workload)),
    )
    titles: dict[Plan, str] = {}
    for title, plan in titled:
        titles[plan] = f"{titles[plan]}, {title}" if plan in titles else title
    return titles


def execute(plans: dict[Plan, str], source: str, profile: Profile, bars: Progress) -> Iterator[DemoRun]:
    """Runs each plan on the start of the same text with the same weights; the first is the baseline of speed-ups."""
    from ridgeplan import runtime, validate

    weights, plain = None, None
    for plan, title in plans.items():
        workload = plan.workload
        bar = bars.add_task(f"running {title}", total=workload.new_tokens)
        engine = runtime.load(plan, source, weights=weights)
        prompt = prompt_tokens(engine, None)
        measured = validate.measure(engine, [prompt], workload.new_tokens, on_progress=_advance(bars, bar))
        weights, plain = engine.weights, plain or measured.statistics
        comparison = validate.compare(plan, engine, plain, profile)
        engine.close()
        yield DemoRun(title, text_decoder(engine)(list(measured.tokens[0])), measured.statistics, comparison)


def _advance(bars: Progress, bar: TaskID) -> Callable[[int], None]:
    return lambda tokens: bars.update(bar, completed=tokens)
