"""`ridgeplan study`: measurements behind the papers' claims, on the user's model and text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.acceptance import drafter_options, report_drafters, require_extensible, save_rows
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.model_inputs import calibration_tokens, embedded_or, sample_or_file
from ridgeplan.dashboards.cli.output import echo, print_json, print_table, progress, write_page
from ridgeplan.dashboards.files import locked, require_lockable, write_json
from ridgeplan.dashboards.rows import grouped
from ridgeplan.validate.studies.methods import FORMATS, GREEDY, METHODS, POLICIES, SAMPLED, VERIFICATIONS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA = 1  # of all studies but `drafts`, whose file can be resumed


def run_study(
    study: Callable[..., Iterable[Any]], model: str | None, text: str | None, sizes: DataclassInstance, **options: Any
) -> tuple[dict[str, Any], list[Any]]:
    """The part of a study's document that all studies share, and what the function `study` measured.

    text: a file, by default the sample text. options: further arguments of `study`.
    """
    from ridgeplan.validate.acceptance import named_shape  # imports torch, which takes seconds

    name, content = sample_or_file(text)
    with progress("loading") as on_progress:
        source = embedded_or(model)
        results = list(study(source, content, sizes, on_progress=on_progress, **options))
        shape = named_shape(source)
    return {"schema": SCHEMA, "model": shape.name, "text": name, "sizes": asdict(sizes)}, results


def deliver(
    document: Mapping[str, Any], output: Path | None, html: Path | None, as_json: bool, page: str
) -> bool:  # fmt: skip
    """Writes the files and adds the machine to them. True if JSON was printed, so that no table is needed.

    page: the function of html_pages that makes the HTML.
    """
    from ridgeplan.validate.machine import measured_here  # imports torch, which takes seconds

    document = {**measured_here(), **document}
    write_json(output, document)
    write_page(html, page, document)
    if as_json:
        print_json(document)
    return as_json


@command(cls=opt.ListCommand)
@opt.model_to_run
@opt.text_file
@opt.contexts
@opt.listed("--ratios", float, "Shares of the tokens that drafts read, a list.", (0.03, 0.07, 0.15, 0.25))
@opt.listed("--policies", str, "Policies that select the tokens, a list.  [default: all; retrieval-head needs a head]")
@opt.listed("--formats", str, "Formats of the drafts' KV and weights, a list.", tuple(FORMATS))
@opt.tokens_after
@click.option("--passages", type=click.IntRange(1, 1000), default=1, help="Prompts, spread over the text.")
@click.option(
    "--verification", type=click.Choice(VERIFICATIONS), default=SAMPLED,
    help="How rounds go on: the model's tokens, and rejected drafts are dropped, or the text's own.",
)  # fmt: skip
@drafter_options
@opt.calibration_file
@opt.retrieval_head
@opt.yarn
@opt.json_output
@click.option("--resume", is_flag=True, help="Keep the rows of the output file and measure only the missing ones.")
@click.option("--rows", type=opt.OutputFile(), help="Merge the acceptance of drafts that run into this file.")
@opt.html_output
@opt.as_json
def drafts(
    model: str | None, text: str, ctx: tuple[int, ...], ratios: tuple[float, ...], policies: tuple[str, ...],
    formats: tuple[str, ...], tokens: int, passages: int, verification: str, calibration: str | None,
    retrieval_head: str | None, yarn: bool, output: Path | None, resume: bool, rows: Path | None, html: Path | None,
    as_json: bool, **drafters: Any,
) -> None:  # fmt: skip
    """Measure the acceptance of drafts that read a share of the tokens.

    The model continues the text in rounds of seven drafts, which are verified at temperature 1 or greedily. Each policy
    selects with the code that the runtime uses. Teacher-forced rounds take the text's own tokens instead, and count
    every draft as accepted.

    "specextend" selects by the last accepted token, "specextend-last" by the last query, even if its token was
    rejected. "specattn-eq2" selects by all queries (Eq 2), "specattn-accepted" by those of accepted tokens only.
    Variants of "specattn-weights" select for each KV head, from logits, or from all rows. "hindsight" is an upper
    bound, of teacher-forced rounds only: the round's own verification selects, for each KV head.

    With --drafter, suffix lookup, a draft head, a cascade and 4-bit drafts are measured in real rounds instead.

    Examples:
      ridgeplan study drafts --text book.txt --ctx 4k
      ridgeplan study drafts --text book.txt --policies quest progressive --ratios 0.03 0.1
      ridgeplan study drafts --text book.txt --html drafts.html
      ridgeplan study drafts --text book.txt --verification teacher-forced
      ridgeplan study drafts --text book.txt --ctx 4k 8k --output drafts.json --resume
      ridgeplan study drafts --text book.txt --ctx 4k 32k --drafter suffix head w4 --drafter-head head/
    """
    if drafters["drafter"]:
        if resume or html:
            raise click.UsageError("--drafter cannot be combined with --resume or --html; allowed: with --output")
        report_drafters(
            model, text, None, ctx, tokens, calibration=calibration, yarn=yarn, output=output,
            rows=require_extensible(rows) if rows else None, as_json=as_json, **drafters,
        )  # fmt: skip
        return
    # Importing torch takes seconds.
    from ridgeplan.validate.acceptance import Passage, checkpoint_of, named_shape
    from ridgeplan.validate.machine import device_here
    from ridgeplan.validate.prompts import read_prompt
    from ridgeplan.validate.studies.drafts import SavedStudy, acceptance_rows, drafts_of, study

    if resume and output is None:
        raise click.UsageError("--resume needs --output; allowed: with the file to resume")
    chosen = policies or _usable(POLICIES, {"retrieval-head"}, retrieval_head, model)
    cases, content = drafts_of(chosen, ratios, formats), read_prompt(text)
    if rows and verification == GREEDY:
        raise click.UsageError("--rows cannot be combined with --verification greedy; allowed: sampled, teacher-forced")
    rows_path = require_extensible(rows) if rows else None
    if output is not None:
        require_lockable(output)
    with progress("loading") as on_progress:
        source = embedded_or(model)
        passage = Passage(content, Path(text).stem, ctx, tokens, calibration_tokens(source, calibration), yarn)
        fitted_to = Path(calibration).stem if calibration else ""
        saved = SavedStudy(
            named_shape(source).name, tokens, fitted_to, verification, passages,
            Path(retrieval_head).stem if retrieval_head else "", device=device_here(), text=passage.name,
        )  # fmt: skip
        if resume and output is not None and output.exists():
            saved = saved.resumed(output)
        for row in study(
            source, passage, cases, on_progress=on_progress, known=saved.known, verification=verification,
            passages=passages, head=retrieval_head,
        ):  # fmt: skip
            saved = saved.with_row(row)
            if output is not None:
                with locked(output):
                    if resume and output.exists():  # by now with rows of another run that resumed it
                        saved = saved.resumed(output)
                    deliver(saved.document, output, None, False, "")
    if rows_path is not None:
        save_rows(rows_path, acceptance_rows(saved, named_shape(source), checkpoint_of(source)))
    if not deliver(saved.document, None, html, as_json, "draft_study_page"):  # the output has all rows
        _print_drafts(saved.document)


def _print_drafts(document: Mapping[str, Any]) -> None:
    for context, rows in grouped(document["rows"], "context").items():
        how = f"{document['verification']} rounds, mean of all verified drafts"
        title = f"Acceptance of {document['model']} on {document['text']}, {context} tokens, {how}"
        print_table(title, *summary(rows))


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Iterator[Sequence[str]]]:
    """Columns and lines of a table: a line for each policy and ratio, a column for each format."""
    formats = [name for name in FORMATS if any(row["format"] == name for row in rows)]
    means = {(row["policy"], row["ratio"], row["format"]): f"{row['mean']:.3f}" for row in rows}
    cases = dict.fromkeys((row["policy"], row["ratio"]) for row in rows)
    lines = ((policy, f"{ratio:g}", *(means.get((policy, ratio, name), "") for name in formats), "")
             for policy, ratio in cases)  # fmt: skip
    return ("policy", "ratio", *formats, ""), lines


def _usable(
    names: Iterable[str], needing_head: Collection[str], head: str | None, model: str | None
) -> tuple[str, ...]:
    """The names without those that need a retrieval head, if there is none: one ships for the embedded model."""
    has_head = head is not None or model is None
    return tuple(name for name in names if has_head or name not in needing_head)


FIGURES = ("hit", "distant", "mass", "overlap")


@command(cls=opt.ListCommand)
@opt.model_to_run
@opt.text_file
@opt.retrieval_head
@opt.contexts
@opt.listed("--budgets", opt.TOKENS, "Tokens that each method reads, a list.", (512, 1024, 2048))
@opt.listed("--methods", str, f"A list of {', '.join(METHODS)}.  [default: all, the first two if there is a head]")
@click.option("--tokens", type=int, default=32, help="Decode steps after each context.")
@click.option("--passages", type=int, default=1, help="Passages, spread over the text.")
@opt.yarn
@opt.json_output
@opt.html_output
@opt.as_json
def retrieval(
    model: str | None, text: str, retrieval_head: str | None, ctx: tuple[int, ...], methods: tuple[str, ...],
    yarn: bool, output: Path | None, html: Path | None, as_json: bool, **sizes: Any,
) -> None:  # fmt: skip
    """Measure how much of the model's attention each selection finds at equal budgets.

    "hit" is the share of the model's own top tokens of each layer that are selected, "distant" the same for tokens that
    are neither first nor recent, "mass" the attention on the selected tokens, and "overlap" the share of a step's
    selection that the step before had selected too. "shadowkv" reads its outlier chunks, 384 tokens, beside the budget.

    Examples:
      ridgeplan study retrieval --text book.txt --ctx 4k
      ridgeplan study retrieval --text book.txt --retrieval-head head.safetensors --budgets 512 2k
      ridgeplan study retrieval --text book.txt --methods quest clusterkv --html retrieval.html
    """
    from ridgeplan.validate.studies.retrieval import RetrievalSizes, study  # imports torch, which takes seconds

    needs_head = {name for name, (selection, _) in METHODS.items() if selection == "retrieval-head"}
    chosen = methods or _usable(METHODS, needs_head, retrieval_head, model)
    question = RetrievalSizes(contexts=ctx, methods=chosen, **sizes)
    document, rows = run_study(study, model, text, question, head=retrieval_head, yarn=yarn)
    document["rows"] = [asdict(row) for row in rows]
    if not deliver(document, output, html, as_json, "retrieval_study_page"):
        _print_retrieval(document)


def _print_retrieval(document: Mapping[str, Any]) -> None:
    for context, rows in grouped(document["rows"], "context").items():
        lines = ((row["method"], str(row["budget"]), *(f"{row[name]:.3f}" for name in FIGURES), "") for row in rows)
        title = f"Selections of {document['model']} on {document['text']}, {context} tokens"
        print_table(title, ("method", "budget", *FIGURES, ""), lines)


@command()
@opt.model_to_run
@opt.sample_or_text("UTF-8 text.")
@click.option("--ctx", "context", type=opt.TOKENS, default=2048, help="Tokens of a passage.")
@click.option("--tokens", type=int, default=90, help="Tokens to predict at the end of each passage.")
@click.option("--passages", type=int, default=4, help="Passages, spread over the text.")
@opt.json_output
@opt.as_json
def quantspec(model: str | None, text: str | None, output: Path | None, as_json: bool, **sizes: Any) -> None:
    """Measure perplexity with keys and values rounded along each axis (QuantSpec's Tables 2 and 5).

    "channel" has a scale per channel and group of tokens, "token" one per token and group of channels. QuantSpec rounds
    keys by channel and values by token.

    Examples:
      ridgeplan study quantspec
      ridgeplan study quantspec --text book.txt --ctx 8k --output axes.json
      ridgeplan study quantspec --model model.gguf --passages 8 --json
    """
    from ridgeplan.validate.studies.quantspec import QuantSpecSizes, study  # imports torch, which takes seconds

    question = QuantSpecSizes(**sizes)
    document, rows = run_study(study, model, text, question)
    document["rows"] = [asdict(row) for row in rows]
    if not deliver(document, output, None, as_json, ""):
        lines = ((row.keys, row.values, f"{row.bits}", f"{row.perplexity:.4f}", "") for row in rows)
        title = f"Perplexity of {document['model']} on {document['text']}, {question.context} tokens"
        print_table(title, ("keys by", "values by", "bits", "perplexity", ""), lines)


@command()
@opt.model_to_run
@opt.sample_or_text("UTF-8 text.")
@click.option("--ctx", "context", type=opt.TOKENS, default=4096, help="Prompt length in tokens.")
@click.option("--response", type=int, default=128, help="Tokens of the text's continuation.")
@click.option("--passages", type=int, default=20, help="Passages, spread over the text.")
@click.option("--seed", type=int, default=0, help="Seed of the random tokens.")
@opt.json_output
@opt.html_output
@opt.as_json
def dapq(
    model: str | None, text: str | None, output: Path | None, html: Path | None, as_json: bool, **sizes: Any
) -> None:
    """Test DapQ's claims on query similarity, recall and attention, and show where results differ.

    Examples:
      ridgeplan study dapq
      ridgeplan study dapq --text book.txt --ctx 8k --html dapq.html
      ridgeplan study dapq --model model.gguf --passages 5 --json
    """
    from ridgeplan.validate.studies import dapq as dapq_study  # imports torch, which takes seconds

    document, results = run_study(dapq_study.study, model, text, dapq_study.DapqSizes(**sizes))
    document["figures"] = dapq_study.summary(results)
    document["claims"] = [asdict(claim) for claim in dapq_study.claims(results)]
    if not deliver(document, output, html, as_json, "dapq_study_page"):
        _print_dapq(document)


def _print_dapq(document: Mapping[str, Any]) -> None:
    sizes = document["sizes"]
    echo(f"{document['model']} on {document['text']}, {sizes['passages']} passages of {sizes['context']} tokens")
    means = {tuple(row["figure"]): row["mean"] for row in document["figures"]}
    print_table("Query similarity (Table 1)", ("content", "position", "after RoPE", "before RoPE", ""),
                _similarities(means))  # fmt: skip
    offsets = [key for key in means if key[0] == "offset"]
    print_table("Query similarity at earlier positions (Figure 2b)", ("", *(str(key[1]) for key in offsets), ""),
                [("similarity", *(f"{means[key]:.4f}" for key in offsets), "")])  # fmt: skip
    _print_by_window(
        means, "recall", "Recall of the prompt tokens with the most attention (Figure 3), by budget/window"
    )
    _print_by_window(means, "attention", "Attention similarity (Table 8), by window")
    for axis in dict.fromkeys(key[1] for key in means if key[0] == "choice"):
        budgets = dict.fromkeys(key[3] for key in means if key[:2] == ("choice", axis))
        names = dict.fromkeys(key[2] for key in means if key[:2] == ("choice", axis))
        lines = ((name, *(f"{means['choice', axis, name, budget]:.3f}" for budget in budgets), "") for name in names)
        print_table(f"Recall by {axis} of pseudo queries (Figure 4), by budget", (axis, *map(str, budgets), ""), lines)
    for claim in document["claims"]:
        echo(f"{'holds' if claim['holds'] else 'differs here'}: {claim['text']}: {claim['detail']}")


def _similarities(means: Mapping[tuple[Any, ...], float]) -> Iterator[Sequence[str]]:
    for kind, *rest in means:
        if kind == "similarity" and rest[2] == "after":
            content, position, _ = rest
            both = (f"{means[kind, content, position, when]:.4f}" for when in ("after", "before"))
            yield content, position, *both, ""


def _print_by_window(means: Mapping[tuple[Any, ...], float], kind: str, title: str) -> None:
    """A line for each method, a column for each window, and budget."""
    cases = sorted({key[:1:-1] for key in means if key[0] == kind})
    methods = dict.fromkeys(key[1] for key in means if key[0] == kind)
    columns = ("method", *("/".join(map(str, case)) for case in cases), "")
    lines = ((name, *(f"{means[(kind, name, *case[::-1])]:.3f}" for case in cases), "") for name in methods)
    print_table(title, columns, lines)
