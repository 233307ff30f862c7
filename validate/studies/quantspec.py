"""QuantSpec's Tables 2 and 5: perplexity of a text whose old tokens are rounded to 8 or 4 bits along each axis.

The KV cache of a prompt is rounded as `kernels.kv_cache` does it, with one scale and minimum per channel and group of
tokens, or per token and group of channels (appendix D). The latest tokens and those that are predicted stay in full
precision, as in the double buffer (QuantSpec-4). The paper rounds to 4 bits, of keys by channel and values by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from ridgeplan.kernels.kv_cache.reference import affine, encode
from ridgeplan.roofline.plan.plan import MAX_TOKENS, KVCache, Workload, require_within
from ridgeplan.roofline.plan.policies.dense import autoregressive
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.validate.acceptance import named_shape
from ridgeplan.validate.prompts import prompt_batch
from ridgeplan.validate.quality.fidelity import ForcedPassage, perplexity, surprise
from ridgeplan.validate.studies.recorded import RecordedPrompt

AXES = ("token", "channel")
CASES = [("full", "full", 16), *((*axes, bits) for bits in (8, 4) for axes in product(AXES, AXES))]


@dataclass(frozen=True)
class QuantSpecSizes:
    """Tokens of a passage and those at its end that are predicted, and passages. Raises PlanError if out of range."""

    context: int = 2048
    tokens: int = 90  # what the paper generates
    passages: int = 4
    group: int = KVCache().group

    def __post_init__(self) -> None:
        require_within("context", self.context, 2 * self.group + self.tokens + 1, MAX_TOKENS)
        require_within("tokens", self.tokens, 1, 1 << 12)
        require_within("passages", self.passages, 1, 1 << 12)


@dataclass(frozen=True)
class AxesRow:
    """Perplexity with keys and values that share scales along a "token" or "channel", or are in "full" precision."""

    keys: str
    values: str
    bits: int
    perplexity: float


def study(
    model: str,
    text: str,
    sizes: QuantSpecSizes,
    device: str | None = None,
    on_progress: OnProgress = silent,
) -> list[AxesRow]:
    """A row for each pair of axes and number of bits, after one in full precision.

    Raises what `ridgeplan.runtime.load` raises, and PromptError for a short text.
    """
    workload = Workload(named_shape(model).name, "this machine", sizes.context, sizes.tokens + 1)
    engine = load(autoregressive(workload), model, device=device)
    surprises: dict[tuple[str, str, int], list[float]] = {case: [] for case in CASES}
    for index, ids in enumerate(prompt_batch(engine.tokenizer, sizes.context, sizes.passages, text)):
        on_progress(f"passage {index + 1}", index, sizes.passages)
        passage = ForcedPassage.split(ids, sizes.tokens)
        for case, logits in rounded_logits(engine, passage, sizes.group):
            surprises[case].append(surprise(logits, passage))
    engine.close()
    return [AxesRow(*case, perplexity(values)) for case, values in surprises.items()]


def rounded_logits(engine: Engine, passage: ForcedPassage, group: int) -> Iterator[tuple[tuple[str, str, int], Tensor]]:
    """For each of `CASES` the logits [tokens, vocab] after each token of the continuation but its last."""
    recorded = RecordedPrompt(engine, passage.prompt)
    old = slice(0, max(recorded.length // group - 1, 0) * group)
    stores = recorded.cache.keys, recorded.cache.values
    originals = [store[:, 0, :, old].clone() for store in stores]
    for *axes, bits in CASES:
        for store, original, axis in zip(stores, originals, axes, strict=True):
            store[:, 0, :, old] = original if axis == "full" else rounded(original, axis, group, bits)
        yield (axes[0], axes[1], bits), recorded.logits(passage.continuation[:-1]).float()


def rounded(states: Tensor, axis: str, group: int, bits: int) -> Tensor:
    """Keys or values [..., tokens, head_dim] after rounding, in groups of `group` tokens or of a head's channels."""
    dim = -2 if axis == "channel" else -1
    grouped = states.unflatten(-2, (-1, group))
    if axis == "token" and states.shape[-1] > group:
        grouped = states.unflatten(-1, (-1, group))
    upper, lower, scale, minimum = encode(grouped, dim)
    step, zero = affine(scale.unsqueeze(dim), minimum.unsqueeze(dim), bits == 8)
    codes = 16.0 * upper + lower if bits == 8 else upper.float()
    return (codes * step + zero).reshape(states.shape).to(states.dtype)
