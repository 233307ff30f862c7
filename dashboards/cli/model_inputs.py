"""The model and the texts that commands run on, from what their options say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ridgeplan.planner import Plan
from ridgeplan.planner.acceptance import same_model

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine

EMBEDDED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CALIBRATION_TOKENS = 8192  # 2048 are as good for short contexts; for long ones acceptance rises by another 0.007
FEW_CALIBRATION_TOKENS = 1000  # fewer fit weights to themselves


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
    from ridgeplan.runtime.model.checkpoint import load_tokenizer, model_source
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
