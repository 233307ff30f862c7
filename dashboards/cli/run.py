"""`ridgeplan run`: executes a plan with a model and streams the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli.groups import examples
from ridgeplan.dashboards.cli.model_inputs import (
    calibration_tokens,
    embedded_or,
    prompt_text,
    prompt_tokens,
    require_planned_model,
)
from ridgeplan.dashboards.cli.options import (
    TOKENS,
    SavedPlanFile,
    as_json,
    calibration_file,
    memory_utilization,
    model_to_run,
    options,
    profile_file,
    prompt_file,
    retrieval_head,
)
from ridgeplan.dashboards.cli.output import print_json, warnings_as_notes
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.quantities import size_text, time_text
from ridgeplan.roofline.catalog.profile import load_profile

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine, Statistics

DEFAULT_NEW_TOKENS = 128
STATISTICS = (
    "gamma", "rounds", "generated", "drafted", "judged", "accepted", "tokens_per_round", "acceptance", "accepted_share",
    "prefill_s", "decode_s", "draft_s", "verify_s", "flush_s", "idle_s", "capture_s", "flushes",
    "rounds_at", "ttft_ms", "tpot_ms", "peak_memory_bytes",
    "host_layers", "moved_layers", "wanted_loads", "loads", "overlap",
)  # fmt: skip
ATTRIBUTES = {"judged": "num_draft_tokens_verified"}  # keys of --json whose attribute has another name


@click.command(
    epilog=examples(
        "ridgeplan run plan.json --prompt-file book.txt",
        "ridgeplan run plan.json --model model.gguf --prompt-file book.txt --max-new-tokens 256",
        "ridgeplan run plan.json --model Qwen/Qwen2.5-0.5B --temperature 0.8 --top-p 0.95 --json",
    )
)
@click.argument("saved", metavar="PLAN", type=SavedPlanFile())
@options(
    model_to_run,
    click.option("--prompt", metavar="TEXT", help="Text to continue."),
    prompt_file,
    click.option(
        "--max-new-tokens",
        "--new-tokens",
        "--osl",
        "max_new_tokens",
        type=TOKENS,
        help=f"Tokens to generate.  [default: {DEFAULT_NEW_TOKENS}]",
    ),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."),
    click.option("--top-k", type=int, help="Draw among the k likeliest tokens."),
    click.option("--top-p", type=float, help="Draw among the likeliest tokens that make up this probability."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the draws."),
    calibration_file,
    retrieval_head,
    profile_file,
    memory_utilization,
    click.option("--any-model", is_flag=True, help="Run a model of other sizes than the plan is for."),
    as_json,
)
def run(
    saved: SavedPlan, model: str | None, prompt: str | None, prompt_file: str | None, max_new_tokens: int | None,
    calibration: str | None, retrieval_head: str | None, profile: str | None, memory_utilization: float,
    any_model: bool, as_json: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Execute the plan in file PLAN, stream the text, and print what it took.

    An adaptive gamma knows by the profile what rounds take.
    """
    text = prompt_text(prompt, prompt_file)
    if not any_model:
        require_planned_model(saved, model, ", or any with --any-model")
    plan = saved.plan
    rates = None if profile is None else load_profile(profile)
    limit = min(DEFAULT_NEW_TOKENS, plan.workload.new_tokens) if max_new_tokens is None else max_new_tokens
    # Importing torch takes seconds, so the plan's file is checked first.
    from ridgeplan import runtime
    from ridgeplan.runtime.loading import require_described

    params = runtime.SamplingParams(**sampling)
    with warnings_as_notes():
        source = embedded_or(model)
        require_described(plan, source, memory_utilization)
        prompt_ids = prompt_tokens(source, plan.workload, text, limit)  # before weights, which take minutes to load
        fitted = calibration_tokens(source, calibration)
        limits = {"memory_utilization": memory_utilization, "retrieval_head": retrieval_head, "profile": rates}
        engine = runtime.load(plan, source, calibration=fitted, **limits)  # type: ignore[arg-type]
        stop = engine.tokenizer.eos_token_id
        stream = engine.stream(prompt_ids, limit, replace(params, stop_token_ids=() if stop is None else (stop,)))
        tokens: list[int] = []
        for piece in text_pieces(_kept(stream, tokens), text_decoder(engine)):
            if not as_json:
                click.echo(piece, nl=False)
    if as_json:
        print_json({
            "plan": engine.plan.to_dict(),
            "model": engine.source,
            "prompt_tokens": len(prompt_ids),
            "tokens": tokens,
            "text": text_decoder(engine)(tokens),
            "statistics": statistics_dict(engine.statistics),
        })  # fmt: skip
    else:
        click.echo("\n\n" + summary(engine.statistics))


def text_decoder(engine: Engine) -> Callable[[list[int]], str]:
    """Turns token ids into text, without special tokens."""
    return partial(engine.tokenizer.decode, skip_special_tokens=True)


def text_pieces(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The text of tokens as they arrive, held back while it ends inside a character."""
    # The tokens of the last piece, which some tokenizers join with the next, then those that are held back.
    window: list[int] = []
    last = 0
    for token in tokens:
        window.append(token)
        text = decode(window)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(decode(window[:last])) :]
            window, last = window[last:], len(window) - last
    yield decode(window)[len(decode(window[:last])) :]


def statistics_dict(statistics: Statistics) -> dict[str, Any]:
    """The figures of a generation as JSON values."""
    return {name: getattr(statistics, ATTRIBUTES.get(name, name)) for name in STATISTICS}


def summary(statistics: Statistics) -> str:
    """The figures of a generation in a few lines."""
    one = statistics
    peak = "not measured" if one.peak_memory_bytes is None else size_text(one.peak_memory_bytes)
    lines = [
        f"{one.generated} tokens, {time_text(one.tpot_ms)} each after {time_text(one.ttft_ms)} of prefill, "
        f"peak memory {peak}"
    ]
    if one.gamma:
        flushes = f"{one.flushes} flush{'' if one.flushes == 1 else 'es'}"
        lines += [
            f"{one.rounds} rounds of {_drafts_text(one)} ({1e3 * one.draft_s:.3g} ms each) and a verification "
            f"({1e3 * one.verify_s:.3g} ms), {one.tokens_per_round:.2f} tokens a round, {flushes}",
            f"acceptance {one.acceptance:.3f} (conditional), {one.accepted_share:.3f} of all drafts",
        ]
    if one.host_layers:
        lines.append(_host_text(one))
    if one.capture_s:
        lines.append(f"before the first round {one.capture_s:.3g} s to capture its graph")
    if one.idle_s:
        lines.append(f"between rounds the device waits {1e6 * one.idle_s / one.rounds:.3g} us for the host")
    return "\n".join(lines)


def _host_text(one: Statistics) -> str:
    """`12 layers on the host, 1 of which left meanwhile; 87% of what steps chose there was on the device already`."""
    left = f", {one.moved_layers} of which left meanwhile" if one.moved_layers else ""
    chosen = f"; {one.overlap:.0%} of what steps chose there was on the device already" if one.wanted_loads else ""
    return f"{one.host_layers} layers on the host{left}{chosen}"


def _drafts_text(one: Statistics) -> str:
    """`4 drafts`, or how many rounds had how many where gamma adapted: `0 to 6 drafts (0 in 12, 6 in 34 rounds)`."""
    used = [(gamma, rounds) for gamma, rounds in enumerate(one.rounds_at) if rounds]
    if len(used) < 2:
        return f"{one.gamma} drafts"
    return f"{used[0][0]} to {used[-1][0]} drafts ({', '.join(f'{g} in {n}' for g, n in used)} rounds)"


def _kept(tokens: Iterable[int], into: list[int]) -> Iterator[int]:
    for token in tokens:
        into.append(token)
        yield token
