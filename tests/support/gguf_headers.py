"""Headers of GGUF files as llama.cpp quantizes them, without their tensors' contents."""

from pathlib import Path

from ridgeplan.roofline.catalog.gguf import GGUFHeader, shape_of_header
from ridgeplan.roofline.catalog.model_shape import ModelShape

F32, Q4_K, Q6_K = 0, 12, 14
HIDDEN, WIDE, KV_WIDTH, VOCAB, LAYERS = 4096, 14336, 1024, 128256, 32
Q4_K_M_BYTES = 4_912_898_304  # of all tensors of Llama-3.1-8B


def llama_8b_header() -> GGUFHeader:
    """Llama-3.1-8B in Q4_K_M: half of the layers have attn_v and ffn_down in Q6_K, as has the output head."""
    metadata: dict[str, object] = {
        "general.architecture": "llama", "llama.block_count": LAYERS, "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": WIDE, "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8,
        "llama.context_length": 131072, "llama.rope.freq_base": 5e5,
    }  # fmt: skip
    sizes = {"token_embd": (HIDDEN, VOCAB), "output": (HIDDEN, VOCAB), "output_norm": (HIDDEN,)}
    kinds = {"token_embd": Q4_K, "output": Q6_K, "output_norm": F32}
    for index in range(LAYERS):
        more = index < LAYERS // 8 or index >= 7 * LAYERS // 8 or (index - LAYERS // 8) % 3 == 2
        layer = {
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, KV_WIDTH), "attn_v": (HIDDEN, KV_WIDTH),
            "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (HIDDEN, WIDE), "ffn_up": (HIDDEN, WIDE),
            "ffn_down": (WIDE, HIDDEN), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
        }  # fmt: skip
        for name, each in layer.items():
            sizes[f"blk.{index}.{name}"] = each
            wide = more and name in ("attn_v", "ffn_down")
            kinds[f"blk.{index}.{name}"] = F32 if len(each) == 1 else Q6_K if wide else Q4_K
    tensors = {f"{name}.weight": size for name, size in sizes.items()}
    return GGUFHeader(metadata, tensors, {f"{name}.weight": kind for name, kind in kinds.items()})


def llama_8b_q4_k_m() -> ModelShape:
    """The shape that its file describes."""
    return shape_of_header(llama_8b_header(), Path("Llama-3.1-8B-Q4_K_M.gguf"))
