"""`ridgeplan run`: executes a plan on a model and streams the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.model_inputs import (
    calibration_tokens,
    embedded_or,
    prompt_text,
    prompt_tokens,
    require_planned_model,
)
from ridgeplan.dashboards.cli.output import echo, print_json
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.quantities import size_text, time_text
from ridgeplan.roofline.catalog.profile import load_profile

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine, Statistics

STATISTICS = (
    "gamma", "rounds", "generated", "drafted", "judged", "accepted", "tokens_per_round", "acceptance", "accepted_share",
    "prefill_s", "decode_s", "draft_s", "verify_s", "flush_s", "idle_s", "capture_s", "flushes",
    "rounds_at", "ttft_ms", "tpot_ms", "peak_memory_bytes",
    "host_layers", "moved_layers", "wanted_loads", "loads", "overlap",
)  # fmt: skip
ATTRIBUTES = {"judged": "num_draft_tokens_verified"}  # keys of --json whose attribute has another name


@command()
@click.argument("saved", metavar="PLAN", type=opt.SavedPlanFile())
@opt.model_to_run
@click.option("--prompt", metavar="TEXT", help="Text to continue.")
@opt.prompt_file
@opt.max_new_tokens
@click.option("--temperature", type=float, default=0.0, help="0 always takes the likeliest token.")
@click.option("--top-k", type=int, help="Sample from the k likeliest tokens.")
@click.option("--top-p", type=float, help="Sample from the likeliest tokens with this total probability.")
@click.option("--seed", type=int, default=0, help="Seed of the sampling.")
@opt.calibration_file
@opt.retrieval_head
@opt.profile_file
@opt.memory_utilization
@opt.any_model
@opt.as_json
def run(
    saved: SavedPlan, model: str | None, prompt: str | None, prompt_file: str | None, max_new_tokens: int | None,
    calibration: str | None, retrieval_head: str | None, profile: str | None, memory_utilization: float,
    any_model: bool, as_json: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Execute the plan in file PLAN, stream the text, and print the measured times and memory.

    An adaptive gamma takes the times of rounds from --profile.

    Examples:
      ridgeplan run plan.json --prompt-file book.txt
      ridgeplan run plan.json --model model.gguf --prompt-file book.txt --max-new-tokens 256
      ridgeplan run plan.json --model Qwen/Qwen2.5-0.5B --temperature 0.8 --top-p 0.95 --json
    """
    text = prompt_text(prompt, prompt_file)
    if not any_model:
        require_planned_model(saved, model, ", or any with --any-model")
    plan = saved.plan
    rates = None if profile is None else load_profile(profile)
    limit = min(opt.DEFAULT_RUN_TOKENS, plan.workload.new_tokens) if max_new_tokens is None else max_new_tokens
    # Importing torch takes seconds, so the plan's file is checked first.
    from ridgeplan import runtime
    from ridgeplan.runtime.loading import require_described

    params = runtime.SamplingParams(**sampling)
    source = embedded_or(model)
    require_described(plan, source, memory_utilization)
    prompt_ids = prompt_tokens(source, plan.workload, text, limit)  # before weights, which take minutes to load
    engine = runtime.load(
        plan, source, calibration=calibration_tokens(source, calibration), memory_utilization=memory_utilization,
        retrieval_head=retrieval_head, profile=rates,
    )  # fmt: skip
    stop = engine.tokenizer.eos_token_id
    stream = engine.stream(prompt_ids, limit, replace(params, stop_token_ids=() if stop is None else (stop,)))
    tokens: list[int] = []
    for piece in text_pieces(_recorded(stream, tokens), text_decoder(engine)):
        if not as_json:
            echo(piece, nl=False)
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
        echo("\n\n" + summary(engine.statistics))


def _recorded(stream: Iterable[int], tokens: list[int]) -> Iterator[int]:
    for token in stream:
        tokens.append(token)
        yield token


def text_decoder(engine: Engine) -> Callable[[list[int]], str]:
    """Turns token ids into text, without special tokens."""
    return partial(engine.tokenizer.decode, skip_special_tokens=True)


def text_pieces(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The text of tokens as they arrive. Tokens that end inside a character are held back."""
    # The tokens of the last piece, because some tokenizers join it with the next, and then the tokens held back.
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
    stats, memory = statistics, statistics.peak_memory_bytes
    lines = [
        f"{stats.generated} tokens, {time_text(stats.tpot_ms)} each after {time_text(stats.ttft_ms)} of prefill, "
        f"peak memory {'not measured' if memory is None else size_text(memory)}"
    ]
    if stats.gamma:
        flushes = f"{stats.flushes} flush{'' if stats.flushes == 1 else 'es'}"
        lines += [
            f"{stats.rounds} rounds of {_drafts_text(stats)} ({1e3 * stats.draft_s:.3g} ms each) and a verification "
            f"({1e3 * stats.verify_s:.3g} ms), {stats.tokens_per_round:.2f} tokens per round, {flushes}",
            f"acceptance {stats.acceptance:.3f} (conditional), {stats.accepted_share:.3f} of all drafts",
        ]
    if stats.host_layers:
        moved = f", {stats.moved_layers} of them moved during decoding" if stats.moved_layers else ""
        hits = f"; {stats.overlap:.0%} of the selected tokens were already on the device" if stats.wanted_loads else ""
        lines.append(f"{stats.host_layers} layers on the host{moved}{hits}")
    if stats.capture_s:
        lines.append(f"graph capture before the first round took {stats.capture_s:.3g} s")
    if stats.idle_s:
        lines.append(f"the device waits {1e6 * stats.idle_s / stats.rounds:.3g} us for the host between rounds")
    return "\n".join(lines)


def _drafts_text(statistics: Statistics) -> str:
    """`4 drafts`; with an adaptive gamma also their rounds: `0 to 6 drafts (0 in 12, 6 in 34 rounds)`."""
    used = [(gamma, rounds) for gamma, rounds in enumerate(statistics.rounds_at) if rounds]
    if len(used) < 2:
        return f"{statistics.gamma} drafts"
    return f"{used[0][0]} to {used[-1][0]} drafts ({', '.join(f'{g} in {n}' for g, n in used)} rounds)"
