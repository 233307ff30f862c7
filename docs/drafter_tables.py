"""Tables of drafters' times and acceptance, from what their scripts and `study drafts` left in validate/results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from readme_tables import RESULTS, result, table

from ridgeplan.roofline.engine import EAGLE3_PASS_MS

TIMES, NOT_MEASURED = "drafters_h200", "Not measured yet."
STUDIES = ("study_drafters_", "study_heads_")
LEAST_DRAFTS = 20  # verified at a position, for its acceptance to be shown
AT_MEASURED = "tpot at the measured acceptance"
HEAD_DRAFTS = 3  # of the passes that were measured in vLLM
NEAR_BEST = 0.03
NEAR_CONTEXT = 1.03  # vLLM's passes have 120,000 tokens where ours have 122,880

Rows = Mapping[str, Mapping[str, Any]]  # by the plan's name


def drafter_times() -> str:
    """Every plan that was timed: a line for each text, workload and plan."""
    if not (RESULTS / f"{TIMES}.json").exists():
        return NOT_MEASURED
    columns = ("text", "workload", "plan", "ms per token", "over none", "tokens a round", "rounds with proposals",
               "acceptance", "predicted at it", "error")  # fmt: skip
    return table(columns, [line for cell in _cells() for line in _lines(*cell)])


def drafter_summary() -> str:
    """What the times show: errors, regret, losses where drafters do not pay, and heads beside vLLM's passes."""
    if not (RESULTS / f"{TIMES}.json").exists():
        return NOT_MEASURED
    document, cells = result(TIMES), list(_cells())
    errors = [abs(error) for _, _, rows in cells for row in rows.values() if (error := _error(row)) is not None]
    texts = [cell for cell in cells if cell[0] != "random"]
    chosen = [(f"{kind} {size}", rows[name], rows.values()) for kind, size, rows in texts
              if (name := document.get(f"recommended, {kind} {size}"))]  # fmt: skip
    regrets = {cell: _ms(row) / min(map(_ms, others)) - 1 for cell, row, others in chosen}
    at_kind = {cell: _ms_at_kind(row) / min(map(_ms_at_kind, filter(_predicted, others))) - 1
               for cell, row, others in chosen if _predicted(row)}  # fmt: skip
    gated = {f"{kind} {size}": _ms(rows["suffix, adaptive cascade"]) / _ms(rows.get("self-drafts", rows["none"])) - 1
             for kind, size, rows in texts if kind == "prose"}  # fmt: skip
    random = {size: _ms(rows["adaptive"]) / _ms(rows["plain"]) - 1 for kind, size, rows in cells if kind == "random"}
    heads = {size: vllm_ms / _round_ms(rows["head"]) for _, size, rows in texts
             if "head" in rows and (vllm_ms := _vllm_ms(size))}  # fmt: skip
    lines = [
        ("time per token at the measured acceptance, error", f"median {median(errors):.1%}, worst {max(errors):.1%}")
    ]
    near = sum(regret <= NEAR_BEST for regret in regrets.values())
    lines += [(f"recommended within {NEAR_BEST:.0%} of the best measured", f"{near} of {len(regrets)} cells")]
    lines += [
        (what, ", ".join(f"{name} {value:{form}}" for name, value in values.items()))
        for what, form, values in (
            ("recommended drafter over the best measured, minus 1", ".1%", regrets),
            ("the same of fixed plans, at the acceptance that is known of the kind of text", ".1%", at_kind),
            ("on prose, rounds that adapt over self-drafts alone, minus 1", ".1%", gated),
            ("on random tokens, rounds that adapt over plain decoding, minus 1", ".1%", random),
            ("vLLM's pass with three drafts of a head over ours", ".2f", heads),
        )
        if values
    ]
    return table(("figure", ""), lines)


def drafters_by_context() -> str:
    """Acceptance of drafters in real rounds, by model, text, context and window."""
    names = [path.stem for path in sorted(RESULTS.glob("*.json")) if path.stem.startswith(STUDIES)]
    rows = [
        (study["model"], study["kind"], str(row["context"]), row["case"], str(row["window"] or ""),
         f"{row['tokens_per_round']:.2f}", f"{row['hit']:.0%}" if row["hit"] else "",
         ", ".join(f"{share:.2f}" for share, drafts in zip(row["acceptance_at"], row["verified_at"], strict=True)
                   if drafts >= LEAST_DRAFTS))
        for study in map(result, names) for row in study["rows"]
    ]  # fmt: skip
    columns = ("model", "text", "context", "drafter", "window", "tokens a round", "hits", "acceptance by position")
    return table(columns, rows) if rows else NOT_MEASURED


def _cells() -> Iterator[tuple[str, str, Rows]]:
    """Kind of text, workload, and the rows that were measured."""
    for section, rows in result(TIMES).items():
        if isinstance(rows, list):
            kind, size = section.split(" ")
            yield kind, size, {row["row"]: row for row in rows if "error" not in row}


def _lines(kind: str, size: str, rows: Rows) -> Iterator[Sequence[str]]:
    recommended = result(TIMES).get(f"recommended, {kind} {size}")
    for name, row in rows.items():
        figures, error = row["measured"], _error(row)
        predicted, first = _predicted(row), rows.get("none", rows.get("plain"))
        yield (
            kind, size, f"{name} (recommended)" if name == recommended else name, f"{_ms(row):.2f}",
            f"{_ms(first) / _ms(row):.2f}x" if first else "", f"{figures['tokens_per_round']:.2f}",
            f"{figures['hit_rate']:.0%}" if figures["proposal_rounds"] else "",
            f"{figures['acceptance']:.3f}" if row["gamma"] else "",
            "" if predicted is None else f"{predicted:.2f}", "" if error is None else f"{error:+.1%}",
        )  # fmt: skip


def _ms(row: Mapping[str, Any]) -> float:
    """Milliseconds per token: of the median segment, or of all rounds where these adapt."""
    return float(row["measured"]["tpot_ms"])


def _round_ms(row: Mapping[str, Any]) -> float:
    return _ms(row) * row["measured"]["tokens_per_round"]


def _vllm_ms(size: str) -> float | None:
    """Milliseconds of vLLM's pass with a head at a workload; None where none was measured."""
    context, batch = map(int, size.split("x"))
    near = (
        ms for (drafts, tokens, sequences), ms in EAGLE3_PASS_MS.items()
        if (drafts, sequences) == (HEAD_DRAFTS, batch) and tokens <= context <= NEAR_CONTEXT * tokens
    )  # fmt: skip
    return next(near, None)


def _predicted(row: Mapping[str, Any]) -> float | None:
    """Milliseconds per token at the measured acceptance; None where rounds adapt, whose drafts are of several tiers."""
    if row["given"]["speculation"]["adaptive"]:
        return None
    name = AT_MEASURED if row["gamma"] else "tpot"
    return next(each["predicted"] for each in row["comparison"] if each["name"] == name)


def _ms_at_kind(row: Mapping[str, Any]) -> float:
    """Milliseconds per token at the acceptance predicted for the kind of text, by the measured times of a round."""
    expected = next(each["predicted"] for each in row["comparison"] if each["name"] == "tpot")
    return _ms(row) * expected / (_predicted(row) or expected)


def _error(row: Mapping[str, Any]) -> float | None:
    predicted = _predicted(row)
    return None if predicted is None else predicted / _ms(row) - 1
