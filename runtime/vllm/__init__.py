"""A vLLM plugin that carries a plan: 8- and 4-bit weights, the KV cache as codes, and drafts from the same weights.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). Nothing of vLLM is patched:
weights are a quantization method, the cache is an attention backend, and drafts are a proposer class. docs/vllm.md
describes what is carried.

Not here: the serve command (planner/export), and kernels (ridgeplan.kernels).
"""

from __future__ import annotations

import warnings
from importlib import metadata

METHOD = "ridgeplan"  # the name of the quantization method
BACKEND = "ridgeplan.runtime.vllm.attention.CodesBackend"
# Versions of vLLM whose interfaces tests compare the plugin with: for all of it, and for weights alone.
SUPPORTED, WEIGHTS_ONLY = ("0.24.",), ("0.33.",)


def supports(version: str) -> bool:
    """Whether all of the plugin runs with this version of vLLM."""
    return version.startswith(SUPPORTED)


def register() -> None:
    """Registers the quantization method and the attention backend with vLLM. Called again, it changes nothing.

    A version of vLLM whose interfaces moved gets weights alone, and one whose interfaces are not known nothing, with a
    warning: a server that does not use the plugin starts all the same.
    """
    version = metadata.version("vllm")
    if not version.startswith((*SUPPORTED, *WEIGHTS_ONLY)):
        known = ", ".join(f"{prefix}*" for prefix in (*SUPPORTED, *WEIGHTS_ONLY))
        warnings.warn(f"ridgeplan's plugin is not registered: vLLM is {version}; allowed: {known}", stacklevel=2)
        return
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from ridgeplan.runtime.vllm.weights import PlanWeights

    register_quantization_config(METHOD)(PlanWeights)
    if supports(version) and not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
