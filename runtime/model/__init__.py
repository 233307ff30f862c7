"""The decoder: checkpoints and weights, a decode step over the cache, and the prefill of a prompt.

Not here: the KV cache (runtime/kv), the quantization of weights (runtime/quantization).
"""
