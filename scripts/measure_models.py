"""Rounds of hybrids, windows, experts and latents at true size with random weights, beside their predictions.

Routers are random, and rows sample tokens of their own, so experts are hit evenly, as trained routers are meant to do.
Caches are filled with random values: no prompt is read. Every case is saved when it is measured, one that fails with
its error. A run continues a file that is there. One command on a GPU:

    python scripts/measure_models.py results.json --seconds 300

With --predict it predicts the rows of such a file again by --profile, which needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results_file import ResultsFile, free

from ridgeplan.dashboards.files import write_json
from ridgeplan.planner.prediction import Prediction, predict
from ridgeplan.planner.recommend import recommend
from ridgeplan.planner.resolution import this_machine, workload_for
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile, load_profile
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import DraftCodes, KVFormat, Plan, Speculation, Weights, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.plan.support import only_estimated
from ridgeplan.validate.random_model import TIMED_ROUNDS, RandomModel, measured_round
from ridgeplan.validate.suite.sections import case_text, predicted_parts, rows_of

MODELS = (  # the most important first
    "Qwen/Qwen3.5-9B", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b", "google/gemma-3-27b-it",
    "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen3-Next-80B-A3B-Instruct", "microsoft/phi-4",
)  # fmt: skip
CELLS = ((32_768, 1), (120_000, 1), (32_768, 8))  # context and batch
NEW_TOKENS = 256
GROWN = TIMED_ROUNDS["cuda"]  # tokens that sequences gained in a row that does not say, as random drafts are rejected


def cases_of(model: RandomModel, profile: Profile) -> Iterator[tuple[str, Plan]]:
    """Plans that run and fit, by the names of their cases, the most important first."""
    workloads = [workload_for(model.shape, profile, context, NEW_TOKENS, batch, yarn=True) for context, batch in CELLS]
    seen = set()
    for name in ("plain", "best", "quantspec-weights", "int8", "upper planes", "int4 weights"):
        for workload in workloads:
            try:
                plan = _plan(name, workload, model.shape, profile)
            except ValueError as error:  # such as nothing that fits
                print(f"{model.shape.name}, {name}: {error}", flush=True)
                continue
            if plan not in seen and model.fitting([plan]) and not only_estimated(plan, model.shape):
                seen.add(plan)
                yield f"{workload.context} x {workload.batch}, {name}", plan


def _plan(name: str, workload: Workload, shape: ModelShape, profile: Profile) -> Plan:
    plain = preset("autoregressive", workload)
    if name == "best":
        sizes = {"batch": workload.batch, "new_tokens": NEW_TOKENS, "yarn": True}
        return recommend(shape, profile.hardware.name, workload.context, profile=profile, **sizes).plan
    plans = {
        "plain": plain,
        "quantspec-weights": preset("quantspec-weights", workload),
        "upper planes": replace(plain, weights=Weights(8, 4), speculation=Speculation(3, DraftCodes.FULL)),
        "int8": replace(plain, weights=Weights(8, 8), kv=replace(plain.kv, format=KVFormat.INT8)),
        "int4 weights": replace(plain, weights=Weights(4, 4)),
    }
    return plans[name]


def measured(model: RandomModel, plan: Plan, profile: Profile) -> dict[str, Any]:
    """Milliseconds of a round's parts and of a token, measured and predicted; of a case that fails, its error."""
    try:
        times = measured_round(model, plan, steady=False)
    except Exception:  # noqa: BLE001 - every other case shall still run
        return {"error": traceback.format_exc(limit=-4)}
    return {
        "plan": case_text(plan),
        "given": plan.to_dict(),
        "parts": {
            row.kind: {"ms": row.measured, "predicted_ms": row.predicted}
            for row in rows_of(plan, model, profile, times)
        },
        "grown": times.grown,
        "round_ms": 1e3 * times.total_s,
        "spread": times.spread,
        **_predicted(predict(plan, model.shape, profile), 1e3 * times.total_s),
    }  # fmt: skip


def measure(name: str, file: ResultsFile, profile: Profile, deadline: float) -> None:
    """Measures the cases of a model until a deadline in seconds of the monotonic clock."""
    shape = load_shape(name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, weights = RandomModel.build(shape, device, Machine.of(profile)), None
    for case, plan in cases_of(model, profile):
        if time.monotonic() > deadline:
            print(f"{name}: no time for {case} and what follows", flush=True)
            return
        if plan.weights != weights:  # codes of the last plan take memory
            model.quantized.clear()
            free()
        weights = plan.weights
        file.measure(name, {case: partial(measured, model, plan, profile)})
        free()  # raises if an error of the device has ended this process's use of it


def predict_again(path: Path, profile: Profile) -> None:
    """Predicts the saved rounds anew, and says which rows it leaves as they are.

    It also says which best plans are not those that would be recommended by `profile`.
    """
    results = json.loads(path.read_text(encoding="utf-8"))
    for name, rows in results.items():
        if name not in MODELS:
            continue
        shape = load_shape(name)
        for row in rows:
            if "round_ms" not in row or "given" not in row:
                print(f"{name}, {row['row']}: not predicted, as the row has no measured round or no plan")
                continue
            plan = Plan.from_dict(row["given"])
            row.update(_predicted(predict(plan, shape, profile), row["round_ms"]))
            for kind, predicted_ms in predicted_parts(plan, shape, profile, row.get("grown", GROWN)).items():
                row["parts"][kind]["predicted_ms"] = predicted_ms
            if row["row"].endswith("best") and (today := _plan("best", plan.workload, shape, profile)) != plan:
                print(f"{name}, {row['row']}: measured {row['plan']}, recommended today {case_text(today)}")
    write_json(path, results)


def _predicted(prediction: Prediction, round_ms: float) -> dict[str, float]:
    tokens = prediction.tokens_per_round
    times = {"tpot_ms": round_ms / tokens, "predicted_tpot_ms": prediction.best.tpot_ms}
    return {"tokens_per_round": tokens, **times}  # tokens as predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--predict", action="store_true", help="only predict the rows of OUTPUT again")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    profile = load_profile(options.profile) if options.profile else this_machine()
    if options.predict:
        predict_again(options.output, profile)
        return
    file = ResultsFile.at(options.output)
    for done, name in enumerate(options.models):
        now, saved = time.monotonic(), len(file.results.get(name, []))
        try:
            measure(name, file, profile, now + (end - now) / (len(options.models) - done))
        except Exception:  # noqa: BLE001 - after which the device may be of no use to this process
            file.save(f"{name}, failed", traceback.format_exc(limit=-4))
            rest = options.models[done + (len(file.results.get(name, [])) == saved) :]
            known = ["--profile", str(options.profile)] if options.profile else []
            arguments = [str(options.output), *known, "--seconds", str(end - time.monotonic()), "--models", *rest]
            os.execv(sys.executable, [sys.executable, __file__, *arguments])
        free()


if __name__ == "__main__":
    main()
