"""A round as a Chrome trace: each operation of its passes as predicted, and beside it what a run measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ridgeplan.planner.prediction import OpTime, Prediction

PREDICTED, MEASURED = 1, 2  # processes of the trace
PARTS, OPERATIONS = 1, 2  # threads
# Of a round's parts, in the order in which they run; each draft and the verification has its operations.
ORDER = ("selection", "draft", "verification", "acceptance", "flush", "overhead")


def chrome_trace(prediction: Prediction, measured_s: Sequence[tuple[str, float]] = ()) -> dict[str, Any]:
    """The trace's JSON, in the Trace Event Format. measured_s: the parts of a measured round, in order, in seconds."""
    events = [*_predicted(prediction), *_track(MEASURED, PARTS, measured_s)]
    names = {PREDICTED: "predicted", **({MEASURED: "measured"} if measured_s else {})}
    labels = [_label("process_name", process, 0, name) for process, name in names.items()]
    labels += [_label("thread_name", process, PARTS, "parts of a round") for process in names]
    labels.append(_label("thread_name", PREDICTED, OPERATIONS, "operations, one of each kind after the other"))
    return {"displayTimeUnit": "ms", "traceEvents": [*labels, *events]}


def _predicted(prediction: Prediction) -> Iterator[dict[str, Any]]:
    """The parts of a round, and below each draft and the verification its operations."""
    start_s, drafts = 0.0, round(float(prediction.gamma))
    for part in sorted(prediction.round_s, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        seconds = float(prediction.round_s[part])
        if not seconds:
            continue
        passes = drafts if part == "draft" and drafts else 1
        pass_of = {"draft": "draft", "verification": "target"}.get(part, "")
        operations = [op for op in prediction.breakdown if op.part == pass_of]
        for number in range(passes):
            name = f"draft {number + 1} of {passes}" if part == "draft" else part
            begin_s = start_s + number * seconds / passes
            yield _event(PREDICTED, PARTS, name, begin_s, seconds / passes)
            yield from _operations(operations, begin_s)
        start_s += seconds


def _operations(operations: Sequence[OpTime], begin_s: float) -> Iterator[dict[str, Any]]:
    """All launches of each operation as one event; those of a pass's layers run in turns."""
    for op in operations:
        details = {"launches": op.launches, "class": op.kind, "flops": op.flops, "bytes": op.bytes}
        yield _event(PREDICTED, OPERATIONS, op.op, begin_s, op.seconds) | {"args": details}
        begin_s += op.seconds


def _track(process: int, thread: int, parts_s: Sequence[tuple[str, float]]) -> Iterator[dict[str, Any]]:
    begin_s = 0.0
    for name, seconds in parts_s:
        yield _event(process, thread, name, begin_s, seconds)
        begin_s += seconds


def _event(process: int, thread: int, name: str, begin_s: float, seconds: float) -> dict[str, Any]:
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": 1e6 * begin_s, "dur": 1e6 * seconds}


def _label(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
