"""Rounds of mixtures of experts and of latent attention at true size with random weights, beside their predictions.

Routers are random and so spread tokens evenly, as a trained one is meant to. One command on a GPU:

    python scripts/measure_routed.py results.json --profile profile.json

where the profile is that of `ridgeplan calibrate` on this machine (by default the user's own).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results_file import ResultsFile

from ridgeplan.planner.prediction import predict
from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile, load_profile
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import DraftCodes, KVFormat, Plan, Speculation, Weights, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.plan.support import missing_execution
from ridgeplan.validate.random_model import RandomModel, measured_round

MODELS = ("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V2-Lite", "zai-org/GLM-4.7-Flash")
CELLS = ((32_768, 1), (122_880, 1), (32_768, 8))  # context and batch
NEW_TOKENS, GAMMA = 256, 3


def plans_of(workload: Workload) -> dict[str, Plan]:
    """Plain decoding, 8- and 4-bit weights, and drafts by 4-bit weights or upper planes."""
    plain = preset("autoregressive", workload)
    drafting = Speculation(GAMMA, DraftCodes.FULL)
    return {
        "plain": plain,
        "int8 weights": replace(plain, weights=Weights(8, 8)),
        "int4 weights": replace(plain, weights=Weights(4, 4)),
        "4-bit drafts": replace(plain, weights=Weights(16, 4), speculation=drafting),
        "upper planes": replace(plain, weights=Weights(8, 4), speculation=drafting),
        "int8 weights, int8 KV": replace(plain, weights=Weights(8, 8), kv=replace(plain.kv, format=KVFormat.INT8)),
        "quantspec-weights": preset("quantspec-weights", workload),
    }


def measured(model: RandomModel, plan: Plan, profile: Profile) -> dict[str, Any]:
    """Milliseconds of a round's parts, measured and predicted."""
    times, prediction = (
        measured_round(model, plan, steady=model.device.type == "cuda"),
        predict(plan, model.shape, profile),
    )
    draft_ms, verify_ms = 1e3 * times.draft_s, 1e3 * times.verify_s
    predicted = prediction.draft_step_ms, prediction.verify_ms
    return {
        "draft_ms": draft_ms, "verify_ms": verify_ms, "spread": times.spread,
        "predicted_draft_ms": predicted[0], "predicted_verify_ms": predicted[1],
    }  # fmt: skip


def cells_of(model: RandomModel, profile: Profile, context: int, batch: int) -> dict[str, Any]:
    """The plans of a cell that run and fit, by name."""
    workload = Workload(model.shape.name, profile.device, context, NEW_TOKENS, batch)
    plans = plans_of(workload)
    return {
        f"{context} x {batch}, {name}": partial(measured, model, plan, profile)
        for name, plan in plans.items()
        if not missing_execution(plan, model.shape) and model.fits(plan)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--cells", nargs="*", default=[f"{context}x{batch}" for context, batch in CELLS])
    options = parser.parse_args()
    profile = load_profile(options.profile) if options.profile else this_machine()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    file = ResultsFile.at(options.output)
    for name in options.models:
        model = RandomModel.build(load_shape(name), device, Machine.of(profile))
        for cell in options.cells:
            context, batch = (int(part) for part in cell.split("x"))
            file.measure(name, cells_of(model, profile, context, batch))


if __name__ == "__main__":
    main()
