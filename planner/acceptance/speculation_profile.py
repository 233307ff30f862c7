"""speculation_profile.json beside a draft head's weights: how often its proposals were accepted.

The format is NVIDIA Model Optimizer's (NVIDIA/Model-Optimizer pull requests 2247, 2315 and 2316): conditional and
marginal rates by position, the mean tokens of a pass with its own (`mean_accept_length`), and a histogram of them. It
has one set of conditions. This package's rows, one for each text and context, are kept among the conditions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeplan.planner.acceptance.drafter_rows import EAGLE3, MTP, NOT_STATED, DrafterRow
from ridgeplan.roofline.catalog.families import draft_head_keys, mtp_layers_of
from ridgeplan.roofline.catalog.files import json_or, read_document
from ridgeplan.roofline.catalog.validation import brief, build
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.plan.plan import MAX_TOKENS, DrafterKind, PlanError

NAME, CONFIG = "speculation_profile.json", "config.json"
ROWS = "rows"
METHODS = {
    "eagle3": (DrafterKind.HEAD, EAGLE3), "mtp": (DrafterKind.HEAD, MTP), "dflash": (DrafterKind.BLOCK, "DFlash"),
    "dflash2": (DrafterKind.BLOCK, "DFlash2"), "dspark": (DrafterKind.BLOCK, "DSpark"),
}  # fmt: skip


@dataclass(frozen=True)
class HeadSettings:
    """What of a head's config.json the planner takes. draft_vocab: 0 for the model's own; window: 0 for none.

    max_context: tokens of the longest sequence; 0 if it does not say. method: "eagle3", or "mtp" for a model's own
    layer for multi-token prediction.
    """

    draft_vocab: int
    window: int
    max_context: int
    method: str = "eagle3"

    def row_name(self, window: int | None = None) -> str:
        """The drafter's in rows, with a window that it reads; by default its own, 0 for none."""
        (_, name), window = METHODS[self.method], self.window if window is None else window
        return f"{name} with a window of {window}" if window else name


def head_settings(folder: str) -> HeadSettings:
    """Of a head's folder. Raises PlanError, one line that names it."""
    keys = draft_head_keys(_object(Path(folder), CONFIG))
    if mtp_layers_of(keys):
        return HeadSettings(0, 0, 0, "mtp")
    sizes = [keys.get(name) or 0 for name in ("draft_vocab_size", "sliding_window", "max_position_embeddings")]
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise PlanError(f"{CONFIG} of {brief(folder)} has sizes {brief(sizes)}; allowed: whole numbers")
    draft_vocab, window, max_context = sizes
    return HeadSettings(draft_vocab, window, max_context)


def head_rows(folder: str) -> tuple[DrafterRow, ...]:
    """What was measured of a head, of this package's rows or of another producer's single one; often nothing.

    Raises PlanError, one line that names the folder, for a damaged file.
    """
    if not Path(folder, NAME).exists():
        return ()
    keys = _object(Path(folder), NAME)
    conditions = keys.get("measurement_conditions") or {}
    if not isinstance(conditions, dict):
        raise PlanError(f"measurement_conditions of {brief(folder)} are {brief(conditions)}; allowed: an object")
    if isinstance(rows := conditions.get(ROWS), list):
        return tuple(build(DrafterRow, row, f"{NAME} of {brief(folder)}: ") for row in rows)
    rates, depth = keys.get("conditional_accept_rates"), keys.get("num_speculative_tokens")
    if not rates:
        return ()  # a stub of a checkpoint that was not measured
    valid = isinstance(rates, list) and all(isinstance(rate, (int, float)) and 0 <= rate <= 1 for rate in rates)
    if not valid or not isinstance(depth, int) or not 0 < len(rates) <= MAX_GAMMA:
        raise PlanError(f"conditional_accept_rates of {brief(folder)} are {brief(rates)}; allowed: shares of 0 to 1")
    settings = head_settings(folder)
    method = keys.get("method") or settings.method  # producers may leave it out
    if method not in METHODS:
        raise PlanError(f"method of {brief(folder)} is {brief(method)}; allowed: {', '.join(METHODS)}")
    if "block" in (keys.get("verification_method"), conditions.get("verification_method")):  # rates of whole blocks
        raise PlanError(f"verification_method of {brief(folder)} is 'block'; allowed: one token after another")
    kind, name = METHODS[method]
    prompt, lengths = conditions.get("isl"), keys.get("acceptance_length_histogram")
    passes = [count for count in lengths.values() if isinstance(count, int)] if isinstance(lengths, dict) else []
    return (
        DrafterRow(
            kind=kind, name=settings.row_name() if method == settings.method else name, model=NOT_STATED,
            depth=len(rates), source="measured", rounds=max(sum(passes), 0), acceptance_at=tuple(rates),
            where=f"{NAME}, {brief(conditions.get('dataset', 'of a text that it does not name'))}",
            context=min(prompt, MAX_TOKENS) if isinstance(prompt, int) and prompt > 0 else 0,
        ),
    )  # fmt: skip


def profile_document(
    rows: Sequence[DrafterRow],
    rounds: int,
    verified_at: Sequence[float],
    accepted_at: Sequence[float],
    method: str = "eagle3",
) -> dict[str, Any]:
    """The document of a folder with these rows. rounds, verified_at, accepted_at: the counts of the last row's passes.

    The counts are by position: proposals that were compared with the target, and accepted.
    """
    conditional = [accepted / max(verified, 1) for accepted, verified in zip(accepted_at, verified_at, strict=True)]
    reached = [rounds, *accepted_at, 0]
    last = rows[-1]
    return {
        "method": method,
        "num_speculative_tokens": len(conditional),
        "conditional_accept_rates": conditional,
        "marginal_accept_rates": [accepted / rounds for accepted in accepted_at],
        "mean_accept_length": 1 + sum(accepted_at) / rounds,
        "acceptance_length_histogram": {
            str(length): int(reached[length - 1] - reached[length]) for length in range(1, len(reached))
        },
        "measurement_conditions": {
            "dataset": last.where, "isl": last.context, ROWS: [asdict(row) for row in rows],
        },
    }  # fmt: skip


def _object(folder: Path, name: str) -> Mapping[str, Any]:
    try:
        keys = json_or(PlanError, read_document(folder / name))
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise PlanError(f"cannot read {name} of the draft head {brief(str(folder))}: {reason}") from None
    if not isinstance(keys, dict):
        raise PlanError(f"{name} of the draft head {brief(str(folder))} is {brief(keys)}; allowed: an object")
    return keys
