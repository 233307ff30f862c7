"""Tables of drafters' times and acceptance, from what their scripts and `study drafts` left in validate/results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from readme_tables import RESULTS, result, table

from ridgeplan.roofline.engine import EAGLE3_PASS_MS

NOT_MEASURED = "Not measured yet."
ADAPTING = "suffix, adaptive cascade"
STUDIES = ("study_drafters_", "study_heads_")
LEAST_DRAFTS = 20  # verified at a position, for its acceptance to be shown
AT_MEASURED = "tpot at the measured acceptance"
HEAD_DRAFTS = 3  # of the passes that were measured in vLLM
NEAR_BEST = 0.03
NEAR_CONTEXT = 1.03  # vLLM's passes have 120,000 tokens where ours have 122,880

Rows = Mapping[str, Mapping[str, Any]]  # by the plan's name


def drafter_times(name: str) -> str:
    """Every plan that was timed: a line for each text, workload and plan. name: of the results."""
    if not (RESULTS / f"{name}.json").exists():
        return NOT_MEASURED
    columns = ("text", "workload", "plan", "ms per token", "over none", "tokens a round", "rounds with proposals",
               "acceptance", "predicted at it", "error")  # fmt: skip
    return table(columns, [line for cell in _cells(name) for line in _lines(result(name), *cell)])


def drafter_summary(*names: str) -> str:
    """What the times of several runs show: errors, regret, losses where drafters do not pay, heads beside vLLM's."""
    known = [name for name in names if (RESULTS / f"{name}.json").exists()]
    if not known:
        return NOT_MEASURED
    figures = [dict(_summary(name)) for name in known]
    lines = [(what, *(each.get(what, "") for each in figures)) for what in dict.fromkeys(w for f in figures for w in f)]
    return table(("figure", *(f"{result(name)['settings']['new tokens']} tokens" for name in known)), lines)


def drafters_adapting(*names: str) -> str:
    """Rounds that adapt beside the fixed plan with the least expected time, in several runs, text by text."""
    columns = ("text", "workload", "tokens", "fixed plan", "ms per token", "adapting, ms", "over it",
               "expected over it", "expected, ms", "error", "hits known", "hits")  # fmt: skip
    lines = []
    for name in names:
        for kind, size, rows in _cells(name):
            if kind == "random" or ADAPTING not in rows:
                continue
            adapting, fixed = rows[ADAPTING], _expected_best(rows)
            expected_ms, known = _expected_ms(adapting), _compared(adapting, "rounds with proposals")
            lines.append((
                kind, size, str(adapting["given"]["workload"]["new_tokens"]), fixed["row"], f"{_ms(fixed):.2f}",
                f"{_ms(adapting):.2f}", f"{_ms(adapting) / _ms(fixed) - 1:+.1%}",
                f"{expected_ms / _expected_ms(fixed) - 1:+.1%}", f"{expected_ms:.2f}",
                f"{expected_ms / _ms(adapting) - 1:+.1%}", f"{known['predicted']:.0%}", f"{known['measured']:.0%}",
            ))  # fmt: skip
    return table(columns, lines)


def _summary(name: str) -> Iterator[tuple[str, str]]:
    """The figures of a run, and what they are."""
    document, cells = result(name), list(_cells(name))
    all_rows = [row for _, _, rows in cells for row in rows.values()]
    for which, wanted in (("fixed plans", False), ("rounds that adapt", True)):
        errors = [_error(row) for row in all_rows if _adapts(row) is wanted]
        yield f"time per token at the measured acceptance, error of {which}", _spread(errors)
    yield (
        "the same at the acceptance known of the kind of text, all plans",
        _spread([_expected_ms(row) / _ms(row) - 1 for row in all_rows]),
    )
    texts = [cell for cell in cells if cell[0] != "random"]
    single = [rows for _, size, rows in texts if size.endswith("x1")]
    recommended = [rows for kind, size, rows in texts if document.get(f"recommended, {kind} {size}") == ADAPTING]
    bias = geometric_mean(_expected_ms(rows[ADAPTING]) / _ms(rows[ADAPTING]) for rows in single) - 1
    yield "the same of rounds that adapt to one sequence, with its sign, geometric mean", f"{bias:+.1%}"
    for where, each in (("of one sequence", single), ("in which they are recommended", recommended)):
        measured, expected = (
            geometric_mean(of(rows[ADAPTING]) / of(_expected_best(rows)) for rows in each) - 1
            for of in (_ms, _expected_ms)
        )
        what = "rounds that adapt over the fixed plan with the least expected time, minus 1: cells"
        yield f"{what} {where}, geometric mean", f"{measured:+.1%}, expected {expected:+.1%}"
    chosen = [(f"{kind} {size}", rows[which], rows.values()) for kind, size, rows in texts
              if (which := document.get(f"recommended, {kind} {size}"))]  # fmt: skip
    regrets = {cell: _ms(row) / min(map(_ms, others)) - 1 for cell, row, others in chosen}
    near = sum(regret <= NEAR_BEST for regret in regrets.values())
    yield f"recommended within {NEAR_BEST:.0%} of the best measured", f"{near} of {len(regrets)} cells"
    fixed = [(cell, row, [each for each in others if not _adapts(each)]) for cell, row, others in chosen]
    at_kind = {cell: _ms_at_kind(row) / min(map(_ms_at_kind, others)) - 1
               for cell, row, others in fixed if not _adapts(row)}  # fmt: skip
    prose = [(f"{kind} {size}", rows) for kind, size, rows in texts if kind == "prose"]
    gated = {cell: _ms(rows[ADAPTING]) / _ms(rows.get("self-drafts", rows["none"])) - 1 for cell, rows in prose}
    over_none = {cell: _ms(rows[ADAPTING]) / _ms(rows["none"]) - 1 for cell, rows in prose}
    random = {size: _ms(rows["adaptive"]) / _ms(rows["plain"]) - 1 for kind, size, rows in cells if kind == "random"}
    heads = {size: vllm_ms / _round_ms(rows["head"]) for _, size, rows in texts
             if "head" in rows and (vllm_ms := _vllm_ms(size))}  # fmt: skip
    for what, form, values in (
        ("recommended drafter over the best measured, minus 1", ".1%", regrets),
        ("the same of fixed plans, at the acceptance that is known of the kind of text", ".1%", at_kind),
        ("on prose, rounds that adapt over self-drafts alone, minus 1", "+.1%", gated),
        ("on prose, rounds that adapt over the best plan without drafters, minus 1", "+.1%", over_none),
        ("on random tokens, rounds that adapt over plain decoding, minus 1", ".1%", random),
        ("vLLM's pass with three drafts of a head over ours", ".2f", heads),
    ):
        if values:
            yield what, ", ".join(f"{cell} {value:{form}}" for cell, value in values.items())


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


def _cells(name: str) -> Iterator[tuple[str, str, Rows]]:
    """Kind of text, workload, and the rows that were measured."""
    for section, rows in result(name).items():
        if isinstance(rows, list):
            kind, size = section.split(" ")
            yield kind, size, {row["row"]: row for row in rows if "error" not in row}


def _lines(document: Mapping[str, Any], kind: str, size: str, rows: Rows) -> Iterator[Sequence[str]]:
    recommended = document.get(f"recommended, {kind} {size}")
    for name, row in rows.items():
        figures, error = row["measured"], _error(row)
        first = rows.get("none", rows.get("plain"))
        yield (
            kind, size, f"{name} (recommended)" if name == recommended else name, f"{_ms(row):.2f}",
            f"{_ms(first) / _ms(row):.2f}x" if first else "", f"{figures['tokens_per_round']:.2f}",
            f"{figures['hit_rate']:.0%}" if figures["proposal_rounds"] else "",
            f"{figures['acceptance']:.3f}" if row["gamma"] else "",
            f"{_predicted(row):.2f}", f"{error:+.1%}",
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


def _predicted(row: Mapping[str, Any]) -> float:
    """Milliseconds per token at the measured acceptance; where rounds adapt, of the rounds that were taken."""
    return float(_compared(row, AT_MEASURED if row["gamma"] else "tpot")["predicted"])


def _expected_ms(row: Mapping[str, Any]) -> float:
    """Milliseconds per token as predicted for the kind of text, before anything is measured."""
    return float(_compared(row, "tpot")["predicted"])


def _compared(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(each for each in row["comparison"] if each["name"] == name)


def _adapts(row: Mapping[str, Any]) -> bool:
    return bool(row["given"]["speculation"]["adaptive"])


def _expected_best(rows: Rows) -> Mapping[str, Any]:
    """The fixed plan with the least expected time."""
    return min((row for row in rows.values() if not _adapts(row)), key=_expected_ms)


def _ms_at_kind(row: Mapping[str, Any]) -> float:
    """Milliseconds per token at the acceptance predicted for the kind of text, by the measured times of a round."""
    return _ms(row) * _expected_ms(row) / _predicted(row)


def _error(row: Mapping[str, Any]) -> float:
    return _predicted(row) / _ms(row) - 1


def _spread(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"median {median(sizes):.1%}, worst {max(sizes):.1%}"
