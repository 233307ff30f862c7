"""Training of a draft head on a model's own outputs, in EAGLE-3's way (Li et al. 2025, section 3.2).

Training-time test: the head is unrolled several steps, of which each reads the feature that the step before it
predicted, so that it learns from its own mistakes as it meets them while it drafts. Every step learns the model's
distribution over the head's vocabulary; later ones weigh 0.8 times as much as the one before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer import rotate
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.validation import number, whole
from ridgeplan.roofline.plan.plan import MAX_TOKENS, Workload
from ridgeplan.roofline.plan.policies.dense import autoregressive
from ridgeplan.runtime.buffers import Arena
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.memory import MemoryMeter
from ridgeplan.runtime.model.checkpoint import StateDict, load_config, load_state_dict
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.linear import Dense
from ridgeplan.runtime.model.prefill_layer import LayerBuffers, Parts, TextPass, finish_layer
from ridgeplan.runtime.model.source import fetch_weights, model_source
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.retrieval.distill import Report, Training
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.speculation.draft_head import DraftHeadConfig, HeadCheckpoint, default_depths

STEP_WEIGHT = 0.8  # of a step's loss, against the one before (EAGLE-3's published training code)
OWN_ROWS = 64  # texts that the model continues at once
OWN_SHARE = 4  # one part in so many of such a passage is the given text that it continues


@dataclass(frozen=True)
class HeadTraining(Training):
    """Sizes of a run. Raises WorkloadError for values out of range.

    draft_vocab: the most frequent tokens, which the head predicts. unroll: steps of the training-time test. window:
    latest tokens that its attention reads; 0 for all. own_tokens: of the passages that the model itself goes on
    writing. seconds: after which training ends; 0 for no limit.
    """

    draft_vocab: int = whole(1, 1 << 22, default=8192)
    unroll: int = whole(1, 15, default=5)
    window: int = whole(0, MAX_TOKENS, default=0)
    own_tokens: int = whole(0, 1 << 26, default=1 << 16)
    seconds: float = number(0, 1e6, default=0.0)


@dataclass(frozen=True)
class TrainedHead:
    """A trained head, the mean loss of the last tenth of its steps, and how many there were."""

    checkpoint: HeadCheckpoint
    loss: float
    steps: int


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a passage teaches: the model's streams, and its distributions over the head's vocabulary.

    tokens: int64 [tokens]. streams: [STREAMS, tokens, hidden]. logits: float32 [tokens, draft_vocab]. known: bool
    [tokens], whether the likeliest next token is in the head's vocabulary.
    """

    tokens: Tensor
    streams: Tensor
    logits: Tensor
    known: Tensor


@torch.no_grad()
def lesson(decoder: Decoder, weights: DecoderWeights, depths: Sequence[int], targets: Tensor, tokens: Tensor) -> Lesson:
    """Runs the model over a passage [tokens]."""
    hidden = functional.embedding(tokens, weights.embedding)
    buffers = LayerBuffers.take(Arena.without_memory(hidden.device), decoder.config.shape, hidden)
    parts = Parts(len(hidden), len(hidden))
    text, streams = TextPass(decoder, buffers, parts), {0: hidden.clone()} if 0 in depths else {}
    for index, layer in enumerate(weights.layers):
        finish_layer(layer, hidden, layer.mixer.prefill(text, index, layer, hidden), parts)
        if index + 1 in depths:
            streams[index + 1] = hidden.clone()
    logits = weights.logits(weights.norm(hidden, None)[1])
    known = torch.isin(logits.argmax(-1), targets)
    return Lesson(tokens, torch.stack([streams[depth] for depth in depths]), logits[:, targets].float(), known)


@dataclass(frozen=True, eq=False)
class Student:
    """The head that is trained: its parameters by their names in a checkpoint. window: as for `HeadTraining`."""

    config: DraftHeadConfig
    parameters: Mapping[str, Tensor]
    embedding: Tensor
    window: int

    def loss(self, taught: Lesson, unroll: int) -> Tensor:
        """Cross-entropy with the model's distributions, nats a token, the weighted mean over the unrolled steps."""
        length = len(taught.tokens) - 1  # the last token has no next one
        streams, expected = taught.streams[:, :length].float(), taught.logits[1:].softmax(-1)
        embedded = self._norm(
            "midlayer.input_layernorm", functional.embedding(taught.tokens[1:], self.embedding).float()
        )
        features = self._linear("fc", torch.cat(streams.unbind(0), dim=-1))
        places = torch.arange(length, device=features.device)
        distance = places[:, None] - places
        tables = self._tables(places)
        cached: list[tuple[Tensor, Tensor]] = []
        total, weights = features.new_zeros(()), 0.0
        for step in range(unroll):
            features, logits = self._step(embedded, features, tables, distance, cached)
            valid = taught.known[1:] & (places >= step)
            losses = -(expected * logits.float().log_softmax(-1)).sum(-1)
            weight = STEP_WEIGHT**step
            total = total + weight * (losses * valid).sum() / valid.sum().clamp_min(1)
            weights += weight
            features = features.roll(1, dims=0)  # each place reads what the one before it predicted
        return total / weights

    def _step(
        self,
        embedded: Tensor,
        features: Tensor,
        tables: tuple[Tensor, Tensor],
        distance: Tensor,
        cached: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """The predicted features [tokens, hidden] and logits of a step; its keys and values join `cached`.

        A place reads the first step's keys up to where its own chain of predictions begins, and those of the chain.
        """
        shape, step = self.config.layer.shape, len(cached)
        normed = self._norm("midlayer.hidden_norm", features)
        inputs = torch.cat([embedded, normed], dim=-1)
        q, k, v = (
            self._linear(f"midlayer.self_attn.{name}_proj", inputs).unflatten(-1, (-1, shape.head_dim))
            for name in "qkv"
        )
        ratio = shape.q_heads // shape.kv_heads
        k, v = (each.repeat_interleave(ratio, dim=1) for each in (rotate(k.float(), *tables), v.float()))
        q = rotate(q.float(), *tables) * shape.head_dim**-0.5
        cached.append((k, v))
        first_keys, first_values = cached[0]
        hidden_from = distance < step
        if self.window:
            hidden_from = hidden_from | (distance >= self.window)
        scores = torch.einsum("qhd,khd->hqk", q, first_keys).masked_fill(hidden_from, -torch.inf)
        chain = [
            tuple(each.roll(step - index, dims=0) for each in cached[index]) for index in range(1, step + 1)
        ]  # of the place so many before this one
        chained = torch.stack([(q * keys).sum(-1).t() for keys, _ in chain], dim=-1) if chain else scores[..., :0]
        shares = torch.cat([scores, chained], dim=-1).softmax(-1)
        shares = shares.nan_to_num()  # a place ahead of the first one's chain sees nothing
        mixed = torch.einsum("hqk,khd->qhd", shares[..., : len(first_keys)], first_values)
        for index, (_, values) in enumerate(chain):
            mixed = mixed + shares[..., len(first_keys) + index].t()[..., None] * values
        residual = normed if self.config.norm_before_residual else features
        hidden = residual + self._linear("midlayer.self_attn.o_proj", mixed.flatten(1))
        normed = self._norm("midlayer.post_attention_layernorm", hidden)
        gate, up = (self._linear(f"midlayer.mlp.{name}_proj", normed) for name in ("gate", "up"))
        hidden = hidden + self._linear("midlayer.mlp.down_proj", functional.silu(gate) * up)
        normed = self._norm("norm", hidden)
        return hidden, self._linear("lm_head", normed)

    def _tables(self, places: Tensor) -> tuple[Tensor, Tensor]:
        rotary = self.config.layer.rotaries[0]
        angles = places[:, None] * torch.tensor(rotary.frequencies, device=places.device)
        return angles.cos() * rotary.scale, angles.sin() * rotary.scale

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.parameters[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.parameters[f"{name}.weight"]
        return functional.rms_norm(x.float(), weight.shape, weight, self.config.layer.norm_eps)


def initial_parameters(
    config: DraftHeadConfig, state: StateDict, output: Tensor, seed: int, device: torch.device
) -> dict[str, Tensor]:
    """Where training starts: the model's last layer on its last fused stream, its norm and head; else small numbers.

    output: rows [draft_vocab, hidden] of the model's output head.
    """
    generator, last = torch.Generator().manual_seed(seed), state.config.shape.layers - 1
    names = {"midlayer.hidden_norm.weight": "input_layernorm.weight"}
    initial = {}
    for name, size in config.sizes.items():
        source = f"model.layers.{last}.{names.get(name, name.removeprefix('midlayer.'))}"
        known = state.tensors.get("model.norm.weight" if name == "norm.weight" else source, None)
        if name == "lm_head.weight":
            known = output.cpu()
        start = torch.randn(size, generator=generator) * 0.02 if len(size) > 1 else torch.ones(size)
        if name == "fc.weight":
            known = torch.eye(size[0])
        if known is not None and len(size) > 1 and known.shape[0] == size[0] and size[1] % known.shape[1] == 0:
            start[:, -known.shape[1] :] = known.float()
        elif known is not None and list(known.shape) == size:
            start = known.float()
        initial[name] = start.to(device, copy=True).requires_grad_()
    return initial


def head_keys(shape: ModelShape, training: HeadTraining, theta: float, eps: float) -> dict[str, Any]:
    """config.json of a head of a model, as SGLang reads it.

    Its longest sequence is that of its training, beyond which vLLM does not draft. With a shorter window it is the
    model's: rotary positions enter as differences, none of which is larger than the window.
    """
    max_tokens = shape.max_context if 0 < training.window < training.tokens else training.tokens
    keys: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab,
        "draft_vocab_size": min(training.draft_vocab, shape.vocab), "hidden_act": "silu", "rms_norm_eps": eps,
        "rope_theta": theta, "max_position_embeddings": max_tokens, "torch_dtype": "float32",
        "tie_word_embeddings": False, "sliding_window": training.window or None,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [depth - 1 for depth in default_depths(shape.layers)],
        },
    }  # fmt: skip
    return keys


def own_passages(engine: Engine, ids: Tensor, training: HeadTraining, on_progress: Report) -> list[Tensor]:
    """Passages [tokens] that begin as a part of the text and go on as the model does at temperature 1."""
    tokens, given = training.tokens, max(1, training.tokens // OWN_SHARE)
    count = -(-training.own_tokens // (tokens - given))
    generator = torch.Generator().manual_seed(training.seed)
    starts = torch.randint(max(1, len(ids) - given), (count,), generator=generator).tolist()
    passages: list[Tensor] = []
    for first in range(0, count, OWN_ROWS):
        prompts = [ids[start : start + given].tolist() for start in starts[first : first + OWN_ROWS]]
        written = engine.generate(prompts, tokens - given, SamplingParams(temperature=1.0, seed=first)).tokens
        passages += [torch.tensor(prompt + more) for prompt, more in zip(prompts, written, strict=True)]
        on_progress(len(passages), 0.0)
    return passages


def train_head(model: str, tokenize: Any, training: HeadTraining, on_step: Report, device: str) -> TrainedHead:
    """Trains a head for a model: a safetensors folder, a GGUF file or a hub id.

    tokenize: from the model's folder to the token ids of the text. on_step: first with the passages that the model has
    written and a loss of 0. Raises ModelError and WorkloadError, also for a loss that is not finite.
    """
    place, source = torch.device(device), model_source(model)
    hub = load_config(source)
    config = decoder_config(hub, source)
    shape, ids = config.shape, torch.tensor(tokenize(source))
    if len(ids) < 2 * training.tokens:
        raise WorkloadError(f"the text has {len(ids)} tokens; allowed: {2 * training.tokens}, two passages, or more")
    fetch_weights(model)
    state = load_state_dict(source, config, torch.bfloat16 if device == "cuda" else torch.float32)
    held = StateDict(source, config, dict(state.tensors) if isinstance(state.tensors, dict) else state.tensors)
    weights, decoder = state.decoder_weights(place), Decoder(config, place)
    passages = list(ids.split(training.tokens))
    passages = [passage for passage in passages if len(passage) == training.tokens]
    if training.own_tokens:
        workload = Workload(shape.name, "this machine", training.tokens, training.tokens, OWN_ROWS)
        engine = Engine(autoregressive(workload), source, config, weights, place, MemoryMeter(place))
        passages += own_passages(engine, ids, training, on_step)
        engine.close()
    theta = hub.get_text_config().rope_parameters["rope_theta"]
    keys = head_keys(shape, training, theta, config.norm_eps)
    counts = torch.bincount(torch.cat(passages), minlength=shape.vocab)
    targets = counts.argsort(descending=True, stable=True)[: keys["draft_vocab_size"]].sort().values.to(place)
    head_config = DraftHeadConfig.of(keys, shape, source)
    rows = weights.head.weight[targets] if isinstance(weights.head, Dense) else weights.embedding[targets]
    parameters = initial_parameters(head_config, held, rows, training.seed, place)
    student = Student(head_config, parameters, weights.embedding, training.window)
    optimizer = torch.optim.AdamW(parameters.values(), lr=training.rate, weight_decay=0.0, betas=(0.9, 0.95))
    losses: list[float] = []
    generator, begin = torch.Generator().manual_seed(training.seed), time.monotonic()
    while len(losses) < training.steps and not 0 < training.seconds < time.monotonic() - begin:
        spent = (time.monotonic() - begin) / training.seconds if training.seconds else 0.0
        for group in optimizer.param_groups:
            group["lr"] = training.rate_at(max(len(losses), int(spent * training.steps)))
        total = 0.0
        for index in torch.randint(len(passages), (training.batch,), generator=generator).tolist():
            taught = lesson(decoder, weights, head_config.depths, targets, passages[index].to(place))
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = student.loss(taught, training.unroll) / training.batch
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise WorkloadError(f"the loss is {total} at step {len(losses) + 1}; allowed: a lower learning rate")
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        on_step(len(losses), total)
    last = losses[-max(1, len(losses) // 10) :]
    tensors = {name: value.detach() for name, value in parameters.items()}
    tensors["d2t"] = (targets - torch.arange(len(targets), device=place)).cpu()
    return TrainedHead(HeadCheckpoint.of(keys, tensors, shape, source), sum(last) / len(last), len(losses))
