"""Calibration text that the model generates itself, if none is given."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.planner.axes.draft_selection import AllTokens
from ridgeplan.runtime.drafting.policies import draft_policy
from ridgeplan.runtime.drafting.speculator import Speculator
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.sampling import SamplingParams

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
    policy, sampling = draft_policy(AllTokens(), cache), SamplingParams(temperature=1.0)
    writer = Speculator(decoder, weights, weights, cache, policy, sampling, generator)
    tokens = [torch.randint(shape.vocab, (SEQUENCES,), generator=generator, device=device)]
    while len(tokens) < TOKENS:
        verification = writer.verify(tokens[-1], writer.draft(tokens[-1], 0))
        tokens.append(writer.keep(tokens[-1], verification, cache.active())[0])
    return torch.stack(tokens, dim=1)
