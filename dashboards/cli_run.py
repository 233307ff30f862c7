"""`ridgeplan run`: executes a plan with a model and streams what it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli_options import PlanFile, as_json, calibration_file, model_to_run, options, prompt_file
from ridgeplan.dashboards.cli_output import GIB, print_json, warnings_as_notes
from ridgeplan.planner import Plan
from ridgeplan.planner.acceptance import same_model

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine, Statistics

DEFAULT_NEW_TOKENS = 128
CALIBRATION_TOKENS = 8192  # 2048 are as good for short contexts; for long ones acceptance rises by another 0.007
FEW_CALIBRATION_TOKENS = 1000  # fewer fit weights to themselves
EMBEDDED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STATISTICS = (
    "gamma", "rounds", "generated", "drafted", "judged", "accepted", "tokens_per_round", "acceptance", "accepted_share",
    "prefill_s", "decode_s", "draft_s", "verify_s", "flush_s", "idle_s", "capture_s", "flushes",
    "ttft_ms", "tpot_ms", "peak_memory_bytes",
)  # fmt: skip


@click.command()
@click.argument("plan", type=PlanFile())
@options(
    model_to_run,
    click.option("--prompt", metavar="TEXT", help="Text to continue."),
    prompt_file,
    click.option("--max-new-tokens", type=int, help=f"Tokens to generate.  [default: {DEFAULT_NEW_TOKENS}]"),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."),
    click.option("--top-k", type=int, help="Draw among the k likeliest tokens."),
    click.option("--top-p", type=float, help="Draw among the likeliest tokens that make up this probability."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the draws."),
    calibration_file,
    as_json,
)
def run(
    plan: Plan, model: str | None, prompt: str | None, prompt_file: str | None, max_new_tokens: int | None,
    calibration: str | None, as_json: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Execute the plan in file PLAN, stream the text, and print what it took."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("--prompt and --prompt-file were given; allowed: one of them")
    if prompt == "":
        raise click.UsageError("--prompt is empty; allowed: text of one character or more")
    limit = min(DEFAULT_NEW_TOKENS, plan.workload.new_tokens) if max_new_tokens is None else max_new_tokens
    # Importing torch takes seconds, so it waits until the plan's file is known to be good.
    from ridgeplan import runtime

    with warnings_as_notes():
        source = embedded_or(model)
        engine = runtime.load(plan, source, calibration=calibration_tokens(source, calibration))
        if model is None:
            note_substitute(plan)
        prompt_ids = prompt_tokens(engine, prompt, prompt_file)
        stop = engine.tokenizer.eos_token_id
        stream = engine.stream(prompt_ids, limit, stop_tokens=() if stop is None else (stop,), **sampling)
        tokens: list[int] = []
        for piece in text_pieces(_kept(stream, tokens), text_decoder(engine)):
            if not as_json:
                click.echo(piece, nl=False)
    if as_json:
        print_json({
            "plan": plan.to_dict(),
            "model": engine.source,
            "prompt_tokens": len(prompt_ids),
            "tokens": tokens,
            "text": text_decoder(engine)(tokens),
            "statistics": statistics_dict(engine.statistics),
        })  # fmt: skip
    else:
        click.echo("\n\n" + summary(engine.statistics))


def embedded_or(model: str | None) -> str:
    """The model as given, else the embedded one. Raises ModelError where that is not installed."""
    from ridgeplan.runtime import embedded_model_path

    return model or str(embedded_model_path())


def note_substitute(plan: Plan) -> None:
    """Says on stderr that the embedded model runs in place of the one the plan is for, if that is another."""
    named = plan.workload.model
    if not same_model(named, EMBEDDED_MODEL):
        click.echo(f"note: the plan is for {named}; {EMBEDDED_MODEL} runs, --model names another", err=True)


def prompt_tokens(engine: Engine, text: str | None, path: str | None) -> list[int]:
    """Token ids of a text or a file, or as many as the plan's context holds of the text that comes with Python."""
    if text is not None:
        return list(engine.tokenizer.encode(text))
    from ridgeplan.validate import prompts

    if path is not None:
        return list(engine.tokenizer.encode(prompts.read_prompt(path)))
    return prompts.prompt_tokens(engine.tokenizer, engine.plan.workload.context)


def opening_tokens(source: str, path: str | None, tokens: int) -> list[int]:
    """The first `tokens` token ids of a file, all of a shorter one, or of the text that comes with Python."""
    from ridgeplan.runtime.checkpoint import load_tokenizer, model_source
    from ridgeplan.validate import prompts

    text = prompts.read_prompt(path) if path is not None else None
    tokenizer: Any = load_tokenizer(model_source(source))
    return prompts.prompt_tokens(tokenizer, tokens) if text is None else list(tokenizer.encode(text))[:tokens]


def calibration_tokens(source: str, path: str | None) -> list[int] | None:
    """Token ids of a file to calibrate drafts with, of a short one with a note; None without a file."""
    if path is None:
        return None
    tokens = opening_tokens(source, path, CALIBRATION_TOKENS)
    if len(tokens) < FEW_CALIBRATION_TOKENS:
        click.echo(f"note: {path} has {len(tokens)} tokens; {FEW_CALIBRATION_TOKENS} or more calibrate well", err=True)
    return tokens


def text_decoder(engine: Engine) -> Callable[[list[int]], str]:
    """Turns token ids into text, without the marks of a chat or of its end."""
    return partial(engine.tokenizer.decode, skip_special_tokens=True)


def text_pieces(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The text of tokens as they come, held back while it ends inside a character."""
    # The tokens of the last piece, with which some tokenizers join the next, then those that are held back.
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
    return {name: getattr(statistics, name) for name in STATISTICS}


def summary(statistics: Statistics) -> str:
    """The figures of a generation in a few lines."""
    one = statistics
    peak = "not measured" if one.peak_memory_bytes is None else f"{one.peak_memory_bytes / GIB:.2f} GiB"
    lines = [
        f"{one.generated} tokens, {one.tpot_ms:.3g} ms each after {one.ttft_ms / 1e3:.3g} s of prefill, "
        f"peak memory {peak}"
    ]
    if one.gamma:
        lines += [
            f"{one.rounds} rounds of {one.gamma} drafts ({1e3 * one.draft_s:.3g} ms each) and a verification "
            f"({1e3 * one.verify_s:.3g} ms), {one.tokens_per_round:.2f} tokens a round, {one.flushes} flushes",
            f"acceptance {one.acceptance:.3f} (conditional), {one.accepted_share:.3f} of all drafts",
        ]
    if one.capture_s:
        lines.append(f"before the first round {one.capture_s:.3g} s to capture its graph")
    if one.idle_s:
        lines.append(f"between rounds the device waits {1e6 * one.idle_s / one.rounds:.3g} us for the host")
    return "\n".join(lines)


def _kept(tokens: Iterable[int], into: list[int]) -> Iterator[int]:
    for token in tokens:
        into.append(token)
        yield token
