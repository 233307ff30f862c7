"""Bits per weight that a checkpoint holds, part by part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ridgeplan.roofline.catalog.checks import Checked, number, one_of

FULL_BITS = 16.0
# Formats that the runtime decodes as it loads them, into what the plan asks for.
DECODED_BITS = {"gptq": (2, 4, 8), "awq": (4,), "compressed-tensors": (2, 4, 8)}  # of formats with several sizes
PACKED_FORMATS = (*DECODED_BITS, "fp8")  # of safetensors
CONVERTED_FORMATS = ("bf16", "float32", "gguf", *PACKED_FORMATS)
MOST_BITS = 16
OTHER_BITS = tuple(
    f"{method} of {bits} bits"
    for method, decoded in DECODED_BITS.items()
    for bits in range(2, MOST_BITS + 1)
    if bits not in decoded
)
OTHER_LAYOUTS = tuple(f"{method} in another layout" for method in DECODED_BITS)
FORMATS = (*CONVERTED_FORMATS, "bitsandbytes", "fbgemm_fp8", "mxfp4", "nvfp4", *OTHER_BITS, *OTHER_LAYOUTS)
PARTS = ("attention", "mlp", "experts", "embedding", "head")


def _bits() -> Any:
    return number(1, 64, default=FULL_BITS)


@dataclass(frozen=True)
class WeightBits(Checked):
    """Bits per weight of each part's matrices, with their scales and zeros.

    16 is any 16-bit type, which a machine holds in its own full precision: bf16 on a GPU, fp32 on a CPU. Vectors and
    routers are in full precision in all formats.
    """

    attention: float = _bits()
    mlp: float = _bits()  # dense MLPs and shared experts
    experts: float = _bits()  # routed ones
    embedding: float = _bits()
    head: float = _bits()  # the embedding's where both are one table
    format: str = one_of(FORMATS, default="bf16")

    def full_bytes(self, part: str, element_bytes: float) -> float:
        """Bytes per weight of a part that no plan quantizes, on a machine with `element_bytes` per element."""
        bits: float = getattr(self, part)
        return element_bytes if bits == FULL_BITS else bits / 8

    def widest_bytes(self, element_bytes: float) -> float:
        """Bytes per weight of the linear layers' widest part."""
        return max(self.full_bytes(part, element_bytes) for part in ("attention", "mlp", "experts"))

    @property
    def as_loaded(self) -> WeightBits:
        """The bits of the weights once the runtime has loaded them."""
        return WeightBits(format=self.format) if self.converted else self

    @property
    def converted(self) -> bool:
        """Whether loading changes any part's bits."""
        return self.format in CONVERTED_FORMATS and not self.full

    @property
    def full(self) -> bool:
        """Whether all parts are in full precision. No kernel was calibrated for others as they are stored."""
        return all(getattr(self, part) == FULL_BITS for part in PARTS)

    def tied(self) -> WeightBits:
        """These bits for a model whose output head is its embedding."""
        return replace(self, head=self.embedding)


def format_of(method: str, bits: int, *, usual: bool) -> str:
    """The name in `FORMATS` of a method of `DECODED_BITS` with so many bits, in its `usual` layout or another."""
    if bits not in DECODED_BITS[method]:
        return f"{method} of {bits} bits"
    return method if usual else f"{method} in another layout"


def loaded_formats() -> tuple[str, ...]:
    """The formats that the runtime loads, as messages list them, such as "gptq of 2/4/8 bits"."""
    sizes = {method: f" of {'/'.join(map(str, bits))} bits" for method, bits in DECODED_BITS.items()}
    return tuple(f"{name}{sizes.get(name, '')}" for name in CONVERTED_FORMATS)


def mean_bits(tensors: Iterable[tuple[str, float, float]], kind: str) -> WeightBits:
    """The mean bits of each part, from its tensors: (part, elements, bits per weight). Parts without any have 16."""
    held: dict[str, tuple[float, float]] = {}
    for part, elements, bits in tensors:
        known_elements, known_bits = held.get(part, (0.0, 0.0))
        held[part] = known_elements + elements, known_bits + elements * bits
    return WeightBits(**{part: bits / elements for part, (elements, bits) in held.items()}, format=kind)
