"""`ridgeplan chat`: a conversation in the terminal, whose KV cache is kept from turn to turn."""

from __future__ import annotations

import secrets
import sys
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli.engine_request import EngineRequest, conversation_options, sampling_options
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo
from ridgeplan.planner.quantities import time_text

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine, SamplingParams

RESET, HELP = "/reset", "/reset starts a new chat, /help says this, Ctrl-C stops an answer, Ctrl-D ends the chat."


@command()
@conversation_options
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@sampling_options
@click.option("--seed", type=click.IntRange(0), help="Seed of the sampling.  [default: another one for each answer]")
def chat(
    system: str | None, temperature: float, top_k: int | None, top_p: float | None, seed: int | None,
    max_new_tokens: int | None, **engine_options: Any,
) -> None:  # fmt: skip
    """Talk with a model that has a chat template. The KV cache is kept between turns.

    /reset starts a new chat, Ctrl-C stops an answer, and Ctrl-D ends the chat. Without a terminal, each line of
    standard input is a message.

    Examples:
      ridgeplan chat model.gguf --system 'Be brief.'
      ridgeplan chat plan.json --model Qwen/Qwen2.5-0.5B-Instruct --temperature 0.7
      ridgeplan chat HuggingFaceTB/SmolLM2-135M-Instruct --ctx 2k
    """
    request = EngineRequest(**engine_options, new_tokens=max_new_tokens)
    request.require_template()
    from ridgeplan.runtime import SamplingParams  # torch takes seconds, so that all the above is checked first

    params = SamplingParams(temperature, top_k, top_p, seed or 0)
    Conversation(request.conversation(), params, system, vary_seed=seed is None).talk()


class Conversation:
    """The turns of a chat. vary_seed: draw another seed for each answer."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None, *, vary_seed: bool) -> None:
        self._engine, self._params, self._vary_seed = engine, params, vary_seed
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def talk(self) -> None:
        """Answers each line of standard input until it ends."""
        if sys.stdin.isatty():
            echo(HELP, err=True)
        while (message := self._read()) is not None:
            if message == RESET:
                self._messages = list(self._opening)
            elif message == "/help":
                echo(HELP, err=True)
            elif message:
                self._answer(message)

    def _read(self) -> str | None:
        """The next line without surrounding blanks; None at the end. Ctrl-C on a prompt gives an empty one."""
        shown = "> " if sys.stdin.isatty() else ""
        try:
            return input(shown).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            echo("", err=True)
            return ""

    def _answer(self, message: str) -> None:
        """Streams the answer to a message. One that fails, or is stopped before its first piece, leaves no turn."""
        from ridgeplan.runtime.chat_template import ChatTemplateError
        from ridgeplan.runtime.errors import WorkloadError

        engine, pieces = self._engine, []
        messages = [*self._messages, {"role": "user", "content": message}]
        params = replace(self._params, seed=secrets.randbits(62)) if self._vary_seed else self._params
        try:
            with closing(engine.chat(messages, sampling=params, reuse_prefix=True)) as stream:
                for piece in stream:
                    pieces.append(piece)
                    echo(piece, nl=False)
        except KeyboardInterrupt:
            echo("\n(stopped)", err=True)
        except (WorkloadError, ChatTemplateError) as error:
            echo(f"error: {error}; {RESET} starts a new chat", err=True)
            return
        else:
            echo("")
            echo(turn_text(engine), err=True)
        if pieces:
            self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def turn_text(engine: Engine) -> str:
    """The figures of an answer in one line."""
    stats = engine.statistics
    (prompt,) = stats.prompt_tokens
    kept = f", {stats.reused_tokens:,} of them still in the cache" if stats.reused_tokens else ""
    return (
        f"[{stats.generated} tokens, {time_text(stats.tpot_ms)} each after {time_text(stats.ttft_ms)}; "
        f"{prompt:,} tokens of context{kept}]"
    )
