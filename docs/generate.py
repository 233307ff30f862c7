"""Generates the tables in README.md and docs/, and the picture of an answer: `make docs`. --check lists stale files.

The text between `<!-- generated: NAME ARGUMENTS -->` and `<!-- end -->` is the result of the function NAME below. All
other text is written by hand and is kept.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import acceptance_tables
import accuracy_tables
import cli_tables
import drafter_tables
import mechanism_tables
import model_tables
import offload_tables
import parallel_tables
import readme_tables
import study_tables
import traffic_tables
from readme_tables import RESULTS, decoding_files, result, table
from rich.console import Console
from rich.text import Text

from ridgeplan.dashboards.cli import bench, bench_decode, papers, quality
from ridgeplan.dashboards.cli.output import number
from ridgeplan.dashboards.cli.plan import answer_text
from ridgeplan.planner import recommend
from ridgeplan.planner.acceptance.drafter_rows import drafter_rows
from ridgeplan.planner.engines.measurements import shipped_measurements
from ridgeplan.planner.engines.rates import engine_profile, error
from ridgeplan.planner.export.rules import rules
from ridgeplan.planner.quality import AGREEMENT, EARLY_RECALL, FIDELITY, LATE_RECALL
from ridgeplan.roofline.catalog.profile import load_profile
from ridgeplan.roofline.execution import runs_integers
from ridgeplan.roofline.latency import INTEGER_CLASSES, RateTerms
from ridgeplan.validate.papers.comparison import Cell, compare_all, targets_of
from ridgeplan.validate.papers.rows import list_engines
from ridgeplan.validate.suite.report import SuiteReport, summaries

ROOT = Path(__file__).parents[1]
PROFILES = ROOT / "roofline" / "catalog" / "profiles"
LONG_OUTPUT_MEASURES = (FIDELITY, AGREEMENT, EARLY_RECALL, LATE_RECALL)
BLOCK = re.compile(r"(<!-- generated: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def measured_with(name: str) -> str:
    """Where and with what a file of results was measured."""
    document = result(name)
    software = ", ".join(f"{package} {version}" for package, version in document["software"].items())
    return f"{document['device']}, {document['date']}, {software}; `validate/results/{name}.json`"


def classes(name: str) -> str:
    """Utilization and launch time of each kernel class of a shipped calibration profile, at one row and at 64."""
    profile = load_profile(PROFILES / f"{name}.json")
    rows = []
    for kind, rates in profile.classes.items():
        single, many = (RateTerms.of(rates).at_rows(count) for count in (1, 64))
        ends = [
            cell for at in (single, many) for cell in (f"{at.bandwidth_utilization:.0%}", f"{1e6 * at.launch_s:.1f}")
        ]
        if kind in INTEGER_CLASSES:
            ends[2:] = "", ""  # of up to 4 rows
        rows.append((kind, *ends, f"{rates.compute_utilization:.0%}", f"{rates.spread:.0%}"))
    head = f"{profile.device}, {profile.date}, torch {profile.software['torch']}; `{name}.json`"
    columns = (
        "class", "bandwidth, 1 row", "launch, us", "bandwidth, 64 rows", "launch, us", "compute", "spread of the fit",
    )  # fmt: skip
    return f"{head}\n\n{table(columns, rows)}"


def drafter_acceptance() -> str:
    """Every row of a drafter: hits, conditional acceptance, and tokens of a pass."""
    rows = [
        (
            row.name, row.text or "other", row.model, f"{row.context}" if row.context else "not stated",
            f"{row.depth}", f"{row.hit:.0%}" if row.hit < 1 else "", f"{row.proposal_acceptance:.2f}",
            f"{row.pass_tokens:.2f}", row.source, row.where,
        )
        for row in drafter_rows()
    ]  # fmt: skip
    columns = (
        "drafter",
        "text",
        "model",
        "context",
        "proposals",
        "hits",
        "acceptance",
        "tokens a pass",
        "source",
        "where",
    )
    return table(columns, rows)


def engine_times() -> str:
    """Measured steps of vLLM beside those of the rates that were fitted to them."""
    measured = shipped_measurements()
    profile = engine_profile("vllm", measured.hardware)
    rows = []
    for row in measured.rows:
        off = error(profile.rates, measured, row)
        size = row.model.partition("/")[2], f"{row.context} x {row.batch}", row.weights, row.kv
        times = f"{row.tpot_ms:.2f}", f"{row.tpot_ms * (1 + off):.2f}", f"{off:+.1%}"
        rows.append((*size, *times, "held out" if row.held_out else ""))
    columns = ("model", "context x batch", "weights", "KV", "measured, ms", "predicted, ms", "error", "")
    rates = profile.rates
    shares = [f"{width}-bit weights {1 / rates.linear_inverse[width]:.0%}" for width in (16, 8)]
    shares += [f"{width}-bit experts {1 / rates.expert_inverse[width]:.0%}" for width in (16, 4)]
    shares += [f"{kind} KV {1 / rate.inverse:.0%}" for kind, rate in rates.kv.items()]
    fit = (
        f"{1e6 * rates.launch_s:.1f} us a launch, {1e6 * rates.expert_launch_s:.0f} us more for the experts of a "
        f"layer, {1e6 * rates.packed_expert_launch_s:.0f} us with 4 bits; of the bandwidth, {', '.join(shares)}. "
        f"{measured.source[0].upper()}{measured.source[1:]}."
    )
    return f"{table(columns, rows)}\n\n{fit}"


def engine_rules() -> str:
    """Every known incompatibility with its threads."""
    rows = []
    for rule in rules():
        threads = ", ".join(f"[{_thread(source)}]({source})" for source in rule.sources)
        rows.append((", ".join(rule.engines), rule.says, "refused" if rule.forbids else "warned", threads))
    return table(("engine", "what happens", "", "threads"), rows)


def _thread(url: str) -> str:
    """`vllm#53180` of a thread's address."""
    *_, repository, _, number = url.split("/")
    return f"{repository}#{number}"


def decode(name: str) -> str:
    """End-to-end decoding, measured and, in brackets, predicted."""
    return table(bench_decode.COLUMNS, map(bench_decode.row_texts, result(name)["rows"]))


def speeds_by_gamma(name: str) -> str:
    """Tokens per second over gamma, with the share of drafts that were accepted (QuantSpec, Fig 9)."""
    if not (RESULTS / f"{name}.json").exists():
        return _unmeasured("sh scripts/measure_decode_gpu.sh MODEL.gguf TEXT CALIBRATION_TEXT OUT gammas")
    plain, *rows = sorted(result(name)["rows"], key=lambda row: row["gamma"])
    gammas = dict.fromkeys(row["gamma"] for row in rows)
    cells = {
        (row["preset"], row["gamma"]): (
            f"{_tokens_per_s(row):.0f} ({_predicted_tokens_per_s(row):.0f}), {row['measured']['accepted_share']:.0%}"
        )
        for row in rows
    }
    lines = [
        (preset, *(cells.get((preset, gamma), "") for gamma in gammas))
        for preset in dict.fromkeys(row["preset"] for row in rows)
    ]
    head = f"{measured_with(name)}; plain decoding: {_tokens_per_s(plain):.0f} ({_predicted_tokens_per_s(plain):.0f})"
    return f"{head}\n\n{table(('drafts', *(f'gamma {gamma}' for gamma in gammas)), lines)}"


def _unmeasured(command: str) -> str:
    return f"Not measured yet; `{command}` does."


def _tokens_per_s(row: dict[str, Any]) -> float:
    """Of a run of decoding, without its prompts."""
    return 1e3 * row["batch"] / row["measured"]["tpot_ms"]


def _predicted_tokens_per_s(row: dict[str, Any]) -> float:
    """At the measured acceptance."""
    figures = {figure["name"]: figure["predicted"] for figure in row["comparison"]}
    return 1e3 * row["batch"] / figures["tpot at the measured acceptance" if row["gamma"] else "tpot"]


def more_decoding(*shown: str) -> str:
    """The same of every file but those `shown` elsewhere, each with its errors."""
    parts = []
    for name in decoding_files():
        if name not in shown:
            first = result(name)["rows"][0]
            tokens = first["measured"]["generated"] // first["batch"]
            parts += [f"{measured_with(name)}; {tokens} new tokens a sequence", decode(name), decode_errors(name)]
    return "\n\n".join(parts)


def decode_errors(name: str) -> str:
    """The signed error of each prediction, at the measured acceptance."""
    rows = []
    for row in result(name)["rows"]:
        errors = {figure["name"]: figure["error"] for figure in row["comparison"]}
        tpot = errors["tpot at the measured acceptance" if row["gamma"] else "tpot"]
        others = (errors.get(kind) for kind in ("draft step", "verification", "decode step", "peak memory"))
        texts = ("" if error is None else f"{error:+.1%}" for error in (tpot, *others))
        rows.append((f"{row['preset']} {row['context']}x{row['batch']}", *texts))
    return table(("plan", "TPOT", "draft step", "verification", "plain step", "peak memory"), rows)


def validation(name: str) -> str:
    """Errors of predictions in a report of `ridgeplan validate --suite`, and what was aimed at."""
    report = SuiteReport.read(RESULTS / f"{name}.json")
    rows = [
        (
            summary.name,
            str(summary.count),
            f"{summary.signed_median:+.1%}",
            *(f"{value:.1%}" for value in (summary.median, summary.p90, summary.worst)),
            ", ".join(f"{limit} {value:.1%}" for limit, value in asdict(summary.limits).items() if value is not None),
            {None: "", True: "met", False: "missed"}[summary.met],
        )
        for summary in summaries(report)
    ]
    return table(("", "rows", "signed median", "median", "p90", "worst", "target", ""), rows)


def plan_validations(*names: str) -> str:
    """Figures of plans that `validate PLAN --json` ran beside plain decoding: predicted, measured."""
    scales = {"bytes": (1e-9, 3), "ms": (1, 1)}
    shown = ("draft step", "verification", "tpot", "acceptance", "tokens per round", "peak memory",
             "speed-up over plain decoding")  # fmt: skip
    lines = []
    for run in (result(name)["validation"]["plan"] for name in names):
        figures = {row["name"]: row for row in run["rows"]}

        def cell(name: str, figures: Mapping[str, Any] = figures) -> str:
            factor, digits = scales.get(figures[name]["unit"], (1, 2))
            return ", ".join(f"{factor * figures[name][side]:.{digits}f}" for side in ("predicted", "measured"))

        lines.append((run["preset"], str(run["context"]), *map(cell, shown)))
    heads = ("draft step ms", "verification ms", "TPOT ms", "acceptance", "tokens/round", "peak GB", "over plain")
    return table(("plan", "context", *heads), lines)


def outputs(name: str) -> str:
    """Time per token over whole outputs: a line for each plan, a column for each prompt, output and batch."""
    if not (RESULTS / f"{name}.json").exists():
        return _unmeasured("ridgeplan validate --suite full --only outputs")
    cells = {}
    for row in SuiteReport.read(RESULTS / f"{name}.json").rows:
        plan, _, size = row.case.partition(", ")
        cells[plan, size] = f"{row.measured:.2f} ({row.predicted:.2f})"
    sizes = dict.fromkeys(size for _, size in cells)
    lines = (
        (plan, *(cells.get((plan, size), "") for size in sizes)) for plan in dict.fromkeys(plan for plan, _ in cells)
    )
    return table(("ms a token", *sizes), lines)


def worst(name: str, count: str) -> str:
    """The rows of a report with the largest errors."""
    rows = [
        (row.kind, row.model.split("/")[-1], row.case, f"{row.relative_error:+.1%}")
        for row in SuiteReport.read(RESULTS / f"{name}.json").worst_rows(int(count))
    ]
    return table(("", "model", "case", "error"), rows)


def selections(name: str, bits: str, *ratios: str) -> str:
    """A study's acceptance of drafts that read some of the tokens: a line for each policy, by context and ratio."""
    rows = [row for row in result(name)["rows"] if row["format"] == bits]
    means = {(row["policy"], row["context"], row["ratio"]): f"{row['mean']:.3f}" for row in rows}
    sizes = [(context, ratio) for context in sorted({row["context"] for row in rows}) for ratio in map(float, ratios)]
    lines = (
        (policy, *(means.get((policy, *size)) or means.get((policy, size[0], 1.0), "") for size in sizes))
        for policy in dict.fromkeys(policy for policy, *_ in means)
    )
    return table(("", *(f"{context}, {ratio:.0%}" for context, ratio in sizes)), lines)


def quality_of(name: str, context: str) -> str:
    """What was measured of plans' targets at one context, without the scores of single tasks."""
    rows = [row for row in quality.load_rows(RESULTS / f"{name}.json") if row.context == int(context)]
    columns = ("plan", *quality.COLUMNS[2:-1])
    return table(columns, ((plan, *figures[:-1]) for plan, _, *figures in quality.table_rows(rows)))


def long_outputs(name: str) -> str:
    """What each plan's target keeps of the model's own output."""
    if not (RESULTS / f"{name}.json").exists():
        return _unmeasured("sh scripts/measure_long_outputs_gpu.sh MODEL TEXT HEAD OUT")
    rows = quality.load_rows(RESULTS / f"{name}.json")
    values = {(row.plan, row.context, row.measure): f"{row.value:.4f}" for row in rows}
    lines = (
        (plan, str(context), *(values.get((plan, context, measure), "") for measure in LONG_OUTPUT_MEASURES))
        for plan, context in dict.fromkeys((row.plan, row.context) for row in rows)
    )
    columns = (measure.replace("_", " ") for measure in LONG_OUTPUT_MEASURES)
    return table(("plan", "tokens", *columns), lines)


def fidelities(name: str) -> str:
    """Fidelity and perplexity of each plan's target, by model and context."""
    rows = quality.load_rows(RESULTS / f"{name}.json")
    values = {(row.plan, row.model, row.context, row.measure): row.value for row in rows}
    sizes = sorted({(row.model, row.context) for row in rows})

    def cell(plan: str, size: tuple[str, int]) -> str:
        return f"{values[plan, *size, 'fidelity']:.4f}, {values[plan, *size, 'perplexity']:.2f}"

    lines = ((plan, *(cell(plan, size) for size in sizes)) for plan in dict.fromkeys(row.plan for row in rows))
    return table(("fidelity, perplexity", *(f"{model}, {context}" for model, context in sizes)), lines)


def breakdown(name: str, preset: str = "") -> str:
    """One round by class of kernels; without a preset, of the only plan."""
    (measured,) = (row["breakdown"] for row in result(name)["rows"] if preset in ("", row["preset"]))
    rows = [
        (
            f"{entry['part']} {entry['operation']}",
            f"{entry['launches']:.4g}",
            number(entry["measured_us"]),
            number(entry["predicted_us"]),
        )
        for entry in measured["rows"]
    ]
    sums = (
        f"Together {number(measured['kernels_us'])} us, of which {number(measured['overlap_us'])} us pass beside other "
        f"kernels; the round takes {number(measured['round_us'])} us, predicted {number(measured['predicted_us'])} us."
    )
    return f"{table(('part of a round', 'launches', 'measured, us', 'predicted, us'), rows)}\n\n{sums}"


def kernels(name: str, *kernels_shown: str) -> str:
    """Every kernel, or just those that are wanted, with its peer and its target, and a faster peer if there is one."""
    columns = ("kernel", "ours, us", "peer, us", "ratio", "roof", "error", "target, us", "", "peer", "faster peer")
    rows = [row for row in result(name)["rows"] if not kernels_shown or row["kernel"] in kernels_shown]
    lines = [(*bench.row_texts(row), _faster_peer(row)) for row in rows]
    if not any(faster for *_, faster in lines):
        columns, lines = columns[:-1], [line[:-1] for line in lines]
    return table(columns, lines)


def _faster_peer(row: Mapping[str, Any]) -> str:
    """Another project's kernel that is faster than the row's peer, and its time over ours."""
    times = {name: us for name, us in row.get("peers_us", {}).items() if not name.startswith("ours")}
    name = min(times, key=times.__getitem__, default="")
    return f"{name}, {times[name] / row['ours_us']:.2f}x" if name and times[name] < row["peer_us"] else ""


def kernel_targets(name: str) -> str:
    """How many rows meet their targets, and by how much the others miss them."""
    rows = result(name)["rows"]
    missed = [
        (f"{row['kernel']} {row['shape']}", f"{row['ours_us'] / row['target_us'] - 1:.1%}")
        for row in rows
        if not row["met"]
    ]
    met = f"{len(rows) - len(missed)} of {len(rows)} rows meet their targets. The others:"
    return f"{met}\n\n{table(('kernel', 'longer than the target by'), missed)}"


def expert_products(name: str) -> str:
    """Routed experts of few rows: microseconds of Triton's kernels and of ours, and our share of the roof."""
    measured = {(row["shape"], row["kernel"]): row for row in result(name)["rows"]}
    formats = {"experts_int4": "4-bit codes", "experts_int8": "8-bit codes", "experts_mxfp4": "MXFP4"}

    def cell(row: Mapping[str, Any] | None) -> str:
        return f"{row['peer_us']:.1f} -> {row['ours_us']:.1f} ({row['roof']:.0%})" if row else ""

    shapes = dict.fromkeys(shape for shape, _ in measured)
    lines = ((shape, *(cell(measured.get((shape, kernel))) for kernel in formats)) for shape in shapes)
    return table(("rows x hidden, experts of a token x width", *formats.values()), lines)


def products_of_codes(name: str) -> str:
    """Products of the shipped kernels with low-bit weights: a line for each number of bits and rows."""
    measured = {(row["kernel"], row["shape"]): row["ours_us"] for row in result(name)["rows"]}
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    lines = []
    for bits, rows in product((4, 8), (1, 4, 8, 16)):
        times = [f"{measured[f'linear_int{bits}', f'{rows} x {width} -> {outputs}']:.1f}" for outputs, width in shapes]
        of_integers = [runs_integers(bits, rows, width) for _, width in shapes]
        cells = (f"*{us}*" if integer else us for us, integer in zip(times, of_integers, strict=True))
        lines.append((str(bits), str(rows), *cells))
    return table(("bits", "rows", *(f"{outputs} x {inputs}" for outputs, inputs in shapes)), lines)


def verdict_svg(model: str, gpu: str, context: str) -> str:
    """What `ridgeplan plan` prints, as a picture of a terminal."""
    screen = Console(record=True, width=82, file=io.StringIO(), highlight=False, legacy_windows=False)
    screen.print(Text(f"$ ridgeplan plan {model} --gpu {gpu} --ctx {context}", style="bold"))
    for line in answer_text(recommend(model, gpu, context)).splitlines():
        screen.print(Text(line, style="bold green" if line.startswith("Recommended") or "recommended" in line else ""))
    return screen.export_svg(title="ridgeplan")


comparisons = cache(compare_all)  # of the same papers for several tables


def published() -> str:
    """How near the predictions come to each published table."""
    rows = [
        (
            f"{table.paper} {table.name}",
            f"{len(table.cells) - len(table.unpredicted)} of {len(table.cells)}",
            f"{table.median_error:.1%}" if table.errors else "",
            f"{max(table.errors, key=abs):+.0%}" if table.errors else "",
            "; ".join(target.describe(table).removeprefix("target: ") for target in targets_of(table)),
        )
        for table in comparisons()
    ]
    return table(("table", "cells predicted", "median error", "largest", "targets"), rows)


def published_cells(paper: str, name: str) -> str:
    """Every cell of one published table."""
    (comparison,) = (candidate for candidate in comparisons() if (candidate.paper, candidate.name) == (paper, name))
    return table(papers.COLUMNS, map(papers.cell_texts, comparison.cells))


def not_predicted() -> str:
    """The printed cells that cannot be predicted, with the reason, and those that bytes do not allow."""
    rows = [
        (f"{table.paper} {table.name}", *(text for text in papers.cell_texts(cell) if text))
        for table in comparisons()
        for cell in table.unpredicted
    ]
    return table(("table", "cell", "quantity", "published", "why not"), rows)


def impossible() -> str:
    """The printed cells that bytes do not allow."""
    rows = [
        (f"{table.paper} {table.name}", *papers.cell_texts(cell))
        for table in comparisons()
        for cell in table.cells
        if "what bytes allow" in cell.flag
    ]
    return table(("table", *papers.COLUMNS), rows)


def beyond() -> str:
    """What the published times of each table have beyond what is priced, by method, engine and batch or context."""
    rows = []
    for compared in comparisons():
        methods: dict[tuple[str, str], list[Cell]] = {}
        for cell in compared.cells:
            if cell.beyond_ms is not None and cell.error is not None:
                methods.setdefault((cell.method, cell.engine), []).append(cell)
        for (method, engine), cells in methods.items():
            milliseconds, errors = [cell.beyond_ms or 0 for cell in cells], [cell.error or 0 for cell in cells]
            rows.append((
                f"{compared.paper} {compared.name}", method, f"`{engine}`", str(len(cells)),
                f"{min(errors):+.0%} to {max(errors):+.0%}", f"{min(milliseconds):+.3g} to {max(milliseconds):+.3g}",
            ))  # fmt: skip
    return table(("table", "method", "engine", "cells", "errors", "ms a token beyond what is priced"), rows)


def engines() -> str:
    """The papers' engines with the source of their figures."""
    rows = [
        (f"`{engine.name}`", engine.title, f"{1e6 * engine.launch_s:.1f}" if engine.launch_s else "",
         f"{1e3 * engine.layer_dispatch_s:.2f}" if engine.layer_dispatch_s else "", engine.source)
        for engine in list_engines()
    ]  # fmt: skip
    return table(("engine", "what it is", "us per launch", "host, ms per layer", "source"), rows)


BLOCKS: dict[str, Callable[..., str]] = {
    table.__name__: table
    for table in (
        measured_with,
        classes,
        decode,
        decode_errors,
        plan_validations,
        speeds_by_gamma,
        outputs,
        long_outputs,
        more_decoding,
        validation,
        worst,
        selections,
        fidelities,
        quality_of,
        breakdown,
        kernels,
        kernel_targets,
        expert_products,
        products_of_codes,
        accuracy_tables.accuracy,
        acceptance_tables.acceptance_errors,
        acceptance_tables.decode_acceptance,
        acceptance_tables.decode_regret,
        cli_tables.exit_codes,
        drafter_tables.drafter_times,
        drafter_tables.drafter_summary,
        drafter_tables.drafters_adapting,
        drafter_tables.drafters_by_context,
        cli_tables.commands,
        cli_tables.command_options,
        mechanism_tables.mechanisms,
        mechanism_tables.published_items,
        mechanism_tables.contributions,
        model_tables.supported_families,
        model_tables.described_models,
        model_tables.experts_and_drafts,
        model_tables.experts_and_plans,
        model_tables.measured_models,
        model_tables.recent_models,
        model_tables.measured_misses,
        model_tables.measured_parts,
        offload_tables.streamed_rounds,
        parallel_tables.parallel_plans,
        parallel_tables.parallel_published,
        parallel_tables.parallel_others,
        offload_tables.elastic_steps,
        offload_tables.cliff_predicted,
        offload_tables.specontext_placements,
        offload_tables.specontext_steps,
        offload_tables.specontext_generation,
        offload_tables.specontext_table3,
        offload_tables.specontext_cliff,
        readme_tables.fastest,
        readme_tables.speeds,
        readme_tables.fast_kernels,
        readme_tables.cliff,
        readme_tables.evictions,
        readme_tables.errors,
        study_tables.study_positions,
        study_tables.study_rounds,
        study_tables.study_recalls,
        study_tables.study_pseudo_queries,
        study_tables.study_axes,
        study_tables.study_claims,
        study_tables.study_choices,
        study_tables.study_losses,
        traffic_tables.traffic_served,
        traffic_tables.traffic_targets,
        traffic_tables.traffic_mixed,
        traffic_tables.traffic_energy,
        published,
        published_cells,
        not_predicted,
        impossible,
        beyond,
        engines,
        drafter_acceptance,
        engine_times,
        engine_rules,
    )
}


def filled(text: str) -> str:
    """`text` with every generated block made anew. Raises KeyError for an unknown one."""

    def block(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match[2])
        return f"{match[1]}{BLOCKS[name](*arguments)}\n{match[3]}"

    return BLOCK.sub(block, text)


def documents() -> Iterator[tuple[Path, str]]:
    """Every file with generated parts, and its text as it should be."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield path, filled(path.read_text(encoding="utf-8"))
    yield ROOT / "docs" / "images" / "verdict.svg", verdict_svg("Llama-3.1-8B", "h200", "120k")


def main(arguments: Sequence[str]) -> int:
    """Writes the files, or with --check names those that are stale; the exit code."""
    stale = []
    for path, now in documents():
        if not path.exists() or now != path.read_text(encoding="utf-8"):
            stale.append(path)
            if "--check" not in arguments:
                path.write_text(now, encoding="utf-8")
    for path in stale:
        print(f"{'stale' if '--check' in arguments else 'written'}: {path.relative_to(ROOT)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
