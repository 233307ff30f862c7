"""`ridgeplan run`: executes a plan on a model and streams the text."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.engine_request import EngineRequest, loading_options, plan_or_model, sampling_options
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.model_inputs import check_request
from ridgeplan.dashboards.cli.output import echo, print_json
from ridgeplan.dashboards.cli.run_inputs import CONTEXT_STEP, PromptInput, planned_context, prompt_inputs, token_ids
from ridgeplan.planner.quantities import size_text, time_text

if TYPE_CHECKING:
    from ridgeplan.roofline.catalog.profile import Profile
    from ridgeplan.runtime import Engine, SamplingParams, Statistics
    from ridgeplan.validate.comparison import Comparison

STATISTICS = (
    "gamma", "rounds", "generated", "drafted", "judged", "accepted", "tokens_per_round", "acceptance", "accepted_share",
    "prefill_s", "decode_s", "draft_s", "verify_s", "flush_s", "idle_s", "first_use_s", "capture_s",
    "flushes", "rounds_at", "rounds_of", "ttft_ms", "tpot_ms", "peak_memory_bytes",
    "host_layers", "moved_layers", "wanted_loads", "loads", "overlap",
    "propose_s", "hit_rate", "proposal_acceptance", "drafts_per_pass",
)  # fmt: skip
MAX_MISFIT = 0.3  # relative error of decoding, at its acceptance, beyond which the calibration is doubted
TELLING_ROUNDS = 16  # fewest whose times say something, as the first ones allocate
AT_MEASURED = "tpot at the measured acceptance"  # the row of a plan that drafts, where its acceptance is no error
ATTRIBUTES = {"judged": "num_draft_tokens_verified"}  # keys of --json whose attribute has another name


@dataclass
class StartupTimes:
    """Seconds of each stage between a command and its first text, in order."""

    began: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def end(self, stage: str) -> None:
        """Ends a stage, which began when the one before ended."""
        self.seconds[stage] = time.perf_counter() - self.began - sum(self.seconds.values())

    def __str__(self) -> str:
        """`first text after 9.1 s: packages 4.2, model files and prompt 1.1, plan 0.3, weights 2.4, first pass 1.1`."""
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.seconds.items())
        return f"first text after {sum(self.seconds.values()):.1f} s: {stages}"


@command()
@plan_or_model
@click.option("--prompt", metavar="TEXT", help="Text to continue.")
@click.option(
    "--prompt-file", metavar="FILE",
    help="UTF-8 text to continue, - for standard input.  [default: a text that ships with Python]",
)  # fmt: skip
@click.option(
    "--prompts", metavar="FILE",
    help='Prompts as lines of JSON, a text, {"prompt": ...} or {"messages": [...]} each. Prints lines of JSON.',
)  # fmt: skip
@click.option("--chat", is_flag=True, help="Take the prompt as a user's message, in the model's chat template.")
@click.option("--system", metavar="TEXT", help="System message of the chat; implies --chat.")
@opt.repeated("--stop", "stop", str, "End the text before this word", metavar="TEXT")
@click.option("--truncate", is_flag=True, help="Keep the last tokens of a prompt beyond the plan's context.")
@opt.max_new_tokens
@sampling_options
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the sampling.")
@click.option("--ctx", type=opt.POSITIVE_TOKENS, help="Context to plan MODEL for.  [default: that of the prompts]")
@click.option("--batch", type=click.IntRange(1), help="Prompts that MODEL is planned to run together.  [default: 1]")
@loading_options
@opt.as_json
def run(
    prompt: str | None, prompt_file: str | None, prompts: str | None, chat: bool, system: str | None,
    stop: tuple[str, ...], truncate: bool, max_new_tokens: int | None, temperature: float, top_k: int | None,
    top_p: float | None, seed: int, as_json: bool, **engine_options: Any,
) -> None:  # fmt: skip
    """Execute a plan, or the fastest plan for MODEL on this machine, and stream the text with its time and memory.

    PLAN is a file of `ridgeplan plan -o`, MODEL a name of the catalog, a folder, a GGUF file or a hub id. Prompts and
    options are checked before weights are read. An adaptive gamma takes the times of rounds from --profile.

    Examples:
      ridgeplan run plan.json --prompt-file book.txt
      ridgeplan run model.gguf --system "Be brief." --prompt "Why is the sky blue?" --max-new-tokens 64
      ridgeplan run plan.json --model Qwen/Qwen2.5-0.5B --prompt-file book.txt --stop Chapter
      ridgeplan run plan.json --prompts questions.jsonl > answers.jsonl
    """
    if not all(stop):
        raise click.UsageError("--stop is empty; allowed: a text of one character or more")
    startup = StartupTimes()
    request = EngineRequest(**engine_options)
    inputs = prompt_inputs(prompt, prompt_file, prompts, system, chat=chat)
    if any(each.messages for each in inputs):
        request.require_template()
    # Importing torch takes seconds, so that all the above is checked first.
    from ridgeplan.runtime import SamplingParams
    from ridgeplan.runtime.text import TextStream
    from ridgeplan.validate.comparison import compare

    startup.end("packages")
    params = SamplingParams(temperature, top_k, top_p, seed)
    limit = opt.DEFAULT_RUN_TOKENS if max_new_tokens is None else max_new_tokens
    if request.saved is not None:
        plan = request.plan()
        startup.end("plan")  # with the calibration of a machine on which rounds adapt
        limit = min(limit, plan.workload.new_tokens) if max_new_tokens is None else limit
        ids = token_ids(inputs, request.source, plan.workload.context, cut=truncate)
        startup.end("model files and prompt")
    else:
        room = request.ctx or (CONTEXT_STEP if inputs[0].opening else max(1, request.shape.max_context - limit))
        ids = token_ids(inputs, request.source, room, cut=truncate)
        startup.end("model files and prompt")
        plan = request.plan(request.ctx or planned_context(ids, room), limit)
        startup.end("plan")
    check_request(ids, plan.workload, request.source, limit)  # before weights, which take minutes to load
    engine = request.load(plan)
    startup.end("weights")
    params = replace(params, stop_token_ids=engine.stop_token_ids)
    if prompts is not None:
        for line in answers(engine, inputs, ids, limit, params, stop):
            echo(json.dumps(line))
        return
    with closing(engine.stream(ids[0], limit, params)) as tokens:
        answer = TextStream(tokens, engine.tokenizer, stop, params.stop_token_ids)
        for piece in answer:
            if "first pass" not in startup.seconds:
                startup.end("first pass")
            if not as_json:
                echo(piece, nl=False)
    if as_json:
        print_json({
            "plan": engine.plan.to_dict(), "model": engine.source, "prompt_tokens": len(ids[0]),
            "tokens": answer.tokens, "text": answer.text, "startup_s": startup.seconds,
            "statistics": statistics_dict(engine.statistics),
        })  # fmt: skip
    else:
        echo(f"\n\n{summary(engine.statistics)}\n{startup}")
        profile, measured = request.machine
        if request.saved is None and profile and engine.statistics.rounds >= TELLING_ROUNDS:
            report_misfit(compare(engine.plan, engine, profile=profile), profile, measured)
        if not answer.text and not inputs[0].messages:
            echo("note: the model ended the text at once; with --chat it answers the prompt as a message", err=True)


def answers(
    engine: Engine, inputs: Sequence[PromptInput], ids: Sequence[list[int]], limit: int, params: SamplingParams,
    stop: Sequence[str],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A line for each prompt in order, as many prompts at once as the plan's batch."""
    from ridgeplan.runtime.text import TextStream

    batch = engine.plan.workload.batch
    for first in range(0, len(ids), batch):
        generation = engine.generate(ids[first : first + batch], limit, params)
        for index, tokens in enumerate(generation.tokens, first):
            answer = TextStream(tokens, engine.tokenizer, stop, params.stop_token_ids)
            text = "".join(answer)
            name = {} if inputs[index].name is None else {"id": inputs[index].name}
            yield {
                "index": index, **name, "text": text, "finish_reason": answer.finish_reason,
                "prompt_tokens": len(ids[index]), "tokens": tokens,
            }  # fmt: skip


def report_misfit(compared: Comparison, profile: Profile, measured: Path | None) -> bool:
    """Says on stderr that decoding takes another time than the profile says. `measured`, its new file, is not kept.

    Whether it removed that file.
    """
    note = misfit_note(compared, profile)
    if dropped := note is not None and measured is not None:
        measured.unlink(missing_ok=True)
    if note:
        echo(f"note: {note}{'; the calibration is not kept' * dropped}", err=True)
    return dropped


def misfit_note(compared: Comparison, profile: Profile) -> str | None:
    """What it means where decoding takes another time than the profile says; None where it does not."""
    drafting = any(row.name == AT_MEASURED for row in compared.rows)
    error = compared.row(AT_MEASURED if drafting else "tpot").error
    if error is None or abs(error) <= MAX_MISFIT:
        return None
    what = "decoding" if drafting else "plain decoding"
    taken = f"{what} took {1 / (1 + error):.2g}x the time that the calibration of {profile.date} predicts"
    if error > 0:
        return f"{taken}: it was busy then, or this is another machine; `ridgeplan calibrate --quick` measures it again"
    if compared.busy:
        return f"{taken}: other programs slow the machine now, so compare the plans with each other only"
    return f"{taken}: this is another machine now, or it is busy; `ridgeplan calibrate --quick` measures it again"


def statistics_dict(statistics: Statistics) -> dict[str, Any]:
    """The figures of a generation as JSON values."""
    return {name: getattr(statistics, ATTRIBUTES.get(name, name)) for name in STATISTICS}


def summary(statistics: Statistics) -> str:
    """The figures of a generation in a few lines."""
    stats, memory = statistics, statistics.peak_memory_bytes
    count = f"{stats.generated} token{'' if stats.generated == 1 else 's'}"
    each = f", {time_text(stats.tpot_ms)} each" if stats.rounds else ""
    lines = [
        f"{count}{each} after {time_text(stats.ttft_ms)} of prefill, "
        f"peak memory {'not measured' if memory is None else size_text(memory)}"
    ]
    if stats.gamma and stats.rounds:
        flushes = f", {stats.flushes} flush{'' if stats.flushes == 1 else 'es'}" if stats.flushes else ""
        by_pass = stats.draft_passes > 0
        each = f"{1e3 * (stats.draft_s if by_pass else stats.propose_s):.3g} ms {'each' if by_pass else 'together'}"
        lines += [
            f"{stats.rounds} round{'s' * (stats.rounds != 1)} of {_drafts_text(stats)} ({each}) and a verification "
            f"({1e3 * stats.verify_s:.3g} ms), {stats.tokens_per_round:.2f} tokens per round{flushes}",
            f"acceptance {stats.acceptance:.3f} (conditional), {stats.accepted_share:.3f} of all drafts",
        ]
        if stats.proposal_rounds:
            drafted = f"; a pass drafts {stats.drafts_per_pass:.2f} tokens" if by_pass else ""
            accepted = f"acceptance {stats.proposal_acceptance:.3f} (conditional){drafted}"
            lines.append(f"the drafter had proposals in {stats.hit_rate:.0%} of the rounds, {accepted}")
    if stats.host_layers:
        moved = f", {stats.moved_layers} of them moved during decoding" if stats.moved_layers else ""
        hits = f"; {stats.overlap:.0%} of the selected tokens were already on the device" if stats.wanted_loads else ""
        lines.append(f"{stats.host_layers} layers on the host{moved}{hits}")
    if stats.first_use_s:
        lines.append(f"first use of the kernels before the prefill took {stats.first_use_s:.3g} s")
    if stats.capture_s:
        lines.append(f"graph capture before the first round took {stats.capture_s:.3g} s")
    if stats.idle_s:
        lines.append(f"the device waits {1e6 * stats.idle_s / stats.rounds:.3g} us for the host between rounds")
    return "\n".join(lines)


def _drafts_text(statistics: Statistics) -> str:
    """`4 drafts`; where rounds adapt also their tiers: `0 to 10 drafts (0 in 12, 4 proposed in 34 rounds)`."""
    used = statistics.rounds_of
    if len(used) < 2:
        return f"{statistics.gamma} draft{'s' * (statistics.gamma != 1)}"
    tiers = ("" if not kind.depth else " proposed" if kind.proposes_to_target else " in a cascade" for kind, _ in used)
    rounds = ", ".join(f"{kind.gamma}{tier} in {count}" for (kind, count), tier in zip(used, tiers, strict=True))
    return f"{used[0][0].gamma} to {used[-1][0].gamma} drafts ({rounds} rounds)"
