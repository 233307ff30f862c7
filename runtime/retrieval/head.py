"""Retrieval head: its queries, keys and scores, and the file that stores it.

A head needs only the tokens, so its selection is known before the model's first layer runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer import add_rms_norm, rotary_tables, rotate
from ridgeplan.roofline.catalog.files import parse_json, replacing
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.validation import Checked, brief, build, name_text, number, one_of, whole
from ridgeplan.runtime.errors import ModelError, failures_as
from ridgeplan.runtime.model.config import yarn_frequencies

FORMAT = 1
PROBED_TOKENS, PROBED_CHANNELS = 16, 8  # the part of an embedding that identifies a model
PROBE_TOLERANCE = 0.02  # bf16 rounds by 0.4%, and 8-bit files by a little more


@dataclass(frozen=True)
class HeadConfig(Checked):
    """The configuration in a head's file. Raises ModelError for values out of range.

    model: the model that it belongs to. context: tokens of the longest training sequences; YaRN stretches it beyond.
    layers: 1 for one selection that all layers share, as published. Otherwise the model's number of layers: there is
    a query head for each KV head of each layer, ordered by KV head first. inputs: "embedding", or "full" with the
    target's features of the previous token (EAGLE-3).
    """

    error = ModelError
    model: str = name_text()
    hidden: int = whole(1, 1 << 16)
    vocab: int = whole(1, 1 << 22)
    q_heads: int = whole(1, 1024)
    kv_heads: int = whole(1, 1024)
    head_dim: int = whole(2, 1024)
    context: int = whole(1, 1 << 24)
    rope_theta: float = number(1, 1e12, default=10000.0)
    norm_eps: float = number(0, 1, default=1e-5)
    layers: int = whole(1, 4096, default=1)
    inputs: str = one_of(("embedding", "full"), default="embedding")
    format: int = one_of((FORMAT,), default=FORMAT)

    def _owner(self) -> str:
        return "retrieval head: "

    def _contradiction(self) -> str | None:
        if self.q_heads % self.kv_heads or self.head_dim % 2:
            heads = f"{self.q_heads} query heads, {self.kv_heads} KV heads of {self.head_dim}"
            return f"{heads}; allowed: a multiple of the KV heads, of an even size"
        if self.q_heads % self.layers:
            return f"{self.q_heads} query heads for {self.layers} layers; allowed: a multiple of the layers"
        return None

    @property
    def width(self) -> int:
        """Inputs of the projections."""
        return self.hidden * (2 if self.inputs == "full" else 1)


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """norm [hidden]; q [q_heads head_dim, width]; k [kv_heads head_dim, width]; probe: of the model's embedding.

    Optional: biases of q and k, norms of each query's and key's channels (Qwen3), an embedding [vocab, hidden] of its
    own, and for "full" inputs feature_norm [hidden] and fc [hidden, 3 hidden].
    """

    norm: Tensor
    q: Tensor
    k: Tensor
    probe: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    embedding: Tensor | None = None
    feature_norm: Tensor | None = None
    fc: Tensor | None = None


def probe_of(embedding: Tensor) -> Tensor:
    """Values of an embedding [vocab, hidden] by which it is recognized, float32 [PROBED_TOKENS, PROBED_CHANNELS]."""
    tokens = torch.linspace(0, len(embedding) - 1, PROBED_TOKENS, dtype=torch.float64).long()
    return embedding[tokens.to(embedding.device), :PROBED_CHANNELS].float().cpu()


def is_probe_of(probe: Tensor, embedding: Tensor) -> bool:
    """Whether `probe_of` that embedding gave the probe, in whatever precision."""
    expected = probe_of(embedding)
    apart = (expected - probe).abs().max() / expected.abs().max().clamp_min(1e-30)
    return bool(apart <= PROBE_TOLERANCE)


@dataclass(frozen=True, eq=False)
class Head:
    """A head and its file's configuration; `for_model` binds it to a model's embedding."""

    config: HeadConfig
    weights: HeadWeights
    tokens: Tensor | None = None  # the embedding that it reads, once it is bound

    def fits(self, shape: ModelShape) -> bool:
        """Whether it has the sizes of a head of a model of this shape."""
        config, sets = self.config, shape.kv_heads * self.config.layers
        same = config.hidden == shape.hidden and config.vocab == shape.vocab and config.layers in (1, shape.layers)
        return same and config.q_heads % sets == 0 and not shape.is_mla

    def require_shape(self, shape: ModelShape) -> None:
        """Raises ModelError for a head of a model of other sizes."""
        if not self.fits(shape):
            raise self._other()

    def for_model(self, shape: ModelShape, embedding: Tensor) -> Head:
        """The head on the device and in the dtype of the model's embedding [vocab, hidden].

        Raises ModelError for a head of another model, by sizes or by the embedding's values.
        """
        self.require_shape(shape)
        if not is_probe_of(self.weights.probe, embedding):
            raise self._other()
        tensors = vars(self.weights).items()
        converted: dict[str, Any] = {name: value if value is None else value.to(embedding) for name, value in tensors}
        weights = HeadWeights(**converted)
        return replace(self, weights=weights, tokens=embedding if weights.embedding is None else weights.embedding)

    def _other(self) -> ModelError:
        allowed = "a head that `ridgeplan distill` trained for this one"
        return ModelError(f"the retrieval head is of {brief(self.config.model)}, another model; allowed: {allowed}")

    def project(
        self, tokens: Tensor, positions: Tensor, rotary: Rotary, features: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries [..., q_heads, head_dim] and keys [..., kv_heads, head_dim] of tokens [...] at positions [...].

        features: of the token before each, [..., 3 hidden], for "full" inputs.
        """
        weights, config = self.weights, self.config
        assert self.tokens is not None, "the head is bound to a model"
        inputs = self._normed(functional.embedding(tokens, self.tokens), weights.norm)
        if features is not None:
            assert weights.fc is not None and weights.feature_norm is not None, "it has full inputs"
            fused = functional.linear(features, weights.fc)
            inputs = torch.cat([inputs, self._normed(fused, weights.feature_norm)], dim=-1)
        tables = rotary.tables(positions)
        heads = ((weights.q, weights.q_bias, weights.q_norm), (weights.k, weights.k_bias, weights.k_norm))
        rotated = []
        for weight, bias, norm in heads:
            each = functional.linear(inputs, weight, bias).unflatten(-1, (-1, config.head_dim))
            each = each if norm is None else self._normed(each, norm)
            rotated.append(rotate(each, *tables))
        return rotated[0], rotated[1]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(1, -1, x.shape[-1])
        return add_rms_norm(rows, None, weight, self.config.norm_eps)[1].view_as(x)


@dataclass(frozen=True, eq=False)
class Rotary:
    """RoPE of a head for sequences of up to `context` tokens, on a device: YaRN beyond what it was trained on."""

    config: HeadConfig
    context: int
    device: torch.device

    @cached_property
    def _frequencies(self) -> tuple[Tensor, float]:
        config = self.config
        frequencies, scale = yarn_frequencies(config.head_dim, config.rope_theta, config.context, self.context)
        return torch.tensor(frequencies, dtype=torch.float32, device=self.device), scale

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., head_dim / 2] of positions [...]."""
        return rotary_tables(positions, *self._frequencies)


KEY = "ridgeplan.retrieval_head"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def save_head(path: str | Path, head: Head) -> None:
    """Writes a head's file, completely or not at all. Raises ModelError where it cannot be written."""
    tensors = {name: value.contiguous().cpu() for name, value in vars(head.weights).items() if value is not None}
    write_tensors(Path(path), tensors, {KEY: json.dumps(asdict(head.config))})


def load_head(path: str | Path) -> Head:
    """The head of a file. Raises ModelError, one line that names the file, for anything that is wrong with it."""
    what = f"cannot load the retrieval head {brief(str(path))}"
    with failures_as(what):
        metadata, tensors = read_tensors(Path(path))
        if KEY not in metadata:
            raise ValueError("it is no file of `ridgeplan distill`")
        config = build(HeadConfig, parse_json(metadata[KEY]))
        _require_sizes(config, tensors)
        return Head(config, HeadWeights(**tensors))


def shipped_heads() -> list[Path]:
    """The files of the heads that come with this package (docs/quality.md says how they were trained)."""
    return sorted(Path(__file__).with_name("heads").glob("*.safetensors"))


def shipped_file(shape: ModelShape) -> Path | None:
    """The file of the head that comes with this package for a model of these sizes; None without one."""
    return next((path for path in shipped_heads() if load_head(path).fits(shape)), None)


def shipped_head(shape: ModelShape, embedding: Callable[[], Tensor]) -> Head | None:
    """This package's head for a model, which is recognized by its embedding [vocab, hidden]; None without one."""
    path = shipped_file(shape)
    head = None if path is None else load_head(path)
    return head if head is not None and is_probe_of(head.weights.probe, embedding()) else None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file, completely or not at all; a link stays one. Raises ModelError."""
    try:
        with replacing(path) as staging:
            staging.write_bytes(save(dict(tensors), dict(metadata)))
    except OSError as error:
        raise ModelError(f"cannot write {brief(str(path))}: {error.strerror}") from error


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file. Raises OSError, and safetensors' own errors."""
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in names}


def sizes_of(config: HeadConfig) -> dict[str, tuple[list[int], bool]]:
    """The size of each tensor of a head, and whether a head of this kind must have it."""
    full, queries, keys = config.inputs == "full", config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "norm": ([config.hidden], True),
        "q": ([queries, config.width], True),
        "k": ([keys, config.width], True),
        "probe": ([PROBED_TOKENS, PROBED_CHANNELS], True),
        "q_bias": ([queries], False),
        "k_bias": ([keys], False),
        "q_norm": ([config.head_dim], False),
        "k_norm": ([config.head_dim], False),
        "embedding": ([config.vocab, config.hidden], False),
        "feature_norm": ([config.hidden], full),
        "fc": ([config.hidden, 3 * config.hidden], full),
    }


def _require_sizes(config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError for tensors that are missing, unknown, misshapen, of another type or not finite."""
    sizes = sizes_of(config)
    for name in tensors.keys() - sizes.keys():
        raise ValueError(f"it holds {brief(name)}; allowed: {', '.join(sizes)}")
    for name, (size, required) in sizes.items():
        tensor = tensors.get(name)
        if tensor is None:
            if required:
                raise ValueError(f"it lacks {name}")
            continue
        require_tensor(name, tensor, size)


def require_tensor(name: str, tensor: Tensor, size: list[int]) -> None:
    """Raises ValueError for a tensor of another size or type, or with values that are not finite."""
    if list(tensor.shape) != size or tensor.dtype not in DTYPES:
        actual = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{name} is {actual}; allowed: floating numbers {size}, of 16 or 32 bits")
    if not torch.stack(torch.aminmax(tensor.float())).isfinite().all():
        raise ValueError(f"{name} holds values that are NaN or infinite")
