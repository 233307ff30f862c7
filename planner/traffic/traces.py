"""Traces of requests: files of Azure's LLM inference dataset (CSV) and of Mooncake (JSONL)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ridgeplan.planner.traffic.requests import Requests
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.plan import MAX_TOKENS

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length")
MOONCAKE_BLOCK_TOKENS = 512  # of a hash id
MILLISECONDS = 1e-3
MAX_HASH_ID, MAX_DIGITS = 2**63, 100


class BadTrace(ValueError):
    """A trace file that is missing, damaged, or has a wrong figure."""


def read_trace(path: Path, limit: int | None = None) -> Requests:
    """The first `limit` requests of a trace file, from time 0 in the order of their arrival.

    .csv: Azure's columns TIMESTAMP, ContextTokens, GeneratedTokens. .jsonl: Mooncake's objects with timestamp (ms),
    input_length, output_length and, in every line or in none, hash_ids. Raises BadTrace, which names the line.
    """
    readers = {".csv": _azure_rows, ".jsonl": _mooncake_rows}
    if path.suffix not in readers:
        raise BadTrace(f"trace {brief(str(path))} ends in {path.suffix!r}; allowed: {', '.join(readers)}")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(islice(readers[path.suffix](lines, path), limit))
    except OSError as error:
        raise BadTrace(f"cannot read trace {brief(str(path))}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise BadTrace(f"trace {brief(str(path))} is not UTF-8 text with fields of ordinary lengths") from None
    if not rows:
        raise BadTrace(f"trace {brief(str(path))} has no requests; allowed: one or more")
    times, prompts, outputs, hashes = zip(*rows, strict=True)
    if any(hashes) and not all(ids is not None for ids in hashes):
        raise BadTrace(f"trace {brief(str(path))}: hash_ids are in some lines only; allowed: in every line or in none")
    arrival_s = np.array(times)
    order = np.argsort(arrival_s, kind="stable")
    columns = (np.array(column, dtype=np.int64)[order] for column in (prompts, outputs))
    requests = Requests.of(arrival_s[order] - arrival_s.min(), *columns)
    if not any(hashes):
        return requests
    ids = [hashes[place] for place in order]
    return Requests(**{**vars(requests), "hash_ids": ids, "hash_tokens": MOONCAKE_BLOCK_TOKENS})


Row = tuple[float, int, int, list[int] | None]


def _azure_rows(lines: Any, path: Path) -> Iterator[Row]:
    reader = csv.DictReader(lines)
    missing = [name for name in AZURE if name not in (reader.fieldnames or ())]
    if missing:
        raise BadTrace(f"trace {brief(str(path))} has no column {', '.join(missing)}; allowed: {', '.join(AZURE)}")
    for row in reader:
        where = f"trace {brief(str(path))}, line {reader.line_num}"
        try:
            arrived = datetime.fromisoformat(str(row["TIMESTAMP"]).strip())
            seconds = (arrived.replace(tzinfo=None) - datetime.min).total_seconds()
        except ValueError:
            raise BadTrace(f"{where}: TIMESTAMP is {brief(row['TIMESTAMP'])}; allowed: a date and time") from None
        yield seconds, _length(row, AZURE[1], where), _length(row, AZURE[2], where), None


def _mooncake_rows(lines: Any, path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"trace {brief(str(path))}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise BadTrace(f"{where} is not JSON") from None
        if not isinstance(row, dict) or any(name not in row for name in MOONCAKE):
            raise BadTrace(f"{where} lacks {' or '.join(MOONCAKE)}; allowed: an object with all of them")
        time_ms, ids = row["timestamp"], row.get("hash_ids")
        if isinstance(time_ms, bool) or not isinstance(time_ms, (int, float)) or not 0 <= time_ms < 1e15:
            raise BadTrace(f"{where}: timestamp is {brief(time_ms)}; allowed: milliseconds from 0")
        prompt = _length(row, MOONCAKE[1], where)
        yield MILLISECONDS * time_ms, prompt, _length(row, MOONCAKE[2], where), _hash_ids(ids, prompt, where)


def _hash_ids(ids: object, prompt_tokens: int, where: str) -> list[int] | None:
    """The ids of the prompt's full blocks; None where the trace has none."""
    if ids is None:
        return None
    if not isinstance(ids, list) or any(type(each) is not int or not 0 <= each < MAX_HASH_ID for each in ids):
        raise BadTrace(f"{where}: hash_ids is {brief(ids)}; allowed: a list of whole numbers from 0")
    return ids[: prompt_tokens // MOONCAKE_BLOCK_TOKENS]


def _length(row: Mapping[str, Any], name: str, where: str) -> int:
    value = row[name]
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < MAX_DIGITS:
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise BadTrace(f"{where}: {name} is {brief(value)}; allowed: whole numbers from 0 to {MAX_TOKENS}")
    return max(value, 1)
