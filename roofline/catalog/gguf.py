"""GGUF files: header, bits of the tensor types, and the ModelShape that the metadata describes.

The gguf package's own reader is too slow and too trusting. It makes an object for every token of the vocabulary, 7 s
for the 151936 of Qwen2.5, and does not compare counts and lengths with the file's size, so a damaged header keeps it
busy for minutes. Format: the GGUF specification, ggml/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import re
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.config_json import shape_from_config
from ridgeplan.roofline.catalog.gguf_types import BLOCK_FORMATS
from ridgeplan.roofline.catalog.model_shape import (
    FULL_BITS,
    KEPT_FORMAT,
    BadModelFile,
    ModelShape,
    WeightBits,
    mean_bits,
)
from ridgeplan.roofline.catalog.validation import brief

# Name, and weights and bytes of a block, of the types that are read, by their numbers (ggml/include/ggml.h,
# ggml/src/ggml-common.h).
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
# Names of others that files may have: integers, doubles, types of intermediate results, and what is not decoded.
_UNREAD = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 31: "Q4_0_4_4", 32: "Q4_0_4_8",
    33: "Q4_0_8_8", 41: "Q1_0",
}  # fmt: skip


def gguf_bits(kind: int, name: str = "") -> float:
    """Bits per weight of a tensor type, scales included. Raises ValueError for one that is not read.

    name: the tensor's, for the message.
    """
    if kind not in _TYPES:
        read = ", ".join(each for each, _, _ in _TYPES.values())
        raise ValueError(f"tensor {brief(name)} is of type {_UNREAD.get(kind, kind)}, which is not read; read: {read}")
    _, weights, block_bytes = _TYPES[kind]
    return 8 * block_bytes / weights


MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 262144 tokens and its merges take about 15 MB
MAX_ENTRIES = 1 << 16  # metadata values, and tensors
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_STRING, _ARRAY = 8, 9
# struct formats of the scalar value types, by their number in the file.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
# Bytes of the shortest possible items. A value has a key's length, a type and a bool; a tensor has a name's length, a
# number of dimensions, a type and an offset.
_VALUE_BYTES, _TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GGUFHeader:
    """metadata: scalar and string values by key (arrays are left out); tensors: dimensions and types by name."""

    metadata: dict[str, object]
    tensors: dict[str, tuple[int, ...]]
    types: dict[str, int]


def read_gguf_header(path: Path) -> GGUFHeader:
    """The header of a little-endian GGUF file, version 2 or 3.

    Raises OSError, or ValueError (one line, without the path) if the file is damaged. Before they are used, every count
    is checked against the largest header, and every length against the remaining bytes.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe would wait for whoever writes to it
        raise ValueError("it is a pipe or a device; allowed: a file")
    with path.open("rb") as file:
        if not file.read(1):
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _header(_Cursor(data))
            except (struct.error, OverflowError):  # positions past the end, and beyond 64 bits
                large = f"its header is damaged, or larger than {MAX_HEADER_BYTES >> 20} MiB"
                early = f"the file ends within its header, after {len(data)} bytes; download it again"
                raise ValueError(early if len(data) < MAX_HEADER_BYTES else large) from None


class _Cursor:
    """Reads from a position onwards. Reading past the end, or past the largest header, raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file or of the largest header."""
        return min(len(self.data), MAX_HEADER_BYTES) - self.at

    def scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def whole(self, code: str = "Q") -> int:
        return int(self.scalar(code))

    def count(self, item_bytes: int, limit_items: int = MAX_HEADER_BYTES) -> int:
        """A count of items of at least `item_bytes` each. Raises ValueError if no header may hold that many."""
        number, limit = self.whole(), min((MAX_HEADER_BYTES - self.at) // item_bytes, limit_items)
        if number > limit:
            raise ValueError(f"it announces {number} items in its header; allowed here: up to {limit}")
        return number

    def string(self) -> str:
        length = self.whole()
        self.skip(length)
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def skip(self, length: int) -> None:
        if length > self.left:
            raise struct.error
        self.at += length

    def skip_strings(self) -> None:
        count, at = self.count(_LENGTH.size), self.at
        for _ in range(count):
            at += _LENGTH.size + _LENGTH.unpack_from(self.data, at)[0]
        self.skip(at - self.at)


def _header(cursor: _Cursor) -> GGUFHeader:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not start with 'GGUF'")
    cursor.skip(4)
    version = cursor.whole("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported; supported: 2, 3 (little-endian)")
    tensor_count, value_count = cursor.count(_TENSOR_BYTES, MAX_ENTRIES), cursor.count(_VALUE_BYTES, MAX_ENTRIES)
    metadata: dict[str, object] = {}
    for _ in range(value_count):
        key = _new_name(cursor.string(), metadata)
        value = _value(cursor, cursor.whole("I"))
        if value is not None:
            metadata[key] = value
    tensors, types, end = _tensors(cursor, tensor_count)
    if (whole := cursor.at + end) > len(cursor.data):
        raise ValueError(f"it is truncated: it has {len(cursor.data)} bytes of {whole} or more; download it again")
    return GGUFHeader(metadata, tensors, types)


def _tensors(cursor: _Cursor, count: int) -> tuple[dict[str, tuple[int, ...]], dict[str, int], int]:
    """Dimensions and types by name, and where the last tensor ends, in bytes from the end of the header."""
    tensors: dict[str, tuple[int, ...]] = {}
    types: dict[str, int] = {}
    end = 0  # the tensor data may follow up to an alignment later
    for _ in range(count):
        name = _new_name(cursor.string(), tensors)
        dimensions = cursor.whole("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"tensor {brief(name)} has {dimensions} dimensions; allowed: up to {MAX_DIMENSIONS}")
        tensors[name] = tuple(cursor.whole() for _ in range(dimensions))
        types[name] = cursor.whole("I")
        _, weights, block_bytes = _TYPES.get(types[name], ("", 8, 1))  # no type takes less than a bit per element
        end = max(end, cursor.whole() + max(math.prod(tensors[name]) // weights * block_bytes, 1))
    return tensors, types, end


def _new_name(name: str, known: dict[str, object] | dict[str, tuple[int, ...]]) -> str:
    if name in known:
        raise ValueError(f"{brief(name)} stands twice in it")
    return name


def _value(cursor: _Cursor, kind: int) -> object:
    """One metadata value; None for an array, which is skipped."""
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        return cursor.scalar(_code(kind))
    kind = cursor.whole("I")
    if kind == _STRING:
        cursor.skip_strings()
    else:
        item_bytes = struct.calcsize(_code(kind))
        cursor.skip(cursor.whole() * item_bytes)
    return None


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"metadata of unknown type {kind}")
    return _SCALARS[kind]


@dataclass(frozen=True)
class Stored:
    """How files of an architecture hold a family's models.

    also: another family whose models are stored so, those with a window. blocks: weights may stay in `BLOCK_FORMATS`,
    beside `FULL_TYPES`. neighbours: the halves of a rotary pair are neighbours in rows of queries and keys. kept: the
    tensor type in which experts stay. experts: whether those of the family are read.
    """

    family: str
    also: str = ""
    blocks: bool = False
    neighbours: bool = False
    kept: int | None = None
    experts: bool = False


KEPT_TYPE = 39  # MXFP4
# By the architectures that files name.
ARCHITECTURES = {
    "llama": Stored("llama", also="mistral", blocks=True, neighbours=True),
    "qwen2": Stored("qwen2", blocks=True),
    "qwen3": Stored("qwen3", blocks=True),
    "gemma3": Stored("gemma3_text", blocks=True),
    "qwen3moe": Stored("qwen3_moe", experts=True),
    "gpt-oss": Stored("gpt_oss", experts=True, kept=KEPT_TYPE),
    "qwen35": Stored("qwen3_5_text"),
}
Q4_K_M_BITS = 5.0  # per weight of the layers, as products hold them: 4.9 of Llama-3.1-8B
FULL_TYPES = (0, 1, 30)  # F32, F16 and BF16, which a machine holds in its full precision
# Keys of a config.json by those of a GGUF file.
_CONFIG_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "full_attention_interval": "full_attention_interval",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_ROPE_KEYS = {
    "rope_type": "type", "factor": "factor", "original_max_position_embeddings": "original_context_length",
}  # fmt: skip
_MATRICES = (
    (re.compile(r"blk\.\d+\.(attn_(q|k|v|output|qkv|gate)|ssm_(out|alpha|beta))\.weight"), "attention"),
    (re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.weight"), "mlp"),
    (re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight"), "experts"),
    (re.compile(r"token_embd\.weight"), "embedding"),
    (re.compile(r"output\.weight"), "head"),
)


def shape_from_gguf(path: Path) -> ModelShape:
    """The shape that a GGUF file describes. Raises BadModelFile, one line that names the file."""
    try:
        return shape_of_header(read_gguf_header(path), path)
    except OSError as error:
        raise BadModelFile(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise BadModelFile(f"{path} is not a usable GGUF file: {error}") from None


def shape_of_header(header: GGUFHeader, path: Path) -> ModelShape:
    """The shape that the header of the file `path` describes. Raises ValueError, one line without the path."""
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(f"architecture {brief(architecture)} is not supported; supported: {supported}")

    for name, kind in header.types.items():
        gguf_bits(kind, name)  # raises for one that is not read, whatever the tensor is for
    if header.metadata.get(f"{architecture}.expert_count") and not stored_as(header).experts:
        raise ValueError(f"mixtures of experts of {brief(architecture)} are read from their config.json only")
    bits = weight_bits_of(header)
    if keeps_experts(header):
        bits = WeightBits(experts=gguf_bits(KEPT_TYPE), format=KEPT_FORMAT)
    return replace(shape_from_config(config_of_header(header), path.stem, str(path)), weight_bits=bits)


def config_of_header(header: GGUFHeader) -> dict[str, Any]:
    """The keys of a config.json that a header with a supported architecture says. Raises ValueError."""
    architecture = str(header.metadata["general.architecture"])
    present = {key: header.metadata.get(f"{architecture}.{name}") for key, name in _CONFIG_KEYS.items()}
    keys: dict[str, Any] = {key: entry for key, entry in present.items() if entry is not None}
    stored = stored_as(header)
    family = stored.also if stored.also and keys.get("sliding_window") else stored.family
    keys |= {"model_type": family, "vocab_size": _tensor(header, "token_embd.weight")[-1]}
    keys["norm_topk_prob"] = header.metadata.get(f"{architecture}.expert_weights_norm", True)
    keys["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    heads = keys.get("num_attention_heads")
    if "head_dim" not in keys and isinstance(heads, int) and heads:
        keys["head_dim"] = _tensor(header, "blk.0.attn_q.weight")[-1] // heads
    width, heads = header.metadata.get(f"{architecture}.ssm.inner_size"), keys.get("linear_num_value_heads")
    if isinstance(width, int) and isinstance(heads, int) and heads:
        keys["linear_value_head_dim"] = width // heads
    blocks, predicting = keys.get("num_hidden_layers"), header.metadata.get(f"{architecture}.nextn_predict_layers")
    if isinstance(blocks, int) and isinstance(predicting, int):
        keys["num_hidden_layers"] = blocks - predicting  # layers of multi-token prediction are blocks, too
    scaling = {key: header.metadata.get(f"{architecture}.rope.scaling.{name}") for key, name in _ROPE_KEYS.items()}
    if scaling["rope_type"] == "yarn":
        keys["rope_parameters"] = {**scaling, "rope_theta": keys.get("rope_theta"), "truncate": False}
    return keys | {"tie_word_embeddings": "output.weight" not in header.tensors}


def keeps_experts(header: GGUFHeader) -> bool:
    """Whether the runtime keeps the experts as they are stored: all in MXFP4."""
    return {kind for name, kind in header.types.items() if name.endswith("_exps.weight")} == {stored_as(header).kept}


def stored_as(header: GGUFHeader) -> Stored:
    """How the file holds its model. Raises KeyError for an architecture that is not supported."""
    return ARCHITECTURES[str(header.metadata["general.architecture"])]


def weight_bits_of(header: GGUFHeader) -> WeightBits:
    """The mean bits per weight of each part's tensors; the head's are the embedding's where the file has none.

    Raises ValueError for a type that is not read.
    """
    matrices = [
        (part, math.prod(dimensions), header.types[name])
        for name, dimensions in header.tensors.items()
        if (part := next((part for pattern, part in _MATRICES if pattern.fullmatch(name)), None))
        and math.prod(dimensions)
    ]
    bits = mean_bits(((part, elements, gguf_bits(kind)) for part, elements, kind in matrices), "gguf")
    if "output.weight" not in header.tensors:
        bits = bits.tied()
    if not stored_as(header).blocks or any(kind not in (*BLOCK_FORMATS, *FULL_TYPES) for _, _, kind in matrices):
        return bits
    held = {kind: described.held_bits for kind, described in BLOCK_FORMATS.items()}
    layers = [(elements, kind) for part, elements, kind in matrices if part not in ("embedding", "head")]
    total = sum(elements for elements, _ in layers)
    blocks = sum(elements * held.get(kind, 0) for elements, kind in layers)
    if not blocks:
        return bits
    full = sum(elements for elements, kind in layers if kind in FULL_TYPES)
    embedding = header.types["token_embd.weight"]
    head = header.types.get("output.weight", embedding)
    tables = {"embedding": held.get(embedding, FULL_BITS), "head": held.get(head, FULL_BITS)}
    return bits.with_stored({"layers": blocks / total, "full": full / total, **tables})


def as_q4_k_m(shape: ModelShape) -> ModelShape | None:
    """The model as a GGUF file of type Q4_K_M has it; None if it is quantized or products could not read the file."""
    families = {name for stored in ARCHITECTURES.values() if stored.blocks for name in (stored.family, stored.also)}
    if shape.architecture not in families or not shape.weight_bits.full:
        return None
    held = {name: BLOCK_FORMATS[kind].held_bits for name, kind in (("embedding", 12), ("head", 14))}
    stored = WeightBits(format="gguf").with_stored({"layers": Q4_K_M_BITS, **held})
    return replace(shape, weight_bits=stored.tied() if shape.tied_embeddings else stored)


def _tensor(header: GGUFHeader, name: str) -> tuple[int, ...]:
    """The dimensions of a matrix, innermost first: [inputs, outputs]."""
    dimensions = header.tensors.get(name, ())
    if len(dimensions) != 2:
        raise ValueError(f"it has no matrix {name}")
    return dimensions
