"""Words of the answers, explained: terms of terms.toml, and the presets that policies define."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from ridgeplan.planner.plan import PlanError, Workload
from ridgeplan.planner.presets import PRESETS, describe
from ridgeplan.planner.quality import losses
from ridgeplan.roofline.catalog.mistakes import brief

SOURCE_WORDS = {
    "measured": "measured on this model",
    "calibrated": "from kernels that were timed on this machine",
    "transferred": "from kernels or acceptance of another machine or model",
    "published": "from a paper's figures",
    "extrapolated": "beyond all data that there is",
    "prior": "an assumption: nothing like it was measured",
}


@cache
def terms() -> dict[str, str]:
    """Every term with its meaning, in the file's order; then the words for sources."""
    with Path(__file__).with_name("terms.toml").open("rb") as file:
        found: dict[str, str] = tomllib.load(file)
    return found | {word: f"A source of figures: {told}." for word, told in SOURCE_WORDS.items()}


def explain(word: str) -> str:
    """What a term or a preset is. Raises PlanError with near words for an unknown one."""
    wanted = word.strip().casefold()
    known = {name.casefold(): text for name, text in terms().items()}
    if wanted in known:
        return known[wanted]
    if wanted in PRESETS:
        return explain_preset(wanted)
    near = get_close_matches(wanted, [*known, *PRESETS], n=3)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    raise PlanError(f"unknown term {brief(word)}.{hint} Allowed: a preset, or one of {', '.join(terms())}")


def explain_preset(name: str) -> str:
    """What a preset changes against plain decoding, and what it gives up."""
    plan = PRESETS[name](Workload("any", "any", 32_768))
    given_up = "; ".join(losses(plan)) or "nothing: the output keeps the model's distribution"
    drafts = f" Drafts {plan.speculation.gamma} tokens a round as published." if plan.speculation.active else ""
    return f"A preset: {describe(plan)}.{drafts} Gives up: {given_up}."
