"""The model and the texts that commands run on, from their options."""

from __future__ import annotations

from typing import Any

import click

from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.roofline.catalog.model_shape import sizes_of
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Workload

EMBEDDED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CALIBRATION_TOKENS = 8192  # 2048 are as good for short contexts; for long ones acceptance is another 0.007 higher
FEW_CALIBRATION_TOKENS = 1000  # with fewer, weights are overfitted


def embedded_or(model: str | None) -> str:
    """The given model, else the embedded one. Raises ModelError if that is not installed."""
    from ridgeplan.runtime import embedded_model_path

    if model == "":
        raise click.UsageError("--model is empty; allowed: a safetensors folder, a .gguf file or a hub id")
    return str(embedded_model_path()) if model is None else model


def require_planned_model(saved: SavedPlan, model: str | None, otherwise: str = "") -> None:
    """Raises UsageError where a model's sizes are not those that the plan is for; nothing is read but its description.

    otherwise: what the error names as allowed beside the plan's model.
    A model or plan whose sizes are not known here is let through; the runtime then compares what it loads.
    """
    try:
        planned = saved.shape or load_shape(saved.plan.workload.model)
        running = load_shape(EMBEDDED_MODEL if model is None else model)
    except ValueError:
        return
    if sizes_of(planned) != sizes_of(running):
        other = f"{running.name} ({running.parameters / 1e9:.3g}B)"
        given = f"--model is {other}" if model else f"without --model the embedded {other} would run"
        raise click.UsageError(
            f"the plan is for {planned.name} ({planned.parameters / 1e9:.3g}B), and {given}; allowed: the plan's model "
            f"as --model{otherwise}"
        )


def prompt_text(text: str | None, path: str | None) -> str | None:
    """The prompt given as an argument or a file; None for neither. Raises UsageError and PromptError."""
    if text is not None and path is not None:
        raise click.UsageError("--prompt and --prompt-file were given; allowed: one of them")
    if text == "":
        raise click.UsageError("--prompt is empty; allowed: text of one character or more")
    if path is None:
        return None if text is None else _plain_text(text)
    from ridgeplan.validate.prompts import read_prompt

    return read_prompt(path)


def prompt_tokens(source: str, workload: Workload, text: str | None, new_tokens: int) -> list[int]:
    """Token ids of a text, by default as many of Python's own text as the plan's context holds. No weights are read.

    Raises PromptError for a text with none, or with more than that context; WorkloadError for more new tokens than the
    plan's, and for tokens outside the model's vocabulary.
    """
    from ridgeplan.runtime.model.checkpoint import load_config
    from ridgeplan.runtime.model.source import model_source
    from ridgeplan.runtime.request import Request

    tokens = opening_tokens(source, None, workload.context) if text is None else _given(source, workload, text)
    Request.build(tokens, new_tokens, None).check(workload, load_config(model_source(source)).vocab_size)
    return tokens


def _given(source: str, workload: Workload, text: str) -> list[int]:
    from ridgeplan.validate.prompts import PromptError

    tokens, most = _first_tokens(source, text, workload.context + 1), workload.context
    if not 1 <= len(tokens) <= most:
        found = f"more than {most} tokens" if tokens else "no tokens of this model's vocabulary"
        raise PromptError(f"the prompt has {found}; allowed by the plan: 1 to {most}")
    return tokens


def _plain_text(text: str) -> str:
    """The text itself. Raises UsageError for bytes that are invalid in the terminal's encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError("--prompt holds bytes that are not UTF-8; allowed: text, or --prompt-file") from None
    return text


def opening_tokens(source: str, path: str | None, tokens: int) -> list[int]:
    """The first `tokens` token ids of a file (all of a shorter one), by default of Python's own text."""
    from ridgeplan.validate import prompts

    text = prompts.read_prompt(path) if path is not None else None
    return prompts.prompt_tokens(_tokenizer(source), tokens) if text is None else _first_tokens(source, text, tokens)


def _first_tokens(source: str, text: str, tokens: int) -> list[int]:
    from ridgeplan.validate.prompts import first_tokens

    return first_tokens(_tokenizer(source), tokens, text)


def _tokenizer(source: str) -> Any:
    from ridgeplan.runtime.model.checkpoint import load_tokenizer
    from ridgeplan.runtime.model.source import model_source

    return load_tokenizer(model_source(source))


def calibration_tokens(source: str, path: str | None) -> list[int] | None:
    """Token ids of a file to calibrate drafts with, with a note if it is short; None without a file."""
    if path is None:
        return None
    tokens = opening_tokens(source, path, CALIBRATION_TOKENS)
    if len(tokens) < FEW_CALIBRATION_TOKENS:
        click.echo(f"note: {path} has {len(tokens)} tokens; {FEW_CALIBRATION_TOKENS} or more calibrate well", err=True)
    return tokens
