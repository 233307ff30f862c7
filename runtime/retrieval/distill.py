"""Distillation of a retrieval head: second loss on attention, training loop, checkpoints.

The second loss is not published. It is the KL divergence from the teacher's attention to distant tokens: a head exists
to select those, and a small student predicts most next tokens from near ones.

A checkpoint holds everything that the next step depends on, so a stopped run ends like an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half

from ridgeplan.roofline.catalog.validation import Checked, brief, flag, number, whole
from ridgeplan.runtime.errors import ModelError, WorkloadError, failures_as
from ridgeplan.runtime.model.checkpoint import load_config, load_state_dict
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.source import fetch_weights, model_name, model_source
from ridgeplan.runtime.retrieval.head import Head, is_probe_of, probe_of, read_tensors, write_tensors
from ridgeplan.runtime.retrieval.student import (
    RECENT,
    SINKS,
    Teacher,
    distant_tokens,
    make_student,
    pruned,
    query_projection,
    trained_parameters,
    visible_tokens,
)


def student_logits(student: Any, tokens: Tensor, queries: Tensor) -> Tensor:
    """Attention logits float32 [q_heads, queries, tokens] of the head that a student becomes, with gradients.

    tokens: [tokens], a passage; queries: int64 [queries], places in it.
    """
    layer, model = student.model.layers[0], student.model
    attention, inputs = layer.self_attn, layer.input_layernorm(model.embed_tokens(tokens))
    places = torch.arange(len(tokens), device=tokens.device)
    cos, sin = (table[0] for table in model.rotary_emb(inputs, places[None]))

    def heads(projection: Any, norm: str, at: Tensor) -> Tensor:
        each = projection(inputs[at]).unflatten(-1, (-1, attention.head_dim))
        each = getattr(attention, norm)(each) if hasattr(attention, norm) else each
        return (each * cos[at, None] + rotate_half(each) * sin[at, None]).transpose(0, 1)

    rotated = heads(query_projection(student), "q_norm", queries)
    keys = heads(attention.k_proj, "k_norm", places)
    logits = rotated.unflatten(0, (len(keys), -1)) @ keys.mT[:, None] * attention.head_dim**-0.5
    return logits.flatten(0, 1).float()


def attention_loss(logits: Tensor, taught: Tensor, queries: Tensor) -> Tensor:
    """KL of attention to distant tokens, nats, the mean over queries and over the sets that the head chooses.

    logits: [q_heads, queries, tokens], of `student_logits`; taught: [sets, queries, tokens], shares of distant tokens.
    Several query heads of a set have the largest of their weights, as when the head chooses (SpeContext, 4.3).
    """
    unseen = ~visible_tokens(queries, logits.shape[-1])
    distant = distant_tokens(queries, logits.shape[-1])
    weights = logits.masked_fill(unseen, -torch.inf).log_softmax(-1)
    chosen_by = weights.unflatten(0, (len(taught), -1)).amax(1)
    predicted = chosen_by.masked_fill(~distant, -torch.inf).log_softmax(-1)
    known = taught.clamp_min(torch.finfo(torch.float32).tiny).log()
    return (taught * (known - predicted).masked_fill(~distant, 0.0)).sum(-1).mean()


KEY = "ridgeplan.distillation"
LOGITS_TOKENS = 128  # tokens whose logits are in memory at once
MOMENTS = ("exp_avg", "exp_avg_sq")
LOSSES, PROBE = "losses", "probe"  # entries of a checkpoint besides the trained parameters
Report = Callable[[int, float], None]  # steps done, and the last step's loss


@dataclass(frozen=True)
class Training(Checked):
    """Sizes of a run. Raises WorkloadError for values out of range.

    tokens: tokens per passage. batch: passages per step. language: weight of the next-token loss (SpeContext, Eq 2);
    0 trains the head alone, in a third of the time. attention: weight of the attention loss, which needs passages with
    distant tokens; 0 trains as SpeContext does. queries: queries per passage whose attention is learned. by_layer:
    train a query for each KV head of each layer, with the attention loss only, instead of one selection for all layers
    as in SpeContext.
    """

    error = WorkloadError
    steps: int = whole(1, 10_000_000, default=1000)
    tokens: int = whole(8, 1 << 17, default=512)
    batch: int = whole(1, 4096, default=4)
    rate: float = number(1e-8, 1, default=3e-4)
    warmup: int = whole(0, 1_000_000, default=20)
    language: float = number(0, 1000, default=1.0)
    attention: float = number(0, 1000, default=1.0)
    queries: int = whole(1, 1 << 17, default=64)
    by_layer: bool = flag(False)
    seed: int = whole(0, (1 << 31) - 1, default=0)

    def _contradiction(self) -> str | None:
        if (self.by_layer or not self.language) and (not self.attention or self.tokens <= SINKS + RECENT):
            actual = f"attention is {self.attention} and tokens is {self.tokens}"
            lesson = "queries by layer" if self.by_layer else "a head alone, with language 0"
            return f"{actual}; allowed for {lesson}: above 0, and {SINKS + RECENT + 1} or more"
        return None

    def rate_at(self, step: int) -> float:
        """Learning rate: a linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * done))


class Distillation:
    """A student, its optimizer and the step that it has reached."""

    def __init__(self, teacher: Teacher, student: Any, ids: Sequence[int], training: Training) -> None:
        """ids: of the text. Raises WorkloadError for a text shorter than two passages."""
        if len(ids) < 2 * training.tokens:
            allowed = f"{2 * training.tokens}, two passages, or more"
            raise WorkloadError(f"the text has {len(ids)} tokens; allowed: {allowed}")
        self.teacher, self.student, self.training = teacher, student, training
        self.ids = torch.tensor(list(ids), device=teacher.weights.embedding.device)
        self.parameters = trained_parameters(student, head_only=not training.language)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=training.rate, weight_decay=0.0)
        self.losses: list[float] = []  # of each step so far

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    def run(self, on_step: Report, checkpoint: Path | None = None, every: int = 100) -> float:
        """Trains up to the last step, with a checkpoint every few; returns the mean loss of the last tenth of the run.

        Raises WorkloadError when the loss is no longer finite.
        """
        while self.step < self.training.steps:
            loss = self._step()
            if not math.isfinite(loss):
                raise WorkloadError(f"the loss is {loss} at step {self.step + 1}; allowed: a lower learning rate")
            self.losses.append(loss)
            on_step(self.step, loss)
            if checkpoint is not None and (self.step % every == 0 or self.step == self.training.steps):
                self.save(checkpoint)
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)

    def save(self, path: Path) -> None:
        """Writes a checkpoint, completely or not at all. Raises ModelError."""
        tensors = {name: value.detach().cpu() for name, value in self.parameters.items()}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            tensors |= {f"{moment}.{name}": state[moment].cpu() for moment in MOMENTS}
        tensors |= {LOSSES: torch.tensor(self.losses, dtype=torch.float64), PROBE: probe_of(self._embedding)}
        write_tensors(path, tensors, {KEY: json.dumps(self._described)})

    def resume(self, path: Path) -> None:
        """Continues from a checkpoint of the same run. Raises ModelError for any other file."""
        with failures_as(f"cannot resume from {brief(str(path))}"):
            metadata, tensors = read_tensors(path)
            known = json.loads(metadata.get(KEY, "{}")) == self._described
            if not known or not is_probe_of(tensors[PROBE], self._embedding):
                raise ValueError("it is of another run; allowed: the same model, text and options, or no checkpoint")
            losses = tensors[LOSSES].tolist()
            if not 0 < len(losses) <= self.training.steps:
                raise ValueError(f"it has {len(losses)} steps; allowed: 1 to {self.training.steps}")
            self._load(tensors, len(losses))
        self.losses = losses

    @property
    def _embedding(self) -> Tensor:
        return self.teacher.weights.embedding

    @cached_property
    def _described(self) -> dict[str, Any]:
        """What identifies a run of a model: its options and its text."""
        text = hashlib.sha256(self.ids.cpu().numpy().tobytes()).hexdigest()
        return {**asdict(self.training), "text": text}

    def _load(self, tensors: dict[str, Tensor], step: int) -> None:
        for name, parameter in self.parameters.items():
            parameter.data.copy_(tensors[name])
            moments = {moment: tensors[f"{moment}.{name}"].to(parameter) for moment in MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}

    def _step(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.rate_at(self.step)
        loss = sum(self._passage(*passage) for passage in self._passages())
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss / self.training.batch

    def _passages(self) -> list[tuple[Tensor, Tensor]]:
        """A step's passages, and the places in them whose attention is learned. Depends on seed and step only."""
        config = self.training
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        starts = torch.randint(len(self.ids) - config.tokens + 1, (config.batch,), generator=generator)
        passages = [self.ids[start : start + config.tokens] for start in starts.tolist()]
        first = SINKS + RECENT  # the first query with distant tokens
        queries, distant = config.queries if config.attention else 0, max(0, config.tokens - first)
        places = [torch.randperm(distant, generator=generator)[:queries] + first for _ in passages]
        return [(tokens, at.to(tokens.device)) for tokens, at in zip(passages, places, strict=True)]

    def _precision(self) -> torch.autocast:
        """Products of the student are in bfloat16 on a GPU, as the teacher's are; its parameters stay in float32."""
        device = self.ids.device.type
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    def _passage(self, tokens: Tensor, queries: Tensor) -> float:
        """Adds a passage's gradients; returns its loss in nats a token."""
        taught, attention = self.teacher.read(tokens, queries)
        loss = self._language(tokens, taught) if self.training.language else 0.0
        return loss + (self._attention(tokens, queries, attention) if len(queries) else 0.0)

    def _language(self, tokens: Tensor, taught: Tensor) -> float:
        """Adds the gradients of the next-token loss; returns the weighted loss. taught: the teacher's [tokens, hidden].

        The gradients of the logits are computed a few tokens at a time, those of the layer once, from their sum.
        """
        with self._precision():
            hidden = self.student.model(tokens[None]).last_hidden_state[0]
        cut = hidden.detach().requires_grad_()
        total = cut.new_zeros(())  # read once: each read waits for the device
        for known, states in zip(taught.split(LOGITS_TOKENS), cut.split(LOGITS_TOKENS), strict=True):
            expected = self.teacher.logits(known).log_softmax(-1)
            with self._precision():
                logits = self.student.lm_head(states)
            drawn = logits.float().log_softmax(-1)
            divergence = functional.kl_div(drawn, expected, log_target=True, reduction="sum") / len(tokens)
            loss = self.training.language * divergence
            (loss / self.training.batch).backward()
            total += loss.detach()
        assert cut.grad is not None, "every token has logits"
        hidden.backward(cut.grad)
        return float(total)

    def _attention(self, tokens: Tensor, queries: Tensor, attention: Tensor) -> float:
        """Adds the gradients of the attention loss; returns the weighted loss.

        attention: the teacher's, [kv_heads, layers, queries, tokens].
        """
        taught = attention.flatten(0, 1) if self.training.by_layer else attention.mean(1)
        with self._precision():
            logits = student_logits(self.student, tokens, queries)
        loss = attention_loss(logits, taught, queries)
        focus = self.training.attention * loss
        (focus / self.training.batch).backward()
        return float(focus.detach())


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
    if len(set(config.shape.heads_of_each)) > 1:
        raise ModelError(f"layers of {source} have heads of several sizes; allowed for a retrieval head: one")
    ids = tokenize(source)
    fetch_weights(model)
    state = load_state_dict(source, config, torch.bfloat16 if name == "cuda" else torch.float32)
    student = make_student(hub, state, place, training.by_layer)
    teacher = Teacher(Decoder(config, place), state.decoder_weights(place))
    run = Distillation(teacher, student, ids, training)
    if checkpoint is not None and checkpoint.exists():
        run.resume(checkpoint)
    loss = run.run(on_step, checkpoint, every)
    named = replace(config.shape, name=model_name(model))
    return Distilled(pruned(student, named, training.tokens), loss, run.step)
