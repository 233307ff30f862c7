r"""Times plans with drafters on a GPU beside the best plan without: code, documentation and prose, four workloads.

A small real model is inflated to a large shape: acceptance is real, time is the large model's. All plans of a workload
have the weights of the planner's best plan without drafters, so that one prefill of a text fills the caches of all of
them. Every plan then continues the text once. Rows are saved one by one; a run continues a file that is there:

    python scripts/make_texts.py texts --novels news_from_nowhere.txt american_adventures.txt
    python scripts/measure_drafters.py drafters_h200.json --model MODEL.gguf --drafter-head head/ --seconds 280 \
        --code texts/code.txt --docs texts/docs.txt --prose texts/prose.txt --random 4096x1 32768x1

Several such scripts may share a GPU (gpu_turns.py).
With --random, plain decoding and rounds that adapt continue random tokens, on which drafts are seldom accepted. With
--predict, the rows of OUTPUT are predicted and recommended again, which needs no GPU; without the head's folder those
with a head at their measured acceptance alone.

A head of the small model (`ridgeplan distill --drafter --draft-vocab 32000`) is placed in the large shape as the small
model is: its products, its cache and its 32,000 draft tokens have the sizes of a head for Llama-3.1-8B, and its
proposals are the small head's (`Inflater.draft_head` in validate/decode_bench/inflation.py).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from gpu_turns import gpu_turn
from results_file import ResultsFile, free

from ridgeplan import planner
from ridgeplan.dashboards.cli.bench_decode import WorkloadParam
from ridgeplan.dashboards.cli.model_inputs import embedded_or
from ridgeplan.dashboards.files import write_json
from ridgeplan.planner.acceptance.speculation_profile import head_settings
from ridgeplan.planner.resolution import resolve, workload_for
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.execution import RoundShape, round_shape
from ridgeplan.roofline.plan.plan import (
    Drafter,
    DrafterKind,
    KVCache,
    KVFormat,
    Plan,
    Speculation,
    TextKind,
    Weights,
)
from ridgeplan.roofline.plan.presets import autoregressive, preset
from ridgeplan.runtime import Engine, SamplingParams, WorkloadError
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.statistics import Statistics
from ridgeplan.validate.comparison import compare_measured
from ridgeplan.validate.decode_bench.inflated_model import InflatedModel
from ridgeplan.validate.decode_bench.inflation import inflated_shape
from ridgeplan.validate.decode_bench.report import DecodeCase, DecodeRow
from ridgeplan.validate.measure import WARM_TOKENS, Measured, measure
from ridgeplan.validate.prompts import LIKELY_CHARACTERS_PER_TOKEN, prompt_batch, random_batch, read_prompt

SHAPE = "Llama-3.1-8B"
WORKLOADS = ("4096x1", "122880x1", "32768x1", "32768x8")  # the first three share their weights
NEW_TOKENS = 256
DEPTH, SELF_DRAFTS = 4, 3  # of suffix proposals, and without a drafter
HEAD_DEPTH = 3  # as of the passes that were measured in vLLM
PROMPT_BYTES = 8 << 30  # that a prefill may take
AT_MEASURED = "tpot at the measured acceptance"
RECOMMENDED = "recommended, "  # and a section: which row
NOT_MEASURED = ("prefill", "peak memory", "speed-up over plain decoding")  # of plans that share a prefill


def size_of(workload: str) -> tuple[int, int]:
    """Context and batch of a word such as 32768x8."""
    return WorkloadParam().convert(workload, None, None)


def name_of(plan: Plan) -> str:
    """The row of a plan, by its drafter and the tier that this feeds; heads of other depths than vLLM's say theirs."""
    drafter = plan.speculation.drafter
    kind = f"{drafter.kind}, adaptive" if plan.speculation.adaptive else str(drafter.kind)
    if drafter.kind is DrafterKind.HEAD and drafter.depth != HEAD_DEPTH:
        kind += f", {drafter.depth} proposals"
    return f"{kind} cascade" if drafter.cascades else kind


def weights_of(plan: Plan, without: Plan) -> Weights:
    """Those of the plan without drafters; drafters that feed the target need no second copy."""
    speculation, weights = plan.speculation, without.weights
    if speculation.drafter.active and not speculation.drafter.cascades and weights.draft_copy:
        return replace(weights, draft_bits=weights.target_bits)
    return weights


def plans_for(model: InflatedModel, ask: dict[str, Any], kind: str, head: str) -> tuple[str, dict[str, Plan]]:
    """The recommended row, and the plans of all rows; those without drafters are "none" and "self-drafts"."""
    text = {"text": kind, "drafter_head": head or None}
    best = planner.recommend(model.shape, options=None, **ask, **text).plan
    without = planner.recommend(model.shape, options=None, **ask).plan
    workload = best.workload
    cascade = preset("cascade", workload)

    def to_target(drafter: DrafterKind, depth: int, window: int = 0) -> Plan:
        speculation = Speculation(depth, drafter=Drafter(drafter, depth, window=window))
        return replace(cascade, kv=KVCache(KVFormat.INT8), speculation=speculation)

    self_drafts = replace(cascade, speculation=replace(cascade.speculation, gamma=SELF_DRAFTS, drafter=Drafter()))
    plans = {"none": without, "self-drafts": self_drafts}
    window = head_settings(head).window if head else 0
    others = [to_target(DrafterKind.SUFFIX, DEPTH), cascade]
    others += [to_target(DrafterKind.HEAD, HEAD_DEPTH, window)] if head else []
    others += [preset("adaptive-cascade", workload)]
    if head:
        drafter = Drafter(DrafterKind.HEAD, HEAD_DEPTH, 2, window=window)
        others += [replace(cascade, speculation=replace(cascade.speculation, drafter=drafter))]
    plans |= {name_of(plan): plan for plan in (*others, best)}
    plans = {name: replace(plan, workload=workload, weights=weights_of(plan, without)) for name, plan in plans.items()}
    if plans["self-drafts"] == plans["none"]:
        del plans["self-drafts"]
    return name_of(best), plans


@dataclass(frozen=True, eq=False)
class Bench:
    """The inflated model, what cells have in common, and the engines of the last cell.

    drafts: 4-bit weights by group. engines: by plans that do not name a kind of text, unless they adapt by it.
    """

    model: InflatedModel
    profile: Profile
    file: ResultsFile
    head: str
    new_tokens: int
    sampling: SamplingParams
    drafts: dict[int, DecoderWeights] = field(default_factory=dict)
    engines: dict[Plan, Engine] = field(default_factory=dict)

    def text_cell(self, kind: str, text: str, context: int, batch: int) -> None:
        """Measures the missing rows of a kind of text at a context and batch."""
        ask = {"gpu": self.profile.hardware.name, "ctx": context, "batch": batch, "new_tokens": self.new_tokens}
        recommended, plans = plans_for(self.model, {**ask, "yarn": True}, kind, self.head)
        needed = text[: LIKELY_CHARACTERS_PER_TOKEN * context * batch]  # to encode the rest takes seconds
        section = f"{kind} {context}x{batch}"
        self._cell(section, plans, prompt_batch(self.model.tokenizer, context, batch, needed))
        self.file.save(RECOMMENDED + section, recommended)

    def random_cell(self, context: int, batch: int) -> None:
        """Measures the missing rows on random tokens."""
        workload = workload_for(self.model.shape, self.profile, context, self.new_tokens, batch, yarn=True)
        adaptive = replace(preset("adaptive-cascade", workload), weights=Weights(draft_bits=4))
        plans = {"plain": autoregressive(workload), "adaptive": adaptive}
        prompts = random_batch(len(self.model.tokenizer), context, batch)
        self._cell(f"random {context}x{batch}", plans, prompts)

    def _cell(self, section: str, plans: dict[str, Plan], prompts: list[list[int]]) -> None:
        begin, known = time.monotonic(), {row["row"] for row in self.file.results.get(section, [])}
        plans = {name: plan for name, plan in plans.items() if name not in known}
        while plans:  # in rounds of as many as the memory holds
            with gpu_turn(timed=False):
                engines = self._engines(plans, prompts)
                built = {name: engine for name, engine in engines.items() if isinstance(engine, Engine)}
                if filled := list(dict.fromkeys(built.values())):
                    filled[0].prefill_with(filled[1:], prompts, self.new_tokens)
            print(f"{section}: ready after {time.monotonic() - begin:.1f} s", flush=True)
            rows = built or engines
            calls = {name: partial(self._row, plans[name], rows[name], prompts) for name in rows}
            with gpu_turn(timed=True):
                self.file.measure(section, calls)
            plans = {name: plan for name, plan in plans.items() if name not in rows}

    def _engines(self, plans: dict[str, Plan], prompts: list[list[int]]) -> dict[str, Engine | str]:
        """The plans' engines, ready to be measured, or why they cannot run; the engines of other plans are closed."""
        keys = {name: self._key(plan) for name, plan in plans.items()}
        for key in self.engines.keys() - set(keys.values()):
            self.engines.pop(key).close()
        free()
        engines: dict[str, Engine | str] = {}
        for name, key in keys.items():
            try:
                engines[name] = self.engines[key] if key in self.engines else self._new_engine(key, prompts)
            except WorkloadError as error:  # such as too little memory beside the others
                engines[name] = str(error)
                free()
        return engines

    def _key(self, plan: Plan) -> Plan:
        if plan.speculation.adaptive:
            return plan
        return replace(plan, workload=replace(plan.workload, text="", drafter_rows=""))

    def _new_engine(self, plan: Plan, prompts: list[list[int]]) -> Engine:
        group, copied = plan.weights.group, plan.weights.draft_copy
        engine = self.model.engine(plan, self.drafts.get(group) if copied else None, profile=self.profile)
        if copied:
            self.drafts[group] = engine.draft_weights
        if engine.device.type == "cuda":  # kernels are compiled and graphs captured
            engine.generate([prompt[:WARM_TOKENS] for prompt in prompts], 2, self.sampling)
            free()
            if torch.cuda.mem_get_info()[0] < PROMPT_BYTES:
                engine.close()
                raise WorkloadError("the other plans of the cell leave too little memory")
        self.engines[plan] = engine
        return engine

    def _row(self, plan: Plan, engine: Engine | str, prompts: list[list[int]]) -> dict[str, Any]:
        if isinstance(engine, str):
            return {"error": engine}
        measured = measure(engine, prompts, self.new_tokens, self.sampling, filled=True)
        compared = compare_measured(plan, self.model.shape, self.profile, measured, function=self.model.function)
        row = DecodeRow(DecodeCase.of(plan), plan.speculation.gamma, measured, compared, None).to_dict()
        row["comparison"] = [each for each in row["comparison"] if each["name"] not in NOT_MEASURED]
        return row


def recommend_again(results: dict[str, Any], section: str, shape: ModelShape, profile: Profile, head: str) -> None:
    """Saves which row of a section is recommended today.

    Without the head's folder, a row with the head stays where it is predicted to be faster.
    """
    rows = {row["row"]: row for row in results[section] if "error" not in row}
    workload = Plan.from_dict(next(iter(rows.values()))["given"]).workload
    ask = {"ctx": workload.context, "batch": workload.batch, "new_tokens": workload.new_tokens, "yarn": True}
    text = {"text": section.split(" ")[0], "drafter_head": head or None}
    best = planner.recommend(shape, profile.hardware.name, **ask, **text)
    saved = rows[results[RECOMMENDED + section]]
    expected_ms = next(each["predicted"] for each in saved["comparison"] if each["name"] == "tpot")
    with_head = Plan.from_dict(saved["given"]).speculation.drafter.trained
    if head or not with_head or best.predicted.best.tpot_ms < expected_ms:
        results[RECOMMENDED + section] = name_of(best.plan)


def rounds_of(plan: Plan, figures: dict[str, Any]) -> tuple[tuple[RoundShape, int], ...]:
    """Rounds of a row by shape; of older rows, which count them by gamma, where no two shapes have the same."""
    if "rounds_of" in figures:
        return tuple((RoundShape(*shape), rounds) for shape, rounds in figures["rounds_of"])
    shapes = [round_shape(kind) for kind in plan.speculation.round_kinds]
    if len({shape.gamma for shape in shapes}) < len(shapes):
        return ()
    return tuple((shape, figures["rounds_at"][shape.gamma]) for shape in shapes)


def predict_again(path: Path, profile: Profile, function: ModelShape, head: str) -> None:
    """Predicts the saved rows anew by a profile.

    function: shape of the small model, whose acceptance the rows have. head: where its draft head is today.
    """
    results = json.loads(path.read_text(encoding="utf-8"))
    function = replace(function, name=results["settings"]["function"])
    shape = inflated_shape(function, load_shape(results["settings"]["shape"]))
    rows = [row for section in results.values() if isinstance(section, list) for row in section if "error" not in row]
    for row in rows:
        plan, figures = Plan.from_dict(row["given"]), row["measured"]
        workload = replace(plan.workload, drafter_head=head if plan.workload.drafter_head else "")
        kept = {each.name: figures[each.name] for each in fields(Statistics) if each.name in figures}
        statistics = Statistics(**{**kept, "rounds_of": rounds_of(plan, figures)},
                                prompt_tokens=(workload.context,) * workload.batch)  # fmt: skip
        measured = Measured(workload.context, workload.new_tokens, workload.batch, statistics)
        plan = replace(plan, workload=workload)
        compared = compare_measured(plan, shape, profile, measured, function=function)
        predicted = {each.name: each for each in compared.rows}
        unknown = plan.speculation.drafter.trained and not head
        for saved in row["comparison"]:
            if unknown and saved["name"] != AT_MEASURED:
                continue
            figure = replace(predicted[saved["name"]], measured=saved["measured"])
            saved.update(predicted=figure.predicted, error=figure.error)
    for section in [name.removeprefix(RECOMMENDED) for name in results if name.startswith(RECOMMENDED)]:
        recommend_again(results, section, shape, profile, head)
    write_json(path, results)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gpu", default="h200", help="whose calibration predicts")
    parser.add_argument("--shape", default=SHAPE, help="large model: a catalog name or a folder with a config.json")
    parser.add_argument("--model", help="small model that computes the tokens; by default the embedded one")
    parser.add_argument("--drafter-head", default="", help="folder of its draft head")
    parser.add_argument("--workloads", nargs="*", default=WORKLOADS, help="CONTEXTxBATCH")
    parser.add_argument("--random", nargs="*", default=(), help="CONTEXTxBATCH on random tokens, measured last")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no further cell begins")
    parser.add_argument("--predict", action="store_true", help="only predict the rows of OUTPUT again")
    for kind in TextKind:
        parser.add_argument(f"--{kind}", type=Path, help="text file")
    chosen, end = parser.parse_args(arguments), time.monotonic()
    end += chosen.seconds
    shape, profile = resolve(chosen.shape, chosen.gpu)
    if chosen.predict:
        predict_again(chosen.output, profile, load_shape(embedded_or(chosen.model)), chosen.drafter_head)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = InflatedModel.load(embedded_or(chosen.model), shape, device)
    texts = {kind: read_prompt(path) for kind in TextKind if (path := getattr(chosen, kind))}
    file, sampling = ResultsFile.at(chosen.output), SamplingParams(temperature=chosen.temperature)
    file.save("settings", {
        "shape": shape.name, "function": model.function.name, "head": Path(chosen.drafter_head).name,
        "new tokens": chosen.new_tokens, "temperature": chosen.temperature,
        "texts": {
            kind: {"characters": len(text), "sha256": sha256(text.encode()).hexdigest()[:16]}
            for kind, text in texts.items()
        },
    })  # fmt: skip
    bench = Bench(model, profile, file, chosen.drafter_head, chosen.new_tokens, sampling)
    cells = [(f"{kind} {size}", partial(bench.text_cell, kind, texts[kind], *size_of(size)))
             for size in chosen.workloads for kind in texts]  # fmt: skip
    cells += [(f"random {size}", partial(bench.random_cell, *size_of(size))) for size in chosen.random]
    for name, measure_cell in cells:
        if time.monotonic() > end:
            print(f"no time for {name}", flush=True)
        else:
            measure_cell()


if __name__ == "__main__":
    main()
