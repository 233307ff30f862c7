"""Distillation of a model by name: its weights, its tokens of a text, and the head that comes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.model.checkpoint import load_config, load_state_dict
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.source import fetch_weights, model_source
from ridgeplan.runtime.model_config import decoder_config
from ridgeplan.runtime.retrieval.distill.student import make_student, pruned
from ridgeplan.runtime.retrieval.distill.teacher import Teacher
from ridgeplan.runtime.retrieval.distill.train import Distillation, Report, Training
from ridgeplan.runtime.retrieval.head import Head


@dataclass(frozen=True)
class Distilled:
    """A trained head, and the mean loss of the last tenth of its training, nats a token."""

    head: Head
    loss: float
    steps: int


def distill(
    model: str,
    tokenize: Any,
    training: Training,
    on_step: Report,
    *,
    device: str | None = None,
    checkpoint: Path | None = None,
    every: int = 100,
) -> Distilled:
    """Trains a head for a model: a safetensors folder, a GGUF file or a hub id.

    tokenize: from the model's folder to the token ids of the text. checkpoint: written every few steps, and continued
    from if it is there. Raises ModelError and WorkloadError; a checkpoint of another run is a ModelError.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise WorkloadError("device is 'cuda'; allowed here: cpu")
    place, source = torch.device(name), model_source(model)
    hub = load_config(source)
    config = decoder_config(hub, source)
    ids = tokenize(source)
    fetch_weights(model)
    state = load_state_dict(source, config.shape, torch.bfloat16 if name == "cuda" else torch.float32)
    student = make_student(hub, state, place, training.by_layer)
    teacher = Teacher(Decoder(config, place), state.decoder_weights(place))
    run = Distillation(teacher, student, ids, training)
    if checkpoint is not None and checkpoint.exists():
        run.resume(checkpoint)
    loss = run.run(on_step, checkpoint, every)
    named = replace(config.shape, name=model_name(model))
    return Distilled(pruned(student, named, training.tokens), loss, run.step)


def model_name(model: str) -> str:
    """A file's or a folder's own name, or a hub id."""
    return Path(model).stem if Path(model).exists() else model
