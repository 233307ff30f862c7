"""GGUF files from plain values, so that single ones of them can be wrong. Format: ggml/docs/gguf.md."""

import struct
from typing import Any

from hypothesis import strategies as st
from mutations import RAW, mutated

LETTERS = [chr(0x21 + index) for index in range(62)]
METADATA: dict[str, Any] = {
    "general.architecture": "llama", "llama.context_length": 128, "llama.embedding_length": 32,
    "llama.block_count": 1, "llama.feed_forward_length": 32, "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1, "llama.rope.dimension_count": 16, "llama.attention.key_length": 16,
    "llama.attention.value_length": 16, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": 64,
    "llama.rope.freq_base": 10000.0, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*LETTERS, "+", "+-"],
    "tokenizer.ggml.token_type": [1] * 64, "tokenizer.ggml.merges": ["+ -"], "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
}  # fmt: skip
SHAPES = {
    "token_embd": [32, 64], "output": [32, 64], "output_norm": [32],
    **{f"blk.0.{name}": [32] for name in ("attn_norm", "ffn_norm")},
    **{f"blk.0.{name}": [32, rows] for name, rows in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16))},
    **{f"blk.0.{name}": [32, 32] for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")},
}  # fmt: skip
TENSOR_BYTES = 4 * 32 * 64  # of the largest; the small ones share its bytes
TENSORS: dict[str, Any] = {f"{name}.weight": {"shape": shape, "type": 0, "at": 0} for name, shape in SHAPES.items()}
STRING, ARRAY, BOOL, FLOAT64 = 8, 9, 7, 12
INTEGERS = ((4, "<I", 0, 2**32), (5, "<i", -(2**31), 2**31), (10, "<Q", 0, 2**64), (11, "<q", -(2**63), 2**63))


def gguf_bytes(metadata: dict[str, Any], tensors: dict[str, Any]) -> bytes:
    """A little-endian GGUF file, version 3; every value has the first type of GGUF that holds it."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, content = typed(value)
        header += text(key) + struct.pack("<I", kind) + content
    for name, tensor in tensors.items():
        fields = tensor if isinstance(tensor, dict) else {}
        shape = fields.get("shape", [])
        shape = [unsigned(count) for count in (shape if isinstance(shape, list) else [shape])]
        header += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        header += struct.pack("<IQ", unsigned(fields.get("type")) % 2**32, unsigned(fields.get("at")))
    padding = -len(header) % 32
    return header + bytes(padding) + struct.pack("<f", 0.01) * (TENSOR_BYTES // 4)


def text(value: str) -> bytes:
    """A string with its length in front."""
    content = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(content)) + content


def unsigned(value: Any) -> int:
    """A number as an unsigned one of 64 bits, 0 for what is none."""
    return int(value) % 2**64 if isinstance(value, (int, float)) and abs(value) < 2**70 else 0


def typed(value: Any) -> tuple[int, bytes]:
    """The number of a value's type, and its bytes. Raw tokens are floats."""
    if isinstance(value, str) and value.startswith(RAW):
        value = float(value.removeprefix(RAW))
    if isinstance(value, bool):
        return BOOL, bytes([value])
    for kind, code, low, high in INTEGERS:
        if isinstance(value, int) and low <= value < high:
            return kind, struct.pack(code, value)
    if isinstance(value, float):
        return FLOAT64, struct.pack("<d", value)
    if isinstance(value, list) and value:
        items = [typed(item) for item in value]
        kind = items[0][0]
        same = [content for item_kind, content in items if item_kind == kind]
        return ARRAY, struct.pack("<IQ", kind, len(same)) + b"".join(same)
    return STRING, text(value if isinstance(value, str) else "")


@st.composite
def gguf_files(draw: st.DrawFn) -> bytes:
    """A small Llama of which some metadata or some tensors are wrong."""
    metadata, tensors = METADATA, TENSORS
    if draw(st.booleans()):
        metadata = draw(mutated(METADATA, ("nan", "inf", "-inf")))
    else:
        tensors = draw(mutated(TENSORS, ("nan", "inf", "-inf")))
    return gguf_bytes(metadata, tensors)
