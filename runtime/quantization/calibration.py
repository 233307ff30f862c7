"""Calibrated quantization of weights: calibration text, layer-by-layer Hessians, and packed layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight, split_codes
from ridgeplan.roofline import execution
from ridgeplan.roofline.plan.policy import AllTokens
from ridgeplan.runtime.errors import ModelError, WorkloadError
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.linear import Dense, Int4, Int8, LibraryInt4Weight, LibraryInt8Weight, Linear
from ridgeplan.runtime.model.prefill_layer import prefill_layer
from ridgeplan.runtime.model.weights import DecoderWeights, LayerWeights, WeightFormat
from ridgeplan.runtime.policies import token_selector
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.runtime.quantization.gptq import Parts, quantize_planes, quantize_weight
from ridgeplan.runtime.sampling import SamplingParams, all_finite, require_finite
from ridgeplan.runtime.speculation.speculator import Speculator

SEQUENCES = 64
TOKENS = 128  # per sequence


@torch.inference_mode()
def self_generated_text(decoder: Decoder, weights: DecoderWeights) -> Tensor:
    """Token ids int64 [SEQUENCES, TOKENS], the same for every call: a random token, then the model's samples.

    Source: LLM-QAT's data-free quantization (Liu et al. 2023, arXiv 2305.17888, section 2.1), there for training.
    """
    shape, device = decoder.config.shape, weights.embedding.device
    cache = Cache(shape, KVCacheConfig(batch=SEQUENCES, context=TOKENS), device, weights.embedding.dtype)
    cache.reset(SEQUENCES)
    generator = torch.Generator(device).manual_seed(0)
    selector = token_selector(AllTokens(), AttentionMetadataBuilder(cache))
    seed = torch.zeros((), dtype=torch.int64, device=device)
    writer = Speculator(decoder, weights, weights, cache, selector, SamplingParams(temperature=1.0), seed)
    tokens, finite = [torch.randint(shape.vocab, (SEQUENCES,), generator=generator, device=device)], []
    while len(tokens) < TOKENS:
        verification = writer.verify(tokens[-1], writer.draft(tokens[-1], 0))
        finite.append(verification.finite)
        tokens.append(writer.keep(tokens[-1], verification, cache.active())[0])
    require_finite(torch.stack(finite).all(0).tolist())
    return torch.stack(tokens, dim=1)


SAMPLED_TOKENS = 512
# A weight that saw fewer tokens, such as that of an expert which few are routed to, is rounded to nearest.
MIN_TOKENS = 32


@dataclass(frozen=True, eq=False)
class CalibrationText:
    """Token ids int64 [sequences, tokens] of independent sequences.

    natural: whether each token follows from those before it. Then full Hessians are measured, otherwise only their
    diagonals.
    """

    tokens: Tensor
    natural: bool

    @classmethod
    def from_tokens(cls, tokens: Sequence[int], vocab: int) -> CalibrationText:
        """One text, a few thousand tokens of what will be decoded. Raises WorkloadError for tokens not in `vocab`."""
        if len(tokens) == 0:
            raise WorkloadError("calibration has no tokens; allowed: 1 or more token ids, or None")
        for token in tokens:
            if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < vocab:
                allowed = f"whole numbers from 0 to {vocab - 1}"
                raise WorkloadError(f"calibration holds the token {token!r}; allowed: {allowed}")
        return cls(torch.tensor(tokens)[None], natural=True)

    @classmethod
    def of_model(cls, decoder: Decoder, weights: DecoderWeights) -> CalibrationText:
        """A text that the model itself generates, which takes seconds on a GPU.

        On a CPU that would take minutes, so there it is tokens that the model samples in one pass.
        """
        if weights.embedding.is_cuda:
            return cls(self_generated_text(decoder, weights), natural=True)
        return cls.sampled(decoder, weights, weights.layers)

    @classmethod
    def sampled(cls, decoder: Decoder, ends: DecoderWeights, layers: Iterable[LayerWeights]) -> CalibrationText:
        """Tokens that a model samples in one pass through its layers, of which one at a time is needed."""
        return cls(sampled_tokens(decoder, ends, layers)[None], natural=False)


@torch.no_grad()
def sampled_tokens(decoder: Decoder, weights: DecoderWeights, layers: Iterable[LayerWeights]) -> Tensor:
    """Tokens [SAMPLED_TOKENS], each drawn from what the model predicts at a position of random tokens.

    weights: the model's embedding, norm and head. It takes one pass. The result is not text, but its token frequencies
    are the model's own, which suffices for the diagonal.
    """
    device, vocab = weights.embedding.device, decoder.config.shape.vocab
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(vocab, (SAMPLED_TOKENS,), generator=generator, device=device)
    hidden = functional.embedding(tokens, weights.embedding)
    for index, layer in enumerate(layers):
        prefill_layer(decoder, index, layer, hidden)
    logits = weights.logits(weights.norm(hidden, None)[1]).float()
    require_finite([bool(all_finite(logits).all())])
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def quantized_linear(dense: Dense, target: WeightFormat, hessian: Tensor | None = None) -> Int4 | Int8:
    """A copy of a dense layer in the format `target`; a group that does not divide its inputs becomes 64 or 32.

    hessian: Hessian of the layer's inputs, as for `quantize_weight`. Raises ModelError if no group fits.
    """
    return linear_of(plane_parts(dense.weight, target, hessian), dense.bias, target.hierarchical)


def linear_of(planes: Sequence[Parts], bias: Tensor | None, hierarchical: bool = False) -> Int4 | Int8:
    """The layer of one plane of 4-bit codes, or of two."""
    if len(planes) == 1:
        return int4_of(planes[0], bias)
    return int8_of((planes[0], planes[1]), bias, hierarchical)


def plane_parts(weight: Tensor, target: WeightFormat, hessian: Tensor | None = None) -> tuple[Parts, ...]:
    """The planes of a weight [outputs, inputs] in the format `target`: one of 4 bits, or two of 8."""
    assert target.group is not None, "a format of codes"
    group = fitting_group(weight.shape[1], target.group)
    if target.bits == 4:
        return (quantize_weight(weight, group, hessian),)
    if target.hierarchical:
        return quantize_planes(weight, group, hessian)
    return split_codes(*quantize_weight(weight, group, hessian, bits=8))


def int4_of(parts: Parts, bias: Tensor | None) -> Int4:
    """The layer of 4-bit codes, scale and zero."""
    packing = Int4Weight if parts[0].is_cuda else LibraryInt4Weight
    return Int4(packing.pack(*parts), bias)


def int8_of(planes: tuple[Parts, Parts], bias: Tensor | None, hierarchical: bool = False) -> Int8:
    """The layer of two planes of 4-bit codes, each with scale and zero."""
    upper, lower = (int4_of(parts, None).weight for parts in planes)
    if isinstance(upper, Int4Weight) and isinstance(lower, Int4Weight):
        return Int8(Int8Weight(upper, lower), bias, hierarchical)
    assert isinstance(upper, LibraryInt4Weight) and isinstance(lower, LibraryInt4Weight)
    return Int8(LibraryInt8Weight(upper, lower), bias, hierarchical)


def fitting_group(inputs: int, group: int) -> int:
    """`ridgeplan.roofline.execution.fitting_group`. Raises ModelError if no group divides the inputs."""
    fitting = execution.fitting_group(inputs, group)
    if fitting is None:
        raise ModelError(f"a linear layer has {inputs} inputs; allowed for 4-bit weights: multiples of 32")
    return fitting


def counted(layers: Iterable[LayerWeights], total: int, on_progress: OnProgress) -> Iterator[LayerWeights]:
    """The layers. `on_progress` hears of each before it is quantized."""
    for done, layer in enumerate(layers):
        on_progress("quantizing weights, once", done, total)
        yield layer


@torch.no_grad()
def quantized_draft(
    decoder: Decoder, weights: DecoderWeights, group: int, text: CalibrationText, on_progress: OnProgress = silent
) -> DecoderWeights:
    """4-bit projections and head for drafts; the embedding and the norms are shared with the target."""
    layers = counted(weights.layers, len(weights.layers), on_progress)
    return _with_head(decoder, weights, layers, WeightFormat(4, group), text)


@torch.no_grad()
def quantized_target(
    decoder: Decoder, ends: DecoderWeights, layers: Iterable[LayerWeights], target: WeightFormat, text: CalibrationText
) -> DecoderWeights:
    """Projections for the target in the format `target`; `ends` are its embedding, norm and head.

    The head is quantized to 8 bits; with a 4-bit target it stays in full precision. layers: dense, each quantized
    before the next is requested. Nothing here refers to them afterwards.
    """
    if target.bits == 8:
        return _with_head(decoder, ends, layers, target, text)
    hidden = _embedded(ends, text)
    return dataclasses.replace(ends, layers=tuple(_fitted(decoder, layers, hidden, target, text.natural)))


@torch.no_grad()
def rounded_target(ends: DecoderWeights, layers: Iterable[LayerWeights], target: WeightFormat) -> DecoderWeights:
    """Like `quantized_target`, but rounded to nearest, without a text, and with the head as it is."""
    rounded = (layer.with_projections(lambda linear: _rounded(linear, target)) for layer in layers)
    return dataclasses.replace(ends, layers=tuple(rounded))


def _with_head(
    decoder: Decoder, ends: DecoderWeights, layers: Iterable[LayerWeights], target: WeightFormat, text: CalibrationText
) -> DecoderWeights:
    hidden = _embedded(ends, text)
    fitted = tuple(_fitted(decoder, layers, hidden, target, text.natural))
    head = _recorder(ends.head, text.natural)
    if isinstance(head, HessianRecorder):
        head.record(ends.norm(hidden, None)[1])
    return dataclasses.replace(ends, layers=fitted, head=_quantized(head, target))


def _embedded(weights: DecoderWeights, text: CalibrationText) -> Tensor:
    return functional.embedding(text.tokens.to(weights.embedding.device), weights.embedding)


def _fitted(
    decoder: Decoder, layers: Iterable[LayerWeights], hidden: Tensor, target: WeightFormat, full: bool
) -> Iterator[LayerWeights]:
    """Each layer quantized for its inputs; hidden [sequences, tokens, hidden] passes the dense layers in place.

    full: with the whole Hessian; else with its diagonal only.
    """
    for index, layer in enumerate(layers):
        recorder = layer.with_projections(lambda linear: _recorder(linear, full))
        for sequence in hidden:
            prefill_layer(decoder, index, recorder, sequence)
        yield recorder.with_projections(lambda linear: _quantized(linear, target))


@dataclass(frozen=True, eq=False, kw_only=True)
class HessianRecorder(Dense):
    """A dense layer that accumulates the Hessian of its inputs: [inputs, inputs], or the diagonal [inputs].

    Every token is scaled to a mean square of 1. Otherwise a few tokens, above all the first, would dominate: in some
    channels they are hundreds of times larger than the others.
    """

    hessian: Tensor

    @property
    def tokens(self) -> int:
        """The number of tokens that were recorded: each adds as much to the trace as it has channels."""
        trace = self.hessian.diagonal().sum() if self.hessian.dim() == 2 else self.hessian.sum()
        return round(float(trace) / self.weight.shape[1])

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        self.record(x)
        return super().__call__(x, gated)

    def record(self, x: Tensor) -> None:
        """Adds inputs [..., inputs]."""
        rows = functional.rms_norm(x.flatten(0, -2).float(), x.shape[-1:])
        if self.hessian.dim() == 1:
            self.hessian.add_(rows.square().sum(0))
        else:
            self.hessian.addmm_(rows.t(), rows)


def _recorder(linear: Linear, full: bool) -> Linear:
    """A recorder of the `full` Hessian or its diagonal; a layer that is already quantized is returned unchanged."""
    if not isinstance(linear, Dense):
        return linear
    inputs = linear.weight.shape[1]
    hessian = linear.weight.new_zeros((inputs, inputs) if full else inputs, dtype=torch.float32)
    return HessianRecorder(weight=linear.weight, bias=linear.bias, hessian=hessian)


def _quantized(linear: Linear, target: WeightFormat) -> Linear:
    if not isinstance(linear, HessianRecorder):
        return linear
    if not linear.hessian.isfinite().all():  # nothing can be fitted to it
        raise ModelError(
            "the model's activations are NaN or infinite on the text that its quantized weights are fitted to; "
            "allowed: weights and a dtype that keep them finite"
        )
    return quantized_linear(linear, target, linear.hessian if linear.tokens >= MIN_TOKENS else None)


def _rounded(linear: Linear, target: WeightFormat) -> Linear:
    return quantized_linear(linear, target) if isinstance(linear, Dense) else linear
