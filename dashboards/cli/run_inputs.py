"""What `ridgeplan run` runs: a saved plan or a model that is planned now, and prompts from options or a JSONL file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.model_inputs import model_tokenizer, opening_tokens, prompt_text
from ridgeplan.dashboards.cli.output import echo
from ridgeplan.planner import Plan, SearchOptions
from ridgeplan.planner.quantities import time_text, tokens_text
from ridgeplan.roofline.catalog.files import MAX_DOCUMENT_BYTES, existing_path, expanded
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.validation import brief

if TYPE_CHECKING:
    from ridgeplan.runtime.chat_template import TemplateProcess

CONTEXT_STEP = 1024  # plans for a model have contexts of whole steps, so that kernels are tuned once for close lengths
STDIN = "-"
LINES_ALLOWED = 'a text in quotes, {"prompt": text} or {"messages": [{"role": ..., "content": ...}]}, with any "id"'


class PlanOrModel(opt.SavedPlanFile):
    """A plan file, whose name ends in .json, or a model to plan for this machine."""

    name = "plan.json|model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reads a plan; the name of a model stays a text. Raises UsageError for what reads like a prompt."""
        if len(str(value).split()) > 1 and existing_path(str(expanded(str(value)))) is None:
            raise click.UsageError(
                f"{brief(value)} is no plan or model; a prompt goes to --prompt, after PLAN or MODEL"
            )
        return super().convert(value, param, ctx) if str(value).endswith(".json") else value


def model_id(name: str, shape: ModelShape) -> str:
    """What the runtime loads for a name: of a catalog's name the hub id; paths and hub ids stay."""
    from ridgeplan.runtime.model.source import EMBEDDED_NAMES

    if "/" in name or name.lower() in EMBEDDED_NAMES or existing_path(str(expanded(name))) is not None:
        return name
    return shape.name


class PromptsError(ValueError):
    """A line of a file of prompts that is none."""


@dataclass(frozen=True)
class PromptInput:
    """A prompt as a user gives it: a text to continue, or a conversation to answer.

    text: None for the opening of a text that ships with Python. name: the "id" of a line of JSONL.
    """

    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    name: Any = None

    @property
    def opening(self) -> bool:
        """Whether it is the opening of the text that ships with Python."""
        return self.text is None and not self.messages

    def tokens(self, source: str, context: int, process: TemplateProcess, *, cut: bool) -> list[int]:
        """Its token ids. No weights are read.

        process: renders the model's chat template. cut: keep the last `context` tokens of a longer prompt, which is
        refused otherwise. Raises PromptError, and ChatTemplateError for a conversation that the template does not take.
        """
        from ridgeplan.runtime.chat_template import chat_text
        from ridgeplan.runtime.text import encoded
        from ridgeplan.validate.prompts import PromptError, first_tokens

        if self.opening:
            return opening_tokens(source, None, context)
        tokenizer = model_tokenizer(source)
        if self.messages:
            ids = encoded(tokenizer, chat_text(tokenizer, self.messages, process), special_tokens=False)
        else:
            text = self.text or ""
            ids = encoded(tokenizer, text) if cut else first_tokens(tokenizer, context + 1, text)
        if not 1 <= len(ids) <= context and not (ids and cut):
            count = f"more than {context} tokens" if ids else "no tokens of this model's vocabulary"
            otherwise = ", or any with --truncate" if ids else ""
            raise PromptError(f"the prompt has {count}; allowed by the plan: 1 to {context}{otherwise}")
        return ids[-context:]


def token_ids(inputs: Sequence[PromptInput], source: str, context: int, *, cut: bool) -> list[list[int]]:
    """The token ids of each prompt, as `PromptInput.tokens` has them, from one process for all templates."""
    from ridgeplan.runtime.chat_template import TemplateProcess

    with closing(TemplateProcess()) as process:
        return [each.tokens(source, context, process, cut=cut) for each in inputs]


def prompt_inputs(
    prompt: str | None, prompt_file: str | None, prompts: str | None, system: str | None, *, chat: bool
) -> list[PromptInput]:
    """The prompts of the options. Raises UsageError, PromptError and PromptsError."""
    if prompts is not None and (prompt is not None or prompt_file is not None):
        raise click.UsageError("--prompts cannot be combined with --prompt and --prompt-file; allowed: one of them")
    if prompts is not None:
        inputs = _read_lines(prompts)
    elif prompt_file == STDIN and prompt is None:
        inputs = [PromptInput(_read_stdin())]
    else:
        inputs = [PromptInput(prompt_text(prompt, prompt_file))]
    if system is None and not chat:
        return inputs
    if inputs[0].opening:
        raise click.UsageError("--chat and --system need a message; allowed: with --prompt, --prompt-file or --prompts")
    return [_conversation(each, system) for each in inputs]


def _conversation(given: PromptInput, system: str | None) -> PromptInput:
    """The prompt as a user's message, after the system's."""
    messages = given.messages or ({"role": "user", "content": given.text or ""},)
    if system is not None:
        if messages[0].get("role") == "system":
            raise click.UsageError("--system was given, but messages begin with a system's; allowed: one of them")
        messages = ({"role": "system", "content": system}, *messages)
    return PromptInput(messages=messages, name=given.name)


def planned_context(prompts: Sequence[Sequence[int]], limit: int) -> int:
    """Whole steps of tokens that hold the longest prompt, at most `limit`."""
    longest = max(map(len, prompts))
    return min(limit, -(-longest // CONTEXT_STEP) * CONTEXT_STEP)


def _read_stdin() -> str:
    from ridgeplan.validate.prompts import PromptError

    try:
        text = sys.stdin.read(MAX_DOCUMENT_BYTES + 1)
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text: byte {error.start} is wrong") from error
    if not text.strip():
        raise PromptError("standard input is empty; allowed: text of one character or more")
    if len(text) > MAX_DOCUMENT_BYTES:
        raise PromptError(f"standard input is too long; allowed: up to {MAX_DOCUMENT_BYTES} characters")
    return text


def _read_lines(path: str) -> list[PromptInput]:
    """The prompts of a JSONL file, or of standard input for `-`; empty lines are skipped."""
    from ridgeplan.validate.prompts import read_prompt

    text = _read_stdin() if path == STDIN else read_prompt(Path(path))
    return [_line(line, f"line {number} of {path}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _line(line: str, where: str) -> PromptInput:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptsError(f"{where} is not JSON: {str(error)[:100]}; allowed: {LINES_ALLOWED}") from error
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or set(fields) - {"prompt", "messages", "id"}:
        raise PromptsError(f"{where} is {brief(value)}; allowed: {LINES_ALLOWED}")
    text, messages = fields.get("prompt"), fields.get("messages")
    if (text is None) == (messages is None) or not (
        isinstance(messages, list) and messages if text is None else isinstance(text, str) and text
    ):
        raise PromptsError(f"{where} has no prompt; allowed: {LINES_ALLOWED}")
    return PromptInput(text, tuple(messages or ()), fields.get("id"))


def plan_for_run(model: str, context: int, search: SearchOptions) -> Plan:
    """The fastest plan that runs a model on this machine; a note on stderr names it. Raises as `recommend` does."""
    recommendation = planner.recommend(model, "auto", context, search)
    workload, predicted = recommendation.plan.workload, recommendation.predicted
    disturbed = ", while other programs ran" * (isinstance(search.profile, Profile) and search.profile.disturbed)
    echo(
        f"note: planned for {tokens_text(workload.context)} tokens of context and {workload.new_tokens} new ones: "
        f"{recommendation.name}, {time_text(predicted.best.tpot_ms)} per token [{predicted.source}{disturbed}]",
        err=True,
    )
    return recommendation.plan
