"""`ridgeplan bench decode` and `suite`: decoding end to end at a large model's size, with real acceptance."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.model_inputs import calibration_tokens, embedded_or
from ridgeplan.dashboards.cli.output import echo, number, print_json, print_table, progress
from ridgeplan.dashboards.files import write_json
from ridgeplan.planner import Plan, Workload
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import load_profile
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.plan.plan import MAX_BATCH, MAX_TOKENS
from ridgeplan.roofline.plan.presets import PRESETS, preset
from ridgeplan.roofline.plan.support import allows_chunks, only_estimated
from ridgeplan.validate.decode_bench.report import ABLATION, PLAIN, DecodeCase, suite_cases, with_plain

if TYPE_CHECKING:
    from ridgeplan.validate.decode_bench.breakdown import Breakdown, ClassTime
    from ridgeplan.validate.decode_bench.report import DecodeRow


def print_breakdown(row: DecodeRow, breakdown: Breakdown) -> None:
    """Prints a table of a round's classes of operations, and the names of kernels without a class."""
    case = row.case
    title = f"\n{case.preset}, context {case.context}, batch {case.batch}, gamma {row.gamma}: one round"
    columns = ("operation", "launches", "measured us", "predicted us", "other kernels")
    print_table(title, columns, map(breakdown_texts, breakdown.rows))
    echo(
        f"kernels take {number(breakdown.kernels_us)} us, {number(breakdown.overlap_us)} us of them beside others; a "
        f"round takes {number(breakdown.round_us)} us ({number(breakdown.traced_round_us)} us while traced, "
        f"{number(breakdown.predicted_us)} us predicted)"
    )


def breakdown_texts(row: ClassTime) -> tuple[str, ...]:
    """The cells of one class."""
    longest = sorted(row.kernels, key=lambda name: -row.kernels[name])
    names = ", ".join(f"{short_name(name)} {number(row.kernels[name])}" for name in longest)
    times = number(row.measured_us), number(row.predicted_us)
    return f"{row.part} {row.operation}", f"{row.launches:.4g}", *times, names if row.operation == "other" else ""


def short_name(kernel: str) -> str:
    """A kernel's name without namespaces and without template arguments other than a functor."""
    plain = kernel.replace("(anonymous namespace)::", "")
    functor = re.search(r"\w+[Ff]unctor", plain)
    name = re.split(r"[<(]", plain)[0].split("::")[-1].removeprefix("void ")
    return f"{name} of {functor[0]}" if functor else name


SUITE_WORKLOADS = ("4096x1", "32768x1", "32768x8", "98304x1", "98304x4")  # Python's own text is long enough
SUITE_GAMMAS = (2, 4, 6)
COLUMNS = (
    "workload", "TPOT ms", "over plain", "over vLLM", "tokens/round", "acceptance", "TTFT s", "tokens/s", "peak GB",
    "plan",
)  # fmt: skip


class WorkloadParam(click.ParamType):
    """A workload such as `32768x8`: context x batch."""

    name = "CONTEXTxBATCH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """`32768x8` as (32768, 8)."""
        if isinstance(value, tuple):
            return value
        numbers = re.fullmatch(r"(\d{1,9})x(\d{1,9})", str(value), re.ASCII)
        context, batch = map(int, numbers.groups()) if numbers else (0, 0)
        if 1 <= context <= MAX_TOKENS and 1 <= batch <= MAX_BATCH:
            return context, batch
        ranges = f"context up to {MAX_TOKENS} and batch up to {MAX_BATCH}"
        return self.fail(f"{value!r} is not a workload; allowed: {ranges}, such as 32768x8", param, ctx)


# PRESET[@SHARE][/CHUNK]:CONTEXTxBATCH[:GAMMA|:0-GAMMA]
CASE = re.compile(
    r"(?P<preset>[^@/:]*)(@(?P<share>0\.\d{1,6})?)?(/(?P<chunk>[1-9]\d{0,8})?)?:(?P<workload>[^:]*)"
    r"(:((?P<adaptive>0-)?(?P<gamma>[1-9]\d?))?)?",
    re.ASCII,
)


class CaseParam(click.ParamType):
    """One plan at one workload."""

    name = "PRESET[@SHARE][/CHUNK]:CONTEXTxBATCH[:GAMMA|:0-GAMMA]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> DecodeCase:
        """`quantspec:32768x8:3`, `quantspec:32768x8:0-6` for a gamma that adapts, or `dapq@0.25/4096:131072x1`, which
        keeps a quarter of the prompt and evicts after every 4096 tokens of it.

        Without a gamma or a share it is the preset's own, and without a chunk the prompt is processed at once.
        """
        if isinstance(value, DecodeCase):
            return value
        runnable = [preset for preset in executable_presets() if preset != PLAIN]
        case = CASE.fullmatch(str(value))
        if case is None or case["preset"] not in runnable or not _is_allowed(case):
            allowed = (
                f"one of {', '.join(runnable)}; if it evicts, a share below 1 and, where its policy allows chunks, the "
                f"tokens of one; a workload; and if it drafts, a gamma from 1 to {MAX_GAMMA}, or 0-GAMMA"
            )
            example = "such as quantspec:32768x8:3 or dapq@0.25:32768x8"
            return self.fail(f"{value!r} is not a case; allowed: {allowed}, {example}", param, ctx)
        sizes, gamma = WorkloadParam().convert(case["workload"], param, ctx), case["gamma"]
        drafts, share, chunk = int(gamma) if gamma else None, float(case["share"] or 0), int(case["chunk"] or 0)
        return DecodeCase(case["preset"], *sizes, drafts, bool(case["adaptive"]), share, chunk)


def _is_allowed(case: re.Match[str]) -> bool:
    """Whether the preset evicts by a share or in chunks, and drafts, where the case says so, and within the limits."""
    plan = preset(case["preset"], Workload("any", "any", 1))
    return (
        (not case["share"] or (plan.eviction.active and float(case["share"]) > 0))
        and (not case["chunk"] or (allows_chunks(plan) and int(case["chunk"]) <= MAX_TOKENS))
        and (not case["gamma"] or (plan.speculation.active and int(case["gamma"]) <= MAX_GAMMA))
    )


def executable_presets() -> list[str]:
    """Presets that the runtime executes; the others can only be estimated."""
    any_workload = Workload("any", "any", 2**17)
    plans = {name: preset(name, any_workload) for name in PRESETS}
    return [name for name, plan in plans.items() if not only_estimated(plan)]


shared = opt.combine(
    click.option("--model-shape", required=True,
                 help="Large model whose sizes are run: a catalog name or a folder with a config.json."),
    click.option("--model",
                 help="Small model that computes the tokens.  [default: the embedded SmolLM2-135M-Instruct]"),
    opt.prompt_file,
    click.option("--random-tokens", is_flag=True, help="Continue random tokens, which drafts predict badly."),
    click.option("--new-tokens", type=opt.POSITIVE_TOKENS, default=256, help="Tokens to generate."),
    click.option("--temperature", type=click.FloatRange(0), default=1.0, help="Temperature of the sampling."),
    opt.calibration_file,
    opt.profile_file,
    click.option("--breakdown", is_flag=True, help="Show the time of each kernel in a round beside its prediction."),
    opt.json_output,
    opt.as_json,
)  # fmt: skip


@command()
@click.option("--ctx", "context", type=opt.POSITIVE_TOKENS, required=True, help="Prompt length in tokens.")
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=1, help="Sequences that run together.")
@click.option("--preset", "chosen", type=click.Choice(executable_presets()), default="quantspec", help="Preset to run.")
@click.option("--gamma", type=click.IntRange(1, MAX_GAMMA), help="Drafts per round.  [default: the preset's]")
@click.option("--adaptive", is_flag=True, help="Adapt gamma to the acceptance, up to that number of drafts.")
@shared
def decode(context: int, batch: int, chosen: str, gamma: int | None, adaptive: bool, **rest: Any) -> None:
    """Time plain decoding and one preset with a small real model inflated to a large shape.

    The two run one after the other, so that each has the whole memory.

    Examples:
      ridgeplan bench decode --model-shape Llama-3.1-8B --ctx 32k
      ridgeplan bench decode --model-shape Llama-3.1-8B --ctx 128k --batch 4 --preset quantspec --breakdown
      ridgeplan bench decode --model-shape Llama-3.1-8B --ctx 32k --gamma 4 --output decode.json
    """
    case = DecodeCase(chosen, context, batch, gamma, adaptive and chosen != PLAIN)
    cases = list(dict.fromkeys((DecodeCase(PLAIN, context, batch, gamma), case)))
    report(cases, **rest)


@command()
@opt.repeated("--workload", "workloads", WorkloadParam(), "Context and batch", SUITE_WORKLOADS)
@opt.repeated("--gamma", "gammas", click.IntRange(1, MAX_GAMMA), "Drafts per round", SUITE_GAMMAS)
@opt.repeated("--preset", "presets", click.Choice(ABLATION), "Preset to run beside plain decoding", ABLATION)
@opt.repeated("--case", "cases", CaseParam(), "Run only this case and plain decoding at its workload")
@opt.repeated("--plan", "plans", opt.PlanFile(), "Run this plan file like a case, at its context and batch")
@shared
def suite(
    workloads: Sequence[tuple[int, int]], gammas: Sequence[int], presets: Sequence[str], cases: Sequence[DecodeCase],
    plans: Sequence[Plan], **rest: Any,
) -> None:  # fmt: skip
    """Time plain decoding, an INT8 cache, and QuantSpec with either or both of its parts (its Fig 4).

    All presets run with all gammas at all workloads, unless cases or plans are given. They run one after the other, so
    that each has the whole memory. The table marks runs whose spread shows that the machine was busy.

    Examples:
      ridgeplan bench suite --model-shape Llama-3.1-8B --output decode.json
      ridgeplan bench suite --model-shape Llama-3.1-8B --workload 32768x1 --gamma 4
      ridgeplan bench suite --model-shape Llama-3.1-8B --preset quantspec --json
    """
    chosen = [*cases, *map(DecodeCase.of, plans)]
    report(with_plain(chosen) if chosen else suite_cases(workloads, sorted(set(gammas)), presets), **rest)


def report(
    cases: Sequence[DecodeCase], model_shape: str, model: str | None, prompt_file: str | None, random_tokens: bool,
    new_tokens: int, temperature: float, calibration: str | None, profile: str | None, breakdown: bool,
    output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Runs the cases, saves the report and prints it.

    Raises NoBreakdown for a breakdown on a CPU, and UsageError for options that exclude each other.
    """
    if breakdown and any(case.adaptive for case in cases):
        raise click.UsageError("--breakdown cannot be combined with an adaptive gamma; allowed: a fixed gamma")
    if random_tokens and prompt_file is not None:
        raise click.UsageError("--random-tokens and --prompt-file cannot be combined; allowed: one of them")
    shape = load_shape(model_shape)
    calibrated = this_machine() if profile is None else load_profile(profile)
    # Importing torch takes seconds, so the options are checked first.
    from ridgeplan.validate.decode_bench.breakdown import breakdowns, require_cuda
    from ridgeplan.validate.decode_bench.inflated_model import InflatedModel
    from ridgeplan.validate.decode_bench.report import DecodeOptions, bench_decode
    from ridgeplan.validate.prompts import read_prompt

    if breakdown:
        require_cuda(device())
    small = embedded_or(model)
    text = read_prompt(prompt_file) if prompt_file is not None else None
    fitted = calibration_tokens(small, calibration) or ()
    options = DecodeOptions(calibrated, new_tokens, text, random_tokens, temperature, fitted)
    with progress("inflating the model") as on_progress:
        inflated = InflatedModel.load(small, shape, device())
        result = bench_decode(inflated, cases, options, on_progress, lambda part: write_json(output, part.to_dict()))
    data = result.to_dict()
    if not as_json:
        print_report(data)
    if breakdown:
        rounds = breakdowns(inflated, result.rows, options)
        pairs = zip(data["rows"], rounds, strict=True)
        data["rows"] = [{**row, "breakdown": parts.to_dict()} for row, parts in pairs]
        write_json(output, data)
        if not as_json:
            for case_row, parts in zip(result.rows, rounds, strict=True):
                print_breakdown(case_row, parts)
    if as_json:
        print_json(data)


def device() -> str:
    """The device that models run on."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def print_report(report: Mapping[str, Any]) -> None:
    """Prints a table with a line for each case of a report's JSON."""
    title = f"{report['shape']} on {report['device']}, temperature {report['temperature']}, {report['date']}"
    print_table(f"{title}; in brackets: predicted", COLUMNS, map(row_texts, report["rows"]))


def row_texts(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of one case under `COLUMNS`; TPOT is predicted at the measured acceptance."""
    figures, drafting = row["measured"], row["gamma"] > 0
    predicted = {figure["name"]: figure["predicted"] for figure in row["comparison"]}
    faster = {figure["name"]: figure["measured"] for figure in row["comparison"]}["speed-up over plain decoding"]
    tpot_ms = predicted["tpot at the measured acceptance" if drafting else "tpot"]
    peak = figures["peak_memory_bytes"]
    return (
        f"{row['context']}x{row['batch']}", f"{figures['tpot_ms']:.2f} ({tpot_ms:.2f})",
        ("busy" if row.get("busy") else "") if faster is None else f"{faster:.2f}x",
        "" if row["over_vllm"] is None else f"{row['over_vllm']:.2f}x",
        f"{figures['tokens_per_round']:.2f} ({predicted['tokens per round']:.2f})" if drafting else "",
        f"{figures['acceptance']:.3f} ({predicted['acceptance']:.3f})" if drafting else "",
        f"{figures['ttft_ms'] / 1e3:.2f} ({predicted['prefill'] / 1e3:.2f})",
        f"{_rate(row, figures['ttft_ms'], figures['tpot_ms']):.0f} ({_rate(row, predicted['prefill'], tpot_ms):.0f})",
        "" if peak is None else f"{peak / 1e9:.1f} ({predicted['peak memory'] / 1e9:.1f})", plan_text(row),
    )  # fmt: skip


def _rate(row: Mapping[str, Any], ttft_ms: float, tpot_ms: float) -> float:
    """New tokens per second of whole requests, their prompts included: a case generates as many for each sequence."""
    generated = row["measured"]["generated"]
    return 1e3 * generated / (ttft_ms + generated / row["batch"] * tpot_ms)


def plan_text(row: Mapping[str, Any]) -> str:
    """The preset of a case, with the share of the prompt that it keeps, its chunks and its gamma where given."""
    kept = f" {row['share']:.0%}" if row.get("share") else ""
    kept += f" in chunks of {row['chunk']}" if row.get("chunk") else ""
    gamma = f", gamma {'adaptive up to ' if row.get('adaptive') else ''}{row['gamma']}" if row["gamma"] else ""
    return f"{row['preset']}{kept}{gamma}"
