"""Quantized safetensors checkpoints: read tensor by tensor, so that only what is asked for is ever decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.packed_weights import DECODERS, Settings
from ridgeplan.runtime.model.readers import failures_as


@dataclass(frozen=True, eq=False)
class PackedTensors:
    """A checkpoint's tensors by name, decoded when taken. Nothing is held, so that taking is all that costs memory.

    files: the file of every stored tensor.
    """

    source: str
    shape: ModelShape
    dtype: torch.dtype
    settings: Settings
    files: dict[str, Path]

    @classmethod
    def open(
        cls, source: str, shape: ModelShape, dtype: torch.dtype, settings: Settings, files: Sequence[Path]
    ) -> PackedTensors:
        """The tensors in safetensors `files`. Raises ModelError for one that cannot be read."""
        found: dict[str, Path] = {}
        with failures_as(f"cannot load the model {source}"):
            for path in files:
                with safe_open(path, framework="pt") as file:
                    found |= dict.fromkeys(file.keys(), path)
        return cls(source, shape, dtype, settings, found)

    def get(self, name: str, *default: Any) -> Any:
        """The tensor, or a default where there is none. Raises ModelError for a missing or a misshapen one."""
        tensor = self._tensor(name)
        if tensor is not None:
            self._require_size(name, tensor)
            return tensor.to(self.dtype)
        if default:
            return default[0]
        raise ModelError(f"the checkpoint {self.source} lacks the weight {name}")

    pop = get  # nothing is held that could be dropped

    def _tensor(self, name: str) -> Tensor | None:
        module, _, last = name.rpartition(".")
        decode, marks = DECODERS[self.settings["quant_method"]]
        if last == "weight" and any(f"{module}.{mark}" in self.files for mark in marks):
            parts = {part.rpartition(".")[2]: self._read(part) for part in self._of(module)}
            with failures_as(f"cannot decode {name} of the checkpoint {self.source}"):
                return decode(parts, self.settings)
        return self._read(name) if name in self.files else None

    def _of(self, module: str) -> Iterator[str]:
        return (name for name in self.files if name.rpartition(".")[0] == module)

    def _read(self, name: str) -> Tensor:
        """A copy, which does not keep the whole file mapped."""
        with failures_as(f"cannot load the model {self.source}"), safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name).clone()

    def _require_size(self, name: str, tensor: Tensor) -> None:
        sizes = expected_sizes(self.shape).get(name.rpartition(".")[0].rpartition(".")[2])
        if name.endswith(".weight") and sizes and tuple(tensor.shape) != sizes:
            raise ModelError(
                f"in the checkpoint {self.source} the weight {name} is {list(tensor.shape)}; its config.json needs "
                f"{list(sizes)}"
            )


def expected_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every matrix, by the last part of its module's name."""
    hidden, wide = shape.hidden, shape.intermediate
    return {
        "embed_tokens": (shape.vocab, hidden), "lm_head": (shape.vocab, hidden), "q_proj": (shape.q_width, hidden),
        "k_proj": (shape.kv_width, hidden), "v_proj": (shape.kv_width, hidden), "o_proj": (hidden, shape.q_width),
        "gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide),
    }  # fmt: skip
