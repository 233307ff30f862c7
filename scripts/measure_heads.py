"""Trains three retrieval heads for a model and measures each: by the language loss, by attention, and by both.

Each head trains for the same number of seconds, in bfloat16 on a GPU. Hit rates and the acceptance of drafts follow, at
equal budgets and beside StreamingLLM (SpeContext, sections 4.1 and 7.4). The results are saved after every stage; a
stage that fails or exceeds its time is saved with the reason, and the next one begins.

    python scripts/measure_heads.py --model MODEL.gguf --train american_adventures.txt --test news.txt --output OUT
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from results_file import ResultsFile, free

from ridgeplan.runtime.model.checkpoint import load_config, load_state_dict, load_tokenizer
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.source import model_source
from ridgeplan.runtime.retrieval.distill import Distillation, Training
from ridgeplan.runtime.retrieval.head import save_head
from ridgeplan.runtime.retrieval.student import Teacher, make_student, pruned
from ridgeplan.validate.acceptance import Passage
from ridgeplan.validate.prompts import first_tokens, read_prompt
from ridgeplan.validate.studies import drafts, retrieval

LOSSES = {"language": (1.0, 0.0), "attention": (0.0, 1.0), "both": (1.0, 1.0)}  # weights of the two losses
WARM_STEPS = 12  # the latter half is timed
MAX_TOKENS = 1 << 20  # of the text to train on


@dataclass(frozen=True)
class Deadline:
    """Seconds from its making on."""

    seconds: float
    started: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """A deadline so many seconds from now."""
        return cls(seconds, time.monotonic())

    def check(self, *_: Any) -> None:
        """Raises TimeoutError when the time is over; serves as a report of progress."""
        if time.monotonic() - self.started > self.seconds:
            raise TimeoutError(f"more than {self.seconds} s")


class Trainer:
    """The teacher, loaded once, and a fresh student for each head."""

    def __init__(self, model: str, text: str, tokens: int, rate: float, batch: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        source = model_source(model)
        hub = load_config(source)
        self.config = decoder_config(hub, source)
        state = load_state_dict(source, self.config, torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.student = make_student(hub, state, self.device)
        self.teacher = Teacher(Decoder(self.config, self.device), state.decoder_weights(self.device))
        self.ids = first_tokens(load_tokenizer(source), MAX_TOKENS, text)
        self.sizes = {"tokens": tokens, "rate": rate, "batch": batch, "queries": 256}

    def train(self, name: str, seconds: float, output: Path) -> dict[str, Any]:
        """Trains a head for about so many seconds and saves it."""
        language, attention = LOSSES[name]
        options = {**self.sizes, "language": language, "attention": attention}
        pace: list[float] = []
        self._run(Training(steps=WARM_STEPS, **options), lambda *_: pace.append(time.monotonic()))
        half = WARM_STEPS // 2
        step_s = (pace[-1] - pace[half - 1]) / half
        training = Training(steps=max(WARM_STEPS, int(seconds / step_s)), **options)
        deadline, curve = Deadline.after(1.3 * seconds), list[float]()

        def report(step: int, loss: float) -> None:
            curve.append(loss)
            deadline.check()

        student = self._run(training, report)
        save_head(output, pruned(student, self.config.shape, training.tokens))
        spent = time.monotonic() - deadline.started
        tenth = max(1, len(curve) // 10)
        ends = {"first_loss": sum(curve[:tenth]) / tenth, "last_loss": sum(curve[-tenth:]) / tenth}
        done = {"steps_done": len(curve), "seconds": round(spent, 1), "step_ms": round(1e3 * step_s, 1)}
        return {**asdict(training), "text_tokens": len(self.ids), **done, **ends}

    def _run(self, training: Training, report: Callable[[int, float], None]) -> Any:
        """A student after its steps, or as many of them as `report` allows."""
        student = copy.deepcopy(self.student)
        with suppress(TimeoutError):
            Distillation(self.teacher, student, self.ids, training).run(report)
        return student


def hit_rates(args: argparse.Namespace, text: str, head: Path, first: bool, deadline: Deadline) -> list[dict[str, Any]]:
    """Rows of `study retrieval`; the methods without a head and the model's own choice only for the first head."""
    methods = ("retrieval-head", "retrieval-batch", *(("streamingllm",) * first))
    sizes = retrieval.RetrievalSizes((args.context,), tuple(args.budgets), methods, args.steps, args.passages)
    rows = retrieval.study(args.model, text, sizes, str(head), on_progress=deadline.check)
    return [asdict(row) for row in rows if first or row.method != retrieval.MODEL]


def acceptance(
    args: argparse.Namespace, text: str, head: Path, first: bool, deadline: Deadline
) -> list[dict[str, Any]]:
    """Rows of `study drafts` at the same budgets, with the text's own tokens as drafts."""
    policies = ("retrieval-head", *(("streamingllm",) * first))
    cases = drafts.drafts_of(policies, [budget / args.context for budget in args.budgets], ("bf16",))
    passage = Passage(text, "test", (args.context,), args.drafted)
    forced = drafts.TEACHER_FORCED
    rows = drafts.study(
        args.model, passage, cases, None, deadline.check, verification=forced, passages=args.passages, head=str(head)
    )
    return [{**asdict(row), "budget": round(row.ratio * args.context)} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True, help="text to train on")
    parser.add_argument("--test", required=True, help="text to measure on")
    parser.add_argument("--output", type=Path, required=True, help="folder of results.json and the heads")
    parser.add_argument("--seconds", type=float, default=22, help="of training, for each head")
    parser.add_argument("--limit", type=float, default=15, help="seconds of each measurement of a head")
    parser.add_argument("--tokens", type=int, default=4096, help="of a passage to train on")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--context", type=int, default=8064)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--steps", type=int, default=8, help="decode steps whose choices are compared, of each passage")
    parser.add_argument("--drafted", type=int, default=64, help="tokens of each passage that are drafted")
    parser.add_argument("--passages", type=int, default=2)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results, started = ResultsFile.at(args.output / "results.json"), time.monotonic()
    options = {name: value for name, value in vars(args).items() if name not in ("model", "train", "test", "output")}
    files = {name: Path(getattr(args, name)).name for name in ("model", "train", "test")}
    results.save("settings", {**options, **files})

    def stage(name: str, measure: Callable[[], Any]) -> None:
        begin = time.monotonic()
        try:
            value: Any = measure()
        except (TimeoutError, RuntimeError, ValueError) as error:
            value = {"failed": f"{type(error).__name__}: {error}"}
        results.save(name, value)
        now = time.monotonic()
        print(f"{now - started:6.1f} s: {name} took {now - begin:.1f} s", flush=True)
        free()

    trainer = Trainer(args.model, read_prompt(args.train), args.tokens, args.rate, args.batch)
    print(f"{time.monotonic() - started:6.1f} s: loaded", flush=True)
    heads = {name: args.output / f"head-{name}.safetensors" for name in LOSSES}
    for name, head in heads.items():
        stage(f"training {name}", lambda name=name, head=head: trainer.train(name, args.seconds, head))
    trained, text = [name for name in LOSSES if heads[name].exists()], read_prompt(args.test)
    for what, measure in (("hits", hit_rates), ("acceptance", acceptance)):
        for name in trained:
            parts = args, text, heads[name], name == trained[0]
            stage(f"{what} {name}", lambda parts=parts, measure=measure: measure(*parts, Deadline.after(args.limit)))


if __name__ == "__main__":
    main()
