"""Weights of a plan as a quantization method of vLLM: 8 bits as two planes of 4, or 4 bits, in the package's kernels.

vLLM loads each rank's shard of the checkpoint as it is, and the shard becomes codes. Rounding to nearest needs a row's
group of inputs alone, so shards hold what a single GPU would; a fit that `runtime.load` has saved for the same
checkpoint is cut into shards instead.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.linear import linear_quantized
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.runtime.model.linear import GatedMLP, QuantizedLinear
from ridgeplan.runtime.model.source import model_source
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights, WeightFormat
from ridgeplan.runtime.quantization.calibration import plane_parts
from ridgeplan.runtime.quantization.saved import read_saved, weights_path
from ridgeplan.runtime.vllm import api

BITS = (4, 8)
MIN_CAPABILITY = 80  # Triton's kernels; those in CUDA C++ need 90
LAYER = re.compile(r"\blayers\.(\d+)\.")
UNFITTED = "weights are rounded to nearest: no fit of them is saved; `ridgeplan run PLAN --model MODEL` here saves one"


class PlanWeights(api.QuantizationConfig):
    """vLLM's configuration of the method `ridgeplan`, from the model's `quantization_config`.

    bits: 8 or 4. group: inputs per scale. hierarchical: whether upper planes of 8 bits serve drafts by themselves.
    fitted: whether a saved fit is used where there is one. The head of 8-bit weights is quantized too, of 4-bit ones
    not, as in `runtime.load`.
    """

    def __init__(self, bits: int, group: int, hierarchical: bool, fitted: bool) -> None:
        super().__init__()
        self.format = WeightFormat(bits, group, hierarchical)
        self.fitted = fitted
        self.source: str | None = None

    @staticmethod
    def get_name() -> str:
        """The name by which vLLM knows the method."""
        return "ridgeplan"

    @staticmethod
    def get_supported_act_dtypes() -> list[torch.dtype]:
        """Dtypes of the kernels in CUDA C++."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU: Ampere."""
        return MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the configuration comes with `--hf-overrides`."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlanWeights:
        """Raises ValueError for bits, groups or keys that there are not, and for 4 bits in two planes."""
        known = {"quant_method", "bits", "group", "hierarchical", "fitted"}
        if config.keys() - known:
            raise ValueError(f"quantization_config has {sorted(config.keys() - known)}; allowed: {sorted(known)}")
        bits, group = config.get("bits"), config.get("group", 128)
        hierarchical, fitted = config.get("hierarchical", bits == 8), config.get("fitted", True)
        flags = hierarchical in (False, bits == 8) and fitted in (False, True)
        if bits not in BITS or group not in (32, 64, 128, 256) or not flags:
            raise ValueError(
                f"quantization_config has bits {bits!r}, group {group!r}, hierarchical {hierarchical!r}, fitted "
                f"{fitted!r}; allowed: 8 or 4, 32, 64, 128 or 256, true only with 8 bits, and true or false"
            )
        return cls(bits, group, hierarchical, fitted)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Notes the checkpoint, by which saved fits are found."""
        self.source = model_name

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> CodedLinear | CodedHead | None:
        """The method of a linear layer, or of the head where it is quantized; None for all others."""
        if isinstance(layer, api.LinearBase):
            return CodedLinear(self, prefix)
        if isinstance(layer, api.ParallelLMHead) and self.format.bits == 8:
            return CodedHead(self, prefix)
        return None

    def saved(self, dtype: torch.dtype) -> DecoderWeights | None:
        """The fit that `runtime.load` saved for this checkpoint on a GPU; None if there is none or none is wanted."""
        if self.source is None or not self.fitted:
            return None
        path = weights_path(model_source(self.source), dtype, torch.device("cuda"), self.format, None)
        weights = None if path is None else _read(path)
        if weights is None:
            warnings.warn(UNFITTED, stacklevel=2)
        return weights


@cache
def _read(path: Path) -> DecoderWeights | None:
    """A saved fit on the host, read once for all layers."""
    return read_saved(path, torch.device("cpu"))


@cache
def register_product() -> None:
    """Registers `torch.ops.ridgeplan.linear`, which compilers take as it is."""

    @torch.library.custom_op("ridgeplan::linear", mutates_args=())
    def linear(x: Tensor, planes: Sequence[Tensor], group: int, outputs: int, bias: Tensor | None) -> Tensor:
        weights = [Int4Weight(plane, group, x.shape[-1], outputs) for plane in planes]
        both = len(weights) == 2 and not drafting()
        return linear_quantized(x, Int8Weight(*weights) if both else weights[0], bias)

    @linear.register_fake
    def _(x: Tensor, planes: Sequence[Tensor], group: int, outputs: int, bias: Tensor | None) -> Tensor:
        return x.new_empty(*x.shape[:-1], outputs)


def drafting() -> bool:
    """Whether the pass that runs is one of drafts, which read the upper planes."""
    if not api.is_forward_context_available():
        return False
    metadata = api.get_forward_context().attn_metadata
    first = next(iter(metadata.values()), None) if isinstance(metadata, dict) else None
    return bool(getattr(first, "draft", False))


@dataclass(frozen=True)
class Shard:
    """A rank's part of a weight. outputs: for each matrix that is stacked in it, the rank's rows of all. inputs: its
    columns of all."""

    outputs: tuple[range, ...]
    inputs: range

    @classmethod
    def of(
        cls, rank: int, ranks: int, sizes: Sequence[int], own_sizes: Sequence[int], inputs: int, own_inputs: int
    ) -> Shard:
        """sizes, inputs: of the whole weight, by matrix; own_sizes, own_inputs: of a rank's part, which several ranks
        may share."""

        def part(whole: int, own: int) -> range:
            start = rank * (whole // own) // ranks * own
            return range(start, start + own)

        return cls(tuple(map(part, sizes, own_sizes)), part(inputs, own_inputs))

    def cut(self, weight: Int4Weight, sizes: Sequence[int]) -> Int4Weight:
        """The part of one plane. Raises ValueError where a shard's inputs are no whole groups."""
        group, columns = weight.group, slice(self.inputs.start, self.inputs.stop)
        if columns.start % group or columns.stop % group:
            raise ValueError(f"a shard of {len(self.inputs)} inputs is no whole number of groups of {group}")
        pairs = slice(columns.start // group, columns.stop // group)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        rows = torch.tensor([start + row for start, part in zip(starts, self.outputs, strict=True) for row in part])
        scale, zero = (pair[rows, pairs] for pair in weight.pairs())
        return Int4Weight.pack(weight.unpack()[rows, columns], scale, zero)


class Coded:
    """What the methods of linear layers and of the head share. `loading`: vLLM's method that loads the checkpoint."""

    def __init__(self, config: PlanWeights, prefix: str, loading: Any) -> None:
        self.config, self.prefix, self.loading = config, prefix, loading

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        """See vLLM's `LinearMethodBase`. Raises ValueError for a shard whose inputs are no whole groups."""
        group = self.config.format.group
        if input_size_per_partition != input_size and group and input_size_per_partition % group:
            raise ValueError(
                f"{self.prefix} has {input_size_per_partition} of {input_size} inputs per GPU; allowed: a multiple of "
                f"its groups of {group}"
            )
        register_product()
        self.inputs, self.own_sizes = input_size, output_partition_sizes
        self.loading.create_weights(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
            **extra_weight_attrs,
        )  # fmt: skip

    @torch.no_grad()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces the loaded weight by codes."""
        weight = layer.weight.data
        planes = self._fitted(layer, weight) or [Int4Weight.pack(*p) for p in plane_parts(weight, self.config.format)]
        if not getattr(layer, "ridgeplan_tied", False):
            del layer.weight
        for name, plane in zip(("upper", "lower"), planes, strict=False):
            packed = torch.nn.Parameter(plane.packed.to(weight.device), requires_grad=False)
            layer.register_parameter(f"ridgeplan_{name}", packed)
        layer.ridgeplan_sizes = planes[0].group, planes[0].outputs

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        planes = [layer.ridgeplan_upper]
        if self.config.format.bits == 8:
            planes.append(layer.ridgeplan_lower)
        return torch.ops.ridgeplan.linear(x, planes, *layer.ridgeplan_sizes, bias)

    def _fitted(self, layer: Any, weight: Tensor) -> list[Int4Weight]:
        """This rank's part of a saved fit; none where there is no fit of this layer and these sizes."""
        saved = self.config.saved(weight.dtype)
        whole = None if saved is None else projection(saved, self.prefix)
        if whole is None:
            return []
        rank, ranks = 0, 1
        if not getattr(layer, "disable_tp", False):  # of the head, 0.24 does not tell the rank
            known = getattr(layer, "tp_rank", None)
            rank = api.get_tensor_model_parallel_rank() if known is None else known
            ranks = getattr(layer, "tp_size", None) or api.get_tensor_model_parallel_world_size()
        sizes = list(_whole_sizes(layer, self.own_sizes, ranks, whole[0].outputs))
        if sum(sizes) != whole[0].outputs or whole[0].inputs != self.inputs:
            return []
        shard = Shard.of(rank, ranks, sizes, self.own_sizes, self.inputs, weight.shape[1])
        return [shard.cut(plane, sizes) for plane in whole]


def _whole_sizes(layer: Any, own_sizes: Sequence[int], ranks: int, outputs: int) -> Iterator[int]:
    """Outputs of each matrix over all ranks: of keys and values fewer than each rank's times ranks, if ranks share."""
    heads = getattr(layer, "total_num_heads", None)
    if heads is not None:
        yield from (layer.head_size * count for count in (heads, *2 * (layer.total_num_kv_heads,)))
    elif sum(own_sizes) == outputs:
        yield from own_sizes
    else:
        yield from (ranks * size for size in own_sizes)


def projection(weights: DecoderWeights, prefix: str) -> tuple[Int4Weight, ...] | None:
    """The planes of a saved projection by vLLM's name for it; None if it is not one in the layout of GPUs."""
    match = LAYER.search(f".{prefix}.")
    part: Any = weights.head if prefix.endswith("lm_head") else None
    if match is not None:
        layer = weights.layers[int(match[1])]
        if not isinstance(layer.mixer, AttentionWeights) or not isinstance(layer.mlp, GatedMLP):
            return None
        names = {"qkv_proj": layer.mixer.qkv, "o_proj": layer.mixer.output}
        names |= {"gate_up_proj": layer.mlp.gate_up, "down_proj": layer.mlp.down}
        part = names.get(prefix.rpartition(".")[2])
    if not isinstance(part, QuantizedLinear) or not isinstance(part.weight, (Int4Weight, Int8Weight)):
        return None
    return part.weight.planes


@api.register_weight_loader_v2_supported_method
class CodedLinear(Coded, api.LinearMethodBase):
    """The method of a linear layer."""

    def __init__(self, config: PlanWeights, prefix: str) -> None:
        super().__init__(config, prefix, api.UnquantizedLinearMethod())


class CodedHead(Coded, api.LinearMethodBase):
    """The method of the head."""

    def __init__(self, config: PlanWeights, prefix: str) -> None:
        super().__init__(config, prefix, api.UnquantizedEmbeddingMethod())

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Shares the embedding, which stays in full precision beside the codes."""
        layer.ridgeplan_tied = True
        return self.loading.tie_weights(layer, embed_tokens)
