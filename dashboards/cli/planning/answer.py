"""The short answer of `ridgeplan plan`: six lines and five rows, none wider than 80 columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ridgeplan.dashboards.cli.output import number, wrapped
from ridgeplan.planner import Prediction, Recommendation
from ridgeplan.planner.interface.glossary import SOURCE_WORDS
from ridgeplan.planner.interface.quantities import GB, size_text, time_text, tokens_text
from ridgeplan.planner.interface.short_names import briefly
from ridgeplan.planner.recommendation import Alternative
from ridgeplan.roofline.device import GIB

WIDTH = 80
ROWS = 5
LONGEST_NAME = 30  # characters of a plan's, where more follows
COLUMNS = (("plan", 35), ("gamma", 5), ("ms/token", 8), ("GB", 6), ("x plain", 7), ("", 14))
SHORT_VERDICTS = {
    "within the noise": "within noise", "estimated only here": "estimated only", "quality": "gives up more",
}  # fmt: skip


def answer_text(found: Recommendation) -> str:
    """The answer, the first rows of the ranking, and what the word of its source means.

    Where it is no plain success, a warning stands above it, with what would be better.
    """
    source, hidden = found.predicted.source, max(len(found.alternatives) + 1 - ROWS, 0)
    legend = f"[{source}]: {SOURCE_WORDS[source]}"
    more = f"{hidden} more plans, full names and all reasons: --all"
    answer = map(shortened, answer_lines(found))
    parts = warning_lines(found), answer, table_lines(_rows(found)), (shortened(legend), more)
    return "\n\n".join(filter(None, map("\n".join, parts)))


def answer_lines(found: Recommendation) -> list[str]:
    """Six lines: what was asked, the plan, how soon and how fast, memory, what it gives up, and what else there is."""
    workload, predicted, best = found.plan.workload, found.predicted, found.predicted.best
    low, high = time_text(predicted.low.tpot_ms).removesuffix(" ms"), time_text(predicted.high.tpot_ms)
    many = workload.batch > 1
    each = f", {number(best.tokens_per_s / workload.batch)} per request" if many else ""
    size = f"{tokens_text(workload.context)} tokens, batch {workload.batch}"
    name = shortened(briefly(found.name), LONGEST_NAME) + _gamma(predicted)
    gain = f"{predicted.speedup:.2f}x plain" if found.baseline_fits else "plain: no room"
    return [
        f"{workload.model} on {workload.hardware}, {size}, {tokens_text(workload.new_tokens)} new",
        f"{_verb(found)} {name}: {time_text(best.tpot_ms)} per token ({low} to {high})",
        f"{gain}; first token{'s' if many else ''} after {time_text(best.ttft_ms)}; "
        f"{number(best.tokens_per_s)} tokens/s{each}",
        f"Memory {size_text(best.peak_memory_bytes)} of {size_text(found.memory_limit_bytes)} "
        f"({best.peak_memory_bytes / GIB:.1f} of {found.memory_limit_bytes / GIB:.1f} GiB)",
        _losses(found.losses),
        _caveat(found),
    ]


def warning_lines(found: Recommendation) -> Iterator[str]:
    """That a plan does not fit the GPU alone or is slow, and what to ask instead."""
    if found.warning:
        yield wrapped(found.warning)
    if found.on_device:
        yield wrapped(f"All on the GPU: {', or '.join(one.text for one in found.on_device)}")


def table_lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Aligned columns of `COLUMNS`, names on the left and figures on the right."""
    for cells in ([title for title, _ in COLUMNS], *rows):
        padded = [
            shortened(cell, width).ljust(width) if index in (0, len(COLUMNS) - 1) else cell.rjust(width)
            for index, (cell, (_, width)) in enumerate(zip(cells, COLUMNS, strict=True))
        ]
        yield " ".join(padded).rstrip()


def shortened(line: str, width: int = WIDTH) -> str:
    """A line of at most `width` characters, its end replaced by dots where it is longer."""
    return line if len(line) <= width else f"{line[: width - 3].rstrip()}..."


def _verb(found: Recommendation) -> str:
    if found.warning:
        return "Possible:"
    if found.backend == "ridgeplan":
        return "Run" if found.model_runs else "Not run here:"
    return f"For {found.backend}:"


def _gamma(predicted: Prediction) -> str:
    return f", gamma {predicted.gamma}" if predicted.gamma else ""


def _losses(losses: Sequence[str]) -> str:
    """What is given up by name; each says how much after a colon."""
    if not losses:
        return "Gives up nothing: the output keeps its distribution"
    return f"Gives up {', '.join(loss.partition(':')[0] for loss in losses)}; how much: --all"


def _caveat(found: Recommendation) -> str:
    """The first note, else how sure the gain is."""
    if found.notes:
        return f"Note: {found.notes[0]}"
    sure = found.predicted.beats_plain
    if not sure or not found.plan.speculation.active:
        return f"Plain decoding takes {time_text(found.baseline.best.tpot_ms)} per token"
    percent = "over 99%" if sure > 0.99 else f"{100 * sure:.0f}%"
    return f"Faster than plain decoding with {percent} probability [{found.predicted.source}]"


def _rows(found: Recommendation) -> list[tuple[str, ...]]:
    """The plan, the best of all where another is, and the next of the ranking."""
    best = found.best_estimated
    rows = [_row(found.name, found.predicted, "recommended")]
    if best:
        rows.append(_row(best.preset, best.predicted, _verdict(best)))
    others = [one for one in found.alternatives if not best or one.plan != best.plan]
    return rows + [_row(one.preset, one.predicted, _verdict(one)) for one in others[: ROWS - len(rows)]]


def _row(name: str, predicted: Prediction, verdict: str) -> tuple[str, ...]:
    best = predicted.best
    memory, gain = f"{best.peak_memory_bytes / GB:,.1f}", f"{predicted.speedup:.2f}x"
    return briefly(name), str(predicted.gamma), number(best.tpot_ms), memory, gain, verdict


def _verdict(other: Alternative) -> str:
    """The reason in a word or two: what stands before the first colon or comma."""
    words = re.split(r"[:,]| on | has no ", other.rejected)[0]
    if " has no " in other.rejected:
        return f"not in {words}"
    return SHORT_VERDICTS.get(words, words)
