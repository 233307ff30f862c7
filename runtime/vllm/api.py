"""The names of vLLM that the plugin derives from or calls.

Without vLLM they are stand-ins, so that the plugin's modules can be imported, checked and tested; only `register`
(ridgeplan.runtime.vllm) puts them to use, and it needs vLLM.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

INSTALLED = find_spec("vllm") is not None

if INSTALLED:
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.distributed.parallel_state import graph_capture
    from vllm.forward_context import get_forward_context, is_forward_context_available, set_forward_context
    from vllm.model_executor.layers.linear import (
        LinearBase,
        LinearMethodBase,
        UnquantizedLinearMethod,
        register_weight_loader_v2_supported_method,
    )
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadataBuilder,
        AttentionType,
    )
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
else:

    class Absent:
        """Stands in for a class of vLLM that the plugin derives from."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__()

    def absent(*arguments: Any, **named: Any) -> Any:
        """Stands in for a function of vLLM. Raises ModuleNotFoundError."""
        raise ModuleNotFoundError("vLLM is not installed", name="vllm")

    def is_forward_context_available() -> bool:
        """As of vLLM: there is no forward pass."""
        return False

    def register_weight_loader_v2_supported_method(cls: type) -> type:
        """As of vLLM, without its list of methods."""
        return cls

    class AttentionCGSupport:  # type: ignore[no-redef]
        """As of vLLM: the member that the plugin names."""

        UNIFORM_BATCH = 2

    class AttentionType:  # type: ignore[no-redef]
        """As of vLLM: the member that the plugin names."""

        DECODER = "decoder"

    AttentionBackend = AttentionImpl = AttentionMetadataBuilder = QuantizationConfig = Absent
    LinearBase = LinearMethodBase = UnquantizedLinearMethod = ParallelLMHead = UnquantizedEmbeddingMethod = Absent
    get_current_vllm_config = get_forward_context = set_forward_context = graph_capture = absent
    get_tensor_model_parallel_rank = get_tensor_model_parallel_world_size = absent
    flash_attn_varlen_func = get_flash_attn_version = merge_attn_states = absent
